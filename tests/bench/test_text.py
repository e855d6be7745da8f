"""Texts and token ids have the requested lengths by every counter."""

import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from jpaged.bench.source import COMMON, WORDS, TokenWriter, WordWriter, measured, write_jobs
from jpaged.bench.tokens import load_tokenizer
from jpaged.bench.workload import Lengths
from tests.support.models import byte_tokenizer

SHORT = [Lengths(n, 5) for n in range(2, 60)]


def counting(tokenizer: Tokenizer, added: int = 0):
    async def count(text):
        return len(tokenizer.encode(text).ids) + added

    return count


async def test_texts_have_exactly_the_length_where_words_are_tokens():
    class Words:
        def encode(self, text):
            return type("Encoding", (), {"ids": text.split()})

    writer = await measured(SimpleNamespace(count=counting(Words()), of_prompt=counting(Words(), added=3)))
    for each in SHORT:
        text = writer.write(random.Random(0), random.Random(0), each)
        assert len(text.split()) + 3 == max(4, each.prompt)  # at least one word
        assert text.startswith("the")


@pytest.mark.parametrize("tokenizer, wrong_by", [(load_tokenizer("demo"), 0), (byte_tokenizer(), 1)])
async def test_texts_for_real_tokenizers(tokenizer, wrong_by):
    """A letter and its space are the least that the byte tokenizer can have of words."""
    writer = await measured(SimpleNamespace(count=counting(tokenizer), of_prompt=counting(tokenizer)))
    for each in [*SHORT[4:], Lengths(300, 5)]:
        text = writer.write(random.Random(0), random.Random(each.prompt), each)
        assert abs(len(tokenizer.encode(text).ids) - each.prompt) <= wrong_by, text


def test_texts_share_their_prefix_and_nothing_else():
    lengths = [Lengths(8, 2, i % 2, 12) for i in range(6)]
    writer = WordWriter(dict.fromkeys(WORDS, 1), 1)
    texts = [job.content.split() for job in write_jobs(writer, lengths, "seed")]
    assert [len(text) for text in texts] == [20] * 6
    assert texts[0][:13] == texts[2][:13] != texts[1][:13]
    assert len({" ".join(text[13:]) for text in texts}) == 6


def test_token_ids_have_the_length_and_come_from_those_given():
    jobs = write_jobs(TokenWriter([5, 6, 7, 7, 9]), [Lengths(30, 2, 0, 12), Lengths(40, 3, 0, 12)], "seed")
    first, second = (job.content for job in jobs)
    assert len(first) == 42 and len(second) == 52 and first[:12] == second[:12] and first[12:20] != second[12:20]
    assert {*first, *second} == {5, 6, 7, 9} and [job.max_tokens for job in jobs] == [2, 3]


def test_the_seed_decides():
    writer = WordWriter(dict.fromkeys(WORDS, 1), 1)
    assert write_jobs(writer, SHORT, "a") == write_jobs(writer, SHORT, "a") != write_jobs(writer, SHORT, "b")


def test_no_word_is_there_twice():
    assert len(set(WORDS)) == len(WORDS) == len(COMMON.split())


def test_a_tokenizer_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=f"tokenizer: {tmp_path} has none that can be loaded"):
        load_tokenizer(str(tmp_path))

"""Texts of a given number of tokens.

A text is a series of common words with spaces between them; the first word is always the same. A tokenizer splits a
text at its spaces first, so a prompt has the tokens of a prompt of the first word, including those of a chat template,
and the tokens of the other words. Both are measured once, word by word; then texts of any length need no measurement.
"""

import asyncio
import random
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping

from jpaged.bench.workload import Job, Lengths

COMMON = """
a about after again all an and another any are as at away back be because been before big but by call came can come
could day did do down each end even every far few find first for form found from gave get give go good great had hand
hard has have he help her here high him his home house how if in into is it its just keep kind know land large last left
life light like line little live long look made make man many may me men might more most much must my name near need new
next no not now of off old on one only open or other our out over own part place play point put read right run said same
saw say school sea see seem set she should show side small so some sound still stop such take tell than that the their
them then there these they thing think this those three time to together too tree turn two under until up us use very
want was water way we well went were what when where which while who why will with word work world would year you your
"""
WORDS = tuple(COMMON.split())
FIRST = "the"
CONCURRENT_QUESTIONS = 16

Count = Callable[[str], Awaitable[int]]


class WordWriter:
    """Writer of texts.

    Args:
        costs: tokens of each word after another word.
        least: tokens of the prompt FIRST.
    """

    def __init__(self, costs: Mapping[str, int], least: int):
        self.least = least
        self._words = sorted(costs, key=lambda word: (costs[word], word))
        self._costs = [costs[word] for word in self._words]

    def write(self, common: random.Random, own: random.Random, each: Lengths) -> str:
        """Return a text whose prefix is drawn from `common`, and the rest from `own`."""
        prefix = self._draw(common, each.prefix_tokens)
        return " ".join([FIRST, *prefix, *self._draw(own, each.prompt - self.least)])

    def _draw(self, rng: random.Random, tokens: int) -> list[str]:
        """Return words of a number of tokens, or of a few less where no word is short enough."""
        words: list[str] = []
        while usable := bisect_right(self._costs, tokens):
            chosen = rng.randrange(usable)
            words.append(self._words[chosen])
            tokens -= self._costs[chosen]
        return words


class TokenWriter:
    """Writer of token ids, drawn from the given ones."""

    least = 1

    def __init__(self, token_ids: Iterable[int]):
        self._token_ids = sorted(set(token_ids))

    def write(self, common: random.Random, own: random.Random, each: Lengths) -> list[int]:
        """Return token ids whose prefix is drawn from `common`, and the rest from `own`."""
        return common.choices(self._token_ids, k=each.prefix_tokens) + own.choices(self._token_ids, k=each.prompt)


async def measured(count: Count, of_prompt: Count) -> WordWriter:
    """Return a writer with the measured number of tokens of each word.

    Args:
        count: return the tokens of a text.
        of_prompt: return the tokens of a text as a prompt.
    """
    limit = asyncio.Semaphore(CONCURRENT_QUESTIONS)

    async def ask(text: str) -> int:
        async with limit:
            return await count(text)

    base, *sums = await asyncio.gather(ask(FIRST), *(ask(f"{FIRST} {word}") for word in WORDS))
    return WordWriter({word: max(1, more - base) for word, more in zip(WORDS, sums)}, await of_prompt(FIRST))


def write_jobs(writer: WordWriter | TokenWriter, drawn: Iterable[Lengths], seed: str) -> list[Job]:
    """Return a job for each of the lengths. Another seed gives other texts of the same lengths."""
    own = random.Random(seed)
    return [Job(writer.write(random.Random(f"{seed}, prefix {each.prefix}"), own, each), each.output) for each in drawn]

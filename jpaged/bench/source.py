"""Sources of a run's requests: texts of drawn lengths, or a file.

A text is a series of common words with spaces between them; the first word is always the same. A tokenizer splits a
text at its spaces first, so a prompt has the tokens of a prompt of the first word, including those of a chat template,
and the tokens of the other words. Both are measured once, word by word; then texts of any length need no measurement.
"""

import asyncio
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from jpaged.bench.workload import Job, Lengths, Workload, fit

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


class Tokens(Protocol):
    """Token counter for one model."""

    async def ids(self, text: str) -> list[int] | None:
        """Return the text's token ids without a tokenizer's special tokens; None if tokens can only be counted."""

    async def count(self, text: str) -> int:
        """Return the number of tokens of `ids`."""

    async def of_prompt(self, content: Any) -> int:
        """Return the number of tokens of a prompt, with all additions of the server or the template."""


class JobSource(NamedTuple):
    """Source of jobs that all fit the model. `notes` are the changes that this needed."""

    jobs: Callable[[str], list[Job]]  # by the name of a run
    notes: list[str]


async def draw(workload: Workload, tokens: Tokens, room: int | None, token_ids: bool) -> JobSource:
    """Return the source of a drawn workload; prompt and output fit into `room` tokens.

    Every run has texts of its own, so that no prefix cache has them from an earlier run.
    """
    if not token_ids:
        writer: WordWriter | TokenWriter = await measured(tokens)
    elif (ids := await tokens.ids(" ".join(WORDS))) is not None:
        writer = TokenWriter(ids)
    else:
        raise ValueError("token_ids: the server has no /tokenize; name a tokenizer")
    lengths, shortened = fit(workload.lengths(), room, writer.least)
    notes = [f"{shortened} of {len(lengths)} requests were shortened to the model's {room} tokens"] if shortened else []
    return JobSource(lambda run: write_jobs(writer, lengths, f"{workload.seed}, {run}"), notes)


async def open_file(workload: Workload, tokens: Tokens, room: int | None) -> JobSource:
    """Return the source of a file, which has the same jobs in every run.

    The length of an output is the file's `max_tokens`, else the length of the file's answer, else `output_len`, as far
    as there is room.
    """
    jobs = workload.jobs()
    notes = [f"the file has {len(jobs)} requests only"] if len(jobs) < workload.num_prompts else []
    overhead = await tokens.of_prompt(FIRST) - await tokens.count(FIRST) if room else 0
    read, shortened = [], 0
    for job in jobs:
        output = job.max_tokens or (await tokens.count(job.answer) if job.answer else workload.output_len)
        left = room - await _length(job.content, tokens, overhead) if room else output
        shortened += left < output
        if left >= 1:
            read.append(replace(job, max_tokens=max(1, min(output, left))))
    if not read:
        raise ValueError(f"file: none of its {len(jobs)} requests fits into the model's {room} tokens")
    if shortened:
        too_long = f"{shortened} of {len(jobs)} requests were too long for the model's {room} tokens"
        notes.append(f"{too_long}: {len(jobs) - len(read)} left out, the others' outputs shortened")
    return JobSource(lambda run: read, notes)


async def _length(content: str | list[Any], tokens: Tokens, overhead: int) -> int:
    """Return the tokens of a prompt; for a conversation an upper bound, with `overhead` tokens for each message."""
    if isinstance(content, str):
        return await tokens.count(content) + overhead
    if isinstance(content[0], int):
        return len(content)
    return sum([await tokens.count(str(message.get("content"))) + overhead for message in content])


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


async def measured(tokens: Tokens) -> WordWriter:
    """Return a writer with the measured number of tokens of each word."""
    limit = asyncio.Semaphore(16)

    async def ask(text: str) -> int:
        async with limit:
            return await tokens.count(text)

    base, *sums = await asyncio.gather(ask(FIRST), *(ask(f"{FIRST} {word}") for word in WORDS))
    return WordWriter({word: max(1, more - base) for word, more in zip(WORDS, sums)}, await tokens.of_prompt(FIRST))


def write_jobs(writer: WordWriter | TokenWriter, drawn: Iterable[Lengths], seed: str) -> list[Job]:
    """Return a job for each of the lengths. Another seed gives other texts of the same lengths."""
    own = random.Random(seed)
    return [Job(writer.write(random.Random(f"{seed}, prefix {each.prefix}"), own, each), each.output) for each in drawn]

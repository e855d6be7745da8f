"""Sources of a run's requests: texts of drawn lengths, or a file."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from jpaged.bench.text import FIRST, WORDS, TokenWriter, WordWriter, measured, write_jobs
from jpaged.bench.workload import Job, Workload, fit


class Tokens(Protocol):
    """Token counter for one model."""

    async def ids(self, text: str) -> list[int] | None:
        """Return the text's token ids without a tokenizer's special tokens; None if tokens can only be counted."""

    async def count(self, text: str) -> int:
        """Return the number of tokens of `ids`."""

    async def of_prompt(self, content: Any) -> int:
        """Return the number of tokens of a prompt, with all additions of the server or the template."""


class JobSource(NamedTuple):
    """Source of jobs that all fit the model.

    Attributes:
        jobs: return the jobs of a run, given its name.
        notes: the changes that fitting the jobs needed.
    """

    jobs: Callable[[str], list[Job]]
    notes: list[str]


async def draw(workload: Workload, tokens: Tokens, room: int | None, token_ids: bool) -> JobSource:
    """Return the source of a drawn workload; prompt and output fit into `room` tokens.

    Every run has texts of its own, so that no prefix cache has them from an earlier run.
    """
    writer: WordWriter | TokenWriter
    if token_ids:
        ids = await tokens.ids(" ".join(WORDS))
        if ids is None:
            raise ValueError("token_ids: the server has no /tokenize; name a tokenizer")
        writer = TokenWriter(ids)
    else:
        writer = await measured(tokens.count, tokens.of_prompt)
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

"""Runners that the tests of this folder share, with the results of the requests alone."""

from typing import NamedTuple

import pytest
from tokenizers import Tokenizer

from jpaged.runtime.compilation_cache import compilation_cache
from jpaged.runtime.runner import ModelRunner
from tests.exact.asked import Asked, mixed
from tests.exact.cases import Case, runner_of
from tests.exact.schedules import Ran, Schedule, run


class Subject(NamedTuple):
    """A runner, requests, and their bits alone. `drafting` is the runner of a draft model, if there is one."""

    runner: ModelRunner
    tokenizer: Tokenizer
    asked: list[Asked]
    alone: list[tuple]
    drafting: ModelRunner | None = None

    def run(self, schedule: Schedule, asked: list[Asked] | None = None, *, together: bool = True) -> Ran:
        asked = self.asked if asked is None else asked
        return run(self.runner, self.tokenizer, asked, schedule, together=together, drafting=self.drafting)

    def differing(self, schedule: Schedule, times: int = 1) -> list[int]:
        """Return the numbers of the requests, each asked some times, that lack their bits alone under a schedule."""
        pairs = zip(self.run(schedule, times * self.asked).bits, times * self.alone, strict=True)
        return [i for i, (found, expected) in enumerate(pairs) if found != expected]


def subject_of(case: Case, directory, *, seqs: int, tokens: int) -> Subject:
    return subject_on(*runner_of(case, directory, seqs=seqs, tokens=tokens), 64, seqs=seqs, tokens=tokens)


def subject_on(runner: ModelRunner, tokenizer: Tokenizer, count: int, *, seqs: int, tokens: int) -> Subject:
    """Return the subject of so many requests on a runner."""
    asked = mixed(runner.vocab_size, count)
    with compilation_cache():  # all models have one sampler, which the run compiles once
        alone = run(runner, tokenizer, asked, Schedule(tokens, seqs, caches=False, overlaps=False), together=False)
    return Subject(runner, tokenizer, asked, alone.bits)


SMALL = {"seqs": 8, "tokens": 128}
FEW = 32  # requests


def small_subject(case: Case, directory, tokens: tuple[int, ...] = (1, 8, 128)) -> Subject:
    """Return a subject of the usual tier: few requests, and few shapes, of these numbers of tokens."""
    runner, tokenizer = runner_of(case, directory, **SMALL)
    runner.blocks.host.transfers = runner.blocks.host.transfers[:1]
    buckets = runner.shapes.buckets
    buckets.keep([bucket for bucket in buckets.all if bucket.num_seqs in (1, 8) and bucket.num_tokens in tokens])
    return subject_on(runner, tokenizer, FEW, **SMALL)


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Subject:
    return small_subject(Case("llama"), tmp_path_factory.mktemp("llama"), (1, 8, 64, 128))


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory) -> Subject:
    """A model with windows, whose layers form two groups."""
    return small_subject(Case("gemma3, shallow"), tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="session")
def qwen35(tmp_path_factory) -> Subject:
    """A model with recurrent layers."""
    return small_subject(Case("qwen3.5, shallow"), tmp_path_factory.mktemp("qwen3.5"))

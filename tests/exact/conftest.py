"""Runners that the tests of this folder share, with the results of the requests alone."""

from typing import NamedTuple

import pytest
from tokenizers import Tokenizer

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

    def run(self, schedule: Schedule, asked: list[Asked] | None = None) -> Ran:
        asked = self.asked if asked is None else asked
        return run(self.runner, self.tokenizer, asked, schedule, drafting=self.drafting)

    def differing(self, schedule: Schedule, times: int = 1) -> list[int]:
        """Return the numbers of the requests, each asked some times, that lack their bits alone under a schedule."""
        pairs = zip(self.run(schedule, times * self.asked).bits, times * self.alone, strict=True)
        return [i for i, (found, expected) in enumerate(pairs) if found != expected]


def subject_of(case: Case, directory, *, seqs: int, tokens: int) -> Subject:
    runner, tokenizer = runner_of(case, directory, seqs=seqs, tokens=tokens)
    asked = mixed(runner.vocab_size, 64)
    alone = run(runner, tokenizer, asked, Schedule(tokens, seqs, caches=False, overlaps=False), together=False)
    return Subject(runner, tokenizer, asked, alone.bits)


SMALL = {"seqs": 8, "tokens": 128}  # few shapes, among them one for decode steps of one and of several sequences


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Subject:
    return subject_of(Case("llama"), tmp_path_factory.mktemp("llama"), **SMALL)


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory) -> Subject:
    """A model with windows, whose layers form two groups."""
    return subject_of(Case("gemma3"), tmp_path_factory.mktemp("gemma3"), **SMALL)


@pytest.fixture(scope="session")
def qwen35(tmp_path_factory) -> Subject:
    """A model with recurrent layers."""
    return subject_of(Case("qwen3.5"), tmp_path_factory.mktemp("qwen3.5"), **SMALL)

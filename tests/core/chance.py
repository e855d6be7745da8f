"""Runs of everything that a schedule may do, driven by chance, with checks of every step, over the fake runner.

In a run, requests of a few kinds come again and again, in chunks, with prefix hits, forks, beams, drafts and
preemptions. Steps overlap. Requests are aborted, the prefix cache is reset and parameters are updated at any moment.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

from jpaged.core.commands import UpdateParams
from jpaged.core.params import BeamSearchParams, Params, SamplingParams
from jpaged.core.request import Request
from tests.core import traffic

EOS = frozenset([0])
EVENTS = ("add",) * 10 + ("schedule",) * 30 + ("commit",) * 26 + ("abort",) * 2 + ("reset", "update", "fail", "fail")


def _is_any(params: Params) -> bool:
    return True


def _branches(params: Params) -> bool:
    return isinstance(params, SamplingParams) and params.num_sequences > 1


def _is_beam(params: Params) -> bool:
    return isinstance(params, BeamSearchParams) and params.num_sequences > 1


def _may_repeat(params: Params) -> bool:
    """Whether an output has drafts, and is long enough for some."""
    return isinstance(params, SamplingParams) and params.max_tokens > 5


class World:
    """A scheduler and its runner, with the events of a run."""

    def __init__(self, seed: int):
        self.rng, mode, method = random.Random(seed), _mode(seed), _method(seed)
        rng, windows = self.rng, _windows(seed)
        self.scheduler, self.runner = traffic.make(
            rng.randint(8, 14) * len(windows), 2, seqs=4, tokens=rng.choice([4, 7, 12]), length=24,
            host=_host(seed) * len(windows), eos=EOS, preemption=mode, block_swap_cost=_swap_cost(seed),
            drafts=3 if method == "suffix" else rng.choice([0, 3]),
            method=method, exact=rng.random() < 0.3, windows=windows, pages=_pages(seed),
            files=_files(seed),
        )  # fmt: skip
        wanted = [_branches, _is_beam, _is_any, _is_any] if method == "ngram" else [_may_repeat, _may_repeat]
        self.kinds = [self._draw(is_wanted) for is_wanted in wanted]
        self.requests: list[Request] = []
        self.in_flight = deque()
        self.may_fail = method != "suffix"  # past outputs would be forgotten too often

    def _draw(self, is_wanted: Callable[[Params], bool]) -> tuple:
        while True:
            _, params, _ = kind = traffic.draw(self.rng, self.scheduler)
            if is_wanted(params):
                return kind

    def apply(self, event: str) -> None:
        rng, scheduler = self.rng, self.scheduler
        if event == "add":
            prompt, params, options = rng.choice(self.kinds)
            options |= {"cache_salt": rng.choice(["", "", "a"]), "seed": rng.randrange(2)}
            options["pin_s"] = (0, 0, 3, 20)[len(self.requests) % 4]
            self.requests.append(scheduler.add(str(len(self.requests)), prompt, params, **options))
        elif event == "schedule" and len(self.in_flight) < 2:
            scheduler.advance(len(self.requests))
            if self.runner.files and len(self.requests) % 5 == 0:
                self.runner.files.pop(next(iter(self.runner.files)))  # someone has deleted it
            traffic.fetch(scheduler, self.runner)
            plan = traffic.schedule(scheduler)
            if plan is not None:
                self.in_flight.append((plan, traffic.dispatch(scheduler, self.runner, plan)))
        elif event == "commit" and self.in_flight:
            plan, pending = self.in_flight.popleft()
            committed = scheduler.commit(plan, pending.result())
            assert not committed.faults, committed.faults
            traffic.assert_cache_is_true(scheduler, self.runner)
        elif event == "abort" and self.requests:
            scheduler.abort(rng.choice(self.requests).request_id)
        elif event == "reset":
            scheduler.pool.reset_prefix_cache()
            if scheduler.disk:
                scheduler.disk.clear()
            self.runner.version += 1
        elif event == "update":
            self.in_flight.clear()
            scheduler.recover()
            if scheduler.disk:
                scheduler.disk.clear()
            self.runner.control(UpdateParams(None))
        elif event == "fail" and self.may_fail:
            self.in_flight.clear()
            if scheduler.disk and len(self.requests) % 2:  # it is a planned restart
                self.runner.save_blocks(scheduler.disk.unsaved())
                self.runner.save(*scheduler.disk.take())
            scheduler.recover()
            self.runner.recover()
        scheduler.check_invariants()

    def finish(self) -> Counter[str]:
        while self.in_flight:
            self.apply("commit")
        traffic.drain(self.scheduler, self.runner)
        for request in self.requests:
            traffic.assert_as_alone(request, EOS)
        scheduler, tier = self.scheduler, self.scheduler.memory.tier
        return Counter(
            preemptions=scheduler.num_preemptions, swapped=scheduler.num_swapped_blocks, hits=scheduler.prefix_hits,
            copies=self.runner.num_copies, kept=scheduler.num_kept, dropped=scheduler.num_drafts - scheduler.num_kept,
            past=scheduler.num_from_past, evicted=tier.num_out if tier else 0, returned=tier.num_back if tier else 0,
            fetched=scheduler.disk.num_read if scheduler.disk else 0,
        )  # fmt: skip


def seeds(composition: str, count: int) -> list[int]:
    """Return the seeds below a count whose runs have the events of a composition."""
    fit: Sequence[int] = range(count)
    if "swap" in composition or "recompute" in composition:
        fit = [seed for seed in fit if _mode(seed) in composition or ("swap" in composition and _mode(seed) == "auto")]
    if "window" in composition or "groups" in composition:
        fit = [seed for seed in fit if len(_windows(seed)) > 1]
    if "disk" in composition:
        fit = [seed for seed in fit if _host(seed) and _files(seed)]
    if "tier" in composition:
        fit = [seed for seed in fit if _host(seed)]
    if "state" in composition:
        fit = [seed for seed in fit if _pages(seed)]
    return [seed for seed in fit if "past outputs" not in composition or _method(seed) == "suffix"]


def _mode(seed: int) -> str:
    return ("recompute", "swap", "auto")[seed % 3]


def _host(seed: int) -> int:
    """Return the number of blocks on the host for each group; without swaps, they are copies only."""
    if _mode(seed) == "recompute":
        return (0, 5, 30)[seed // 3 % 3]
    return 6 if _files(seed) > 12 else 12


def _files(seed: int) -> int:
    """Return the maximum number of files: two of three runs have some."""
    return (0, 200, 12)[seed // 3 % 3]


def _swap_cost(seed: int) -> float:
    """Return the cost of a block's moves: a block that returns costs less than its two tokens in most runs."""
    return (1.0, 0.5, 0.0)[seed // 2 % 3]


def _windows(seed: int) -> tuple[int | None, ...]:
    """Return the windows of the groups of layers: a third of the runs have some."""
    return (None,) if seed % 90 < 60 else ((None, 3), (2, None, 7), (5, 1))[seed // 6 % 3]


def _pages(seed: int) -> int:
    """Return the number of pages of states: half of the runs have recurrent layers."""
    return (0, 5, 12, 9, 0, 0)[seed // 6 % 6]


def _method(seed: int) -> str:
    """Return the source of drafts: past outputs, or an oracle in the place of n-grams."""
    return ("ngram", "suffix")[seed % 2]


def run(seed: int) -> Counter[str]:
    """Run a world to its end, and check everything; return counts of events."""
    world = World(seed)
    for event in world.rng.choices(EVENTS, k=150):
        world.apply(event)
    return world.finish()

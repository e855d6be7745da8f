"""Every order in which requests can come, be aborted, scheduled and committed and the cache be reset, on pools of a few
blocks: the whole graph of states, breadth first, so that a failure is shown in the fewest events.

    python -m tests.core.test_every_interleaving    larger pools and more requests, and how many states there were
"""

import itertools
import time
from collections import Counter, deque
from typing import NamedTuple

import pytest

from jpaged.core.block_pool import GONE
from jpaged.core.params import BeamSearchParams, GenerationParams, SamplingParams
from tests.core import traffic
from tests.core.planted import BUGS
from tests.support.fake_runner import digests, slot

pytestmark = pytest.mark.slow

Event = str | int  # a number aborts that request


# Each as long as the pool allows. The two that branch keep a state for it.
KINDS: dict[str, GenerationParams] = {
    "one": SamplingParams(max_tokens=None),
    "pair": SamplingParams(max_tokens=None, n=2, presence_penalty=1),
    "beam": BeamSearchParams(max_tokens=None, beam_width=2, presence_penalty=1),
    "told": SamplingParams(max_tokens=None, prompt_logprobs=0),
    "fork": SamplingParams(max_tokens=None, n=2),
}


class Scenario(NamedTuple):
    """Requests that come in this order, each with the first `length` tokens of a text as its prompt.

    Attributes:
        distinct: each request has a text of its own; otherwise all share one.
        policy: under "priority" each request goes before all that came earlier.
        depth: how many steps may be in flight.
        drafts: how many drafts a sequence may have in a step.
        method: where they come from, as in `traffic.make`.
        windows: of the groups of layers.
        pages: for states of recurrent layers.
    """

    blocks: int
    size: int
    mode: str
    requests: tuple[str, ...] = ("one", "pair", "beam")
    length: int = 2
    cache: bool = True
    distinct: bool = False
    policy: str = "fcfs"
    depth: int = 2
    drafts: int = 0
    method: str = "ngram"
    windows: tuple[int | None, ...] = (None,)
    pages: int = 0


MODES = "recompute", "swap"
WINDOWED = [
    (8, 1, "swap", ("one", "fork"), (None, 2)),
    (8, 1, "recompute", ("one", "fork"), (2, None)),
    (6, 2, "recompute", ("beam", "told"), (3, 1)),
    (12, 1, "swap", ("one", "fork"), (None, 1, 3)),
]
RECURRENT = [
    (6, 1, "recompute", ("one", "fork"), (None,), 4),
    (6, 1, "swap", ("one", "fork"), (None,), 5),
    (6, 2, "recompute", ("beam", "told"), (None,), 4),
    (8, 1, "swap", ("one", "fork"), (None, 2), 6),
]
WITH_STATES = [Scenario(*shape, windows=windows, pages=pages) for *shape, windows, pages in RECURRENT]
SMALL = [
    Scenario(4, 2, "recompute", ("one", "fork"), drafts=2),
    Scenario(4, 2, "swap", ("one", "fork"), drafts=2, method="draft_model"),
    *(Scenario(*shape) for shape in ((2, 1, "swap"), (2, 2, "swap"), (3, 1, "swap"))),
    *(Scenario(*shape) for shape in ((2, 2, "recompute"), (3, 1, "recompute"))),
    *(Scenario(*shape, windows=windows) for *shape, windows in WINDOWED),
    WITH_STATES[-1],
]
# Each mode, branches of every kind, drafts, windows and states.
USUAL = [
    Scenario(4, 2, "swap", ("one", "fork"), drafts=2, method="draft_model"),
    Scenario(2, 2, "recompute"),
    Scenario(3, 1, "swap"),
    Scenario(6, 2, "recompute", ("beam", "told"), windows=(3, 1)),
    WITH_STATES[-1],
]
MEDIUM = [
    Scenario(4, 2, "swap", ("one", "fork"), drafts=2),
    Scenario(3, 2, "swap"),
    Scenario(4, 1, "recompute"),
    *WITH_STATES[:-1],
    Scenario(4, 2, "swap", ("one", "fork"), drafts=2, pages=4),
]
DISTINCT = [
    Scenario(3, 2, "auto", distinct=True),
    Scenario(3, 2, "swap", distinct=True, policy="priority"),
]
LARGE = [
    *SMALL,
    *MEDIUM,
    *DISTINCT,
    Scenario(3, 2, "recompute", distinct=True, policy="priority"),
    *(Scenario(*shape) for shape in ((2, 1, "recompute"), (3, 2, "recompute"), (4, 1, "swap"))),
    *(Scenario(4, 2, mode) for mode in MODES),
    *(Scenario(4, 2, *rest, 3) for rest in itertools.product(MODES, itertools.permutations(KINDS, 3))),
    *(Scenario(3, 2, mode, tuple(KINDS)) for mode in MODES),
    Scenario(5, 2, "recompute"),
    Scenario(4, 2, "recompute", cache=False),
    *(Scenario(4, size, "auto", distinct=distinct) for size in (1, 2) for distinct in (False, True)),
    *(Scenario(4, 2, mode, distinct=distinct, policy="priority") for mode in MODES for distinct in (False, True)),
]


class World:
    """A scheduler and its runner, with their possible events."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.scheduler, self.runner = traffic.make(
            scenario.blocks, scenario.size, seqs=4, tokens=4, cache=scenario.cache,
            host=scenario.blocks * (scenario.mode != "recompute"), preemption=scenario.mode, policy=scenario.policy,
            drafts=scenario.drafts, method=scenario.method, windows=scenario.windows,
            pages=scenario.pages,
            block_swap_cost=1.0,  # "auto" swaps only if some block holds more than one token
        )  # fmt: skip
        self.requests = []
        self.in_flight = deque()

    def events(self) -> list[Event]:
        events: list[Event] = []
        if self.in_flight:
            events.append("commit")
        if len(self.in_flight) < self.scenario.depth and self.scheduler.requests:
            events.append("schedule")
        if len(self.requests) < len(self.scenario.requests):
            events.append("add")
        events += [i for i, request in enumerate(self.requests) if not request.finished]
        if self.scheduler.pool.tree.children:
            events.append("reset")
        return events

    def apply(self, event: Event) -> None:
        scheduler = self.scheduler
        if event == "add":
            number = len(self.requests)
            prompt, params = [1, 2, 3][: self.scenario.length], KINDS[self.scenario.requests[number]]
            prompt[0] += number * self.scenario.distinct
            priority = -number if self.scenario.policy == "priority" else 0
            self.requests.append(scheduler.add(str(number), prompt, params, seed=0, priority=priority))
        elif event == "schedule":
            plan = scheduler.schedule(traffic.of_model(scheduler))
            assert plan is not None or self.in_flight, "there is work, and none of it is scheduled"
            if plan is not None:
                self.in_flight.append((plan, self.runner.dispatch(plan)))
        elif event == "commit":
            plan, pending = self.in_flight.popleft()
            scheduler.commit(plan, pending.result())
        elif event == "reset":
            scheduler.pool.reset_prefix_cache()
            self.runner.version += 1
        else:
            scheduler.abort(str(event))

    def check(self) -> None:
        """Check every invariant, all blocks and states in use, swapped or cached, and ended requests."""
        scheduler, runner = self.scheduler, self.runner
        scheduler.check_invariants()
        for request in scheduler.requests.values():
            for sequence in request.live:
                memory = runner.memory if sequence.table.pool is scheduler.pool else runner.host
                text = digests(sequence.tokens[: sequence.num_computed_tokens])
                for group, first in enumerate(sequence.table.first):
                    for i in range(first * scheduler.pool.block_size, len(text)):
                        assert memory[slot(sequence.table, i, group)] == (text[i], group), "it is not what was written"
                states = runner.states if memory is runner.memory else runner.host_states
                for position, page in sequence.table.pages[-1:] if len(text) == sequence.num_computed_tokens else ():
                    found = states[page - sequence.table.pool.num_blocks]
                    assert found[0] == text[position - 1], "the state is that of another text"
        traffic.assert_cache_is_true(scheduler, runner)
        for request in self.requests:
            if request.finished:
                traffic.assert_as_alone(request)
        if not scheduler.has_work:
            traffic.assert_nothing_leaked(scheduler)

    def state(self) -> int:
        """The same for states that differ in names alone: of blocks, of nodes, of rows."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        names: dict[tuple, int] = {}

        def name(kind, thing):
            return names.setdefault((kind, thing), len(names))

        def of_sequence(request, sequence):
            kind = "block" if sequence.table.pool is pool else "host"
            row = None
            if sequence.row is not None and sequence.row in self.runner.rows:
                told = self.runner.rows[sequence.row]
                row = name("row", sequence.row), tuple(told.tokens), tuple(told.counted or ()), repr(told.verified)
            leader = sequence.leader and (request.sequences.index(sequence.leader[0]), sequence.leader[1])
            return (
                tuple(sequence.tokens), sequence.num_computed_tokens, sequence.finish_reason, leader, kind, row,
                tuple(tuple(i if i == GONE else name(kind, i) for i in ids) for ids in sequence.table.block_ids),
                tuple((position, name(kind, page)) for position, page in sequence.table.pages), sequence.known_until,
                tuple(name("node", n) for n in sequence.nodes),
                sequence.in_flight, sequence.pending, sequence.epoch == pool.epoch,
                sequence.drafter and sequence.drafter.rests_until,
            )  # fmt: skip

        def ended(request):
            return request.finished and not any(sequence.in_flight for sequence in request.sequences)

        requests = tuple(
            None if ended(request) else (
                request in scheduler.running, len(request.prompt_samples),
                request.beam and len(request.beam.hypotheses),
                tuple(of_sequence(request, sequence) for sequence in request.sequences),
            )
            for request in self.requests
        )  # fmt: skip
        in_flight = tuple(
            (
                tuple(
                    (s.request.request_id, s.index, r.start, r.num_tokens) for s, r in zip(step.sequences, step.rows)
                ),
                tuple((r.request_id, tuple(n for _, n in sequences)) for r, sequences in step.resumed.items()),
            )
            for step in scheduler._in_flight
        )
        told = scheduler.rows
        rows = (
            tuple((name("row", a), name("row", b)) for a, b in told._copies.items()),
            tuple((name("row", row), chosen.token) for row, chosen in told._chosen.items()), scheduler._must_drain,
        )  # fmt: skip
        free = [name("block", block.block_id) for each in (pool._free, pool._free_pages) for block in each]
        cache = []
        for kind, thing in list(names):
            if kind == "block" and (node := pool._blocks[thing].node) is not None:
                parent = node.parent if isinstance(node.parent, str) else name("node", node.parent)
                cache.append((names[kind, thing], name("node", node.number), parent, node.tokens))
        return hash((requests, in_flight, rows, tuple(free), tuple(cache)))


def explore(scenario: Scenario, ways: int = 1) -> int:
    """Checks every state that can be reached; returns how many there are. Goes on from the first `ways` in which one
    is reached, and compares them."""
    seen: Counter[int] = Counter()
    after: dict[tuple[int, Event], int] = {}
    paths: deque[tuple[int, tuple[Event, ...]]] = deque([(0, ())])
    while paths:
        before, path = paths.popleft()
        world = World(scenario)
        try:
            for event in path:
                world.apply(event)
            state = world.state()
            if path:
                assert after.setdefault((before, path[-1]), state) == state, "one state, two futures"
            seen[state] += 1
            if seen[state] > ways:
                continue
            world.check()
        except BaseException as error:
            error.add_note(f"after {path} of {scenario}")
            raise
        paths.extend((state, (*path, event)) for event in world.events())
    for state in seen:
        steps = 0
        while (following := _next(after, state)) is not None:
            state, steps = following, steps + 1
            assert steps <= len(seen), "a request that is left alone goes round in circles"
    return len(seen)


def _next(after: dict[tuple[int, Event], int], state: int) -> int | None:
    """Return the next state of an engine, which schedules as much as it can before it commits."""
    scheduled = after.get((state, "schedule"), state)
    return scheduled if scheduled != state else after.get((state, "commit"))


@pytest.mark.parametrize(
    ("scenarios", "least"),
    [
        pytest.param(USUAL, 1600, id="usual"),
        pytest.param(SMALL, 3500, id="small", marks=pytest.mark.deep),
        pytest.param(MEDIUM, 6000, id="medium", marks=pytest.mark.deep),
        pytest.param(DISTINCT, 5000, id="distinct", marks=pytest.mark.deep),
    ],
)
def test_in_whatever_order_things_happen_nothing_breaks(scenarios, least):
    counts = [explore(scenario) for scenario in scenarios]
    print(f"{sum(counts)} states of {len(scenarios)} scenarios")
    assert sum(counts) > least


@pytest.mark.parametrize("blocks", [3, pytest.param(4, marks=pytest.mark.deep)])
def test_what_counts_as_one_state_has_one_future(blocks):
    explore(Scenario(blocks, 1, "swap"), ways=2)


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS)
def test_it_finds_a_planted_bug(bug, monkeypatch):
    BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError):
        for scenario in (Scenario(2, 1, "swap"), DISTINCT[-1]):  # each bug shows in one of these
            explore(scenario)


if __name__ == "__main__":
    start, total = time.time(), 0
    for scenario in LARGE:
        total += (count := explore(scenario))
        print(f"{count:6} states: {scenario}")
    print(f"{total} states of {len(LARGE)} scenarios in {time.time() - start:.0f} s")

"""Sessions of agents have the stated shares, and evicted or pinned prefixes are found again in them."""

import itertools
import json

import pytest

from benchmarks.engine.agents import (
    CPU_POLICIES,
    HOST,
    POLICIES,
    POOL,
    PROMPT,
    Machine,
    above,
    long_session,
    parse,
    play,
)
from benchmarks.shared.sessions import Agents, SessionArrivals, ideal_hits, in_order, mean_prompt, separated
from jpaged.core.prefix_tree import common_length
from jpaged.simulator.engine import drive
from tests.benchmarks.test_benchmarks import run
from tests.simulator.constant import engine
from tests.support.few_shapes import few_shapes

SMALL = Agents().scaled(1 / 64).draw(20, 1.0)


def tokens(segments):
    return [(text, i) for text, count in segments for i in range(count)]


@pytest.mark.parametrize("seed", [0, 1])
def test_sessions_have_the_shares_of_public_traces(seed):
    sessions = Agents().draw(250, 1.5, seed)
    assert mean_prompt(sessions) == pytest.approx(PROMPT, rel=0.05)
    assert 0.37 <= ideal_hits(sessions) <= 0.64


def test_sessions_depend_on_the_seed_only():
    assert Agents().draw(50, 2.0, 7) == Agents().draw(50, 2.0, 7) != Agents().draw(50, 2.0, 8)
    faster = Agents().draw(50, 4.0, 7)
    assert [s.turns for s in faster] == [s.turns for s in Agents().draw(50, 2.0, 7)]
    assert faster[-1].arrival == pytest.approx(Agents().draw(50, 2.0, 7)[-1].arrival / 2)


def test_each_turn_repeats_the_turns_before_and_their_outputs():
    assert max(len(session.turns) for session in SMALL) > 3
    for session in SMALL:
        for turn in range(1, len(session.turns)):
            before = (*session.prompt(turn - 1), (session.answer(turn - 1), session.turns[turn - 1].output))
            assert session.prompt(turn)[:-1] == before
    for one, other in itertools.combinations(SMALL, 2):
        common = common_length(one.prompt(0), other.prompt(0))
        assert common == (one.kind == other.kind), "the system prompt, and nothing else"


def test_ideal_hits_equal_a_search_of_all_earlier_texts():
    earlier, hits, total = [], 0, 0
    for session in SMALL:
        for turn in range(len(session.turns)):
            prompt = tokens(session.prompt(turn))
            hits += max((common_length(prompt, text) for text in earlier), default=0)
            total += len(prompt)
            earlier.append([*prompt, *tokens([(session.answer(turn), session.turns[turn].output)])])
    assert ideal_hits(SMALL) == hits / total > 0.4


def test_simulator_with_a_large_pool_finds_the_ideal_hits():
    made = engine(20_000, tokens=2048, caching=True)
    served = drive(made, SessionArrivals(SMALL))
    assert len(served) == sum(len(session.turns) for session in SMALL)
    assert made.scheduler.prefix_hits / made.scheduler.prefix_queries == pytest.approx(ideal_hits(SMALL), abs=0.03)


def test_separated_prompts_have_the_same_lengths_and_nothing_in_common():
    prompts = separated(SMALL)
    assert ideal_hits(prompts) == 0 and mean_prompt(prompts) == mean_prompt(SMALL)
    made = engine(20_000, tokens=2048, caching=True)
    drive(made, SessionArrivals(prompts))
    assert made.scheduler.prefix_hits == 0


def test_turns_arrive_a_pause_after_the_end_and_pin_if_another_follows():
    session = next(session for session in SMALL if len(session.turns) > 2)
    source, now = SessionArrivals([session], pin_s=60.0), session.arrival
    for turn, each in enumerate(session.turns):
        assert source.next_arrival() == now
        (call,) = source.due(now)
        assert (call.prompt, call.output) == (session.prompt(turn), each.output)
        assert call.pin_s == (60.0 if session.continues(turn) else 0.0) and source.next_arrival() is None
        source.ended(call, now + 1.5)
        if session.continues(turn):
            now += 1.5 + session.turns[turn + 1].pause_s
    assert source.next_arrival() is None


def test_tenth_turn_comes_after_the_others():
    sessions = long_session(PROMPT, 461_004)
    assert sessions[0].num_prompt_tokens(9) == PROMPT
    assert in_order(sessions)[:9] == [(0, turn) for turn in range(9)] and in_order(sessions)[-1] == (0, 9)
    assert sum(session.num_prompt_tokens(0) for session in sessions[1:]) > 1.25 * 461_004


@pytest.mark.deep  # tests/engine/test_tiers.py has the tiers of an engine
def test_policies_find_an_evicted_prefix_on_a_cpu():
    args = parse(["--tiny"])
    with few_shapes():
        machine = Machine(args.model, args.num_blocks)
    machine.block_swap_cost = 0.1
    sessions = long_session(args.cpu_prompt, machine.pool_tokens)
    figures = {policy.name: play(machine.engine(policy), sessions, policy.pin_s, 1).figures for policy in POLICIES}
    assert figures["host"]["blocks_back"] > 0 == figures["pool"]["blocks_back"] == figures["pins"]["blocks_out"]
    assert all(each["hits"] > figures["pool"]["hits"] for name, each in figures.items() if name != POOL.name)
    few = (policy._replace(host=0.5) for policy in CPU_POLICIES[-2:])
    longer = long_session(args.cpu_prompt, 3 * machine.pool_tokens)  # so that the host forgets the session, too
    small, files = (machine.run(longer, policy).figures for policy in few)
    assert files["blocks_read"] > 0 and files["hits"] > small["hits"]
    cost = {policy: play(machine.engine(policy), separated(sessions), 0.0, 2).figures for policy in (POOL, HOST)}
    assert cost[POOL]["hits"] == cost[HOST]["hits"] == cost[HOST]["blocks_back"] == 0 < cost[HOST]["blocks_out"]


@pytest.mark.parametrize("ratio, least, expected", [(1.05, 1.03, ["CPU"]), (1.05, 1.01, []), (1.0, 1.03, [])])
def test_costs_above_the_limit_are_named(ratio, least, expected):
    row = {"experiment": "no repetition", "where": "CPU", "ratio": ratio, "least_ratio": least}
    assert above([{"experiment": "trace"}, row]) == expected


@pytest.mark.deep
def test_benchmark_writes_every_policy(tmp_path):
    done = run("engine/agents.py", "--tiny", "--out", str(tmp_path))
    assert done.returncode in (0, 1), done.stderr  # times of tiny shapes may be above the limit
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    for where, count, policies in (("CPU", 1, CPU_POLICIES), ("simulated", 2, POLICIES)):
        names = [row["policy"] for row in rows if row["experiment"] == "trace" and row["where"] == where]
        assert names == count * [policy.name for policy in policies]
    simulated = {row["policy"]: row["ttft_ms"] for row in rows if row["experiment"] == "turn 10"
                 and row["where"] == "simulated"}  # fmt: skip
    assert simulated["never evicted"] < simulated["host"] < simulated["pool"] / 2
    assert simulated["pins"] == pytest.approx(simulated["never evicted"], rel=0.01)
    assert "A smoke run" in (tmp_path / "report.md").read_text()

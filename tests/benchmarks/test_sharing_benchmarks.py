"""The benchmarks of sharing, preemption and beam search: correct counts, and tiny runs."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.paper import beam, preemption, sharing
from benchmarks.paper.sharing import Lab, RandomRunner, Usage, Watch, usage
from benchmarks.shared.timing import ratio, summarize
from jpaged.bench.workload import DATASETS, Dataset
from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine
from jpaged.simulator.engine import Candidates


@pytest.fixture(autouse=True)
def no_side_effects(monkeypatch):
    """The process is that of other tests: caches and environment stay as they are."""
    for module in (sharing, preemption, beam):
        monkeypatch.setattr(module, "prepare_environment", lambda: None)


def run(module, folder: Path, *args: str) -> dict:
    assert module.main(["--tiny", "--out", str(folder), *args]) == 0
    content = json.loads((folder / "results.json").read_text())
    environment = content["environment"]
    assert environment["platform"] == "cpu" and environment["tiny"] is True and environment["versions"]["jax"]
    assert content["rows"] and {row["status"] for row in content["rows"]} == {"ok"}
    assert "its times mean nothing" in (folder / "report.md").read_text()
    return content


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


# Sharing


def test_usage_by_hand():
    # Two branches of 9 and 6 tokens share a block of 4; each has written on in a copy of the second one.
    held = usage([([7, 3, 5], 9), ([7, 2], 6)], block_size=4)
    assert held == Usage(tokens=4 + 4 + 1 + 2, blocks=4, unshared=5)
    assert held.saving == pytest.approx(1 / 5) and held.utilization(4) == 11 / 16
    alone = usage([([0], 1), ([1, 2], 5)], block_size=4)
    assert alone.saving == 0 and alone.utilization(4) == 6 / 12
    # A branch that has just forked: the shared block is as full as the longer of the two has it.
    assert usage([([0], 3), ([0], 2)], block_size=4) == Usage(tokens=3, blocks=1, unshared=2)


def test_what_a_watch_sees_of_a_request_of_three():
    scheduler = Scheduler(BlockPool(12, 4), Limits(64, 4, 64), vocab_size=sharing.VOCAB)
    watch = Watch(scheduler, RandomRunner(), calm=2)
    engine = Engine(scheduler, watch)
    for name in "ab":  # b has no seats while a runs
        engine.add(name, [ord(name)] * 9, SamplingParams(n=3, max_tokens=3, ignore_eos=True))
    while engine.has_work:
        engine.step()
    # The prompt's three blocks; then three branches with a third block of their own; b runs unwatched.
    assert watch.usages == [Usage(9, 3, 3), Usage(8 + 3 * 2, 5, 9), Usage(8 + 3 * 3, 5, 9)]
    assert watch.running == [1, 3, 3]


def test_steps_count_only_under_load():
    scheduler = Scheduler(BlockPool(12, 4), Limits(64, 1, 64), vocab_size=sharing.VOCAB)
    watch = Watch(scheduler, RandomRunner(), calm=2)
    engine = Engine(scheduler, watch)
    for name in "abc":
        engine.add(name, [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert len(watch.usages) == 2, "b's two steps: before, more than two requests are left; after, none waits"


def test_beams_that_go_separate_ways_share_less(monkeypatch, tmp_path):
    """The saving is of the engine's own tables, not of the formula."""

    def saving(peaks):
        monkeypatch.setattr(Candidates, "PEAKS", peaks)
        report = sharing.Report(tmp_path / "r.json", {}, quiet=True)
        args = sharing.parse(["--tiny"])
        lab = Lab(report, args, RandomRunner(), pool_tokens=1600, most=(200, 200))
        row, _ = lab.run(lab.requests(DATASETS["Alpaca"], "beam", 4), 16)
        return row["saving"]

    merging, wandering = saving((1.0,)), saving((12.0,))
    assert 0.1 < wandering < merging < 3 / 4


def test_candidates_of_beams_are_distributions():
    scheduler = Scheduler(BlockPool(8, 16), Limits(64, 4, 64), vocab_size=sharing.VOCAB)
    scheduler.add("0", [1, 2], BeamSearchParams(beam_width=4, max_tokens=4), seed=0)
    plan, runner = scheduler.schedule(), RandomRunner()
    best = []
    for _ in range(100):
        (sample,) = runner.dispatch(plan).result().samples
        tokens, logprobs = sample.top_tokens, sample.top_logprobs
        assert len(set(tokens)) == 4 and all(0 <= token < sharing.VOCAB for token in tokens)
        assert list(logprobs) == sorted(logprobs, reverse=True)
        best.append(math.exp(logprobs[0]))
    assert 0.05 < min(best) < 0.2 and 0.9 < max(best) < 1


def test_lengths_have_the_means_of_the_paper():
    lengths = DATASETS["ShareGPT"].lengths(20_000, most=(10**6, 10**6))
    for mean, drawn in zip(DATASETS["ShareGPT"], zip(*lengths)):
        assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.05)
    cut = Dataset(10, 10).lengths(20_000, most=(20, 15))
    assert max(prompt for prompt, _ in cut) == 20 and max(output for _, output in cut) == 15
    assert [sum(each) / len(cut) for each in zip(*cut)] == pytest.approx([10, 10], rel=0.03), "means after the cut"


def test_at_least_96_percent_of_slots_hold_tokens(tmp_path):
    """The paper's figure (96.3 %): its pool and lengths, one output for each request, blocks of 16 tokens."""
    args = sharing.parse(["--turnovers", "2"])
    lab = Lab(sharing.Report(tmp_path / "r.json", {}, quiet=True), args, RandomRunner())
    requests = lab.requests(DATASETS["ShareGPT"], "parallel", 1)
    used = {block_size: lab.run(requests, block_size)[0] for block_size in (16, 128)}
    assert used[16]["utilization"] >= 0.96 > used[128]["utilization"] and used[16]["steps"] > 200


@pytest.mark.deep
def test_sharing(tmp_path):
    rows = run(sharing, tmp_path)["rows"]
    shared = {(r["kind"], r["dataset"], r["width"]): r["saving"] for r in rows if r["experiment"] == "sharing"}
    assert len(shared) == 2 * 2 * 3
    assert all(shared["beam", name, 4] > shared["parallel", name, 4] > 0 for name in DATASETS)
    prefix = {r["system_prompt"]: r for r in rows if r["experiment"] == "prefix"}
    assert prefix["5-shot"]["saving"] > prefix["1-shot"]["saving"] > 0.2 and prefix["5-shot"]["found"] > 0.5
    used = {(r["dataset"], r["block_size"]): r["utilization"] for r in rows if r["experiment"] == "utilization"}
    assert used["Alpaca", 16] < used["ShareGPT", 16] <= 1
    assert is_picture(tmp_path / "sharing.png") and is_picture(tmp_path / "utilization.png")


# Preemption and beam search


@pytest.mark.deep
def test_preemption(tmp_path, tiny):
    rows = run(preemption, tmp_path, "--model", str(tiny))["rows"]
    moved = {(r["operation"], r["block_size"]): r for r in rows if r["experiment"] == "preemption"}
    assert len(moved) == 4 * 2 and all(0 < r["ms_low"] <= r["ms"] <= r["ms_high"] for r in moved.values())
    assert moved["swap_out", 8]["blocks"] == 4 * moved["swap_out", 32]["blocks"]
    runs = {(r["mode"], r["block_size"]): r for r in rows if r["experiment"] == "normalised latency"}
    assert set(runs) == {(mode, size) for mode in ("recompute", "swap") for size in (8, 32)}
    assert all(r["preemptions"] > 0 and r["ms_per_token"] > 0 for r in runs.values())
    assert all((r["swapped_blocks"] > 0) == (mode == "swap") for (mode, _), r in runs.items())
    assert is_picture(tmp_path / "preemption.png")


@pytest.mark.deep
def test_beam(tmp_path, tiny):
    rows = run(beam, tmp_path, "--model", str(tiny))["rows"]
    assert [(row["experiment"], row["requests"]) for row in rows] == [("beam", 1), ("api", 1)]
    for row in rows:
        # One round: the median of one ratio is that of the medians.
        times = row["beam_ms"] / row["sampling_ms"]
        assert row["ratio"] == pytest.approx(times) and row["within"] == (times <= 1.3)
        for kind in ("sampling", "beam") if row["experiment"] == "beam" else ():
            assert 0 < row[f"{kind}_commit_ms"] < row[f"{kind}_runner_ms"], "a step is the device's before all"
    assert is_picture(tmp_path / "beam.png")


def test_a_stopwatch_leaves_nothing_behind():
    scheduler = Scheduler(BlockPool(8, 16), Limits(64, 4, 64), vocab_size=sharing.VOCAB)
    engine = Engine(scheduler, RandomRunner())
    engine.add("0", [1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    with beam.Stopwatch(engine) as watch:
        engine.step()
    seen = dict(watch.seconds)
    assert all(seconds > 0 for seconds in seen.values())
    engine.step()
    assert watch.seconds == seen and "schedule" not in vars(scheduler)


def test_a_ratio_is_between_neighbours():
    assert ratio(summarize([[2.6], [26.0]]), summarize([[2.0], [20.0]])) == pytest.approx(1.3)

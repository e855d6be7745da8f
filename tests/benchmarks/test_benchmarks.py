"""The benchmarks run on a CPU in tiny shapes, say so in their results, and time no wrong implementation."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.engine import scaling
from benchmarks.kernels import peers, tune
from benchmarks.kernels.bench import Bench, Poisoned
from benchmarks.kernels.expected import WrongOutput, check_output, check_rows
from benchmarks.kernels.implementations import NAMES, PagedTimed, Unsuitable
from benchmarks.kernels.workloads import (
    Shape,
    churned_tables,
    identity_tables,
    make_workload,
    num_sets,
    permuted_tables,
    set_blocks,
    uniform_lens,
    zipf_lens,
)
from benchmarks.shared.deadline import Deadline
from benchmarks.shared.device import Device
from benchmarks.shared.results import Report, table
from benchmarks.shared.timing import TINY, Effort, JaxTimed, measure, ratio, summarize
from pallas_kernels import paged_decode_attention, tuning

ROOT = Path(__file__).parents[2]
SHAPE = Shape(32, 16, num_heads=4, num_kv_heads=2, dtype="float32")
CPU = Device("cpu", "cpu", None, l2_bytes=2**14, memory_bytes=2**29)
XLA = {"implementation": "xla"}
ENVIRONMENT = {
    "device_kind": "cpu",
    "platform": "cpu",
    "tiny": True,
    "versions": {},
    "date": "2026-11-01",
    "commit": None,
}


def run(script: str, *args: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": "", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return subprocess.run(
        [sys.executable, f"benchmarks/{script}", *args], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip


def check_written(folder: Path) -> dict:
    content = json.loads((folder / "results.json").read_text())
    environment = content["environment"]
    assert environment["tiny"] is True and environment["platform"] == "cpu" and environment["device_kind"] == "cpu"
    assert environment["versions"]["jax"] == jax.__version__ and environment["date"] > "2026"
    assert {row["status"] for row in content["rows"]} <= {"ok", "skipped"}
    assert all(row.get("reason") for row in content["rows"] if row["status"] == "skipped")
    for row in content["rows"]:
        if row["status"] == "ok" and "us" in row:
            assert 0 < row["us_low"] <= row["us"] <= row["us_high"] and row["us_rounds"]
    text = (folder / "report.md").read_text()
    assert "its times mean nothing" in text and "| reference |" in text
    return content


def rows_of_kernels(folder: Path, *experiments: str) -> list[dict]:
    done = run("kernels/ops.py", "--tiny", "--out", str(folder), "--experiments", *experiments)
    assert done.returncode == 0, done.stderr
    return check_written(folder)["rows"]


@pytest.mark.deep
def test_kernels(tmp_path):
    rows = rows_of_kernels(tmp_path, "write", "splits")
    assert {"write", "splits", "ceilings", "peers"} <= {row["experiment"] for row in rows}
    assert {row["variant"] for row in rows if row["experiment"] == "write"} == {"reference", "reference rotated"}


@pytest.mark.deep
def test_paging_of_kernels(tmp_path):
    rows = rows_of_kernels(tmp_path, "paging", "write")
    assert (tmp_path / "paging.png").read_bytes().startswith(b"\x89PNG")
    wirings = {row["variant"].split()[1] for row in rows if row["experiment"] == "paging" and row["status"] == "ok"}
    assert wirings == {"identity", "permutation", "churned"}


@pytest.mark.deep
def test_the_parts_of_a_step_on_a_cpu_add_up(tmp_path):
    done = run("engine/cpu_step.py", "--tiny", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    *parts, step = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert step["part"] == "step" and step["step"] == "3 decodes behind 64 tokens, a chunk of 13"
    assert math.isclose(sum(part["ms"] for part in parts), step["ms"])
    floors = {part["part"]: part["floor_ms"] for part in parts}
    assert [name for name, floor in floors.items() if floor is None] == ["sampling", "host"]
    # One layer of 768 x (2 x 768 + 2 x 256 + 3 x 3072) parameters and 16 tokens; keys and values of 3 x 64 + 13 tokens,
    # and 3 x 64 + 13 x 14 / 2 pairs of a query and a key of 12 heads of 64.
    layer, keys, pairs = 768 * (2 * 768 + 2 * 256 + 3 * 3072) + 2 * 768, 3 * 64 + 13, 3 * 64 + 13 * 7
    floor = lambda num_bytes, flops: max(num_bytes / step["read_gb_s"], flops / step["gflop_s"]) / 1e6
    assert math.isclose(floors["layers without attention"], floor(4 * layer, 2 * 16 * (layer - 2 * 768)))
    assert math.isclose(floors["writes and attention"], floor(keys * 2 * 4 * 256, pairs * 4 * 12 * 64))
    assert "its times mean nothing" in (tmp_path / "report.md").read_text()


@pytest.mark.deep
def test_the_products_of_a_step_are_timed_for_each_kind_of_weights(tmp_path):
    done = run("engine/cpu_products.py", "--layers", "1", "--rounds", "1", "--rows", "1", "9", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    ways = {row["way"] for row in rows}
    assert {"float32", "bfloat16 in float32", "int8", "4 bits in groups of 32"} <= ways
    assert len(rows) == 2 * len(ways)
    # Bytes follow from a rate and a time: one layer and the logits.
    sizes = {row["way"]: row["gb_s"] * row["ms"] for row in rows}
    numbers = 576 * (2 * 576 + 2 * 192 + 3 * 1536 + 49152)
    assert math.isclose(sizes["float32"], 4 * numbers / 1e6)
    assert math.isclose(sizes["4 bits in groups of 32"], (0.5 + 4 / 32) * numbers / 1e6)


@pytest.mark.deep
def test_the_bytes_of_a_decode_step_follow_from_the_kinds_of_weights(tmp_path):
    done = run("engine/cpu_bytes.py", "--tiny", "--rounds", "1", "--kinds", "bfloat16", "int4", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    sizes = {kind: {row["part"]: row["mb"] for row in rows if row["kind"] == kind} for kind in ("bfloat16", "int4")}
    # One layer of 256 x (2 x 256 + 2 x 128 + 3 x 512) weights with two norms, and an embedding of 512 rows of 256.
    weights, norms, vocabulary = 256 * (2 * 256 + 2 * 128 + 3 * 512), 2 * 2 * 256, 2 * 512 * 256
    for kind, bits in (("bfloat16", 16), ("int4", 5)):
        assert math.isclose(sizes[kind]["layers without attention"], (weights * bits / 8 + norms) / 1e6)
        assert math.isclose(sizes[kind]["logits"], vocabulary / 1e6)
        assert math.isclose(sizes[kind]["step"], sum(mb for part, mb in sizes[kind].items() if part != "step"))


@pytest.mark.deep
def test_every_implementation_of_recurrent_layers_is_timed(tmp_path):
    done = run("kernels/recurrence.py", "--tiny", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 3 and {row["variant"] for row in rows} == {"pages once", "kernel", "reference"}
    assert all(0 < row["us_low"] <= row["us"] <= row["us_high"] for row in rows)
    assert "its times mean nothing" in (tmp_path / "report.md").read_text()


@pytest.mark.deep
def test_sampling_is_timed_for_each_kind_of_request(tmp_path):
    done = run("engine/sampling.py", "--tiny", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert len(rows) == len({row["kind"] for row in rows}) == 6
    assert all(math.isclose(row["ratio"], row["kernels_us"] / row["definitions_us"]) for row in rows)


@pytest.mark.deep
def test_grouped_experts_are_computed_as_routed(tmp_path):
    done = run("engine/experts.py", "--tiny", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for row in json.loads((tmp_path / "results.json").read_text())["rows"]:
        assert math.isclose(row["grouped_gflop"], 2 * row["tokens"] * 2 * 3 * 64 * 64 / 1e9)
        assert (row["dense_gflop"] > 3.9 * row["grouped_gflop"] and row["ratio"] is None) or row["ratio"] > 0
        assert math.isclose(row["grouped_mb"] * 4, row["dense_mb"] * row["experts_read"])
        assert row["experts_read"] == (2 if row["tokens"] == 1 else 4)


def test_the_cost_of_a_shared_step_follows_from_bytes_products_and_reductions():
    small, large = (scaling.Shared(model, 1) for model in scaling.MODELS.values())
    assert (round(small.parameters / 1e6), round(large.parameters / 1e6)) == (8030, 70552)  # of the models' cards
    assert small.kv_bytes == 131072 and scaling.Shared(scaling.MODELS["Llama-3.1-8B"], 16).kv_bytes == 16384
    assert large.room == 0, "its weights take 141 GB"
    four = scaling.Shared(scaling.MODELS["Llama-3.1-8B"], 4).step(64, 10.0)
    sent = 64 * 4096 * 2 * 2 * 3 / 4 / 450e9
    assert math.isclose(four["reductions_ms"], 65 * (0.01 + 1e3 * sent))
    assert math.isclose(four["kv_ms"], 1e3 * 64 * 1024 * 131072 / 4 / 4.8e12)
    assert math.isclose(four["step_ms"], four["weights_ms"] + four["kv_ms"] + four["reductions_ms"])
    assert scaling.smallest(scaling.MODELS["Llama-3.1-70B"]).size == 2
    measured = scaling.router()
    assert 50 < measured["bytes_per_prefix"] < 500 and measured["choice_us"] > 0


# Timing


class Fake:
    """Takes `cost` fake seconds per call, and logs its name."""

    calls = 2

    def __init__(self, name, costs, log):
        self.name, self.costs, self.log = name, itertools.cycle(costs), log

    def seconds(self, reps):
        self.log.append(self.name)
        return next(self.costs)


def test_rounds_are_interleaved():
    log = []
    timed = {"a": Fake("a", [1.0], log), "b": Fake("b", [2.0], log)}
    timings = measure(timed, Effort(rounds=3, samples=2, min_seconds=0))
    assert log == ["a", "a", "b", "b"] + ["a", "a", "b", "b"] * 3  # the first four warm up
    assert timings["a"].median == 1.0 and timings["b"].rounds == (2.0, 2.0, 2.0)
    assert ratio(timings["b"], timings["a"]) == 2.0


def test_a_ratio_survives_a_drift_of_the_device():
    a, b = summarize([[1, 1], [10, 10], [4, 4]]), summarize([[2, 2], [20, 20], [8, 8]])
    assert ratio(b, a) == 2.0
    assert summarize([[3, 1], [2, 9, 5]])[:3] == (3, 2, 5)


def test_seconds_are_per_call():
    ticks = iter([10.0, 16.0])
    timed = JaxTimed(
        lambda carry, shared, own: carry + own, np.float32(0), (), [1.0, 2.0, 3.0], clock=lambda: next(ticks)
    )
    assert timed.seconds(2) == 1.0  # 6 seconds, twice three calls
    assert timed._carry == 12.0, "each call is fed by the one before"
    assert timed.output(1) == 2.0


@pytest.mark.deep
def test_a_wrong_output_is_caught_before_it_is_timed(tmp_path):
    workload = make_workload(SHAPE, [40, 7], l2_bytes=2**14)

    def short(q, k_pool, v_pool, tables, lens, **options):
        return paged_decode_attention(q, k_pool, v_pool, tables, lens - 1, **options)

    report = Report(tmp_path / "results.json", ENVIRONMENT, quiet=True)
    bench = Bench(CPU, report, True, TINY, Deadline(60))
    log = []
    right = PagedTimed(paged_decode_attention, workload)
    wrong = PagedTimed(short, workload)
    wrong.seconds = lambda reps: log.append("timed")
    timings, notes = bench.compare({"experiment": "decode"}, workload, {"right": lambda: right, "wrong": lambda: wrong})
    assert list(timings) == ["right"] and notes["right"]["error"] < 1e-5 and not log
    assert [(row["variant"], row["status"]) for row in report.rows] == [("wrong", "wrong")]
    table_of_another = workload.rewired(identity_tables(workload.lens, SHAPE, workload.blocks_per_set, 0))
    with pytest.raises(WrongOutput):
        check_output(right.output(0), table_of_another)


def test_fault_that_leaves_no_device_ends_the_process_and_another_one_does_not(tmp_path):
    def prepare():
        raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")

    def gone():
        raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED again")

    workload = make_workload(SHAPE, [3], l2_bytes=1)
    report = Report(tmp_path / "results.json", ENVIRONMENT, quiet=True)
    bench = Bench(CPU, report, True, TINY, Deadline(60))
    assert bench.compare({"experiment": "decode"}, workload, {"a": prepare, "b": prepare}) == ({}, {})
    bench.probe = gone
    with pytest.raises(Poisoned):
        bench.compare({"experiment": "decode"}, workload, {"c": prepare, "d": prepare})
    assert [(row["variant"], row["status"]) for row in report.rows] == [(each, "failed") for each in "abc"]


def test_cases_after_the_deadline_are_left_out(tmp_path):
    bench = Bench(CPU, Report(tmp_path / "results.json", ENVIRONMENT, quiet=True), True, TINY, Deadline(60))
    assert not bench.leaves_out(batch=2) and not bench.report.rows
    bench.deadline = Deadline(-1)
    assert bench.leaves_out(batch=2) and bench.report.rows == [dict(batch=2, status="skipped", reason="time")]


def test_nan_and_zeros_are_wrong():
    expected = np.ones((2, 3, 4))
    assert check_rows(expected * 1.001, expected, "bfloat16") == pytest.approx(0.001)
    for bad in (np.zeros_like(expected), np.full_like(expected, np.nan), expected * 1.1):
        with pytest.raises(WrongOutput):
            check_rows(bad, expected, "bfloat16")


# Workloads


def test_zipf_lengths_are_skewed():
    lens = zipf_lens(64, 6400)
    assert sorted(lens, reverse=True)[:4] == [6400, 3200, 2133, 1600] and min(lens) == 100
    assert lens != sorted(lens, reverse=True) and lens == zipf_lens(64, 6400)
    assert uniform_lens(3, 5) == [5, 5, 5] and min(zipf_lens(10, 2)) == 1


@pytest.mark.parametrize("make", [identity_tables, permuted_tables, churned_tables])
def test_tables_hold_distinct_blocks(make):
    lens = [160, 1, 33, 480, 16] * 4
    count = set_blocks(lens, SHAPE)
    tables = make(lens, SHAPE, count)
    assert [len(table) for table in tables] == [10, 1, 3, 30, 1] * 4
    blocks = [block for table in tables for block in table]
    assert len(set(blocks)) == len(blocks) and min(blocks) >= 0 and max(blocks) < count
    steps = np.concatenate([np.diff(table) for table in tables])
    if make is identity_tables:
        assert blocks == list(range(len(blocks)))
    else:
        assert (steps == 1).mean() < 0.5


def test_sets_share_no_block_and_are_read_in_turn():
    workload = make_workload(SHAPE, [40, 7], l2_bytes=2**14)
    assert workload.sets == num_sets(47 * SHAPE.token_bytes, 2**14) > 1
    seen = [set(np.asarray(table)[[0, 0, 0, 1], [0, 1, 2, 0]].tolist()) for table in workload.set_tables]
    assert sum(map(len, seen)) == len(set.union(*seen)) and max(set.union(*seen)) < workload.k_pool.shape[0]
    assert workload.calls >= 8 and workload.calls % workload.sets == 0
    assert workload.rotated_bytes >= 8 * 2**14
    assert workload.bytes == 47 * 2 * 2 * 32 * 4 + 2 * 2 * 4 * 32 * 4
    assert make_workload(SHAPE, [3], q_lens=[3], l2_bytes=1).flops == 4 * 4 * 32 * (1 + 2 + 3)


# Peers


@pytest.mark.deep
def test_jax_peers_are_given_the_same_numbers(monkeypatch):
    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *args, **kwargs: attention(*args, **kwargs | XLA))
    monkeypatch.setattr(peers, "MAX_DENSE_BYTES", 100_000)  # room for fewer sets than the workload has
    for lens, q_lens in (([40, 7], None), ([24, 24], [24, 24])):
        workload = make_workload(SHAPE, lens, q_lens=q_lens, l2_bytes=2**14)
        timed = peers.JaxCudnn().prepare(workload)
        assert timed.sets < workload.sets and timed.calls >= workload.calls
        check_output(timed.output(timed.sets - 1), workload, timed.sets - 1)
    with pytest.raises(Unsuitable, match="equal lengths"):
        peers.JaxCudnn().prepare(make_workload(SHAPE, [9, 5], q_lens=[9, 5], l2_bytes=1))


@pytest.mark.deep
def test_jaxs_own_paged_attention_is_given_the_same_numbers(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention as module
    monkeypatch.setattr(module, "paged_attention", partial(module.paged_attention, interpret=True))
    workload = make_workload(SHAPE, [40, 7], l2_bytes=2**10)
    check_output(peers.JaxPaged().prepare(workload).output(0), workload)


def test_peers_say_why_they_are_not_there():
    assert {peer.available(CPU) for peer in peers.ALL} == {"needs an NVIDIA GPU"}
    gpu = dataclasses.replace(CPU, platform="gpu")
    assert "can't be imported" in str(peers.FlashInfer("flashinfer", "decode").available(gpu))


# Tuning


@pytest.mark.deep
def test_the_fastest_right_configuration_wins(tmp_path):
    workload = make_workload(SHAPE, [40], l2_bytes=2**14)
    default, fast, wrong, broken = (tuning.MosaicDecode(tile=tile) for tile in (64, 32, 16, 8))
    built = []

    def build(tiles, workload):
        built.append(tiles)
        if tiles == broken:
            raise ValueError("does not compile")
        timed = PagedTimed(paged_decode_attention, workload)
        timed.seconds = lambda reps: {default: 2.0, fast: 1.0, wrong: 0.1}[tiles]
        if tiles == wrong:
            timed.output = lambda index: np.zeros(workload.q.shape)
        return timed

    def search():
        return tune.search(
            "mosaic.decode", default, [broken, wrong, fast], [workload], build, journal=tune.Journal(tmp_path / "j"),
            prefix="cpu", effort=TINY, deadline=Deadline(60), margin=0.01,
            report=Report(tmp_path / "r.json", ENVIRONMENT, quiet=True),
        )  # fmt: skip

    assert search() == (fast, 1e6, pytest.approx(0.5))
    built.clear()
    assert search()[0] == fast
    assert built == [default, fast], "the journal knows the others"


def test_candidate_that_leaves_no_device_ends_the_search_and_is_not_tried_again(tmp_path, monkeypatch):
    def fault():
        raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")

    journal = tune.Journal(tmp_path / "j")
    assert journal.run("wrong tiles", fault)[0] is None
    monkeypatch.setattr(tune, "probe_device", fault)
    with pytest.raises(Poisoned):
        journal.run("faulty tiles", fault)
    again = tune.Journal(tmp_path / "j")
    assert "LAUNCH_FAILED" in again.run("faulty tiles", lambda: 1.0)[1] and again.run("others", lambda: 1.0)[0] == 1.0


def test_tuned_rows_are_what_tuning_reads(tmp_path, monkeypatch):
    row = tune.tuned_row("mosaic.decode", CPU, 64, "16 bit", tuning.MosaicDecode(tile=128), 12.3456)
    rows = tune.merge([row | {"us": 1.0}, row | {"head_dim": 128}], row)
    assert [(r["head_dim"], r["us"]) for r in rows] == [(64, 12.35), (128, 12.35)]
    assert tune.merge(rows, row, keep=False) == rows[1:]
    (tmp_path / "tuned.json").write_text(json.dumps(rows))
    monkeypatch.setattr(tuning.resources, "files", lambda package: tmp_path)
    tuning._tuned.cache_clear()
    try:
        assert tuning.find("mosaic.decode", "cpu", 64, "bfloat16") == tuning.MosaicDecode(tile=128)
    finally:
        tuning._tuned.cache_clear()


def test_tables_leave_out_empty_columns():
    assert table([{"a": 1, "b": None}, {"a": 2.5}], ("a", "b")) == "| a |\n| --- |\n| 1 |\n| 2.5 |"
    assert NAMES == ("mosaic", "triton", "reference")

"""The GPU suite on a CPU: a fault costs one cell, results are on disk at once, wrong kernels are found."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu_suite
from benchmarks.engine import slices
from benchmarks.engine.trace import Event, gaps
from benchmarks.kernels.published import published
from benchmarks.shared.results import with_floor
from benchmarks.suite import cells, demo, measured
from benchmarks.suite.process import Process
from tests.support.patience import until

ROOT = Path(__file__).parents[2]
MODULE = "tests.benchmarks.test_gpu_suite"


def suite_of(folder: Path, *flags: str) -> gpu_suite.Suite:
    return gpu_suite.Suite(gpu_suite.parse(["--tiny", "--out", str(folder), *flags]))


def cell(function: str, name: str = "", **fields) -> cells.Cell:
    fields = dict(alone=False, silence_s=600.0) | fields
    return cells.Cell("model", name or function, f"{MODULE}:{function}", {}, **fields)


def rows_of(folder: Path, experiment: str) -> list[dict]:
    return [row for row in json.loads((folder / "results.json").read_text())["rows"] if row["experiment"] == experiment]


def wait_for_the_end_of(pid: int) -> None:
    """The parent of a process may leave it as a zombie."""
    status = Path(f"/proc/{pid}/stat")
    until(lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z")


# Functions of cells


def aborts(options, send, device):
    print("about to abort", file=sys.stderr, flush=True)
    os.abort()


def hangs(options, send, device):
    child = subprocess.Popen(["sleep", "1000"])
    send("row", dict(experiment="pids", status="ok", pid=os.getpid(), child=child.pid))
    time.sleep(1000)


def works(options, send, device):
    send("row", dict(experiment="works", status="ok", preallocates=os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]))


def wrong_decode(options, send, device):
    """A model cell whose decode attention leaves out the last token of each context."""
    choose, (first, *_) = slices.choose, cells.cells("model", tiny=True)

    def faulty(name, *args):
        kernels = choose(name, *args)
        attend = kernels.implementation.paged_decode_attention

        def shorter(q, contexts, options):
            return attend(q, contexts._replace(context_lens_s=jnp.maximum(contexts.context_lens_s - 1, 0)), options)

        implementation = kernels.implementation._replace(paged_decode_attention=shorter)
        return kernels if name == "reference" else dataclasses.replace(kernels, implementation=implementation)

    slices.choose = faulty
    measured.run(options | dict(first.options), send, device)


class Hanging(Process):
    """The process of a cell, whose silence counts once it hangs."""

    def poll(self):
        if '"pids"' not in self._messages.read_text():
            self._heard = time.monotonic()
        return super().poll()


@pytest.mark.deep
def test_bad_cells_cost_only_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "AT_ONCE", 4)
    monkeypatch.setattr(gpu_suite, "Process", Hanging)
    bad = [cell("wrong_decode"), cell("hangs", silence_s=2.0), cell("aborts")]
    assert suite_of(tmp_path).run([*bad, cell("works")]) == 1
    rows = {row["cell"]: row for row in rows_of(tmp_path, "cells")}
    assert {name: row["status"] for name, row in rows.items()} == {
        "hangs": "killed", "aborts": "failed", "wrong_decode": "wrong", "works": "ok",
    }  # fmt: skip
    assert "sent nothing for 2 s" in rows["hangs"]["reason"] and "exit status -6" in rows["aborts"]["reason"]
    assert "about to abort" in rows["aborts"]["text"] and "about to abort" in (tmp_path / "report.md").read_text()
    (wrong,) = rows_of(tmp_path, "model")
    assert wrong["status"] == "wrong" and wrong["error"] > 0.01 and "8 sequences, 8 tokens" in wrong["reason"]
    assert [row["preallocates"] for row in rows_of(tmp_path, "works")] == ["false"]
    (pids,) = rows_of(tmp_path, "pids")
    wait_for_the_end_of(pids["child"])


@pytest.mark.deep
def test_results_are_whole_when_the_suite_is_killed(tmp_path):
    code = f"from {MODULE} import *; suite_of(Path({str(tmp_path)!r})).run([cell('works'), cell('hangs', alone=True)])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert any("experiment=pids" in line for line in process.stdout), process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    assert [row["status"] for row in rows_of(tmp_path, "works") + rows_of(tmp_path, "cells")] == ["ok", "ok"]
    wait_for_the_end_of(rows_of(tmp_path, "pids")[0]["pid"])


@pytest.mark.deep
def test_tiny_run_has_every_part(tmp_path):
    environment = os.environ | {"PYTHONPATH": "", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_suite.py", "--tiny", "--all", "--out", str(tmp_path)], cwd=ROOT,
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "results.json").read_text())
    ended = rows_of(tmp_path, "cells")
    names = [(each.part, each.name) for part in cells.PARTS for each in cells.cells(part, tiny=True)]
    assert sorted((row["part"], row["cell"]) for row in ended) == sorted(names)
    assert all(row["status"] == "ok" or "can't be imported" in row["reason"] for row in ended)
    ok = {row["experiment"]: row for row in content["rows"] if row["status"] == "ok"}
    parts = {
        "model",
        "ceilings",
        "product",
        "decode",
        "prefill",
        "mixed",
        "step",
        "demo",
        "correctness",
        "write",
        "paging",
    }
    assert parts | {"tuning", "throughput"} <= ok.keys()
    assert {row["model"] for row in rows_of(tmp_path, "model")} == cells.MODELS.keys()
    assert {row["what"]: row["equal_tokens"] for row in rows_of(tmp_path, "demo")} == dict.fromkeys(
        ("on a CPU", "offline", "over HTTP"), demo.TOKENS * len(demo.PROMPTS)
    )
    assert ok["step"]["floor_ms"] > 0 and ok["gap"]["gap_us"] >= 0 and ok["decode"]["of_read_ceiling"] > 0
    environment, report = content["environment"], (tmp_path / "report.md").read_text()
    assert (
        environment["tiny"] and environment["platform"] == "cpu" and environment["versions"]["jax"] == jax.__version__
    )
    assert "its times mean nothing" in report and (tmp_path / "decode.png").exists()


def test_suite_without_a_gpu_says_so(tmp_path):
    with pytest.raises(SystemExit, match="jax sees no GPU here"):
        gpu_suite.main(["--out", str(tmp_path), "--parts", "ceilings"])


def test_cells_load_with_little_besides_jax():
    missing = ["pydantic", "aiohttp", "llguidance", "prometheus_client", "matplotlib", "orbax"]
    code = f"import sys; sys.modules.update(dict.fromkeys({missing}))"
    code += "; import benchmarks.gpu_suite as suite; assert 'jax' not in sys.modules"
    code += "; from benchmarks.suite.worker import load"
    code += "; [load(f) for p in suite.PARTS for c in suite.cells(p, False)"
    code += "   for f in (c.function, c.options.get('experiment', c.function))]; import jpaged.llm"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_cells_without_time_or_packages_are_skipped_with_a_reason(tmp_path):
    suite = suite_of(tmp_path)
    assert suite.run([cell("works", needs=("no_such_package", "json"))]) == 0
    suite = suite_of(tmp_path / "late", "--budget", "15")
    assert suite.run([cell("works")]) == 0
    (missing,), (late,) = rows_of(tmp_path, "cells"), rows_of(tmp_path / "late", "cells")
    assert missing["status"] == late["status"] == "skipped"
    assert missing["reason"] == "no_such_package can't be imported" and late["reason"] == "the suite's time was up"


def test_running_cell_is_stopped_at_the_end_of_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "MIN_SECONDS", 0)
    assert suite_of(tmp_path, "--budget", "10.5").run([cell("hangs"), cell("works", alone=True)]) == 0
    assert [row["status"] for row in rows_of(tmp_path, "cells")] == ["skipped", "skipped"]


def test_parts_run_in_the_order_of_importance():
    parts = lambda *flags: gpu_suite.parse(flags).parts
    assert parts() == cells.FIRST == cells.PARTS[:8] and parts("--all") == cells.PARTS
    first = list(cells.cells("model", tiny=False))
    assert [each.options["implementations"][0] for each in first] == ["mosaic"] * 10 + ["triton"] * 2
    assert not any(each.alone for each in first) and all(each.alone for each in cells.cells("step", tiny=False))
    with pytest.raises(SystemExit):
        parts("--parts", "paging")


def test_red_model_runs_once_more_under_the_checker(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite.shutil, "which", lambda name, path: f"/cuda/{name}")
    suite, red = suite_of(tmp_path), cell("aborts")
    end = dict(reason="why", seconds=1.0, text="")
    (again,) = suite._end(red, end | dict(status="failed"))
    assert again.command == ("/cuda/compute-sanitizer", "--tool", "memcheck") and again.limit_s == 60
    (hung,) = suite._end(red, end | dict(status="killed"))
    assert hung.command[-1] == "synccheck"
    assert suite._end(again, end | dict(status="killed")) == [] == suite._end(red, end | dict(status="ok"))


# Comparisons and figures


def test_plans_continue_prompts_beside_decodes_and_end_with_padded_batches():
    prompts, chunk, batches = slices.PROMPTS
    found = list(slices.plans(prompts, chunk, batches, [(0,)] * len(prompts), 1000))
    mixed, decode = found[: -len(batches)], found[-len(batches) :]
    assert all(plan.num_tokens <= chunk for plan in mixed) and sum(map(len, (p.admitted for p in mixed))) == 64
    assert any(each.start and each.num_tokens > 1 for plan in mixed for each in plan.rows), "a prompt continues"
    counts = [{each.num_tokens for each in plan.rows} for plan in mixed]
    assert any(1 in count and max(count) > 100 for count in counts), "chunks beside decodes"
    assert [len(plan.rows) for plan in decode] == [64, 64, 40, 1]
    assert max(each.start for each in decode[0].rows) > 2048


def test_demo_tokens_may_differ_where_two_are_as_likely():
    ours = lambda *tokens: [dict(tokens=list(tokens), margins=[3.0, 0.05, 2.0], text="cat")]
    assert demo.compare(ours(1, 2, 3), ours(1, 2, 3)) == dict(status="ok", equal_tokens=3, near_ties=0)
    assert demo.compare(ours(1, 2, 3), ours(1, 9, 9)) == dict(status="ok", equal_tokens=1, near_ties=1)
    wrong = demo.compare(ours(1, 2, 3), ours(9, 2, 3))
    assert wrong["status"] == "wrong" and "token 0 of 'cat'" in wrong["reason"]


def test_gaps_between_steps_are_those_of_the_device():
    step = [(0, 5, "jit_run"), (5, 9, "jit_run"), (8, 12, "jit_choose")]
    named = [Event(a + 20 * i, b + 20 * i, module) for i in range(3) for a, b, module in step]
    assert gaps(named, 3) == [8, 8] and gaps(named, 2) == []
    assert gaps([event._replace(module=None) for event in named], 3) == [8, 8]
    assert gaps(named[:-1] + [named[-1]._replace(module=None)] * 2, 3) == [] == gaps([], 3)


def test_published_figures_stand_beside_rows_of_their_shape():
    row = dict(experiment="decode", status="ok", lengths="uniform", head_dim=128, batch=32, context=8192)
    assert "SGLang FA3 3048" in published(row, "NVIDIA H100 80GB HBM3") and "4320" in published(row, "NVIDIA H200")
    assert published(row, "NVIDIA A100") is None is published(row | dict(head_dim=64), "NVIDIA H100")
    assert published(dict(experiment="prefill", status="ok", batch=1, context=16384), "H100").startswith("FA3 664")
    assert published(dict(experiment="product", weight="qkv", status="ok", rows=64), "H200").startswith(
        "2800-3100 GB/s"
    )


def test_floor_needs_a_ceiling():
    row = dict(bytes=4e9, step_ms=2.0)
    assert with_floor(row, None) == row
    assert with_floor(row, 4000.0) == row | dict(floor_ms=1.0, of_floor=0.5)

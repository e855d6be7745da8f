"""The GPU suite on a CPU: a fault costs one cell, results are on disk at once, and the first call fits its time."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import jax
import pytest

from benchmarks import gpu_suite
from benchmarks.shared.archive import Archive
from benchmarks.shared.deadline import Deadline
from benchmarks.shared.results import COLUMNS, with_floor
from benchmarks.suite import chains, demo, jobs, ladder, plan, profiled, worker
from benchmarks.suite.cells import OPS, Cell, cells
from benchmarks.suite.jobs import End, InProcess, Job, Pool

ROOT = Path(__file__).parents[2]
FAKE = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


@pytest.fixture
def suite_of(tmp_path):
    """Makes a suite that writes to tmp_path."""
    with contextlib.ExitStack() as stack:
        parse = lambda flags: gpu_suite.parse(["--tiny", "--out", str(tmp_path), *flags])
        yield lambda *flags, **options: stack.enter_context(gpu_suite.Suite(parse(flags), **options))


def rows_of(folder: Path, experiment: str) -> list[dict]:
    content = json.loads((folder / "results.json").read_text())
    return [row for row in content["rows"] if row["experiment"] == experiment]


@pytest.mark.deep
def test_bad_cells_cost_themselves_and_no_more_than_their_limit(suite_of, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CELLS", "kernels")
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    suite = suite_of(program=FAKE, silence_s=12.0)
    assert suite.run(["smoke"]) == 1
    rows = {row["op"]: row for row in rows_of(tmp_path, "smoke")}
    assert {op: row["status"] for op, row in rows.items()} == dict.fromkeys(OPS, "ok") | {
        "decode, 1 split": "failed", "decode, 2 to 4 splits": "failed", "ragged, prompts": "killed",
        "ragged, mixed": "wrong",
    }  # fmt: skip
    assert "ILLEGAL_ADDRESS" in rows["decode, 1 split"]["reason"]
    assert "exit status -6" in rows["decode, 2 to 4 splits"]["reason"]
    assert "sent nothing for 12 s" in rows["ragged, prompts"]["reason"]
    assert rows["ragged, prompts"]["seconds"] < 12 + 12 + jobs.KILL_S, "it was heard of once it had started"
    assert "| killed |" in (tmp_path / "report.md").read_text()


def test_bad_cell_limits_default_to_45_seconds_and_four_at_a_time(suite_of):
    suite = suite_of()
    job = next(suite._smoke_cell(next(cells(tiny=True))))
    assert job.silence_s == 40 and job.silence_s + jobs.KILL_S <= 45 and plan.AT_ONCE == 4
    assert job.environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert len(list(cells(tiny=False))) == 2 * 2 * 8


def test_first_call_fits_its_time():
    shares = plan.CALLS[1]
    assert plan.BUDGET_S <= 540
    for call in plan.CALLS.values():
        assert sum(call.values()) + plan.CLOSING_S <= plan.BUDGET_S
    expected = plan.expected_s()
    assert all(0 <= expected[name] <= shares[name] for name in expected), expected
    assert plan.smoke_s(hanging=("mosaic",)) <= shares["smoke"], "Triton's cells run even if all of Mosaic's hang"
    assert plan.smoke_s() >= 32 * plan.START_S / plan.AT_ONCE
    assert shares.keys() == gpu_suite.PARTS.keys() & shares.keys()
    total = sum(gpu_suite.share(name, list(shares), 530.0, 1) for name in shares)
    assert total == pytest.approx(530) and gpu_suite.share("check", ["check"], 99.0, 1) == 99.0


def test_results_are_on_disk_when_the_suite_is_killed(tmp_path):
    code = f"from benchmarks import gpu_suite as g; g.Suite(g.parse(['--tiny', '--out', {str(tmp_path)!r}]), {FAKE!r})"
    code += ".run(['smoke'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"FAKE_CELLS": "quick"}, text=True,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        said = list(itertools.islice(filter(re.compile("pid |status=ok").search, process.stdout), len(OPS)))
        (child,) = (int(line.rpartition("pid ")[2]) for line in said if "pid " in line)
    finally:
        process.kill()
        process.communicate()
    written = {row["op"]: row["status"] for row in rows_of(tmp_path, "smoke")}
    assert written == dict.fromkeys(OPS.keys() - {"copy"}, "ok")
    deadline = Deadline(10)
    while Path(f"/proc/{child}/stat").exists() and not deadline.passed:  # its parent may leave it as a zombie
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    assert not deadline.passed, "a cell outlives the suite"


@pytest.mark.deep
def test_tiny_first_call_runs_every_part(tmp_path):
    environment = os.environ | {"PYTHONPATH": "", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_suite.py", "--tiny", "--out", str(tmp_path)], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "results.json").read_text())
    assert {name: part["status"] for name, part in content["parts"].items()} == dict.fromkeys(plan.CALLS[1], "ok")
    environment = content["environment"]
    assert environment["tiny"] is True and environment["platform"] == "cpu"
    assert environment["versions"]["jax"] == jax.__version__ and "gpu_suite.py --tiny" in environment["command"]
    assert {row["status"] for row in content["rows"]} <= {"ok", "skipped"}
    assert all(row.get("reason") for row in content["rows"] if row["status"] == "skipped")
    ok = {row["experiment"]: row for row in content["rows"] if row["status"] == "ok"}
    assert {"smoke", "demo", "ceilings", "decode", "prefill", "mixed", "step", "correctness"} <= ok.keys()
    assert ok["demo"]["equal_tokens"] == demo.TOKENS * len(demo.PROMPTS)
    assert ok["step"]["floor_ms"] > 0, "the ceiling of one part reaches the next"
    assert ok["decode"]["of_read_ceiling"] > 0 and ok["decode"]["error"] < 1e-4
    assert "its times mean nothing" in (tmp_path / "report.md").read_text()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert {"results.json", "report.md", "decode.png"} <= set(files) and len(files) <= 8, files


@pytest.mark.parametrize("call", [2, 3, 4])
def test_later_calls_run_every_part(suite_of, call, tmp_path, monkeypatch):
    """With workers that compute nothing."""
    monkeypatch.setenv("FAKE_CELLS", "quick")
    suite = suite_of("--call", str(call), program=FAKE)
    assert suite.run(gpu_suite.chosen([], call)) == 0
    assert {name: part["status"] for name, part in suite.report.parts.items()} == dict.fromkeys(plan.CALLS[call], "ok")


@pytest.mark.parametrize("parts", [[], ["ceilings"]])
def test_suite_without_a_gpu_says_so(parts, tmp_path):
    """Also where every part has ended before the device is known."""
    with (
        gpu_suite.Suite(gpu_suite.parse(["--out", str(tmp_path)])) as suite,
        pytest.raises(SystemExit, match="jax sees no GPU here"),
    ):
        suite.run(parts)


def test_jobs_load_in_an_environment_that_has_little_beside_jax():
    missing = ["pydantic", "llguidance", "prometheus_client", "matplotlib"]
    code = f"import sys; sys.modules.update(dict.fromkeys({missing}))"
    code += "; import benchmarks.suite.measured, benchmarks.suite.cells, benchmarks.suite.demo"
    code += "; import benchmarks.engine.steps, jpaged.llm"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    code = "import sys, benchmarks.gpu_suite; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_parts_are_chosen_by_name():
    assert gpu_suite.chosen(["step", "smoke"], 1) == ["smoke", "step"]
    assert gpu_suite.chosen([], 3) == ["ceilings", "sweep", "paging"]
    with pytest.raises(SystemExit):
        gpu_suite.parse(["--parts", "paging"])


# Red cells


@pytest.fixture
def red_suite(suite_of, monkeypatch):
    """Makes a suite in one process, whose cells are wrong unless `green` says otherwise."""

    def work(name, options, send):
        status = "ok" if chosen(Cell(**options["cell"])) else "wrong"
        send("row", options["row"] | {"status": status})
        return End("ok")

    monkeypatch.setattr(worker, "work", work)
    monkeypatch.setattr(gpu_suite.Suite, "_describe_device", lambda suite: iter(()))

    def make(green):
        nonlocal chosen
        chosen = green
        return suite_of("--no-isolation")

    chosen = None
    return make


def test_ladder_climbs_until_a_rung_is_green(red_suite, tmp_path, monkeypatch):
    monkeypatch.setattr(ladder.shutil, "which", lambda name, path=None: None)
    green = lambda cell: cell.op != "decode, 2 to 4 splits" or cell.num_kv_heads == 1
    assert red_suite(green).run(["smoke", "ladder"]) == 1
    rows = rows_of(tmp_path, "ladder")
    assert [(row["rung"], row["simpler"], row["status"]) for row in rows] == [
        (1, "1 split", "wrong"), (2, "1 KV head", "ok")
    ]  # fmt: skip
    (evidence,) = rows_of(tmp_path, "evidence")
    assert evidence["op"] == "decode, 2 to 4 splits" and "not installed" in evidence["tool"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_each_rung_is_simpler_than_the_one_before(op, implementation):
    cell = Cell(op, implementation, 128, **OPS[op])
    found = list(ladder.rungs(cell))
    assert found and len({repr(each) for _, each in found}) == len(found) and cell not in [each for _, each in found]
    last = found[-1][1]
    assert last.num_kv_heads == 1 and last.num_heads == cell.num_heads // cell.num_kv_heads
    assert len(last.contexts) <= 1 and (not last.q_lens or last.q_lens[0] <= last.contexts[0])
    if op.startswith("decode"):
        assert max(last.contexts) <= 512, "one split"


def test_evidence_is_taken_under_the_checker_with_dumps(suite_of, tmp_path, monkeypatch):
    monkeypatch.setattr(ladder.shutil, "which", lambda name, path=None: f"/cuda/bin/{name}")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    job = next(suite_of()._evidence(Cell("decode, 1 split", "mosaic", 128), "killed"))
    assert job.command[:3] == ("/cuda/bin/compute-sanitizer", "--tool", "synccheck")
    folder = job.environment["MOSAIC_GPU_DUMP_TO"]
    assert Path(folder).is_dir() and f"--xla_dump_to={folder}" in job.environment["XLA_FLAGS"].split()
    assert job.limit_s <= 60
    monkeypatch.setattr(ladder.shutil, "which", lambda name, path=None: None)
    assert ladder.dumps(tmp_path)["MOSAIC_GPU_DUMP_PTX"] == "1"


def test_profile_without_ncu_is_a_row(red_suite, tmp_path, monkeypatch):
    monkeypatch.setattr(ladder.shutil, "which", lambda name, path=None: None)
    assert profiled.job("decode", "mosaic") is None
    assert red_suite(lambda cell: True).run(["profile"]) == 0
    assert {row["reason"] for row in rows_of(tmp_path, "profile")} == {"ncu is not installed"}
    monkeypatch.setattr(ladder.shutil, "which", lambda name, path=None: f"/cuda/bin/{name}")
    assert "regex:ragged_paged" in profiled.job("ragged", "mosaic").command


def test_measured_parts_leave_out_what_has_red_cells(suite_of):
    suite = suite_of()
    mosaic = [cell for cell in cells(tiny=False) if cell.implementation == "mosaic"]
    suite._cells = [(cell, "killed" if cell.op == "decode, more splits" else "wrong") for cell in mosaic]
    assert suite._red(("mosaic", "triton"), gpu_suite.MULTI_SPLIT) == ["mosaic"]
    assert suite._red(("mosaic", "triton"), ("ragged, prompts",)) == []
    chain = suite._experiment("decode", "anchors", ours=("mosaic",), without=["mosaic"], deadline=Deadline(1))
    assert list(chain) == []
    row = suite.report.rows[-1]
    assert row["status"] == "skipped" and row["experiment"] == "decode" and row["experiment"] in COLUMNS


# Processes


def test_experiment_goes_on_behind_the_case_that_ended_its_process(suite_of):
    suite = suite_of()
    chain = suite._experiment("decode", "anchors", ours=("mosaic",), deadline=Deadline(60))
    cases, ends, tried = [dict(experiment="decode", batch=n) for n in (1, 8, 32)], [], []
    job = next(chain)
    for case in cases:
        tried.append(list(job.options["tried"]))
        suite._receive(job, "case", case)
        ends.append(End("killed", "sent nothing for 40 s"))
        try:
            job = chain.send(ends[-1])
        except StopIteration:
            break
    assert tried == [[], cases[:1], cases[:2]] and len(ends) == 1 + chains.RESTARTS
    assert [(row["batch"], row["status"]) for row in suite.report.rows] == [(n, "killed") for n in (1, 8, 32)]


def test_jobs_measure_in_turn(tmp_path):
    lock, sent = tmp_path / "lock", []
    entered, leave = threading.Event(), threading.Event()

    def first():
        with worker.turn(str(lock), lambda kind, value: None):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    start = time.monotonic()
    threading.Timer(0.5, leave.set).start()
    with worker.turn(str(lock), lambda kind, value: sent.append(value)):
        assert time.monotonic() - start >= 0.5 and sent, "it is heard of while it waits"
    thread.join()


def test_worker_ends_at_once_where_pythons_clean_up_never_does(tmp_path):
    code = "import atexit, sys, time; atexit.register(time.sleep, 1000); from benchmarks.suite import worker"
    code += "; worker.WORK['print'] = ('builtins', 'print'); worker.main(sys.argv[1], 'print', '{}')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "messages")], cwd=ROOT, check=True, timeout=30)
    *_, (kind, value) = map(json.loads, (tmp_path / "messages").read_text().splitlines())
    assert kind == "end" and value["status"] == "ok"


def test_pool_reports_what_was_not_started(tmp_path):
    log = []

    def chain(name):
        log.append((name, (yield Job(name, "x", {})).status))

    pool = InProcess(tmp_path, lambda *message: None, lambda *job: End("ok"))
    late = [chain("a"), chain("b")]
    assert pool.run(late, Deadline(-1), at_once=1) == late and log == []
    assert pool.run(late, Deadline(60), at_once=1) == [] and log == [("a", "ok"), ("b", "ok")]


def test_pool_kills_the_children_of_a_job(tmp_path):
    ends, pids = [], []
    code = "import os, sys, subprocess, time; p = subprocess.Popen(['sleep', '1000'])"
    code += "; open(sys.argv[1], 'a').write(f'[\"pid\", {p.pid}]\\n'); time.sleep(1000)"

    def chain():
        ends.append((yield Job("parent", "x", {})))

    pool = Pool(tmp_path, lambda job, kind, value: pids.append(value), (sys.executable, "-c", code))
    pool.run([chain()], Deadline(2), at_once=1)
    assert [end.status for end in ends] == ["killed"] and pids
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(pids[0], signal.SIG_DFL)
            time.sleep(0.02)


# Results


def test_demo_tokens_may_differ_where_two_are_as_likely():
    ours = lambda *tokens: [dict(tokens=list(tokens), margins=[3.0, 0.05, 2.0], text="cat")]
    assert demo.compare(ours(1, 2, 3), ours(1, 2, 3)) == dict(status="ok", equal_tokens=3, near_ties=0)
    assert demo.compare(ours(1, 2, 3), ours(1, 9, 9)) == dict(status="ok", equal_tokens=1, near_ties=1)
    wrong = demo.compare(ours(1, 2, 3), ours(9, 2, 3))
    assert wrong["status"] == "wrong" and "token 0 of 'cat'" in wrong["reason"]


def test_archive_is_complete_after_each_file_and_has_a_limit(tmp_path):
    archive = Archive(tmp_path / "a.tar.gz", max_bytes=4000)
    assert archive.add({"x.ptx": b"wgmma" * 1000}) == []
    assert archive.add({"big.sass": os.urandom(8000)}) == ["big.sass"]
    assert archive.add({"y.ptx": b"ret"}) == []
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        assert tar.getnames() == ["x.ptx", "y.ptx"] and tar.extractfile("y.ptx").read() == b"ret"
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def test_floor_needs_a_ceiling():
    row = dict(bytes=4e9, step_ms=2.0)
    assert with_floor(row, None) == row
    assert with_floor(row, 4000.0) == row | dict(floor_ms=1.0, of_floor=0.5)

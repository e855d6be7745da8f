"""The self-test finds planted faults, `select` falls back from them, and results are remembered."""

import dataclasses
import functools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import SelfTest, dispatch, reference, select, selftest, toolchain, trial
from pallas_kernels.selftest import FAILED, PASSED, TESTS, UNTESTED, Result, Subject
from tests.kernels import implementations, planted
from tests.support.patience import PATIENCE_S, until

MODEL = dict(dtype="bfloat16", head_dim=32, num_heads=4, num_kv_heads=2, block_size=16)
H200 = dict(platform="gpu", device_kind="NVIDIA H200", compute_capability=9.0)
HANG_S = 0.5  # the limit of a planted op, from when it hangs
OPS = tuple(dict.fromkeys(TESTS.values()))
PRODUCT = implementations.ops_of(reference).product
BROKEN = ("write_kv", "write_kv with rope", "copy_blocks", "paged_decode_attention", "product")
NOT_OF_TRITON = [test for test in TESTS if test == "delta_rule" or "product" in test]
BY_TRITON = dict.fromkeys(OPS, "triton") | {"product": "reference"}  # it has no products
SUBJECT = Subject(
    "mosaic", f"{planted.__name__}.good", "NVIDIA H200", pool_dtype="bfloat16", pool_head_dim=64,
    tiles={"decode": None, "ragged": None}, **MODEL,
)  # fmt: skip


def put(patch: pytest.MonkeyPatch, **modules: str) -> None:
    """Put planted modules in the place of Mosaic and Triton."""
    for name, module in modules.items():
        program = dataclasses.replace(dispatch.PROGRAMS[name], module=f"{planted.__name__}.{module}")
        patch.setitem(dispatch.PROGRAMS, name, program)


@functools.cache
def _made(test: str, **changes) -> trial.OpTest:
    return trial.make_trials(dataclasses.replace(SUBJECT, **changes))[test]()


def made(test: str, **changes) -> trial.OpTest:
    """A case whose arguments no other test's run is given."""
    case = _made(test, **changes)
    return dataclasses.replace(case, args=jax.device_get(case.args))


def statuses(results) -> dict[str, str]:
    return {result.test: result.status for result in results}


def choices(kernels) -> dict[str, str]:
    """Return the implementations of the ops that have self-tests."""
    return {choice.op: choice.implementation for choice in kernels.account if choice.op in OPS}


def alive(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def compilations(tmp_path_factory):
    """The testing processes of this module compile a case once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("xla")))
        yield


@pytest.fixture(scope="module")
def start(compilations, tmp_path_factory):
    """A first start on a device where Mosaic is `broken` and Triton is `good`: its kernels, a function that starts once
    more and fails where a test runs again, the id of a process that a hanging op started, and the lines of the log."""
    folder = tmp_path_factory.mktemp("broken")
    pid = folder / "pid"
    place = SelfTest(folder, platform="cpu", limit_s=PATIENCE_S)
    run, error_of = SelfTest._run, selftest._Process.error_of
    logged = []

    def fewer(place, subject, tests):
        """Run all tests of Triton, and those of Mosaic that fail, with one before them and one after them."""
        run_now = [test for test in tests if subject.program == "triton" or test in BROKEN]
        yield from run(place, subject, run_now)
        yield from (Result(subject.program, test, PASSED, "", "") for test in tests if test not in run_now)

    def sooner(process, doing, limit_s):
        hangs = process._subject.program == "mosaic" and doing == "copy_blocks"
        if hangs:
            until(lambda: pid.exists() and pid.read_text())
        return error_of(process, doing, HANG_S if hangs else limit_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelfTest, "_run", fewer)
        patch.setattr(selftest._Process, "error_of", sooner)
        patch.setattr(selftest, "PROGRESS_S", 0.05)
        patch.setattr(selftest.logger, "info", lambda message, *args: logged.append(message % args))
        put(patch, mosaic="broken", triton="good")
        patch.setenv("PLANTED_PID", str(pid))
        first = select(**H200, **MODEL, self_test=place)

    def again(name: str = "auto"):
        with pytest.MonkeyPatch.context() as patch:
            put(patch, mosaic="broken", triton="good")
            patch.setattr(SelfTest, "_run", lambda *args: pytest.fail("a test ran again"))
            return select(name, **H200, **MODEL, self_test=place)

    return first, again, int(pid.read_text()), logged


class TestProcesses:
    """The whole path, with planted modules in the place of the implementations."""

    def test_a_fault_is_found_and_named(self, start):
        first, *_ = start
        reasons = {result.test: result.reason for result in first.tests if result.program == "mosaic"}
        assert statuses(result for result in first.tests if result.program == "mosaic") == {
            "write_kv": PASSED, "write_kv with rope": FAILED, "copy_blocks": FAILED,
            "paged_decode_attention": FAILED, "ragged_paged_attention": PASSED, "product": PASSED,
            "product of experts": PASSED, "product of 4 bits": PASSED, "delta_rule": PASSED,
        }  # fmt: skip
        assert "values are off by up to" in reasons["write_kv with rope"]
        assert reasons["copy_blocks"].startswith(f"no result within {HANG_S:g} seconds")
        assert reasons["paged_decode_attention"].startswith("the process ended (SIGABRT): ")
        assert "CUDA_ERROR_ILLEGAL_ADDRESS, as the last words" in reasons["paged_decode_attention"]

    def test_the_fallback_is_tested_too(self, start):
        first, *_ = start
        assert statuses(result for result in first.tests if result.program == "triton") == dict.fromkeys(TESTS, PASSED)
        assert first.name == "triton" and first.head_dim == 64
        assert choices(first) == BY_TRITON | {"delta_rule": "mosaic"}  # which passed

    def test_what_a_hanging_op_started_ends_with_it(self, start):
        _, _, process, _ = start
        assert not alive(process)

    def test_results_are_remembered(self, start):
        first, again, *_ = start
        second = again()
        assert choices(second) == choices(first) and statuses(second.tests) == statuses(first.tests)
        assert all(result.remembered for result in second.tests)
        assert not any(result.remembered for result in first.tests)

    def test_an_implementation_asked_for_by_name_refuses(self, start):
        _, again, *_ = start
        with pytest.raises(NotImplementedError, match="kernels 'mosaic': paged_decode_attention failed its self-test"):
            again("mosaic")
        assert again("triton").reason == "asked for"

    def test_one_line_for_each_group_of_ops(self, start, caplog):
        _, again, *_ = start
        again()
        attention, writes, copies = (record.getMessage() for record in caplog.records)
        assert attention.startswith("attention: running on Pallas-Triton, expect lower throughput (not mosaic: paged_")
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in attention and "\n" not in attention
        assert writes.startswith("KV writes: running on Pallas-Triton, expect slower steps (not mosaic: write_kv with")
        assert copies.startswith("block copies: running on Pallas-Triton, expect slower steps (not mosaic: copy_blocks")

    def test_a_device_that_does_not_open_is_untested(self, tmp_path, monkeypatch, caplog):
        put(monkeypatch, mosaic="good")
        kernels = select(**H200, **MODEL, self_test=SelfTest(tmp_path, platform="nowhere"))
        assert kernels.name == "mosaic" and statuses(kernels.tests) == dict.fromkeys(TESTS, UNTESTED)
        assert "nowhere" in kernels.tests[0].reason and "could not run" in caplog.text
        assert not any(json.loads(path.read_text())["results"] for path in tmp_path.glob("*.json"))

    def test_a_process_that_does_not_start_is_untested(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
        results = SelfTest(tmp_path, platform="cpu").run(SUBJECT)
        assert statuses(results) == dict.fromkeys(TESTS, UNTESTED) and "did not start" in results[0].reason

    def test_results_that_arrive_together_are_read_one_by_one(self, tmp_path, monkeypatch):
        """As they do when the waiting process is late."""
        process = tmp_path / "process"  # the start and two tests, the second of which fails
        process.write_text("""#!/bin/sh\nprintf '""\\n""\\n"off"\\n'\n""")
        process.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(process))
        results = SelfTest(tmp_path, platform="cpu").run(SUBJECT)
        assert [result.reason for result in results] == [["", "off"][i % 2] for i in range(len(TESTS))]

    def test_it_ends_by_itself_when_nobody_waits(self, compilations, tmp_path):
        """A program that is killed leaves no process behind that holds the device for ever."""
        hanging = dataclasses.replace(SUBJECT, module=f"{planted.__name__}.broken")
        pid = tmp_path / "pid"
        environment = os.environ | {"PLANTED_PID": str(pid), "JAX_PLATFORMS": "cpu"}
        code = "from pallas_kernels import trial; trial.GRACE_S = 0; trial.main()"
        request = pickle.dumps((hanging, ("copy_blocks",), 0, 1.0))
        with (tmp_path / "stderr").open("w") as stderr:  # no pipe: the process that the op started would hold it open
            done = subprocess.run(
                [sys.executable, "-c", code], input=request, env=environment, stdout=stderr, stderr=stderr,
                timeout=PATIENCE_S,
            )  # fmt: skip
        assert done.returncode == -signal.SIGALRM, (tmp_path / "stderr").read_text()
        if pid.exists():  # the op may begin later than the time is up
            os.kill(int(pid.read_text()), signal.SIGKILL)

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
    def test_it_ends_with_the_process_that_waits(self):
        ready = "lambda _: (print('ready', file=sys.stderr, flush=True), time.sleep(600))"
        child = f"import sys, time; from pallas_kernels import trial; trial.pickle.load = {ready}; trial.main()"
        parent = (
            "import os, subprocess, sys\n"
            f"process = subprocess.Popen([sys.executable, '-c', {child!r}], stderr=subprocess.PIPE)\n"
            "print(process.stderr.readline().decode(), process.pid, flush=True)\n"
            "os._exit(130)"
        )
        done = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S)
        ready, process = done.stdout.split()
        assert ready == "ready"
        until(lambda: not alive(int(process)))

    def test_progress_is_logged(self, start):
        *_, logged = start
        assert any("good: start, " in line for line in logged)
        assert any("good: ragged_paged_attention, " in line for line in logged)


class Planned:
    """A self-test whose outcome is known: the tests of a program that fail, or can't run."""

    def __init__(self, **failing: tuple[str, ...]):
        self.failing = failing

    def run(self, subject: Subject) -> tuple[Result, ...]:
        failing = self.failing.get(subject.program, ())
        return tuple(
            Result(subject.program, test, FAILED if test in failing else PASSED, "wrong", "") for test in TESTS
        )


class TestFallback:
    @pytest.mark.parametrize("wrong", ["paged_decode_attention", "ragged_paged_attention"])
    def test_the_attention_ops_fall_back_together_and_alone(self, wrong):
        kernels = select(**H200, **MODEL, self_test=Planned(mosaic=(wrong,)))
        assert choices(kernels) == {
            "paged_decode_attention": "triton", "ragged_paged_attention": "triton", "write_kv": "mosaic",
            "copy_blocks": "mosaic", "product": "mosaic", "delta_rule": "mosaic",
        }  # fmt: skip
        assert kernels.name == "triton" and f"not mosaic: {wrong} failed its self-test: wrong" in kernels.reason
        assert kernels.implementation.paged_decode_attention.func.__module__ == "pallas_kernels.triton.attention"
        assert kernels.implementation.write_kv.__module__ == "pallas_kernels.mosaic.writes"

    @pytest.mark.parametrize("wrong", ["write_kv", "write_kv with rope"])
    def test_a_write_falls_back_alone(self, wrong):
        kernels = select(**H200, **MODEL, self_test=Planned(mosaic=(wrong,)))
        assert kernels.name == "mosaic" and choices(kernels)["write_kv"] == "triton"
        assert choices(kernels)["copy_blocks"] == "mosaic"

    @pytest.mark.parametrize("wrong", ["product", "product of experts", "product of 4 bits"])
    def test_products_fall_back_to_those_of_xla(self, wrong, caplog):
        kernels = select(**H200, **MODEL, self_test=Planned(mosaic=(wrong,)))
        assert choices(kernels) == dict.fromkeys(OPS, "mosaic") | {"product": "reference"}
        assert kernels.implementation.product is reference.product and not kernels.multiplies
        (record,) = caplog.records
        assert record.getMessage().startswith("products: running on the jnp reference, expect slower steps (not mosaic")

    def test_the_reference_is_last_and_takes_the_pools_of_the_rest(self, caplog):
        attention = ("paged_decode_attention",)
        kernels = select(**H200, **MODEL, self_test=Planned(mosaic=attention, triton=attention))
        assert kernels.name == "reference" and kernels.head_dim == 64 and choices(kernels)["write_kv"] == "mosaic"
        assert kernels.implementation.paged_decode_attention is reference.paged_decode_attention
        (record,) = caplog.records
        assert record.getMessage().startswith("attention: running on the jnp reference, expect much lower throughput")
        assert "not mosaic: " in record.getMessage() and "not triton: " in record.getMessage()

    def test_without_any_kernel_pools_are_the_models_own(self):
        kernels = select(**H200, **MODEL, self_test=Planned(mosaic=tuple(TESTS), triton=tuple(TESTS)))
        assert set(choices(kernels).values()) == {"reference"} and kernels.head_dim == MODEL["head_dim"]

    def test_nothing_is_logged_where_all_is_well(self, caplog):
        kernels = select(**H200, **MODEL, self_test=Planned())
        assert set(choices(kernels).values()) == {"mosaic"} and not caplog.records

    def test_a_device_that_mosaic_does_not_know_is_no_failure(self, caplog):
        kernels = select(**H200 | dict(compute_capability=8.0), **MODEL, self_test=Planned())
        assert choices(kernels) == BY_TRITON and not kernels.multiplies and not caplog.records

    def test_only_a_gpu_is_tested(self, tmp_path):
        cpu = jax.devices("cpu")[0]
        assert SelfTest.on(cpu, tmp_path) is None
        gpu = dataclasses.make_dataclass("Device", ["platform", "local_hardware_id"])("gpu", 3)
        assert SelfTest.on(gpu, tmp_path, retest=True) == SelfTest(tmp_path, "cuda", 3, retest=True)


class TestMemory:
    """Which results are remembered, without a process."""

    @pytest.fixture
    def runs(self, monkeypatch):
        """The tests that ran, instead of running them."""
        ran = []

        def run(self, subject, tests):
            ran.append(list(tests))
            for test in tests:
                yield Result(subject.program, test, PASSED, "", "2026-11-21T12:00:00+00:00")

        monkeypatch.setattr(SelfTest, "_run", run)
        return ran

    def test_a_change_of_anything_tests_again(self, runs, tmp_path, monkeypatch):
        place = SelfTest(tmp_path)
        place.run(SUBJECT)
        place.run(SUBJECT)
        assert len(runs) == 1
        others = dict(dtype="float16", pool_dtype="float8_e4m3fn", head_dim=40, pool_head_dim=128, num_heads=8,
                      num_kv_heads=1, block_size=32, tiles={}, device_kind="NVIDIA H100")  # fmt: skip
        for name, value in others.items():
            place.run(dataclasses.replace(SUBJECT, **{name: value}))
        assert len(runs) == 1 + len(others)
        for name, value in dict(versions={"jax": "9"}, driver_version="1", cuda_version=13010).items():
            monkeypatch.setattr(toolchain, name, lambda value=value: value)
            place.run(SUBJECT)
        assert len(runs) == 4 + len(others)
        monkeypatch.setattr(selftest, "_source_digest", lambda module: "edited")
        place.run(SUBJECT)
        assert len(runs) == 5 + len(others)

    def test_the_source_of_the_kernels_is_part_of_the_key(self, tmp_path, monkeypatch):
        (tmp_path / "outside.py").write_text("a = 1")
        monkeypatch.syspath_prepend(tmp_path)
        before = selftest._source_digest("outside")
        assert before == selftest._source_digest("outside")
        (tmp_path / "outside.py").write_text("a = 2")
        assert before != selftest._source_digest("outside")

    @pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"key": 1}', "\x00", "other key", "no results"])
    def test_a_corrupt_file_is_ignored_and_replaced(self, content, runs, tmp_path):
        place = SelfTest(tmp_path)
        place.run(SUBJECT)
        (path,) = tmp_path.glob("*.json")
        good = path.read_text()
        if content == "other key":
            content = json.dumps(json.loads(good) | {"key": {}})
        elif content == "no results":
            content = json.dumps(json.loads(good) | {"results": {"write_kv": "passed"}})
        path.write_text(content)
        place.run(SUBJECT)
        assert len(runs) == 2 and path.read_text() == good
        place.run(SUBJECT)
        assert len(runs) == 2

    def test_only_what_is_missing_runs(self, runs, tmp_path):
        place = SelfTest(tmp_path)
        place.run(SUBJECT)
        (path,) = tmp_path.glob("*.json")
        content = json.loads(path.read_text())
        del content["results"]["copy_blocks"]
        path.write_text(json.dumps(content))
        results = place.run(SUBJECT)
        assert runs[1:] == [["copy_blocks"]]
        assert [result.remembered for result in results] == [test != "copy_blocks" for test in TESTS]

    def test_what_could_not_run_is_not_remembered_and_runs_again(self, runs, tmp_path, monkeypatch, caplog):
        def run(self, subject, tests):
            status = {"copy_blocks": UNTESTED, "write_kv": FAILED}
            yield from (Result(subject.program, test, status.get(test, PASSED), "busy", "") for test in tests)

        with monkeypatch.context() as patch:
            patch.setattr(SelfTest, "_run", run)
            kernels = select(**H200, **MODEL, self_test=SelfTest(tmp_path))
        assert choices(kernels)["copy_blocks"] == "mosaic"  # untested is not wrong
        assert "Mosaic GPU kernels: used without a self-test of copy_blocks, which could not run: busy" in caplog.text
        again = select(**H200, **MODEL, self_test=SelfTest(tmp_path))
        assert ["copy_blocks"] in runs and list(TESTS) not in runs
        assert [result.remembered for result in again.tests[: len(TESTS)]] == [test != "copy_blocks" for test in TESTS]

    def test_a_retest_runs_all_and_is_remembered(self, runs, tmp_path):
        SelfTest(tmp_path).run(SUBJECT)
        SelfTest(tmp_path, retest=True).run(SUBJECT)
        SelfTest(tmp_path).run(SUBJECT)
        assert runs == [list(TESTS)] * 2

    def test_a_folder_that_cannot_be_written_is_told_of(self, runs, tmp_path, caplog):
        (tmp_path / "file").write_text("")
        results = SelfTest(tmp_path / "file" / "folder").run(SUBJECT)
        assert statuses(results) == dict.fromkeys(TESTS, PASSED) and "run again at the next start" in caplog.text


# One for each test; that of decode is "ignored sinks".
USUAL_FAULTS = (
    "keys and values exchanged", "queries not rotated", "copies in turn", "causal edge off by one",
    "a page that is not written", "last inputs left out", "the next expert", "halves of bytes exchanged",
)  # fmt: skip
EXPERT_FAULTS = {
    "another expert's bias": lambda x, weight, up, **o: PRODUCT(
        x, weight._replace(bias=jnp.roll(weight.bias, 1, 0)), up=up, **o
    ),
    "scales": lambda x, weight, up, **o: PRODUCT(x, weight._replace(scales=weight.scales + 1), up=up, **o),
    "another output's bias": lambda x, weight, up, **o: PRODUCT(
        x, weight, up=up._replace(bias=jnp.roll(up.bias, 1, 1)), **o
    ),
    "signs": lambda x, weight, up, **o: PRODUCT(x, weight._replace(values=weight.values ^ 8), up=up, **o),
    "another activation": lambda x, weight, up, activation, **o: PRODUCT(x, weight, up=up, activation="silu", **o),
}


class TestTrials:
    """Every test finds the faults that its op could have, and none where the kernels are right."""

    WRONG: ClassVar = {
        "keys and values exchanged": (
            "write_kv", lambda k, v, *rest, **o: pallas_kernels.write_kv(v, k, *rest, **o)[::-1]
        ),
        "padding written": (
            "write_kv", lambda k, v, x, y, slots, **o: pallas_kernels.write_kv(k, v, x, y, jnp.abs(slots), **o)
        ),
        "keys not rotated": (
            "write_kv with rope",
            lambda *args, **options: (
                *pallas_kernels.write_kv(*args), pallas_kernels.write_kv(*args, **options)[2]
            ),
        ),
        "queries not rotated": (
            "write_kv with rope",
            lambda *args, **options: (*pallas_kernels.write_kv(*args, **options)[:2], options["q_tnh"]),
        ),
        "copies in turn": (
            "copy_blocks",
            lambda pool, sources, to: jax.lax.fori_loop(
                0, 5, lambda i, pool: pallas_kernels.copy_blocks(pool, sources[i][None], to[i][None]), pool
            ),
        ),
        "last key missing": (
            "paged_decode_attention",
            lambda q, k, v, tables, lens, **o: pallas_kernels.paged_decode_attention(q, k, v, tables, lens - 1, **o),
        ),
        "one split only": (
            "paged_decode_attention",
            lambda q, k, v, tables, lens, **o: pallas_kernels.paged_decode_attention(
                q, k, v, tables, jnp.minimum(lens, 512), **o
            ),
        ),
        "a neighbour's context": (
            "ragged_paged_attention",
            lambda q, k, v, tables, *rest, **o: pallas_kernels.ragged_paged_attention(
                q, k, v, tables.at[5].set(tables[4]), *rest, **o
            ),
        ),
        "causal edge off by one": (
            "ragged_paged_attention",
            lambda q, k, v, tables, lens, *rest, **o: pallas_kernels.ragged_paged_attention(
                q, k, v, tables, lens.at[2].add(-1), *rest, **o
            ),
        ),
        "a chain that starts again": (
            "delta_rule",
            lambda *args: pallas_kernels.delta_rule(
                *args[:-1], args[-1]._replace(reads_s=jnp.maximum(args[-1].reads_s, -1))
            ),
        ),
        "an old state": (
            "delta_rule",
            lambda *args: pallas_kernels.delta_rule(
                *args[:-1], args[-1]._replace(reads_s=args[-1].reads_s.at[0].set(1))
            ),
        ),
        "a page that is not written": (
            "delta_rule",
            lambda *args: pallas_kernels.delta_rule(
                *args[:-1], args[-1]._replace(writes_s=args[-1].writes_s.at[1].set(-1))
            ),
        ),
        "no decay": (
            "delta_rule", lambda q, k, v, g, *args: pallas_kernels.delta_rule(q, k, v, 0 * g, *args)
        ),
        "no bias": (
            "product", lambda x, weight, **o: PRODUCT(x, weight._replace(bias=None), **o)
        ),
        "last inputs left out": (
            "product", lambda x, weight, **o: PRODUCT(x.at[:, -64:].set(0), weight, **o)
        ),
        "the next expert": (
            "product of experts",
            lambda x, weight, sizes_e, **o: PRODUCT(x, weight, sizes_e=jnp.roll(sizes_e, 1), **o),
        ),
        "a neighbour's scale": (
            "product of experts",
            lambda x, weight, **o: PRODUCT(
                x, weight._replace(scales=weight.scales[:, ::-1]), **o
            ),
        ),
        "gate and up exchanged": (
            "product of experts", lambda x, weight, up, **o: PRODUCT(x, up, up=weight, **o)
        ),
        "no activation": (
            "product of experts",
            lambda x, weight, activation, **o: PRODUCT(x, weight, **o),
        ),
        "the next group's scale": (
            "product of 4 bits",
            lambda x, weight, **o: PRODUCT(x, weight._replace(scales=jnp.roll(weight.scales, 1, 1)), **o),
        ),
        "another zero point": (
            "product of 4 bits",
            lambda x, weight, **o: PRODUCT(x, weight._replace(minima=weight.minima + weight.scales), **o),
        ),
        "halves of bytes exchanged": (
            "product of 4 bits",
            lambda x, weight, **o: PRODUCT(
                x, weight._replace(values=weight.values << 4 | weight.values >> 4), **o
            ),
        ),
    }  # fmt: skip

    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[] if name in USUAL_FAULTS else [pytest.mark.deep]) for name in WRONG]
    )
    def test_a_fault_is_found(self, name):
        test, wrong = self.WRONG[name]
        assert "wrong result" in made(test).error(types.SimpleNamespace(**{TESTS[test]: wrong}))

    @pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=[] if name == "scales" else pytest.mark.deep) for name in EXPERT_FAULTS],
    )
    def test_faults_of_experts_in_mxfp4_are_found(self, name):
        case = made("product of experts", mxfp4=True)
        assert case.error(types.SimpleNamespace(product=PRODUCT)) is None
        assert "wrong result" in case.error(types.SimpleNamespace(product=EXPERT_FAULTS[name]))

    def test_ignored_sinks_are_found(self):
        case = made("paged_decode_attention", sinks=True)  # which Triton's kernels pass below
        wrong = lambda *args, sinks_n, **options: pallas_kernels.paged_decode_attention(*args, **options)
        assert "wrong result" in case.error(types.SimpleNamespace(paged_decode_attention=wrong))

    @pytest.mark.parametrize(
        "test",
        [pytest.param(test, marks=[pytest.mark.deep] if test in NOT_OF_TRITON else []) for test in TESTS],
    )
    def test_triton_passes(self, test):
        self.passes(implementations.TRITON, made(test, **dict(sinks=True) if "decode" in test else {}))

    @pytest.mark.parametrize(
        "test",
        [
            *(pytest.param(f"{kind}_attention", marks=pytest.mark.deep) for kind in ("paged_decode", "ragged_paged")),
            pytest.param("product", marks=pytest.mark.deep),
            "product of experts",
            pytest.param("product of 4 bits", marks=pytest.mark.deep),
        ],
    )
    def test_mosaic_passes(self, test):
        self.passes(implementations.MOSAIC, made(test))

    def test_fp8_pools(self):
        self.passes(implementations.TRITON, made("write_kv with rope", pool_dtype="float8_e4m3fn"))

    def passes(self, kernels, case):
        # Not under jit, which the interpreters are themselves.
        out = getattr(kernels, case.op)(*case.args, **case.options)
        for one, expected in zip(jax.tree.leaves(out), case.expected, strict=True):
            assert trial.difference(one, expected, case.rtol, case.atol) is None

    @pytest.mark.parametrize(
        ("test", "status"), [("write_kv", PASSED), ("write_kv with rope", UNTESTED), ("copy_blocks", FAILED)]
    )
    def test_an_op_without_memory_is_untested_not_wrong(self, test, status):
        full = dataclasses.replace(SUBJECT, module=f"{planted.__name__}.full")
        error = trial.error_of(full, made(test))
        assert selftest.status_of(error) == status and (status == PASSED or "RESOURCE_EXHAUSTED" in error)
        assert selftest.status_of("the process ended (SIGABRT): CUDA_ERROR_OUT_OF_MEMORY") == UNTESTED

    @pytest.mark.parametrize(
        ("out", "said"),
        [
            ([1.0, 2.0, jnp.nan], None),
            ([1.0, 2.01, jnp.nan], None),
            ([1.0, 2.2, jnp.nan], "1 of 3 values are off by up to 0.2 .allowed 0.1"),
            ([1.0, jnp.nan, jnp.nan], "1 of 3 values are NaN"),
            ([1.0, 2.0, 3.0], "1 of 3 values are NaN"),
            ([1.0, jnp.inf, jnp.nan], "off by up to inf"),
            ([1.0, 2.0], "wrong shape"),
        ],
    )
    def test_difference(self, out, said):
        found = trial.difference(jnp.asarray(out), jnp.asarray([1.0, 2.0, jnp.nan]), 0.0, 0.1)
        assert found is None if said is None else re.search(said, found)


class TestToolchain:
    @pytest.mark.parametrize(
        ("version", "refused"),
        [(None, False), (12070, False), (12080, True), (12090, True), (12091, False), (13000, False)],
    )
    def test_miscompilation(self, version, refused):
        said = toolchain.miscompilation(version)
        assert (said is not None) == refused and (said is None or "pip install 'jax[cuda13]'" in said)

    def test_mosaic_is_not_chosen_under_a_compiler_that_miscompiles_it(self, monkeypatch):
        monkeypatch.setattr(toolchain, "cuda_version", lambda: 12080)
        kernels = select(**H200, **MODEL)
        assert kernels.name == "triton" and "not mosaic: CUDA 12.8 is installed" in kernels.reason
        with pytest.raises(NotImplementedError, match=r"kernels 'mosaic': CUDA 12\.8 is installed, .* install CUDA 13"):
            select("mosaic", **H200, **MODEL)
        monkeypatch.setattr(toolchain, "cuda_version", lambda: None)
        assert select(**H200, **MODEL).name == "mosaic"

    def test_the_driver_is_read_from_its_file_and_from_its_tool(self, tmp_path, monkeypatch):
        file = tmp_path / "version"
        file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x)\n")
        assert toolchain.driver_version(file) == "580.65.06"
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\necho 570.1.2\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert toolchain.driver_version(tmp_path / "missing") == "570.1.2"
        tool.unlink()
        monkeypatch.setenv("PATH", str(tmp_path))
        assert toolchain.driver_version(tmp_path / "missing") is None

    def test_versions(self):
        assert toolchain.versions()["jax"] == jax.__version__

"""`jpaged doctor`: its report as text and as JSON, and its exit status."""

import json
import os
from types import SimpleNamespace

import jax
import pytest

from jpaged import doctor
from jpaged.cli.main import main
from pallas_kernels import SelfTest, toolchain
from pallas_kernels.selftest import FAILED, PASSED, TESTS, UNTESTED, Result
from tests.kernels.test_selftest import put

OPS = {
    "write_kv", "copy_blocks", "paged_decode_attention", "ragged_paged_attention", "product", "delta_rule",
    "causal_conv", "low_rank", "rms_norm", "argmax_and_lse", "gumbel_argmax", "gumbel", "ranks", "top",
}  # fmt: skip


class H200:
    """A device of jax that is not there."""

    platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"
    id = process_index = local_hardware_id = 0


@pytest.fixture(autouse=True)
def no_cards(tmp_path, monkeypatch):
    """The same machine everywhere: without NVIDIA's tools, and with an empty cache."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(toolchain, "ptxas_version", lambda: None)


@pytest.fixture
def h200(monkeypatch):
    """A GPU whose ops are tested in a process on the CPU."""
    monkeypatch.setattr(doctor, "jax", SimpleNamespace(devices=lambda: [H200()], config=jax.config))
    place = lambda cls, device, folder, retest=False: SelfTest(folder, platform="cpu", retest=retest)
    monkeypatch.setattr(SelfTest, "on", classmethod(place))


def planned(monkeypatch, **statuses: str) -> list[str]:
    """Decide the outcome of tests, by their names with underscores. Returns the list of those that will have run."""
    ran = []

    def run(self, subject, tests):
        for test in tests:
            ran.append(test)
            status = statuses.get(test.replace(" ", "_"), PASSED)
            yield Result(subject.program, test, status, "" if status == PASSED else "a reason", "2026-11-21T12:00:00Z")

    monkeypatch.setattr(SelfTest, "_run", run)
    return ran


def reported(capsys, *flags: str, status: int = 0) -> dict:
    """The report as JSON. Asserts the exit status."""
    if status:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--json", *flags])
        assert ended.value.code == status
    else:
        main(["doctor", "--json", *flags])
    return json.loads(capsys.readouterr().out)


def test_on_a_cpu_all_is_well_and_nothing_is_tested(capsys):
    main(["doctor"])
    text = capsys.readouterr().out
    assert "devices\n  cpu (cpu)\n" in text and text.endswith("\nall is well\n")
    assert "settings\n  dtype                    float32    the fastest and most exact dtype on a CPU\n" in text
    assert "kernels for demo, float32, head dim 64, 4 heads over 2, blocks of 16\n" in text
    assert "self-test\n  not needed on this device\n" in text
    assert all(f"  {op} " in text for op in OPS) and text.count(" cpu        the device is a cpu (cpu)\n") == len(OPS)
    assert "problems" not in text and "warnings" not in text


def test_json_has_the_whole_report(tiny, capsys, tmp_path):
    (tmp_path / "jpaged" / "xla").mkdir(parents=True)
    (tmp_path / "jpaged" / "xla" / "executable").write_bytes(bytes(100))
    found = reported(capsys, "--model", str(tiny), "--dtype", "bfloat16", "--block-size", "32")
    (device,) = {tuple(each.items())[:3] for each in found["devices"]}
    assert device == (("kind", "cpu"), ("platform", "cpu"), ("compute_capability", None))
    assert len(found["devices"]) == jax.device_count()
    assert {op["op"]: op["implementation"] for op in found["ops"]} == dict.fromkeys(OPS, "cpu")
    assert found["model"].startswith(f"{tiny}, bfloat16") and "blocks of 32" in found["model"]
    assert ["block_size", 32, "set"] in found["settings"]
    assert found["versions"]["jax"] == jax.__version__ and "python" in found["versions"]
    assert found["host"]["memory_available_bytes"] > 0 and found["host"]["disk_free_bytes"] > 0
    folder = str(tmp_path / "jpaged" / "xla")
    sizes = [file.stat().st_size for file in (tmp_path / "jpaged" / "xla").iterdir()]  # the code of kernels may join
    assert 100 in sizes
    assert found["cache"] == {"path": folder, "entries": len(sizes), "size_bytes": sum(sizes), "writable": True}
    assert found["tests"] == found["problems"] == []


@pytest.mark.deep  # test_selftest.py has the processes
def test_a_planted_fault_is_reported_and_the_status_is_1(h200, monkeypatch, capsys):
    put(monkeypatch, mosaic="wrong", triton="good")
    found = reported(capsys, status=1)
    assert {op["op"]: op["implementation"] for op in found["ops"]} == {
        "write_kv": "mosaic", "copy_blocks": "mosaic", "paged_decode_attention": "triton",
        "ragged_paged_attention": "triton", "product": "reference", "delta_rule": "mosaic",
        "causal_conv": "reference",
    }  # fmt: skip
    (failed,) = (test for test in found["tests"] if test["status"] != PASSED)
    assert (failed["program"], failed["test"], failed["status"]) == ("mosaic", "ragged_paged_attention", FAILED)
    (problem,) = found["problems"]
    assert problem.startswith("mosaic: ragged_paged_attention failed its self-test: wrong result: ")

    ran = planned(monkeypatch)
    with pytest.raises(SystemExit):
        main(["doctor"])
    text = capsys.readouterr().out
    assert "ragged_paged_attention   failed (stored on 20" in text and not ran
    main(["doctor", "--retest"])
    text = capsys.readouterr().out
    assert ran == list(TESTS) and "passed (just now)" in text and text.endswith("all is well\n")


def test_kernels_asked_for_by_name_are_a_problem_where_they_fail(h200, monkeypatch, capsys):
    planned(monkeypatch, copy_blocks=FAILED)
    found = reported(capsys, "--kernels", "mosaic", status=1)
    assert found["problems"] == ["kernels 'mosaic': copy_blocks failed its self-test: a reason"] and not found["ops"]


def test_kernels_that_cannot_run_here_are_a_problem(capsys):
    found = reported(capsys, "--kernels", "mosaic", status=1)
    assert "need a Hopper GPU" in found["problems"][0] and found["self_test"] == "not listed: no kernels were chosen"


def test_a_test_that_could_not_run_is_a_warning(h200, monkeypatch, capsys):
    planned(monkeypatch, write_kv_with_rope=UNTESTED)
    found = reported(capsys)
    assert found["warnings"] == ["mosaic: write_kv with rope is untested: a reason"]


@pytest.mark.parametrize(("cuda", "ptxas"), [(12080, "13.0"), (13000, "12.9"), (12090, None)])
def test_a_compiler_that_miscompiles_is_a_warning_on_a_gpu(cuda, ptxas, h200, monkeypatch, capsys):
    planned(monkeypatch)
    monkeypatch.setattr(toolchain, "cuda_version", lambda: cuda)
    monkeypatch.setattr(toolchain, "ptxas_version", lambda: ptxas)
    (warning,) = reported(capsys)["warnings"]
    assert "CUDA 12." in warning and "install CUDA 13" in warning
    monkeypatch.setattr(doctor, "jax", jax)
    assert reported(capsys)["warnings"] == []


def test_a_card_that_jax_does_not_use_is_a_warning(tmp_path, capsys):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA L4, 20480, 23034'\necho 'NVIDIA GH200, [N/A], [N/A]'\n")
    tool.chmod(0o755)
    found = reported(capsys)
    assert found["cards"] == [{"name": "NVIDIA L4", "free_bytes": 20 * 2**30, "total_bytes": 23034 * 2**20}]
    assert "jax does not use it" in found["warnings"][0]
    main(["doctor"])
    assert "NVIDIA L4: 20.0 of 22.5 GiB free" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "every start compiles everything" in reported(capsys)["warnings"][0]


def test_without_a_device_nothing_can_run(monkeypatch, capsys):
    def devices():
        raise RuntimeError("no supported devices found for platform CUDA")

    monkeypatch.setattr(doctor, "jax", SimpleNamespace(devices=devices, config=jax.config))
    found = reported(capsys, status=1)
    assert found["problems"] == ["jax has no device: no supported devices found for platform CUDA"]


def test_a_model_that_is_not_there_is_an_error():
    with pytest.raises(
        SystemExit, match=r"^jpaged doctor: error: model: /no/where is not a directory or a file in GGUF$"
    ):
        main(["doctor", "--model", "/no/where"])

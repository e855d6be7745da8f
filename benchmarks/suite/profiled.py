"""One launch of a kernel, for a profiler to look at."""

from typing import Any

from benchmarks.suite.jobs import Job
from benchmarks.suite.ladder import tool
from benchmarks.suite.worker import Send

PROFILE_S = 60.0
KERNELS = {"decode": ("paged_decode", 2), "ragged": ("ragged_paged", 1)}  # op -> name in CUDA, launches of one call


def job(op: str, implementation: str) -> Job | None:
    """Return a launch of an op under Nsight Compute; None where it is not installed. Its log is the summary."""
    profiler = tool("ncu")
    if profiler is None:
        return None
    name, launches = KERNELS[op]
    command = (
        profiler, "--set", "full", "--clock-control", "none", "--target-processes", "all",
        "--kernel-name", f"regex:{name}", "--launch-count", str(launches),
    )  # fmt: skip
    return Job(
        f"profile {op}", "launch", dict(op=op, implementation=implementation), silence_s=PROFILE_S, limit_s=PROFILE_S,
        command=command,
    )  # fmt: skip


def launch(options: dict[str, Any], send: Send) -> None:
    """Run decode of 32 x 4,096 tokens, or prefill of 4,096, once."""
    from benchmarks.kernels.implementations import choose, paged
    from benchmarks.kernels.workloads import Shape, make_workload
    from benchmarks.shared.device import open_device, prepare_environment

    prepare_environment()
    device, shape = open_device(tiny=False), Shape(128, 64)
    lens = [4096] * (32 if options["op"] == "decode" else 1)
    workload = make_workload(
        shape, lens, q_lens=None if options["op"] == "decode" else lens, l2_bytes=device.l2_bytes, most_sets=1
    )
    paged(choose(options["implementation"], device, shape), workload).output(0)

"""The arguments of every experiment: the device, the effort, and the place of results."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.expected import WrongOutput, check_output
from benchmarks.kernels.implementations import NAMES, Unsuitable, choose
from benchmarks.kernels.peers import Peer
from benchmarks.kernels.workloads import Shape, Workload
from benchmarks.shared.deadline import Deadline
from benchmarks.shared.device import Device
from benchmarks.shared.results import Report
from benchmarks.shared.timing import Effort, Timing, measure
from pallas_kernels import Kernels


def probe_device() -> None:
    """Compute a small sum. Raises the device's own error after a fault."""
    jax.block_until_ready(jnp.arange(8) + 1)


class Poisoned(Exception):
    """A fault has left this process without a device: nothing that it still starts can succeed."""


@dataclasses.dataclass
class Bench:
    """A run.

    Attributes:
        implementations: ours, of `implementations.NAMES`.
        peers: those that can run here.
        read_gb_per_s, matmul_tflop_per_s: ceilings of this run, once they are measured.
        probe: raises if the device computes nothing.
    """

    device: Device
    report: Report
    tiny: bool
    effort: Effort
    deadline: Deadline
    implementations: Sequence[str] = NAMES
    peers: Sequence[Peer] = ()
    read_gb_per_s: float | None = None
    matmul_tflop_per_s: float | None = None
    probe: Callable[[], None] = probe_device

    def sized(self, full: Any, tiny: Any) -> Any:
        return tiny if self.tiny else full

    def kernels(self, shape: Shape, case: Mapping[str, Any] | None = None) -> dict[str, Kernels]:
        """Our implementations that can serve a shape; for the others a row that says why not."""
        found = {}
        for name in self.implementations:
            try:
                found[name] = choose(name, self.device, shape)
            except Unsuitable as error:
                if case is not None:
                    self.report.add(**case, variant=name, status="skipped", reason=str(error))
        return found

    def leaves_out(self, **case: Any) -> bool:
        """Return whether to leave a case out because the time is up, which gets a row."""
        passed = self.deadline.passed
        if passed:
            self.report.add(**case, status="skipped", reason="time")
        return passed

    def fail(self, error: Exception, **case: Any) -> None:
        """Add the row of a variant that failed. Raises Poisoned if the device computes nothing any more."""
        status = "wrong" if isinstance(error, WrongOutput) else "failed"
        status = "skipped" if isinstance(error, Unsuitable) else status
        reason = str(error) if status != "failed" else f"{type(error).__name__}: {error}"[:600]
        self.report.add(**case, status=status, reason=reason)
        if status == "failed":
            try:
                self.probe()
            except Exception as fault:
                raise Poisoned(f"the device computes nothing any more: {fault}"[:300]) from error

    def compare(
        self, case: Mapping[str, Any], workload: Workload, variants: Mapping[str, Callable[[], Any]],
        workloads: Mapping[str, Workload] | None = None,
    ) -> tuple[dict[str, Timing], dict[str, dict[str, Any]]]:  # fmt: skip
        """Prepare and check each variant, then time the correct ones, interleaved.

        A variant that fails gets its row here. Return timings, and for each variant further fields of its row.

        Args:
            workloads: to compare a variant's output with, where it isn't `workload`.
        """
        timed: dict[str, Any] = {}
        notes: dict[str, dict[str, Any]] = {}
        for name, prepare in variants.items():
            expected = (workloads or {}).get(name, workload)
            try:
                each = prepare()
                each.compile()
                last = (each.sets or expected.sets) - 1
                outputs = {i: np.asarray(each.output(i)) for i in sorted({0, last})}
                errors = [check_output(output, expected, i) for i, output in outputs.items()]
                timed[name], notes[name] = each, {"error": max(errors), "status": "ok"}
            except Exception as error:  # of a compiler, a driver, another library: the other variants go on
                self.fail(error, **case, variant=name)
        timings = measure(timed, self.effort)
        for name, each in timed.items():
            notes[name] |= {"calls": each.calls, "rotated_bytes": workload.rotated_bytes}
            if hasattr(each, "empty"):
                empty = measure({"empty": each.empty()}, self.effort._replace(rounds=1))["empty"]
                notes[name]["host_us"] = 1e6 * empty.median
        return timings, notes

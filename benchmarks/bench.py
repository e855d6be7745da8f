"""What every experiment is handed: the device, how much to measure, where results go."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.device import Device
from benchmarks.expected import WrongOutput, check_output
from benchmarks.implementations import NAMES, Unsuitable, choose
from benchmarks.peers import Peer
from benchmarks.results import Report
from benchmarks.timing import Deadline, Effort, Timing, measure
from benchmarks.workloads import Shape, Workload
from pallas_kernels import Kernels


@dataclasses.dataclass
class Bench:
    """A run.

    Attributes:
        implementations: ours, of `implementations.NAMES`.
        peers: those that can run here.
        read_gb_per_s, matmul_tflop_per_s: ceilings of this run, once they are measured.
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

    def out_of_time(self, **case: Any) -> bool:
        """Whether to leave a case out because the time is up; says so in the results."""
        if self.deadline.passed:
            self.report.add(**case, status="skipped", reason="time")
        return self.deadline.passed

    def compare(
        self, case: Mapping[str, Any], workload: Workload, variants: Mapping[str, Callable[[], Any]],
        workloads: Mapping[str, Workload] | None = None,
    ) -> tuple[dict[str, Timing], dict[str, dict[str, Any]]]:  # fmt: skip
        """Prepares and checks each variant, then times those that are right, interleaved.

        Whatever fails gets its row here. Returns timings, and for each variant what its row should say besides.

        Args:
            workloads: what a variant's output is to be compared with, where it isn't `workload`.
        """
        timed: dict[str, Any] = {}
        notes: dict[str, dict[str, Any]] = {}
        for name, prepare in variants.items():
            expected = (workloads or {}).get(name, workload)
            try:
                each = prepare()
                last = (each.sets or expected.sets) - 1
                errors = [check_output(np.asarray(each.output(i)), expected, i) for i in sorted({0, last})]
                timed[name], notes[name] = each, {"error": max(errors), "status": "ok"}
            except Unsuitable as error:
                self.report.add(**case, variant=name, status="skipped", reason=str(error))
            except WrongOutput as error:
                self.report.add(**case, variant=name, status="wrong", reason=str(error))
            except Exception as error:  # of a compiler, a driver, somebody's library: the others go on
                self.report.add(**case, variant=name, status="failed", reason=f"{type(error).__name__}: {error}"[:600])
        timings = measure(timed, self.effort)
        for name, each in timed.items():
            notes[name] |= {"calls": each.calls, "rotated_bytes": workload.rotated_bytes}
            if hasattr(each, "empty"):
                empty = measure({"empty": each.empty()}, self.effort._replace(rounds=1))["empty"]
                notes[name]["host_us"] = 1e6 * empty.median
        return timings, notes

"""Checks and times jpaged on a GPU, in calls of nine minutes:

    python benchmarks/gpu_suite.py --out results              first: correctness, faults and speed of each kernel
    python benchmarks/gpu_suite.py --call 2 --out results     every check of correctness
    python benchmarks/gpu_suite.py --call 3 --out results     sweeps of decode, prefill and writes; the cost of paging
    python benchmarks/gpu_suite.py --call 4 --out results     tuning and throughput
    python benchmarks/gpu_suite.py --tiny                     no GPU: small shapes, to see that the first call works

Runs from a bare checkout with jax, flax, transformers and numpy, and without a network. Any other missing package or
tool costs its own part, and a row names it. Parts of the first call:

    smoke      each kernel on small inputs, each cell in a process of its own, four at a time
    demo       greedy tokens of the demo model, compared with a CPU's, through the offline API and over HTTP
    ladder     for each red cell simpler and simpler forms until one is green, a memory checker, and the machine code
    ceilings   read bandwidth and matrix products of the device
    attention  decode, prefill and mixed steps; Mosaic apart from Triton and the other libraries
    step       one decode step of Llama-3.1-8B with random parameters, at 1 and 64 sequences
    profile    one decode and one ragged launch under Nsight Compute
    check      as many checks of correctness as the time that is left allows

A fault or a hang ends its own process: a cell that has sent nothing for 40 seconds is killed, and an experiment goes on
behind the case that ended its process. `plan.py` has the shares of the parts and the compile times they rest on. The
first call compiles the Llama step beside the smoke cells, so XLA chooses its products on a device that is not idle.

Rows go to results.json in --out as they come; report.md follows after each part, plots at the end. artifacts.tar.gz
holds machine code, logs and profiles.

Exit status: 0 if all is well, 1 if a part or a check failed.
"""

import argparse
import fcntl
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared.deadline import Deadline
from benchmarks.shared.device import CACHE, CHECKOUT
from benchmarks.shared.results import Row, write_tables
from benchmarks.suite import profiled
from benchmarks.suite.cells import HEAD_DIMS, Cell, cells
from benchmarks.suite.chains import COMPILE_SILENCE_S, SHARED_MEMORY, Chains
from benchmarks.suite.jobs import Chain, Job
from benchmarks.suite.plan import AT_ONCE, BUDGET_S, CALLS, CLOSING_S

MIN_SECONDS = 5.0  # of time left to start a part with
SERVER_PACKAGES = ("aiohttp", "pydantic", "prometheus_client", "jinja2", "tqdm")
MULTI_SPLIT = ("decode, 2 to 4 splits", "decode, more splits")
STEP_MEMORY = {1: "0.3", 64: "0.42"}  # of the device, by batch: two steps and the smoke cells have it together
SWEEP_MEMORY = "0.35"  # of each of two processes
RED = ("wrong", "failed", "killed")


def chosen(names: Sequence[str], call: int) -> list[str]:
    """Return the parts of a call that are in `names`, in order; all if there are none."""
    return [part for part in CALLS[call] if not names or part in names]


def share(name: str, left: Sequence[str], seconds: float, call: int) -> float:
    """Return a part's time, of the seconds that are left for it and the parts after it."""
    return seconds * CALLS[call][name] / sum(CALLS[call][each] for each in left)


class Suite(Chains):
    """Runs the parts of a call."""

    def run(self, parts: Sequence[str]) -> int:
        """Run parts in order. Return the exit status."""
        deadline = Deadline(self.args.budget - CLOSING_S)
        (device,) = self._started([self._describe_device()])
        if self.args.isolate:
            self._hold()
        for name, start in {"demo": self._start_demo, "step": self._start_steps}.items():
            if name in parts and parts[0] == "smoke" and self.args.isolate:
                self._beside[name] = start()
        self._start_builder(parts)
        for i, name in enumerate(parts):
            start_s = time.monotonic()
            if deadline.left < MIN_SECONDS:
                self.report.end_part(name, status="skipped", reason="time", seconds=0.0)
                continue
            seconds = share(name, parts[i:], deadline.left, self.args.call)
            self.report.say(f"part {name}: up to {seconds:.0f} s")
            end: Row = dict(status="ok")
            try:
                PARTS[name](self, Deadline(seconds))
            except Exception as error:
                end = dict(status="failed", reason=f"{type(error).__name__}: {error}"[:600])
            self.report.end_part(name, **end, seconds=time.monotonic() - start_s)
            write_tables(self.report, "GPU suite")
        self._pool.wait([device], deadline)
        self._plot()
        print(write_tables(self.report, "GPU suite"))
        bad = [row for row in self.report.rows if row.get("status") in RED]
        return int(bool(bad) or any(end["status"] == "failed" for end in self.report.parts.values()))

    # Parts

    def smoke(self, deadline: Deadline) -> None:
        """Run every cell. The device is not measured, so the demo model and the Llama step compile beside them."""
        each = [(cell, self._smoke_cell(cell)) for cell in cells(self.args.tiny)]
        late = self._pool.run([chain for _, chain in each], deadline, at_once=AT_ONCE)
        for cell, chain in each:
            if chain in late:
                self.report.add(**cell.row, status="skipped", reason="time")
        if "step" in self._beside and self._red(("mosaic",), (*MULTI_SPLIT, "write", "write, rope, 3 KV heads")):
            self._pool.kill("Mosaic's cells are red: Triton takes its place", self._beside["step"])
            self._beside["step"] = self._start_steps("triton")

    def demo(self, deadline: Deadline) -> None:
        """Compare the demo model's tokens with the CPU's."""
        self._pool.wait(self._beside.get("demo") or self._start_demo(), deadline)
        expected = self._generated.pop("demo on the CPU", None)
        for name, found in self._generated.items():
            from benchmarks.suite.demo import compare

            row = dict(experiment="demo", what=name, kernels=found["kernels"])
            if expected is None:
                self.report.add(**row, status="skipped", reason="the CPU's tokens are not known")
            else:
                self.report.add(**row, **compare(expected["outputs"], found["outputs"]))

    def ladder(self, deadline: Deadline) -> None:
        """Look at red cells: first one of each kernel, then the others."""
        red = [(cell, status) for cell, status in self._cells if status in RED]
        first: dict[tuple[str, str], Cell] = {}
        for cell, _ in red:
            first.setdefault((cell.implementation, cell.op.partition(",")[0]), cell)
        red.sort(key=lambda each: each[0] not in first.values())
        chains = [chain for cell, status in red for chain in (self._climb(cell), self._evidence(cell, status))]
        self._pool.run(chains, deadline, at_once=AT_ONCE)

    def ceilings(self, deadline: Deadline) -> None:
        """Measure the limits of the device."""
        self._pool.run([self._experiment("ceilings", "ceilings", lock=False, deadline=deadline)], deadline, at_once=1)

    def attention(self, deadline: Deadline) -> None:
        """Time the attention ops. All processes compile side by side, and one at a time measures."""
        self._release()
        chains = []
        for group, ours, peers in self._groups():
            blocked = self._red(ours, MULTI_SPLIT)
            ragged = self._red(ours, ("ragged, prompts", "ragged, mixed"))
            for block_size in self.args.block_sizes:
                chains.append(self._experiment(
                    f"decode, {group}, block {block_size}", "anchors", dict(block_size=block_size),
                    ours=ours, peers=peers, without=blocked, deadline=deadline,
                ))  # fmt: skip
            block = dict(block_size=self.args.block_sizes[0])
            more: dict[str, Any] = dict(ours=ours, peers=peers, without=ragged, deadline=deadline)
            chains.append(self._experiment(f"prefill, {group}", "prompts", block, **more))
            for step in range(1 if self.args.tiny else 2):
                chains.append(self._experiment(f"mixed step {step}, {group}", "mixed", block | dict(step=step), **more))
        self._pool.run(chains, deadline, at_once=len(chains))

    def step(self, deadline: Deadline) -> None:
        """Time the steps that were compiled beside the smoke cells."""
        self._release()
        self._pool.wait(self._beside.get("step") or self._start_steps(), deadline)

    def profile(self, deadline: Deadline) -> None:
        """Run one launch of each attention kernel under Nsight Compute."""
        red = self._red(("mosaic",), (*MULTI_SPLIT, "ragged, prompts"))
        self._pool.run(
            [self._profile(op, "triton" if red else "mosaic") for op in profiled.KERNELS], deadline, at_once=1
        )

    def check(self, deadline: Deadline) -> None:
        """Run the checks of correctness, each implementation in a process of its own."""
        names = ("reference",) if self.args.tiny else ("mosaic", "triton")
        chains = [
            self._experiment(f"check {name}", "check", ours=(name,), lock=False, deadline=deadline) for name in names
        ]
        self._pool.run(chains, deadline, at_once=len(chains))

    def sweep(self, deadline: Deadline) -> None:
        """Time whole grids."""
        self._release()
        chains = [
            self._experiment(
                f"{name}, {group}, block {block_size}", "sweep", dict(name=name, block_sizes=[block_size]), ours=ours,
                peers=peers if name != "write" else (), deadline=deadline, memory=SWEEP_MEMORY,
            )
            for name in ("decode", "prefill", "write")
            for block_size in (self.args.block_sizes if name == "decode" else self.args.block_sizes[:1])
            for group, ours, peers in self._groups()
        ]  # fmt: skip
        self._pool.run(chains, deadline, at_once=2)

    def paging(self, deadline: Deadline) -> None:
        """Time the same kernel through tables in order and in disorder."""
        self._release()
        chains = [
            self._experiment(
                f"paging, {group}", "paging", dict(block_sizes=self.args.block_sizes), ours=ours, deadline=deadline
            )
            for group, ours, _ in self._groups()
        ]
        self._pool.run(chains, deadline, at_once=len(chains))

    def tune(self, deadline: Deadline) -> None:
        """Search the kernels' configurations with tune.py; its journal and its table go to the archive."""
        folder = self._folder / "tune"
        folder.mkdir()
        command = ("--out", str(folder), "--table", str(folder / "tuned.json"), "--budget", f"{deadline.left - 20:.0f}")
        (folder / "tuned.json").write_text((CHECKOUT / "pallas_kernels" / "tuned.json").read_text())
        extra = ("--tiny", "--kernels", "mosaic.decode", "--head-dims", "64") if self.args.tiny else ()
        self._pool.run([self._script("tune", "benchmarks.kernels.tune", *command, *extra)], deadline, at_once=1)
        self._keep(folder)
        if (folder / "tuning.json").exists():
            for row in json.loads((folder / "tuning.json").read_text())["rows"]:
                self.report.add(**row)

    def throughput(self, deadline: Deadline) -> None:
        """Count the tokens per second of a whole workload."""
        self._release()
        settings = dict(model="llama-3.2-1b", requests=256, block_size=self.args.block_sizes[0])
        chain = self._experiment("throughput", "throughput", settings, silence_s=COMPILE_SILENCE_S, deadline=deadline)
        self._pool.run([chain], deadline, at_once=1)

    def _start_demo(self) -> list[Chain]:
        chains = [self._generate("demo on the CPU", "demo", "reference", {"JAX_PLATFORMS": "cpu"})]
        names = ("reference",) if self.args.tiny else ("mosaic", "triton")
        chains += [self._generate(f"demo, {name}", "demo", name) for name in names]
        missing = [package for package in SERVER_PACKAGES if importlib.util.find_spec(package) is None]
        if missing or self.args.tiny:
            reason = f"{', '.join(missing)} can't be imported" if missing else "a tiny run starts no server"
            self.report.add(experiment="demo", what="demo over HTTP", status="skipped", reason=reason)
        else:
            chains.append(self._generate("demo over HTTP", "server", names[0]))
        return self._started(chains)

    def _start_steps(self, kernels: str = "auto") -> list[Chain]:
        chains = []
        for batch in (2,) if self.args.tiny else (1, 64):
            block_size = self.args.block_sizes[0]
            chains.append(self._experiment(
                f"step of {batch}, {kernels}", "step",
                dict(model="llama-3.1-8b", batch=batch, block_size=block_size, kernels=kernels),
                silence_s=COMPILE_SILENCE_S, memory=STEP_MEMORY.get(batch), deadline=Deadline(self.args.budget),
            ))  # fmt: skip
        return self._started(chains)

    def _describe_device(self) -> Chain:
        end = yield Job("device", "device", dict(tiny=self.args.tiny), environment=SHARED_MEMORY)
        if end.status == "failed" and "jax sees no GPU" in str(end.reason):
            raise SystemExit(end.reason)

    def _start_builder(self, parts: Sequence[str]) -> None:
        """Compile FlashInfer beside the first parts, where it is installed."""
        wanted = any(name.startswith("flashinfer") for name in self.args.peers)
        found = all(importlib.util.find_spec(package) for package in ("torch", "flashinfer"))
        if not (wanted and found and self.args.isolate and not self.args.tiny and {"attention", "sweep"} & set(parts)):
            return

        def build() -> Chain:
            self._building = True
            end = yield Job("flashinfer", "flashinfer", {}, silence_s=BUDGET_S)
            self._building = False
            self.report.add(experiment="peers", variant="flashinfer", status=end.status, reason=end.reason)

        self._pool.start(build())

    def _started(self, chains: list[Chain]) -> list[Chain]:
        for chain in chains:
            self._pool.start(chain)
        return chains

    def _red(self, ours: Sequence[str], ops: Sequence[str]) -> list[str]:
        """Return the implementations that have not computed one of some ops at the head dim that is timed. Wrong
        results don't count: no process ends by them, and they are found again."""
        broken = {
            cell.implementation
            for cell, status in self._cells
            if status in ("failed", "killed") and cell.op in ops and cell.head_dim == HEAD_DIMS[0]
        }
        return [name for name in ours if name in broken]

    def _groups(self) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """Return name, implementations and peers of each process that times the same cases."""
        peers = tuple(name for name in self.args.peers if not (self._building and name.startswith("flashinfer")))
        if self._building:
            self.report.add(experiment="peers", variant="flashinfer", status="skipped", reason="still compiling")
        if self.args.tiny:
            return [("reference", ("reference",), peers)]
        return [("mosaic", ("mosaic",), ()), ("others", ("triton",), peers)]

    def _hold(self) -> None:
        """Keep every job that measures waiting."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def _release(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _plot(self) -> None:
        try:
            from benchmarks.shared.plots import plot

            plot(self.report)
        except Exception as error:  # the rows are worth more than their pictures
            reason = f"{type(error).__name__}: {error}"
            self.report.end_part("plots", status="failed", reason=reason, seconds=0.0)


PARTS: dict[str, Callable[[Suite, Deadline], None]] = {
    name: getattr(Suite, name) for call in CALLS.values() for name in call
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CACHE / "gpu_suite", help="folder for results")
    parser.add_argument("--call", type=int, choices=tuple(CALLS), default=1, help="which parts (default 1)")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=[], metavar="NAME,...",
                        help="some parts of the call; default all")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="small shapes and one sample, on any device")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="for everything")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--peers", nargs="*", default=["flashinfer", "torch", "jax"], metavar="NAME",
                        help="beginnings of peers' names")  # fmt: skip
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[64, 16], help="the first one is the main one")
    parser.add_argument("--no-isolation", dest="isolate", action="store_false",
                        help="one process for everything: starts faster, but a crash ends everything")  # fmt: skip
    args = parser.parse_args(argv)
    unknown = [name for name in args.parts if name not in CALLS[args.call]]
    if unknown:
        parser.error(f"--parts: call {args.call} has {', '.join(CALLS[args.call])}, not {', '.join(unknown)}")
    if args.tiny:
        args.block_sizes = [16]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with Suite(args) as suite:
        return suite.run(chosen(args.parts, args.call))


if __name__ == "__main__":
    sys.exit(main())

"""The chains of jobs that the GPU suite is made of, and the results that they leave."""

import argparse
import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.shared.archive import Archive
from benchmarks.shared.deadline import Deadline
from benchmarks.shared.results import Report, Row, with_floor
from benchmarks.suite import profiled, worker
from benchmarks.suite.cells import Cell
from benchmarks.suite.jobs import HEARTBEAT_S, WORKER, Chain, End, InProcess, Job, Pool
from benchmarks.suite.ladder import disassemble, dumps, evidence_job, rungs
from benchmarks.suite.plan import BUDGET_S

RESTARTS = 2  # of an experiment whose process died
EXPERIMENT_SILENCE_S = 60.0  # until an experiment measures: other libraries are slow to import
COMPILE_SILENCE_S = 150.0  # of jobs that compile a whole model
STOP_S = 8.0  # before the end of its part an experiment starts no case
KEPT = (".ptx", ".sass", ".sass_ctrl", ".ptxas", ".resources.txt", "log.txt", ".json", ".jsonl")
Status = Generator[Job, End, str]  # a chain that returns the status of its last row
# The table of the report that an experiment's rows go to, where it has another name.
TABLES = {"anchors": "decode", "prompts": "prefill", "check": "correctness"}
# Several processes have the device at a time: none may take all of its memory as it starts.
SHARED_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class Chains:
    """Makes chains of jobs, and keeps the messages of their processes.

    Args:
        program: the command line of a worker.
        silence_s: how long a smoke cell may send nothing.
    """

    def __init__(self, args: argparse.Namespace, program: Sequence[str] = WORKER, silence_s: float = HEARTBEAT_S):
        self.args, self._silence_s = args, silence_s
        self.report = Report(args.out / "results.json", {})
        self.archive = Archive(args.out / "artifacts.tar.gz")
        self._folder = Path(tempfile.mkdtemp(prefix="gpu_suite_"))
        self._pool = (
            Pool(self._folder, self._receive, program)
            if args.isolate
            else InProcess(self._folder, self._receive, worker.work)
        )
        self._lock = (self._folder / "lock").open("w")
        self._ceilings: dict[str, float] = {}
        self._cells: list[tuple[Cell, str]] = []  # smoke cells that have run, and how they ended
        self._rows: dict[str, Row] = {}  # the last row of each job
        self._cases: dict[str, list[Row]] = {}  # started cases, by job
        self._building = False  # FlashInfer's modules are being compiled
        self._generated: dict[str, Row] = {}  # outputs of the demo model, by job
        self._beside: dict[str, list[Chain]] = {}  # chains of a later part that were started beside the first one

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.kill("the suite ended")
        self._lock.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _smoke_cell(self, cell: Cell) -> Chain:
        status = yield from self._cell(cell, cell.row, cell.name)
        self._cells.append((cell, status))

    def _cell(self, cell: Cell, row: Row, name: str) -> Status:
        options = dict(cell=dataclasses.asdict(cell), tiny=self.args.tiny, row=row)
        end = yield Job(name, "cell", options, silence_s=self._silence_s, environment=SHARED_MEMORY)
        return self._status(name, row, end)

    def _climb(self, cell: Cell) -> Chain:
        for number, (label, simpler) in enumerate(rungs(cell), 1):
            row = cell.row | dict(experiment="ladder", rung=number, simpler=label)
            status = yield from self._cell(simpler, row, f"rung {number} of {cell.name}")
            if status == "ok":
                return

    def _evidence(self, cell: Cell, status: str) -> Chain:
        job = evidence_job(cell, status, self.args.tiny)
        folder = self._folder / f"dump_{job.folder}"
        folder.mkdir()
        end = yield dataclasses.replace(job, environment=SHARED_MEMORY | dumps(folder))
        self._status(job.name, dict(job.options["row"]), end)
        disassemble(folder)
        self._keep(folder, self._pool.folder / job.folder)

    def _experiment(
        self, name: str, experiment: str, settings: Row | None = None, *, ours: Sequence[str] | None = None,
        peers: Sequence[str] = (), without: Sequence[str] = (), lock: bool = True, deadline: Deadline,
        silence_s: float = EXPERIMENT_SILENCE_S, memory: str | None = None,
    ) -> Chain:  # fmt: skip
        """Run an experiment, and go on behind a case that ends its process.

        Args:
            deadline: no case starts after it.
            memory: the part of the device's memory that its processes may take.
            without: implementations of `ours` that are left out because their cells are red.
        """
        table = (settings or {}).get("name") or TABLES.get(experiment, experiment)
        for each in without:
            self.report.add(experiment=table, variant=each, status="skipped", reason=f"{name}: its cells are red")
        ours = ours if ours is None else [each for each in ours if each not in without]
        if ours == [] and not peers:
            return
        for attempt in range(1 + RESTARTS):
            tried = [case for each in range(attempt) for case in self._cases.get(f"{name} ({each})", [])]
            job = Job(
                f"{name} ({attempt})", "experiments",
                dict(
                    experiment=experiment, settings=settings or {}, implementations=ours, peers=list(peers),
                    budget=deadline.left - STOP_S, tiny=self.args.tiny, rounds=self.args.rounds, tried=tried,
                    ceilings=self._ceilings,
                    lock=str(self._folder / "lock") if lock and self.args.isolate else None,
                ),
                silence_s=silence_s,
                environment=SHARED_MEMORY | ({"XLA_PYTHON_CLIENT_MEM_FRACTION": memory} if memory else {}),
            )  # fmt: skip
            end = yield job
            if end.status == "ok":
                return
            cases = self._cases.get(job.name)
            case = cases[-1] if cases else dict(experiment=table)
            self.report.add(**case, variant=name, status=end.status, reason=end.reason, log=end.log)
            if not cases:
                return

    def _generate(self, name: str, work: str, kernels: str, environment: dict[str, str] | None = None) -> Chain:
        options = dict(kernels=kernels, dtype="float32" if self.args.tiny else "bfloat16")
        end = yield Job(
            name, work, options, silence_s=COMPILE_SILENCE_S, environment=SHARED_MEMORY | (environment or {})
        )
        if end.status != "ok":
            self.report.add(experiment="demo", what=name, status=end.status, reason=end.reason, log=end.log)

    def _profile(self, op: str, implementation: str) -> Chain:
        row = dict(experiment="profile", op=op, implementation=implementation)
        job = profiled.job(op, implementation)
        if job is None or self.args.tiny:
            self.report.add(**row, status="skipped", reason="ncu is not installed" if job is None else "needs a GPU")
            return
        end = yield job
        text = (self._pool.folder / job.folder / "log.txt").read_text(errors="replace")
        self.archive.add({f"profile {op}.txt": text.encode()})
        self.report.add(**row, status=end.status, reason=end.reason, text=text[-20000:])

    def _script(self, name: str, module: str, *flags: str) -> Chain:
        """Run one of the other benchmarks, again if its process died: it goes on by its own journal."""
        for attempt in range(1 + RESTARTS):
            end = yield Job(f"{name} ({attempt})", "script", dict(module=module, flags=flags), silence_s=BUDGET_S)
            self.report.add(experiment=name, status=end.status, reason=end.reason, log=end.log)
            if end.status == "ok":
                return

    def _receive(self, job: Job, kind: str, value: Any) -> None:
        if kind == "row":
            if value.get("experiment") == "step" and value.get("status") == "ok":
                value = with_floor(value, self._ceilings.get("read"))  # it started before the ceiling was measured
            self._rows[job.name] = value
            if not (value.get("experiment") == "peers" and value in self.report.rows):
                self.report.add(**value)
        elif kind == "say":
            self.report.say(f"{job.name}: {value}")
        elif kind == "environment":
            versions = self.report.environment.get("versions", {}) | value["versions"]
            self.report.environment = value | {"versions": versions, "command": " ".join(sys.argv)}
        elif kind == "ceilings":
            self._ceilings |= {name: figure for name, figure in value.items() if figure is not None}
        elif kind == "case":
            self._cases.setdefault(job.name, []).append(value)
        elif kind == "generated":
            self._generated[job.name] = value

    def _status(self, name: str, row: Row, end: End) -> str:
        """Return the status of a cell, from the row that it sent or, failing that, from how it ended."""
        if name not in self._rows:
            self.report.add(**row, status=end.status, reason=end.reason, seconds=end.seconds, log=end.log)
            return end.status
        return self._rows[name]["status"]

    def _keep(self, *folders: Path) -> None:
        """Add machine code, logs and tables in folders to the archive."""
        paths = [path for folder in folders for path in sorted(folder.glob("*")) if path.name.endswith(KEPT)]
        files = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in paths}
        for name in self.archive.add(files):
            self.report.say(f"{name} does not fit the archive")

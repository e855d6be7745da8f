"""The scheduler's work grows with the running sequences, not with the waiting requests: the instructions of Python are
counted in each case of benchmarks/engine/scheduler.py."""

import gc
import json
import sys
import threading

import pytest

from benchmarks.engine.scheduler import CASES, LIFETIME, WARM_UP
from jpaged.core.queue import RequestQueue
from tests.benchmarks.test_benchmarks import run

STEPS = 16  # a sequence gets a block in one of them


def every_second(first: int) -> list:
    """All cases, of which every second one is in the usual tier."""
    return [pytest.param(case, marks=[] if i % 2 == first else pytest.mark.deep) for i, case in enumerate(CASES)]


def count_instructions(function) -> int:
    """Return the number of bytecode instructions that a call executes, without those of other threads.

    No garbage is collected meanwhile: that would run the finalizers of objects of earlier tests.
    """
    monitoring, tool, count, thread = sys.monitoring, sys.monitoring.PROFILER_ID, 0, threading.get_ident()

    def add(code, offset):
        nonlocal count
        if threading.get_ident() == thread:  # another thread would write a number that it read before
            count += 1

    gc.disable()
    monitoring.use_tool_id(tool, "instructions")
    try:
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, add)
        monitoring.set_events(tool, monitoring.events.INSTRUCTION)
        function()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
        gc.enable()
    return count


def instructions(case: str, running: int, waiting: int) -> float:
    """Return the instructions of a step, of `add` and of `abort`, on average."""
    load, count = CASES[case](running, waiting, STEPS), 0
    for number in range(-WARM_UP, STEPS):
        load.prepare()
        if number < 0:
            load.events()
            load.step()
        else:
            count += count_instructions(load.events) + count_instructions(lambda: load.check(load.step()[0]))
    return count / STEPS


@pytest.mark.parametrize("case", every_second(0))
def test_waiting_requests_cost_nothing(case):
    few, many = (instructions(case, LIFETIME, waiting) for waiting in (20, 2000))
    assert many < 1.05 * few, f"{few:.0f} instructions, {many:.0f} with 2,000 waiting requests"


@pytest.mark.parametrize("case", every_second(1))
def test_cost_is_linear_in_running_sequences(case):
    some, more = (instructions(case, factor * LIFETIME, 20) for factor in (1, 2))
    assert more < 2.05 * some, f"{some:.0f} instructions, {more:.0f} for twice the sequences"


def test_search_of_all_waiting_requests_is_noticed(monkeypatch):
    search = property(lambda queue: next((request for request in queue if request.admitted), None))
    monkeypatch.setattr(RequestQueue, "first_admitted", search)
    with pytest.raises(AssertionError, match="with 2,000 waiting"):
        test_waiting_requests_cost_nothing("held")


@pytest.mark.deep
def test_benchmark_writes_every_case(tmp_path):
    sizes = ("--running", "64", "128", "--waiting", "0", "30", "--steps", "2")
    done = run("engine/scheduler.py", "--out", str(tmp_path), *sizes)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["case"], row["running"], row["waiting"]) for row in rows] == [
        (case, running, waiting) for case in CASES for running in (64, 128) for waiting in (0, 30)
    ]
    assert all(row["step_us"] > 0 and row["ratio"] > 0 for row in rows)
    assert "| preemption | 128 | 30 |" in (tmp_path / "report.md").read_text()

"""Calls on a worker's thread: results, turns, and interrupts of the caller at any moment."""

import gc
import signal
import sys
import threading
import time

import pytest

from jpaged.worker import Worker, _Task
from tests.support.patience import PATIENCE_S, until


def interrupt():
    """Ctrl-C, as the main thread meets it: also where it waits."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_run_returns_and_raises_on_one_other_thread():
    worker = Worker()
    first, second = (worker.run(lambda stop: threading.current_thread()) for _ in range(2))
    assert first is second is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        worker.run(lambda stop: 1 / 0)
    assert worker.run(lambda stop: stop.is_set()) is False


def test_run_from_several_threads_takes_turns():
    worker, inside, most = Worker(), [], []

    def function(stop):
        inside.append(1)
        time.sleep(0.01)
        most.append(len(inside))
        inside.pop()

    callers = [threading.Thread(target=worker.run, args=(function,)) for _ in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert most == [1] * 5


def test_interrupt_stops_the_function_and_waits_for_it():
    worker, ended = Worker(), []

    def function(stop):
        interrupt()
        assert stop.wait(PATIENCE_S)
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        worker.run(function)
    assert ended


def test_second_interrupt_raises_at_once_and_the_next_call_waits():
    worker, release, ended = Worker(), threading.Event(), []

    def function(stop):
        interrupt()
        assert stop.wait(PATIENCE_S)
        time.sleep(0.05)  # The caller waits again.
        interrupt()
        assert release.wait(PATIENCE_S)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        worker.run(function)
    assert not ended
    release.set()
    assert worker.run(lambda stop: list(ended)) == [True]


def test_interrupt_before_its_turn_raises_at_once_and_never_runs():
    worker, begun, release, ran = Worker(), threading.Event(), threading.Event(), []
    other = threading.Thread(target=worker.run, args=(lambda stop: begun.set() or release.wait(PATIENCE_S),))
    other.start()
    assert begun.wait(PATIENCE_S)
    threading.Thread(target=lambda: until(lambda: not worker._calls.empty()) or interrupt()).start()
    with pytest.raises(KeyboardInterrupt):
        worker.run(lambda stop: ran.append(True))
    assert other.is_alive()
    release.set()
    other.join()
    assert worker.run(lambda stop: ran) == []


def interrupted_at(instruction: int, function) -> bool:
    """Call a function, raising KeyboardInterrupt before the n-th instruction of the caller's side; whether there was
    one."""
    count, tool, codes = 0, 4, (Worker.run.__code__, _Task.wait.__code__)

    def before_instruction(code, offset):
        nonlocal count
        if (count := count + 1) == instruction:
            raise KeyboardInterrupt

    sys.monitoring.use_tool_id(tool, "interrupts")
    sys.monitoring.register_callback(tool, sys.monitoring.events.INSTRUCTION, before_instruction)
    for code in codes:
        sys.monitoring.set_local_events(tool, code, sys.monitoring.events.INSTRUCTION)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        for code in codes:
            sys.monitoring.set_local_events(tool, code, 0)
        sys.monitoring.register_callback(tool, sys.monitoring.events.INSTRUCTION, None)
        sys.monitoring.free_tool_id(tool)
    return False


def test_interrupt_at_any_instruction_leaves_the_worker_usable_and_nothing_running():
    worker, running = Worker(), []

    def function(stop):
        running.append(True)
        stop.wait(0.001)
        running.pop()

    instruction = 0
    while interrupted_at(instruction := instruction + 1, lambda: worker.run(function)):
        assert not running
        assert worker.run(lambda stop: 7) == 7
    assert instruction > 20


def test_thread_ends_with_its_worker():
    class Owner:
        def __init__(self):
            self.worker = Worker()

        def work(self, stop):
            return threading.current_thread()

    owner = Owner()
    thread = owner.worker.run(owner.work)
    assert thread.is_alive()
    del owner
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()

"""Child processes: crashes, timeouts, and processes that do not read."""

import json
import os
import signal
import sys
import threading

import pytest

from jpaged.child import ChildFailed, Children, confine, serve
from tests.support.patience import PATIENCE_S

MODULE = "tests.test_child"


def _setup(greeting):
    seen = 0

    def answer(question):
        nonlocal seen
        seen += 1
        match question:
            case "exit":
                os._exit(1)
            case "hang":
                signal.pause()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "priority":
                return os.getpriority(os.PRIO_PROCESS, 0)
        return [greeting, os.getpid(), seen, len(question)]

    return answer


@pytest.fixture
def children():
    return Children(MODULE, "hello")


def ask(children, question="", timeout_s=PATIENCE_S):
    return children.ask(json.dumps(question), timeout_s)


def test_one_process_answers_one_caller(children):
    (greeting, pid, _, _), (_, again, seen, _) = ask(children), ask(children)
    assert greeting == "hello" and pid == again and seen == 2


def test_questions_may_be_larger_than_a_pipe(children):
    assert ask(children, "x" * 3_000_000)[3] == 3_000_000


def test_a_process_that_ended_is_replaced_and_the_question_asked_again(children):
    _, pid, _, _ = ask(children)
    os.kill(pid, signal.SIGKILL)
    _, other, seen, _ = ask(children)
    assert other != pid and seen == 1


def test_a_question_that_ends_processes_fails_and_the_next_one_works(children):
    with pytest.raises(ChildFailed, match="crashed"):
        ask(children, "exit")
    assert ask(children)[2] == 1


def test_a_question_without_an_answer_in_time_fails_and_its_process_is_killed(children):
    _, pid, _, _ = ask(children)
    with pytest.raises(ChildFailed, match=r"was not done within 0.3 seconds"):
        ask(children, "hang", 0.3)
    _, other, seen, _ = ask(children)
    assert other != pid and seen == 1
    (killed,) = children._killed or [None]
    assert killed is None or killed.process.wait(PATIENCE_S) == -signal.SIGKILL
    ask(children)
    assert not children._killed


def test_a_process_that_does_not_read_has_a_deadline(children):
    """Its pipe is full before the question is written."""
    _, pid, _, _ = ask(children)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ChildFailed):
        ask(children, "x" * 1_000_000, 0.3)
    assert ask(children)[1] != pid


def test_callers_at_once_have_a_process_each(children):
    found = []
    threads = [threading.Thread(target=lambda: found.append(ask(children)[1])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 2
    assert ask(children)[1] in found


def test_started_processes_are_used(children):
    children.start()
    children.start()
    (started,) = children._idle
    assert ask(children)[1] == started.process.pid


def test_a_slow_question_has_the_lowest_priority(children, monkeypatch):
    assert ask(children, "priority") == os.getpriority(os.PRIO_PROCESS, 0)
    with monkeypatch.context() as patched:
        patched.setattr("jpaged.child.RENICE_AFTER_S", 0.0)
        assert ask(children, "priority") == 19
    if os.geteuid() == 0:  # others may not raise it again
        assert ask(children, "priority") == 0


if __name__ == "__main__":
    confine(2**30)
    serve(_setup)
    sys.exit()

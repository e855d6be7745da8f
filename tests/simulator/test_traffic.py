"""Arrivals by schedule and by users, and traces in files."""

import json

import pytest

from jpaged.bench.workload import Lengths
from jpaged.simulator.traffic import MAX_TEXT, Call, Schedule, Users, calls_of, load_trace, save_trace

CALLS = calls_of([Lengths(3, 2), Lengths(4, 1, 0, 8), Lengths(5, 6, 1, 8)], [0.0, 1.5, 1.5])


def test_calls_have_texts_of_their_own_after_a_shared_prefix():
    assert CALLS[0] == Call(0.0, ((2, 3),), 2, 3)
    assert CALLS[1] == Call(1.5, ((0, 8), (4, 4)), 1, 5) and CALLS[1].num_prompt_tokens == 12
    assert CALLS[2] == Call(1.5, ((1, 8), (6, 5)), 6, 7)


def test_schedule_yields_each_request_once_when_it_is_due():
    schedule = Schedule(CALLS[::-1])
    assert schedule.next_arrival() == 0.0 and list(schedule.due(1.4)) == [CALLS[0]]
    assert schedule.next_arrival() == 1.5 and not list(schedule.due(1.4))
    assert len(list(schedule.due(2.0))) == 2 and schedule.next_arrival() is None


def test_users_wait_for_their_answers_and_think():
    users = Users(CALLS, 2, think_s=4.0)
    assert [call.arrival for call in users.due(1.9)] == [0.0] and users.next_arrival() == 2.0
    assert [call.arrival for call in users.due(2.5)] == [2.0] and users.next_arrival() is None
    users.ended(CALLS[0], 3.0)
    assert users.next_arrival() == 7.0 and not users.exhausted
    assert [(call.arrival, call.output) for call in users.due(8.0)] == [(7.0, 6)]
    users.ended(CALLS[0], 9.0)
    assert not list(users.due(13.0)) and users.exhausted and users.next_arrival() is None
    users.ended(CALLS[0], 14.0)
    assert users.next_arrival() is None


def test_users_that_do_not_think_begin_within_a_second():
    assert [call.arrival for call in Users(CALLS, 3).due(5.0)] == pytest.approx([0, 1 / 3, 2 / 3])


@pytest.mark.parametrize("users, think_s", [(0, 0.0), (-1, 0.0), (1, -1.0), (1, float("nan")), (1, float("inf"))])
def test_impossible_users_are_errors(users, think_s):
    with pytest.raises(ValueError, match=r"^users: "):
        Users(CALLS, users, think_s)


def test_trace_is_read_as_it_was_written(tmp_path):
    calls = [*CALLS, Call(2.0, ((1, 3), (7, 6)), 4, 9, width=3, beam=True, pin_s=2.5)]
    save_trace(calls, tmp_path / "trace")
    assert load_trace(tmp_path / "trace") == calls


LINE = CALLS[1]._asdict()


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2 is no request"),
        ("[1]", "line 2"),
        ({"arrival": 0.0}, "missing"),
        (LINE | {"output": 0}, "output: must be at least 1, not 0"),
        (LINE | {"output": "1"}, "output"),
        (LINE | {"width": 0}, "width"),
        (LINE | {"prompt": []}, "prompt"),
        (LINE | {"prompt": [[1, 0]]}, "prompt"),
        (LINE | {"prompt": [[1, 0], [2, 5]]}, "prompt"),
        (LINE | {"prompt": [[-1, 4]]}, "text"),
        (LINE | {"prompt": [[MAX_TEXT, 4]]}, "text"),
        (LINE | {"answer": -1}, "text"),
        (LINE | {"arrival": -1.0}, "arrival"),
        (LINE | {"arrival": float("nan")}, "arrival"),
        (LINE | {"pin_s": -1.0}, "pin_s"),
        (LINE | {"beam": 1}, "beam"),
        (LINE | {"more": 1}, "more"),
    ],
)
def test_broken_traces_are_errors_with_the_line(line, message, tmp_path):
    path = tmp_path / "trace"
    path.write_text(json.dumps(LINE) + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(ValueError, match=f"^trace: .*line 2.*{message}|^trace: .*{message}"):
        load_trace(path)


def test_an_empty_trace_is_an_error(tmp_path):
    (tmp_path / "trace").write_text("")
    with pytest.raises(ValueError, match=r"^trace: .* holds no request"):
        load_trace(tmp_path / "trace")

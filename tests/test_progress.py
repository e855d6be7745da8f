"""The progress of long work, as a bar and as lines in the log."""

import logging

import pytest

from jpaged import progress
from jpaged.progress import track


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass as a test says."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


def worked(clock, caplog, seconds):
    """The messages of work whose items take these seconds."""
    caplog.set_level(logging.INFO, logger="jpaged")
    for each in track(seconds, len(seconds), "compiled", "shape", bar=False):
        clock.now += each
    return caplog.messages


def test_the_first_line_comes_early_and_the_others_every_ten_seconds(clock, caplog):
    assert worked(clock, caplog, [2.0] * 12) == [
        "compiled 1 of 12 shapes, about 22 s left",
        "compiled 6 of 12 shapes, about 12 s left",
        "compiled 11 of 12 shapes, about 2 s left",
    ]


def test_short_work_has_no_lines(clock, caplog):
    assert worked(clock, caplog, [0.1] * 9) == []


def test_a_bar_is_drawn_instead_of_lines(caplog, capsys):
    caplog.set_level(logging.INFO, logger="jpaged")
    assert list(track(iter("abc"), 3, "compiled", "shape", bar=True)) == ["a", "b", "c"]
    text = capsys.readouterr().err
    assert "Compiled" in text and "3/3" in text and not caplog.messages

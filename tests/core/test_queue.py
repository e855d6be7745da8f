"""The turns of clients, by themselves."""

from jpaged.core.queue import MAX_IDLE_CLIENTS, Turns


def test_idle_clients_are_forgotten_and_waiting_ones_are_not():
    turns = Turns()
    assert turns.take("waiting", 5) == 0
    for number in range(3 * MAX_IDLE_CLIENTS):
        assert turns.take(f"idle {number}", 1) == 0
    assert len(turns._ends) > 3 * MAX_IDLE_CLIENTS, "all of them wait"
    turns.start(1)
    assert turns.take("newcomer", 1) == 1
    assert len(turns._ends) == 2
    assert turns.take("waiting", 1) == 5


def test_a_turn_that_started_late_does_not_turn_time_back():
    turns = Turns()
    turns.start(7)
    turns.start(3)
    assert turns.take("a", 2) == 7 and turns.take("a", 1) == 9
    assert turns.take(None, 1) == 7

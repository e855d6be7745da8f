"""The queue of requests against a sorted list, and the turns of clients."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.core import queue
from jpaged.core.block_pool import BlockPool
from jpaged.core.block_table import BlockTable
from jpaged.core.params import SamplingParams
from jpaged.core.queue import MAX_IDLE_CLIENTS, Queues, RequestQueue, Turns
from jpaged.core.request import Request, Sequence


def waiting(number, rank, client=None, admitted=False):
    """A request whose tenant is its client, and whose prompt's length tells it from others."""
    prompt = [1] * (1 + len(str(number)))
    return Request(
        str(number), prompt, SamplingParams(), 0, 1, rank=rank, client=client, tenant=client, admitted=admitted
    )


def check(found: RequestQueue, model: list[Request], clients: str) -> None:
    """Compare a queue with a sorted list of its requests, and check its chunks."""
    assert list(found) == model and len(found) == len(model) and bool(found) == bool(model)
    if model:
        assert found.first is model[0]
    assert found.first_admitted is next((request for request in model if request.admitted), None)
    assert [found.count(client) for client in clients] == [sum(r.client == c for r in model) for c in clients]
    assert found.num_prompt_tokens == sum(len(request.prompt_token_ids) for request in model)
    assert found.tenants.keys() == {request.tenant for request in model}
    for tenant, requests in found.tenants.items():
        own = [request for request in model if request.tenant == tenant]
        assert list(requests) == own and requests.num_prompt_tokens == sum(len(r.prompt_token_ids) for r in own)
    assert all(found._chunks) or found._chunks == [[]]
    assert max(map(len, found._chunks)) <= queue.MAX_CHUNK


@given(st.data())
def test_queue_equals_a_sorted_list(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "MAX_CHUNK", data.draw(st.integers(1, 4)))
        found, model, clients = RequestQueue(), [], "abc"
        for number in range(data.draw(st.integers(0, 40))):
            if model and data.draw(st.integers(0, 2)) == 0:
                request = model.pop(data.draw(st.integers(0, len(model) - 1)))
                assert request in found
                found.remove(request)
            else:
                rank = (*data.draw(st.tuples(st.integers(-1, 1), st.integers(0, 3))), number)
                request = waiting(number, rank, data.draw(st.sampled_from(clients)), data.draw(st.booleans()))
                assert request not in found
                found.add(request)
                model = sorted([*model, request], key=lambda request: request.rank)
            check(found, model, clients)
        if model:
            twin = waiting("twin", model[-1].rank)
            assert twin not in found
            with pytest.raises(AssertionError, match="twin is not in the queue"):
                found.remove(twin)


@pytest.mark.parametrize("takes_last", [False, True])
def test_a_long_queue_stays_in_small_chunks(takes_last):
    """A chunk is all that an insertion or a removal moves, but for the list of chunks."""
    found, size = RequestQueue(), queue.MAX_CHUNK
    for number in range(6 * size):
        found.add(waiting(number, (0, 0, number)))
    assert max(map(len, found._chunks)) <= size and len(found._chunks) <= 2 * 6
    for number in range(size):  # preempted requests come to the front
        found.add(waiting(number, (0, -1, -number)))
    assert max(map(len, found._chunks)) <= size and len(found._chunks) <= 2 * 7
    while found:
        found.remove(found._chunks[-1][-1] if takes_last else found.first)
    assert found._chunks == [[]]


def test_during_a_trial_other_requests_are_parked_until_their_release():
    queues, requests = Queues(), [waiting(number, (0, 0, number)) for number in range(4)]
    for request in requests:
        request.sequences.append(Sequence(request, [1], BlockTable(BlockPool(1, 1))))
    for request in requests[:3]:
        queues.add(request)
    queues.admit(requests[0])
    queues.restart(tried=[requests[1]])
    queues.add(requests[3])
    assert list(queues.waiting) == [requests[1]] and list(queues.parked) == [requests[0], *requests[2:]]
    queues.check_invariants()
    queues.drop(requests[2])
    queues.release([requests[2], requests[3]])
    assert list(queues.waiting) == [requests[1], requests[3]], "an ended request is not released"
    queues.release()
    assert list(queues.waiting) == [requests[0], requests[1], requests[3]] and queues.parked is None
    queues.check_invariants()
    queues.running.add(requests[0])
    with pytest.raises(AssertionError, match="queued twice"):
        queues.check_invariants()


def test_idle_clients_are_forgotten_and_waiting_ones_are_not():
    turns = Turns()
    assert turns.take("waiting", 5) == 0
    for number in range(3 * MAX_IDLE_CLIENTS):
        assert turns.take(f"idle {number}", 1) == 0
    assert len(turns._ends) > 3 * MAX_IDLE_CLIENTS, "all of them wait"
    turns.start(1)
    for number in range(4 * MAX_IDLE_CLIENTS):
        assert turns.take(f"newcomer {number}", 1) == 1
    assert not any(name.startswith("idle") for name in turns._ends)
    assert turns.take("waiting", 1) == 5


def test_clients_that_come_and_go_are_few():
    turns = Turns()
    for number in range(4 * MAX_IDLE_CLIENTS):
        turns.start(turns.take(str(number), 1) + 1)
        assert len(turns._ends) <= MAX_IDLE_CLIENTS + 1


def test_waiting_clients_are_looked_at_a_few_times_and_not_by_each_request():
    turns, looks = Turns(), 0
    for number in range(16 * MAX_IDLE_CLIENTS):
        before = turns._ends
        turns.take(str(number), 1)
        looks += turns._ends is not before
    assert looks == 4


def test_a_turn_that_started_late_does_not_turn_time_back():
    turns = Turns()
    turns.start(7)
    turns.start(3)
    assert turns.take("a", 2) == 7 and turns.take("a", 1) == 9
    assert turns.take(None, 1) == 7

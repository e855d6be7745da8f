"""Turns of clients at work on threads."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from jpaged.engine.async_engine import QueueFull
from jpaged.serving import turns
from jpaged.serving.service import LARGE_BYTES, REST_OF_KEYS, ServerConfig, Service
from jpaged.serving.turns import MAX_REST_S, ClientTurns


class Shop:
    """Turns at work that ends when it is told to."""

    def __init__(self, num_threads=2, max_waiting=10, rest=0):
        self.threads = ThreadPoolExecutor(num_threads)
        self.turns = ClientTurns("the shop", self.threads.submit, num_threads, max_waiting, rest)
        self.begun = asyncio.Queue()

    def ask(self, client, name):
        """Begin some work, and return its task and the event that ends it."""
        end, loop = threading.Event(), asyncio.get_running_loop()

        def work():
            loop.call_soon_threadsafe(self.begun.put_nowait, (client, name))
            end.wait(60)
            return name

        return asyncio.create_task(self.turns.run(client, work)), end


async def test_a_client_with_much_work_leaves_a_thread_to_others():
    shop = Shop()
    slow = [shop.ask("a", number) for number in range(5)]
    assert await shop.begun.get() == ("a", 0)
    other, end = shop.ask("b", "quick")
    assert await shop.begun.get() == ("b", "quick")
    end.set()
    assert await other == "quick"
    for number, (task, end) in enumerate(slow):
        end.set()
        assert await task == number


async def test_clients_take_turns():
    shop = Shop(num_threads=1)
    tasks = [
        shop.ask(client, number) for client, number in (("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("b", 1))
    ]
    for _, end in tasks:
        end.set()
    await asyncio.gather(*(task for task, _ in tasks))
    order = [shop.begun.get_nowait() for _ in tasks]
    assert order == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2)]


async def test_the_work_of_one_client_that_waits_is_bounded():
    shop = Shop(num_threads=1, max_waiting=2)
    tasks = [shop.ask("a", number) for number in range(3)]
    await shop.begun.get()
    with pytest.raises(QueueFull, match="2 requests of this client wait for the shop: retry later"):
        await shop.turns.run("a", int)
    other, other_end = shop.ask("b", 0)
    for _, end in (*tasks, (None, other_end)):
        end.set()
    assert await asyncio.gather(*(task for task, _ in tasks), other) == [0, 1, 2, 0]


async def test_errors_reach_their_callers_and_abandoned_work_is_not_begun():
    shop = Shop(num_threads=1)
    with pytest.raises(ZeroDivisionError):
        await shop.turns.run("a", lambda: 1 / 0)
    running, end = shop.ask("a", "running")
    await shop.begun.get()
    waiting, _ = shop.ask("a", "abandoned")
    last, last_end = shop.ask("a", "last")
    await asyncio.sleep(0)
    waiting.cancel()
    running.cancel()
    other, _ = shop.ask("b", "abandoned, too")
    await asyncio.sleep(0)
    other.cancel()
    end.set()
    last_end.set()
    assert await last == "last"
    assert shop.begun.get_nowait() == ("a", "last") and shop.begun.empty()


async def test_work_that_fails_after_its_caller_has_gone_is_not_reported():
    shop = Shop(num_threads=1)
    begun, end = threading.Event(), threading.Event()

    def work():
        begun.set()
        end.wait(60)
        raise ValueError("nobody waits")

    task = asyncio.create_task(shop.turns.run("a", work))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    end.set()
    assert await shop.turns.run("a", lambda: "next") == "next"


@pytest.fixture
async def rests(monkeypatch):
    """Calls that the loop should make later, as tuples of delay, function and arguments. It makes none."""
    found = []
    monkeypatch.setattr(
        asyncio.get_running_loop(), "call_later", lambda delay, call, *args: found.append((delay, call, args))
    )
    return found


@pytest.fixture
def spend(monkeypatch):
    """Spend some processor time."""
    clock = [0.0]
    monkeypatch.setattr(turns.time, "thread_time", lambda: clock[0])

    def spend(seconds):
        clock[0] += seconds

    return spend


@pytest.mark.parametrize("seconds, rest", [(0.125, 0.5), (0.25, MAX_REST_S), (30.0, MAX_REST_S)])
async def test_a_client_rests_after_its_work_and_others_do_not(rests, spend, seconds, rest):
    shop = Shop(num_threads=1, rest=4)
    await shop.turns.run("a", lambda: spend(seconds))
    second = asyncio.create_task(shop.turns.run("a", lambda: "second"))
    assert await shop.turns.run("b", lambda: "of another") == "of another"
    assert not second.done()
    [(delay, release, args)] = rests
    assert delay == rest
    release(*args)
    assert await second == "second"


async def test_a_client_rests_after_work_that_fails(rests, spend):
    shop = Shop(rest=4)

    def work():
        spend(0.125)
        raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        await shop.turns.run("a", work)
    assert [delay for delay, *_ in rests] == [0.5]


async def test_rest_may_count_waits(rests, monkeypatch):
    clock = iter([10.0, 10.125])
    monkeypatch.setattr(turns.time, "perf_counter", lambda: next(clock))
    threads = ThreadPoolExecutor(1)
    await ClientTurns("bodies", threads.submit, 1, 10, 4, counts_waits=True).run("a", lambda: None)
    assert [delay for delay, *_ in rests] == [0.5]


@pytest.mark.parametrize("keys, delays", [((), []), (("one",), []), (("one", "two"), [0.125 * REST_OF_KEYS] * 3)])
async def test_clients_rest_only_where_keys_tell_them_apart(rests, spend, keys, delays):
    grammars = SimpleNamespace(threads=ThreadPoolExecutor(1))
    service = object.__new__(Service)
    service.grammars, service.config = grammars, ServerConfig(api_keys=keys)
    await service.run(lambda: spend(0.125), LARGE_BYTES + 1, "a")
    await service.chat_turns.run("a", lambda: spend(0.125))
    await service.grammar_turns.run("a", lambda: spend(0.125))
    assert [delay for delay, *_ in rests] == delays

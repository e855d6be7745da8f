"""Changes of the prefix cache on sockets: messages, numbers, replays, lost batches and impossible settings."""

import threading
import time
import uuid

import msgspec
import pytest
import zmq

from jpaged.config import EngineConfig
from jpaged.core.cache_events import Cleared, Removed, Stored
from jpaged.core.params import SamplingParams
from jpaged.core.text_key import salt_with
from jpaged.engine.engine import Engine
from jpaged.engine.event_messages import EventMessages
from jpaged.engine.event_publisher import EventPublisher
from jpaged.kv_events import KVEvents
from tests.core.traffic import make

TIMEOUT_MS = 10_000
TEXT = list(range(1, 15))


class Router:
    """Reader of the events of an address in this process."""

    def __init__(self, **settings):
        self.address = f"inproc://{uuid.uuid4()}"
        self.settings = {"enable_kv_cache_events": True, "endpoint": self.address, **settings}
        self.socket = self._connect(zmq.SUB, self.address)
        self.socket.subscribe(settings.get("topic", ""))

    def _connect(self, kind, address):
        made = zmq.Context.instance().socket(kind)
        made.rcvtimeo = TIMEOUT_MS
        made.connect(address)
        return made

    def publisher(self, *, size=4, windows=(None,), rank=0):
        return EventPublisher(KVEvents.of(self.settings), EventMessages(size, windows), rank)

    def read(self):
        """Return topic, number, messages and rank of the next batch."""
        topic, number, batch = self.socket.recv_multipart()
        seconds, messages, rank = msgspec.msgpack.decode(batch)
        assert seconds > 1.7e9
        return topic, int.from_bytes(number, "big"), messages, rank

    def again(self, first):
        """Return the numbers and batches that a replay sends."""
        socket = self._connect(zmq.DEALER, self.settings["replay_endpoint"])
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            _, _, number, batch = socket.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                socket.close()
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)[1]))


@pytest.fixture
def router():
    made = Router()
    yield made
    made.socket.close()


def test_an_engine_tells_its_steps_and_commands(router):
    scheduler, runner = make()
    engine = Engine(scheduler, runner, events=router.publisher())
    params = SamplingParams(max_tokens=6, temperature=0.0)
    for name in "ab":
        engine.add(name, TEXT, params)
        while engine.has_work:
            engine.step()
    scheduler.pool.reset_prefix_cache()
    engine.abort("a")
    engine.close()
    batches = [router.read() for _ in range(2)]
    assert [(topic, number, rank) for topic, number, _, rank in batches] == [(b"", 0, 0), (b"", 1, 0)]
    (prompt,), (output,) = (messages for _, _, messages, _ in batches)
    assert prompt.keys() == {
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "group_idx", "kv_cache_spec_kind",
    }  # fmt: skip
    assert (prompt["type"], prompt["medium"], prompt["parent_block_hash"]) == ("BlockStored", "GPU", None)
    assert prompt["token_ids"] == TEXT[:12] and len(set(prompt["block_hashes"])) == 3
    assert output["parent_block_hash"] == prompt["block_hashes"][-1] and output["token_ids"][:2] == TEXT[12:]


def test_messages_name_memories_adapters_salts_and_groups():
    messages, names = EventMessages(2, (None, 8)), {5: "poet"}.get
    keys = [bytes([number] * 32) for number in range(1, 4)]
    first = messages.of(Stored(keys[:2], None, [1, 2, 3, 4], salt_with(5, "mine"), 0, False), names)
    assert (first.lora_name, first.extra_keys) == ("poet", [("poet", "mine"), ("poet",)])
    assert first.block_hashes == [int("01" * 8, 16), int("02" * 8, 16)] and first.kv_cache_spec_kind == "full_attention"
    later = messages.of(Stored(keys[2:], keys[1], [5, 6], "mine", 1, True), names)
    assert (later.medium, later.group_idx, later.lora_name, later.extra_keys) == ("CPU", 1, None, None)
    assert (later.kv_cache_spec_kind, later.kv_cache_spec_sliding_window) == ("sliding_window", 8)
    assert messages.of(Stored(keys[:2], None, [1, 2, 3, 4], "mine", 2, False), names).extra_keys == [("mine",), None]
    assert messages.of(Stored(keys[:1], None, [1, 2], "", 2, False), names).kv_cache_spec_kind == "mamba"
    assert messages.of(Removed(keys[:1], 1, True), names).medium == "CPU"
    assert msgspec.to_builtins(messages.of(Cleared(), names)) == {"type": "AllBlocksCleared"}


def test_past_batches_are_sent_again(router):
    router.settings |= {"replay_endpoint": f"{router.address}-again", "buffer_steps": 3, "topic": "kv"}
    publisher = router.publisher(rank=2)
    router.settings["replay_endpoint"] += "_dp2"
    own = router._connect(zmq.SUB, f"{router.address}_dp2")
    router.socket, _ = own, router.socket.close()
    own.subscribe("kv")
    keys = [bytes([number] * 32) for number in range(5)]
    for key in keys:
        publisher.publish([Removed([key], 0, False)], {}.get)
    read = [router.read() for _ in keys]
    assert [(topic, number, rank) for topic, number, _, rank in read] == [(b"kv", number, 2) for number in range(5)]
    assert router.again(0) == [(number, messages) for _, number, messages, _ in read[2:]]
    assert [number for number, _ in router.again(4)] == [4] and router.again(5) == []
    publisher.close()


def test_a_wrong_request_for_a_replay_has_no_effect(router, caplog):
    router.settings["replay_endpoint"] = f"{router.address}-again"
    publisher = router.publisher()
    for frames in ([b"12"], [b"1", b"2", b"3"]):
        socket = router._connect(zmq.DEALER, router.settings["replay_endpoint"])
        socket.send_multipart(frames)
        socket.close()
    end = time.monotonic() + TIMEOUT_MS / 1000
    while len(caplog.records) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert router.again(0) == []
    assert [each.message for each in caplog.records] == [
        "kv_events_config: a request for a replay is not a number of 8 bytes"
    ] * 2
    publisher.close()


def test_lost_batches_leave_a_gap(router, monkeypatch, caplog):
    may_run, run = threading.Event(), EventPublisher._run
    monkeypatch.setattr(EventPublisher, "_run", lambda *args: may_run.wait() and run(*args))
    router.settings["max_queue_size"] = 2
    publisher = router.publisher()
    for _ in range(10):
        publisher.publish([Cleared()], {}.get)
    assert caplog.text.count("are lost: too many wait") == 1
    may_run.set()
    while router.read()[1] < 1:
        pass
    router.socket.rcvtimeo = 100
    with pytest.raises(zmq.Again):
        while True:
            assert router.read()[1] < 9
    router.socket.rcvtimeo = TIMEOUT_MS
    publisher.publish([Cleared()], {}.get)
    assert router.read()[1] == 10
    publisher.close()


@pytest.mark.parametrize(
    "config, message",
    [
        ({"port": 1}, "kv_events_config: Object contains unknown field `port`"),
        ({"hwm": 0}, "kv_events_config: Expected `int` >= 1 - at `$.hwm`"),
        ({"publisher": "kafka"}, "kv_events_config: Invalid enum value 'kafka' - at `$.publisher`"),
        ({"endpoint": "*:5557"}, "kv_events_config.endpoint: must be tcp://host:port, ipc://path or inproc://name, "
                                 "not '*:5557'"),
        ({"replay_endpoint": "tcp://*"}, "kv_events_config.replay_endpoint: must be tcp://host:port"),
    ],
)  # fmt: skip
def test_an_impossible_config_is_refused(config, message):
    with pytest.raises(ValueError) as error:
        EngineConfig(kv_events_config={"enable_kv_cache_events": True} | config)
    assert str(error.value).startswith(message)


def test_events_need_a_prefix_cache_and_are_off_by_default():
    on = {"enable_kv_cache_events": True}
    with pytest.raises(ValueError, match="kv_events_config: needs enable_prefix_caching"):
        EngineConfig(kv_events_config=on, enable_prefix_caching=False)
    for config in (None, {}, {"endpoint": "tcp://*:1"}, on | {"publisher": "null"}):
        assert KVEvents.of(config) is None


def test_an_address_in_use_is_an_error_and_a_closed_publisher_leaves_it(router):
    socket = zmq.Context.instance().socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://*")
    router.settings["endpoint"] = f"tcp://*:{port - 1}"
    with pytest.raises(ValueError, match=rf"kv_events_config.endpoint: tcp://\*:{port} can't be used: Address already"):
        router.publisher(rank=1)
    socket.close()
    for _ in range(20):
        router.publisher(rank=1).close()

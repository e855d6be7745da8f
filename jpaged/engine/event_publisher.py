"""Publisher of the changes of the prefix cache, for routers, on ZeroMQ sockets as vLLM 0.33 has them."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from jpaged.core.cache_events import CacheEvent
from jpaged.engine.event_messages import EventMessages
from jpaged.kv_events import KVEvents

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)  # number of the message after the last one that is sent again
LINGER_MS = 500
BIND_S = 1.0  # longest wait for an address: ZeroMQ frees the address of a closed socket in the background

Socket = zmq.Socket[bytes]


class EventPublisher:
    """Publisher of batches (time, messages, rank), each with a number, encoded as msgpack.

    A message on the PUB socket has the frames topic, number (8 bytes, big-endian) and batch. A request on the ROUTER
    socket is the number of the first batch that is sent again; the last answer has the number -1.

    Args:
        rank: number of the engine among several.

    Raises:
        ValueError: an address can't be used.
    """

    def __init__(self, config: KVEvents, messages: EventMessages, rank: int = 0):
        self._messages, self._rank, config = messages, rank, config.of_engine(rank)
        self._encoder, self._number, self._is_late = msgspec.msgpack.Encoder(), 0, False
        self._topic, self._past = config.topic.encode(), deque[tuple[bytes, bytes]](maxlen=config.buffer_steps)
        self._sockets: list[Socket] = []
        # Batches wait for the thread between two sockets, whose address is only known here.
        between = f"inproc://kv-events-{id(self)}"
        try:
            arriving = self._open(zmq.PULL, "endpoint", between)
            self._waiting = self._open(zmq.PUSH, "endpoint", between, most=config.max_queue_size, connects=True)
            out = self._open(zmq.PUB, "endpoint", config.endpoint, most=config.hwm)
            replay, again = None, config.replay_endpoint
            if again is not None:
                replay = self._open(zmq.ROUTER, "replay_endpoint", again, most=2 * config.buffer_steps + 2)
        except ValueError:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, args=(arriving, out, replay), name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[CacheEvent], adapter_name: Callable[[int], str | None]) -> None:
        """Send a batch without waiting."""
        batch = (time.time(), [self._messages.of(event, adapter_name) for event in events], self._rank)
        frames = [self._number.to_bytes(8, "big"), self._encoder.encode(batch)]
        self._number += 1
        try:
            self._waiting.send_multipart(frames, zmq.NOBLOCK)
            self._is_late = False
        except zmq.Again:
            if not self._is_late:
                logger.warning("kv_events_config: batch %d and further ones are lost: too many wait", self._number - 1)
            self._is_late = True

    def close(self) -> None:
        """Send the batches that wait, and close the sockets."""
        self._waiting.send(b"")
        self._thread.join()
        self._close_sockets()

    def _run(self, arriving: Socket, out: Socket, replay: Socket | None) -> None:
        poller = zmq.Poller()
        for each in (arriving, replay):
            if each is not None:
                poller.register(each, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if arriving in ready:
                frames = arriving.recv_multipart()
                if len(frames) == 1:
                    return
                out.send_multipart([self._topic, *frames])
                self._past.append((frames[0], frames[1]))
            if replay is not None and replay in ready:
                self._send_again(replay, replay.recv_multipart())

    def _send_again(self, replay: Socket, request: list[bytes]) -> None:
        """Answer a request with the batches from a number on."""
        if len(request) != 3 or len(request[2]) != len(END):
            logger.warning("kv_events_config: a request for a replay is not a number of 8 bytes")
            return
        reader, _, first = request
        for number, batch in self._past:
            if number >= first:
                replay.send_multipart([reader, b"", self._topic, number, batch])
        replay.send_multipart([reader, b"", b"", END, b""])

    def _open(self, kind: int, key: str, address: str, *, most: int = 1, connects: bool = False) -> Socket:
        """Return a socket that is bound or connected to an address.

        Args:
            key: the key of the config that is named in an error.
            most: maximum number of messages that wait to be sent.
        """
        made: Socket = zmq.Context.instance().socket(kind)
        self._sockets.append(made)
        made.sndhwm = most
        made.rcvhwm = most
        is_bound = "*" in address or "::" in address or address.startswith(("ipc:", "inproc:"))
        try:
            if is_bound and not connects:
                self._bind(made, address)
            else:
                made.connect(address)
        except zmq.ZMQError as error:
            raise ValueError(f"kv_events_config.{key}: {address} can't be used: {error}") from None
        return made

    @staticmethod
    def _bind(socket: Socket, address: str) -> None:
        end = time.monotonic() + BIND_S
        while True:
            try:
                socket.bind(address)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > end:
                    raise
            time.sleep(0.02)

    def _close_sockets(self) -> None:
        for each in self._sockets:
            each.close(linger=LINGER_MS)

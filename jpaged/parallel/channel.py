"""Connection between two processes of a replica, which carries messages in frames."""

import functools
import logging
import socket
import threading
import time

from jpaged.parallel.frame import MAX_PAYLOAD_BYTES, encode_frame, read_frame
from jpaged.parallel.messages import Message

logger = logging.getLogger(__name__)

# A host that has lost its power or its network is noticed after KEEPALIVE_IDLE_S + 3 * KEEPALIVE_INTERVAL_S.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S = 2, 2
TCP_OPTIONS = {
    "TCP_NODELAY": 1, "TCP_KEEPIDLE": KEEPALIVE_IDLE_S, "TCP_KEEPINTVL": KEEPALIVE_INTERVAL_S, "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 1000 * (KEEPALIVE_IDLE_S + 3 * KEEPALIVE_INTERVAL_S),
}  # fmt: skip


class Channel:
    """Connection to a peer. Any thread may send; one thread receives.

    Attributes:
        peer: the peer in words, for messages.
        num_frames, num_bytes: frames sent, and their bytes.
    """

    def __init__(self, connected: socket.socket, peer: str):
        self.peer, self.num_frames, self.num_bytes = peer, 0, 0
        self._socket, self._lock = connected, threading.Lock()
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in TCP_OPTIONS.items():
            if hasattr(socket, name):  # macOS lacks some
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            FrameError: the message is too large, or has a value that can't be sent.
            OSError: the connection is lost.
        """
        self.send_frame(encode_frame(message))

    def send_frame(self, frame: bytes) -> None:
        """Send a frame of `encode_frame`, as `send` does."""
        with self._lock:
            self._socket.sendall(frame)
            self.num_frames += 1
            self.num_bytes += len(frame)

    def send_last(self, message: Message) -> None:
        """Send a message to a peer that may already have gone."""
        try:
            self.send(message)
        except OSError:
            logger.debug("%s has already gone", self.peer)

    def receive(self, max_bytes: int = MAX_PAYLOAD_BYTES, timeout_s: float | None = None) -> Message:
        """Wait for a message and return it.

        Args:
            max_bytes: maximum size of the payload of its frame.
            timeout_s: maximum wait for the whole frame; None: no limit.

        Raises:
            FrameError: the frame is malformed.
            OSError: the connection is lost or closed, or the time is up.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        message = read_frame(functools.partial(self._read, end), max_bytes)
        self._socket.settimeout(None)
        return message

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read(self, end: float | None, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            if end is not None:
                if (left := end - time.monotonic()) <= 0:
                    raise TimeoutError("timed out")
                self._socket.settimeout(left)
            if not (part := self._socket.recv(min(num_bytes - len(data), 2**20))):
                raise ConnectionError("the connection was closed")
            data += part
        return bytes(data)

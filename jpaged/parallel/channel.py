"""Connection between two processes of a replica, which carries frames."""

import socket
import threading
import time

from jpaged.parallel.frame import HEADER, MAX_PAYLOAD_BYTES, Frame, Kind, decode_header, decode_payload, encode_frame

# A host that has lost its power or its network is noticed after KEEPALIVE_IDLE_S + 3 * KEEPALIVE_INTERVAL_S.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 2, 2, 3


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
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S), ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
            ("TCP_KEEPCNT", KEEPALIVE_COUNT),
            ("TCP_USER_TIMEOUT", 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_COUNT)),
        ):  # fmt: skip
            if hasattr(socket, name):  # macOS lacks some
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a frame.

        Raises:
            OSError: the connection is lost.
        """
        data = encode_frame(Frame(kind, payload))
        with self._lock:
            self._socket.sendall(data)
            self.num_frames += 1
            self.num_bytes += len(data)

    def receive(self, max_bytes: int = MAX_PAYLOAD_BYTES, timeout_s: float | None = None) -> Frame:
        """Wait for a frame and return it.

        Args:
            max_bytes: maximum size of its payload.
            timeout_s: maximum wait for the whole frame; None: no limit.

        Raises:
            FrameError: the frame is malformed.
            OSError: the connection is lost or closed, or the time is up.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        header = decode_header(self._read(HEADER.size, end), max_bytes)
        frame = decode_payload(header, self._read(header.num_bytes, end))
        self._socket.settimeout(None)
        return frame

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read(self, num_bytes: int, end: float | None) -> bytes:
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

"""Messages between the processes of a replica, as typed values, and their frames. Only these types are decoded.

A frame is a header of fixed size and the MessagePack of a message.
"""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from jpaged.core.plan import Admitted, StepPlan

MAGIC = b"JPGD"
VERSION = 2  # raised with each change of `Hello`, `Welcome` or `Refusal`; later messages compare versions of jpaged
HEADER = struct.Struct("<4sHII")  # magic, version, bytes of the payload, CRC-32 of the payload
MAX_PAYLOAD_BYTES = 2**28
MAX_HELLO_BYTES = 2**20  # before a process has been accepted


class FrameError(ValueError):
    """Malformed or unexpected frame. The message names the part of the frame, its value and the allowed values."""


class ParamsText(NamedTuple):
    """Parameters of a request: the name of their class, and the fields that differ from their defaults, as JSON."""

    kind: str
    fields: bytes


@dataclass(frozen=True, slots=True)
class SentAdmitted(Admitted):
    """Admitted sequence with its parameters as text."""

    params: ParamsText  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class SentPlan(StepPlan):
    """Plan with the parameters of its sequences as text."""

    admitted: tuple[SentAdmitted, ...] = ()


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Message of a process to another one."""


class Hello(Message, frozen=True):
    """Request of a process to join, with its versions and the settings that it was given."""

    node_rank: int
    nnodes: int
    versions: dict[str, str]
    settings: dict[str, Any]


class Welcome(Message, frozen=True):
    """Settings of the leader, for a process that has joined."""

    settings: dict[str, Any]


class Refusal(Message, frozen=True):
    """Reason why a process can't join."""

    reason: str


class Facts(Message, frozen=True):
    """Decisions of a follower before it loads the parameters."""

    facts: dict[str, Any]


class Plan(Message, frozen=True):
    """Plan to dispatch."""

    plan: SentPlan


class Masks(Message, frozen=True):
    """Masks of the plan before this message: words of 32 bits, [M, ceil(V / 32)], the lowest byte of each first."""

    words: bytes


class Recover(Message, frozen=True):
    """Command to drop a step that has failed on the leader's host."""


class End(Message, frozen=True):
    """End of the replica without an error."""


class Fault(Message, frozen=True):
    """Error that ends the process which sends this message."""

    reason: str


ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(Hello | Welcome | Refusal | Facts | Plan | Masks | Recover | End | Fault)


def encode_frame(message: Message) -> bytes:
    """Return the frame of a message.

    Raises:
        FrameError: the message is too large, or has a value without a form in MessagePack.
    """
    try:
        payload = ENCODER.encode(message)
    except (OverflowError, TypeError, ValueError) as error:
        raise FrameError(f"{type(message).__name__}: {error}") from error
    _check_size(len(payload), MAX_PAYLOAD_BYTES)
    return HEADER.pack(MAGIC, VERSION, len(payload), zlib.crc32(payload)) + payload


def read_frame(read: Callable[[int], bytes], max_bytes: int = MAX_PAYLOAD_BYTES) -> Message:
    """Read a frame, and return its message.

    Args:
        read: function that returns the next bytes, as many as its argument says.
        max_bytes: maximum size of the payload.

    Raises:
        FrameError: the bytes are not a frame of this version, or the payload is no message.
    """
    magic, version, num_bytes, expected = HEADER.unpack(read(HEADER.size))
    if magic != MAGIC:
        raise FrameError(f"magic: must be {MAGIC!r}, not {magic!r}")
    if version != VERSION:
        raise FrameError(f"version: must be {VERSION}, not {version}; all nodes need the same version of jpaged")
    _check_size(num_bytes, max_bytes)
    payload = read(num_bytes)
    if (checksum := zlib.crc32(payload)) != expected:
        raise FrameError(f"checksum: must be {expected:#010x}, not {checksum:#010x}")
    return decode_message(payload)


def decode_message(payload: bytes) -> Message:
    """Return the message of a payload.

    Raises:
        FrameError: the payload is no message.
    """
    try:
        message: Message = DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"payload: {error}") from error
    return message


def unexpected(message: Message, *expected: type[Message]) -> FrameError:
    """Return the error for a message of another kind than those that are expected now."""
    kinds = " or ".join(kind.__name__ for kind in expected)
    return FrameError(f"message: must be {kinds}, not {type(message).__name__}")


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise FrameError(f"payload: must have at most {max_bytes} bytes, not {num_bytes}")

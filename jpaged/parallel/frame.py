"""Frame: one message between the processes of a replica. A fixed header precedes its payload."""

import enum
import struct
import zlib
from typing import NamedTuple

MAGIC = b"JPGD"
VERSION = 1
HEADER = struct.Struct("<4sHHII")  # magic, version, kind, bytes of the payload, CRC-32 of the payload
MAX_PAYLOAD_BYTES = 2**28
MAX_HELLO_BYTES = 2**20  # before a process has been accepted


class Kind(enum.IntEnum):
    """Kind of a frame. The leader sends all but HELLO and FACTS; a follower sends these two and FAULT."""

    HELLO = 1  # JSON: the rank, versions and settings of a process that wants to join
    WELCOME = 2  # JSON: the settings of the leader
    REFUSAL = 3  # text: the reason why the process can't join
    FACTS = 4  # JSON: the decisions of a process before it loads the parameters
    PLAN = 5  # a plan to dispatch
    MASKS = 6  # the masks of the plan before it
    RECOVER = 7  # empty: a step has failed on the leader's host; drop it
    END = 8  # empty: the replica ends as it should
    FAULT = 9  # text: the process ends because of this error


class FrameError(ValueError):
    """Malformed frame. The message names the part of the frame, the found value and the allowed values."""


class Frame(NamedTuple):
    """Message of a kind."""

    kind: Kind
    payload: bytes = b""


class Header(NamedTuple):
    """Checked header of a frame whose payload is still to come."""

    kind: Kind
    num_bytes: int
    checksum: int


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes of a frame.

    Raises:
        FrameError: the payload is too large.
    """
    _check_size(len(frame.payload), MAX_PAYLOAD_BYTES)
    head = HEADER.pack(MAGIC, VERSION, frame.kind, len(frame.payload), zlib.crc32(frame.payload))
    return head + frame.payload


def decode_header(data: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> Header:
    """Return the header in `HEADER.size` bytes.

    Args:
        max_bytes: maximum size of a payload.

    Raises:
        FrameError: the bytes are not the header of a frame of this version.
    """
    if len(data) != HEADER.size:
        raise FrameError(f"header: must have {HEADER.size} bytes, not {len(data)}")
    magic, version, kind, num_bytes, checksum = HEADER.unpack(data)
    if magic != MAGIC:
        raise FrameError(f"magic: must be {MAGIC!r}, not {magic!r}")
    if version != VERSION:
        raise FrameError(f"version: must be {VERSION}, not {version}; all nodes need the same version of jpaged")
    if kind not in Kind._value2member_map_:
        raise FrameError(f"kind: must be between 1 and {max(Kind)}, not {kind}")
    _check_size(num_bytes, max_bytes)
    return Header(Kind(kind), num_bytes, checksum)


def decode_payload(header: Header, payload: bytes) -> Frame:
    """Return the frame of a header and a payload.

    Raises:
        FrameError: the payload is not the one of the header.
    """
    if len(payload) != header.num_bytes:
        raise FrameError(f"payload: must have {header.num_bytes} bytes, not {len(payload)}")
    if (found := zlib.crc32(payload)) != header.checksum:
        raise FrameError(f"checksum: must be {header.checksum:#010x}, not {found:#010x}")
    return Frame(header.kind, payload)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise FrameError(f"payload: must have at most {max_bytes} bytes, not {num_bytes}")

"""Frame: one message between the processes of a replica as bytes, and the checks that a received plan fits the runner.

A header of fixed size precedes the MessagePack of the message.
"""

import json
import struct
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from typing import NamedTuple

import msgspec

from jpaged.config import Limits
from jpaged.core.block_pool import GONE
from jpaged.core.params import MAX_TOP, BeamSearchParams, Params, SamplingParams
from jpaged.core.plan import Admitted, StepPlan
from jpaged.parallel.messages import DECODER, ENCODER, Message, ParamsText, Plan, SentAdmitted, SentPlan

MAGIC = b"JPGD"
VERSION = 2  # raised with each change of `Hello`, `Welcome` or `Refusal`; later messages compare versions of jpaged
HEADER = struct.Struct("<4sHII")  # magic, version, bytes of the payload, CRC-32 of the payload
MAX_PAYLOAD_BYTES = 2**28
MAX_HELLO_BYTES = 2**20  # before a process has been accepted

KINDS: dict[str, type[Params]] = {kind.__name__: kind for kind in (SamplingParams, BeamSearchParams)}
HOST_ONLY = "structured_outputs"  # a field that only the leader's host uses, which sends masks
DEFAULTS = {
    name: {each.name: each.default for each in fields(kind) if each.name != HOST_ONLY} for name, kind in KINDS.items()
}


class FrameError(ValueError):
    """Malformed or unexpected frame. The message names the part of the frame, its value and the allowed values."""


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
    """Return the error for a message of an unexpected kind."""
    kinds = " or ".join(kind.__name__ for kind in expected)
    return FrameError(f"message: must be {kinds}, not {type(message).__name__}")


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise FrameError(f"payload: must have at most {max_bytes} bytes, not {num_bytes}")


class Sizes(NamedTuple):
    """Sizes of a runner, which bound the numbers of its plans.

    Attributes:
        num_blocks, num_host_blocks: blocks of the pool and of the host.
        num_groups: groups of layers.
    """

    limits: Limits
    vocab_size: int
    num_blocks: int
    num_host_blocks: int
    num_groups: int = 1


def message_of(plan: StepPlan) -> Plan:
    """Return the message of a plan. `structured_outputs` is left out of the parameters."""
    admitted = tuple(_as(SentAdmitted, each, params=_text_of(each.params)) for each in plan.admitted)
    return Plan(_as(SentPlan, plan, admitted=admitted))


def plan_of(message: Plan, sizes: Sizes) -> StepPlan:
    """Return the plan of a message, after checks of every length and every number.

    Raises:
        FrameError: the plan does not fit a runner of these sizes, or has invalid parameters.
    """
    plan = message.plan
    _check_numbers(plan, sizes)
    _check_rows(plan, sizes.limits)
    for each in plan.admitted:
        _check_admitted(each, sizes)
    return _as(StepPlan, plan, admitted=tuple(_as(Admitted, each, params=_params_of(each)) for each in plan.admitted))


def _as[T](kind: type[T], value: Admitted | StepPlan, **changes: object) -> T:
    """Return a value of a related dataclass with the same fields, some of which are changed."""
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{name: getattr(value, name) for name in names} | changes)


def _check_numbers(plan: StepPlan, sizes: Sizes) -> None:
    """Check the numbers outside the admitted sequences."""
    limits, tokens, blocks, host, groups = sizes
    rows, length, width = limits.max_num_seqs, limits.max_model_len, limits.blocks_per_seq
    _check("rows", plan.rows, limits.max_num_decodes, (rows, length, length + 1, rows + 1))
    _check("drafts", plan.drafts, limits.max_num_drafts, (len(plan.rows), tokens))
    _check_length("pages", plan.pages, 0)  # models with recurrent layers run on one device
    _check("swap_out", plan.swap_out, host, (blocks, host))
    _check("block_copies", plan.block_copies, rows * groups, (blocks, blocks))
    _check("swap_in", plan.swap_in, host, (host, blocks))
    _check_length("from_files", plan.from_files, 0)  # engines on several hosts have no files
    _check_series("released_rows", plan.released_rows, rows, rows)
    _check("row_copies", plan.row_copies, rows, (rows, rows))
    _check_series("admitted.row", [each.row for each in plan.admitted], rows, rows)
    _check("chosen", plan.chosen, rows, (rows, tokens, 2**64))
    _check("entries", plan.entries, rows * groups * width, (rows, groups, width, blocks))
    _check_series("masked", [row for row, _ in plan.masked], limits.max_num_decodes, rows)
    for _, banned in plan.masked:
        _check_series("masked", banned, tokens, tokens)


def _check_rows(plan: StepPlan, limits: Limits) -> None:
    """Check that the scheduled tokens and samples fit a step."""
    if not plan.rows:
        return
    rows, starts, counts, samples = zip(*plan.rows)
    for row, start, count in zip(rows, starts, counts):
        if not 0 < count <= limits.max_model_len - start:
            raise FrameError(
                f"rows: row {row} has {count} tokens from {start} on, allowed between 1 and max_model_len "
                f"({limits.max_model_len})"
            )
    seen: set[int] = set()
    for (row, start, count), before in zip(zip(rows, starts, counts), [None, *plan.rows]):
        # Tokens of an output, and drafts, have entries of their own, which follow each other.
        follows = before is not None and (row, start, count) == (before[0], before[1] + before[2], 1)
        if row in seen and not follows:
            raise FrameError("rows: a row is scheduled twice")
        seen.add(row)
    if sum(counts) > limits.max_num_batched_tokens:
        raise FrameError(f"rows: must have at most {limits.max_num_batched_tokens} tokens, not {sum(counts)}")
    if sum(samples) > limits.max_num_decodes:
        raise FrameError(f"rows: must have at most {limits.max_num_decodes} samples, not {sum(samples)}")


def _check_admitted(admitted: SentAdmitted, sizes: Sizes) -> None:
    length, tokens = sizes.limits.max_model_len, sizes.vocab_size
    _check_series("admitted.token_ids", admitted.token_ids, length, tokens)
    if len(admitted.block_ids) != sizes.num_groups:
        raise FrameError(f"admitted.block_ids: must be of {sizes.num_groups} groups, not {len(admitted.block_ids)}")
    for block_ids in admitted.block_ids:
        held = [block_id for block_id in block_ids if block_id != GONE]
        _check_length("admitted.block_ids", block_ids, sizes.limits.blocks_per_seq)
        _check_series("admitted.block_ids", held, len(held), sizes.num_blocks)
    _check_series("admitted.banned", admitted.banned, tokens, tokens)
    _check_series("admitted.seed", [admitted.seed], 1, 2**64)
    _check_series("admitted.num_top", [admitted.num_top or 0], 1, max(MAX_TOP, tokens) + 1)
    _check_series("admitted.num_scored", [admitted.num_scored or 0], 1, length + 1)
    if not 0 < admitted.num_prompt_tokens <= len(admitted.token_ids):
        raise FrameError(
            f"admitted.num_prompt_tokens: must be between 1 and {len(admitted.token_ids)}, the number of tokens, "
            f"not {admitted.num_prompt_tokens}"
        )


def _check(name: str, series: Sequence[tuple[int, ...]], most: int, below: Sequence[int]) -> None:
    """Check the length of a series of tuples, and the numbers of each of their columns."""
    for column, bound in zip(zip(*series), below):
        _check_series(name, column, most, bound)


def _check_series(name: str, numbers: Collection[int], most: int, below: int) -> None:
    """Check the length of a series, and that each number is at least 0 and below a bound."""
    _check_length(name, numbers, most)
    if numbers and (max(numbers) >= below or min(numbers) < 0):
        wrong = next(number for number in numbers if not 0 <= number < below)
        raise FrameError(f"{name}: must be between 0 and {below - 1}, not {wrong}")


def _check_length(name: str, series: Collection[object], most: int) -> None:
    if len(series) > most:
        raise FrameError(f"{name}: must have at most {most} entries, not {len(series)}")


def _text_of(params: Params) -> ParamsText:
    kind = type(params).__name__
    changed = {name: value for name, default in DEFAULTS[kind].items() if (value := getattr(params, name)) != default}
    return ParamsText(kind, json.dumps(changed, allow_nan=False, separators=(",", ":")).encode())


def _params_of(admitted: SentAdmitted) -> Params:
    name, text = admitted.params
    try:
        kind, values = KINDS[name], json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("must be a JSON object")
        if unknown := values.keys() - DEFAULTS[name].keys():
            raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
        return kind(**values)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FrameError(f"admitted.params: {error}") from error

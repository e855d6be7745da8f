"""Plan as the payload of a frame: words of 32 bits in a fixed order, then the sampling parameters as JSON."""

import itertools
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from jpaged.core.params import MAX_TOP, BeamSearchParams, SamplingParams
from jpaged.core.plan import Admitted, Chosen, Entry, Pairs, Scheduled, StepPlan
from jpaged.parallel.frame import FrameError

WORD = 2**32
PARAMS = (SamplingParams, BeamSearchParams)  # by the word that stands for the class
HOST_ONLY = "structured_outputs"  # a field that only the leader's host uses, which sends masks


class Sizes(NamedTuple):
    """Sizes of a runner, which bound the numbers of its plans.

    Attributes:
        table_width: maximum blocks of a sequence.
        num_blocks, num_host_blocks: blocks of the pool and of the host.
    """

    num_rows: int
    max_model_len: int
    max_num_batched_tokens: int
    table_width: int
    vocab_size: int
    num_blocks: int
    num_host_blocks: int


def encode_plan(plan: StepPlan) -> bytes:
    """Return the payload of a plan.

    Every series is preceded by its length. `structured_outputs` is left out of the parameters.
    """
    words: list[int] = []
    texts: list[bytes] = []

    def put(series: Sequence[Iterable[int]]) -> None:
        words.append(len(series))
        words.extend(itertools.chain.from_iterable(series))

    put(plan.rows)
    words.append(len(plan.swap_out))
    for pairs in plan.swap_out:
        put(pairs)
    put(plan.block_copies)
    put(plan.swap_in)
    put([(row,) for row in plan.released_rows])
    put(plan.row_copies)
    words.append(len(plan.admitted))
    for each in plan.admitted:
        text = _params_text(each.params)
        texts.append(text)
        words += (each.row, each.num_prompt_tokens, *_halves(each.seed), _optional(each.num_top))
        words += (_optional(each.num_scored), PARAMS.index(type(each.params)), len(text))
        for series in (each.token_ids, each.block_ids, each.banned):
            words.append(len(series))
            words.extend(series)
    put([(row, token, *_halves(seed)) for row, token, seed in plan.chosen])
    put(plan.entries)
    words.append(len(plan.masked))
    for row, banned in plan.masked:
        words += (row, len(banned), *sorted(banned))
    return struct.pack(f"<{len(words) + 1}I", len(words), *words) + b"".join(texts)


def decode_plan(payload: bytes, sizes: Sizes) -> StepPlan:
    """Return the plan of a payload, after checks of every length and every number.

    Raises:
        FrameError: the payload is malformed, or its plan does not fit a runner of these sizes.
    """
    reader = _Reader(payload)
    rows, tokens, length = sizes.num_rows, sizes.vocab_size, sizes.max_model_len
    blocks, host = sizes.num_blocks, sizes.num_host_blocks
    plan = StepPlan(
        rows=tuple(map(Scheduled._make, reader.series("rows", rows, (rows, length, length + 1, rows + 1)))),
        swap_out=tuple(
            _pairs(reader.series("swap_out", host, (blocks, host))) for _ in range(reader.length("swap_out", rows))
        ),
        block_copies=_pairs(reader.series("block_copies", rows, (blocks, blocks))),
        swap_in=_pairs(reader.series("swap_in", host, (host, blocks))),
        released_rows=tuple(row for (row,) in reader.series("released_rows", rows, (rows,))),
        row_copies=_pairs(reader.series("row_copies", rows, (rows, rows))),
        admitted=tuple(_admitted(reader, sizes) for _ in range(reader.length("admitted", rows))),
        chosen=tuple(
            Chosen(row, token, low + WORD * high)
            for row, token, low, high in reader.series("chosen", rows, (rows, tokens, WORD, WORD))
        ),
        entries=tuple(
            map(Entry._make, reader.series("entries", rows * sizes.table_width, (rows, sizes.table_width, blocks)))
        ),
        masked=tuple(
            (reader.number("masked", rows), frozenset(reader.numbers("masked", tokens, tokens)))
            for _ in range(reader.length("masked", rows))
        ),
    )
    reader.end()
    _check_rows(plan, sizes)
    return plan


class _Reader:
    """Words of a payload in their order, and the texts after them."""

    def __init__(self, payload: bytes):
        if len(payload) < 4:
            raise FrameError(f"plan: must have at least 4 bytes, not {len(payload)}")
        (count,) = struct.unpack_from("<I", payload)
        end = 4 + 4 * count
        if end > len(payload):
            raise FrameError(f"plan: {count} words need {end} bytes, but it has {len(payload)}")
        self._words: tuple[int, ...] = struct.unpack_from(f"<{count}I", payload, 4)
        self._texts, self._word, self._byte = payload[end:], 0, 0

    def take(self, name: str, count: int) -> tuple[int, ...]:
        """Return the next words."""
        words = self._words[self._word : self._word + count]
        if len(words) != count:
            raise FrameError(f"{name}: {count} words are expected, but only {len(words)} are left")
        self._word += count
        return words

    def number(self, name: str, below: int) -> int:
        """Return the next word, a number below a bound."""
        (word,) = self.take(name, 1)
        _check(name, (word,), below)
        return word

    def optional(self, name: str, most: int) -> int | None:
        """Return a number of at most `most`, or None."""
        word = self.number(name, most + 2)
        return word - 1 if word else None

    def length(self, name: str, most: int) -> int:
        """Return the length of a series."""
        (count,) = self.take(name, 1)
        if count > most:
            raise FrameError(f"{name}: must have at most {most} entries, not {count}")
        return count

    def numbers(self, name: str, most: int, below: int) -> tuple[int, ...]:
        """Return a series of numbers below a bound."""
        words = self.take(name, self.length(name, most))
        _check(name, words, below)
        return words

    def series(self, name: str, most: int, below: Sequence[int]) -> list[tuple[int, ...]]:
        """Return a series of tuples, with a bound for each of their columns."""
        width = len(below)
        words = self.take(name, width * self.length(name, most))
        for column, bound in enumerate(below):
            _check(name, words[column::width], bound)
        return list(itertools.batched(words, width))

    def text(self, name: str, num_bytes: int) -> bytes:
        """Return the next text."""
        text = self._texts[self._byte : self._byte + num_bytes]
        if len(text) != num_bytes:
            raise FrameError(f"{name}: {num_bytes} bytes are expected, but only {len(text)} are left")
        self._byte += num_bytes
        return text

    def end(self) -> None:
        """Check that nothing is left."""
        words, rest = len(self._words) - self._word, len(self._texts) - self._byte
        if words or rest:
            raise FrameError(f"plan: {words} words and {rest} bytes are left after it")


def _admitted(reader: _Reader, sizes: Sizes) -> Admitted:
    length = sizes.max_model_len
    row = reader.number("admitted.row", sizes.num_rows)
    num_prompt_tokens = reader.number("admitted.num_prompt_tokens", length + 1)
    low, high = reader.take("admitted.seed", 2)
    num_top = reader.optional("admitted.num_top", max(MAX_TOP, sizes.vocab_size))
    num_scored = reader.optional("admitted.num_scored", length)
    kind = PARAMS[reader.number("admitted.params", len(PARAMS))]
    (num_bytes,) = reader.take("admitted.params", 1)
    token_ids = reader.numbers("admitted.token_ids", length, sizes.vocab_size)
    block_ids = reader.numbers("admitted.block_ids", sizes.table_width, sizes.num_blocks)
    banned = reader.numbers("admitted.banned", sizes.vocab_size, sizes.vocab_size)
    params = _params(kind, reader.text("admitted.params", num_bytes))
    if not 0 < num_prompt_tokens <= len(token_ids):
        raise FrameError(
            f"admitted.num_prompt_tokens: must be between 1 and {len(token_ids)}, the number of tokens, "
            f"not {num_prompt_tokens}"
        )
    seed = low + WORD * high
    return Admitted(row, token_ids, num_prompt_tokens, params, seed, block_ids, num_top, num_scored, banned)


def _check_rows(plan: StepPlan, sizes: Sizes) -> None:
    """Check that the scheduled tokens and samples fit a step."""
    for row, start, count, _ in plan.rows:
        if not 0 < count <= sizes.max_model_len - start:
            raise FrameError(
                f"rows: row {row} has {count} tokens from {start} on, allowed between 1 and max_model_len "
                f"({sizes.max_model_len})"
            )
    if len({row for row, *_ in plan.rows}) < len(plan.rows):
        raise FrameError("rows: a row is scheduled twice")
    if plan.num_tokens > sizes.max_num_batched_tokens:
        raise FrameError(f"rows: must have at most {sizes.max_num_batched_tokens} tokens, not {plan.num_tokens}")
    if (samples := sum(scheduled.num_samples for scheduled in plan.rows)) > sizes.num_rows:
        raise FrameError(f"rows: must have at most {sizes.num_rows} samples, not {samples}")


def _check(name: str, words: Sequence[int], below: int) -> None:
    if words and max(words) >= below:
        raise FrameError(f"{name}: must be below {below}, not {max(words)}")


def _pairs(series: list[tuple[int, ...]]) -> Pairs:
    return tuple((first, second) for first, second in series)


def _halves(seed: int) -> tuple[int, int]:
    """Return the low and the high word of a seed."""
    return seed % WORD, seed // WORD


def _optional(number: int | None) -> int:
    return 0 if number is None else number + 1


def _params_text(params: SamplingParams | BeamSearchParams) -> bytes:
    """Return the fields that differ from their defaults as JSON."""
    given: dict[str, Any] = {}
    for each in fields(params):
        value = getattr(params, each.name)
        if each.name != HOST_ONLY and (each.default is MISSING or value != each.default):
            given[each.name] = value
    return json.dumps(given, allow_nan=False, separators=(",", ":")).encode()


def _params(kind: type[SamplingParams | BeamSearchParams], text: bytes) -> SamplingParams | BeamSearchParams:
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("must be a JSON object")
        if unknown := given.keys() - {each.name for each in fields(kind) if each.name != HOST_ONLY}:
            raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
        return kind(**given)
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"admitted.params: {error}") from error

"""Frames carry any plan unchanged, and refuse everything else with the part that is wrong."""

import dataclasses
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.core.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.core.plan import Admitted, Chosen, Entry, Scheduled, StepPlan
from jpaged.parallel.frame import HEADER, Frame, FrameError, Kind, decode_header, decode_payload, encode_frame
from jpaged.parallel.mask_frame import decode_masks, encode_masks
from jpaged.parallel.plan_frame import Sizes, decode_plan, encode_plan

SIZES = Sizes(
    num_rows=6, max_model_len=40, max_num_batched_tokens=16, table_width=5, vocab_size=50, num_blocks=20,
    num_host_blocks=9,
)  # fmt: skip
ROW, TOKEN, BLOCK, HOST = (st.integers(0, size - 1) for size in (6, 50, 20, 9))
SEED = st.integers(0, 2**64 - 1)
FINITE = dict(allow_nan=False, allow_infinity=False)


def series(*columns, kind=None, most=6):
    made = st.tuples(*columns)
    return st.lists(made if kind is None else made.map(kind._make), max_size=most).map(tuple)


@st.composite
def scheduled(draw):
    rows, left, samples = [], 16, 6
    for row in draw(st.permutations(range(6)))[: draw(st.integers(0, 6))]:
        start = draw(st.integers(0, 39))
        if count := draw(st.integers(0, min(left, 40 - start))):
            drawn = draw(st.integers(0, samples))
            rows.append(Scheduled(row, start, count, drawn))
            left, samples = left - count, samples - drawn
    return tuple(rows)


COMMON = dict(
    max_tokens=st.none() | st.integers(5, 99), min_tokens=st.integers(0, 5),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    stop_token_ids=st.lists(TOKEN, max_size=3).map(tuple), include_stop_str_in_output=st.booleans(),
    presence_penalty=st.floats(-2, 2), frequency_penalty=st.floats(-2, 2), repetition_penalty=st.floats(0.1, 9),
    logit_bias=st.none() | st.dictionaries(TOKEN, st.floats(-100, 100), max_size=4),
    allowed_token_ids=st.none() | st.lists(TOKEN, min_size=1, max_size=4).map(tuple),
    bad_words=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20), prompt_logprobs=st.none() | st.integers(0, 20),
    skip_special_tokens=st.booleans(),
)  # fmt: skip
PARAMS = st.builds(
    SamplingParams, **COMMON, n=st.integers(1, 3), best_of=st.none() | st.integers(3, 5),
    temperature=st.floats(0, **FINITE), top_k=st.integers(-1, 2**70), top_p=st.floats(0.01, 1), min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
) | st.builds(
    BeamSearchParams, **COMMON, beam_width=st.integers(3, 64), n=st.none() | st.integers(1, 3),
    length_penalty=st.floats(-16, 16), early_stopping=st.sampled_from([True, False, "never"]),
)  # fmt: skip


@st.composite
def admitted(draw):
    tokens = draw(st.lists(TOKEN, min_size=1, max_size=40).map(tuple))
    return Admitted(
        draw(ROW), tokens, draw(st.integers(1, len(tokens))), draw(PARAMS), draw(SEED),
        draw(st.lists(BLOCK, max_size=5).map(tuple)), draw(st.none() | st.integers(0, 128)),
        draw(st.none() | st.integers(0, 40)), draw(st.lists(TOKEN, max_size=5).map(tuple)),
    )  # fmt: skip


PLANS = st.builds(
    StepPlan, rows=scheduled(), swap_out=st.lists(series(BLOCK, HOST), max_size=3).map(tuple),
    block_copies=series(BLOCK, BLOCK), swap_in=series(HOST, BLOCK),
    released_rows=st.lists(ROW, max_size=6).map(tuple), row_copies=series(ROW, ROW),
    admitted=st.lists(admitted(), max_size=3).map(tuple), chosen=series(ROW, TOKEN, SEED, kind=Chosen),
    entries=series(ROW, st.integers(0, 4), BLOCK, kind=Entry, most=30),
    masked=series(ROW, st.frozensets(TOKEN, max_size=5)),
)  # fmt: skip


def decoded(data: bytes) -> Frame:
    return decode_payload(decode_header(data[: HEADER.size]), data[HEADER.size :])


@given(PLANS)
def test_any_plan_is_carried_unchanged(plan):
    kind, payload = decoded(encode_frame(Frame(Kind.PLAN, encode_plan(plan))))
    assert kind == Kind.PLAN and decode_plan(payload, SIZES) == plan


@given(PLANS, st.data())
def test_a_truncated_plan_is_refused(plan, data):
    payload = encode_plan(plan)
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(FrameError):
        decode_plan(payload[:cut], SIZES)
    with pytest.raises(FrameError, match="payload: must have"):
        decode_payload(decode_header(encode_frame(Frame(Kind.PLAN, payload))[: HEADER.size]), payload[:cut])


@given(PLANS, st.data())
def test_any_changed_bit_of_a_frame_is_noticed(plan, data):
    frame = bytearray(encode_frame(Frame(Kind.PLAN, encode_plan(plan))))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    try:
        kind, _ = decoded(bytes(frame))
    except FrameError:
        return
    assert kind != Kind.PLAN, "the checksum covers the payload, and the kind decides how it is read"


@given(PLANS, st.data())
def test_any_changed_word_of_a_plan_gives_a_plan_or_is_refused(plan, data):
    payload = bytearray(encode_plan(plan))
    at = data.draw(st.integers(0, len(payload) // 4 - 1))
    payload[4 * at : 4 * at + 4] = struct.pack("<I", data.draw(st.integers(0, 2**32 - 1) | st.integers(0, 50)))
    try:
        found = decode_plan(bytes(payload), SIZES)
    except FrameError:
        return
    assert decode_plan(encode_plan(found), SIZES) == found


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises(FrameError):
        decode_header(noise[: HEADER.size])
    with pytest.raises(FrameError):
        decode_plan(b"\xff" + noise, SIZES)


def header(magic=b"JPGD", version=1, kind=5, num_bytes=0, checksum=0) -> bytes:
    return HEADER.pack(magic, version, kind, num_bytes, checksum)


@pytest.mark.parametrize(
    "data, words",
    [
        (header()[:-1], "header: must have 16 bytes, not 15"),
        (header(magic=b"GET "), "magic: must be b'JPGD', not b'GET '"),
        (header(version=2), "version: must be 1, not 2; all nodes need the same version of jpaged"),
        (header(kind=0), "kind: must be between 1 and 9, not 0"),
        (header(kind=10), "kind: must be between 1 and 9, not 10"),
        (header(num_bytes=101), "payload: must have at most 100 bytes, not 101"),
    ],
)
def test_a_wrong_header_is_refused(data, words):
    with pytest.raises(FrameError) as refused:
        decode_header(data, 100)
    assert str(refused.value) == words


ADMITTED = Admitted(1, (3, 4), 1, SamplingParams(), 7, (2,))


@pytest.mark.parametrize(
    "plan, words",
    [
        (StepPlan(rows=(Scheduled(6, 0, 1, 1),)), "rows: must be below 6, not 6"),
        (StepPlan(rows=(Scheduled(0, 39, 2, 1),)), "rows: row 0 has 2 tokens from 39 on, allowed between 1 and max_"),
        (StepPlan(rows=(Scheduled(0, 3, 0, 1),)), "rows: row 0 has 0 tokens"),
        (StepPlan(rows=(Scheduled(0, 0, 1, 1),) * 2), "rows: a row is scheduled twice"),
        (StepPlan(rows=(Scheduled(0, 0, 17, 1),)), "rows: must have at most 16 tokens, not 17"),
        (StepPlan(rows=(Scheduled(0, 0, 1, 4), Scheduled(1, 0, 1, 3))), "rows: must have at most 6 samples, not 7"),
        (StepPlan(swap_out=(((20, 0),),)), "swap_out: must be below 20, not 20"),
        (StepPlan(swap_in=((0, 0),) * 10), "swap_in: must have at most 9 entries, not 10"),
        (StepPlan(released_rows=tuple(range(7))), "released_rows: must have at most 6 entries, not 7"),
        (StepPlan(entries=(Entry(0, 5, 0),)), "entries: must be below 5, not 5"),
        (StepPlan(chosen=(Chosen(0, 50, 0),)), "chosen: must be below 50, not 50"),
        (StepPlan(masked=((0, frozenset([50])),)), "masked: must be below 50, not 50"),
        (StepPlan(admitted=(dataclasses.replace(ADMITTED, token_ids=(50,)),)), "admitted.token_ids: must be below 50"),
        (StepPlan(admitted=(dataclasses.replace(ADMITTED, token_ids=()),)), "admitted.num_prompt_tokens: must be"),
        (StepPlan(admitted=(dataclasses.replace(ADMITTED, num_top=129),)), "admitted.num_top: must be below 130"),
        (StepPlan(admitted=(dataclasses.replace(ADMITTED, block_ids=(0,) * 6),)), "admitted.block_ids: must have"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_the_runner_is_refused(plan, words):
    with pytest.raises(FrameError) as refused:
        decode_plan(encode_plan(plan), SIZES)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(
    "text, words",
    [
        (b"[]", "must be a JSON object"),
        (b"{", "Expecting property name"),
        (b"\xff\xff", "'utf-8' codec"),
        (b'{"temperature": -1}', "temperature: must be a number of at least 0, not -1"),
        (b'{"temperature": NaN}', "temperature: must be a number of at least 0, not nan"),
        (b'{"frobnicate": 1}', "unknown fields frobnicate"),
        (b'{"structured_outputs": 1}', "unknown fields structured_outputs"),
        (b"[" * 100_000, "maximum recursion"),
    ],
)
def test_other_parameters_are_refused(text, words):
    payload = encode_plan(StepPlan(admitted=(ADMITTED,)))
    assert payload.endswith(b"{}") and payload.count(struct.pack("<I", 2)) >= 1
    words_of_plan = bytearray(payload[:-2])
    at = 4 + 4 * 14  # eight lengths before the admitted rows, and seven words of the row before that of the text
    assert struct.unpack_from("<I", words_of_plan, at) == (2,)
    struct.pack_into("<I", words_of_plan, at, len(text))
    with pytest.raises(FrameError, match=r"admitted\.params: ") as refused:
        decode_plan(bytes(words_of_plan) + text, SIZES)
    assert words in str(refused.value)


def test_a_constraint_stays_on_the_leader():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}), temperature=0.5)
    plan = StepPlan(admitted=(dataclasses.replace(ADMITTED, params=params),))
    (found,) = decode_plan(encode_plan(plan), SIZES).admitted
    assert found.params == dataclasses.replace(params, structured_outputs=None)
    assert json.dumps("object").encode() not in encode_plan(plan)


def test_masks_are_carried_and_others_refused():
    masks = np.arange(6, dtype=np.uint32).reshape(3, 2)
    payload = encode_masks(masks)
    np.testing.assert_array_equal(decode_masks(payload, 3, 50), masks)
    for wrong, words in [
        (payload[:7], "not cut off"), (payload[:-1], "masks: must have 24 bytes, not 23"),
        (payload + b"\0", "masks: must have 24 bytes, not 25"),
    ]:  # fmt: skip
        with pytest.raises(FrameError, match=words):
            decode_masks(wrong, 3, 50)
    with pytest.raises(FrameError, match=r"masks: must be \[2, 2\], not \[3, 2\]"):
        decode_masks(payload, 2, 50)

"""Frames carry any plan unchanged, and refuse everything else with the part that is wrong."""

import dataclasses
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.config import Limits
from jpaged.core.block_pool import GONE
from jpaged.core.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.core.plan import Admitted, Chosen, Entry, Scheduled, StepPlan
from jpaged.parallel.frame import (
    HEADER,
    VERSION,
    FrameError,
    Sizes,
    decode_message,
    encode_frame,
    message_of,
    plan_of,
    read_frame,
)
from jpaged.parallel.messages import End, Facts, Fault, Hello, Masks, ParamsText, Plan, Recover, Refusal, Welcome

SIZES = Sizes(
    Limits(max_model_len=40, max_num_seqs=6, max_num_batched_tokens=16, block_size=8), vocab_size=50, num_blocks=20,
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
        (draw(st.lists(BLOCK | st.just(GONE), max_size=5).map(tuple)),), draw(st.none() | st.integers(0, 128)),
        draw(st.none() | st.integers(0, 40)), draw(st.lists(TOKEN, max_size=5).map(tuple)),
    )  # fmt: skip


PLANS = st.builds(
    StepPlan, rows=scheduled(), swap_out=series(BLOCK, HOST),
    block_copies=series(BLOCK, BLOCK), swap_in=series(HOST, BLOCK),
    released_rows=st.lists(ROW, max_size=6).map(tuple), row_copies=series(ROW, ROW),
    admitted=st.lists(admitted(), max_size=3).map(tuple), chosen=series(ROW, TOKEN, SEED, kind=Chosen),
    entries=series(ROW, st.just(0), st.integers(0, 4), BLOCK, kind=Entry, most=30),
    masked=series(ROW, st.frozensets(TOKEN, max_size=5)),
)  # fmt: skip


def exactly(data: bytes):
    """A function that reads from some bytes, and fails at their end as a closed connection does."""
    stream = io.BytesIO(data)

    def read(num_bytes: int) -> bytes:
        found = stream.read(num_bytes)
        if len(found) < num_bytes:
            raise ConnectionError
        return found

    return read


def carried(plan: StepPlan) -> StepPlan:
    return plan_of(read_frame(exactly(encode_frame(message_of(plan)))), SIZES)


@settings(max_examples=40)
@given(PLANS)
def test_any_plan_is_carried_unchanged(plan):
    found = carried(plan)
    assert found == plan and all(type(each) is Scheduled for each in found.rows)


MESSAGES = [
    Hello(1, 2, {"jax": "0.1"}, {"seed": 3, "model": "demo", "quantization": None, "swap_space": 0.5}),
    Welcome({"sizes": [1, 2], "nested": {"a": True}}), Refusal("no"), Facts({"dtype": "float32"}), Masks(b"1234"),
    Recover(), End(), Fault("lost"),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_other_messages_are_carried_unchanged(message):
    assert read_frame(exactly(encode_frame(message))) == message


# Plans take longer to draw than to send, so that several places of each are changed.
PLACES = st.lists(st.floats(0, 1, exclude_max=True), min_size=8, max_size=8)


@settings(max_examples=20)
@given(PLANS, PLACES)
def test_a_truncated_plan_is_refused(plan, places):
    payload = encode_frame(message_of(plan))[HEADER.size :]
    for place in places:
        with pytest.raises(FrameError, match=r"^payload: "):
            decode_message(payload[: int(place * len(payload))])


@settings(max_examples=20)
@given(PLANS, PLACES)
def test_any_changed_bit_of_a_frame_is_noticed(plan, places):
    whole = encode_frame(message_of(plan))
    for place in places:
        frame, bit = bytearray(whole), int(place * 8 * len(whole))
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises((FrameError, ConnectionError)):
            read_frame(exactly(bytes(frame)))


@settings(max_examples=20)
@given(PLANS, PLACES, st.lists(st.binary(min_size=1, max_size=5), min_size=8, max_size=8))
def test_any_changed_bytes_of_a_plan_give_a_plan_or_are_refused(plan, places, others):
    whole = encode_frame(message_of(plan))[HEADER.size :]
    for place, other in zip(places, others, strict=True):
        payload, at = bytearray(whole), int(place * len(whole))
        payload[at : at + 4] = other
        try:
            found = plan_of(decode_message(bytes(payload)), SIZES)
        except FrameError:
            continue
        assert carried(found) == found


# Lengths of 2**32 - 1 without their content, deep nesting, text that is not UTF-8, and values after the message.
ATTACKS = {
    "series": b"\xdd\xff\xff\xff\xff",
    "rows": b"\x92\xa4Plan\x81\xa4rows\xdd\xff\xff\xff\xff",
    "words": b"\x92\xa5Masks\xc6\xff\xff\xff\xff",
    "settings": b"\x92\xa7Welcome\xdf\xff\xff\xff\xff",
    "nesting": b"\x92\xa7Welcome\x81\xa1a" + 100_000 * b"\x91",
    "text": b"\x92\xa5Fault\xa1\xff",
    "rest": b"\x91\xa3End\xc0",
    "more": b"\x92\xa3End\x01",
    "number": b"\x95\xa5Hello\xc3\x02\x80\x80",
    "kind": b"\x91\xa7Message",
}


@pytest.mark.parametrize("payload", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_is_refused(payload):
    with pytest.raises(FrameError, match=r"^payload: "):
        decode_message(payload)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises((FrameError, ConnectionError)):
        read_frame(exactly(noise))
    with pytest.raises(FrameError):
        decode_message(b"\xff" + noise)


def test_a_value_that_can_not_be_sent_is_refused():
    with pytest.raises(FrameError, match=r"^Welcome: can't serialize ints"):
        encode_frame(Welcome({"seed": 2**70}))


def header(magic=b"JPGD", version=VERSION, num_bytes=0, checksum=0) -> bytes:
    return HEADER.pack(magic, version, num_bytes, checksum)


@pytest.mark.parametrize(
    "data, words",
    [
        (header(magic=b"GET "), "magic: must be b'JPGD', not b'GET '"),
        (header(version=1), "version: must be 2, not 1; all nodes need the same version of jpaged"),
        (header(num_bytes=101), "payload: must have at most 100 bytes, not 101"),
        (header(checksum=1), "checksum: must be 0x00000001, not 0x00000000"),
    ],
)
def test_a_wrong_header_is_refused(data, words):
    with pytest.raises(FrameError) as refused:
        read_frame(exactly(data), 100)
    assert str(refused.value) == words


ADMITTED = Admitted(1, (3, 4), 1, SamplingParams(), 7, ((2,),))


@pytest.mark.parametrize(
    "plan, words",
    [
        (StepPlan(rows=(Scheduled(-1, 0, 1, 1),)), "rows: must be between 0 and 5, not -1"),
        (StepPlan(rows=(Scheduled(6, 0, 1, 1),)), "rows: must be between 0 and 5, not 6"),
        (StepPlan(rows=(Scheduled(0, 39, 2, 1),)), "rows: row 0 has 2 tokens from 39 on, allowed between 1 and max_"),
        (StepPlan(rows=(Scheduled(0, 3, 0, 1),)), "rows: row 0 has 0 tokens"),
        (StepPlan(rows=(Scheduled(0, 0, 1, 1),) * 2), "rows: a row is scheduled twice"),
        (StepPlan(rows=(Scheduled(0, 0, 17, 1),)), "rows: must have at most 16 tokens, not 17"),
        (StepPlan(rows=(Scheduled(0, 0, 1, 4), Scheduled(1, 0, 1, 3))), "rows: must have at most 6 samples, not 7"),
        (StepPlan(swap_out=((20, 0),)), "swap_out: must be between 0 and 19, not 20"),
        (StepPlan(swap_in=((0, 0),) * 10), "swap_in: must have at most 9 entries, not 10"),
        (StepPlan(released_rows=tuple(range(7))), "released_rows: must have at most 6 entries, not 7"),
        (StepPlan(entries=(Entry(0, 0, 5, 0),)), "entries: must be between 0 and 4, not 5"),
        (StepPlan(chosen=(Chosen(0, 50, 0),)), "chosen: must be between 0 and 49, not 50"),
        (StepPlan(masked=((0, frozenset([50])),)), "masked: must be between 0 and 49, not 50"),
        (StepPlan(admitted=(dataclasses.replace(ADMITTED, token_ids=(50,)),)), "admitted.token_ids: must be"),
        (StepPlan(admitted=(dataclasses.replace(ADMITTED, num_scored=-1),)), "admitted.num_scored: must be between 0"),
        (StepPlan(admitted=(dataclasses.replace(ADMITTED, token_ids=()),)), "admitted.num_prompt_tokens: must be"),
        (StepPlan(admitted=(dataclasses.replace(ADMITTED, num_top=129),)), "admitted.num_top: must be"),
        (StepPlan(admitted=(dataclasses.replace(ADMITTED, block_ids=((0,) * 6,)),)), "admitted.block_ids: must have"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_the_runner_is_refused(plan, words):
    with pytest.raises(FrameError) as refused:
        carried(plan)
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
    message = message_of(StepPlan(admitted=(ADMITTED,)))
    (admitted,) = message.plan.admitted
    admitted = dataclasses.replace(admitted, params=ParamsText("SamplingParams", text))
    with pytest.raises(FrameError, match=r"admitted\.params: ") as refused:
        plan_of(Plan(dataclasses.replace(message.plan, admitted=(admitted,))), SIZES)
    assert words in str(refused.value)


def test_a_constraint_stays_on_the_leader():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}), temperature=0.5)
    plan = StepPlan(admitted=(dataclasses.replace(ADMITTED, params=params),))
    (found,) = carried(plan).admitted
    assert found.params == dataclasses.replace(params, structured_outputs=None)
    assert b"object" not in encode_frame(message_of(plan))

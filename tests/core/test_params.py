"""Each parameter at its limits and one step beyond them, with the words of the refusal."""

import dataclasses
import math
import sys

import numpy as np
import pytest

from jpaged.core.params import (
    FOREIGN,
    BeamSearchParams,
    ContextLengthExceeded,
    InvalidParameter,
    SamplingParams,
    StructuredOutputsParams,
    shown,
)

HUGE = 10**400
LONG = "x" * 256
WHOLE, PENALTY = "must be a whole number of at least 1", "must be between -2 and 2"
LOGPROBS = "must be at least 0, -1 for the whole vocabulary, or none"
STOPS = "must be a string of 1 to 256 characters, or up to 64 of them"
BAD_WORDS = "must be up to 1024 strings of 1 to 256 characters"
FLAG = "must be true or false"
BIAS = "must give token ids numbers between -100 and 100"

# For each parameter: accepted values, refused values, and the beginning of the refusal.
SAMPLING = {
    "max_tokens": ([1, None, HUGE], [0, -1, 1.0, True, "1", np.float32(2)], WHOLE),
    "min_tokens": ([0, 16], [-1, 0.0, False, None], "must be a whole number of at least 0"),
    "stop": ([None, (), "a", LONG, ["a"] * 64], ["", LONG + "x", ["a"] * 65, ["a", ""], [1], 5], STOPS),
    "stop_token_ids": (
        [None, (), [0], [1] * 128], [[-1], [1] * 129, [True], [1.0], "1", 5, np.array([[1]]), np.array([0.5])],
        "must be up to 128 token ids",
    ),
    "include_stop_str_in_output": ([True, False], [1, None], FLAG),
    "ignore_eos": ([True, False], [0, "true"], FLAG),
    "skip_special_tokens": ([True, False], [0, None], FLAG),
    "detokenize": ([True, False], [0, None], FLAG),
    "certificate": ([True, False], [1, None], FLAG),
    "truncation_side": (["left", "right"], ["middle", None, ["left"]], 'must be "left" or "right"'),
    "presence_penalty": ([-2, 2, 0.5], [-2.01, 2.01, math.nan, True, None], PENALTY),
    "frequency_penalty": ([-2, 2, 0.5], [-2.01, 2.01, math.inf, "1"], PENALTY),
    "repetition_penalty": ([1e-9, 2, sys.float_info.max], [0, -1, math.inf, HUGE, math.nan, None], "must be above 0"),
    "allowed_token_ids": ([None, [0], (5, 6)], [[-1], [True], 5, "a"], "must be token ids"),
    "bad_words": ([None, (), [LONG], ["a"] * 1024], [["a"] * 1025, ["a", ""], [LONG + "x"], [1], 5], BAD_WORDS),
    "logprobs": ([None, 0, -1, HUGE], [-2, 1.0, True], LOGPROBS),
    "prompt_logprobs": ([None, 0, -1, HUGE], [-2, "1"], LOGPROBS),
    "truncate_prompt_tokens": ([None, 1, -1], [0, -2, 1.5], "must be at least 1, or -1"),
    "logit_bias": (
        [None, {}, {0: 100, "5": -100.0}], [{-1: 1}, {1: 100.1}, {1: -100.1}, {"a": 1}, {1: True}, [1]], BIAS,
    ),
    "logprob_token_ids": (
        [None, [5], range(128), np.array([1, 2])], [[], [1, 1], [-1], range(129), [True], 5],
        "must be 1 to 128 different token ids",
    ),
    "num_speculative_tokens": ([None, 0, 32], [-1, 33, 1.0, True], "must be a whole number between 0 and 32"),
    "kept_tokens": ([True, False], [1, None], FLAG),
    "pooling": (["last", "mean", None], ["first", 1, ["last"]], 'must be "last" or "mean"'),
    "n": ([1, 1000], [0, 1.0, True, None], WHOLE),
    "best_of": ([None, 1, 1000], [0, True], WHOLE),
    "temperature": (
        [0, 1e300], [-0.1, math.inf, math.nan, True, HUGE, np.array([0.5])], "must be a number of at least 0",
    ),
    "top_k": ([-1, 0, 1, HUGE], [-2, 1.0], "must be a whole number of at least 1, or 0 or -1 for all tokens"),
    "top_p": ([1, 1e-9], [0, 1.01, -1, math.nan], "must be above 0 and at most 1"),
    "min_p": ([0, 1], [-0.1, 1.1], "must be between 0 and 1"),
    "seed": ([None, -(2**63), 2**64 - 1], [-(2**63) - 1, 2**64, 1.0, True], "must be a whole number of at most 64 bit"),
}  # fmt: skip
BEAMS = {
    "beam_width": ([1, 64], [0, 65, True], "must be a whole number between 1 and 64"),
    "n": ([None, 1, 4], [0, 1.0], WHOLE),
    "length_penalty": ([-16, 16], [-16.1, 16.1, math.nan], "must be between -16 and 16"),
    "early_stopping": ([True, False, "never"], [1, 0, "always", None], 'must be true, false or "never"'),
}
KINDS = {SamplingParams: SAMPLING, BeamSearchParams: BEAMS}
ACCEPTED = [
    (kind, name, value) for kind, table in KINDS.items() for name, (good, _, _) in table.items() for value in good
]
REFUSED = [
    (kind, name, value, told)
    for kind, table in KINDS.items()
    for name, (_, bad, told) in table.items()
    for value in bad
]


def make(kind, **values):
    return kind(**({"beam_width": 4} | values if kind is BeamSearchParams else values))


def test_every_parameter_is_in_a_table():
    names = {field.name for field in dataclasses.fields(SamplingParams)} - {"structured_outputs"}
    assert names == SAMPLING.keys()
    assert {field.name for field in dataclasses.fields(BeamSearchParams)} - names == BEAMS.keys() - {"n"} | {
        "structured_outputs"
    }


@pytest.mark.parametrize(("kind", "name", "value"), ACCEPTED)
def test_values_within_the_limits_are_accepted(kind, name, value):
    options = {"best_of": {"n": 1}, "min_tokens": {"max_tokens": 16}, "pooling": {"max_tokens": 1}}.get(name, {})
    make(kind, **{name: value}, **options)


@pytest.mark.parametrize(("kind", "name", "value", "told"), REFUSED)
def test_values_beyond_the_limits_are_refused_by_name(kind, name, value, told):
    with pytest.raises(InvalidParameter) as error:
        make(kind, **{name: value})
    assert str(error.value).startswith(f"{name}: {told}") and error.value.field == name


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        (SamplingParams, dict(top_p=2), "top_p: must be above 0 and at most 1, not 2"),
        (SamplingParams, dict(stop=["a", 5]), f"stop: {STOPS}, not ('a', 5)"),
        (SamplingParams, dict(logit_bias={3: "x"}), f"logit_bias: {BIAS}, not {{3: 'x'}}"),
        (
            SamplingParams, dict(stop="a", detokenize=False),
            "stop: needs detokenize, because stop strings are found in the text",
        ),
        (SamplingParams, dict(min_tokens=5, max_tokens=4), "min_tokens: 5 exceeds max_tokens (4)"),
        (SamplingParams, dict(allowed_token_ids=[]), "allowed_token_ids: must allow at least one token"),
        (SamplingParams, dict(n=3, best_of=2), "best_of: 2 is below n (3)"),
        (BeamSearchParams, dict(beam_width=4, n=5), "n: 5 exceeds beam_width (4)"),
        (
            SamplingParams, dict(logit_bias=dict.fromkeys(range(4097), 1)),
            "logit_bias: must have at most 4096 entries, not 4097",
        ),
        (
            SamplingParams, dict(structured_outputs=StructuredOutputsParams(regex="a"), ignore_eos=True),
            "ignore_eos: can't be combined with structured_outputs, which may leave no token",
        ),
        (
            SamplingParams, dict(structured_outputs=StructuredOutputsParams(regex="a"), bad_words=["a"]),
            "bad_words: can't be combined with structured_outputs, which may leave no token",
        ),
        (
            SamplingParams, dict(structured_outputs=StructuredOutputsParams(regex="a"), allowed_token_ids=[1]),
            "allowed_token_ids: can't be combined with structured_outputs, which may leave no token",
        ),
        (
            StructuredOutputsParams, {},
            "structured_outputs: must have one of json, regex, choice, grammar, json_object, not none",
        ),
        (
            StructuredOutputsParams, dict(regex="a", json="{}"),
            "structured_outputs: must have one of json, regex, choice, grammar, json_object, not json and regex",
        ),
        (
            StructuredOutputsParams, dict(json_object=False),
            "structured_outputs: must have one of json, regex, choice, grammar, json_object, not none",
        ),
        (StructuredOutputsParams, dict(choice=[]), "structured_outputs: choice must be texts, not []"),
        (StructuredOutputsParams, dict(choice=["a", 5]), "structured_outputs: choice must be texts, not ['a', 5]"),
        (
            StructuredOutputsParams, dict(regex="a", whitespace_pattern=" "),
            "structured_outputs: whitespace_pattern is allowed only for JSON, not for regex",
        ),
        (
            StructuredOutputsParams, dict(json_object=True, whitespace_pattern=" ", disable_any_whitespace=True),
            "structured_outputs: whitespace_pattern contradicts disable_any_whitespace",
        ),
    ],
)  # fmt: skip
def test_refusals_name_what_was_given_and_what_is_allowed(kind, values, told):
    with pytest.raises(InvalidParameter) as error:
        kind(**values)
    assert str(error.value) == told and error.value.field == told.partition(":")[0]


@pytest.mark.parametrize(
    "values",
    [
        dict(json={"type": "object"}), dict(json="{}", disable_any_whitespace=True), dict(choice=("a", "b")),
        dict(json_object=True, whitespace_pattern=" ?"), dict(regex="a", json_object=False), dict(grammar="start: A"),
    ],
)  # fmt: skip
def test_outputs_of_one_kind_are_accepted(values):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**values))
    assert params.structured_outputs.json == values.get("json")


def test_as_many_biases_as_are_allowed_are_accepted():
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(4096), 1)).logit_bias) == 4096


def test_values_are_settled():
    """Series become tuples, NumPy's numbers Python's, and the keys of biases integers."""
    params = SamplingParams(
        stop="end", bad_words=["a"], stop_token_ids=np.array([1, 2]), temperature=np.float32(0.5), logit_bias={"5": 1}
    )
    assert (params.stop, params.bad_words, params.stop_token_ids) == (("end",), ("a",), (1, 2))
    assert type(params.temperature) is float and params.logit_bias == {5: 1}
    assert SamplingParams().allowed_token_ids is None


@pytest.mark.parametrize(
    ("values", "stateful"),
    [
        ({}, False), ({"presence_penalty": 1}, True), ({"frequency_penalty": 1}, True), ({"logit_bias": {}}, False),
        ({"repetition_penalty": 2}, True), ({"logit_bias": {1: 1}}, True), ({"allowed_token_ids": [1]}, True),
        ({"bad_words": ["a"]}, True), ({"logprob_token_ids": [1]}, True),
        ({"min_tokens": 2, "stop": "a", "logprobs": 2, "top_k": 2}, False),
    ],
)  # fmt: skip
def test_what_needs_a_row_of_state(values, stateful):
    assert SamplingParams(**values).has_state == stateful


def test_sequences_and_outputs():
    counts = lambda params: (params.num_sequences, params.num_outputs)
    assert counts(SamplingParams()) == (1, 1) and counts(SamplingParams(n=3)) == (3, 3)
    assert counts(SamplingParams(n=2, best_of=5)) == (5, 2)
    assert counts(BeamSearchParams(beam_width=4)) == (4, 4) and counts(BeamSearchParams(beam_width=4, n=2)) == (4, 2)


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"),
    [(None, 16, 9), (3, 16, 3), (20, 16, 9), (-1, 4, 6), (-1, None, 9), (-1, 10, 1), (-1, 99, 1)],
)
def test_truncation_keeps_one_end_of_a_prompt(keep, max_tokens, kept):
    prompt, options = list(range(9)), dict(truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert SamplingParams(**options).truncated(prompt, 10) == prompt[-kept:]
    assert SamplingParams(**options, truncation_side="right").truncated(prompt, 10) == prompt[:kept]


FOREIGN_VALUES = {
    "spaces_between_special_tokens": ([None, True, False], [5]),
    "skip_clone": ([None, True, False], ["no"]),
    "output_kind": ([None], [0, 1, 2]),
    "flat_logprobs": ([None, False], [True]),
    "guided_decoding": ([None], [{"regex": "a"}]),
    "extra_args": ([None, {}], [{"a": 1}]),
    "logits_processors": ([None, []], [[print]]),
    "thinking_token_budget": ([None, -1], [5]),
    "repetition_detection": ([None], [{}]),
    "num_logprobs": ([None], [1]),
}


def test_every_keyword_of_vllm_without_a_use_is_in_a_table():
    assert FOREIGN.keys() == FOREIGN_VALUES.keys()


@pytest.mark.parametrize("name", FOREIGN)
def test_keyword_of_vllm_without_a_use_is_accepted_at_neutral_values(name):
    neutral, others = FOREIGN_VALUES[name]
    for value in neutral:
        params = SamplingParams(**{name: value}, seed=5)
        assert params == SamplingParams(seed=5) and not hasattr(params, name)
    for value in others:
        with pytest.raises(InvalidParameter, match=f"^{name}: must be absent, not ") as error:
            SamplingParams(**{name: value})
        assert error.value.field == name
    assert dataclasses.replace(SamplingParams(seed=5), n=2) == SamplingParams(seed=5, n=2)


def test_params_clone_is_equal_and_shares_nothing():
    params = SamplingParams(temperature=0.5, logit_bias={1: 2.0}, structured_outputs=StructuredOutputsParams(json={}))
    clone = params.clone()
    assert clone == params and type(clone) is SamplingParams
    clone.logit_bias[1] = 3.0
    clone.structured_outputs.json["type"] = "object"
    assert params.logit_bias == {1: 2.0} and params.structured_outputs.json == {}


def test_errors_have_their_codes():
    assert InvalidParameter("a", "b").code is None
    assert ContextLengthExceeded("a", "b").code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * 58, repr("x" * 58)),
        ("x" * 99, f"'{'x' * 27}...{'x' * 28}'"),
        (list(range(99)), "[0, 1, 2, 3, 4, 5, ...]"),
    ],
)
def test_long_values_are_shown_in_part(value, text):
    assert shown(value) == text and len(text) <= 60


def test_shown_values_have_at_most_60_characters():
    fitting, longer = (repr(["x" * 26, "x" * n]) for n in (26, 27))
    assert len(fitting) == 60 and shown(["x" * 26, "x" * 26]) == fitting
    assert shown(["x" * 26, "x" * 27]) == longer[:57] + "..."

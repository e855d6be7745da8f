"""Certificates as values: the hash covers every part, and JSON gives the same value back."""

import dataclasses
import json
import math

import pytest

from jpaged import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.core.certificate import Certificate, bits_of, params_of_one, runs_of

PROMPT, TOKENS = [5, 6, 7], [8, 9]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b", "a"]}
PARAMS = [
    SamplingParams(temperature=0.7, top_k=4, top_p=0.9, min_p=0.1, presence_penalty=1, frequency_penalty=-0.5),
    SamplingParams(repetition_penalty=1.5, logit_bias={9: 1.0, 10: -2.5}, stop=["a", "b"], bad_words=["c"]),
    SamplingParams(stop_token_ids=[3], allowed_token_ids=[3, 4], ignore_eos=True, min_tokens=2),
    SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)),
    SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]), skip_special_tokens=False),
    BeamSearchParams(beam_width=4, n=2, length_penalty=0.5, early_stopping="never", max_tokens=7),
]  # fmt: skip


def unsealed(params=PARAMS[0], **changes):
    given = {
        "numerics": {"jpaged": "1.0", "dtype": "float32", "block_size": 16}, "parameters": ("ab12",),
        "versions": ((3, 2),), "params": params, "seed": 2**64 - 1, "logprobs": bits_of([-0.5, -math.inf]),
    }  # fmt: skip
    return Certificate(**given | changes)


@pytest.mark.parametrize("params", PARAMS)
def test_a_certificate_survives_json(params):
    sealed = unsealed(params).sealed(PROMPT, TOKENS)
    found = Certificate.from_json(json.loads(json.dumps(sealed.as_json(), sort_keys=True)))
    assert found.changed(PROMPT, TOKENS) == [] and found.as_json() == sealed.as_json()
    wanted = params.structured_outputs
    if wanted is None or wanted.json is None:
        assert found == sealed
    else:  # as text, in the order of the properties
        assert json.dumps(json.loads(found.params.structured_outputs.json)) == json.dumps(SCHEMA)
    assert len(found.digest) == 32 and len(set(found.checks.values())) == 8


@pytest.mark.parametrize(
    "part, value",
    [
        ("numerics", {"jpaged": "1.0", "dtype": "bfloat16", "block_size": 16}), ("parameters", ("ab13",)),
        ("versions", ((2, 2),)), ("params", dataclasses.replace(PARAMS[0], top_k=5)), ("params", PARAMS[-1]),
        ("seed", 0), ("logprobs", bits_of([-0.5000001, -math.inf])), ("digest", "00"),
    ],
)  # fmt: skip
def test_a_changed_part_is_named(part, value):
    sealed = unsealed().sealed(PROMPT, TOKENS)
    assert dataclasses.replace(sealed, **{part: value}).changed(PROMPT, TOKENS) == [part]
    assert unsealed(**{part: value}).sealed(PROMPT, TOKENS).digest != sealed.digest or part == "digest"


def test_changed_tokens_are_named():
    sealed = unsealed().sealed(PROMPT, TOKENS)
    assert sealed.changed([5, 6], TOKENS) == ["prompt_token_ids"]
    assert sealed.changed(PROMPT, [8, 10]) == ["token_ids"]
    assert sealed.changed([5, 6, 7, 8], [9]) == ["prompt_token_ids", "token_ids"]


def test_params_of_one_output_leave_out_the_seed_and_what_is_only_listed():
    params = SamplingParams(
        n=2, best_of=3, seed=4, top_p=0.5, max_tokens=None, min_tokens=50, logprobs=2, prompt_logprobs=1,
        logprob_token_ids=[5], truncate_prompt_tokens=9, truncation_side="right", certificate=True,
        num_speculative_tokens=0, kept_tokens=True,
    )  # fmt: skip
    assert params_of_one(params, 40) == SamplingParams(top_p=0.5, max_tokens=40, min_tokens=40)
    beams = BeamSearchParams(beam_width=4, n=2, logprobs=1, certificate=True, max_tokens=5)
    assert params_of_one(beams, 5) == BeamSearchParams(beam_width=4, n=2, max_tokens=5)


def test_a_request_to_replay_has_the_seed_and_wants_a_certificate():
    assert unsealed().request_params == dataclasses.replace(PARAMS[0], seed=2**64 - 1, certificate=True)
    assert unsealed(PARAMS[-1]).request_params == dataclasses.replace(PARAMS[-1], certificate=True)


def test_bits_and_runs():
    assert bits_of([1.0, -0.0, -math.inf]) == "3f80000080000000ff800000" and bits_of([]) == ""
    assert runs_of([3, 3, 4, 3]) == ((3, 2), (4, 1), (3, 1)) and runs_of([]) == ()


JSON = json.loads(json.dumps(unsealed().sealed(PROMPT, TOKENS).as_json()))


@pytest.mark.parametrize(
    "value, told",
    [
        (None, "certificate: must be an object with checks, digest, logprobs, .*, not None"),
        ({"seed": 1}, "certificate: must be an object with checks"),
        (JSON | {"more": 1}, "certificate: must be an object with checks"),
        (JSON | {"seed": "5"}, "certificate: seed has the wrong type: '5'"),
        (JSON | {"params": []}, "certificate: params has the wrong type"),
        (JSON | {"numerics": []}, "certificate: numerics must be an object"),
        (JSON | {"parameters": "ab"}, "certificate: numerics must be an object, and parameters a list"),
        (JSON | {"logprobs": "xy"}, "certificate: versions must be pairs, and logprobs hexadecimal digits"),
        (JSON | {"versions": [1]}, "certificate: versions must be pairs"),
        (JSON | {"params": {"top_q": 1}}, "certificate: unknown parameters top_q"),
        (JSON | {"params": {"top_k": -2}}, "top_k: must be a whole number"),
        (JSON | {"params": {"structured_outputs": {"xml": "a"}}}, "certificate: structured_outputs: .*xml"),
        (JSON | {"params": {"structured_outputs": []}}, "certificate: structured_outputs: "),
    ],
)  # fmt: skip
def test_json_of_another_form_is_refused_by_field(value, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        Certificate.from_json(value)

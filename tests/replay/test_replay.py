"""Replay of certified outputs by one engine: equal in any company, and any change is named."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from flax import nnx

from jpaged import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.core.request import Logprob
from jpaged.replay import Replay, load, save
from tests.runtime.test_runner import LIMITS, LLAMA
from tests.support.few_shapes import few_shapes
from tests.support.models import EOS, byte_tokenizer
from tests.support.random_model import random_model

SETTINGS = {"block_size": 8, "num_gpu_blocks_override": 100, "progress": False, "warm_up": True} | LIMITS
PROMPTS = [
    "Once upon a time",
    "A prompt that is longer than one step, so that it is computed in chunks",
    "x",
    "The end",
]
BEGINNING = {"max_tokens": 12, "certificate": True}
PARAMS = [
    SamplingParams(n=3, **BEGINNING),
    SamplingParams(n=2, best_of=3, temperature=0.8, presence_penalty=1, logit_bias={70: 2.0}, logprobs=2, **BEGINNING),
    BeamSearchParams(beam_width=3, n=2, **BEGINNING),
    SamplingParams(temperature=0, stop=["e"], bad_words=["ab"], prompt_logprobs=1, min_tokens=2, **BEGINNING),
    SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "integer"}), top_k=9, **BEGINNING),
]
EVERY = [(prompt, params) for prompt in PROMPTS for params in PARAMS]


@pytest.fixture(scope="module")
def model():
    return random_model(dataclasses.replace(LLAMA, eos_token_ids=(EOS,)), "float32", 0)


@pytest.fixture(scope="module")
def llm(model):
    with few_shapes():
        return LLM(model, tokenizer=byte_tokenizer(), **SETTINGS)


@pytest.fixture(scope="module")
def outputs(llm):
    return llm.generate([prompt for prompt, _ in EVERY], [params for _, params in EVERY], use_tqdm=False)


@pytest.fixture(scope="module")
def one(llm):
    """A request with one drawn output of several tokens."""
    params = SamplingParams(max_tokens=12, certificate=True, ignore_eos=True, logprobs=0, seed=5)
    return llm.generate(PROMPTS[0], params, use_tqdm=False)[0]


def replayed(llm, outputs):
    return list(map(str, llm.replay(outputs, use_tqdm=False)))


def changed(request, *, certificate=None, **changes):
    """Return a request with another first output."""
    output = dataclasses.replace(request.outputs[0], **changes)
    if certificate:
        output = dataclasses.replace(output, certificate=dataclasses.replace(output.certificate, **certificate))
    return dataclasses.replace(request, outputs=[output])


def test_every_kind_of_request_is_equal_in_any_company(llm, outputs):
    num_outputs = sum(params.num_outputs for _, params in EVERY)
    assert replayed(llm, outputs) == ["equal"] * num_outputs, "again together"
    assert replayed(llm, reversed(outputs)) == ["equal"] * num_outputs, "in another order, after prefix hits"
    llm.reset_prefix_cache()
    assert {result for each in outputs[:7] for result in replayed(llm, each)} == {"equal"}, "alone"
    single = dataclasses.replace(outputs[0], outputs=outputs[0].outputs[2:])
    assert replayed(llm, [outputs[5], single]) == ["equal"] * 4, "one of three samples, beside a request in chunks"


def test_a_seed_that_the_engine_drew_is_in_the_certificate(outputs):
    first, second, third = (output.certificate.seed for output in outputs[0].outputs)
    assert (second, third) == ((first + 1) % 2**64, (first + 2) % 2**64)
    assert first != outputs[5].outputs[0].certificate.seed
    assert all(output.certificate.params.seed is None for output in outputs[0].outputs)


def test_a_file_holds_all_that_a_replay_needs(llm, outputs, tmp_path):
    path = tmp_path / "outputs.jsonl"
    save(outputs, path)
    found = load(path)
    for read, written in zip(found, outputs, strict=True):
        assert (read.request_id, read.prompt_token_ids) == (written.request_id, written.prompt_token_ids)
        for ours, theirs in zip(read.outputs, written.outputs, strict=True):
            kept = {"logprobs": None, "cumulative_logprob": 0.0, "certificate": ours.certificate}
            assert ours == dataclasses.replace(theirs, **kept)
            assert ours.certificate.digest == theirs.certificate.digest
    assert set(replayed(llm, found)) == {"equal"}


def test_another_token_is_named_with_both_values(llm, one):
    ids = one.outputs[0].token_ids
    other = (ids[3] + 1) % 256
    (result,) = llm.replay(changed(one, token_ids=[*ids[:3], other, *ids[4:]]), use_tqdm=False)
    assert str(result) == f"token 3: {other} in the output, {ids[3]} in the replay"
    assert result == Replay(one.request_id, 0, False, "token", 3, result.reason)
    assert replayed(llm, changed(one, token_ids=ids[:5])) == [f"token 5: None in the output, {ids[5]} in the replay"]
    assert replayed(llm, changed(one, token_ids=[*ids, 7])) == ["token 12: 7 in the output, None in the replay"]


def flipped(bits, position):
    """Return bits of logprobs with another last bit at a position."""
    return bits[: 8 * position + 7] + f"{int(bits[8 * position + 7], 16) ^ 1:x}" + bits[8 * position + 8 :]


def test_a_flipped_bit_of_a_logprob_is_named_with_both_values(llm, one):
    (output,) = one.outputs
    bits = flipped(output.certificate.logprobs, 4)
    told, right = bits[32:40], output.certificate.logprobs[32:40]
    found = replayed(llm, changed(one, certificate={"logprobs": bits}))
    assert re.fullmatch(rf"logprob 4: -\S+ \({told}\) in the output, -\S+ \({right}\) in the replay", *found)
    token = output.token_ids[4]
    nearest = float(np.nextafter(np.float32(output.logprobs[4][token].logprob), np.float32(0)))
    listed = [*output.logprobs[:4], {token: Logprob(nearest, 1)}, *output.logprobs[5:]]
    found = replayed(llm, changed(one, logprobs=listed))
    assert re.fullmatch(rf"logprob 4: {nearest} \(\w+\) in the output, -\S+ \({right}\) in the replay", *found)
    found = replayed(llm, changed(one, certificate={"logprobs": output.certificate.logprobs[:80]}))
    assert found[0].startswith("logprob 10: none in the output, -")


HASH = "does not fit the hash; it was changed after the output was certified"


@pytest.mark.parametrize(
    "change, told",
    [
        ({"certificate": {"seed": 6}}, f"not replayed, seed: {HASH}"),
        ({"certificate": {"params": SamplingParams(max_tokens=12, ignore_eos=True, top_k=3)}},
         f"not replayed, params: {HASH}"),
        ({"certificate": {"numerics": {}}}, f"not replayed, numerics: {HASH}"),
        ({"certificate": {"versions": ((1, 12),)}}, f"versions: {HASH}"),
        ({"certificate": {"digest": "0" * 32}}, f"digest: {HASH}"),
        ({"versions": [0] * 11 + [1]}, f"versions: {HASH}"),
        ({"finish_reason": "stop"}, "finish_reason: stop in the output, length in the replay"),
        ({"certificate": None}, "not replayed, certificate: missing; set certificate=True in the parameters"),
    ],
)  # fmt: skip
def test_any_other_change_is_named(llm, one, change, told):
    request = changed(one, **change) if change.get("certificate", ()) is not None else without_certificate(one)
    assert replayed(llm, request) == [told]


def without_certificate(request):
    return dataclasses.replace(request, outputs=[dataclasses.replace(request.outputs[0], certificate=None)])


def test_another_prompt_is_named(llm, one):
    other = dataclasses.replace(one, prompt_token_ids=[*one.prompt_token_ids, 5])
    assert replayed(llm, other) == [f"not replayed, prompt_token_ids: {HASH}"]


def resealed(request, **changes):
    """Return a request whose certificate was made with other values."""
    (output,) = request.outputs
    certificate = dataclasses.replace(output.certificate, **changes)
    sealed = certificate.sealed(request.prompt_token_ids, output.token_ids)
    return dataclasses.replace(request, outputs=[dataclasses.replace(output, certificate=sealed)])


def test_the_outputs_of_another_engine_are_refused_by_field(llm, one):
    numerics = one.outputs[0].certificate.numerics
    for name, value in (("jpaged", "0.0.1"), ("dtype", "bfloat16"), ("block_size", 16), ("kernels", "mosaic")):
        found = replayed(llm, resealed(one, numerics=numerics | {name: value}))
        assert found == [f"not replayed, {name}: {value} in the certificate, {numerics[name]} in this engine"]
    found = replayed(llm, resealed(one, numerics=numerics | {"adapter": "a"}))
    assert found == ["not replayed, adapter: a in the certificate, None in this engine"]
    assert {"jpaged", "jax", "device", "dtype", "kv_cache_dtype", "quantization", "logprobs_mode"} < numerics.keys()


def test_a_request_that_the_engine_can_not_serve_is_refused_beside_others(llm, one):
    too_long = resealed(one, params=SamplingParams(max_tokens=400))
    refused, equal = llm.replay([too_long, one], use_tqdm=False)
    assert equal.equal and (refused.field, refused.replayed) == ("max_tokens", False)
    assert str(refused).startswith("not replayed, max_tokens: This model's maximum context length is 128 tokens")


def test_a_flipped_bit_of_a_parameter_is_named_until_it_is_flipped_back(llm, model, one):
    right = one.outputs[0].certificate.parameters[0]
    state = nnx.to_pure_dict(nnx.state(model))
    scale = np.asarray(state["norm"]["scale"]).copy()
    scale.view(np.int32)[0] ^= 1
    llm.update_params({"norm": {"scale": jax.numpy.asarray(scale)}})
    try:
        (told,) = replayed(llm, one)
        assert re.fullmatch(rf"not replayed, parameters: {right} in the certificate, \w{{32}} in this engine", told)
    finally:
        llm.update_params(model)
    assert replayed(llm, one) == ["equal"]


def test_an_output_across_an_update_has_both_fingerprints_and_is_refused(llm, model, one):
    engine = llm.engine
    request = engine.add("across", [3, 4, 5], SamplingParams(max_tokens=6, ignore_eos=True, certificate=True))
    while request.sequences[0].num_output_tokens < 3:
        engine.step()
    llm.update_params(jax.tree.map(lambda x: 1.1 * x, nnx.state(model)))
    while engine.has_work:
        engine.step()
    llm.update_params(model)
    certificate = request.sequences[0].certificate
    assert len(certificate.parameters) == 2 and certificate.parameters[0] == one.outputs[0].certificate.parameters[0]
    assert [count for _, count in certificate.versions] == [3, 3]
    output = dataclasses.replace(
        one.outputs[0],
        certificate=certificate,
        token_ids=request.sequences[0].output_token_ids,
        versions=[],
        logprobs=None,
    )
    (found,) = replayed(llm, dataclasses.replace(one, prompt_token_ids=[3, 4, 5], outputs=[output]))
    assert found.startswith("not replayed, parameters: were exchanged while the output was computed (")


def test_an_aborted_output_has_no_certificate(llm):
    request = llm.engine.add("aborted", [3, 4, 5], SamplingParams(max_tokens=6, certificate=True))
    llm.engine.step()
    llm.engine.abort("aborted")
    assert request.sequences[0].certificate is None


def test_a_sleeping_engine_replays_nothing(llm, one):
    llm.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        llm.replay(one)
    llm.wake_up()
    assert replayed(llm, one) == ["equal"]

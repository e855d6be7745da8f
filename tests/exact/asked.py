"""Requests of every kind, and the bits of their results."""

import random
from typing import NamedTuple

from jpaged.core.params import BeamSearchParams, Params, SamplingParams, StructuredOutputsParams
from jpaged.core.pooling import POOLINGS
from jpaged.core.request import Request
from jpaged.engine.output import whole_deltas

REGEXES = ("[a-f]{3,9}(xy|z)+", "[0-9]+-[A-Z]{2,6}")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 4}}}
# Whole blocks and parts of blocks of 8 tokens.
BEGINNINGS = (17, 40)
LONGEST = 30  # tokens of a prompt after its beginning


class Asked(NamedTuple):
    """A request."""

    prompt: list[int]
    params: Params


def _greedy(rng: random.Random, vocab_size: int) -> Params:
    return SamplingParams(
        temperature=0, max_tokens=9, logprobs=rng.randint(0, 20), prompt_logprobs=rng.randint(0, 20), ignore_eos=True
    )


def _drawn(rng: random.Random, vocab_size: int) -> Params:
    return SamplingParams(temperature=rng.uniform(0.5, 1.5), seed=rng.getrandbits(64), max_tokens=9, logprobs=0)


def _filtered(rng: random.Random, vocab_size: int) -> Params:
    return SamplingParams(
        temperature=rng.choice([0.7, 1.0]), top_k=rng.choice([0, 5, 90]), top_p=rng.uniform(0.5, 1),
        min_p=rng.choice([0, 0.05]), seed=rng.getrandbits(64), max_tokens=8, logprobs=3,
    )  # fmt: skip


def _penalized(rng: random.Random, vocab_size: int) -> Params:
    return SamplingParams(
        temperature=rng.choice([0, 0.8]), presence_penalty=rng.uniform(-2, 2), frequency_penalty=rng.uniform(0, 2),
        repetition_penalty=rng.uniform(0.8, 1.5), logit_bias={rng.randrange(vocab_size): 3.0}, seed=5, max_tokens=10,
        logprob_token_ids=rng.sample(range(vocab_size), 4), min_tokens=3,
    )  # fmt: skip


def _several(rng: random.Random, vocab_size: int) -> Params:
    return SamplingParams(n=3, temperature=0.9, seed=rng.getrandbits(64), max_tokens=7, logprobs=2, prompt_logprobs=1)


def _beams(rng: random.Random, vocab_size: int) -> Params:
    return BeamSearchParams(beam_width=3, max_tokens=7, length_penalty=rng.uniform(0.5, 1.5), logprobs=1)


def _structured(rng: random.Random, vocab_size: int) -> Params:
    wanted = rng.choice([*({"regex": regex} for regex in REGEXES), {"json": SCHEMA}])
    return SamplingParams(
        temperature=0.8, seed=rng.getrandbits(64), max_tokens=10, logprobs=2,
        structured_outputs=StructuredOutputsParams(**wanted),
    )  # fmt: skip


def _stopped(rng: random.Random, vocab_size: int) -> Params:
    return SamplingParams(
        temperature=1.0, seed=rng.getrandbits(64), max_tokens=10, logprobs=1, prompt_logprobs=0,
        stop=list("qtrioasnzk"), bad_words=["a", "the", "bc"], stop_token_ids=rng.sample(range(vocab_size), 9),
    )  # fmt: skip


KINDS = (_greedy, _drawn, _filtered, _penalized, _several, _beams, _structured, _stopped)


def mixed(vocab_size: int, count: int, seed: int = 0) -> list[Asked]:
    """Return requests of all kinds, and two for vectors; the prompts of two in three share a beginning with others."""
    rng = random.Random(seed)
    draw = lambda size: [rng.randrange(vocab_size) for _ in range(size)]
    beginnings = [[], *(draw(size) for size in BEGINNINGS)]
    prompt = lambda: beginnings[rng.randrange(3)] + draw(rng.randint(1, LONGEST))
    asked = [Asked(prompt(), KINDS[i % len(KINDS)](rng, vocab_size)) for i in range(count)]
    return asked + [
        Asked(prompt(), SamplingParams(max_tokens=1, temperature=0, pooling=pooling)) for pooling in POOLINGS
    ]


def bits(request: Request) -> tuple:
    """Return everything that a caller gets of a request; floats in hexadecimal, so that they compare to the bit."""

    def of(sample) -> tuple:
        return tuple(_hex(value) for value in sample)

    outputs = [
        (s.output_token_ids, s.text, s.finish_reason, s.stop_reason, s.cumulative_logprob.hex(), [*map(of, s.samples)])
        for s in request.outputs
    ]
    vectors = [_hex(delta.pooled) for delta in whole_deltas(request)]
    return outputs, [*map(of, request.prompt_samples)], vectors


def _hex(value):
    if isinstance(value, tuple | list):
        return tuple(map(_hex, value))
    return value.hex() if isinstance(value, float) else value

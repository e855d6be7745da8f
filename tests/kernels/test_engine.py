"""The engine on the GPU kernels, which Pallas's interpreters run: it generates the tokens of the reference.

One workload holds prompts of several lengths, two samples of one prompt, a beam search and a prefix hit; the longer one
adds preemptions. Random floating-point differences could turn a choice between two near-equal candidates, so the
tests also check that no choice was that close.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from jpaged.config import EngineConfig, Limits
from jpaged.core.beam import BeamSearch
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.plan import Sample
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine
from jpaged.models.checkpoint import dummy_model
from jpaged.models.config import ModelConfig
from jpaged.models.llama import Llama
from jpaged.runtime.batch import Bucket
from pallas_kernels import Kernels, mosaic, reference, triton
from pallas_kernels.sampling import gumbel
from tests.kernels import mosaic_interpreter, triton_interpreter
from tests.kernels.implementations import kernels_of
from tests.support.runners import runner_of

VOCAB, BLOCK = 16, 8  # a list of logprobs holds the whole vocabulary
LLAMA = ModelConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=64, max_position_embeddings=64,
)  # fmt: skip
LIMITS = Limits(max_model_len=40, max_num_seqs=4, max_num_batched_tokens=16, block_size=BLOCK)

REFERENCE = contextlib.nullcontext, kernels_of(reference)
TRITON = triton_interpreter.interpreting, kernels_of(triton)
MOSAIC = lambda: mosaic_interpreter.interpreting(num_sms=2), kernels_of(mosaic)
Implementation = tuple[Callable[[], contextlib.AbstractContextManager], Kernels]

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
GREEDY, TWO, BEAMS = (
    SamplingParams(temperature=0, max_tokens=2, logprobs=VOCAB),
    SamplingParams(n=2, temperature=1.0, seed=4, max_tokens=2, logprobs=VOCAB),
    BeamSearchParams(beam_width=2, max_tokens=2, logprobs=VOCAB),
)
# Requests by the step before which they come.
SHORT = {0: [(PROMPT, GREEDY), ([5, 6, 7], TWO)], 2: [([9, 9, 3, 9], BEAMS), ([*PROMPT[:9], 3], GREEDY)]}
LONG = {
    0: [(PROMPT + PROMPT, dataclasses.replace(GREEDY, max_tokens=12)), ([5, 6, 7], TWO)],
    2: [([9, 9, 3, 9], dataclasses.replace(BEAMS, max_tokens=6)), ([*PROMPT[:9], 3], GREEDY)],
    4: [(PROMPT[:7], dataclasses.replace(TWO, max_tokens=12)), (PROMPT, dataclasses.replace(BEAMS, max_tokens=9))],
}


class Run(NamedTuple):
    """The output of an engine, and the closeness of its choices.

    Attributes:
        tokens: of each output of each request.
        logprobs: of every token of the vocabulary at every choice, in one order.
        margin: the smallest distance between two candidates that would have changed an output if exchanged.
        copies: number of block copies.
    """

    tokens: list[list[list[int]]]
    logprobs: np.ndarray
    margin: float
    copies: int
    scheduler: Scheduler


def generate(model: Llama, implementation: Implementation, workload: dict, blocks: int, host_blocks: int = 0) -> Run:
    interpreting, kernels = implementation
    make_work = kernels.name == "mosaic" and functools.partial(
        mosaic.make_work, num_heads=LLAMA.num_attention_heads, num_kv_heads=LLAMA.num_key_value_heads,
        head_dim=LLAMA.head_dim, pool_dtype="bfloat16", tiles={},
    )  # fmt: skip
    kernels = dataclasses.replace(kernels, head_dim=LLAMA.head_dim, make_work=make_work or None)
    beam_margins: list[float] = []
    with pytest.MonkeyPatch.context() as patch, interpreting():
        patch.setattr(BeamSearch, "advance", _watched(BeamSearch.advance, beam_margins))
        config = EngineConfig(num_gpu_blocks_override=blocks, swap_space=0.1)
        runner = runner_of(model, config, LIMITS, kernels)
        buckets = runner.shapes.buckets
        buckets.decode, buckets.mixed = (Bucket(4, 4, True),), (Bucket(16, 4, False),)  # soon compiled
        host = BlockPool(host_blocks, BLOCK, enable_prefix_caching=False) if host_blocks else None
        scheduler = Scheduler(
            BlockPool(blocks, BLOCK), LIMITS, vocab_size=VOCAB, host_pool=host,
            preemption="swap" if host_blocks else "recompute",
        )  # fmt: skip
        engine, requests, steps, copies = Engine(scheduler, runner), [], 0, 0
        while engine.has_work or steps <= max(workload):
            requests += [engine.add(f"{steps}.{i}", *one) for i, one in enumerate(workload.get(steps, ()))]
            plan = engine.step().plan
            copies += len(plan.block_copies) if plan else 0
            steps += 1
    scheduler.check_invariants()
    outputs = [sequence for request in requests for sequence in request.outputs]
    listed = [_by_token(sample) for sequence in outputs for sample in sequence.samples]
    sampled = [_margin(sequence) for sequence in outputs if not sequence.request.beam]
    tokens = [[sequence.output_token_ids for sequence in request.outputs] for request in requests]
    return Run(tokens, np.concatenate(listed), min(*sampled, *beam_margins), copies, scheduler)


def _watched(advance, margins: list[float]):
    """Return `advance` that also notes the distance between candidates, as far down as one may live on or end."""

    def watched(search, beams, length, end):
        scores = sorted((beam.score + logprob for beam in beams for logprob in beam.logprobs), reverse=True)
        margins.extend(better - worse for better, worse in itertools.pairwise(scores[: search.width + 1]))
        return advance(search, beams, length, end)

    return watched


def _by_token(sample: Sample) -> np.ndarray:
    """Return the listed logprobs in the order of the tokens; those of a beam, which are fewer, as they are."""
    logprobs = np.array(sample.top_logprobs)
    return logprobs[np.argsort(sample.top_tokens)] if len(logprobs) == VOCAB else logprobs


def _margin(sequence) -> float:
    """Return the smallest distance between the token that was drawn and the next best, over all positions."""
    request, margin = sequence.request, math.inf
    for i, sample in enumerate(sequence.samples):
        scores = _by_token(sample)
        if request.params.temperature:
            position, seed = len(request.prompt_token_ids) + i, request.seed + sequence.index
            every = np.arange(VOCAB, dtype=np.int32)[None]
            scores = scores + np.asarray(gumbel(np.uint32([[0, seed]]), np.int32([position]), every))[0]
        assert scores.argmax() == sample.token
        best, second = np.sort(scores)[::-1][:2]
        margin = min(margin, best - second)
    return margin


# The largest difference between logprobs that rounding makes: 2e-7 and 0.008 were seen.
ROUNDING = {"float32": 1e-5, "bfloat16": 0.02}
KERNELS = pytest.mark.parametrize(
    "dtype, implementation",
    [
        pytest.param("float32", TRITON, id="triton"),
        pytest.param("bfloat16", MOSAIC, id="mosaic", marks=pytest.mark.deep),
    ],
)


def check(expected: Run, found: Run, dtype: str) -> None:
    """Asserts equal outputs, logprobs equal to rounding, and that no choice was within reach of that rounding."""
    assert expected.margin > 4 * ROUNDING[dtype], "choose another seed: the outputs would depend on luck"
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=ROUNDING[dtype])


@pytest.fixture(scope="module")
def model_of():
    seeds = {"float32": 4, "bfloat16": 37}  # with which no choice of the short workload is close
    return functools.cache(lambda dtype: dummy_model(LLAMA, dtype, seed=seeds[dtype]))


@pytest.fixture(scope="module")
def expected_of(model_of):
    return functools.cache(lambda dtype: generate(model_of(dtype), REFERENCE, SHORT, blocks=16))


@KERNELS
def test_the_engine_generates_on_kernels_what_it_does_on_the_reference(dtype, implementation, model_of, expected_of):
    found = generate(model_of(dtype), implementation, SHORT, blocks=16)
    check(expected_of(dtype), found, dtype)
    assert found.scheduler.prefix_hits >= BLOCK and found.copies > 0


@pytest.mark.deep
@pytest.mark.parametrize("host_blocks", [0, 16], ids=["recompute", "swap"])
@KERNELS
def test_the_engine_generates_the_same_after_preemptions(dtype, implementation, host_blocks, model_of):
    expected, found = (
        generate(model_of(dtype), each, LONG, blocks=9, host_blocks=host_blocks) for each in (REFERENCE, implementation)
    )
    check(expected, found, dtype)
    assert found.scheduler.num_preemptions > 0 and (found.scheduler.num_swapped_blocks > 0) == (host_blocks > 0)


@pytest.mark.deep
def test_it_finds_a_missing_block_copy(model_of, expected_of):
    interpreting, _ = REFERENCE
    faulty = interpreting, kernels_of(reference, copy_blocks=lambda pool, sources, destinations: pool)
    with pytest.raises(AssertionError):
        check(expected_of("float32"), generate(model_of("float32"), faulty, SHORT, blocks=16), "float32")

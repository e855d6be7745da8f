"""An fp8 KV pool: half the memory of 16 bits, at a stated loss, through preemption, swaps and forks."""

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from tests.support.few_shapes import few_shapes

pytestmark = pytest.mark.slow

PROMPTS = ["Once upon a time", "The little fox", "What is a block table?", "One day, a girl named"]
SHAPES = {"max_num_seqs": 16, "max_num_batched_tokens": 32, "max_model_len": 512}  # of the fixture `demo`
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def fp8():
    """An engine with a pool for three of the requests below."""
    with few_shapes():
        return LLM(progress=False, num_gpu_blocks_override=16, kv_cache_dtype="fp8", preemption_mode="swap", **SHAPES)


def prompt_logprobs(llm, texts):
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    pairs = [zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:], strict=True) for o in outputs]
    return np.concatenate([[found[token].logprob for token, found in each] for each in pairs])


def test_the_pool_holds_bytes_and_logprobs_differ_by_what_is_stated(fp8, demo):
    assert {str(array.dtype) for array in fp8.engine.runner.blocks.pool} == {"float8_e4m3fn"}
    assert 4 * fp8.engine.runner.blocks.cache.block_bytes == demo.engine.runner.blocks.cache.block_bytes
    texts = [o.prompt_token_ids + o.outputs[0].token_ids for o in demo.generate(PROMPTS, GREEDY, use_tqdm=False)]
    difference = np.abs(prompt_logprobs(fp8, texts) - prompt_logprobs(demo, texts))
    assert 0 < difference.mean() < 0.05  # docs/operation.md


def test_preemption_swaps_and_forks_keep_the_numbers(fp8):
    params = [SamplingParams(temperature=0.8, seed=i, n=2, max_tokens=40, ignore_eos=True) for i in range(4)]

    def tokens(outputs):
        return [[choice.token_ids for choice in output.outputs] for output in outputs]

    expected = [tokens(fp8.generate([prompt], one, use_tqdm=False))[0] for prompt, one in zip(PROMPTS, params)]
    assert fp8.engine.scheduler.num_swapped_blocks == 0
    assert tokens(fp8.generate(PROMPTS, params, use_tqdm=False)) == expected
    assert fp8.engine.scheduler.num_swapped_blocks > 0


@pytest.mark.deep
def test_a_pool_of_16_bits_holds_half_the_bytes_of_float32(demo):
    with few_shapes():
        half = LLM(progress=False, num_gpu_blocks_override=64, kv_cache_dtype="float16", **SHAPES)
    assert 2 * half.engine.runner.blocks.cache.block_bytes == demo.engine.runner.blocks.cache.block_bytes
    texts = [o.prompt_token_ids + o.outputs[0].token_ids for o in demo.generate(PROMPTS, GREEDY, use_tqdm=False)]
    difference = np.abs(prompt_logprobs(half, texts) - prompt_logprobs(demo, texts))
    assert 0 < difference.mean() < 1e-4  # docs/operation.md


def test_other_dtypes_are_refused():
    with pytest.raises(
        ValueError, match=r"^kv_cache_dtype: must be one of auto, fp8, fp8_e4m3, float16, bfloat16, not 'int8'$"
    ):
        EngineConfig(kv_cache_dtype="int8")

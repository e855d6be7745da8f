"""Every architecture through the whole engine: requests together and alone, preempted, with a prefix cache, in fp8."""

from pathlib import Path

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.models.registry import read_config
from tests.models.test_architectures import write
from tests.support.architectures import CASES
from tests.support.few_shapes import few_shapes

pytestmark = pytest.mark.slow

ENGINE = dict(
    block_size=4, max_num_seqs=16, max_num_batched_tokens=32, max_model_len=112, skip_tokenizer_init=True,
    progress=False,
)  # fmt: skip
BLOCKS, BLOCKS_WITH_WINDOWS = 36, 144  # of several groups of layers, each of which needs blocks for a sequence


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    write(directory, CASES[request.param])
    return str(directory)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """16 prompts of 3 to 60 tokens, of which half begin alike, with greedy and random samples."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, 90, 30).tolist()
    prompts, params = [], []
    for i in range(16):
        own = rng.integers(0, 90, int(rng.integers(3, 30))).tolist()
        prompts.append(common + own if i % 2 else own)
        params.append(SamplingParams(temperature=0.7 * (i % 3), seed=i, max_tokens=20 + i, ignore_eos=True, logprobs=0))
    return prompts, params


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def logprobs(outputs) -> np.ndarray:
    found = [zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True) for o in outputs]
    return np.concatenate([[at[token].logprob for token, at in each] for each in found])


@pytest.mark.deep
def test_requests_together_equal_requests_alone_through_preemption_and_fp8(checkpoint):
    prompts, params = requests()
    has_windows = any(read_config(Path(checkpoint)).variation.windows)
    options = ENGINE | {"num_gpu_blocks_override": BLOCKS_WITH_WINDOWS if has_windows else BLOCKS}
    with few_shapes():
        recomputing = LLM(checkpoint, preemption_mode="recompute", **options)
        swapping = LLM(checkpoint, preemption_mode="swap", kv_cache_dtype="fp8", **options)
    for llm in (recomputing, swapping):
        together = llm.generate(prompts, params, use_tqdm=False)
        scheduler = llm.engine.scheduler
        if not has_windows:  # sequences in windows free as many blocks as they take
            assert scheduler.num_preemptions > 0 and (scheduler.num_swapped_blocks > 0) == (llm is swapping)
        alone = [llm.generate([prompt], one, use_tqdm=False)[0] for prompt, one in zip(prompts, params)]
        assert any(output.num_cached_tokens for output in alone), "the prefix cache is used"
        assert tokens(together) == tokens(alone)
        np.testing.assert_allclose(logprobs(together), logprobs(alone), atol=1e-3)
    exact, rounded = (np.concatenate(llm.score(prompts, tokens(together))) for llm in (recomputing, swapping))
    assert np.isfinite(rounded).all() and 0 < np.abs(exact - rounded).mean() < 0.2

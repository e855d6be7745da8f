"""The result of a step, from the arrays that the device returns."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.core.plan import Sample, Scheduled, StepPlan
from jpaged.runtime.pending import PendingStep


def bits(*logprobs: float) -> np.ndarray:
    return np.float32(logprobs).view(np.int32)


def packed(count: int, base: int = 0) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Return `chosen` and `listed` of some tokens: token t has rank 1 + t, logprob -t, and lists t + 10, t + 11, ..."""
    tokens = base + np.arange(count, dtype=np.int32)
    ids = tokens[:, None] + np.arange(10, 14, dtype=np.int32)
    chosen = jnp.asarray(np.stack([tokens, 1 + tokens, bits(*-tokens)]))
    return chosen, jnp.asarray(np.stack([ids, bits(*-ids.ravel()).reshape(ids.shape)]))


def sample(token: int, top: int) -> Sample:
    """Return the same token as a sample with a list of `top`; -1 has neither list nor rank."""
    best = tuple(token + 10 + i for i in range(max(top, 0)))
    return Sample(token, -token, 1 + token if top >= 0 else 0, best, tuple(-float(t) for t in best))


def pending(num_top: list[int], **prompt) -> PendingStep:
    defaults = {"prompt": None, "targets": np.full(8, -1, np.int32), "prompt_top": []}
    return PendingStep(StepPlan(**prompt.pop("plan", {})), *packed(8), np.asarray(num_top), **(defaults | prompt))


@pytest.mark.parametrize("num_top", [[], [-1], [-1, -1, -1], [0], [-1, 0, 2], [4, 1, 0, -1], [3]])
def test_samples_have_as_much_as_they_asked_for(num_top):
    result = pending(num_top).result()
    assert result.samples == [sample(token, top) for token, top in enumerate(num_top)]
    assert result.prompt == {}


def test_lists_are_fetched_only_if_a_sample_wants_a_list_or_a_rank():
    assert [len(pending(num_top)._arrays) for num_top in ([], [-1], [-1, 0], [2])] == [1, 1, 2, 2]


def test_what_is_wanted_is_copied_as_soon_as_it_is_there():
    class Array:
        def __init__(self):
            self.copies = 0

        def copy_to_host_async(self):
            self.copies += 1

    chosen, listed, *prompt = arrays = [Array() for _ in range(4)]
    targets = np.full(8, -1)
    PendingStep(StepPlan(), chosen, listed, np.array([-1]), None, targets, [])
    assert [array.copies for array in arrays] == [1, 0, 0, 0]
    PendingStep(StepPlan(), chosen, listed, np.array([0]), tuple(prompt), targets, [])
    assert [array.copies for array in arrays] == [2, 1, 1, 1]


@pytest.mark.parametrize("num_top", [[-1], [2, -1]])
def test_tokens_of_prompts_are_given_by_row_of_the_plan(num_top):
    """Rows of 3, 2, 1 and 2 tokens: only the first and the last have tokens whose logprob is wanted."""
    rows = tuple(Scheduled(5 + i, 0, count, 0) for i, count in enumerate((3, 2, 1, 2)))
    targets = np.int32([7, -1, 0, -1, -1, -1, -1, 9])  # 0 is a token
    found = pending(
        num_top, plan={"rows": rows}, prompt=packed(8, base=20), targets=targets, prompt_top=[1, 4, 4, 0]
    ).result()
    assert found.samples == [sample(token, top) for token, top in enumerate(num_top)]
    assert found.prompt == {0: [sample(20, 1), sample(22, 1)], 3: [sample(27, 0)]}


def test_the_next_step_waits_for_the_late_array_only():
    class Late:
        waited = 0

        def block_until_ready(self):
            self.waited += 1

    late = Late()
    pending([-1]).wait()
    pending([-1], late=late).wait()
    assert late.waited == 1

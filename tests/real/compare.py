"""Comparisons of an engine's answers with those of transformers."""

import math
from typing import Any

from jpaged import LLM, SamplingParams
from tests.real.cases import MAX_TOKENS

NEAR = 1e-3  # nats between two tokens, of which either may be the most likely one


def check_greedy(llm: LLM, greedy: list[dict[str, Any]], near: float = NEAR) -> None:
    """Check that all greedy tokens are transformers', with logprobs that differ by less than `near`.

    Where the two most likely tokens are that near to each other, an output may take the second one. The rest of the
    output then has another beginning and is not compared.
    """
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": each["ids"]} for each in greedy], params, use_tqdm=False)
    compared = 0
    for output, each in zip(outputs, greedy, strict=True):
        (found,) = output.outputs
        assert len(found.token_ids) == MAX_TOKENS
        for at, token in enumerate(found.token_ids):
            if token != each["tokens"][at]:
                second = each["margins"][at] < near and token == each["seconds"][at]
                assert second, f"token {at} is {token}, not {each['tokens'][at]} by {each['margins'][at]} nats: {each}"
                break
            assert abs(found.logprobs[at][token].logprob - each["logprobs"][at]) < near
            compared += 1
    assert compared > 0.9 * MAX_TOKENS * len(greedy), f"{compared} tokens were compared"


def perplexity(llm: LLM, windows: list[list[int]]) -> float:
    """Return the perplexity of the second halves of windows, as `make_fixtures.py` counts it."""
    half = len(windows[0]) // 2 + 1
    scored = llm.score([window[:half] for window in windows], [window[half:] for window in windows])
    return math.exp(-sum(map(sum, scored)) / sum(map(len, scored)))

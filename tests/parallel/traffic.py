"""Requests of every kind on a small pool, and their outputs as JSON values."""

import contextlib
from typing import Any

from jpaged import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine

SETTINGS: dict[str, Any] = dict(
    tensor_parallel_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128, num_gpu_blocks_override=14,
    block_size=8, preemption_mode="swap", swap_space=0.01,
)  # fmt: skip


def config(model: str) -> EngineConfig:
    return EngineConfig(model=model, **SETTINGS)


def requests(engine: Engine) -> list[tuple[list[int], Any, dict]]:
    tokens = lambda text: engine.tokenizer.encode(text).ids
    drawn = dict(temperature=0.9, max_tokens=16, ignore_eos=True)
    phrase = StructuredOutputsParams(regex="(one|two) (cats|dogs)")
    constraint = engine.grammar_compiler().compile(phrase)
    return [
        (tokens("Once upon a time"), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), {}),
        (tokens("The little fox"), SamplingParams(seed=2**63 + 3, top_k=20, top_p=0.9, **drawn), {}),
        (tokens("One day, a girl"), SamplingParams(
            n=3, seed=5, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={70: 2.0},
            **drawn), {}),
        (tokens("A boy named Tim had a red ball"), SamplingParams(
            temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2), {}),
        (tokens("The sun"), BeamSearchParams(beam_width=3, max_tokens=12), {}),
        (tokens("I have"), SamplingParams(seed=6, temperature=1.0, max_tokens=12, structured_outputs=phrase),
         {"constraint": constraint}),
        (tokens("The king said"), SamplingParams(temperature=0, max_tokens=20, bad_words=["ab"], min_tokens=4), {}),
    ]  # fmt: skip


def generate(engine: Engine) -> tuple[list, int]:
    """The outputs of all requests at once, and the number of steps."""
    added = [engine.add(str(i), *each[:2], **each[2]) for i, each in enumerate(requests(engine))]
    steps = 0
    while engine.has_work:
        with contextlib.suppress(PlannedFault):  # the engine recomputes its requests
            steps += engine.step().plan is not None
    engine.scheduler.check_invariants()
    outputs = [
        [
            {"tokens": output.output_token_ids, "text": output.text, "reason": output.finish_reason.value,
             "logprobs": [sample.logprob for sample in output.samples]}
            for output in request.outputs
        ]
        for request in added
    ]  # fmt: skip
    prompts = [[sample.logprob for sample in request.prompt_samples] for request in added]
    return [outputs, prompts], steps


class PlannedFault(Exception):
    """An error of the leader's host in the middle of a step."""


def fail_once(engine: Engine) -> None:
    """Let the next masks fail, once the model's part of their step has been dispatched."""
    write = engine._masks.write

    def fail(rows):
        engine._masks.write = write
        raise PlannedFault

    engine._masks.write = fail

"""Rollouts as arrays, for train steps that are compiled once."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jpaged.core.params import InvalidParameter, SamplingParams
from jpaged.engine.engine import InFlight
from jpaged.llm import LLM, Prompt, prompts_of


class Rollouts(NamedTuple):
    """Completions of prompts: B outputs of W tokens, those of a prompt one after the other.

    Entry i of a row belongs to its token i.

    Attributes:
        tokens: [B, W] int32, the prompt and the completion, then padding.
        lengths: [B] int32, number of tokens of prompt and completion.
        is_output: [B, W] bool, whether a token belongs to the completion.
        logprobs: [B, W] float32, of the completion's tokens as they were drawn; 0 elsewhere.
        versions: [B, W] int32, number of parameter updates before a token was drawn; -1 elsewhere.
        prompts: [B] int32, the index of each output's prompt.
        texts: the completions as texts; empty without a tokenizer.
        finish_reasons: "stop" or "length", or "abort".
    """

    tokens: np.ndarray
    lengths: np.ndarray
    is_output: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    prompts: np.ndarray
    texts: list[str]
    finish_reasons: list[str]


class RolloutWorker:
    """Generation for a training loop, from parameters that the loop brings.

        worker = RolloutWorker(LLM(model))          # the engine reads the model's own arrays
        for step in range(steps):
            rollouts = worker.generate(prompts, SamplingParams(n=8, max_tokens=64, seed=step))
            advantages = group_advantages(np.array([reward(text) for text in rollouts.texts]), 8)
            params, opt = train_step(params, opt, rollouts, advantages)        # may donate them
            worker.update(params)

    Args:
        width: W; None: the engine's `max_model_len`.
        pad_id: the token of the padding.
    """

    def __init__(self, llm: LLM, *, width: int | None = None, pad_id: int = 0):
        self.llm, self._pad_id = llm, pad_id
        self.width = width or llm.engine.limits.max_model_len

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> Rollouts:
        """Return `params.n` outputs of each prompt with their logprobs.

        Args:
            params: for all prompts. With a seed, prompt i has the seed `seed + n i`, so that no two outputs have the
                same random numbers.

        Raises:
            InvalidParameter: the engine can't serve a prompt, or an output may be longer than the width.
        """
        params = params or SamplingParams()
        given = prompts_of(prompts)
        each = [
            dataclasses.replace(params, logprobs=params.logprobs or 0,
                                seed=None if params.seed is None else (params.seed + i * params.n) % 2**63)
            for i in range(len(given))
        ]  # fmt: skip
        found = self.llm.generate(given, each, use_tqdm=False)
        rows = [(index, output.prompt_token_ids, one) for index, output in enumerate(found) for one in output.outputs]
        made = _empty([len(prompt) + len(one.token_ids) for _, prompt, one in rows], self.width, self._pad_id)
        for row, (index, prompt, one) in enumerate(rows):
            start, end = len(prompt), made.lengths[row]
            made.tokens[row, :end] = [*prompt, *one.token_ids]
            made.is_output[row, start:end] = True
            made.logprobs[row, start:end] = [
                of[token].logprob for token, of in zip(one.token_ids, one.logprobs or (), strict=True)
            ]
            made.versions[row, start:end] = one.versions
            made.prompts[row] = index
            made.texts.append(one.text)
            made.finish_reasons.append(str(one.finish_reason))
        return made

    def score(self, rollouts: Rollouts) -> np.ndarray:
        """Return the logprobs of the completions' tokens under the present parameters, [B, W], 0 elsewhere."""
        rows = [
            (row[:length].tolist(), int(length - outputs.sum()))
            for row, length, outputs in zip(rollouts.tokens, rollouts.lengths, rollouts.is_output)
        ]
        scores = self.llm.score([tokens[:start] for tokens, start in rows], [tokens[start:] for tokens, start in rows])
        found = np.zeros(rollouts.tokens.shape, np.float32)
        for row, (tokens, start), values in zip(found, rows, scores):
            row[start : len(tokens)] = values
        return found

    def update(self, params: Any, in_flight: InFlight = "recompute") -> None:
        """Serve other parameters, with the arguments and errors of `LLM.update_params`."""
        self.llm.update_params(params, in_flight)


def group_advantages(rewards: np.ndarray, size: int) -> np.ndarray:
    """Return the rewards [B] less the mean of their group, over its deviation (Shao et al., 2024, arXiv:2402.03300).

    Args:
        size: number of outputs of a prompt, which follow one another.
    """
    groups = np.asarray(rewards, np.float32).reshape(-1, size)
    advantages: np.ndarray = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    return advantages.reshape(-1)


def _empty(lengths: list[int], width: int, pad_id: int) -> Rollouts:
    if lengths and max(lengths) > width:
        raise InvalidParameter("width", f"must be at least {max(lengths)}, the tokens of a rollout, not {width}")
    shape = len(lengths), width
    return Rollouts(
        np.full(shape, pad_id, np.int32), np.array(lengths, np.int32), np.zeros(shape, bool),
        np.zeros(shape, np.float32), np.full(shape, -1, np.int32), np.zeros(len(lengths), np.int32), [], [],
    )  # fmt: skip

"""Rollouts as arrays, for train steps that are compiled once."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jpaged.core.certificate import Certificate
from jpaged.core.commands import InFlight
from jpaged.core.params import InvalidParameter, SamplingParams
from jpaged.core.request import CompletionOutput, Logprob, RequestOutput
from jpaged.llm import LLM, Prompt, prompts_of
from jpaged.replay import Replay
from jpaged.runtime.runner import ModelRunner


class Rollouts(NamedTuple):
    """Completions of prompts: B outputs of W tokens. The outputs of one prompt follow each other.

    Entry i of a row belongs to its token i. A row of several turns has the prompt, then completions with observations
    between them.

    Attributes:
        tokens: [B, W] int32, prompt, completions and observations, then padding.
        lengths: [B] int32, number of tokens before the padding.
        is_output: [B, W] bool, whether a token was generated: the mask of the loss.
        logprobs: [B, W] float32, of the generated tokens as they were drawn; 0 elsewhere.
        versions: [B, W] int32, number of parameter updates before a token was drawn; -1 elsewhere.
        exact_versions: [B, W] int32, the version with whose parameters `causal.token_logprobs` gives the logprob of a
            generated token to the bit: on one CPU, with the engine's `exact`. -1 for all others, among them tokens of
            later turns, and tokens that may depend on KV of several versions (`in_flight="keep"`).
        kept_tokens: [B, W, ceil(V / 8)] uint8, bits of the tokens that each token was drawn from, as in
            `CompletionOutput`; all 1 for other tokens. [B, W, 0] for parameters without `kept_tokens=True`.
        prompts: [B] int32, the index of each output's prompt.
        texts: the completions of the last turn as texts; empty without a tokenizer.
        finish_reasons: "stop" or "length", or "abort", of the last turn.
        certificates: those of the last turn, for parameters with `certificate=True`; else None.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    is_output: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    exact_versions: np.ndarray
    kept_tokens: np.ndarray
    prompts: np.ndarray
    texts: list[str]
    finish_reasons: list[str]
    certificates: list[Certificate | None]


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
        adapter: name of the adapter that computes all rollouts; None: the model alone. Several workers may share an
            engine, each with an adapter of its own.
        scale: factor of the adapter's products, such as alpha / r.
    """

    def __init__(
        self, llm: LLM, *, width: int | None = None, pad_id: int = 0, adapter: str | None = None, scale: float = 1.0
    ):
        self.llm, self._pad_id, self._adapter, self._scale = llm, pad_id, adapter, scale
        self.width = width or llm.engine.limits.max_model_len

    @property
    def version(self) -> int:
        """Number of parameter updates so far: the version of tokens that are drawn now."""
        return cast(ModelRunner, self.llm.engine.runner).params_version

    @property
    def numerics(self) -> Mapping[str, str | int]:
        """Settings of the engine that bits depend on, for `token_logprobs`."""
        return cast(ModelRunner, self.llm.engine.runner).numerics

    @property
    def _is_exact(self) -> bool:
        """Whether a trainer's forward pass can have the bits of the engine."""
        placement = cast(ModelRunner, self.llm.engine.runner).placement
        is_raw = self.numerics["logprobs_mode"] == "raw_logprobs"
        return self.llm.engine.limits.exact and placement.platform == "cpu" and placement.size == 1 and is_raw

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> Rollouts:
        """Return `params.n` outputs of each prompt with their logprobs.

        Args:
            params: for all prompts. With a seed, prompt i has the seed `seed + n i`, so that no two outputs have the
                same random numbers.

        Raises:
            InvalidParameter: the engine can't serve a prompt, or an output may be longer than the width; raised before
                anything is generated.
        """
        params = params or SamplingParams()
        requests = {index: self._read(prompt) for index, prompt in enumerate(prompts_of(prompts))}
        outputs = self._complete(requests, params, self.width)
        rows = [(index, output, one) for index, output in enumerate(outputs) for one in output.outputs]
        batch, shape = len(rows), (len(rows), self.width)
        made = Rollouts(
            np.full(shape, self._pad_id, np.int32), np.zeros(batch, np.int32), np.zeros(shape, bool),
            np.zeros(shape, np.float32), np.full(shape, -1, np.int32), np.full(shape, -1, np.int32),
            self._all_kept(shape, params), np.zeros(batch, np.int32), [""] * batch, [""] * batch, [None] * batch,
        )  # fmt: skip
        for row, (index, output, one) in enumerate(rows):
            made.prompts[row] = index
            _write(made, row, output.prompt_token_ids, one)
            if self._is_exact:
                start, versions = len(output.prompt_token_ids), one.versions[: one.mixed_from]
                made.exact_versions[row, start : start + len(versions)] = versions
        return made

    def extend(
        self, rollouts: Rollouts, observations: Sequence[Prompt | None], params: SamplingParams | None = None
    ) -> Rollouts:
        """Return the rollouts with a further turn: an observation after each output, and one more output.

        The tokens before the observation are taken as they are, not encoded again, so that the engine finds their KV in
        its prefix cache, and logprobs belong to the tokens that were drawn.

        Args:
            rollouts: are not changed.
            observations: of each row, a text, which is encoded without special tokens, or token ids; None leaves the
                row as it is, as after its last turn.
            params: for all rows, with `n=1`. With a seed, row i has the seed `seed + i`.

        Raises:
            InvalidParameter: the numbers of rollouts and observations differ, a parameter does not fit, the engine
                can't serve a sequence, or it may be longer than the width; raised before anything is generated.
        """
        params = params or SamplingParams()
        if len(observations) != len(rollouts.tokens):
            raise InvalidParameter(
                "observations", f"must be as many as rollouts ({len(rollouts.tokens)}), not {len(observations)}"
            )
        for name, value in (("n", 1), ("truncate_prompt_tokens", None)):
            if getattr(params, name) != value:
                raise InvalidParameter(name, f"must be {value} in a further turn, not {getattr(params, name)}")
        requests = {
            row: self._read(observation, rollouts.tokens[row, : rollouts.lengths[row]].tolist())
            for row, observation in enumerate(observations)
            if observation is not None
        }
        outputs = self._complete(requests, params, rollouts.tokens.shape[1])
        made = copy.deepcopy(rollouts)
        if params.kept_tokens and not made.kept_tokens.size:
            made = made._replace(kept_tokens=self._all_kept(made.tokens.shape, params))
        for row, output in zip(requests, outputs):
            _write(made, row, output.prompt_token_ids, output.outputs[0])
        return made

    def _all_kept(self, shape: tuple[int, ...], params: SamplingParams) -> np.ndarray:
        size = -(-self.llm.engine.scheduler.vocab_size // 8) if params.kept_tokens else 0
        return np.full((*shape, size), 255, np.uint8)

    def _read(self, prompt: Prompt, before: Sequence[int] = ()) -> dict[str, Any]:
        """Return a prompt as token ids, after the token ids that it continues."""
        tokens, _, salt = self.llm.read_prompt(prompt, continues=bool(before))
        return {"prompt_token_ids": [*before, *tokens], "cache_salt": salt}

    def _complete(self, requests: dict[int, dict[str, Any]], params: SamplingParams, width: int) -> list[RequestOutput]:
        """Return the outputs of prompts by number; seeds and errors count by these numbers."""
        limit = self.llm.engine.limits.max_model_len
        most = limit if params.max_tokens is None else params.max_tokens
        for index, prompt in requests.items():
            length = len(params.truncated(prompt["prompt_token_ids"], limit))
            if (longest := min(length + most, limit)) > width:
                needed = f"for the {length} tokens of prompt {index} and max_tokens ({params.max_tokens})"
                raise InvalidParameter("width", f"must be at least {longest}, {needed}, not {width}")
        params = dataclasses.replace(params, logprobs=params.logprobs or 0)
        seeds = [None if params.seed is None else (params.seed + index * params.n) % 2**63 for index in requests]
        params_of_each = [dataclasses.replace(params, seed=seed) for seed in seeds]
        return self.llm.generate(list(requests.values()), params_of_each, lora_request=self._adapter, use_tqdm=False)

    def score(self, rollouts: Rollouts) -> np.ndarray:
        """Return the logprobs of the generated tokens under the present parameters, [B, W], 0 elsewhere."""
        rows = [
            (row[:length].tolist(), int(outputs.argmax()) if outputs.any() else int(length))
            for row, length, outputs in zip(rollouts.tokens, rollouts.lengths, rollouts.is_output)
        ]
        parts = [tokens[:start] for tokens, start in rows], [tokens[start:] for tokens, start in rows]
        scores = self.llm.score(*parts, lora_request=self._adapter)
        logprobs = np.zeros(rollouts.tokens.shape, np.float32)
        for row, (tokens, start), values in zip(logprobs, rows, scores):
            row[start : len(tokens)] = values
        return np.where(rollouts.is_output, logprobs, 0)

    def replay(self, rollouts: Rollouts) -> list[Replay]:
        """Compute the certified outputs of the last turn again; return the result of each row, as `LLM.replay` does.

        The tokens and the logprobs of the arrays are compared. `Replay.request_id` is the row.
        """
        requests = [_certified(rollouts, row) for row in range(len(rollouts.tokens))]
        return self.llm.replay(requests, use_tqdm=False)

    def update(self, params: Any, in_flight: InFlight = "recompute") -> None:
        """Serve other parameters, with the arguments and errors of `LLM.update_params`.

        Those of an adapter are what `LLM.load_adapter` takes; its requests in flight end with the earlier ones.
        """
        if self._adapter is None:
            self.llm.update_params(params, in_flight)
        else:
            self.llm.load_adapter(self._adapter, params, scale=self._scale)


def group_advantages(rewards: np.ndarray, size: int) -> np.ndarray:
    """Return the rewards [B] less the mean of their group, over its deviation (Shao et al., 2024, arXiv:2402.03300).

    Args:
        size: number of outputs of a prompt, which follow one another.

    Raises:
        InvalidParameter: the rewards are no whole number of groups.
    """
    rewards = np.asarray(rewards, np.float32)
    if rewards.ndim != 1 or size < 1 or len(rewards) % size:
        raise InvalidParameter(
            "rewards", f"must have the shape [B], B a multiple of size ({size}), not {list(rewards.shape)}"
        )
    groups = rewards.reshape(-1, size)
    advantages: np.ndarray = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    return advantages.reshape(-1)


def staleness(rollouts: Rollouts, version: int) -> np.ndarray:
    """Return the updates from each row's oldest generated token to a `RolloutWorker.version`, [B]; 0 without tokens."""
    updates: np.ndarray = version - np.where(rollouts.is_output, rollouts.versions, version).min(axis=1)
    return updates


def mask_stale(rollouts: Rollouts, version: int, *, max_staleness: int) -> Rollouts:
    """Return the rollouts without the outputs of stale rows, in the same shape: their `is_output` is False.

    Args:
        max_staleness: the largest `staleness` of a row that is kept; 0: on-policy rows only.
    """
    kept = staleness(rollouts, version) <= max_staleness
    return rollouts._replace(is_output=rollouts.is_output & kept[:, None])


def _write(made: Rollouts, row: int, prompt: Sequence[int], one: CompletionOutput) -> None:
    """Write the prompt of a turn, which repeats the row's earlier tokens, and its output."""
    start, end = len(prompt), len(prompt) + len(one.token_ids)
    made.lengths[row], made.tokens[row, :end] = end, [*prompt, *one.token_ids]
    made.is_output[row, start:end], made.versions[row, start:end] = True, one.versions
    made.logprobs[row, start:end] = [
        of[token].logprob for token, of in zip(one.token_ids, one.logprobs or (), strict=True)
    ]
    if one.kept_tokens:
        made.kept_tokens[row, start:end] = [np.frombuffer(bits, np.uint8) for bits in one.kept_tokens]
    made.texts[row], made.finish_reasons[row] = one.text, str(one.finish_reason)
    made.certificates[row] = one.certificate


def _certified(rollouts: Rollouts, row: int) -> RequestOutput:
    """Return the last turn of a row as a request and its output."""
    certificate, end = rollouts.certificates[row], int(rollouts.lengths[row])
    start = end - (certificate.num_tokens if certificate else 0)
    tokens, output = rollouts.tokens[row].tolist(), slice(start, end)
    one = CompletionOutput(
        0, rollouts.texts[row], tokens[output], 0.0,
        [{token: Logprob(float(logprob))} for token, logprob in zip(tokens[output], rollouts.logprobs[row, output])],
        rollouts.finish_reasons[row], None, rollouts.versions[row, output].tolist(), certificate,
    )  # fmt: skip
    return RequestOutput(str(row), None, tokens[:start], [one])

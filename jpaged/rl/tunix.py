"""Rollout engine for Tunix (the extra `tunix`; written for google-tunix 0.1.7).

    from jpaged.rl.tunix import CausalModel, rollout

    cluster = RLCluster(actor=CausalModel(llama), ..., cluster_config=ClusterConfig(rollout_engine=rollout(), ...))

Tunix calls `generate` with the actor's present parameters. On one mesh these are the actor's arrays, and nothing is
copied.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from tunix.rl import common
from tunix.rl.rollout import base_rollout

from jpaged.core.params import InvalidParameter, SamplingParams
from jpaged.llm import LLM
from jpaged.models.base import Model
from jpaged.rl.causal import logits
from jpaged.rl.rollout import RolloutWorker
from jpaged.tokenizer import encode_all


class CausalModel(nnx.Module):
    """Model with the call that Tunix's trainer makes, around the same parameters."""

    def __init__(self, inner: Model):
        self.inner = inner

    def __call__(
        self, input_tokens: jax.Array, positions: jax.Array, cache: Any = None, attention_mask: Any = None, **_: Any
    ) -> tuple[jax.Array, Any]:
        """Return the logits [B, W, V] of whole sequences, and the cache, which is not used."""
        return logits(self.inner, input_tokens, positions, attention_mask), cache


class JpagedRollout(base_rollout.BaseRollout):
    """Rollouts of a `CausalModel` by an engine that reads its arrays.

    Args:
        tokenizer: Tunix's adapter, for the ids of padding and of the end.
        settings: fields of `EngineConfig`.
        engine_tokenizer: tokenizer of the engine, a Hugging Face one or the name of one.
    """

    def __init__(
        self, rollout_actor: CausalModel, tokenizer: Any, mesh: Any, rollout_config: Any, *,
        engine_tokenizer: Any, settings: dict[str, Any], **_: Any,
    ):  # fmt: skip
        self._model, self._tokenizer = rollout_actor, tokenizer
        length = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        llm = LLM(
            rollout_actor.inner, tokenizer=engine_tokenizer, progress=False, **{"max_model_len": length} | settings
        )
        self.worker = RolloutWorker(llm, width=length)
        self._num_calls = 0

    def generate(self, prompts: Any, rollout_config: Any, **_: Any) -> Any:
        """Return one completion of each prompt, in Tunix's form.

        Raises:
            InvalidParameter: a prompt is longer than `max_prompt_length`.
        """
        self._num_calls += 1
        texts = [str(prompt) for prompt in np.asarray(prompts).reshape(-1)]
        config, width = rollout_config, rollout_config.max_prompt_length
        params = SamplingParams(
            max_tokens=config.max_tokens_to_generate, temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p, top_k=config.top_k or 0,
            seed=self._num_calls * 2**32,
        )  # fmt: skip
        prompt_ids = encode_all(self.worker.llm.tokenizer, texts)
        if (longest := max(map(len, prompt_ids))) > width:
            raise InvalidParameter("max_prompt_length", f"must be at least {longest}, not {width}")
        rollouts = self.worker.generate(prompt_ids, params)
        left = np.full((len(texts), width), self.pad_id(), np.int32)
        for row, tokens in zip(left, prompt_ids):
            row[width - len(tokens) :] = tokens
        generated = lambda values: [row[outputs] for row, outputs in zip(values, rollouts.is_output)]
        return base_rollout.RolloutOutput(
            text=rollouts.texts,
            logits=None,
            tokens=generated(rollouts.tokens),
            left_padded_prompt_tokens=left,
            logprobs=generated(rollouts.logprobs),
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array, **_: Any) -> jax.Array:
        """Return the logprobs of completions, by the trainer's forward pass."""
        ids = {"pad_id": self.pad_id(), "eos_id": self.eos_id()}
        logprobs: jax.Array = common.compute_per_token_logps(
            *nnx.split(self._model), prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, **ids
        )
        return logprobs

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Write some parameters into the model; `generate` takes its new arrays."""
        flat = dict(nnx.to_flat_state(nnx.state(self._model))) | dict(nnx.to_flat_state(params))
        nnx.update(self._model, nnx.from_flat_state(flat))

    def pad_id(self) -> int:
        """Return the id of the padding."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """Return the id that ends a completion."""
        return int(self._tokenizer.eos_id())

    def model(self) -> nnx.Module:
        """Return the model."""
        return self._model


def rollout(engine_tokenizer: Any, **settings: Any) -> Callable[..., JpagedRollout]:
    """Return a rollout engine for `ClusterConfig`, with some fields of `EngineConfig`."""
    return partial(JpagedRollout, engine_tokenizer=engine_tokenizer, settings=settings)

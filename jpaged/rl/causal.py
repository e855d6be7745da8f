"""A trainer's forward pass of a served module: whole sequences at once, without a cache, differentiable.

On a CPU its values are those of the engine, to the bit (docs/exactness.md).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import pallas_kernels
from jpaged.config import BLOCK_SIZE
from jpaged.core.params import InvalidParameter
from jpaged.models.adapter_state import adapter_of
from jpaged.models.adapters import Adapter, Multiply, attach_one
from jpaged.models.base import Attend, AttentionSpec, Model
from jpaged.models.layers import set_ops
from jpaged.models.outputs import outputs_of
from jpaged.rl.reduced import by_xla
from jpaged.rl.sequences import causal_attention, dense_attention, paged_attention
from jpaged.runtime.kv_cache import KVCache
from pallas_kernels import select_for

USED = (
    "kernels",
    "block_size",
    "kv_cache_dtype",
    "activation_dtype",
    "lora_dtype",
)  # settings that change the bits on one machine
LOGSUMEXP = partial(jax.nn.logsumexp, axis=-1)


class Truncation(NamedTuple):
    """Distribution that tokens are drawn from, with the fields of `token_logprobs`."""

    temperature: jax.typing.ArrayLike | None
    kept_tokens: jax.Array | None

    def applied(self, logits_tv: jax.Array, batch: int) -> jax.Array:
        """Return the logits of this distribution for those of the model, [B W, V]."""
        if self.temperature is None and self.kept_tokens is None:
            return logits_tv
        if self.temperature is not None:
            temperature_b = jnp.broadcast_to(jnp.asarray(self.temperature, jnp.float32), batch)
            logits_tv = logits_tv / jnp.repeat(temperature_b, len(logits_tv) // batch)[:, None]
        if self.kept_tokens is not None:
            bits_tn = jnp.roll(self.kept_tokens, -1, axis=1).reshape(len(logits_tv), -1)
            kept_tv = jnp.unpackbits(bits_tn, axis=1, count=logits_tv.shape[1], bitorder="little")
            logits_tv = jnp.where(kept_tv == 1, logits_tv, -jnp.inf)
        rounded_tv: jax.Array = lax.optimization_barrier(logits_tv)  # as in the engine
        return rounded_tv


def token_logprobs(
    model: Model, tokens_bw: jax.Array, is_output_bw: jax.Array | None = None,
    numerics: Mapping[str, str | int] | None = None, *, temperature: jax.typing.ArrayLike | None = None,
    kept_tokens: jax.Array | None = None, adapter: Any = None, scale: float = 1.0,
) -> jax.Array:  # fmt: skip
    """Return the logprob of each token after those before it, [B, W] float32; 0 for the first ones.

    On a CPU the values have the bits of an engine on one device with these parameters and numerics, in any program.
    Parameters that are divided among several devices are gathered on each. On other devices, attention is dense, and
    `is_output_bw` and `numerics` have no effect.

    Args:
        tokens_bw: [B, W] int32, each row from its beginning. Tokens after the end of a sequence change none before.
        is_output_bw: [B, W] bool, the tokens that the engine has generated in one turn; None: none. The engine attends
            them in another order than tokens of prompts.
        numerics: those of the engine (`RolloutWorker.numerics`); None: those of the default settings.
        temperature: divides the logits, one number above 0 or [B]. None: the logprobs are those of the model.
        kept_tokens: [B, W, ceil(V / 8)] uint8, the tokens that a token could be (`Rollouts.kept_tokens`): the others
            have probability 0. None: it could be any.
        adapter, scale: an adapter of all rows, as `jpaged.models.adapter_state.adapter_of` takes it; derivatives by its
            matrices follow. None: the model alone.

    Raises:
        ValueError: the adapter has no matrices.
        InvalidParameter: shapes do not fit together.
        NotImplementedError: the device does not have the kernels of these numerics.
    """
    if is_output_bw is None:
        is_output_bw = jnp.zeros(tokens_bw.shape, bool)
    _check_shape("is_output_bw", is_output_bw, tokens_bw.shape)
    if kept_tokens is not None:
        _check_shape("kept_tokens", kept_tokens, (*tokens_bw.shape, -(-model.config.vocab_size // 8)))
    truncation = Truncation(temperature, kept_tokens)
    made = Adapter({}, {}) if adapter is None else adapter_of(adapter, scale)
    if jax.default_backend() != "cpu":
        model = cast(Model, nnx.merge(*nnx.split(cast(nnx.Module, model))))  # the caller's has no adapter
        _adapt(model, made, tokens_bw.size, numerics or {}, pallas_kernels.low_rank)
        return _logprobs(model, tokens_bw, causal_attention(model, *tokens_bw.shape), truncation)
    scales = tuple(sorted(made.scales.items()))
    graphdef, state = nnx.split(cast(nnx.Module, model))
    used = tuple((name, value) for name, value in (numerics or {}).items() if name in USED)
    arrays = (state, dict(made.pairs)), tokens_bw, is_output_bw, truncation
    return cast(jax.Array, _engines_logprobs(graphdef, used, scales, *arrays))


def _check_shape(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise InvalidParameter(name, f"must have the shape {list(shape)}, not {list(array.shape)}")


def _adapt(model: Model, adapter: Adapter, num_rows: int, numerics: Mapping[str, Any], low_rank: Multiply) -> None:
    """Attach an adapter, if it changes a layer, to a model."""
    if adapter.pairs:
        dtype = numerics.get("lora_dtype") or outputs_of(lambda _: model, None, model.config).attention_dtype
        attach_one(model, adapter, num_rows, dtype, low_rank)


@partial(jax.jit, static_argnums=(0, 1, 2))  # operations one by one would round otherwise
def _engines_logprobs(
    graphdef: Any, numerics: tuple[tuple[str, Any], ...], scales: tuple[tuple[str, float], ...], arrays: Any,
    tokens_bw: jax.Array, is_output_bw: jax.Array, truncation: Truncation,
) -> jax.Array:  # fmt: skip
    """Return the engine's logprobs, whose derivatives are those of dense attention and of XLA's products.

    `arrays` are the state of the model and the matrices of an adapter.
    """
    size = tokens_bw.size

    def define(arrays: Any, tokens_bw: jax.Array, _: Any, truncation: Truncation) -> jax.Array:
        state, pairs = arrays
        model = nnx.merge(graphdef, state)
        adapter = Adapter(pairs, dict(scales))
        _adapt(model, adapter, size, dict(numerics), pallas_kernels.low_rank)
        return _logprobs(model, tokens_bw, causal_attention(model, *tokens_bw.shape), truncation)

    def value(*args: Any) -> jax.Array:
        # XLA fuses nothing with other operations, and knows no values.
        (state, pairs), tokens_bw, is_output_bw, truncation = lax.optimization_barrier(args)
        model = nnx.merge(graphdef, state)
        cache = _layout(lambda state: nnx.merge(graphdef, state), state, dict(numerics))
        kernels = cache.kernels
        set_ops(model, product=kernels.product, products=kernels.products, rms_norm=kernels.rms_norm)
        _adapt(model, Adapter(pairs, dict(scales)), size, dict(numerics), kernels.low_rank)
        attend = paged_attention(model, cache, is_output_bw)
        lse = lambda logits_sv: cache.kernels.argmax_and_lse(logits_sv)[1]
        return cast(jax.Array, by_xla(lambda: _logprobs(model, tokens_bw, attend, truncation, lse)))

    engines = jax.custom_jvp(value)
    engines.defjvp(lambda primals, tangents: (engines(*primals), jax.jvp(define, primals, tangents)[1]))
    return engines(arrays, tokens_bw, is_output_bw, truncation)


def _layout(make: Callable[[Any], Any], state: Any, numerics: dict[str, Any]) -> KVCache:
    """Return the layout of the pool of an engine with some numerics, with its kernels."""
    model = make(state)
    dtype = outputs_of(make, state, model.config).attention_dtype
    block_size, pool_dtype = numerics.get("block_size", BLOCK_SIZE), numerics.get("kv_cache_dtype", dtype)
    kernels = select_for(
        jax.devices()[0], model.config, name=numerics.get("kernels", "auto"), dtype=dtype, block_size=block_size,
        pool_dtype=pool_dtype, int8_rows=numerics.get("activation_dtype") == "int8",
    )  # fmt: skip
    return KVCache.of(model.config, block_size, pool_dtype, kernels, attention_dtype=dtype)


def _logprobs(
    model: Model, tokens_bw: jax.Array, attend: Attend, truncation: Truncation,
    logsumexp: Callable[[jax.Array], jax.Array] = LOGSUMEXP,
) -> jax.Array:  # fmt: skip
    batch, width = tokens_bw.shape
    positions_t = jnp.tile(jnp.arange(width, dtype=jnp.int32), batch)
    logits_tv = truncation.applied(model.logits(model(tokens_bw.reshape(-1), positions_t, attend)), batch)
    following_t = jnp.roll(tokens_bw, -1, axis=1).reshape(-1)
    chosen_t = jnp.take_along_axis(logits_tv, following_t[:, None], axis=1)[:, 0]
    logprobs_bw = (chosen_t - logsumexp(logits_tv)).reshape(batch, width)
    return jnp.pad(logprobs_bw[:, :-1], ((0, 0), (1, 0)))


def logits(model: Model, tokens_bw: jax.Array, positions_bw: jax.Array, mask_bww: jax.Array) -> jax.Array:
    """Return the logits [B, W, V] float32 of sequences.

    Args:
        tokens_bw, positions_bw: [B, W] int32.
        mask_bww: [B, W, W] bool, whether a query (the second axis) sees a key (the third).

    Raises:
        NotImplementedError: the model has recurrent layers.
    """
    if not all(isinstance(spec, AttentionSpec) for spec in model.attention_specs):
        raise NotImplementedError(
            "mask_bww: recurrent layers take whole sequences from their beginning, without a mask"
        )
    x_td = model(tokens_bw.reshape(-1), positions_bw.reshape(-1), dense_attention(model, positions_bw, mask_bww))
    return model.logits(x_td).reshape(*tokens_bw.shape, -1)

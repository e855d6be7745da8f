"""Shapes and dtypes that a module computes, found by tracing it before anything is compiled."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpaged.config import DTYPES
from jpaged.models.base import LayerOps, Model
from jpaged.models.config import ModelConfig

TOKENS = 4  # T of the traced call


class Outputs(NamedTuple):
    """Outputs of a module.

    Attributes:
        attention_dtype: dtype that all queries, keys and values are promoted to, and the KV pool has.
        hidden_size, hidden_dtype: D and dtype of the hidden states [T, D].
    """

    attention_dtype: str
    hidden_size: int
    hidden_dtype: str


def outputs_of(make: Callable[[Any], Model], leaves: Any, config: ModelConfig) -> Outputs:
    """Trace the call and the logits of make(leaves), whose leaves are arrays, or shapes and dtypes.

    Raises:
        ValueError: the module does not compute what `Model` says; the message has the shapes and dtypes.
    """
    dtypes: dict[int, Any] = {}
    called: set[int] = set()

    def count(layer: int) -> None:
        if layer in called or not 0 <= layer < config.num_hidden_layers:
            raise ValueError(
                f"model: must call attend once for each of its layers (0 to {config.num_hidden_layers - 1}), not "
                f"{'twice ' * (layer in called)}for layer {layer}"
            )
        called.add(layer)

    def recur(layer: int, q_tkd: jax.Array, k_tkd: jax.Array, v_thv: jax.Array, *_: jax.Array) -> jax.Array:
        count(layer)
        return v_thv

    def attend(layer: int, *arguments: Any, sinks_n: jax.Array | None = None) -> jax.Array:
        count(layer)
        heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        for name, number, array in zip("qkv", heads, arguments[:3]):
            _check(name, array, (TOKENS, number, config.head_dim), DTYPES)
        for name, angle in zip(("cos", "sin"), arguments[3:]):
            if angle is not None:
                _check(name, angle, (TOKENS, config.head_dim // 2), ("float32",))
        if sinks_n is not None:
            _check("sinks_n", sinks_n, (config.num_attention_heads,), ("float32",))
        dtypes[layer] = jnp.result_type(*arguments[:3])
        return jnp.zeros(arguments[0].shape, dtypes[layer])

    def run(leaves: Any, tokens_t: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = make(leaves)
        x_td = model(tokens_t, tokens_t, LayerOps(attend, lambda layer, x_tc, *_: x_tc, recur))
        return x_td, model.logits(x_td)

    x_td, logits_tv = jax.eval_shape(run, leaves, jax.ShapeDtypeStruct((TOKENS,), jnp.int32))
    if missing := [layer for layer in range(config.num_hidden_layers) if layer not in called]:
        raise ValueError(f"model: must call attend for each of its layers, but layer {missing[0]} does not")
    if x_td.ndim != 2 or len(x_td) != TOKENS:
        raise ValueError(f"model: its hidden states must be [T, D] ([{TOKENS}, D]), not {list(x_td.shape)}")
    _check("logits", logits_tv, (TOKENS, config.vocab_size), ("float32",))
    return Outputs(str(jnp.result_type(*dtypes.values())), x_td.shape[1], str(x_td.dtype))


def _check(name: str, array: jax.Array, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if array.shape != shape or str(array.dtype) not in dtypes:
        raise ValueError(
            f"model: {name} of {TOKENS} tokens must be {' or '.join(dtypes)} of the shape {list(shape)}, as its config "
            f"says, not {array.dtype} of {list(array.shape)}"
        )

"""Adapters from a trainer's arrays: an NNX module or state with `nnx.LoRA` layers, or nested dicts of arrays."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jpaged.models.adapters import Adapter, Pair

INNER = ("lora", "lora_params")  # names of an `nnx.LoRA` below the layer that it changes


def adapter_of(source: Any, scale: float = 1.0) -> Adapter:
    """Return the adapter that a trainer holds. Nothing is copied but the transpose of a matrix of each layer.

    Args:
        source: an `Adapter`; an `nnx.Module` or `nnx.State`; or nested dicts. A layer's matrices are `lora_a` [I, r]
            and `lora_b` [r, O], below the layer's name in the module; leaves of other names are no adapter's.
        scale: factor of all layers' products, such as alpha / r.

    Raises:
        ValueError: there are no matrices, or a layer has only one of them.
    """
    if isinstance(source, Adapter):
        return source
    state = nnx.state(source) if isinstance(source, nnx.Module) else source
    leaves = nnx.to_pure_dict(state) if isinstance(state, nnx.State) else state
    if not isinstance(leaves, Mapping):
        raise ValueError(
            f"adapter: must be a directory, a module, a state or nested dicts, not {type(source).__name__}"
        )
    found: dict[str, dict[str, jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(leaves):
        *parents, name = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        if name in ("lora_a", "lora_b"):
            while parents and parents[-1] in INNER:
                parents.pop()
            found.setdefault(".".join(parents), {})[name] = leaf
    if not found:
        raise ValueError("adapter: there are no arrays named lora_a and lora_b")
    for layer, pair in found.items():
        if len(pair) < 2:
            raise ValueError(f"adapter: {layer} lacks {'lora_b' if 'lora_a' in pair else 'lora_a'}")
    pairs = {layer: Pair(pair["lora_a"].T, pair["lora_b"]) for layer, pair in found.items()}
    return Adapter(pairs, dict.fromkeys(pairs, float(scale)))

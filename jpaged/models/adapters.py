"""Low-rank adapters (LoRA, arXiv 2106.09685): their values, their slots on the device, and their part of a step.

A layer with an adapter computes W x + B^T (s A) x, with the op `low_rank` for all rows of a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jpaged.models.base import Model
from jpaged.models.layers import Linear, Names, weight_of
from pallas_kernels import LowRank

ALIGNMENT = 16  # ranks of a slot: a slot begins where a vector does, so that its place changes no sum


class Pair(NamedTuple):
    """Matrices of an adapter for one layer, A [r, I] and B [r, O]."""

    a: Any
    b: Any


@dataclass(frozen=True, eq=False)
class Adapter:
    """Adapter of a model.

    Attributes:
        pairs: the matrices of each adapted layer, by its name in the module, such as "layers.0.self_attn.q_proj".
        scales: the factor of each layer's product; layers without one have 1.
    """

    pairs: Mapping[str, Pair]
    scales: Mapping[str, float]


# Adapters on the device, for each layer in the order of `SlotsForm.layers`. A is multiplied by the layer's factor.
type Slots = tuple[LowRank, ...]
type Multiply = Callable[[jax.Array, Sequence[LowRank], jax.Array], tuple[jax.Array, ...]]  # as `Ops.low_rank`


@dataclass(frozen=True)
class SlotsForm:
    """Form of the slots of a model.

    Attributes:
        layers: outputs and inputs of each layer that an adapter may change.
        axes: the names of these axes of its weight.
        size: N, the number of slots.
        max_rank: the largest rank of an adapter.
    """

    layers: Mapping[str, tuple[int, int]]
    axes: Mapping[str, Names]
    size: int
    max_rank: int
    dtype: str

    @property
    def rank(self) -> int:
        """R, the columns of a slot."""
        return -(-self.max_rank // ALIGNMENT) * ALIGNMENT

    def empty(self) -> Slots:
        """Return slots without adapters."""
        shape = self.size, self.rank
        return tuple(
            LowRank(jnp.zeros((*shape, inputs), self.dtype), jnp.zeros((*shape, outputs), self.dtype))
            for outputs, inputs in self.layers.values()
        )

    def check(self, adapter: Adapter) -> None:
        """Raise ValueError if an adapter does not fit; the message names the layer and the limit."""
        if not adapter.pairs:
            raise ValueError("adapter: it changes no layer")
        for name, (a, b) in adapter.pairs.items():
            if name not in self.layers:
                raise ValueError(f"adapter: {name} is no linear layer of the model that an adapter may change")
            outputs, inputs = self.layers[name]
            if a.ndim != 2 or b.ndim != 2 or (a.shape[1], b.shape[1]) != (inputs, outputs) or len(a) != len(b):
                shapes = f"A {[*a.shape]} and B {[*b.T.shape]}"
                raise ValueError(f"adapter: {name} has {shapes}, expected [r, {inputs}] and [{outputs}, r]")
            if len(a) > self.max_rank:
                raise ValueError(f"adapter: {name} has rank {len(a)}, more than max_lora_rank ({self.max_rank})")
        if unknown := adapter.scales.keys() - adapter.pairs.keys():
            raise ValueError(f"adapter: {min(unknown)} has a scale and no matrices")
        finite = jax.tree.map(lambda array: jnp.isfinite(array).all(), [[*pair] for pair in adapter.pairs.values()])
        if not all(map(bool, jax.tree.leaves(finite))):
            raise ValueError("adapter: some of its numbers are not finite")

    def padded(self, adapter: Adapter) -> Slots:
        """Return an adapter as a single slot: all layers, zeros where it changes nothing."""
        module: Any = jnp if any(isinstance(a, jax.Array) for a, _ in adapter.pairs.values()) else np
        slots = []
        for name, (outputs, inputs) in self.layers.items():
            nothing = Pair(*(np.zeros((0, width), np.float32) for width in (inputs, outputs)))
            a, b = cast(tuple[Any, Any], adapter.pairs.get(name, nothing))
            if (scale := adapter.scales.get(name, 1.0)) != 1:
                a = a.astype(np.float32) * np.float32(scale)
            if rest := self.rank - len(a):
                a, b = (module.pad(x, ((0, rest), (0, 0))) for x in (a, b))
            slots.append(LowRank(*(x[None].astype(self.dtype, copy=False) for x in (a, b))))
        return tuple(slots)


def slots_form(model: Model, size: int, max_rank: int, dtype: DTypeLike) -> SlotsForm:
    """Return the form of `size` slots for a model. All linear layers but the head may be changed."""
    layers, axes = dict[str, tuple[int, int]](), dict[str, Names]()
    for path, module in nnx.iter_modules(cast(nnx.Module, model)):
        name = ".".join(map(str, path))
        if isinstance(module, Linear) and name != "lm_head":
            outputs, inputs = jax.eval_shape(lambda module=module: weight_of(module).dense()).shape
            layers[name] = outputs, inputs
            axes[name] = module.weight.get_metadata().get("out_sharding") or (None, None)
    return SlotsForm(layers, axes, size, max_rank, str(jnp.dtype(dtype)))


def write_slot(slots: Slots, adapter: Slots, slot: jax.Array) -> Slots:
    """Return slots with one of them, an int32 scalar, replaced by an adapter, which has one slot."""
    replace = lambda all_slots, one: jax.lax.dynamic_update_slice_in_dim(all_slots, one, slot, axis=0)
    written: Slots = jax.tree.map(replace, slots, adapter)
    return written


def attach_one(model: Model, adapter: Adapter, num_rows: int, dtype: str, low_rank: Multiply) -> None:
    """Let the layers of a model add the results of one adapter to all rows.

    Args:
        dtype: that of the matrices in the products.
    """
    form = slots_form(model, 1, max(pair.a.shape[0] for pair in adapter.pairs.values()), dtype)
    slots = jax.tree.map(jnp.asarray, form.padded(adapter))
    attach(model, form, slots, jnp.zeros(num_rows, jnp.int32), low_rank)


def attach(model: Model, form: SlotsForm, slots: Slots, slots_t: jax.Array, low_rank: Multiply) -> None:
    """Let the layers of a model add their adapters' results to their sums.

    Args:
        slots_t: [T] int32, the slot of each row; -1: it has no adapter.
    """

    def adapt(x_ti: jax.Array, names: Sequence[str]) -> tuple[jax.Array, ...]:
        """Return the results [T, O] float32 of some layers' adapters for rows of the same input."""
        return low_rank(x_ti, [by_name[name] for name in names], slots_t)

    by_name = dict(zip(form.layers, slots, strict=True))
    for path, module in nnx.iter_modules(cast(nnx.Module, model)):
        if (name := ".".join(map(str, path))) in by_name:
            module.adapter = (adapt, name)  # type: ignore[attr-defined]

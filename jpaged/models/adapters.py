"""Low-rank adapters (LoRA, arXiv 2106.09685): their values, their slots on the device, and their part of a step.

A layer with an adapter computes W x + B (s A) x, in two further products for all rows of a step. Where products of
groups of rows cost no more than the rows (`SlotsForm.grouped`), the rows of a slot are a group, and only slots in use
are read. Elsewhere adapters of all slots lie side by side in one A and one B, and each row keeps the columns of its own
slot. To a row without an adapter -0 is added, which leaves the bits of its sums as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jpaged.models.base import Model
from jpaged.models.layers import Linear, Product, Products, weight_of
from pallas_kernels import Weight

ALIGNMENT = 16  # ranks of a slot: a slot begins where a vector does, so that its place changes no sum


class Pair(NamedTuple):
    """Matrices of an adapter for one layer, A [r, I] and B [O, r], or of all slots."""

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


# Adapters on the device, for each layer in the order of `SlotsForm.layers`: A [N R, I] and B [O, N R]; of groups
# A [N, R, I] and B [N, O, R]. A has been multiplied by the layer's factor.
type Slots = tuple[Pair, ...]


@dataclass(frozen=True)
class SlotsForm:
    """Form of the slots of a model.

    Attributes:
        layers: outputs and inputs of each layer that an adapter may change.
        size: N, the number of slots.
        max_rank: the largest rank of an adapter.
        grouped: whether slots are groups of rows.
    """

    layers: Mapping[str, tuple[int, int]]
    size: int
    max_rank: int
    dtype: str
    grouped: bool = False

    @property
    def rank(self) -> int:
        """R, the columns of a slot."""
        return -(-self.max_rank // ALIGNMENT) * ALIGNMENT

    def empty(self) -> Slots:
        """Return slots without adapters."""
        groups, columns = ((self.size,), self.rank) if self.grouped else ((), self.size * self.rank)
        shapes = [Pair((*groups, columns, i), (*groups, o, columns)) for o, i in self.layers.values()]
        return tuple(Pair(*(jnp.zeros(shape, self.dtype) for shape in pair)) for pair in shapes)

    def check(self, adapter: Adapter) -> None:
        """Raise ValueError if an adapter does not fit; the message names the layer and the limit."""
        if not adapter.pairs:
            raise ValueError("adapter: it changes no layer")
        for name, (a, b) in adapter.pairs.items():
            if name not in self.layers:
                raise ValueError(f"adapter: {name} is no linear layer of the model that an adapter may change")
            outputs, inputs = self.layers[name]
            if a.ndim != 2 or b.ndim != 2 or (a.shape[1], b.shape[0]) != (inputs, outputs) or len(a) != b.shape[1]:
                shapes = f"A {[*a.shape]} and B {[*b.shape]}"
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
        pairs, numpy = [], not any(isinstance(a, jax.Array) for a, _ in adapter.pairs.values())
        module: Any = np if numpy else jnp
        for name, (outputs, inputs) in self.layers.items():
            nothing = Pair(np.zeros((0, inputs), np.float32), np.zeros((outputs, 0), np.float32))
            pair = adapter.pairs.get(name, nothing)
            if (scale := adapter.scales.get(name, 1.0)) != 1:
                pair = pair._replace(a=pair.a.astype(np.float32) * np.float32(scale))
            rest = self.rank - len(pair.a)
            if rest:
                pair = Pair(module.pad(pair.a, ((0, rest), (0, 0))), module.pad(pair.b, ((0, 0), (0, rest))))
            pairs.append(pair)
        as_served = lambda array: (array[None] if self.grouped else array).astype(self.dtype, copy=False)
        served: Slots = jax.tree.map(as_served, tuple(pairs))
        return served


def slots_form(model: Model, size: int, max_rank: int, dtype: DTypeLike, *, grouped: bool = False) -> SlotsForm:
    """Return the form of `size` slots for a model. All linear layers but the head may be changed."""
    layers = {}
    for path, module in nnx.iter_modules(cast(nnx.Module, model)):
        name = ".".join(map(str, path))
        if isinstance(module, Linear) and name != "lm_head":
            outputs, inputs = jax.eval_shape(lambda module=module: weight_of(module).dense()).shape
            layers[name] = outputs, inputs
    return SlotsForm(layers, size, max_rank, str(jnp.dtype(dtype)), grouped)


def write_slot(slots: Slots, adapter: Slots, slot: jax.Array) -> Slots:
    """Return slots with one of them, an int32 scalar, replaced by an adapter, which has one slot."""
    place, pairs = jax.lax.dynamic_update_slice_in_dim, []
    for (all_a, all_b), (a, b) in zip(slots, adapter):
        columns = 0 if b.ndim == 3 else 1  # the axis of the slots in B
        first_a, first_b = slot * a.shape[0], slot * b.shape[columns]
        pairs.append(Pair(place(all_a, a, first_a, axis=0), place(all_b, b, first_b, axis=columns)))
    return tuple(pairs)


def attach_one(model: Model, adapter: Adapter, num_rows: int, dtype: str, *products: Any) -> None:
    """Let the layers of a model add the results of one adapter to all rows.

    Args:
        dtype: that of the matrices in the products.
        products: the functions of products, as `Adapting` takes them.
    """
    form = slots_form(model, 1, max(pair.a.shape[0] for pair in adapter.pairs.values()), dtype)
    slots = jax.tree.map(jnp.asarray, form.padded(adapter))
    Adapting(slots, form, jnp.zeros(num_rows, jnp.int32), *products).attach(model)


class Adapting:
    """Adapters of the rows of a step, as a model's layers call them.

    Args:
        slots_t: [T] int32, the slot of each row; -1: it has no adapter.
        product, products: the products of a step, as in `Linear`.
    """

    def __init__(self, slots: Slots, form: SlotsForm, slots_t: jax.Array, product: Product, products: Products):
        self._slots, self._numbers = slots, {name: i for i, name in enumerate(form.layers)}
        self._slots_t, self._product, self._products = slots_t, product, products
        self._grouped = form.grouped
        is_own_tn = slots_t[:, None] == jnp.arange(form.size)
        if form.grouped:
            self._order_t = jnp.argsort(jnp.where(slots_t < 0, form.size, slots_t))
            self._places_t = jnp.argsort(self._order_t)
            self._sizes_n = is_own_tn.sum(0, dtype=jnp.int32)
        else:
            self._is_own_tc = jnp.repeat(is_own_tn, form.rank, axis=1)

    def attach(self, model: Model) -> None:
        """Let the layers of a model add their adapters' results to their sums."""
        for path, module in nnx.iter_modules(cast(nnx.Module, model)):
            if (number := self._numbers.get(".".join(map(str, path)))) is not None:
                module.adapter = (self, number)  # type: ignore[attr-defined]

    def __call__(self, x_ti: jax.Array, numbers: Sequence[int]) -> tuple[jax.Array, ...]:
        """Return the results [T, O] float32 of some layers' adapters for rows of the same input."""
        options = {}
        if self._grouped:
            x_ti = x_ti[self._order_t]
            options = {"sizes_e": self._sizes_n, "tokens_m": self._order_t}
        pairs = [self._slots[number] for number in numbers]
        reduced = self._products(x_ti, *(Weight(pair.a) for pair in pairs), dtype=jnp.float32, **options)
        results = []
        for pair, z_tc in zip(pairs, reduced, strict=True):
            own_tc = z_tc if self._grouped else jnp.where(self._is_own_tc, z_tc, 0)
            y_to = self._product(own_tc, Weight(pair.b), dtype=jnp.float32, **options)
            y_to = y_to[self._places_t] if self._grouped else y_to
            results.append(jnp.where(self._slots_t[:, None] < 0, -0.0, y_to))
        return tuple(results)

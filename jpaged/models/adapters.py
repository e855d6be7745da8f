"""Low-rank adapters (LoRA, arXiv 2106.09685): their values, their slots on the device, and their part of a step.

A layer with an adapter computes W x + s B A x. Adapters of all slots lie side by side in one A [N R, I] and one B
[O, N R] for each layer: two products serve the rows of a step, and each row keeps the columns of its own slot. To a row
without an adapter -0 is added, which leaves the bits of its sums as they are.
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
    """Matrices of an adapter for one layer, or of all slots side by side."""

    a: Any  # [R, I]
    b: Any  # [O, R]


@dataclass(frozen=True, eq=False)
class Adapter:
    """Adapter of a model.

    Attributes:
        pairs: the matrices of each adapted layer, by its name in the module, such as "layers.0.self_attn.q_proj".
        scales: the factor of each layer's product; layers without one have 1.
    """

    pairs: Mapping[str, Pair]
    scales: Mapping[str, float]


class Slots(NamedTuple):
    """Adapters on the device.

    Attributes:
        pairs: for each layer in the order of `Form.layers`: A [N R, I] and B [O, N R].
        scales: [layers, N] float32.
    """

    pairs: tuple[Pair, ...]
    scales: Any


@dataclass(frozen=True)
class SlotsForm:
    """Form of the slots of a model.

    Attributes:
        layers: outputs and inputs of each layer that an adapter may change.
        size: N, the number of slots.
        max_rank: the largest rank of an adapter.
    """

    layers: Mapping[str, tuple[int, int]]
    size: int
    max_rank: int
    dtype: str

    @property
    def rank(self) -> int:
        """R, the columns of a slot."""
        return -(-self.max_rank // ALIGNMENT) * ALIGNMENT

    def empty(self) -> Slots:
        """Return slots without adapters."""
        columns = self.size * self.rank
        pairs = [Pair(np.zeros((columns, i)), np.zeros((o, columns))) for o, i in self.layers.values()]
        pairs = jax.tree.map(lambda array: jnp.zeros(array.shape, self.dtype), pairs)
        return Slots(tuple(pairs), jnp.ones((len(self.layers), self.size), jnp.float32))

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
            rest = self.rank - len(pair.a)
            pairs.append(Pair(module.pad(pair.a, ((0, rest), (0, 0))), module.pad(pair.b, ((0, 0), (0, rest)))))
        as_served = lambda array: array.astype(self.dtype)
        scales = np.array([[adapter.scales.get(name, 1.0)] for name in self.layers], np.float32)
        return Slots(jax.tree.map(as_served, tuple(pairs)), scales)


def slots_form(model: Model, size: int, max_rank: int, dtype: DTypeLike) -> SlotsForm:
    """Return the form of `size` slots for a model. All linear layers but the head may be changed."""
    layers = {}
    for path, module in nnx.iter_modules(cast(nnx.Module, model)):
        name = ".".join(map(str, path))
        if isinstance(module, Linear) and name != "lm_head":
            outputs, inputs = jax.eval_shape(lambda module=module: weight_of(module).dense()).shape
            layers[name] = outputs, inputs
    return SlotsForm(layers, size, max_rank, str(jnp.dtype(dtype)))


def write_slot(slots: Slots, adapter: Slots, slot: jax.Array) -> Slots:
    """Return slots with one of them, an int32 scalar, replaced by an adapter, which has one slot."""
    place, pairs = jax.lax.dynamic_update_slice_in_dim, []
    for (all_a, all_b), (a, b) in zip(slots.pairs, adapter.pairs):
        first = slot * a.shape[0]
        pairs.append(Pair(place(all_a, a, first, axis=0), place(all_b, b, first, axis=1)))
    return Slots(tuple(pairs), place(slots.scales, adapter.scales, slot, axis=1))


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
        self._is_own_tc = jnp.repeat(slots_t[:, None] == jnp.arange(form.size), form.rank, axis=1)

    def attach(self, model: Model) -> None:
        """Let the layers of a model add their adapters' results to their sums."""
        for path, module in nnx.iter_modules(cast(nnx.Module, model)):
            if (number := self._numbers.get(".".join(map(str, path)))) is not None:
                module.adapter = (self, number)  # type: ignore[attr-defined]

    def __call__(self, x_ti: jax.Array, numbers: Sequence[int]) -> tuple[jax.Array, ...]:
        """Return the results [T, O] float32 of some layers' adapters for rows of the same input."""
        pairs = [self._slots.pairs[number] for number in numbers]
        reduced = self._products(x_ti, *(Weight(pair.a) for pair in pairs), dtype=jnp.float32)
        results = []
        for number, pair, z_tc in zip(numbers, pairs, reduced, strict=True):
            scale_t = self._slots.scales[number][jnp.maximum(self._slots_t, 0)]
            own_tc = jnp.where(self._is_own_tc, z_tc * scale_t[:, None], 0)
            y_to = self._product(own_tc, Weight(pair.b), dtype=jnp.float32)
            results.append(jnp.where(self._slots_t[:, None] < 0, -0.0, y_to))
        return tuple(results)

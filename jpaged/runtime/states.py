"""States of recurrent layers on the device: the layout of their pages, and the ops on them."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jpaged.models.base import RecurrentSpec
from jpaged.runtime.batch import Batch
from pallas_kernels import Chains, Kernels

States = list[jax.Array]  # [inputs of layer 0, matrices of layer 0, ...]: each [P, W - 1, C] and [P, H, D, V] float32


@dataclass(frozen=True)
class StateLayout:
    """Layout of pages. A page holds the state of each recurrent layer after some token.

    Inputs of a convolution are stored in float32, which holds each dtype of activations.

    Attributes:
        layers: numbers of the recurrent layers, each with its state.
    """

    layers: tuple[tuple[int, RecurrentSpec], ...]
    kernels: Kernels | None = None

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of a page in each array."""
        each = [((s.taps - 1, s.channels), (s.num_heads, s.key_dim, s.value_dim)) for _, s in self.layers]
        return [shape for both in each for shape in both]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return 4 * sum(map(math.prod, self.shapes))

    def convolve(
        self, states: States, layer: int, batch: Batch, x_tc: jax.Array, weight_cw: jax.Array, activation: str
    ) -> jax.Array:
        """Return the causal convolution [T, C] of a layer's channels, whose states are replaced."""
        assert self.kernels is not None, "there are recurrent layers"
        at = 2 * self._place(layer)
        y_tc, states[at] = self.kernels.causal_conv(x_tc, weight_cw, None, states[at], chains_of(batch), activation)
        return y_tc

    def recur(
        self, states: States, layer: int, batch: Batch, q_tkd: jax.Array, k_tkd: jax.Array, v_thv: jax.Array,
        log_decay_th: jax.Array, beta_th: jax.Array,
    ) -> jax.Array:  # fmt: skip
        """Return the outputs [T, H, V] of a layer's gated delta rule, whose states are replaced."""
        assert self.kernels is not None, "there are recurrent layers"
        at = 2 * self._place(layer) + 1
        arrays = q_tkd, k_tkd, v_thv, log_decay_th, beta_th, states[at]
        o_thv, states[at] = self.kernels.delta_rule(*arrays, chains_of(batch))
        return o_thv

    def _place(self, layer: int) -> int:
        return [number for number, _ in self.layers].index(layer)


def chains_of(batch: Batch) -> Chains:
    """Return the tokens and the pages of a batch's sequences."""
    assert batch.reads is not None and batch.writes is not None, "the layout has states"
    return Chains(batch.cu_q_lens, batch.reads, batch.writes)


def gather_pages(states: States, sources_c: jax.Array) -> list[jax.Array]:
    """Return C pages of all arrays, each [1, F]."""
    return list(jnp.concatenate([array[sources_c].reshape(len(sources_c), -1) for array in states], axis=1)[:, None])


def scatter_pages(states: States, pages: list[jax.Array], destinations_c: jax.Array) -> States:
    """Return states with C pages, each [1, F], at the destinations; destination -1 writes nothing."""
    ends = [math.prod(array.shape[1:]) for array in states]
    parts = jnp.split(jnp.concatenate(pages), [sum(ends[: i + 1]) for i in range(len(ends) - 1)], axis=1)
    at_c = jnp.where(destinations_c < 0, len(states[0]), destinations_c)
    return [array.at[at_c].set(part.reshape(-1, *array.shape[1:]), mode="drop") for array, part in zip(states, parts)]

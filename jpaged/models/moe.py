"""Mixture of experts: every token is computed by its most probable experts, and none is dropped."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

import pallas_kernels
from jpaged.models.base import Place
from jpaged.models.config import ModelConfig
from jpaged.models.fused import Join, Joint, join_variables
from jpaged.models.layers import SCALE, Linear, Product, axes, weight_of
from jpaged.models.mlp import Mlp
from jpaged.models.variation import Experts
from pallas_kernels.reference import gated

LEAST_SCORES = 16  # of a token in the softmax or sigmoid of a router
SMALL = 1e-20  # added to sums that weights are divided by
BIAS = "_bias"  # end of the names of the experts' biases
EXPERT_WEIGHTS = ("gate_proj", "up_proj", "down_proj")


def cost_of(config: ModelConfig, num_tokens: int) -> str | None:
    """Return the cost of a mixture of experts, with at most `num_tokens` in a step, in words; None without experts.

    It is that of XLA's products, which are not grouped on CPUs and NVIDIA GPUs: every row, one for each token and each
    of the token's experts, is multiplied by every expert. The kernels for CPUs and Hopper compute grouped products.
    """
    experts = config.variation.experts
    if experts is None:
        return None
    count, used = experts.num_experts, experts.num_experts_per_tok
    expanded = count * num_tokens * used * config.hidden_size * 2  # bytes in 16 bits, of the inputs of all experts
    return (
        f"XLA multiplies each token {used} times by all {count} experts, {count} times the operations of a grouped "
        f"product, and needs about {expanded / 2**30:.2g} GiB of temporary memory for a step of {num_tokens} tokens"
    )


class ExpertMlps(nnx.Module):
    """Gated MLPs of E experts, with weights [E, out, in], which may be quantized like those of `Linear`.

    A weight `w` may have a bias `w_bias` [E, out].
    """

    gate_proj_bias: Any
    up_proj_bias: Any
    down_proj_bias: Any
    product: Product = staticmethod(pallas_kernels.product)

    def __init__(
        self, d: int, f: int, num_experts: int, activation: str, dtype: DTypeLike, rngs: nnx.Rngs, *,
        biases: bool = False,
    ):  # fmt: skip
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)

        def weight(fan_in: int, fan_out: int, *names: str | None) -> Any:
            return nnx.Param(init(rngs.params(), (num_experts, fan_out, fan_in), dtype), **axes(None, *names))

        self.activation = activation
        self.gate_proj = weight(d, f, "mlp", None)
        self.up_proj = weight(d, f, "mlp", None)
        self.down_proj = weight(f, d, None, "mlp")
        if biases:
            for name, size, axis in (("gate_proj", f, "mlp"), ("up_proj", f, "mlp"), ("down_proj", d, None)):
                setattr(self, name + BIAS, nnx.Param(jnp.zeros((num_experts, size), dtype), **axes(None, axis)))

    def __call__(self, x_md: jax.Array, sizes_e: jax.Array, tokens_m: jax.Array) -> jax.Array:
        """Return the outputs [M, D] of rows [M, D], sorted by expert.

        Args:
            sizes_e: [E] int32, number of rows of each expert.
            tokens_m: [M] int32, the token of each row.
        """
        gate, up, down = (weight_of(self, name, bias=name + BIAS) for name in EXPERT_WEIGHTS)
        multiply = partial(self.product, sizes_e=sizes_e, tokens_m=tokens_m)
        return multiply(multiply(x_md, gate, up=up, activation=self.activation), down)


class FusedExperts(nnx.Module):
    """Gated MLPs of E experts, with weights [E, in, out], gate and up in one.

    XLA's grouped product on a GPU would transpose weights [E, out, in] in every step.
    """

    def __init__(self, experts: ExpertMlps, place: Place, join: Join):
        self.activation = experts.activation
        gate, down = experts.gate_proj, experts.down_proj
        _, self.size, _ = gate.shape
        parts = self.size // place(gate).shard_shape(gate.shape)[1]
        up = Joint(("experts.gate_proj", "experts.up_proj"), (gate.shape,) * 2, parts, axis=2, swaps=True)
        out = Joint(("experts.down_proj",), (down.shape,), parts, axis=1, swaps=True)
        self.joints = {"gate_up": up, "down": out}
        self.gate_up = join_variables([gate, experts.up_proj], up, (None, None, "mlp"), place, join)
        self.down = join_variables([down], out, (None, "mlp", None), place, join)
        if hasattr(experts, "gate_proj" + BIAS):
            self.down_proj_bias = experts.down_proj_bias
            biases = [experts.gate_proj_bias, experts.up_proj_bias]
            names = tuple(f"{name}{BIAS}" for name in up.names)
            bias = self.joints["gate_up" + BIAS] = Joint(names, (biases[0].shape,) * 2, parts, axis=1)
            self.gate_up_bias = join_variables(biases, bias, (None, "mlp"), place, join)

    def __call__(self, x_md: jax.Array, sizes_e: jax.Array, tokens_m: jax.Array) -> jax.Array:
        """Return the outputs [M, D] as `ExpertMlps` does."""
        parts = self.joints["gate_up"].parts
        biased = hasattr(self, "gate_up_bias")
        expert_m = jnp.repeat(jnp.arange(len(sizes_e)), sizes_e, total_repeat_length=len(x_md)) if biased else None
        both_mf = lax.ragged_dot(x_md, self.gate_up[...], sizes_e)
        if biased:
            both_mf = both_mf + self.gate_up_bias[...][expert_m]
        both_mpf = both_mf.reshape(len(x_md), parts, 2, -1)
        hidden_mpf = gated(self.activation, both_mpf[:, :, 0], both_mpf[:, :, 1])
        y_md = lax.ragged_dot(hidden_mpf.reshape(len(x_md), -1), self.down[...], sizes_e)
        return y_md + self.down_proj_bias[...][expert_m] if biased else y_md


class MixtureOfExperts(nnx.Module):
    """Experts with a linear router, in some models with a further expert that all tokens share."""

    is_gated = True  # see `fuse`

    def __init__(self, config: ModelConfig, experts: Experts, dtype: DTypeLike, rngs: nnx.Rngs):
        d, f, e = config.hidden_size, experts.intermediate_size, experts.num_experts
        self.num_experts, self.top_k, self.normalizes = e, experts.num_experts_per_tok, experts.norm_topk_prob
        self.router, self.scale = experts.router, experts.scale
        self.groups, self.groups_per_token = experts.groups, experts.groups_per_tok
        self.gate = Linear(d, e, (None, None), bias=experts.biases, dtype=dtype, rngs=rngs)
        if self.router == "sigmoid":  # in float32, because the choice depends on small differences
            self.gate_bias = nnx.Param(jnp.zeros(e, jnp.float32), **axes(None))
        activation = experts.activation or config.hidden_act
        self.experts: Any = ExpertMlps(d, f, e, activation, dtype, rngs, biases=experts.biases)
        if experts.shared_size:
            self.shared_expert = Mlp(config, experts.shared_size, dtype, rngs)
        if experts.shared_gate:
            self.shared_expert_gate = Linear(d, 1, (None, None), bias=False, dtype=dtype, rngs=rngs)

    def fuse(self, place: Place, join: Join) -> None:
        """Fuse the weights of the experts, unless they are quantized: packed numbers can't be transposed."""
        if isinstance(self.experts, ExpertMlps) and not hasattr(self.experts, "gate_proj" + SCALE):
            self.experts = FusedExperts(self.experts, place, join)

    def __call__(self, x_td: jax.Array, residual_td: jax.Array | None = None) -> jax.Array:
        """Return the output [T, D] of hidden states [T, D], added to a residual if there is one.

        It is the sum over each token's experts, by their weight.
        """
        weights_tk, chosen_tk = self._routed(x_td)
        expert_m = chosen_tk.reshape(-1)
        order_m = jnp.argsort(expert_m, stable=True)
        sizes_e = jnp.bincount(expert_m, length=self.num_experts).astype(jnp.int32)
        tokens_m = (order_m // self.top_k).astype(jnp.int32)
        y_md = self.experts(x_td[tokens_m], sizes_e, tokens_m)
        # The rows are put back in order and added up in a fixed order: a scatter would add in any order on a GPU.
        y_tkd = y_md[jnp.argsort(order_m)].reshape(*chosen_tk.shape, -1)
        weighted_td: jax.Array = (y_tkd.astype(jnp.float32) * weights_tk[:, :, None]).sum(axis=1)
        if hasattr(self, "shared_expert"):
            weighted_td += self._shared(x_td)
        y_td = weighted_td.astype(x_td.dtype)
        return y_td if residual_td is None else residual_td + y_td

    def _routed(self, x_td: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the weights [T, K] float32 of each token's experts, and the experts [T, K]."""
        scores_te = _padded(self.gate(x_td, dtype=jnp.float32))
        if self.router == "sigmoid":
            probabilities_te = jax.nn.sigmoid(scores_te)
            ranks_te = probabilities_te[:, : self.num_experts] + self.gate_bias[...]
        else:
            probabilities_te = ranks_te = jax.nn.softmax(scores_te, axis=-1)
        if self.groups > 1:
            ranks_te = self._within_groups(ranks_te[:, : self.num_experts])
        weights_tk, chosen_tk = lax.top_k(ranks_te, self.top_k)
        if ranks_te is not probabilities_te:
            weights_tk = jnp.take_along_axis(probabilities_te, chosen_tk, axis=1)
        if self.normalizes:  # all sigmoids may be 0
            weights_tk = weights_tk / (weights_tk.sum(axis=-1, keepdims=True) + SMALL)
        return weights_tk * self.scale, chosen_tk

    def _within_groups(self, ranks_te: jax.Array) -> jax.Array:
        """Return ranks [T, E] that are -inf outside the groups with the largest sums of their best two ranks."""
        ranks_tge = ranks_te.reshape(len(ranks_te), self.groups, -1)
        best_tg2, _ = lax.top_k(ranks_tge, 2)
        _, groups_tk = lax.top_k(best_tg2.sum(axis=-1), self.groups_per_token)
        is_chosen_tg = jax.nn.one_hot(groups_tk, self.groups, dtype=bool).any(axis=1)
        return jnp.where(is_chosen_tg[:, :, None], ranks_tge, -jnp.inf).reshape(ranks_te.shape)

    def _shared(self, x_td: jax.Array) -> jax.Array:
        """Return the output [T, D] float32 of the expert that all tokens share."""
        y_td = self.shared_expert(x_td).astype(jnp.float32)
        if not hasattr(self, "shared_expert_gate"):
            return y_td
        return y_td * jax.nn.sigmoid(_padded(self.shared_expert_gate(x_td, dtype=jnp.float32)))[:, :1]


def _padded(scores_te: jax.Array) -> jax.Array:
    """Return scores with at least `LEAST_SCORES` in a row, the others -inf.

    XLA computes the exponentials of fewer numbers in a row one by one on a CPU, where they round otherwise.
    """
    padding = max(0, LEAST_SCORES - scores_te.shape[1])
    return jnp.pad(scores_te, ((0, 0), (0, padding)), constant_values=-jnp.inf)

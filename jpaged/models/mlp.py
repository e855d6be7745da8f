"""Gated MLP of a layer, or of an expert that all tokens share."""

from functools import partial

import jax
from flax import nnx
from jax.typing import DTypeLike

from jpaged.models.base import Place
from jpaged.models.config import ModelConfig
from jpaged.models.fused import Join, fuse_linears
from jpaged.models.layers import Linear
from pallas_kernels.reference import gated


class Mlp(nnx.Module):
    """Gated MLP with `size` hidden dims."""

    is_gated = True  # see `fuse`

    def __init__(self, config: ModelConfig, size: int, dtype: DTypeLike, rngs: nnx.Rngs):
        d = config.hidden_size
        linear = partial(Linear, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.activation, self.size = config.hidden_act, size
        self.gate_proj = linear(d, size, ("mlp", None))
        self.up_proj = linear(d, size, ("mlp", None))
        self.down_proj = linear(size, d, (None, "mlp"))

    def __call__(self, x_td: jax.Array, residual_td: jax.Array | None = None) -> jax.Array:
        """Return the output [T, D] of hidden states [T, D], added to a residual if there is one."""
        if not hasattr(self, "gate_up_proj"):
            hidden_tf = self.gate_proj(x_td, self.activation, up=self.up_proj)
        else:
            gate, up = self.gate_up_proj(x_td, self.size // self.gate_up_proj.joints["weight"].parts)
            hidden_tf = gated(self.activation, gate, up).reshape(len(x_td), -1)
        return self.down_proj(hidden_tf, residual_to=residual_td)

    def fuse(self, place: Place, join: Join) -> None:
        """Fuse gate and up."""
        fuse_linears(self, "gate_up_proj", ("gate_proj", "up_proj"), place, join)

"""One step of the engine as one function of arrays: embed, attend over the pool, sample."""

import jax
from flax import nnx

from jpaged.core.params import MAX_LOGPROBS, MAX_TOP
from jpaged.model.llama import Llama
from jpaged.runtime.batch import Batch
from jpaged.runtime.sampler import Sampled, Sampling, sample, token_logprobs
from jpaged.runtime.sampling_state import SamplingState
from pallas_kernels import Kernels


def forward(
    model: Llama, pool: list[jax.Array], batch: Batch, kernels: Kernels, *, decode: bool
) -> tuple[jax.Array, list[jax.Array]]:
    """Hidden states [T, D] of a batch, and the pool with its keys and values written.

    Args:
        pool: [k of layer 0, v of layer 0, ...], each [P, K, B, H].
        decode: every sequence has one row, a decode row, and row s is sequence s.
    """
    pool = list(pool)
    scale = model.config.head_dim**-0.5

    def attend(layer: int, q_tnh, k_tkh, v_tkh, cos, sin) -> jax.Array:
        k, v = pool[2 * layer : 2 * layer + 2]
        k, v = kernels.write_kv(k, v, k_tkh, v_tkh, batch.slot_mapping, cos_t=cos, sin_t=sin)
        pool[2 * layer : 2 * layer + 2] = k, v
        tables, lens = batch.block_tables, batch.context_lens
        if decode:
            return kernels.paged_decode_attention(q_tnh, k, v, tables, lens, scale=scale)
        return kernels.ragged_paged_attention(
            q_tnh, k, v, tables, lens, batch.cu_q_lens, scale=scale, decode_s=batch.decodes
        )

    return model(batch.tokens, batch.positions, attend), pool


class Step:
    """The jitted functions of a step, dispatched one after the other: each is compiled for the shapes that it depends
    on, and only for them.

    `params` is the flat list of the model's leaves: dispatching a model or a state costs many times more on the host.
    The pool comes back in the order it went in, which is what lets XLA alias every buffer of it.

    Attributes:
        forward: (params, pool, batch, decode) -> (x_sd, x_td, pool), the pool donated, decode static: the hidden states
            that samples are drawn from, and all of them; the latter None in a decode step.
        choose: (params, state, x_sd, sampling) -> (Sampled, state), the state donated.
        score: (params, x_td, targets_t) -> Sampled: how likely the tokens of a prompt were.
    """

    def __init__(self, graphdef: nnx.GraphDef, treedef: jax.tree_util.PyTreeDef, kernels: Kernels):
        def merged(params: list[jax.Array]) -> Llama:
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, params))

        def run(params: list[jax.Array], pool: list[jax.Array], batch: Batch, decode: bool):
            x_td, pool = forward(merged(params), pool, batch, kernels, decode=decode)
            return x_td[batch.sampled_from], None if decode else x_td, pool

        def choose(params: list[jax.Array], state: SamplingState, x_sd: jax.Array, sampling: Sampling):
            return sample(merged(params).logits(x_sd), state, sampling, MAX_TOP)

        def score(params: list[jax.Array], x_td: jax.Array, targets_t: jax.Array) -> Sampled:
            return token_logprobs(merged(params).logits, x_td, targets_t, MAX_LOGPROBS)

        self.forward = jax.jit(run, static_argnums=3, donate_argnums=1)
        self.choose = jax.jit(choose, donate_argnums=1)
        self.score = jax.jit(score)


def make_copy_blocks(kernels: Kernels) -> jax.stages.Wrapped:
    """copy(pool, sources [C], destinations [C]) -> pool, jitted, the pool donated: block copies of all layers."""

    def copy(pool: list[jax.Array], sources: jax.Array, destinations: jax.Array) -> list[jax.Array]:
        return [kernels.copy_blocks(array, sources, destinations) for array in pool]

    return jax.jit(copy, donate_argnums=0)

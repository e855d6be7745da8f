"""One step of the engine as one function of arrays: embed, attend over the pool, sample."""

import jax
from flax import nnx

from jpaged.model.llama import Llama
from jpaged.runtime.batch import Batch
from jpaged.runtime.sampler import sample
from pallas_kernels import Kernels


def forward(
    model: Llama, pool: list[jax.Array], batch: Batch, kernels: Kernels, *, decode: bool
) -> tuple[jax.Array, list[jax.Array]]:
    """Hidden states [T, D] of a batch, and the pool with its keys and values written.

    Args:
        pool: [k of layer 0, v of layer 0, ...], each [P, K, B, H].
        decode: every sequence has one token, and row s is sequence s.
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
        return kernels.ragged_paged_attention(q_tnh, k, v, tables, lens, batch.cu_q_lens, scale=scale)

    return model(batch.tokens, batch.positions, attend), pool


def make_step(graphdef: nnx.GraphDef, treedef: jax.tree_util.PyTreeDef, kernels: Kernels) -> jax.stages.Wrapped:
    """step(params, pool, batch, decode) -> (tokens [S] int32, logprobs [S] float32, pool), jitted, the pool donated.

    `params` is the flat list of the model's leaves: dispatching a model or a state costs many times more on the host.
    The pool comes back in the order it went in, which is what lets XLA alias every buffer of it.
    """

    def step(params: list[jax.Array], pool: list[jax.Array], batch: Batch, decode: bool):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, params))
        x_td, pool = forward(model, pool, batch, kernels, decode=decode)
        x_sd = x_td if decode else x_td[batch.cu_q_lens[1:] - 1]
        tokens, logprobs = sample(
            model.logits(x_sd),
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            batch.seeds,
            batch.context_lens,
        )
        return tokens, logprobs, pool

    return jax.jit(step, static_argnums=3, donate_argnums=1)


def make_copy_blocks(kernels: Kernels) -> jax.stages.Wrapped:
    """copy(pool, sources [C], destinations [C]) -> pool, jitted, the pool donated: block copies of all layers."""

    def copy(pool: list[jax.Array], sources: jax.Array, destinations: jax.Array) -> list[jax.Array]:
        return [kernels.copy_blocks(array, sources, destinations) for array in pool]

    return jax.jit(copy, donate_argnums=0)

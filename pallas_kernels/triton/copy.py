"""Block copy: all sources are read into a temporary before any block is written, in place (Pallas-Triton)."""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.options import Ref
from pallas_kernels.triton.launch import as_stored, iota, launch

PIECE = 2048  # elements that one program copies


def _copy_kernel(
    blocks_ce_ref: Ref,  # [C, E]
    destination_c_ref: Ref,  # [C]
    _pool_pe_ref: Ref,  # [P, E]
    pool_pe_ref: Ref,  # [P, E], in its place
) -> None:
    c, piece = pl.program_id(0), pl.program_id(1)
    destination = destination_c_ref[c]
    e = piece * PIECE + iota(PIECE)
    mask = (e < pool_pe_ref.shape[1]) & (destination >= 0)
    plt.store(pool_pe_ref.at[destination, e], plt.load(blocks_ce_ref.at[c, e], mask=mask, other=0), mask=mask)


def copy_blocks(pool: jax.Array, sources_c: jax.Array, destinations_c: jax.Array) -> jax.Array:
    """Compute `Ops.copy_blocks`. Temporary memory: the C blocks."""
    if sources_c.shape[0] == 0:
        return pool
    pool_pe = as_stored(pool).reshape(pool.shape[0], -1)
    blocks_ce = pool_pe.at[sources_c].get(mode="clip")  # a source of no destination may be anything
    [pool_pe] = launch(
        "copy_blocks", _copy_kernel, blocks_ce, destinations_c, pool_pe,
        grid=(blocks_ce.shape[0], pl.cdiv(blocks_ce.shape[1], PIECE)),
        out_types=[jax.ShapeDtypeStruct(pool_pe.shape, pool_pe.dtype)], aliases={2: 0}, num_warps=4,
    )  # fmt: skip
    return lax.bitcast_convert_type(pool_pe, pool.dtype).reshape(pool.shape)

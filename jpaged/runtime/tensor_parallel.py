"""Parts of a step that XLA can't divide among devices well: the kernels, and sampling."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jpaged.runtime.placement import ALL, KV, Placement
from jpaged.runtime.sampler import Sampled, SampleOptions, count, sample
from jpaged.runtime.sampling_row import Sampling
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.sampling_state import SamplingState
from pallas_kernels import Kernels
from pallas_kernels.ops import Implementation
from pallas_kernels.options import AttentionOptions, OutputAndLse, WriteOptions, Written

WHOLE, COLUMNS = P(), P(None, ALL)
POOL, KV_HEADS, SCALES = P(None, KV), P(None, KV), P(KV)


def divide_kernels(kernels: Kernels, placement: Placement) -> Kernels:
    """Return kernels whose ops run on each device with the heads that it holds.

    A kernel is a custom call, which XLA can only run whole.
    """
    inner = kernels.implementation

    def divided(op: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(op, mesh=placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def write_kv(
        k_pool: jax.Array, v_pool: jax.Array, k_tkh: jax.Array, v_tkh: jax.Array, slots_t: jax.Array,
        options: WriteOptions,
    ) -> Written:  # fmt: skip
        def op(
            k_pool: jax.Array, v_pool: jax.Array, k_tkh: jax.Array, v_tkh: jax.Array, slots_t: jax.Array, further: Any
        ) -> Written:
            return inner.write_kv(k_pool, v_pool, k_tkh, v_tkh, slots_t, WriteOptions(*further))

        specs = POOL, POOL, KV_HEADS, KV_HEADS, WHOLE, (WHOLE, WHOLE, SCALES, SCALES, COLUMNS)
        further = options.cos_t, options.sin_t, options.k_scale_k, options.v_scale_k, options.q_tnh
        written: Written = divided(op, specs, (POOL, POOL, COLUMNS))(k_pool, v_pool, k_tkh, v_tkh, slots_t, further)
        return written

    def copy_blocks(pool: jax.Array, sources_c: jax.Array, destinations_c: jax.Array) -> jax.Array:
        copied: jax.Array = divided(inner.copy_blocks, (POOL, WHOLE, WHOLE), POOL)(pool, sources_c, destinations_c)
        return copied

    def attend(attention: Callable[..., OutputAndLse], *args: Any) -> OutputAndLse:
        q, k_pool, v_pool, *batch, options = args

        def op(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, batch: Any, scales: Any, work: Any) -> OutputAndLse:
            k_scale_k, v_scale_k = scales
            own = replace(options, k_scale_k=k_scale_k, v_scale_k=v_scale_k, work=work)
            return attention(q, k_pool, v_pool, *batch, own)

        specs = COLUMNS, POOL, POOL, WHOLE, SCALES, WHOLE
        further = batch, (options.k_scale_k, options.v_scale_k), options.work
        output: OutputAndLse = divided(op, specs, (COLUMNS, COLUMNS))(q, k_pool, v_pool, *further)
        return output

    def decode(
        q_snh: jax.Array, k_pool: jax.Array, v_pool: jax.Array, block_tables_sw: jax.Array, context_lens_s: jax.Array,
        options: AttentionOptions,
    ) -> OutputAndLse:  # fmt: skip
        return attend(inner.paged_decode_attention, q_snh, k_pool, v_pool, block_tables_sw, context_lens_s, options)

    def ragged(
        q_tnh: jax.Array, k_pool: jax.Array, v_pool: jax.Array, block_tables_sw: jax.Array, context_lens_s: jax.Array,
        cu_q_lens_s1: jax.Array, decode_s: jax.Array | None, options: AttentionOptions,
    ) -> OutputAndLse:  # fmt: skip
        batch = block_tables_sw, context_lens_s, cu_q_lens_s1, decode_s
        return attend(inner.ragged_paged_attention, q_tnh, k_pool, v_pool, *batch, options)

    return replace(kernels, implementation=Implementation(write_kv, copy_blocks, decode, ragged))


def sample_divided(
    logits_sv: jax.Array, state: SamplingState, sampling: Sampling, options: SampleOptions, placement: Placement
) -> tuple[Sampled, SamplingState]:
    """Count tokens as `count` does, and return the result of `sample`, whose rows are divided among the devices.

    One all-to-all turns the columns [S, V/n] of each device into rows [S/n, V], and one all-gather collects the
    results. XLA would move the weights of the head instead, and divide the counting, whose results it adds up over the
    whole state. The rows are independent.
    """
    num_rows, size = len(logits_sv), placement.size
    padding = -num_rows % size

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1)) if padding else x

    def local(x: jax.Array) -> jax.Array:
        """Return the rows of this device."""
        rows = len(x) // size
        return lax.dynamic_slice_in_dim(x, lax.axis_index(ALL) * rows, rows) if size > 1 else x

    def choose(logits_sv: jax.Array, state: SamplingState, sampling: Sampling) -> tuple[Sampled, SamplingState]:
        if options.settings is Settings.ANY:  # other rows have no tokens to count
            state = count(state, sampling)
        logits_sv = padded(logits_sv)
        if placement.splits_vocab:
            logits_sv = lax.all_to_all(logits_sv, ALL, split_axis=0, concat_axis=1, tiled=True)
        else:
            logits_sv = local(logits_sv)
        sampled = sample(logits_sv, state, jax.tree.map(lambda x: local(padded(x)), sampling), options)
        return jax.tree.map(lambda x: x[:num_rows], _gathered(sampled) if size > 1 else sampled), state

    specs = (COLUMNS if placement.splits_vocab else WHOLE, WHOLE, WHOLE)
    divided = jax.shard_map(choose, mesh=placement.mesh, in_specs=specs, out_specs=WHOLE, check_vma=False)
    result: tuple[Sampled, SamplingState] = divided(logits_sv, state, sampling)
    return result


def _gathered(sampled: Sampled) -> Sampled:
    """Return the rows of all devices, in one transfer."""
    columns = [x[:, None] if x.ndim == 1 else x for x in sampled]
    bits = [lax.bitcast_convert_type(x, jnp.int32) for x in columns]
    rows_sf = lax.all_gather(jnp.concatenate(bits, axis=1), ALL, axis=0, tiled=True)
    bounds = list(itertools.accumulate(x.shape[1] for x in columns))[:-1]
    parts = jnp.split(rows_sf, bounds, axis=1)
    whole = (lax.bitcast_convert_type(part, x.dtype) for part, x in zip(parts, sampled))
    return Sampled(*(part[:, 0] if x.ndim == 1 else part for part, x in zip(whole, sampled)))


def whole_logits(logits_sv: jax.Array, placement: Placement) -> jax.Array:
    """Return the logits [S, V] whole on every device."""
    if not placement.splits_vocab:
        return logits_sv

    def gather(logits_sv: jax.Array) -> jax.Array:
        gathered: jax.Array = lax.all_gather(logits_sv, ALL, axis=1, tiled=True)
        return gathered

    gathered: jax.Array = jax.shard_map(
        gather, mesh=placement.mesh, in_specs=COLUMNS, out_specs=WHOLE, check_vma=False
    )(logits_sv)
    return gathered

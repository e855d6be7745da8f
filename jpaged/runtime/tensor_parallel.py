"""Parts of a step that XLA can't divide among devices well: the kernels, and sampling."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jpaged.runtime.device_rows import SamplingState
from jpaged.runtime.placement import ALL, KV, Placement
from jpaged.runtime.sampler import Sampled, SampleOptions, count, count_kept, sample
from jpaged.runtime.sampling_row import Sampling
from jpaged.runtime.sampling_settings import Settings
from pallas_kernels import Kernels
from pallas_kernels.ops import Implementation
from pallas_kernels.options import Contexts, OutputAndLse, WriteOptions

WHOLE, COLUMNS = P(), P(None, ALL)
POOL, KV_HEADS, SCALES, HEADS = P(None, KV), P(None, KV), P(KV), P(ALL)
CONTEXT_SPECS: Any = POOL, POOL, WHOLE, WHOLE


def divide_kernels(kernels: Kernels, placement: Placement) -> Kernels:
    """Return kernels whose ops run on each device with the heads that it holds.

    A kernel is a custom call, which XLA can only run whole. Ops are jitted, so that layers of one form share a trace.
    """
    divided = functools.partial(jax.shard_map, mesh=placement.mesh, check_vma=False)
    whole = kernels.implementation

    def attention(op: Callable[..., OutputAndLse]) -> Callable[..., OutputAndLse]:
        def attend(q: jax.Array, contexts: Contexts, *rows_and_options: Any) -> OutputAndLse:
            *rows, options = rows_and_options
            options_spec = replace(options, k_scale_k=SCALES, v_scale_k=SCALES, work=WHOLE, sinks_n=HEADS)
            specs = COLUMNS, Contexts(*CONTEXT_SPECS), *[WHOLE] * len(rows), options_spec
            return cast(OutputAndLse, divided(op, in_specs=specs, out_specs=COLUMNS)(q, contexts, *rows, options))

        return jax.jit(attend)

    write_options_spec = WriteOptions(WHOLE, WHOLE, SCALES, SCALES, COLUMNS)  # type: ignore[arg-type]
    write_specs = (POOL, POOL), KV_HEADS, KV_HEADS, WHOLE, write_options_spec
    implementation = Implementation(
        write_kv=jax.jit(divided(whole.write_kv, in_specs=write_specs, out_specs=(POOL, POOL, COLUMNS))),
        copy_blocks=jax.jit(divided(whole.copy_blocks, in_specs=(POOL, WHOLE, WHOLE), out_specs=POOL)),
        paged_decode_attention=attention(whole.paged_decode_attention),
        ragged_paged_attention=attention(whole.ragged_paged_attention),
        # Models with recurrent layers run on one device.
        delta_rule=jax.jit(whole.delta_rule),
        causal_conv=jax.jit(whole.causal_conv, static_argnums=5),
        # Each device samples whole rows.
        argmax_and_lse=whole.argmax_and_lse,
        gumbel_argmax=whole.gumbel_argmax,
        gumbel=whole.gumbel,
        ranks=whole.ranks,
        top=whole.top,
    )
    return replace(kernels, implementation=implementation)


def sample_divided(
    logits_sv: jax.Array, state: SamplingState, sampling: Sampling, options: SampleOptions, placement: Placement
) -> tuple[Sampled, SamplingState]:
    """Count tokens as `count` and `count_kept` do, and return the result of `sample`.

    Its rows are divided among the devices.

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
        sampled = jax.tree.map(lambda x: x[:num_rows], _gathered(sampled) if size > 1 else sampled)
        if options.settings is Settings.ANY:
            state = count_kept(state, sampling, sampled.tokens)
        return sampled, state

    specs = (COLUMNS if placement.splits_vocab else WHOLE, WHOLE, WHOLE)
    divided = jax.shard_map(choose, mesh=placement.mesh, in_specs=specs, out_specs=WHOLE, check_vma=False)
    return divided(logits_sv, state, sampling)


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

    gather = functools.partial(lax.all_gather, axis_name=ALL, axis=1, tiled=True)
    gathered = jax.shard_map(gather, mesh=placement.mesh, in_specs=COLUMNS, out_specs=WHOLE, check_vma=False)
    return cast(jax.Array, gathered(logits_sv))

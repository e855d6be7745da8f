"""Checks of the arguments of the ops: shapes, dtypes and values, the same for every implementation.

Shapes and dtypes are always checked. Values (tables, lengths, slots) are checked by the ops of
`select(..., debug=True)`, where they exist: they live on the device and cost a transfer.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from pallas_kernels.options import (
    CONTINUES,
    AttentionOptions,
    Chains,
    Contexts,
    LowRank,
    Masks,
    Pools,
    ProductOptions,
    WriteOptions,
)
from pallas_kernels.weights import PACKED, Weight

MAX_CONTEXT = 131_072  # tokens that a row of a block table can hold
FP8 = jnp.dtype(jnp.float8_e4m3fn)
FP8_MAX = 448.0

# Values that the GPU kernels support.
HEAD_DIMS = (64, 128, 256)  # of the pools; a model's is padded to the next
MAX_HEAD_DIM = HEAD_DIMS[-1]
BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_GROUP = 16  # query heads per KV head

FLOATS = ("float32", "bfloat16", "float16")  # of recurrent layers, of matrices of low rank and of norms

CPU_HEAD_DIM = 16  # head dims of pools for the CPU kernels are multiples of it


def check_array(name: str, array: jax.Array, shape: Sequence[int], dtype: Any) -> None:
    """Raise ValueError unless `array` has this shape and dtype."""
    expected = jnp.dtype(dtype)
    if (array.shape, jnp.dtype(array.dtype)) != (tuple(shape), expected):
        raise ValueError(f"{name} is {jnp.dtype(array.dtype)}{list(array.shape)}, expected {expected}{list(shape)}")


def check_pools(k_pool: jax.Array, v_pool: jax.Array) -> tuple[int, ...]:
    """Raise ValueError unless both pools are [P, K, B, H] of one shape and dtype, and return the shape."""
    if k_pool.ndim != 4 or math.prod(k_pool.shape) == 0:
        raise ValueError(f"k_pool has shape {list(k_pool.shape)}, expected [P, K, B, H] with none of them 0")
    check_array("v_pool", v_pool, k_pool.shape, k_pool.dtype)
    return k_pool.shape


def check_write(
    pools: Pools, k_tkh: jax.Array, v_tkh: jax.Array, slot_mapping_t: jax.Array, options: WriteOptions
) -> None:
    """Raise ValueError for a wrong shape or dtype of the arguments of `Ops.write_kv`."""
    (_, k, _, pool_h), pool_dtype = check_pools(*pools), pools[0].dtype
    if k_tkh.ndim != 3:
        raise ValueError(f"k_tkh has shape {list(k_tkh.shape)}, expected [T, K, H]")
    t, _, h = k_tkh.shape
    _check_head_dim("k_tkh", h, pool_h)
    dtype = _dtype_over(pool_dtype, k_tkh.dtype)
    check_array("k_tkh", k_tkh, (t, k, h), dtype)
    check_array("v_tkh", v_tkh, (t, k, h), dtype)
    check_array("slot_mapping_t", slot_mapping_t, (t,), jnp.int32)
    if (options.cos_t is None) != (options.sin_t is None):
        raise ValueError("cos_t and sin_t must be given together")
    if options.angles:
        if h % 2:
            raise ValueError(f"k_tkh has head dim {h}: rotating it needs an even one")
        for name, angle_t in zip(("cos_t", "sin_t"), options.angles):
            check_array(name, angle_t, (t, h // 2), jnp.float32)
    if (q_tnh := options.q_tnh) is not None:
        if options.angles is None:
            raise ValueError("q_tnh needs cos_t and sin_t: it is given to be rotated")
        if q_tnh.ndim != 3 or q_tnh.shape[1] % k:
            raise ValueError(f"q_tnh has shape {list(q_tnh.shape)}, expected [T, N, H] with N a multiple of {k}")
        check_array("q_tnh", q_tnh, (t, q_tnh.shape[1], h), dtype)
    _check_scales(pool_dtype, k, options)


def check_product(x_ti: jax.Array, weights: tuple[Weight, ...], options: ProductOptions) -> None:
    """Raise ValueError for a wrong shape, dtype or option of the arguments of `Ops.product`."""
    if x_ti.ndim != 2 or not jnp.issubdtype(x_ti.dtype, jnp.floating):
        raise ValueError(f"x_ti is {x_ti.dtype}{list(x_ti.shape)}, expected floating-point numbers [T, I]")
    for weight in weights:
        _check_weight(weight, x_ti.shape[1], options.sizes_e)
    rows = len(x_ti)
    if options.gated and weights[0].shape != weights[1].shape:
        raise ValueError(f"weights: of {[*weights[0].shape]} and {[*weights[1].shape]}, expected one shape")
    if (tokens_m := options.tokens_m) is not None:
        check_array("tokens_m", tokens_m, (rows,), jnp.int32)
    if (wanted_t := options.wanted_t) is not None:
        check_array("wanted_t", wanted_t, (rows,) if tokens_m is None else wanted_t.shape, jnp.bool_)
    if options.added is not None:
        if len(options.added) != len(weights):
            raise ValueError(f"added: {len(options.added)} arrays for {len(weights)} weights")
        for weight, more in zip(weights, options.added):
            check_array("added", more, (rows, weight.shape[0]), jnp.float32)
    if options.residual_to is not None:
        check_array("residual_to", options.residual_to, (rows, weights[0].shape[0]), options.dtype or x_ti.dtype)


def _check_weight(weight: Weight, inputs: int, sizes_e: jax.Array | None) -> None:
    """Check the shapes and dtypes of one weight of a product with this number of inputs."""
    values, (outputs, own_inputs) = weight.values, weight.shape
    experts = () if sizes_e is None else (len(sizes_e),)
    if values.ndim != 2 + len(experts) or values.shape[: len(experts)] != experts or own_inputs != inputs:
        name = "[O, I]" if sizes_e is None else f"[{len(sizes_e)}, O, I]"
        raise ValueError(f"weight: its values are {[*values.shape]}, expected {name} with {inputs} inputs")
    if weight.is_packed and ((weight.format.group or 1) % PACKED):
        raise ValueError(f"weight: of 4 bits needs scales of groups of a multiple of {PACKED} inputs")
    for name, array in (("scales", weight.scales), ("minima", weight.minima)):
        if array is None:
            continue
        grouped = array.ndim == values.ndim and array.shape[-1] and inputs % array.shape[-1] == 0
        if array.shape[: len(experts) + 1] != (*experts, outputs) or not (grouped or array.ndim == values.ndim - 1):
            raise ValueError(f"weight: its {name} are {[*array.shape]}, which do not fit {[*values.shape]}")
        exponents = name == "scales" and weight.is_packed and weight.minima is None and weight.format.group == PACKED
        if array.dtype not in (jnp.float32, jnp.float16) and not (array.dtype == jnp.uint8 and exponents):
            raise ValueError(f"weight: its {name} are {array.dtype}, expected float32 or float16")
    if weight.minima is not None and (weight.scales is None or weight.minima.shape != weight.scales.shape):
        raise ValueError("weight: minima need scales of the same shape")
    if weight.bias is not None and weight.bias.shape != (*experts, outputs):
        raise ValueError(f"weight: its bias is {[*weight.bias.shape]}, expected {[*experts, outputs]}")


def check_attention(
    q: jax.Array, contexts: Contexts, cu_q_lens_s1: jax.Array | None, decode_s: jax.Array | None,
    options: AttentionOptions,
) -> None:  # fmt: skip
    """Raise ValueError for a wrong shape, dtype or option of an attention op (`cu_q_lens_s1` None: decode).

    A block table of more than MAX_CONTEXT tokens is a NotImplementedError.
    """
    k_pool, v_pool, block_tables_sw, context_lens_s = contexts
    _, k, b, pool_h = check_pools(k_pool, v_pool)
    if q.ndim != 3:
        raise ValueError(f"q has shape {list(q.shape)}, expected [rows, N, H]")
    rows, n, h = q.shape
    _check_head_dim("q", h, pool_h)
    check_array("q", q, q.shape, _dtype_over(k_pool.dtype, q.dtype))
    if n == 0 or n % k:
        raise ValueError(f"q has {n} heads, expected a multiple of the pools' {k} KV heads")
    if block_tables_sw.ndim != 2:
        raise ValueError(f"block_tables_sw has shape {list(block_tables_sw.shape)}, expected [S, W]")
    s, w = block_tables_sw.shape
    check_array("block_tables_sw", block_tables_sw, (s, w), jnp.int32)
    check_array("context_lens_s", context_lens_s, (s,), jnp.int32)
    if cu_q_lens_s1 is not None:
        check_array("cu_q_lens_s1", cu_q_lens_s1, (s + 1,), jnp.int32)
        if decode_s is not None:
            check_array("decode_s", decode_s, (s,), jnp.bool_)
    elif rows != s:
        raise ValueError(f"q has {rows} rows, expected one for each of the {s} rows of block_tables_sw")
    if s == 0 or w == 0 or rows == 0:
        raise ValueError(f"q has {rows} rows and block_tables_sw shape {[s, w]}, expected none of them 0")
    if w * b > MAX_CONTEXT:
        raise NotImplementedError(
            f"block_tables_sw holds {w} blocks of {b} = {w * b} tokens, supported are {MAX_CONTEXT}"
        )
    _check_scores(options)
    if options.sinks_n is not None:
        check_array("sinks_n", options.sinks_n, (n,), jnp.float32)
    _check_scales(k_pool.dtype, k, options)


def _check_scores(options: AttentionOptions) -> None:
    scale, soft_cap, window = options.scale, options.soft_cap, options.window
    if isinstance(scale, (int, float)) and not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be a finite number above 0, not {scale}")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap must be a finite number above 0, not {soft_cap}")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be a whole number of tokens from 1, not {window}")


def check_copy(pool: jax.Array, sources_c: jax.Array, destinations_c: jax.Array) -> None:
    """Raise ValueError for a wrong shape or dtype of the arguments of `Ops.copy_blocks`."""
    if pool.ndim < 1 or math.prod(pool.shape) == 0:
        raise ValueError(f"pool has shape {list(pool.shape)}, expected [P, ...] with none of them 0")
    if sources_c.ndim != 1:
        raise ValueError(f"sources_c has shape {list(sources_c.shape)}, expected [C]")
    check_array("sources_c", sources_c, sources_c.shape, jnp.int32)
    check_array("destinations_c", destinations_c, sources_c.shape, jnp.int32)


def check_delta_rule(
    q_tkd: jax.Array, k_tkd: jax.Array, v_thv: jax.Array, log_decay_th: jax.Array, beta_th: jax.Array,
    states: jax.Array, chains: Chains,
) -> None:  # fmt: skip
    """Raise ValueError for a wrong shape or dtype of the arguments of `Ops.delta_rule`."""
    if states.ndim != 4 or math.prod(states.shape) == 0:
        raise ValueError(f"states has shape {list(states.shape)}, expected [P, H, D, V] with none of them 0")
    p, h, d, v = states.shape
    check_array("states", states, (p, h, d, v), jnp.float32)
    if q_tkd.ndim != 3 or q_tkd.shape[1] == 0:
        raise ValueError(f"q_tkd has shape {list(q_tkd.shape)}, expected [T, K, D]")
    t, k, _ = q_tkd.shape
    if h % k:
        raise ValueError(f"q_tkd has {k} heads, expected a divisor of the states' {h} heads")
    _check_float("q_tkd", q_tkd)
    _check_float("v_thv", v_thv)
    check_array("q_tkd", q_tkd, (t, k, d), q_tkd.dtype)
    check_array("k_tkd", k_tkd, (t, k, d), q_tkd.dtype)
    check_array("v_thv", v_thv, (t, h, v), v_thv.dtype)
    check_array("log_decay_th", log_decay_th, (t, h), jnp.float32)
    check_array("beta_th", beta_th, (t, h), jnp.float32)
    _check_chains_arrays(chains)


def check_causal_conv(
    x_tc: jax.Array, weight_cw: jax.Array, bias_c: jax.Array | None, states: jax.Array, chains: Chains
) -> None:
    """Raise ValueError for a wrong shape or dtype of the arguments of `Ops.causal_conv`."""
    if x_tc.ndim != 2 or x_tc.shape[1] == 0:
        raise ValueError(f"x_tc has shape {list(x_tc.shape)}, expected [T, C]")
    channels = x_tc.shape[1]
    if weight_cw.ndim != 2 or weight_cw.shape[0] != channels or weight_cw.shape[1] < 2:
        raise ValueError(f"weight_cw has shape {list(weight_cw.shape)}, expected [{channels}, W] with W at least 2")
    width = weight_cw.shape[1]
    if states.ndim != 3 or len(states) == 0:
        raise ValueError(f"states has shape {list(states.shape)}, expected [P, {width - 1}, {channels}]")
    for name, array in (("x_tc", x_tc), ("weight_cw", weight_cw), ("bias_c", bias_c)):
        if array is not None:
            _check_float(name, array)
    if bias_c is not None:
        check_array("bias_c", bias_c, (channels,), bias_c.dtype)
    dtype = jnp.float32 if states.dtype == jnp.float32 else x_tc.dtype
    check_array("states", states, (len(states), width - 1, channels), dtype)
    _check_chains_arrays(chains)


def check_logits(
    logits_sv: jax.Array, *, temperature_s: jax.Array | None = None, masks: Masks | None = None
) -> None:  # fmt: skip
    """Raise ValueError for a wrong shape or dtype of logits, of temperatures and of masks."""
    if logits_sv.ndim != 2 or 0 in logits_sv.shape:
        raise ValueError(f"logits_sv has shape {list(logits_sv.shape)}, expected [S, V] with none of them 0")
    check_array("logits_sv", logits_sv, logits_sv.shape, jnp.float32)
    if temperature_s is not None:
        check_array("temperature_s", temperature_s, logits_sv.shape[:1], jnp.float32)
    if masks is not None:
        num_rows, vocab_size = logits_sv.shape
        check_array("masks: allowed_bits_sw", masks.allowed_bits_sw, (num_rows, -(-vocab_size // 32)), jnp.uint32)
        check_array("masks: masked_s", masks.masked_s, (num_rows,), jnp.bool_)


def check_noise(seeds_s2: jax.Array, positions_s: jax.Array, num_rows: int) -> None:
    """Raise ValueError for a wrong shape or dtype of the seeds and the positions of noise."""
    check_array("seeds_s2", seeds_s2, (num_rows, 2), jnp.uint32)
    check_array("positions_s", positions_s, (num_rows,), jnp.int32)


def check_rms_norm(x_td: jax.Array, scale_d: jax.Array) -> None:
    """Raise ValueError for a wrong shape or dtype of the arguments of `rms_norm`."""
    if x_td.ndim != 2 or x_td.shape[1] == 0 or x_td.dtype.name not in FLOATS:
        raise ValueError(f"x_td is {x_td.dtype}{list(x_td.shape)}, expected [T, D] of {_either(FLOATS)}")
    if scale_d.shape != x_td.shape[1:] or scale_d.dtype.name not in FLOATS:
        expected = f"[{x_td.shape[1]}] of {_either(FLOATS)}"
        raise ValueError(f"scale_d is {scale_d.dtype}{list(scale_d.shape)}, expected {expected}")


def check_low_rank(x_ti: jax.Array, pairs: Sequence[LowRank], slots_t: jax.Array) -> None:
    """Raise ValueError for a wrong shape or dtype of the arguments of `low_rank`."""
    if x_ti.ndim != 2 or x_ti.dtype.name not in FLOATS:
        raise ValueError(f"x_ti is {x_ti.dtype}{list(x_ti.shape)}, expected [T, I] of {_either(FLOATS)}")
    check_array("slots_t", slots_t, x_ti.shape[:1], jnp.int32)
    if not pairs:
        raise ValueError("pairs: there are none")
    first, inputs = pairs[0].a, x_ti.shape[1]
    if first.ndim != 3 or first.dtype.name not in FLOATS or 0 in first.shape:
        raise ValueError(f"a is {first.dtype}{list(first.shape)}, expected [N, R, {inputs}] of {_either(FLOATS)}")
    for a, b in pairs:
        check_array("a", a, (*first.shape[:2], inputs), first.dtype)
        if b.ndim != 3 or 0 in b.shape:
            raise ValueError(f"b has shape {list(b.shape)}, expected [N, R, O] with none of them 0")
        check_array("b", b, (*first.shape[:2], b.shape[2]), first.dtype)


def _check_chains_arrays(chains: Chains) -> None:
    """Check the shapes and dtypes of chains."""
    if chains.reads_s.ndim != 1 or len(chains.reads_s) == 0:
        raise ValueError(f"chains: reads_s has shape {list(chains.reads_s.shape)}, expected [S] with S at least 1")
    s = len(chains.reads_s)
    check_array("chains: reads_s", chains.reads_s, (s,), jnp.int32)
    check_array("chains: writes_s", chains.writes_s, (s,), jnp.int32)
    check_array("chains: cu_q_lens_s1", chains.cu_q_lens_s1, (s + 1,), jnp.int32)


def _check_float(name: str, array: jax.Array) -> None:
    if array.dtype not in FLOATS:
        raise ValueError(f"{name} is {array.dtype}, expected {_either(FLOATS)}")


def _check_head_dim(name: str, head_dim: int, pool_head_dim: int) -> None:
    if not 1 <= head_dim <= pool_head_dim:
        raise ValueError(f"{name} has head dim {head_dim}, expected 1 to the pools' {pool_head_dim}")


def _dtype_over(pool_dtype: Any, dtype: Any) -> Any:
    """Return the dtype that queries, keys and values of this one must have with a pool."""
    is_narrower = dtype == jnp.float32 and pool_dtype in (jnp.float16, jnp.bfloat16)
    return dtype if pool_dtype == FP8 or is_narrower else pool_dtype


def _check_scales(pool_dtype: Any, k: int, options: WriteOptions | AttentionOptions) -> None:
    for name, scale in (("k_scale_k", options.k_scale_k), ("v_scale_k", options.v_scale_k)):
        if pool_dtype == FP8:
            if scale is None:
                raise ValueError(f"{name} is missing: a pool of {FP8} needs a scale per KV head")
            check_array(name, scale, (k,), jnp.float32)
        elif scale is not None:
            raise ValueError(f"{name} is for pools of {FP8}, these are {jnp.dtype(pool_dtype)}")


def unsupported(
    *,
    dtype: Any,
    pool_dtype: Any,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    dtypes: Sequence[str],
    max_kv_heads: int,
) -> str | None:
    """Return the reason why GPU kernels for `dtypes` can't serve a model with such pools; None if they can."""
    dtype, pool_dtype = jnp.dtype(dtype).name, jnp.dtype(pool_dtype)
    if dtype not in dtypes:
        return f"dtype {dtype} is not supported, only {_either(dtypes)}"
    if pool_dtype.name != dtype and pool_dtype != FP8:
        return f"pools of {pool_dtype.name} are not supported, only {dtype} or {FP8.name}"
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"head dim {head_dim} is not supported, only 1 to {MAX_HEAD_DIM}"
    if block_size not in BLOCK_SIZES:
        return f"block size {block_size} is not supported, only {_either(BLOCK_SIZES)}"
    if not 1 <= num_kv_heads <= max_kv_heads:
        return f"{num_kv_heads} KV heads are not supported, only 1 to {max_kv_heads}"
    if num_heads % num_kv_heads or not 1 <= num_heads // num_kv_heads <= MAX_GROUP:
        return (
            f"{num_heads} query heads over {num_kv_heads} KV heads are not supported, "
            f"only a whole number of query heads per KV head from 1 to {MAX_GROUP}"
        )
    return None


def check_supported(
    program: str, why_not: Callable[..., str | None], pool: jax.Array, *, dtype: Any, num_heads: int
) -> None:
    """Raise NotImplementedError unless a program can serve heads over such a pool; `why_not` is its `unsupported`."""
    _, k, block_size, head_dim = pool.shape
    shapes = dict(head_dim=head_dim, num_heads=num_heads, num_kv_heads=k, block_size=block_size)
    reason = why_not(dtype=dtype, pool_dtype=pool.dtype, **shapes)
    if reason is None and head_dim not in HEAD_DIMS:
        reason = f"pools of head dim {head_dim} are not supported, only of {_either(HEAD_DIMS)}"
    if reason is not None:
        raise NotImplementedError(f"{program} kernels: {reason}")


def _either(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"


# Values. `checkify.check` raises at once where they exist, and under `checkify.checkify` where they are traced.


def check_slots(slot_mapping_t: jax.Array, num_blocks: int, block_size: int) -> None:
    """Raise ValueError (checkify's) for a slot outside the pool, or one that two tokens write."""
    slots = num_blocks * block_size
    _check_range("slot_mapping_t", slot_mapping_t, -1, slots - 1, f"a pool of {num_blocks} blocks of {block_size}")
    ordered = jnp.sort(slot_mapping_t)
    twice = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    at = jnp.argmax(twice) + 1 if twice.size else 0
    slot = ordered[at] if ordered.size else 0
    checkify.check(~twice.any(), "slot_mapping_t: slot {slot} is written by two tokens", slot=jnp.asarray(slot))


def check_batch(q: jax.Array, contexts: Contexts, cu_q_lens_s1: jax.Array | None) -> None:
    """Raise ValueError (checkify's) for lengths that don't fit together, or a block in use outside the pool."""
    k_pool, _, block_tables_sw, context_lens_s = contexts
    num_rows, (num_blocks, _, block_size, _) = q.shape[0], k_pool.shape
    w = block_tables_sw.shape[1]
    _check_range("context_lens_s", context_lens_s, 0, w * block_size, f"a table of {w} blocks of {block_size}")
    if cu_q_lens_s1 is not None:
        q_lens = cu_q_lens_s1[1:] - cu_q_lens_s1[:-1]
        _check_range("cu_q_lens_s1", cu_q_lens_s1, 0, num_rows, f"{num_rows} rows of q")
        checkify.check((q_lens >= 0).all() & (cu_q_lens_s1[0] == 0), "cu_q_lens_s1 must start at 0 and never fall")
        longer = q_lens > context_lens_s
        checkify.check(
            ~longer.any(),
            "cu_q_lens_s1: sequence {s} has more rows than its context_lens_s of {n}",
            s=jnp.argmax(longer), n=context_lens_s[jnp.argmax(longer)],
        )  # fmt: skip
    used = jnp.arange(w) * block_size < context_lens_s[:, None]
    outside = used & ((block_tables_sw < 0) | (block_tables_sw >= num_blocks))
    s, i = jnp.unravel_index(jnp.argmax(outside), outside.shape)
    checkify.check(
        ~outside.any(),
        "block_tables_sw[{s}, {i}] is {block}, allowed are 0 to " + str(num_blocks - 1),
        s=s, i=i, block=block_tables_sw[s, i],
    )  # fmt: skip


def check_chains(chains: Chains, num_tokens: int, num_pages: int) -> None:
    """Raise ValueError (checkify's) for wrong lengths of sequences, and pages outside the pool or in conflict."""
    cu_q_lens_s1, reads_s, writes_s = chains
    pages = f"a pool of {num_pages} pages"
    _check_range("cu_q_lens_s1", cu_q_lens_s1, 0, num_tokens, f"{num_tokens} tokens")
    _check_range("reads_s", reads_s, CONTINUES, num_pages - 1, pages)
    _check_range("writes_s", writes_s, -1, num_pages - 1, pages)
    lens_s = cu_q_lens_s1[1:] - cu_q_lens_s1[:-1]
    checkify.check((lens_s >= 0).all() & (cu_q_lens_s1[0] == 0), "cu_q_lens_s1 must start at 0 and never fall")
    used_s = lens_s > 0
    alone_s = used_s & (reads_s == CONTINUES) & ~jnp.concatenate([jnp.zeros(1, bool), used_s[:-1]])
    checkify.check(~alone_s.any(), "reads_s: sequence {s} continues a sequence without tokens", s=jnp.argmax(alone_s))
    chain_s = jnp.cumsum(reads_s != CONTINUES)
    others_ss = (chain_s[:, None] != chain_s) & used_s[:, None] & used_s & (writes_s >= 0)  # [any sequence, writer]
    clash_s = (others_ss & ((reads_s[:, None] == writes_s) | (writes_s[:, None] == writes_s))).any(0)
    checkify.check(
        ~clash_s.any(),
        "writes_s[{s}] is page {page}, which another chain reads or writes",
        s=jnp.argmax(clash_s), page=writes_s[jnp.argmax(clash_s)],
    )  # fmt: skip


def check_copies(sources_c: jax.Array, destinations_c: jax.Array, num_blocks: int) -> None:
    """Raise ValueError (checkify's) for a block outside the pool; -1 as destination copies nothing."""
    sources_c, pool = jnp.where(destinations_c < 0, 0, sources_c), f"a pool of {num_blocks} blocks"
    _check_range("destinations_c", destinations_c, -1, num_blocks - 1, pool)
    _check_range("sources_c", sources_c, 0, num_blocks - 1, pool)


def _check_range(name: str, array: jax.Array, low: int, high: int, reason: str) -> None:
    bad = (array < low) | (array > high)
    i = jnp.argmax(bad)
    checkify.check(~bad.any(), f"{name}[{{i}}] is {{x}}, allowed are {low} to {high}: {reason}", i=i, x=array[i])

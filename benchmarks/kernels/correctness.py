"""Whether every op is right on the device at hand: options, shapes, and the same bits in any batch."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.bench import Bench
from benchmarks.kernels.expected import TOLERANCES, WrongOutput, attend, check_rows, host
from benchmarks.kernels.implementations import choose
from benchmarks.kernels.workloads import Shape
from pallas_kernels import Kernels

FP8 = "float8_e4m3fn"
CONTEXTS = [1, 16, 17, 0, 63, 64, 65, 513, 1000, 128]  # edges of blocks, tiles and splits; 0 is a padding row
QUERIES = [1, 16, 3, 0, 63, 1, 40, 100, 1, 128]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an attention op: `q_lens` None is decode."""

    shape: Shape
    contexts: Sequence[int] = tuple(CONTEXTS)
    q_lens: Sequence[int] | None = None
    pool_dtype: str | None = None
    soft_cap: float | None = None
    window: int | None = None
    return_lse: bool = False
    sinks: bool = False

    @property
    def name(self) -> str:
        s = self.shape
        parts = ["ragged" if self.q_lens else "decode", s.dtype, f"head dim {s.head_dim}"]
        parts += [f"block {s.block_size}", f"{s.num_heads} on {s.num_kv_heads} heads"]
        parts += [f"{self.pool_dtype} pool"] if self.pool_dtype else []
        parts += [f"soft cap {self.soft_cap:g}"] if self.soft_cap else []
        parts += [f"window {self.window}"] if self.window else []
        parts += ["lse"] if self.return_lse else []
        parts += ["sinks"] if self.sinks else []
        return ", ".join(parts)


def cases(tiny: bool) -> Iterator[Case]:
    """Shapes first, each plain; then the options, on the two head dims that Llamas have."""
    bf16, few = "bfloat16", dict(num_heads=8, num_kv_heads=2)
    shapes = [
        Shape(128, 64, **few), Shape(64, 16, **few), Shape(128, 16, **few), Shape(64, 64, **few),
        Shape(128, 128, **few), Shape(256, 32, **few), Shape(128, 8, num_heads=14, num_kv_heads=2),
        Shape(64, 16, num_heads=4, num_kv_heads=4), Shape(128, 16, num_heads=16, num_kv_heads=1),
        Shape(80, 16, **few), Shape(96, 64, **few), Shape(128, 64, **few, dtype="float16"),
    ]  # fmt: skip
    options: list[dict[str, Any]] = [
        dict(return_lse=True), dict(soft_cap=2.0), dict(window=50), dict(pool_dtype=FP8),
        dict(sinks=True), dict(sinks=True, window=50),
        dict(pool_dtype=FP8, soft_cap=2.0, window=50, return_lse=True, sinks=True),
    ]  # fmt: skip
    if tiny:
        shapes, options = [Shape(80, 16, **few)], options[-1:]
    small = dict(contexts=(1, 17, 0, 40), q_lens=(1, 5, 0, 40)) if tiny else dict(q_lens=tuple(QUERIES))
    for shape in shapes:
        yield Case(shape, small.get("contexts", tuple(CONTEXTS)))
        yield Case(shape, **small)
    if not tiny:  # many splits, and so long that splits are longer; 16 query heads of a KV head, and 2
        for heads in ((16, 1), (6, 3)):
            shape = Shape(128, 16, *heads)
            yield Case(shape, contexts=(9000, 1, 30000))
            yield Case(shape, contexts=(9000, 1, 30000), q_lens=(100, 1, 1))
    for shape in shapes[:1] if tiny else [Shape(128, 64, **few, dtype=bf16), Shape(64, 16, **few, dtype=bf16)]:
        for option in options:
            yield Case(shape, small.get("contexts", tuple(CONTEXTS)), **option)
            yield Case(shape, **small, **option)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of an op, and each sequence's own keys and values [L, K, H] in float32."""

    args: tuple[jax.Array, ...]
    options: dict[str, Any]
    dense: list[tuple[np.ndarray, np.ndarray]]


def make_inputs(case: Case, pool_head_dim: int, seed: int = 0) -> Inputs:
    """Random data. Unwritten slots hold NaN, blocks lie in random order, table entries past a context are -1."""
    shape, rng = case.shape, np.random.default_rng(seed)
    pool_dtype = jnp.dtype(case.pool_dtype or shape.dtype)
    blocks = [shape.blocks(n) for n in case.contexts]
    order = rng.permutation(sum(blocks) + 3)
    table_sw = np.full((len(blocks), max(1, *blocks)), -1, np.int32)
    dims = (len(order), shape.num_kv_heads, shape.block_size, pool_head_dim)
    pools = [np.full(dims, np.nan, np.float32) for _ in range(2)]
    scales = [rng.uniform(0.5, 2, shape.num_kv_heads).astype(np.float32) for _ in range(2)]
    dense = []
    for s, (length, own) in enumerate(zip(case.contexts, np.split(order, np.cumsum(blocks))[:-1])):
        table_sw[s, : len(own)] = own
        held = []
        for pool, scale in zip(pools, scales):
            x_lkh = rng.standard_normal((length, shape.num_kv_heads, shape.head_dim))
            stored = np.asarray(x_lkh.astype(pool_dtype), np.float32)
            at = np.arange(length)
            pool[own[at // shape.block_size], :, at % shape.block_size] = np.pad(
                stored, ((0, 0), (0, 0), (0, pool_head_dim - shape.head_dim))
            )
            held.append(stored * scale[:, None] if case.pool_dtype else stored)
        dense.append((held[0], held[1]))
    rows = len(case.contexts) if case.q_lens is None else sum(case.q_lens)
    q = jnp.asarray(rng.standard_normal((rows, shape.num_heads, shape.head_dim)), shape.dtype)
    args = (
        q, *(jnp.asarray(pool, pool_dtype) for pool in pools), jnp.asarray(table_sw),
        jnp.asarray(case.contexts, jnp.int32),
    )  # fmt: skip
    if case.q_lens is not None:
        args += (jnp.asarray(np.cumsum([0, *case.q_lens]), jnp.int32),)
    options: dict[str, Any] = dict(scale=shape.scale)
    options |= {name: value for name in ("soft_cap", "window") if (value := getattr(case, name)) is not None}
    options |= dict(return_lse=True) if case.return_lse else {}
    if case.pool_dtype:
        options |= dict(k_scale_k=jnp.asarray(scales[0]), v_scale_k=jnp.asarray(scales[1]))
    if case.sinks:
        options |= dict(sinks_n=jnp.asarray(rng.uniform(-4, 8, shape.num_heads), jnp.float32))
    return Inputs(args, options, dense)


def run(kernels: Kernels, inputs: Inputs) -> Any:
    """The op that the inputs are for, jitted."""
    op = kernels.paged_decode_attention if len(inputs.args) == 5 else kernels.ragged_paged_attention
    return jax.jit(lambda *args: op(*args, **inputs.options))(*inputs.args)


def check_attention(kernels: Kernels, case: Case) -> float:
    """The largest relative error of a row. Raises WrongOutput."""
    inputs = make_inputs(case, kernels.head_dim)
    out = run(kernels, inputs)
    o, lse = (host(out[0]), host(out[1])) if case.return_lse else (host(out), None)
    q, row, worst = host(inputs.args[0]), 0, 0.0
    tolerance = case.pool_dtype or case.shape.dtype
    for (k, v), count in zip(inputs.dense, case.q_lens or [1] * len(inputs.dense)):
        for i in range(count):
            seen = len(k) - (count - 1 - i)
            options = dict(scale=case.shape.scale, soft_cap=case.soft_cap, window=case.window)
            options |= dict(sinks_n=host(inputs.options["sinks_n"])) if case.sinks else {}
            expected, expected_lse = attend(q[row], k[:seen], v[:seen], **options)
            if seen == 0:
                if o[row].any():
                    raise WrongOutput(f"row {row} sees no key and is not 0")
            else:
                worst = max(worst, check_rows(o[row], expected, tolerance))
            if lse is not None and seen and not np.allclose(lse[row], expected_lse, rtol=0, atol=TOLERANCES[tolerance]):
                raise WrongOutput(f"row {row}: log-sum-exp {lse[row]} should be {expected_lse}")
            row += 1
    return worst


def check_write(kernels: Kernels, shape: Shape, pool_dtype: str | None, rope: bool) -> float:
    """A KV write, every third token padding: written slots are right, the others untouched to the bit."""
    rng, dtype, tokens, num_blocks = np.random.default_rng(0), jnp.dtype(pool_dtype or shape.dtype), 37, 5
    dims = (num_blocks, shape.num_kv_heads, shape.block_size, kernels.head_dim)
    before = [rng.standard_normal(dims).astype(dtype) for _ in range(2)]
    k, v = (jnp.asarray(rng.standard_normal((tokens, *dims[1:2], shape.head_dim)), shape.dtype) for _ in range(2))
    slots = rng.permutation(num_blocks * shape.block_size)[:tokens].astype(np.int32)
    tokens = len(slots)
    k, v = k[:tokens], v[:tokens]
    slots[::3] = -1
    options: dict[str, Any] = {}
    expected = [np.asarray(host(x), np.float64) for x in (k, v)]
    if rope:
        angle = rng.uniform(0, 6.28, (tokens, shape.head_dim // 2))
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        options |= dict(cos_t=jnp.asarray(cos), sin_t=jnp.asarray(sin))
        a, b = np.split(expected[0], 2, axis=-1)
        expected[0] = np.concatenate([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)
    if pool_dtype:
        scales = [np.full(shape.num_kv_heads, scale, np.float32) for scale in (0.5, 2.0)]
        options |= dict(k_scale_k=jnp.asarray(scales[0]), v_scale_k=jnp.asarray(scales[1]))
        expected = [x / scale[:, None] for x, scale in zip(expected, scales)]
    pools = jax.jit(lambda *args: kernels.write_kv(*args, **options))(
        *map(jnp.asarray, before), k, v, jnp.asarray(slots)
    )
    # Rounding to the pool's dtype: once, or twice where the rotated key is rounded first.
    eps, worst = float(jnp.finfo(dtype).eps), 0.0
    for pool, old, x in zip(pools, before, expected):
        got = np.asarray(pool, np.float32)
        touched = np.zeros(dims[:1] + dims[2:3], bool)
        for slot, x_kh in zip(slots, x):
            if slot >= 0:
                block, offset = divmod(int(slot), shape.block_size)
                touched[block, offset] = True
                at = got[block, :, offset]
                bound = eps * np.abs(x_kh) + 2 * float(jnp.finfo(dtype).smallest_subnormal)
                if rope or pool_dtype:
                    bound = 1.1 * bound + float(jnp.finfo(shape.dtype).eps) * np.abs(x_kh).max()
                error = np.abs(at[:, : shape.head_dim] - x_kh)
                if not (error <= bound).all() or at[:, shape.head_dim :].any():
                    raise WrongOutput(f"slot {slot} is off by up to {error.max():.3g}, or its padding is not 0")
                worst = max(worst, float(error.max()))
        same = (got == np.asarray(old, np.float32)).all(axis=(1, 3))
        if not (same | touched).all():
            raise WrongOutput("a slot that no token names has changed")
    return worst


def check_copy(kernels: Kernels, shape: Shape) -> float:
    """Block copies: all are read before any is written, -1 copies nothing."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((6, shape.num_kv_heads, shape.block_size, kernels.head_dim)).astype(shape.dtype)
    sources, destinations = np.array([0, 1, 2, 3], np.int32), np.array([1, 0, -1, 5], np.int32)
    expected = pool.copy()
    expected[[1, 0, 5]] = pool[[0, 1, 3]]
    got = jax.jit(kernels.copy_blocks)(*map(jnp.asarray, (pool, sources, destinations)))
    if (np.asarray(got, np.float32) != np.asarray(expected, np.float32)).any():
        raise WrongOutput("copied blocks differ")
    return 0.0


def check_bits(kernels: Kernels, shape: Shape, batch: int, context: int, ragged: bool) -> float:
    """A sequence's output is the same to the bit alone and at any place of a batch."""
    rng = np.random.default_rng(1)
    contexts = [context, *rng.integers(1, max(2, context // 3), batch - 1).tolist()]
    q_lens = [min(20, context), *(int(min(n, rng.integers(1, 5))) for n in contexts[1:])] if ragged else None
    inputs = make_inputs(Case(shape, contexts, q_lens), kernels.head_dim)
    q, k_pool, v_pool, table_sw, lens = inputs.args[:5]
    counts = np.asarray(q_lens or [1] * batch)
    first = np.cumsum([0, *counts])

    def output(order: Sequence[int]) -> list[np.ndarray]:
        order = np.asarray(order)
        rows = np.concatenate([np.arange(first[s], first[s + 1]) for s in order])
        args = (q[rows], k_pool, v_pool, table_sw[order], lens[order])
        if ragged:
            args += (jnp.asarray(np.cumsum([0, *counts[order]]), jnp.int32),)
        o = np.asarray(run(kernels, Inputs(args, inputs.options, [])), np.float32)
        return np.split(o, np.cumsum(counts[order])[:-1])

    alone = output([0])[0]
    for place in (0, batch // 3, batch - 1):
        order = list(range(1, batch))
        order.insert(place, 0)
        if not np.array_equal(output(order)[place], alone):
            raise WrongOutput(f"at place {place} of {batch} its bits differ from those it has alone")
    return 0.0


def checks(implementation: str, bench: Bench) -> Iterator[tuple[str, Shape, str | None, Callable[[Kernels], float]]]:
    """Name, shape, pool dtype and function of every check."""
    dtype = bench.sized("bfloat16", "float32")
    few = dict(num_heads=8, num_kv_heads=2)
    for case in cases(bench.tiny):
        yield case.name, case.shape, case.pool_dtype, lambda kernels, case=case: check_attention(kernels, case)
    writes = [
        (128, 64, 2, None, False), (64, 16, 2, None, True), (128, 64, 2, FP8, True), (80, 16, 2, None, True),
        # One token's keys are not a multiple of 128 bytes.
        *((64, 16, heads, None, True) for heads in (1, 3, 5)), *((64, 16, heads, FP8, True) for heads in (1, 2, 3)),
    ]  # fmt: skip
    for head_dim, block_size, heads, pool_dtype, rope in bench.sized(writes, writes[3:4]):
        shape = Shape(head_dim, block_size, num_heads=heads, num_kv_heads=heads, dtype=dtype)
        name = (
            f"write, head dim {head_dim}, block {block_size}, {heads} KV heads"
            + ", rope" * rope
            + f", {pool_dtype} pool" * bool(pool_dtype)
        )
        yield (
            name, shape, pool_dtype,
            lambda kernels, shape=shape, pool=pool_dtype, rope=rope: check_write(kernels, shape, pool, rope),
        )  # fmt: skip
    shape = Shape(128, 16, **few, dtype=dtype)
    yield "copy of blocks", shape, None, lambda kernels: check_copy(kernels, shape)
    for head_dim, block_size in bench.sized([(128, 64), (64, 16)], [(64, 16)]):
        shape = Shape(head_dim, block_size, *bench.sized((32, 8), (4, 2)), dtype=dtype)
        # The reference walks a batch sequence by sequence: a large one takes long on a GPU and shows nothing more.
        batch = bench.sized(256 if implementation != "reference" else 16, 3)
        for ragged in (False, True):
            yield (
                f"same bits alone and in a batch of {batch}, {'ragged' if ragged else 'decode'}, head dim {head_dim}",
                shape, None,
                lambda kernels, shape=shape, batch=batch, ragged=ragged: check_bits(
                    kernels, shape, batch, bench.sized(1500, 40), ragged
                ),
            )  # fmt: skip


def correctness(bench: Bench, implementation: str) -> None:
    """Every check of one implementation, each with its row."""
    for name, shape, pool_dtype, check in checks(implementation, bench):
        row: dict[str, Any] = dict(experiment="correctness", implementation=implementation, case=name)
        if bench.leaves_out(**row):
            continue
        try:
            row |= dict(error=check(choose(implementation, bench.device, shape, pool_dtype)), status="ok")
        except Exception as error:
            bench.fail(error, **row)
        else:
            bench.report.add(**row)

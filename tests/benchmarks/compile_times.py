"""Measures `benchmarks.suite.plan.COMPILE_S` by compiling for an H200; no GPU is needed.

python -m tests.benchmarks.compile_times        minutes; prints seconds by name
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.shared import deviceless
from benchmarks.shared.models import MODELS
from jpaged.config import Limits, ModelConfig
from jpaged.models.checkpoint import abstract_model
from jpaged.runtime.batch import Bucket, Buckets, Layout
from jpaged.runtime.kv_cache import KVCache
from jpaged.runtime.placement import Placement
from jpaged.runtime.row_table import NUM_SCALARS
from jpaged.runtime.sampling_state import empty_state
from jpaged.runtime.step import Step
from pallas_kernels import Ops, mosaic, select, triton
from tests.kernels.implementations import ops_of

S = jax.ShapeDtypeStruct
BF16, INT32, FP32 = jnp.bfloat16, jnp.int32, jnp.float32
POOL = S((512, 8, 64, 128), BF16)
DEMO = ModelConfig(
    vocab_size=1280, hidden_size=160, intermediate_size=448, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
)  # fmt: skip


def seconds(fn: Callable, *avals: Any, **options: Any) -> float:
    start = time.perf_counter()
    deviceless.compile_for_h200(fn, *avals, figures=False, **options)
    return time.perf_counter() - start


def chain(op: Callable, calls: int) -> Callable:
    """`calls` calls as `benchmarks.shared.timing.JaxTimed` makes them; the tables are the last argument."""
    call = jax.jit(lambda q, *rest: op(q, *rest, scale=0.1))
    return lambda q, k, v, lens, tables: functools.reduce(lambda q, t: call(q, k, v, t, *lens), tables[:calls], q)


def kernels(name: str, ops: Ops) -> dict[str, float]:
    x, angle = S((64, 8, 128), BF16), S((64, 64), FP32)
    decode = S((1, 32, 128), BF16), POOL, POOL, (S((1,), INT32),), [S((1, 16), INT32)] * 128
    ragged = S((8192, 32, 128), BF16), POOL, POOL, (S((1,), INT32), S((2,), INT32)), [S((1, 128), INT32)] * 8
    rope = lambda k, v, x, y, slots, cos, sin: ops.write_kv(k, v, x, y, slots, cos_t=cos, sin_t=sin)
    return {
        f"{name} decode": seconds(chain(ops.paged_decode_attention, 1), *decode),
        f"{name} ragged": seconds(chain(ops.ragged_paged_attention, 1), *ragged),
        f"{name} write": seconds(rope, POOL, POOL, x, x, S((64,), INT32), angle, angle),
        f"{name} copy": seconds(ops.copy_blocks, POOL, S((8,), INT32), S((8,), INT32)),
        f"{name} decode, 128 calls": seconds(chain(ops.paged_decode_attention, 128), *decode),
        f"{name} ragged, 8 calls": seconds(chain(ops.ragged_paged_attention, 8), *ragged),
    }


def step(name: str, config: ModelConfig, bucket: Bucket, block_size: int) -> tuple[float, float]:
    """Of the forward pass, and of the sampler."""
    graphdef, leaves = abstract_model(config, "bfloat16")
    params, treedef = jax.tree.flatten(nnx.from_flat_state(leaves))
    chosen = select(
        name, platform="gpu", device_kind="NVIDIA H200", compute_capability=9.0, dtype="bfloat16",
        head_dim=config.head_dim, num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads,
        block_size=block_size,
    )  # fmt: skip
    cache = KVCache.of(config, block_size, "bfloat16", chosen)
    layout = Layout(bucket, 1024 // block_size + 1)
    functions = Step(graphdef, treedef, cache, {bucket: layout}, Placement.on(deviceless.h200s(), config))
    pool = [S(cache.shape(1300), BF16)] * (2 * config.num_hidden_layers)
    state = jax.eval_shape(lambda: empty_state(bucket.num_seqs, config.vocab_size, jax.devices()[0]))
    last, x_sd = S((bucket.num_seqs,), INT32), S((bucket.num_seqs, config.hidden_size), BF16)
    rows_sf = S((bucket.num_seqs, NUM_SCALARS + 4), INT32)
    bits = S((bucket.num_seqs, -(-config.vocab_size // 32)), jnp.uint32)
    forward = lambda *args: functions.forward(*args, bucket)
    return (
        seconds(forward, params, pool, last, layout.empty()[0], donate_argnums=1),
        seconds(functions.choose, params, state, last, x_sd, rows_sf, bits, donate_argnums=(1, 2)),
    )


def main() -> None:
    found = kernels("mosaic", ops_of(mosaic)) | kernels("triton", ops_of(triton))
    bucket, llama = Bucket(64, 64, True), MODELS["llama-3.1-8b"]
    forward, sampler = step("mosaic", llama, bucket, 64)
    found |= {"Llama-3.1-8B, 32 layers, 64 sequences": forward, "its sampler": sampler}
    found["Llama-3.1-8B, the same with Triton"] = step("triton", llama, bucket, 64)[0]
    found["demo model, all steps"] = sum(
        sum(step("mosaic", DEMO, each, 16)) for each in Buckets(Limits(128, 4, 16)).all
    )
    print(f"jax {jax.__version__}")
    for name, figure in found.items():
        print(f"{name}: {figure:.1f} s", flush=True)


if __name__ == "__main__":
    main()

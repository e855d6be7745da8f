"""The engine's step for a real model, compiled for a GPU that need not be present."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.shared import deviceless
from benchmarks.shared.gpus import Gpu
from benchmarks.shared.models import cut
from benchmarks.shared.program import Array, Program
from jpaged.config import KV_CACHE_DTYPES
from jpaged.models.checkpoint import abstract_model, merged
from jpaged.models.config import ModelConfig
from jpaged.models.fused import Joint, fuse, joined
from jpaged.models.quantized import formats_of
from jpaged.runtime.batch import Bucket, Layout
from jpaged.runtime.device_rows import empty_state
from jpaged.runtime.kv_cache import KVCache
from jpaged.runtime.placement import Placement
from jpaged.runtime.sampling_row import ROW_WORDS
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.step import Step
from jpaged.runtime.tensor_parallel import divide_kernels
from pallas_kernels import select

CUBLAS = {"xla_gpu_enable_triton_gemm": False}  # products as calls of cuBLAS, as the autotuner may choose
BLOCKS = 4096  # of the pool; the program does not depend on it


@dataclass(frozen=True)
class StepShape:
    """One step of one model.

    Attributes:
        sequences: S, the padded number.
        tokens: T of a mixed step; None: a decode step.
        max_model_len: the longest context that a block table holds.
        devices: number of GPUs of a host that share the model.
        fused: fused layers, as in loaded models; False: a module in hand.
        cublas: products as calls of cuBLAS. Without a device XLA chooses Triton's.
        kernels: "mosaic", "triton" or "auto".
        products: products by kernels where they have them; False: XLA's.
    """

    config: ModelConfig
    sequences: int
    tokens: int | None = None
    block_size: int = 16
    max_model_len: int = 8192
    devices: int = 1
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    fused: bool = True
    cublas: bool = False
    kernels: str = "auto"
    products: bool = True

    def with_layers(self, layers: int) -> "StepShape":
        """Return the same step of a model with fewer layers."""
        return dataclasses.replace(self, config=cut(self.config, layers))

    @property
    def bucket(self) -> Bucket:
        """The bucket of the step."""
        return Bucket(self.tokens or self.sequences, self.sequences, self.tokens is None)

    @property
    def pool_dtype(self) -> str:
        """The dtype of the KV pool."""
        return KV_CACHE_DTYPES[self.kv_cache_dtype] or "bfloat16"


class DescribedStep:
    """The step's jitted functions on a described GPU, and descriptions of their arguments."""

    def __init__(self, gpu: Gpu, shape: StepShape):
        self.gpu, self.shape = gpu, shape
        config, bucket = shape.config, shape.bucket
        placement = Placement.on(deviceless.gpus(gpu, shape.devices), config)
        graphdef, leaves = abstract_model(config, "bfloat16")
        if shape.quantization is not None:
            formats = formats_of(merged(graphdef, leaves), shape.quantization)
            graphdef, leaves = abstract_model(config, "bfloat16", formats)
        model = nnx.merge(graphdef, nnx.from_flat_state(leaves))
        chosen = select(
            shape.kernels, platform="gpu", device_kind=gpu.kind, compute_capability=gpu.capability, dtype="bfloat16",
            pool_dtype=shape.pool_dtype, head_dim=config.head_dim,
            num_heads=config.num_attention_heads // placement.size,
            num_kv_heads=config.num_key_value_heads // placement.kv_size, block_size=shape.block_size,
        )  # fmt: skip
        multiplies = shape.products and chosen.multiplies and placement.size == 1
        if shape.fused:
            fuse(model, placement.of, _described, gates=not multiplies)
        graphdef, state = nnx.split(model)
        placed = [
            (path, leaf.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.of(leaf))))
            for path, leaf in nnx.to_flat_state(state)
        ]
        self.params, treedef = jax.tree.flatten([nnx.from_flat_state(placed)])
        kernels = divide_kernels(chosen, placement)
        windows = [spec.window for spec in model.attention_specs]
        length, block_size = shape.max_model_len, shape.block_size
        cache = KVCache.of(config, block_size, shape.pool_dtype, kernels, windows, max_model_len=length)
        width, groups = -(-length // block_size), cache.groups.windows
        layout = Layout(bucket, width, cache.make_work, windows=groups, block_size=block_size)
        self.step = Step(
            graphdef, treedef, cache, {bucket: layout}, placement,
            has_quantized_weights=shape.quantization is not None, kernels=chosen if multiplies else None,
        )  # fmt: skip
        whole = functools.partial(jax.ShapeDtypeStruct, sharding=placement.whole)
        rows, s = bucket.num_seqs + 3, bucket.num_seqs  # no array of samples is like one of rows
        self.pool = [jax.ShapeDtypeStruct(cache.shape(BLOCKS), shape.pool_dtype, sharding=placement.pool)] * (
            2 * cache.groups.size
        )
        self.last_tokens = whole((rows,), jnp.int32)
        self.buffer = whole(layout.empty()[0].shape, jnp.int32)
        state = jax.eval_shape(lambda: empty_state(rows, config.vocab_size))
        self.state = jax.tree.map(lambda x: whole(x.shape, x.dtype), state)
        self.x_sd, self.rows_sf = whole((s, config.hidden_size), jnp.bfloat16), whole((s, ROW_WORDS), jnp.int32)
        self.bits = whole((s, -(-config.vocab_size // 32)), jnp.uint32)

    def forward(self) -> Program:
        """Compile the model's part of the step."""
        return self._program(
            self.step.forward, self.params, self.pool, self.last_tokens, self.buffer, self.shape.bucket
        )

    def choose(self, settings: Settings) -> Program:
        """Compile the sampling of a step that uses these settings at most."""
        args = self.params, self.state, self.last_tokens, self.x_sd, self.rows_sf, self.bits
        return self._program(self.step.choose, *args, settings)

    @property
    def pool_array(self) -> Array:
        """One array of the pool, as a program of one device has it."""
        dtype = "f8e4m3fn" if "float8" in self.shape.pool_dtype else "bf16"
        return Array(dtype, self.pool[0].sharding.shard_shape(self.pool[0].shape))

    def _program(self, jitted: Any, *args: Any) -> Program:
        options = CUBLAS if self.shape.cublas else {}
        return deviceless.program_of(self.gpu, jitted, *args, options=options)


def _described(arrays: Sequence[jax.ShapeDtypeStruct], joint: Joint, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(functools.partial(joined, joint=joint), arrays)

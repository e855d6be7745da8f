"""The device side of the engine: parameters, KV pool, and every executable that a step can need."""

import logging
import os
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from jpaged.config import EngineConfig, Limits, ModelConfig
from jpaged.core.scheduler import ScheduleDecision
from jpaged.model.llama import Llama
from jpaged.runtime.batch import Bucket, Buckets, empty_batch, make_batch
from jpaged.runtime.kv_cache import allocate_pool, block_bytes, fitting_blocks, modest_blocks
from jpaged.runtime.step import make_copy_blocks, make_step
from pallas_kernels import select

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns what lives on the device. `step` is its whole use; `warm_up` comes before it.

    Args:
        model: its arrays are used as they are, not copied.
        limits: what the scheduler will keep to.

    Attributes:
        params: the model's leaves, the very arrays that the model holds.
        pool: [k0, v0, k1, v1, ...], each [P, K, B, H]; H is what the kernels take, the model's or more.
        num_blocks: P.
    """

    def __init__(self, model: Llama, config: EngineConfig, limits: Limits):
        graphdef, state = nnx.split(model)
        self.params, treedef = jax.tree.flatten(state)
        self.block_size = config.block_size
        self.table_width = -(-limits.max_model_len // config.block_size)
        self.buckets = Buckets(limits)
        self.max_num_seqs = limits.max_num_seqs
        llama, dtype, device = model.config, str(self.params[0].dtype), next(iter(self.params[0].devices()))
        self.kernels = select(
            config.kernels, platform=device.platform, device_kind=device.device_kind,
            compute_capability=_compute_capability(device), dtype=dtype, head_dim=llama.head_dim,
            num_heads=llama.num_attention_heads, num_kv_heads=llama.num_key_value_heads, block_size=config.block_size,
        )  # fmt: skip
        logger.info("attention kernels: %s (%s)", self.kernels.name, self.kernels.reason)
        self._step = make_step(graphdef, treedef, self.kernels)
        self._copy_blocks = make_copy_blocks(self.kernels)
        bytes_per_block = block_bytes(llama, config.block_size, self.kernels.head_dim, dtype)
        self.num_blocks = config.num_gpu_blocks_override or self._fitting_blocks(
            llama, dtype, device, config.gpu_memory_utilization, bytes_per_block
        )
        self.pool = allocate_pool(llama, self.num_blocks, config.block_size, self.kernels.head_dim, dtype, device)
        logger.info(
            "KV pool: %d blocks of %d tokens (%.2f GiB, %s)",
            self.num_blocks, config.block_size, self.num_blocks * bytes_per_block / 2**30, dtype,
        )  # fmt: skip

    def warm_up(self, *, progress: bool = True) -> None:
        """Compiles, or loads from the persistent cache, every executable there is, by running each on padding."""
        use_compilation_cache()
        buckets = self.buckets.all
        for bucket in tqdm(buckets, desc="Compiling", unit="shape", disable=not progress):
            jax.block_until_ready(self._run(bucket, empty_batch(bucket, self.table_width)))
        self._run_copies([])

    def step(self, decision: ScheduleDecision) -> tuple[list[int], list[float]]:
        """Runs a decision: its block copies, then its tokens. Returns token and logprob for each of its sequences, in
        order; for one still inside its prompt they mean nothing."""
        if decision.block_copies:
            self._run_copies(decision.block_copies)
        bucket, batch = make_batch(decision, self.buckets, self.block_size, self.table_width)
        tokens, logprobs = jax.device_get(self._run(bucket, batch))
        count = len(decision.num_scheduled_tokens)
        return tokens[:count].tolist(), logprobs[:count].tolist()

    def _run(self, bucket: Bucket, batch) -> tuple[jax.Array, jax.Array]:
        tokens, logprobs, self.pool = self._step(self.params, self.pool, batch, bucket.decode)
        return tokens, logprobs

    def _run_copies(self, copies: list[tuple[int, int]]) -> None:
        """A sequence writes into at most one shared block per step, so there are at most `max_num_seqs` copies."""
        padded = np.full((2, self.max_num_seqs), -1, np.int32)
        if copies:
            padded[:, : len(copies)] = np.asarray(copies, np.int32).T
        self.pool = self._copy_blocks(self.pool, padded[0], padded[1])

    def _fitting_blocks(
        self, llama: ModelConfig, dtype: str, device: jax.Device, utilization: float, bytes_per_block: int
    ) -> int:
        stats = device.memory_stats() if device.platform != "cpu" else None
        if not stats or "bytes_limit" not in stats:
            return modest_blocks(self.table_width * self.max_num_seqs, bytes_per_block)
        # The pool's size is not known yet, and changes nothing about what a step needs beside it.
        shape = jax.ShapeDtypeStruct((64, llama.num_key_value_heads, self.block_size, self.kernels.head_dim), dtype)
        return fitting_blocks(
            limit=stats["bytes_limit"],
            in_use=stats["bytes_in_use"],
            temporaries=self.temporaries([shape] * (2 * llama.num_hidden_layers)),
            utilization=utilization,
            bytes_per_block=bytes_per_block,
        )

    def temporaries(self, pool: list[jax.ShapeDtypeStruct]) -> int:
        """Bytes that the largest steps need beside parameters and pool, by XLA's own account."""

        def of(bucket: Bucket) -> int:
            batch = empty_batch(bucket, self.table_width)
            memory = self._step.lower(self.params, pool, batch, bucket.decode).compile().memory_analysis()
            assert memory is not None
            return memory.temp_size_in_bytes

        return max(of(self.buckets.decode[-1]), of(self.buckets.mixed[-1]))


def use_compilation_cache() -> None:
    """Keeps executables on disk between runs, under XDG_CACHE_HOME, unless the program has chosen a place itself."""
    if jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jpaged" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _compute_capability(device: jax.Device) -> float | None:
    try:
        return float(getattr(device, "compute_capability", None))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None

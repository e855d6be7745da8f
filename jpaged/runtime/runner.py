"""The device side of the engine: parameters, KV pool, and every executable that a step can need."""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jpaged.config import EngineConfig, Limits, ModelConfig
from jpaged.core.plan import Admitted, Done, StepPlan, StepResult
from jpaged.models.base import Model
from jpaged.progress import track
from jpaged.runtime.batch import Bucket, Buckets, Layout, ladder, make_batch
from jpaged.runtime.compilation_cache import cache_folder
from jpaged.runtime.kv_cache import (
    KVCache,
    available_memory,
    check_override,
    exhaustion_named,
    fitting_blocks,
    modest_blocks,
)
from jpaged.runtime.parameters import by_name, checked, deletion_named
from jpaged.runtime.pending import PendingStep
from jpaged.runtime.row_table import NUM_SCALARS, RowTable
from jpaged.runtime.sampling_state import copy_rows, empty_state, host_row, write_row
from jpaged.runtime.step import Computed, Step
from jpaged.runtime.swap import TRANSFERS, HostBlocks
from pallas_kernels import Kernels, SelfTest, select

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns what lives on the device. `dispatch` is its whole use; `warm_up` comes before it.

    Args:
        model: its arrays are used as they are, not copied; they lie on one device.
        limits: what the scheduler will keep to.
        kernels: chosen before the model was loaded; None chooses them now.

    Attributes:
        params: the model's leaves, in the memory of the model's own arrays.
        cache: the layout of the pool.
        pool: the keys and values of each layer.
        state: of the sampler, one row for each sequence that may run.
        last_tokens: [R] int32, the last sample of each row.
        num_blocks: P.
        host: blocks of preempted requests, in the memory of the host.
        num_host_blocks: how many it has room for.
    """

    def __init__(self, model: Model, config: EngineConfig, limits: Limits, kernels: Kernels | None = None):
        graphdef, state = nnx.split(model)
        leaves, treedef = jax.tree.flatten(state)
        self.device = next(iter(leaves[0].devices()))
        self._expected = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in by_name(state).items()}
        self.params = checked(state, self._expected, self.device)
        self.block_size = config.block_size
        self.table_width = -(-limits.max_model_len // config.block_size)
        self.buckets = Buckets(limits)
        self.max_num_seqs = limits.max_num_seqs
        # A sequence writes into at most one shared block per step, and takes at most one row.
        self.copy_sizes = ladder(8, max(8, limits.max_num_seqs), 4)
        self.rows = RowTable(limits.max_num_seqs, self.table_width, config.block_size)
        self.layouts = {bucket: Layout(bucket, self.table_width) for bucket in self.buckets.all}
        llama, dtype = model.config, str(self.params[0].dtype)
        self.vocab_size = llama.vocab_size
        self.kernels = kernels or select_kernels(config, llama, dtype, self.device)
        logger.info("attention kernels: %s (%s)", self.kernels.name, self.kernels.reason)
        pool_dtype = config.pool_dtype(dtype)
        self.cache = KVCache.of(llama, config.block_size, pool_dtype, self.kernels)
        bytes_per_block = self.cache.block_bytes
        if config.num_gpu_blocks_override:
            check_override(config.num_gpu_blocks_override, bytes_per_block, available_memory(self.device))
        self._step = Step(graphdef, treedef, self.cache, self.layouts)
        self._copy_blocks = jax.jit(self.cache.copy, donate_argnums=0)
        self._copy_rows = jax.jit(copy_rows, donate_argnums=0)
        self._write_row = jax.jit(write_row, donate_argnums=0)
        self._empty_state = functools.partial(empty_state, limits.max_num_seqs, llama.vocab_size, self.device)
        self.state, self.last_tokens = self._empty_state(), self._no_tokens()
        # Masks that nobody looks at stay on the device: they are large, and most steps have no others.
        self._no_bits = {
            size: jax.device_put(np.zeros((size, -(-llama.vocab_size // 32)), np.uint32), self.device)
            for size in {bucket.num_seqs for bucket in self.buckets.all}
        }
        self.host = HostBlocks(self.device)
        most = limits.max_num_seqs * self.table_width
        self.num_host_blocks = min(int(config.swap_space * 2**30 // bytes_per_block), most)
        self.num_blocks = config.num_gpu_blocks_override or self._fitting_blocks(
            llama, dtype, config.gpu_memory_utilization, bytes_per_block
        )
        measured = not config.num_gpu_blocks_override and self.device.platform != "cpu"
        self._exhaustion = functools.partial(
            exhaustion_named,
            "gpu_memory_utilization" if measured else "num_gpu_blocks_override",
            f"{self.num_blocks} blocks ({self.num_blocks * bytes_per_block / 2**30:.2f} GiB)",
        )
        self._empty_pool = functools.partial(self.cache.allocate, self.num_blocks, self.device)
        with self._exhaustion():
            self.pool = self._empty_pool()
        logger.info(
            "KV pool: %d blocks of %d tokens (%.2f GiB, %s)",
            self.num_blocks, config.block_size, self.num_blocks * bytes_per_block / 2**30, pool_dtype,
        )  # fmt: skip

    def warm_up(self, *, progress: bool = True) -> None:
        """Compile every executable, or load it from jax's cache on disk, by running it on padding.

        Args:
            progress: show a progress bar on stderr instead of lines in the log.

        Raises ValueError if a step needs more memory than the pool leaves.
        """
        with self._exhaustion():
            self._warm_up(progress)
            jax.block_until_ready((self.pool, self.state, self.last_tokens))

    def _warm_up(self, progress: bool) -> None:
        buckets = self.buckets.all
        logger.info("compiling %d shapes of a step, or loading them", len(buckets))
        start = time.monotonic()
        for bucket in track(buckets, len(buckets), "compiled", "shape", bar=progress):
            self._run_padding(bucket, score=True)
        for size in self.copy_sizes:
            self._run_copies([(-1, -1)] * size)
            self._run_row_copies([(-1, -1)] * size)
        self._set_state(-1, *host_row(self.vocab_size, [], []))
        for size in TRANSFERS if self.num_host_blocks else ():
            self._swap_there_and_back(size)
        logger.info("compiled in %.1f seconds", time.monotonic() - start)

    def block_swap_cost(self) -> float:
        """How many tokens could be computed while one block moves to the host and back, measured; after `warm_up`."""
        bucket, size = self.buckets.mixed[-1], TRANSFERS[-1]
        token = _seconds(lambda: self._run_padding(bucket))
        block = _seconds(lambda: self._swap_there_and_back(size))
        return (block / size) / (token / bucket.num_tokens)

    def dispatch(self, plan: StepPlan, make_masks: Callable[[], np.ndarray] | None = None) -> PendingStep | Done:
        """Begin a step: blocks to the host, block copies, blocks from the host, changes of rows, then the tokens.

        Plans are dispatched in the order in which they were scheduled. Nothing here waits for the device.

        Args:
            make_masks: returns the masks of the plan's masked rows, [M, ceil(V / 32)] uint32; called once the model's
                part of the step is on its way.

        Raises RuntimeError if the arrays of the parameters were deleted.
        """
        with deletion_named(self.params):
            return self._dispatch(plan, make_masks)

    def check_params(self, state: Any) -> None:
        """Raise ValueError, with the first difference, for parameters that `update_params` would refuse."""
        checked(state, self._expected, self.device)

    def update_params(self, state: Any) -> None:
        """Serve other parameters of the same tree, shapes and dtypes, from the next step on. Nothing is copied or
        compiled; the KV that the pool holds belongs to the old ones.

        Args:
            state: an `nnx.Module`, an `nnx.State`, or nested dicts of arrays.

        Raises ValueError, with the first difference, and then changes nothing.
        """
        self.params = checked(state, self._expected, self.device)

    def _dispatch(self, plan: StepPlan, make_masks: Callable[[], np.ndarray] | None) -> PendingStep | Done:
        for blocks_of_request in plan.swap_out:
            self.host.take_in(self.pool, blocks_of_request)
        if plan.block_copies:
            self._run_copies(plan.block_copies)
        if plan.swap_in:
            self.pool = self.host.give_back(self.pool, plan.swap_in)
        self._change_rows(plan)
        if not plan.rows:
            return Done(StepResult(()))
        made = make_batch(plan, self.rows, self.buckets, self.layouts)
        bucket, batch = made.bucket, made.batch
        buffer = jax.device_put(made.buffer, self.device)
        computed, self.pool = self._step.forward(self.params, self.pool, self.last_tokens, buffer, bucket)
        bits = self._no_bits[bucket.num_seqs]
        if make_masks is not None:
            masks = np.zeros(bits.shape, np.uint32)
            masks[np.flatnonzero(made.mask_of >= 0)] = make_masks()[made.mask_of[made.mask_of >= 0]]
            # Committed as those are that stand for no bits at all, for else it would be another executable.
            bits = jax.device_put(masks, self.device)
        chosen, listed = self._choose(computed, bits)
        prompt = None
        if computed.x_td is not None and (batch.targets >= 0).any():
            prompt = self._step.score(self.params, computed.x_td, computed.targets_t)
        prompt_top = [self.rows.prompt_top[row] for row, *_ in plan.rows] if prompt else []
        return PendingStep(plan, chosen, listed, made.num_top, prompt, batch.targets, prompt_top)

    def recover(self) -> None:
        """Allocate again, empty, the KV pool and the sampling state if a failed step has lost them, and drop the
        blocks on the host. Raises what the allocation raises; it can then be tried again."""
        if not _usable(self.pool):
            for array in self.pool:
                array.delete()  # The new pool may need the memory of the old one.
            self.pool = self._empty_pool()
        if not _usable(self.state):
            self.state = self._empty_state()
        if not _usable([self.last_tokens]):
            self.last_tokens = self._no_tokens()
        self.host = HostBlocks(self.device)

    def _choose(self, computed: Computed, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Dispatch the sampling of a step, and return the chosen tokens and the lists."""
        chosen, listed, self.state, self.last_tokens = self._step.choose(
            self.params, self.state, self.last_tokens, computed.x_sd, computed.rows_sf, bits
        )
        return chosen, listed

    def _change_rows(self, plan: StepPlan) -> None:
        """Take in what a plan tells of rows, on the host and on the device."""
        stateful = self.rows.scalars["stateful"]
        copies = [(source, row) for source, row in plan.row_copies if stateful[source]]
        if copies:
            self._run_row_copies(copies)
        self.rows.apply(plan)
        for admitted in plan.admitted:
            if admitted.params.has_state:
                self._set_state(admitted.row, *_state_row(admitted, self.vocab_size))

    def _run_padding(self, bucket: Bucket, *, score: bool = False) -> jax.Array:
        """Run a step of padding, with what scores prompts or without it."""
        buffer = jax.device_put(self.layouts[bucket].empty()[0], self.device)
        computed, self.pool = self._step.forward(self.params, self.pool, self.last_tokens, buffer, bucket)
        chosen, _ = self._choose(computed, self._no_bits[bucket.num_seqs])
        if score and computed.x_td is not None:
            self._step.score(self.params, computed.x_td, computed.targets_t)
        return chosen

    def _run_copies(self, copies: Sequence[tuple[int, int]]) -> None:
        self.pool = self._copy_blocks(self.pool, *self._padded(copies))

    def _run_row_copies(self, copies: Sequence[tuple[int, int]]) -> None:
        self.state = self._copy_rows(self.state, *self._padded(copies))

    def _set_state(self, row: int, *arrays: np.ndarray) -> None:
        """Write one row of the sampling state; -1 is no row."""
        self.state = self._write_row(self.state, *jax.device_put((np.int32(row), *arrays), self.device))

    def _no_tokens(self) -> jax.Array:
        return jax.device_put(np.zeros(self.max_num_seqs, np.int32), self.device)

    def _padded(self, pairs: Sequence[tuple[int, int]]) -> tuple[jax.Array, jax.Array]:
        """Return sources and destinations, [C] int32 each, -1 past the pairs."""
        size = next(size for size in self.copy_sizes if size >= len(pairs))
        padded = np.full((2, size), -1, np.int32)
        padded[:, : len(pairs)] = np.asarray(pairs, np.int32).T
        return jax.device_put(tuple(padded), self.device)

    def _swap_there_and_back(self, count: int) -> list[jax.Array]:
        """Block 0, so many times over; it then holds what it held. Meant for a pool that nobody uses yet."""
        self.host.take_in(self.pool, [(0, i) for i in range(count)])
        self.pool = self.host.give_back(self.pool, [(i, 0) for i in range(count)])
        return self.pool

    def _fitting_blocks(self, llama: ModelConfig, dtype: str, utilization: float, bytes_per_block: int) -> int:
        """Return the number of blocks that fit beside the temporaries of the largest steps.

        The steps are compiled as the warm-up will need them. Sampling does not depend on the pool, and usually needs
        more memory than the model's part of a step. If it needs less, that part is compiled again for a smaller pool.
        """
        stats = self.device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return modest_blocks(self.table_width * self.max_num_seqs, bytes_per_block)
        fitting = functools.partial(
            fitting_blocks, limit=stats["bytes_limit"], in_use=stats["bytes_in_use"], utilization=utilization,
            bytes_per_block=bytes_per_block,
        )  # fmt: skip
        logger.info("compiling the largest steps, to measure the memory that they leave for the KV pool")
        swapping = 2 * TRANSFERS[-1] * bytes_per_block if self.num_host_blocks else 0
        beside = max(swapping, self.sampling_temporaries(llama.hidden_size, dtype))
        num_blocks = fitting(temporaries=beside)
        array = self._on_device(self.cache.shape(num_blocks), self.cache.dtype)
        inside = self.model_temporaries([array] * (2 * llama.num_hidden_layers))
        return num_blocks if inside <= beside else fitting(temporaries=inside)

    def model_temporaries(self, pool: list[jax.ShapeDtypeStruct]) -> int:
        """Return the bytes that the model's part of the largest steps needs beside parameters and pool."""
        lowered = []
        for bucket in (self.buckets.decode[-1], self.buckets.mixed[-1]):
            buffer = jax.device_put(self.layouts[bucket].empty()[0], self.device)
            lowered.append(self._step.forward.lower(self.params, pool, self.last_tokens, buffer, bucket))
        return _temporaries(lowered)

    def sampling_temporaries(self, hidden_size: int, dtype: str) -> int:
        """Return the bytes that the largest steps need for samples and prompt logprobs."""
        lowered = []
        for bucket in (self.buckets.decode[-1], self.buckets.mixed[-1]):
            x_sd = self._on_device((bucket.num_seqs, hidden_size), dtype)
            rows_sf = self._on_device((bucket.num_seqs, NUM_SCALARS + 4), "int32")
            bits = self._no_bits[bucket.num_seqs]
            lowered.append(self._step.choose.lower(self.params, self.state, self.last_tokens, x_sd, rows_sf, bits))
            if not bucket.decode:
                x_td = self._on_device((bucket.num_tokens, hidden_size), dtype)
                targets_t = self._on_device((bucket.num_tokens,), "int32")
                lowered.append(self._step.score.lower(self.params, x_td, targets_t))
        return _temporaries(lowered)

    def _on_device(self, shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(self.device))


def _temporaries(steps: Iterable[jax.stages.Lowered]) -> int:
    """Return the most bytes that one of several steps needs for temporaries, by XLA's own account."""
    analyses = [step.compile().memory_analysis() for step in steps]
    return max(analysis.temp_size_in_bytes for analysis in analyses if analysis)


def _usable(arrays: Iterable[jax.Array]) -> bool:
    """Return whether no array was donated, and none is the result of a computation that failed on the device."""
    try:
        for array in arrays:
            array.block_until_ready()
    except RuntimeError:  # jax.errors.JaxRuntimeError in both cases
        return False
    return True


def _state_row(admitted: Admitted, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a sequence's row of the sampling state. The last token of its output is counted by the step that takes it
    in."""
    params, length = admitted.params, admitted.num_prompt_tokens
    return host_row(
        vocab_size, admitted.token_ids[:length], admitted.token_ids[length:-1], params.logit_bias,
        params.allowed_token_ids, admitted.banned,
    )  # fmt: skip


def _seconds(run, repeats: int = 3) -> float:
    """The shortest of a few runs."""

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    return min(once() for _ in range(repeats))


def select_kernels(
    config: EngineConfig, model: ModelConfig, dtype: str, device: jax.Device, *, retest: bool = False
) -> Kernels:
    """Choose the kernels for a model on a device. On a GPU each op is tested first, or its earlier test remembered.

    Args:
        retest: ignore remembered tests.
    """
    return select(
        config.kernels, platform=device.platform, device_kind=device.device_kind,
        compute_capability=compute_capability(device), dtype=dtype, pool_dtype=config.pool_dtype(dtype),
        head_dim=model.head_dim,
        num_heads=model.num_attention_heads, num_kv_heads=model.num_key_value_heads, block_size=config.block_size,
        self_test=SelfTest.on(device, cache_folder() / "selftest", retest=retest),
    )  # fmt: skip


def compute_capability(device: jax.Device) -> float | None:
    """Return a GPU's compute capability, such as 9.0; None for other devices."""
    try:
        return float(getattr(device, "compute_capability", None))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None

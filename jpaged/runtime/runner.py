"""Device side of the engine: it starts the step of a plan, and returns the pending step."""

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jpaged.config import DTYPE_ALIASES, EngineConfig, Limits
from jpaged.core.commands import Command, Sleep, UpdateParams, WakeUp
from jpaged.core.plan import Done, StepPlan, StepResult
from jpaged.models.base import Model
from jpaged.models.moe import cost_of
from jpaged.models.outputs import outputs_of
from jpaged.models.quantized import is_quantized
from jpaged.progress import track
from jpaged.runtime.agreement import leaders_values, least
from jpaged.runtime.batch import Bucket, Buckets, ladder, make_batch
from jpaged.runtime.block_store import BlockStore
from jpaged.runtime.compilation_cache import cache_folder, compilation_cache
from jpaged.runtime.device_rows import DeviceRows
from jpaged.runtime.kernel_choice import select_kernels
from jpaged.runtime.kv_cache import KVCache
from jpaged.runtime.memory import available_memory, explain_exhaustion, given_num_blocks, pool_size
from jpaged.runtime.parameters import ParamTree, explain_deletion
from jpaged.runtime.pending import PendingStep
from jpaged.runtime.placement import Placement, devices_of
from jpaged.runtime.row_table import RowTable
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.shapes import Shapes
from jpaged.runtime.step import Computed, Step
from jpaged.runtime.step_costs import StepCosts, further_shapes, stored_costs
from jpaged.runtime.swap import TRANSFERS
from jpaged.runtime.tensor_parallel import divide_kernels
from pallas_kernels import Kernels

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runner of plans: call `warm_up`, unless the config leaves it out, then `dispatch` for each plan.

    Args:
        model: its arrays are used without a copy if they have the dtype and lie on the devices as `ParamTree.expected`
            says. The devices are those of its first parameter, or `config.tensor_parallel_size` of them.
        limits: the scheduler's limits.
        kernels: kernels chosen before the model was loaded; None: choose them now.
        allow_copy: as in `ParamTree`.

    Attributes:
        tree: the model's parameters by name.
        params: the parameters, in the order of `tree.expected`.
        step: the jitted functions of a step.
        shapes: the shapes of steps.
        rows: the rows of running sequences.
        blocks: the KV pool, and its moves.
        costs: costs of steps of the shapes that doubling gives; set by `warm_up`.
        pads: whether a step costs as much as its whole shape.
        params_version: number of parameter updates so far.
    """

    def __init__(
        self, model: Model, config: EngineConfig, limits: Limits, kernels: Kernels | None = None,
        *, allow_copy: bool = True,
    ):  # fmt: skip
        llama, wanted = model.config, None if config.dtype == "auto" else DTYPE_ALIASES.get(config.dtype, config.dtype)
        devices = devices_of(jax.tree.leaves(nnx.state(model, nnx.Param)))
        self.placement = Placement.on(devices[: config.tensor_parallel_size], llama)
        self.tree = ParamTree(model, self.placement, dtype=wanted, allow_copy=allow_copy)
        outputs = outputs_of(self.tree.merge, [*self.tree.expected.values(), *self.tree.carried.values()], llama)
        dtype = outputs.attention_dtype
        if wanted not in (None, dtype):
            raise ValueError(
                f"dtype: the module computes queries, keys and values in {dtype} even if its parameters are {wanted}: "
                "let its layers compute in the dtype of their parameters (dtype=None)"
            )
        self.params = self.tree.place(model)
        self.params_version = 0
        self._on_host: list[jax.Array] = []  # the parameters of a sleeping runner
        quantized, stored = is_quantized(model), sorted({str(leaf.dtype) for leaf in self.tree.expected.values()})
        self.vocab_size = llama.vocab_size
        self.kernels = kernels or select_kernels(config, llama, limits.block_size, dtype, self.placement)
        logger.info("attention kernels: %s (%s)", self.kernels.name, self.kernels.reason)
        if cost := cost_of(llama, limits.max_num_batched_tokens):
            logger.warning("mixture of experts: %s (max_num_batched_tokens shortens steps)", cost)
        divided = divide_kernels(self.kernels, self.placement)
        cache = KVCache.of(
            llama, limits.block_size, config.pool_dtype(dtype), divided, model.attention_specs, attention_dtype=dtype
        )
        block_bytes = cache.block_bytes // self.placement.kv_size  # on each device
        self.costs: StepCosts = {}
        first, devices = self.placement.device, self.placement.local_devices
        processes = (self.placement.num_processes,) if self.placement.num_processes > 1 else ()
        device = first.platform, first.device_kind, self.placement.size, os.cpu_count(), *processes
        kind = f"{type(model).__module__}.{type(model).__qualname__}"  # modules of one config may differ
        described = kind, llama, dtype, stored, limits, self.kernels.name, cache.dtype
        self._costs_key = repr((jax.__version__, device, *described))
        given = given_num_blocks(config, block_bytes, available_memory(devices))
        table_width = -(-limits.max_model_len // limits.block_size)
        self.shapes = Shapes(Buckets(limits), table_width, llama.vocab_size, self.placement, cache.make_work)
        self._late = set() if config.warm_up else set(self.shapes.buckets.all)  # compiled when first needed
        multiply = self.kernels.product if self.placement.size == 1 else None
        self.pads = multiply is None or quantized  # XLA multiplies weights of 8 bits
        self.step = Step(
            self.tree.graphdef, self.tree.treedef, cache, self.shapes.layouts, self.placement,
            max_logprobs=limits.max_logprobs, processed_logprobs=config.logprobs_mode == "processed_logprobs",
            multiply=multiply, has_quantized_weights=quantized,
        )  # fmt: skip
        copy_sizes = ladder(8, max(8, limits.max_num_seqs), 4)
        table = RowTable(limits.max_num_seqs, table_width, limits.block_size)
        self.rows = DeviceRows(table, llama.vocab_size, copy_sizes, self.placement)
        most = limits.max_num_seqs * table_width
        num_host_blocks = min(int(config.swap_space * 2**30 // (block_bytes * len(devices))), most)
        num_blocks = given or pool_size(
            devices, wanted=most, utilization=config.gpu_memory_utilization, block_bytes=block_bytes,
            agree=lambda num_blocks: least(num_blocks, self.placement),
            sampling=lambda: max(
                2 * TRANSFERS[-1] * block_bytes if num_host_blocks else 0,
                self.shapes.sampling_temporaries(
                    self.step, self._leaves, self.rows.state, self.rows.last_tokens, outputs.hidden_size,
                    outputs.hidden_dtype,
                ),
            ),
            model=lambda num_blocks: self.shapes.model_temporaries(
                self.step, self._leaves,
                [self.shapes.on_devices(cache.shape(num_blocks), cache.dtype, self.placement.pool)]
                * (2 * cache.num_layers),
                self.rows.last_tokens,
            ),
        )  # fmt: skip
        sized = "kv_cache_memory_bytes" if config.kv_cache_memory_bytes else "num_gpu_blocks_override"
        measured = not given and first.platform != "cpu"
        size = f"{num_blocks * block_bytes / 2**30:.2f} GiB" + " on each device" * (len(devices) > 1)
        self._exhaustion = functools.partial(
            explain_exhaustion, "gpu_memory_utilization" if measured else sized,
            f"{num_blocks} blocks ({size})",
        )  # fmt: skip
        with self._exhaustion():
            self.blocks = BlockStore(cache, num_blocks, num_host_blocks, copy_sizes, self.placement)
        logger.info("KV pool: %d blocks of %d tokens (%s, %s)", num_blocks, limits.block_size, size, cache.dtype)

    def warm_up(self, *, progress: bool = True) -> None:
        """Compile every executable, or load it from jax's cache on disk, by running it on padding.

        Then the costs of steps are measured, unless they are stored, and worthwhile shapes are added.

        Args:
            progress: show a progress bar on stderr instead of lines in the log.

        Raises:
            ValueError: a step needs more memory than the pool leaves.
        """
        start = time.monotonic()
        ladders = self.shapes.buckets.all
        with self._exhaustion():
            self._compile(ladders, progress=progress)
            self.blocks.warm_up()
            self.rows.warm_up()
            jax.block_until_ready((self.blocks.pool, self.rows.state, self.rows.last_tokens))
            self.costs = stored_costs(
                cache_folder() / "step_costs", self._costs_key, ladders,
                lambda bucket: _seconds(lambda: self._run_padding(bucket)),
                lambda seconds: leaders_values(seconds, self.placement),
            )  # fmt: skip
            if self.pads and (further := further_shapes(self.costs)):
                self.shapes.add(further)
                self._compile(list(further), progress=progress)
        logger.info("compiled in %.1f seconds", time.monotonic() - start)

    def block_swap_cost(self) -> float:
        """Return the number of tokens that could be computed while one block moves to the host and back.

        `warm_up` must have run.
        """
        bucket, size = self.shapes.buckets.mixed[-1], TRANSFERS[-1]
        block = _seconds(lambda: self.blocks.swap_round_trip(size))
        return (block / size) / (self.costs[bucket] / bucket.num_tokens)

    def dispatch(self, plan: StepPlan, make_masks: Callable[[], np.ndarray] | None = None) -> PendingStep | Done:
        """Start a step: blocks to the host, block copies, blocks from the host, changes of rows, then the tokens.

        Plans are dispatched in the order in which they were scheduled. The call does not wait for the device.

        Args:
            make_masks: return the masks of the plan's masked rows, [M, ceil(V / 32)] uint32; called once the model's
                part of the step is dispatched.

        Raises:
            ParamsDeleted: the arrays of the parameters were deleted.
        """
        with explain_deletion(self._leaves):
            return self._dispatch(plan, make_masks)

    def check(self, command: UpdateParams) -> None:
        """Check a command that is to run later.

        Raises:
            ValueError: `control` would reject it; the message has the first difference of the parameters.
        """
        self.tree.check(command.source, self.params or self._on_host)

    def control(self, command: Command) -> None:
        """Run `Sleep`, `WakeUp` or `UpdateParams` between two steps. Nothing is compiled.

        The sampler's state is dropped and allocated with the pool. Only arrays that lie elsewhere, arrays that are cast
        and those of fused layers are copied.

        Raises:
            ValueError: the parameters do not match, or there are none to take back; nothing is changed.
        """
        match command:
            case UpdateParams(source):
                self.params, self._on_host = self.tree.place(source, self.params or self._on_host), []
                self.params_version += 1
            case Sleep(level):
                if level == 1 and self.params:
                    shardings = [array.sharding.with_memory_kind("pinned_host") for array in self.params]
                    self._on_host = jax.block_until_ready(jax.device_put(self.params, shardings))
                elif level == 2:
                    self._on_host = []
                self.params = []
                self.blocks.drop()
                self.rows.drop()
            case WakeUp(tags):
                if "weights" in tags and not self.params:
                    if not self._on_host:
                        raise ValueError(
                            "wake_up: the parameters were dropped (level 2); pass new ones to update_params"
                        )
                    shardings = [leaf.sharding for leaf in self.tree.expected.values()]
                    self.params, self._on_host = jax.device_put(self._on_host, shardings), []
                if "kv_cache" in tags:
                    with self._exhaustion():
                        self.recover()

    def recover(self) -> None:
        """Allocate the KV pool and the rows again, empty, if a failed step has lost them.

        The blocks on the host are dropped. An error of the allocation is passed on; the call can then be repeated.
        """
        self.blocks.recover()
        self.rows.recover()

    @property
    def _leaves(self) -> list[jax.Array]:
        """The arrays of the model in a step."""
        return [*self.params, *self.tree.carried.values()]

    def _dispatch(self, plan: StepPlan, make_masks: Callable[[], np.ndarray] | None) -> PendingStep | Done:
        self.blocks.apply(plan)
        self.rows.apply(plan)
        if not plan.rows:
            return Done(StepResult(()))
        shapes, table = self.shapes, self.rows.table
        made = make_batch(plan, table, shapes.buckets, shapes.layouts)
        if made.bucket in self._late:
            with compilation_cache(), self._exhaustion():
                self._compile([made.bucket], progress=False)
            self._late.remove(made.bucket)
        computed = self._forward(self.placement.put(made.buffer), made.bucket)
        bits = shapes.no_bits[made.bucket.num_seqs]
        if make_masks is not None:
            masks = np.zeros(bits.shape, np.uint32)
            masks[np.flatnonzero(made.mask_of >= 0)] = make_masks()[made.mask_of[made.mask_of >= 0]]
            # Commit the masks to the device like the all-zero ones. Uncommitted ones would need a second executable.
            bits = self.placement.put(masks)
        chosen, listed = self._choose(computed, bits, self.step.settings_for(made.settings))
        prompt, targets = None, made.batch.targets
        if computed.x_td is not None and (targets >= 0).any():
            prompt = self.step.score(self._leaves, computed.x_td, computed.targets_t)
        prompt_top = [table.prompt_top[row] for row, *_ in plan.rows] if prompt else []
        late = computed.x_sd if self.placement.device.platform == "cpu" else None
        return PendingStep(
            plan, chosen, listed, made.num_top, prompt, targets, prompt_top, version=self.params_version, late=late
        )

    def _forward(self, buffer: jax.Array, bucket: Bucket) -> Computed:
        """Dispatch the model's part of a step."""
        computed: Computed
        blocks = self.blocks
        computed, blocks.pool = self.step.forward(self._leaves, blocks.pool, self.rows.last_tokens, buffer, bucket)
        return computed

    def _choose(self, computed: Computed, bits: jax.Array, settings: Settings) -> tuple[jax.Array, jax.Array]:
        """Dispatch the sampling of a step, and return the chosen tokens and the lists."""
        rows = self.rows
        chosen, listed, rows.state, rows.last_tokens = self.step.choose(
            self._leaves, rows.state, rows.last_tokens, computed.x_sd, computed.rows_sf, bits, settings
        )
        return chosen, listed

    def _compile(self, buckets: Sequence[Bucket], *, progress: bool) -> None:
        logger.info("compiling %d shapes of a step, or loading them", len(buckets))
        for bucket in track(buckets, len(buckets), "compiled", "shape", bar=progress):
            self._run_padding(bucket, everything=True)

    def _run_padding(self, bucket: Bucket, *, everything: bool = False) -> jax.Array:
        """Run a step of padding with the simplest sampling, or with every sampling and the scores of prompts."""
        computed = self._forward(self.shapes.padding(bucket), bucket)
        for settings in self.step.settings if everything else self.step.settings[:1]:
            chosen, _ = self._choose(computed, self.shapes.no_bits[bucket.num_seqs], settings)
        if everything and computed.x_td is not None:
            self.step.score(self._leaves, computed.x_td, computed.targets_t)
        return chosen


def _seconds(run: Callable[[], Any], repeats: int = 3) -> float:
    """Return the time of the shortest of a few runs."""

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    return min(once() for _ in range(repeats))

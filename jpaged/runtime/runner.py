"""Device side of the engine: it starts the step of a plan, and returns the pending step."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jpaged.config import Limits
from jpaged.core.commands import Command, LoadAdapter, Sleep, UnloadAdapter, UpdateParams, WakeUp
from jpaged.core.disk_tier import Files
from jpaged.core.plan import Done, StepPlan, StepResult
from jpaged.models.adapters import Slots, SlotsForm
from jpaged.models.base import Model
from jpaged.models.config import ModelConfig
from jpaged.models.outputs import Outputs, outputs_of
from jpaged.models.quantized import is_quantized
from jpaged.progress import track
from jpaged.runtime.adapter_store import AdapterStore
from jpaged.runtime.background import Background
from jpaged.runtime.batch import Bucket, Buckets, Shapes, has_adapters, ladder, make_batch
from jpaged.runtime.block_store import BlockStore
from jpaged.runtime.compilation_cache import compilation_cache
from jpaged.runtime.device_rows import DeviceRows
from jpaged.runtime.identity import hash_arrays, numerics_of
from jpaged.runtime.kv_cache import KVCache
from jpaged.runtime.lowering import Lowering
from jpaged.runtime.parameters import ParamTree, explain_deletion
from jpaged.runtime.pending import PendingStep
from jpaged.runtime.placement import Placement, form_of
from jpaged.runtime.row_table import RowTable
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.step import Computed, Step
from jpaged.runtime.step_watch import StepWatch
from jpaged.runtime.tensor_parallel import divide_kernels
from pallas_kernels import Kernels

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runner of plans: once `blocks` has a pool, call `dispatch` for each plan.

    Args:
        model: its arrays are used without a copy if they lie as `ParamTree.expected` says.
        choose_kernels: return the kernels for a dtype of queries, keys and values.
        pool_dtype: return the dtype of the KV pool for a dtype of keys.
        dtype, allow_copy: as in `ParamTree`.
        processed_logprobs: as in `Step`.
        adapter_slots: return the form of the slots of adapters for a dtype of activations; None: there are none.

    Attributes:
        kind: name of the module's class; modules of one config may differ.
        tree: the model's parameters by name.
        params: the parameters, in the order of `tree.expected`.
        outputs: the dtypes and the size that the model computes.
        step: the jitted functions of a step.
        shapes: the shapes of steps.
        rows: the rows of running sequences.
        blocks: the KV pool, and its moves.
        adapters: the adapters, and their slots.
        late: shapes that are compiled when they are first needed.
        watch: compares the steps with their measured costs; None: there are none.
        background: compiles further shapes; None: all are compiled, or late.
        pads: whether a step costs as much as its whole shape.
        params_version: number of parameter updates so far.
        numerics: by name, the versions, dtypes, kernels and sizes that the bits of an output depend on.

    Raises:
        ValueError: the module does not compute what its config says, or parameters would be copied.
        NotImplementedError: the device does not have the requested kernels.
    """

    def __init__(
        self, model: Model, placement: Placement, limits: Limits, choose_kernels: Callable[[str], Kernels],
        pool_dtype: Callable[[str], str], *, dtype: str | None = None, processed_logprobs: bool = False,
        allow_copy: bool = True, adapter_slots: Callable[..., SlotsForm] | None = None,
    ):  # fmt: skip
        self.config, self.placement, quantized = model.config, placement, is_quantized(model)
        self.vocab_size = self.config.vocab_size
        self.kind = f"{type(model).__module__}.{type(model).__qualname__}"
        self.tree = ParamTree(model, placement, dtype=dtype, allow_copy=allow_copy)
        self.outputs = _outputs(self.tree, self.config, dtype)
        self.params, self.params_version = self.tree.place(model), 0
        self._on_host: list[jax.Array] = []  # the parameters of a sleeping runner
        self._fingerprint: tuple[int, str] | None = None  # with the version of the parameters
        self.kernels = kernels = choose_kernels(self.outputs.attention_dtype)
        logger.info("attention kernels: %s (%s)", kernels.name, kernels.reason)
        cache = KVCache.of(
            self.config, limits.block_size, pool_dtype(self.outputs.attention_dtype),
            divide_kernels(kernels, placement), model.attention_specs,
            max_model_len=limits.max_model_len, attention_dtype=self.outputs.attention_dtype,
        )  # fmt: skip
        windows, num_groups, has_states = cache.groups.windows, len(cache.groups.windows), bool(cache.states.layers)
        if has_states and placement.size > 1:
            raise NotImplementedError("tensor_parallel_size: models with recurrent layers run on one device")
        if adapter_slots is not None and placement.mesh.is_multi_process:
            raise NotImplementedError("enable_lora: adapters are not served by several hosts that share a model")
        slots = adapter_slots and adapter_slots(self.outputs.attention_dtype)
        self.adapters = AdapterStore(slots, placement)
        multiplies = placement.size == 1 and kernels.multiplies
        self.pads = not (multiplies and kernels.skips_rows)
        buckets = Buckets(limits, padded=self.pads, least=kernels.implementation.least_rows if multiplies else 1)
        width = limits.blocks_per_seq
        self.shapes = Shapes(
            buckets, width, self.vocab_size, placement, cache.make_work, windows=windows, block_size=limits.block_size,
            has_states=has_states, has_adapters=slots is not None,
        )  # fmt: skip
        self.step = Step(
            self.tree.graphdef, self.tree.treedef, cache, self.shapes.layouts, placement,
            max_logprobs=limits.max_logprobs, processed_logprobs=processed_logprobs,
            kernels=kernels if multiplies else None, adapters=slots, has_quantized_weights=quantized,
        )  # fmt: skip
        copy_sizes, most_copies = ladder(8, max(8, limits.max_num_seqs), 4), limits.max_num_seqs * num_groups
        table = RowTable(limits.max_num_seqs, width, limits.block_size, num_groups)
        self.rows = DeviceRows(table, self.vocab_size, copy_sizes, placement)
        self.blocks, self.late = BlockStore(cache, ladder(8, max(8, most_copies), 4), placement), set[Bucket]()
        self.background: Background | None = None
        self.watch: StepWatch | None = None
        self.numerics = numerics_of(self.kind, self.tree.expected, kernels, cache, placement) | {
            "logprobs_mode": "processed_logprobs" if processed_logprobs else "raw_logprobs",
            **({} if slots is None else {"lora_dtype": slots.dtype}),
        }

    def dispatch(self, plan: StepPlan, make_masks: Callable[[], np.ndarray] | None = None) -> PendingStep | Done:
        """Start a step: blocks to the host, block copies, blocks from the host, changes of rows, then the tokens.

        Plans are dispatched in the order in which they were scheduled. The call does not wait for the device.

        Args:
            make_masks: return the masks of the plan's masked rows, [M, ceil(V / 32)] uint32; called once the model's
                part of the step is dispatched.

        Raises:
            ParamsDeleted: the arrays of the parameters were deleted.
        """
        with explain_deletion(self.leaves):
            return self._dispatch(plan, make_masks)

    def check(self, command: UpdateParams | LoadAdapter) -> None:
        """Check a command that is to run later.

        Raises:
            ValueError: `control` would reject it; the message has the first difference of the parameters.
        """
        if isinstance(command, LoadAdapter):
            self.adapters.check(command)
        else:
            self.tree.check(command.source, self.params or self._on_host)

    def control(self, command: Command) -> None:
        """Run a command on parameters, memory or adapters between two steps. Nothing is compiled.

        The sampler's state is dropped and allocated with the pool. Only arrays that lie elsewhere, arrays that are cast
        and those of fused layers are copied.

        Raises:
            ValueError: the parameters do not match, or there are none to take back; nothing is changed.
        """
        match command:
            case LoadAdapter():
                self.adapters.load(command)
            case UnloadAdapter(number=number):
                self.adapters.unload(number)
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
                    with self.blocks.exhaustion():
                        self.recover()

    def recover(self) -> None:
        """Allocate the KV pool and the rows again, empty, if a failed step has lost them.

        The blocks on the host are dropped. An error of the allocation is passed on; the call can then be repeated.
        """
        self.blocks.recover()
        self.rows.recover()
        self.adapters.recover()

    def fingerprint(self, adapter: int | None = None) -> str | None:
        """Return the hash of the model's config and present arrays, or None without parameters.

        That of an adapter follows it. It is computed once after each update.

        Raises:
            ParamsDeleted: the arrays of the parameters were deleted.
        """
        params = self.params or self._on_host
        if not params:
            return None
        if self._fingerprint is None or self._fingerprint[0] != self.params_version:
            with explain_deletion(params):
                arrays = dict(zip(self.tree.expected, params, strict=True)) | self.tree.carried
                self._fingerprint = self.params_version, hash_arrays(repr(self.config), arrays)
        fingerprint = self._fingerprint[1]
        return fingerprint if adapter is None else f"{fingerprint}+{self.adapters.fingerprint(adapter)}"

    def open_files(self, root: Path, limit: int, *, exact: bool) -> tuple[list[str], int]:
        """Keep files of blocks in a folder, as `BlockStore.open_files` does, for the present parameters."""
        return self.blocks.open_files(root, repr((self.fingerprint(), self.numerics, exact)), limit)

    def fetch(self, wanted: Files) -> list[bool]:
        """Read the content of blocks from files, for the next plan; return whether each is there."""
        return self.blocks.fetch(wanted)

    def save(self, written: Files, deleted: Sequence[str]) -> None:
        """Write blocks on the host to files, and delete other files."""
        self.blocks.save(written, deleted)

    def close_files(self, written: Files = ()) -> None:
        """Write the last blocks, of the pool, to files, and keep no further ones."""
        if self.blocks.files is not None:
            self.blocks.save_blocks(written)
            self.blocks.files.close()
            self.blocks.files = None

    @property
    def leaves(self) -> list[jax.Array]:
        """The arrays of the model in a step."""
        return [*self.params, *self.tree.carried.values()]

    def _dispatch(self, plan: StepPlan, make_masks: Callable[[], np.ndarray] | None) -> PendingStep | Done:
        self.blocks.apply(plan)
        self.rows.apply(plan)
        self.adapters.apply(plan)
        if not plan.rows:
            return Done(StepResult(()))
        shapes, table = self.shapes, self.rows.table
        made = make_batch(plan, table, shapes.buckets, shapes.layouts)
        if made.bucket in self.late:
            with compilation_cache(), self.blocks.exhaustion():
                self.compile([made.bucket], progress=False)
            self.late.remove(made.bucket)
        end = self.watch.begin(made.bucket, int(made.batch.num_tokens)) if self.watch else None
        slots = self.adapters.slots if has_adapters(made.batch) else None
        computed = self._forward(self.placement.put(made.buffer), made.bucket, slots)
        bits = shapes.no_bits[made.bucket.num_seqs]
        if make_masks is not None:
            masks = np.zeros(bits.shape, np.uint32)
            masks[np.flatnonzero(made.mask_of >= 0)] = make_masks()[made.mask_of[made.mask_of >= 0]]
            # Commit the masks to the device like the all-zero ones. Uncommitted ones would need a second executable.
            bits = self.placement.put(masks)
        chosen, listed = self._choose(computed, bits, self.step.settings_for(made.settings))
        kept, (x_sd, rows_sf, *_) = None, computed
        if made.keeps.any():
            kept = self.step.keep(self.leaves, self.rows.state, x_sd, rows_sf, bits, chosen), made.keeps
        prompt, targets = None, made.batch.targets
        if computed.x_td is not None and (targets >= 0).any():
            prompt = self.step.score(self.leaves, computed.x_td, computed.targets_t)
        prompt_top = [table.prompt_top[row] for row, *_ in plan.rows] if prompt else []
        pooled = (computed.x_sd, made.pools) if made.pools.any() else None
        summed = None
        if computed.x_td is not None and table.sums.any():  # few requests want sums
            wanted = [index for index, (row, *_) in enumerate(plan.rows) if table.sums[row]]
            summed = (computed.x_td, wanted) if wanted else None
        late = computed.x_sd if self.placement.device.platform == "cpu" else None
        return PendingStep(
            plan, chosen, listed, made.num_top, prompt, targets, prompt_top, version=self.params_version, late=late,
            end=end, kept=kept, pooled=pooled, summed=summed,
        )  # fmt: skip

    def _forward(self, buffer: jax.Array, bucket: Bucket, slots: Slots | None = None) -> Computed:
        """Dispatch the model's part of a step, with the slots of adapters if a row has one."""
        computed: Computed
        blocks = self.blocks
        computed, blocks.pool = self.step.forward(
            self.leaves, blocks.pool, self.rows.last_tokens, buffer, bucket, slots
        )
        return computed

    def _choose(self, computed: Computed, bits: jax.Array, settings: Settings) -> tuple[jax.Array, jax.Array]:
        """Dispatch the sampling of a step, and return the chosen tokens and the lists."""
        rows = self.rows
        chosen, listed, rows.state, rows.last_tokens = self.step.choose(
            self.leaves, rows.state, rows.last_tokens, computed.x_sd, computed.rows_sf, bits, settings
        )
        return chosen, listed

    def compile(self, buckets: Sequence[Bucket], *, progress: bool) -> None:
        """Compile shapes of steps, or load them from jax's cache on disk, by running them on padding.

        `progress`: show a progress bar on stderr instead of lines in the log.
        """
        logger.info("compiling or loading steps of %d shape%s", len(buckets), "s" * (len(buckets) != 1))
        for bucket in track(buckets, len(buckets), "compiled", "shape", bar=progress):
            self.run_padding(bucket, everything=True)

    def compile_later(self, buckets: Sequence[Bucket]) -> None:
        """Compile further shapes and swaps in the background. Steps have each shape as soon as it is compiled."""
        lowering, shapes, sizes = self.lowering(), self.shapes, (self.blocks.num_blocks, self.blocks.num_pages)
        swaps = self.blocks.lowered_swaps()

        def compile_shape(bucket: Bucket) -> None:
            for lowered in lowering.all(bucket, *sizes):
                lowered.compile()
            shapes.add([bucket])

        def compile_swaps() -> None:
            for lowered in swaps:
                lowered.compile()

        self.background = Background(self, [*(partial(compile_shape, bucket) for bucket in buckets), compile_swaps])

    def run_padding(
        self, bucket: Bucket, num_tokens: int = 1, *, context: int = 0, everything: bool = False
    ) -> jax.Array:
        """Run a step of padding with the simplest sampling, or with every sampling and the scores of prompts.

        Args:
            num_tokens: number of tokens to compute, where a step costs less than its whole shape.
            context: tokens that these attend to, as decode tokens of one sequence.
        """
        count = None if self.pads and not context else num_tokens
        computed = self._forward(self.shapes.padding(bucket, count, context=context), bucket)
        for settings in self.step.settings if everything else self.step.settings[:1]:
            chosen, _ = self._choose(computed, self.shapes.no_bits[bucket.num_seqs], settings)
        if everything and self.adapters.slots is not None:
            self._forward(self.shapes.padding(bucket, None if self.pads else num_tokens), bucket, self.adapters.slots)
        if everything and computed.x_td is not None:
            self.step.score(self.leaves, computed.x_td, computed.targets_t)
        return chosen

    def lowering(self) -> Lowering:
        """Return the functions of a step with the forms of this runner's arrays; it must be awake."""
        leaves, state, last_tokens = jax.tree.map(form_of, (self.leaves, self.rows.state, self.rows.last_tokens))
        hidden = self.outputs.hidden_size, self.outputs.hidden_dtype
        parts = self.step, self.shapes, self.blocks.cache, self.placement
        slots = None if self.adapters.slots is None else jax.tree.map(form_of, self.adapters.slots)
        return Lowering(*parts, leaves, state, last_tokens, hidden, slots)


def _outputs(tree: ParamTree, config: ModelConfig, dtype: str | None) -> Outputs:
    """Return the dtypes and the size of a module's outputs; ValueError if its config or `dtype` differ."""
    outputs = outputs_of(tree.merge, [*tree.expected.values(), *tree.carried.values()], config)
    if dtype not in (None, outputs.attention_dtype):
        raise ValueError(
            f"dtype: the module computes queries, keys and values in {outputs.attention_dtype} even if its parameters "
            f"are {dtype}: let its layers compute in the dtype of their parameters (dtype=None)"
        )
    return outputs

"""Loading of a model onto devices, for a trainer, or with all that an engine needs."""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jpaged.config import EngineConfig
from jpaged.core.block_pool import BlockPool
from jpaged.core.draft_costs import DraftModelLimits
from jpaged.core.scheduler import HEADROOM, Scheduler
from jpaged.engine.draft_model import DraftModel
from jpaged.engine.engine import Engine, Runner
from jpaged.engine.event_messages import EventMessages
from jpaged.kv_events import KVEvents
from jpaged.models.adapters import SlotsForm, slots_form
from jpaged.models.base import Model, Place
from jpaged.models.checkpoint import Form, dummy_model, load_safetensors, on_one_device, takes_all
from jpaged.models.config import ModelConfig
from jpaged.models.fused import fuse
from jpaged.models.gguf_checkpoint import load_gguf
from jpaged.models.moe import cost_of
from jpaged.models.orbax_checkpoint import ORBAX, load_orbax
from jpaged.models.quantized import Takes, described, has_groups, takes_int8_rows
from jpaged.runtime.compilation_cache import compilation_cache, every_process_writes
from jpaged.runtime.placement import Placement
from jpaged.runtime.runner import ModelRunner
from jpaged.start.adapter import adapter_command
from jpaged.start.measure import Measured, measure
from jpaged.start.pool import check_pool
from jpaged.start.setup import (
    Setup,
    choose_devices,
    find_model,
    prepare,
    prepare_module,
    resolve_checkpoint,
    select_kernels,
)
from jpaged.tokenizer import backend
from pallas_kernels import Kernels, has_products, takes_weight

if TYPE_CHECKING:
    from jpaged.engine.event_publisher import EventPublisher

logger = logging.getLogger(__name__)

FUSING = ("gpu", "cuda")  # platforms on which fewer products take less time


class Loaded(NamedTuple):
    """Engine with its Hugging Face tokenizer (None if there is none) and default sampling parameters."""

    engine: Engine
    tokenizer: Any
    sampling_defaults: dict[str, Any]


def load_engine(
    config: EngineConfig, *, model: Model | None = None, tokenizer: Any = None, progress: bool = True,
    allow_copy: bool = True,
) -> Loaded:  # fmt: skip
    """Return an engine that is ready to step, with its tokenizer and sampling defaults.

    Args:
        model: a loaded module, and `config.model` is only a name. Its arrays are used without a copy if they lie as the
            engine's and `config.dtype` is "auto" or theirs; else a line in the log has the bytes of the copy.
        tokenizer: a Hugging Face tokenizer or a `tokenizers.Tokenizer`, or the name of a directory or hub id, instead
            of the model's own.
        allow_copy: False: raise an error where parameters would be copied, now and in `Engine.update_params`, or would
            lie whole on each of several devices.
    """
    setup = prepare(config, tokenizer=tokenizer) if model is None else prepare_module(config, model, tokenizer)
    engine = start_engine(setup, model=model, progress=progress, allow_copy=allow_copy)
    return Loaded(engine, setup.tokenizer, setup.sampling_defaults)


def start_engine(
    setup: Setup, *, model: Model | None = None, progress: bool = True,
    lead: Callable[[ModelRunner], Runner] | None = None, allow_copy: bool = True, rank: int = 0,
) -> Engine:  # fmt: skip
    """Load the parameters, compile or load the executables, and return an engine that is ready to step.

    Args:
        model: the module of `prepare_module`; None: load the checkpoint.
        lead: return the engine's runner, which drives this one and those of other processes.
        allow_copy: as in `load_engine`.
        rank: number of the engine among several, for the addresses of its events.
    """
    resolved, inner = setup.resolved, backend(setup.tokenizer) if setup.tokenizer is not None else None
    model = model or load_checkpoint(setup, progress=progress)
    with compilation_cache(), every_process_writes():
        runner = place(model, setup, allow_copy=allow_copy)
        draft_model, limits = None, None
        if setup.draft_model is not None:
            draft_model, limits = _start_draft_model(setup.draft_model, runner, progress=progress)
        measured = measure(runner, resolved, progress=progress)
    events = _event_publisher(setup, measured, rank)
    scheduler = _scheduler_of(setup, measured, limits)
    files = _open_files(setup, runner, scheduler, measured.token_s) if resolved.config.kv_cache_dir else None
    max_in_flight = 2 if resolved.config.async_scheduling else 1
    engine = Engine(
        scheduler, lead(runner) if lead else runner, inner, seed=resolved.config.seed, max_in_flight=max_in_flight,
        draft_model=draft_model, files=files, events=events,
    )  # fmt: skip
    for name, directory in (resolved.config.lora_modules or {}).items():
        engine.control(adapter_command(runner, name, directory))
    return engine


def _start_draft_model(setup: Setup, beside: ModelRunner, *, progress: bool) -> tuple[DraftModel, DraftModelLimits]:
    """Return a draft model that is ready to step, and its limits.

    Args:
        beside: the runner of the model, which has no pool yet. The pools share the memory so that both have room for
            equally many tokens.
    """
    resolved, config = setup.resolved, setup.resolved.config
    runner = place(load_checkpoint(setup, progress=progress), setup)
    measured = measure(runner, resolved, beside=beside.blocks.block_bytes, progress=progress)
    scheduler = _scheduler_of(setup, measured)
    engine = Engine(scheduler, runner, max_in_flight=2 if config.async_scheduling else 1)
    return DraftModel(engine), DraftModelLimits(scheduler.capacity.max_sequence_len(), measured.decode_costs)


def _scheduler_of(setup: Setup, measured: Measured, draft_model: DraftModelLimits | None = None) -> Scheduler:
    config, limits, size = setup.resolved.config, setup.resolved.limits, setup.resolved.limits.block_size
    eos = eos_token_ids(setup.resolved.model, setup.tokenizer)
    make = partial(BlockPool, block_size=size, windows=measured.windows, reach=limits.max_tokens_in_flight)
    pool = make(measured.num_blocks, num_pages=measured.num_pages, enable_prefix_caching=config.enable_prefix_caching)
    host_pool = None
    if measured.num_host_blocks:
        copies_of = pool if config.enable_prefix_caching else None
        host_pool = make(
            measured.num_host_blocks,
            num_pages=measured.num_host_pages,
            enable_prefix_caching=False,
            copies_of=copies_of,
        )
    return Scheduler(
        pool, limits, vocab_size=setup.resolved.model.vocab_size, eos_token_ids=eos, host_pool=host_pool,
        policy=config.scheduling_policy, preemption=config.preemption_mode, block_swap_cost=measured.block_swap_cost,
        page_swap_cost=measured.page_swap_cost,
        tokens_beside_decodes=measured.tokens_beside_decodes, step_overhead=measured.step_overhead, headroom=HEADROOM,
        decode_costs=measured.decode_costs, draft_model=draft_model,
        num_adapters=_num_adapters(config), pinned_share=config.pinned_share,
        moves_overlap=setup.resolved.device.platform != "cpu",
    )  # fmt: skip


def _open_files(setup: Setup, runner: ModelRunner, scheduler: Scheduler, token_s: float) -> ModelRunner | None:
    """Let a scheduler keep evicted blocks in files of a runner, too; None if that is not worthwhile.

    Raises:
        ValueError: the folder can't be used.
    """
    config, tier = setup.resolved.config, scheduler.memory.tier
    if tier is None or not tier.is_worthwhile:
        logger.warning("kv_cache_dir: not used, because moving a block takes longer than computing its tokens")
        return None
    try:
        limit = int(config.kv_cache_dir_size * 2**30)
        names, most = runner.open_files(Path(str(config.kv_cache_dir)), limit, exact=setup.resolved.limits.exact)
    except OSError as error:
        raise ValueError(f"kv_cache_dir: {error}") from error
    tier.open_files(names, most, token_s)
    logger.info("kv_cache_dir: %d files of blocks, of at most %d", len(names), most)
    return runner


def _event_publisher(setup: Setup, measured: Measured, rank: int) -> "EventPublisher | None":
    """Return the publisher of `kv_events_config`; None if there is none.

    Raises:
        ValueError: an address can't be used.
    """
    given = setup.resolved.config.kv_events_config
    if not given or (settings := KVEvents.of(given)) is None:
        return None
    # Loading ZeroMQ takes a while, and few engines need it.
    from jpaged.engine.event_publisher import EventPublisher

    return EventPublisher(settings, EventMessages(setup.resolved.limits.block_size, measured.windows), rank)


def _num_adapters(config: EngineConfig) -> int:
    """Return the number of slots for adapters."""
    return config.max_loras if config.enable_lora or config.lora_modules else 0


def start_follower(setup: Setup, *, progress: bool = True) -> ModelRunner:
    """Return a runner that is ready for the plans of another process, which calls `start_engine`.

    All processes that share the devices run these programs, in this order.
    """
    model = load_checkpoint(setup, progress=progress)
    with compilation_cache(), every_process_writes():
        runner = place(model, setup)
        measure(runner, setup.resolved, progress=progress)
    return runner


def eos_token_ids(model: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a text: those of the model's files and that of the tokenizer.

    Fine-tuned models often end their answers with a token that only their tokenizer names.
    """
    token = getattr(tokenizer, "eos_token_id", None)
    if not isinstance(token, int) or not 0 <= token < model.vocab_size:
        return model.eos_token_ids
    return tuple(dict.fromkeys((*model.eos_token_ids, token)))


def load(
    model: str | os.PathLike[str] = "demo", *, revision: str | None = None, load_format: str = "auto",
    dtype: str = "auto", quantization: str | None = None, max_model_len: int | None = None, seed: int = 0,
    tensor_parallel_size: int | None = None, progress: bool = True,
) -> Model:  # fmt: skip
    """Load a checkpoint as the NNX module that `LLM` would serve, for a trainer, which may then pass it to `LLM`.

    Its layers are separate ones, as in the checkpoint, also on a GPU, where `LLM` fuses some of those that it loads.

    Args:
        model: "demo", a directory, a file in GGUF or a hub id.
        revision, load_format, dtype, quantization, max_model_len, seed: as in `EngineConfig`. A few models choose their
            rotary embedding by `max_model_len`.
        tensor_parallel_size: number of devices among which the parameters are divided; None: they lie on one.
        progress: show a progress bar.

    Raises:
        OSError, ValueError: there is no such model, or the model or the device does not allow a setting.
    """
    config = EngineConfig(
        model=os.fspath(model), revision=revision, load_format=load_format, dtype=dtype, quantization=quantization,
        max_model_len=max_model_len, seed=seed, tensor_parallel_size=tensor_parallel_size,
    )  # fmt: skip
    devices = choose_devices(tensor_parallel_size or 1)[0]
    _, resolved = resolve_checkpoint(config, devices[0])
    place = on_one_device if tensor_parallel_size is None else Placement.on(devices, resolved.model).of
    directory = find_model(config.model, revision=revision, weights=load_format != "dummy")
    with compilation_cache():
        return load_model(
            directory, resolved.model, dtype=str(resolved.dtype), load_format=load_format, seed=seed, progress=progress,
            place=place, quantization=resolved.quantization,
        )  # fmt: skip


def load_checkpoint(setup: Setup, *, progress: bool = True) -> Model:
    """Return the model with the parameters of the config's checkpoint, on its devices."""
    config = setup.resolved.config
    directory = find_model(config.model, revision=config.revision, weights=config.load_format != "dummy")
    logger.info("loading %s as %s", config.model, setup.resolved.dtype)
    with compilation_cache():
        return _load(setup, directory, load_format=config.load_format, seed=config.seed, progress=progress)


def load_params(setup: Setup, directory: Path) -> Model:
    """Return a model with other parameters for a running engine, in its dtype and on its devices.

    Raises:
        OSError, ValueError: the directory does not hold parameters of this model.
    """
    return _load(setup, directory, load_format="auto", seed=0, progress=False)


def load_model(
    directory: Path, config: ModelConfig, *, dtype: str, load_format: str, seed: int, progress: bool,
    place: Place = on_one_device, quantization: str | None = None, keeps_groups: bool = False, takes: Takes = takes_all,
) -> Model:  # fmt: skip
    """Load the parameters in `dtype`, by `load_format`; "auto" takes a directory's Orbax checkpoint if it exists."""
    if load_format == "dummy":
        return dummy_model(config, dtype, seed, place, quantization=quantization)
    read: Callable[..., Model]
    if directory.is_file():
        if load_format != "auto":
            raise ValueError(f"load_format: must be auto or dummy for a file in GGUF, not {load_format!r}")
        read = load_gguf
    else:
        is_orbax = load_format == "orbax" or (load_format == "auto" and (directory / ORBAX).is_dir())
        read = load_orbax if is_orbax else load_safetensors
    return read(directory, config, Form(dtype, place, quantization, keeps_groups, takes), progress=progress)


def _load(setup: Setup, directory: Path, *, load_format: str, seed: int, progress: bool) -> Model:
    """Load a model as its device wants it."""
    resolved, place, dtype = setup.resolved, setup.placement.of, str(setup.resolved.dtype)
    device, is_one = resolved.device, setup.placement.size == 1
    is_cpu = device.platform == "cpu"
    multiplies = not is_cpu and is_one and has_products(
        resolved.config.kernels, device.platform, device.compute_capability, dtype
    )  # fmt: skip
    model = load_model(
        directory, resolved.model, dtype=dtype, load_format=load_format, seed=seed, progress=progress, place=place,
        quantization=resolved.quantization, keeps_groups=multiplies or (is_cpu and is_one),
        takes=takes_all if is_cpu else partial(takes_weight, dtype=dtype),
    )  # fmt: skip
    if device.platform in FUSING and not _num_adapters(resolved.config):  # adapters belong to separate layers
        fuse(model, place, gates=not multiplies)
    logger.info("parameters: %s", described(model))
    return model


def place(model: Model, setup: Setup, *, allow_copy: bool = True) -> ModelRunner:
    """Return a runner with a model's parameters on its devices. Nothing is compiled, and there is no KV pool yet.

    Args and errors are those of `ModelRunner`.
    """
    resolved, placement = setup.resolved, setup.placement
    config, max_tokens = resolved.config, resolved.limits.max_num_batched_tokens

    def choose_kernels(dtype: str) -> Kernels:
        kernels = setup.kernels or select_kernels(resolved, placement, dtype)
        check_pool(resolved, placement, kernels, dtype)
        multiplies = placement.size == 1 and kernels.multiplies
        if kernels.int8_rows and not takes_int8_rows(model):
            raise ValueError("activation_dtype: int8 needs weights of 8 or 4 bits in groups of 32, and there are none")
        if multiplies and kernels.skips_rows:  # those of a CPU, which take every form
            return kernels
        if not multiplies and (cost := cost_of(model.config, max_tokens)):
            logger.warning("mixture of experts: %s (max_num_batched_tokens shortens steps)", cost)
        if has_groups(model, partial(takes_weight, dtype=dtype) if multiplies else None):
            logger.warning("quantization: XLA expands weights with groups in every step, which takes time and memory")
        return kernels

    def adapter_slots(dtype: str) -> SlotsForm:
        dtype = dtype if config.lora_dtype == "auto" else config.lora_dtype
        return slots_form(model, config.max_loras, config.max_lora_rank, dtype)

    return ModelRunner(
        model, placement, resolved.limits, choose_kernels, config.pool_dtype,
        dtype=None if config.dtype == "auto" else resolved.dtype,
        processed_logprobs=config.logprobs_mode == "processed_logprobs", allow_copy=allow_copy,
        adapter_slots=adapter_slots if _num_adapters(config) else None,
    )  # fmt: skip

"""Assembly of an engine from its settings, its model and their measurement."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jpaged.config import EngineConfig
from jpaged.core.block_pool import BlockPool
from jpaged.core.scheduler import HEADROOM, Scheduler
from jpaged.engine.engine import Engine, Runner
from jpaged.models.base import Model
from jpaged.models.config import ModelConfig
from jpaged.runtime.compilation_cache import compilation_cache, every_process_writes
from jpaged.runtime.runner import ModelRunner
from jpaged.start.load import load_checkpoint, place
from jpaged.start.measure import Measured, measure
from jpaged.start.resolve import Resolved
from jpaged.start.setup import Setup, prepare, prepare_module
from jpaged.tokenizer import backend


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
    lead: Callable[[ModelRunner], Runner] | None = None, allow_copy: bool = True,
) -> Engine:  # fmt: skip
    """Load the parameters, compile or load the executables, and return an engine that is ready to step.

    Args:
        model: the module of `prepare_module`; None: load the checkpoint.
        lead: return the engine's runner, which drives this one and those of other processes.
        allow_copy: as in `load_engine`.
    """
    resolved, tokenizer = setup.resolved, setup.tokenizer
    inner = backend(tokenizer) if tokenizer is not None else None
    model = model or load_checkpoint(setup, progress=progress)
    runner, measured = start_runner(model, setup, progress=progress, allow_copy=allow_copy)
    scheduler = make_scheduler(resolved, measured, eos_token_ids(resolved.model, tokenizer))
    max_in_flight = 2 if resolved.config.async_scheduling else 1
    return Engine(
        scheduler, lead(runner) if lead else runner, inner, seed=resolved.config.seed, max_in_flight=max_in_flight
    )


def start_follower(setup: Setup, *, progress: bool = True) -> ModelRunner:
    """Return a runner that is ready for the plans of another process, which calls `start_engine`."""
    return start_runner(load_checkpoint(setup, progress=progress), setup, progress=progress)[0]


def start_runner(
    model: Model, setup: Setup, *, progress: bool = True, allow_copy: bool = True
) -> tuple[ModelRunner, Measured]:
    """Return a runner that is ready to step, and its measurement.

    All processes that share the devices run these programs, in this order.

    Args:
        allow_copy: as in `load_engine`.
    """
    with compilation_cache(), every_process_writes():
        runner = place(model, setup, allow_copy=allow_copy)
        return runner, measure(runner, setup.resolved, progress=progress)


def make_scheduler(resolved: Resolved, measured: Measured, eos_token_ids: tuple[int, ...]) -> Scheduler:
    """Return the scheduler of an engine."""
    config, limits = resolved.config, resolved.limits
    host_pool = None
    if measured.num_host_blocks:
        host_pool = BlockPool(measured.num_host_blocks, limits.block_size, enable_prefix_caching=False)
    return Scheduler(
        BlockPool(measured.num_blocks, limits.block_size, enable_prefix_caching=config.enable_prefix_caching),
        limits,
        vocab_size=resolved.model.vocab_size,
        eos_token_ids=eos_token_ids,
        host_pool=host_pool,
        policy=config.scheduling_policy,
        preemption=config.preemption_mode,
        block_swap_cost=measured.block_swap_cost,
        tokens_beside_decodes=measured.tokens_beside_decodes,
        step_overhead=measured.step_overhead,
        headroom=HEADROOM,
    )


def eos_token_ids(model: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a text: those of the model's files and that of the tokenizer.

    Fine-tuned models often end their answers with a token that only their tokenizer names.
    """
    token = getattr(tokenizer, "eos_token_id", None)
    if not isinstance(token, int) or not 0 <= token < model.vocab_size:
        return model.eos_token_ids
    return tuple(dict.fromkeys((*model.eos_token_ids, token)))

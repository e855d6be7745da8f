"""Runners without a warm-up."""

import dataclasses

from jpaged.config import EngineConfig, Limits
from jpaged.models.base import Model
from jpaged.runtime.runner import ModelRunner
from jpaged.start.load import place
from jpaged.start.pool import allocate
from jpaged.start.setup import prepare_module
from pallas_kernels import Kernels


def runner_of(model: Model, config: EngineConfig, limits: Limits, kernels: Kernels | None = None) -> ModelRunner:
    """Return a runner of a module with a KV pool. Its shapes compile when they are first needed."""
    setup = prepare_module(dataclasses.replace(config, **dataclasses.asdict(limits)), model)
    runner = place(model, setup._replace(kernels=kernels))
    allocate(runner, setup.resolved)
    return runner

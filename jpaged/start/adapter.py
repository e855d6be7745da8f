"""The command that loads an adapter, from a directory or from a trainer's arrays."""

import os
from pathlib import Path
from typing import Any

from jpaged.core.commands import LoadAdapter
from jpaged.models.adapter_state import adapter_of
from jpaged.models.peft import read_adapter
from jpaged.runtime.runner import ModelRunner


def adapter_command(runner: Any, name: str, source: Any, scale: float = 1.0) -> LoadAdapter:
    """Return the command that serves an adapter under a name.

    Args:
        runner: that of the engine.
        source: a directory, as PEFT saves an adapter, or what `adapter_of` takes.
        scale: as in `adapter_of`; a directory has its own.

    Raises:
        ValueError: there is no such adapter, or the engine can't serve it.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name: must be a non-empty text, not {name!r}")
    if not isinstance(runner, ModelRunner) or runner.adapters.form is None:
        raise ValueError("adapter: this engine has no slots for adapters (enable_lora)")
    if isinstance(source, str | os.PathLike):
        return LoadAdapter(name, read_adapter(Path(source), runner.config, runner.adapters.form))
    return LoadAdapter(name, adapter_of(source, scale))

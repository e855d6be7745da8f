"""Commands to an engine as values. The `control` of each client takes any of them, and runs it between two steps."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

InFlight = Literal["recompute", "keep", "wait"]
PauseMode = Literal["keep", "wait", "abort"]
PARTS = frozenset(("weights", "kv_cache"))  # of the memory that `Sleep` frees


@dataclass(frozen=True)
class Pause:
    """Begin no step until `Resume`. Requests can be added meanwhile and wait.

    Attributes:
        mode: "keep": running requests wait too, with their KV; `step` commits the steps in flight. "wait": they end
            first, in further steps, in which no other request starts. "abort": all requests are ended.

    Raises:
        ValueError: the mode is unknown.
    """

    mode: PauseMode = "keep"

    def __post_init__(self) -> None:
        _check_choice("pause: mode", self.mode, get_args(PauseMode))


@dataclass(frozen=True)
class Resume:
    """End a pause."""


@dataclass(frozen=True)
class Sleep:
    """Free the memory of the KV pool and of the parameters, and begin no step until `WakeUp`.

    Requests are kept, and computed again from their tokens afterwards. Only references are dropped: arrays that a
    trainer holds too stay as they are.

    Attributes:
        level: 1: keep a copy of the parameters in the memory of the host. 2: keep none; `UpdateParams` brings new
            ones, which also wakes up the part "weights".

    Raises:
        ValueError: the level is unknown, or the runner can't sleep; nothing is changed.
    """

    level: int = 1

    def __post_init__(self) -> None:
        if self.level not in (1, 2):
            raise ValueError(f"level: must be 1 (parameters on the host) or 2 (dropped), not {self.level!r}")


@dataclass(frozen=True)
class WakeUp:
    """Take back the memory that `Sleep` has freed. Nothing is compiled.

    Attributes:
        tags: "weights" (the parameters), "kv_cache", or both. Weights alone can be updated before the pool takes its
            memory.

    Raises:
        ValueError: a tag is unknown, or the parameters were dropped and there are no new ones.
    """

    tags: Collection[str] = PARTS

    def __post_init__(self) -> None:
        if unknown := set(self.tags) - PARTS:
            raise ValueError(f"tags: must be of {sorted(PARTS)}, not {sorted(unknown)}")


@dataclass(frozen=True, eq=False)
class UpdateParams:
    """Serve other parameters of the same tree, shapes and dtypes.

    Nothing is compiled, and arrays that lie as the engine's are not copied. No KV of the old parameters is found in the
    prefix cache afterwards. `Sample.version` says which update drew a token.

    Attributes:
        source: an `nnx.Module`, an `nnx.State`, or nested dicts of arrays, with all or some of the parameters, named as
            in the engine's module or below its `trained_path`.
        in_flight: treatment of started requests. "recompute": steps in flight are dropped, and the requests are
            computed again from their tokens, which they keep, so that every further token depends on the new
            parameters only. "keep": the requests continue on the KV of the old parameters. "wait": they end first,
            with the old parameters, in further steps, in which no other request starts. A later update replaces a
            waiting one.

    Raises:
        ValueError: the parameters do not match; the message has the first difference, and nothing is changed.
    """

    source: Any
    in_flight: InFlight = "recompute"

    def __post_init__(self) -> None:
        _check_choice("in_flight", self.in_flight, get_args(InFlight))


@dataclass(frozen=True)
class ResetPrefixCache:
    """Drop all cached prefixes. Blocks that running requests have computed so far are never cached either."""


@dataclass(frozen=True, eq=False)
class LoadAdapter:
    """Serve an adapter under a name. Requests that have an earlier adapter of this name end with that one.

    Attributes:
        adapter: a `jpaged.models.adapters.Adapter`.
        number: the number by which plans name the adapter; the engine chooses it.

    Raises:
        ValueError: the adapter does not fit, or there are no slots; nothing is changed.
    """

    name: str
    adapter: Any
    number: int = -1


@dataclass(frozen=True)
class UnloadAdapter:
    """Serve no adapter under a name. Requests that have it end with it.

    Attributes:
        number: as in `LoadAdapter`, for a runner, which forgets the adapter at once.

    Raises:
        ValueError: there is none.
    """

    name: str
    number: int = -1


Command = Pause | Resume | Sleep | WakeUp | UpdateParams | ResetPrefixCache | LoadAdapter | UnloadAdapter


def _check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: must be one of {', '.join(map(repr, choices))}, not {value!r}")

"""Configuration of replicas behind Ray Serve."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from jpaged.config import EngineConfig
from jpaged.serving.service import API_KEY_VARIABLE, ServerConfig

ROUTERS = ("prefix", "default")


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Configuration of the deployments.

    Attributes:
        engine: settings of each replica's engine.
        server: settings of each replica's queue and of the ingress.
        served_model_name: name of the model in responses; None: the engine's `model`.
        tool_call_parser: format of the model's tool calls; auto: detected from its chat template.
        min_replicas, max_replicas: bounds of the number of replicas, which follows the load if they differ.
        target_ongoing_requests: requests of a replica that autoscaling aims at; None: as many as run at once.
        max_ongoing_requests: maximum requests of a replica, further ones wait in the ingress; None: twice as many as
            run at once.
        num_gpus: GPUs of a replica; None: `tensor_parallel_size` if the cluster has GPUs, otherwise 0.
        num_cpus: CPUs that Ray reserves for a replica.
        router: prefix: the replica that has the longest prefix of the prompt in its cache; default: Ray Serve's.
        max_imbalance: requests by which the load of a replica may exceed the smallest load, to be chosen for a prefix.
        health_check_period_s: seconds between two checks of a replica.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    served_model_name: str | None = None
    tool_call_parser: str = "auto"
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float | None = None
    max_ongoing_requests: int | None = None
    num_gpus: int | None = None
    num_cpus: float = 1.0
    router: str = "prefix"
    max_imbalance: float = 8
    health_check_period_s: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            bounds = f"{self.min_replicas}:{self.max_replicas}"
            raise ValueError(f"replicas: must be N or MIN:MAX with 1 <= MIN <= MAX, not {bounds}")
        if self.router not in ROUTERS:
            raise ValueError(f"router: must be one of {', '.join(ROUTERS)}, not {self.router!r}")
        for name in ("target_ongoing_requests", "max_ongoing_requests", "health_check_period_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: must be above 0, not {value}")
        for name in ("num_gpus", "num_cpus", "max_imbalance"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}: must be at least 0, not {value}")

    @property
    def model_name(self) -> str:
        """Name of the model in responses."""
        return self.served_model_name or self.engine.model

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> "RayConfig":
        """Return the configuration of the `args` of an application in a Serve config file.

        The keys are the fields of this class, with `replicas` (N or "MIN:MAX") instead of its bounds. `engine` and
        `server` are mappings with the fields of EngineConfig and ServerConfig.

        Raises:
            ValueError: a key is unknown or a value is invalid.
        """
        values = dict(args)
        if "replicas" in values:
            if both := {"min_replicas", "max_replicas"} & values.keys():
                raise ValueError(f"replicas: can't be combined with {min(both)}")
            values["min_replicas"], values["max_replicas"] = parse_replicas(str(values.pop("replicas")))
        values["engine"] = _of(EngineConfig, values.get("engine") or {}, "engine.")
        values["server"] = _of(ServerConfig, values.get("server") or {}, "server.")
        made: RayConfig = _of(cls, values, "")
        return made

    def with_key_of_environment(self) -> "RayConfig":
        """Return the configuration with the API key of JPAGED_API_KEY, if that is set."""
        key = os.environ.get(API_KEY_VARIABLE)
        return replace(self, server=replace(self.server, api_keys=(*self.server.api_keys, key))) if key else self


def parse_replicas(text: str) -> tuple[int, int]:
    """Return the bounds of "N" or "MIN:MAX".

    Raises:
        ValueError: the text is of neither form.
    """
    low, colon, high = text.partition(":")
    try:
        return int(low), int(high if colon else low)
    except ValueError:
        raise ValueError(f"replicas: must be a number, or MIN:MAX, not {text!r}") from None


def _of(kind: type[Any], values: Any, where: str) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where.rstrip('.')}: must be a mapping, not {values!r}")
    known = {each.name for each in fields(kind)}
    if unknown := sorted(map(str, values.keys() - known)):
        raise ValueError(f"{where}{unknown[0]}: is not a known field")
    # Lists of YAML for tuples.
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error
    except TypeError as error:
        raise ValueError(f"{where.rstrip('.') or 'args'}: a value has a wrong type: {error}") from error

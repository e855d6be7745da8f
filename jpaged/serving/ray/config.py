"""Configuration of replicas behind Ray Serve."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from jpaged.config import EngineConfig
from jpaged.serving.service import API_KEY_VARIABLE, ServerConfig
from jpaged.setting import check, documentation, setting

ROUTERS = ("prefix", "default")
_setting = partial(setting, group="replicas")


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Configuration of the deployments; `server` is for the ingress and the queue of each replica."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    served_model_name: str | None = _setting(None, "name of the model in responses", by="the engine's model")
    tool_call_parser: str = _setting("auto", "format of the model's tool calls; auto: detected from its chat template")
    min_replicas: int = _setting(1, "least number of replicas")
    max_replicas: int = _setting(1, "greatest number of replicas; the number follows the load if it exceeds the least")
    target_ongoing_requests: float | None = _setting(
        None, "requests of a replica that autoscaling aims at", by="as many as run at once", above=0
    )
    max_ongoing_requests: int | None = _setting(
        None, "maximum requests of a replica; further ones wait in the ingress", by="twice the number at once", above=0
    )
    num_gpus: int | None = _setting(
        None, "GPUs of a replica", by="tensor_parallel_size if the cluster has GPUs, otherwise 0", low=0
    )
    num_cpus: float = _setting(1.0, "CPUs that Ray reserves for a replica", low=0)
    router: str = _setting(
        "prefix", "prefix: the replica with the longest prefix in its cache; default: Ray Serve's", choices=ROUTERS
    )
    max_imbalance: float = _setting(
        8, "requests by which the load of a replica that has the prefix may exceed the smallest load", low=0
    )
    health_check_period_s: float = _setting(2.0, "seconds between two checks of a replica", above=0)

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            bounds = f"{self.min_replicas}:{self.max_replicas}"
            raise ValueError(f"replicas: must be N or MIN:MAX with 1 <= MIN <= MAX, not {bounds}")
        check(self)

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


RayConfig.__doc__ = f"{RayConfig.__doc__}\n{documentation(RayConfig)}"


def parse_replicas(text: str) -> tuple[int, int]:
    """Return the bounds of "N" or "MIN:MAX"; ValueError for any other text."""
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
    try:  # lists of YAML for tuples
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error
    except TypeError as error:
        raise ValueError(f"{where.rstrip('.') or 'args'}: a value has a wrong type: {error}") from error

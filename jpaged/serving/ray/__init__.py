"""Replicas of a model behind Ray Serve. Only `application`, `ingress`, `replica` and `router` import Ray."""

from typing import Any


def app(args: dict[str, Any]) -> Any:
    """Return the application of a Serve config file with `import_path: jpaged.serving.ray:app`.

    For arguments and errors see `RayConfig.from_args`. The environment variable JPAGED_API_KEY adds an API key.
    """
    from jpaged.serving.ray.application import build
    from jpaged.serving.ray.config import RayConfig

    return build(RayConfig.from_args(args).with_key_of_environment())

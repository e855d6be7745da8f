"""Application of Ray Serve: replicas of a model behind an ingress with the OpenAI API."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from jpaged.serving.ray.config import RayConfig
from jpaged.serving.ray.ingress import REPLICA, Ingress
from jpaged.serving.ray.replica import Replica, deployment_options, drain_timeout
from jpaged.serving.ray.router import PrefixRouter

APP_NAME = "jpaged"


def build(config: RayConfig) -> Application:
    """Return the application of a configuration."""
    num_gpus = config.num_gpus
    if num_gpus is None:
        has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0)
        num_gpus = (config.engine.tensor_parallel_size or 1) if has_gpus else 0
    options = deployment_options(config, num_gpus)
    if config.router == "prefix":
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"max_imbalance": config.max_imbalance}
        )
    replicas = serve.deployment(Replica, name=REPLICA, **options).bind(config, num_gpus)
    # One process, because every process has a separate table of prefixes.
    ingress = serve.deployment(
        Ingress,
        num_replicas=1,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=drain_timeout(config.server),
    )
    return ingress.bind(replicas, config.server)


@contextlib.contextmanager
def cluster(num_cpus: float) -> Iterator[None]:
    """Enter a context with a connection to a Ray cluster: that of RAY_ADDRESS, or a running one of this machine.

    If there is none, one with at least `num_cpus` is started on this machine, and ended with the context.
    """
    options = {"logging_level": "error", "log_to_driver": True}
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if address == "local":
            raise ConnectionError
        ray.init(address, **options)
    except ConnectionError:
        if address not in ("auto", "local"):
            raise
        cpus = max(os.cpu_count() or 1, int(num_cpus + 1))
        ray.init("local", num_cpus=cpus, include_dashboard=False, **options)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def deployed(config: RayConfig, http_options: Mapping[str, Any]) -> Iterator[None]:
    """Enter a context in which the application is served; running requests finish before it ends.

    Raises:
        ValueError: Ray Serve already runs on this cluster, or the replicas don't start.
    """
    if serve.status().proxies:
        raise ValueError(
            "--ray: Ray Serve already runs on this cluster, with an address of its own: add the application to its "
            "config file (serve deploy FILE), or end it (serve shutdown)"
        )
    serve.start(http_options=dict(http_options))
    try:
        try:
            serve.run(build(config), name=APP_NAME, route_prefix="/")
        except RuntimeError as error:
            raise ValueError(f"--ray: the replicas don't start; their logs have the reason: {error}") from error
        yield
        serve.delete(APP_NAME)  # waits for running requests, unlike the shutdown
    finally:
        serve.shutdown()

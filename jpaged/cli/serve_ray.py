"""`jpaged serve --ray`: run of the server as an application of Ray Serve."""

import argparse
import importlib.util
import logging
import os
import signal
import sys
import threading
from typing import Any

from jpaged.config import EngineConfig
from jpaged.serving.listen import bind
from jpaged.serving.logs import logging_to
from jpaged.serving.ray.config import RayConfig, parse_replicas
from jpaged.serving.service import ServerConfig

logger = logging.getLogger("jpaged.ray")

# Flags that Ray Serve can't apply, with their defaults and the reasons.
UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "uds": (None, "Ray Serve listens on a host and a port"),
    "access_log": ("-", "Ray Serve writes a log of requests of its own"),
    "log_level": ("info", "Ray Serve has a log level of its own"),
    "ssl_ca_certs": (None, "Ray Serve does not check client certificates"),
    "data_parallel_size": (1, "see --replicas"),
    "nnodes": (1, "a replica runs on one host"),
}


def check_flags(args: argparse.Namespace) -> None:
    """Check that Ray Serve can apply all flags.

    Raises:
        ValueError: it can't apply one.
    """
    for name, (default, reason) in UNSUPPORTED.items():
        if getattr(args, name) != default:
            raise ValueError(f"--{name.replace('_', '-')}: can't be combined with --ray: {reason}")
    if args.port == 0:
        raise ValueError("--port: must be a port, not 0, with --ray")


def run(args: argparse.Namespace, engine: EngineConfig, server: ServerConfig) -> None:
    """Serve with Ray Serve until SIGTERM or SIGINT; then running requests finish.

    Raises:
        ValueError: Ray is not installed, or the replicas don't start.
        OSError: the address is in use.
    """
    low, high = parse_replicas(args.replicas or "1")
    config = RayConfig(
        engine=engine, server=server, served_model_name=args.served_model_name[0] if args.served_model_name else None,
        tool_call_parser=args.tool_call_parser, min_replicas=low, max_replicas=high,
    )  # fmt: skip
    if importlib.util.find_spec("ray") is None:
        raise ValueError("--ray: Ray is not installed: pip install 'jpaged[ray]'")
    for each in bind(args.host, args.port):  # Ray Serve would report an address in use only in a log
        each.close()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from jpaged.serving.ray.application import cluster, deployed  # imports Ray, which takes seconds

    http = {
        "host": args.host, "port": args.port, "ssl_certfile": args.ssl_certfile and str(args.ssl_certfile),
        "ssl_keyfile": args.ssl_keyfile and str(args.ssl_keyfile),
    }  # fmt: skip
    with logging_to(sys.stderr, "none", args.log_level), cluster(config.num_cpus * high), deployed(config, http):
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        scheme = "https" if args.ssl_certfile else "http"
        logger.info("ready: model %s at %s://%s:%d", config.model_name, scheme, args.host, args.port)
        while not ended.wait(1.0):  # an untimed wait would not let signals be handled
            pass
        logger.info("shutting down: finishing requests")
    logger.info("stopped")

"""Serve a model over HTTP with the OpenAI API.

  jpaged serve                                   the demo model on http://127.0.0.1:8000
  jpaged serve DIR --host 0.0.0.0                a model in a directory, on all network interfaces
  jpaged serve org/name --max-model-len 32k --api-key KEY
  jpaged serve --config serve.yaml --port 8001   flags from a file; the command line takes precedence
  jpaged serve DIR -tp 16 --nnodes 2 --dist-init-addr HOST:PORT    with `jpaged worker` on a second host
  jpaged serve --ray --replicas 2                two engines behind one address, with Ray Serve

All settings, addresses and files are checked before the weights are loaded. The first start compiles all shapes of a
step; later starts load them from ~/.cache/jpaged.
"""

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import json
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from jpaged.chat import ContentFormat, sources_of
from jpaged.cli.loading import loading
from jpaged.cli.nodes import facts_of, leading
from jpaged.cli.parser import existing_file
from jpaged.cli.peer_flags import Object
from jpaged.cli.setting_flags import add_settings, config_of
from jpaged.config import EngineConfig
from jpaged.flags import ENGINE
from jpaged.parallel.nodes import Nodes
from jpaged.serving.listen import bind, bound_unix
from jpaged.serving.logs import LEVELS, logging_to
from jpaged.serving.origins import is_loopback
from jpaged.serving.ray.config import RayConfig, parse_replicas
from jpaged.serving.reasoning_parsers.forms import FORMS
from jpaged.serving.service import API_KEY_VARIABLE, ServerConfig, Service
from jpaged.serving.tool_parsers.format import FORMATS, tool_format
from jpaged.start.find import find_local

PEERS = ENGINE

logger = logging.getLogger("jpaged.ray")

# Flags that Ray Serve can't apply, with their defaults and the reasons.
WITHOUT_RAY: dict[str, tuple[Any, str]] = {
    "uds": (None, "Ray Serve listens on a host and a port"),
    "access_log": ("-", "Ray Serve writes a log of requests of its own"),
    "log_level": ("info", "Ray Serve has a log level of its own"),
    "ssl_ca_certs": (None, "Ray Serve does not check client certificates"),
    "data_parallel_size": (1, "see --replicas"),
    "nnodes": (1, "a replica runs on one host"),
    "kv_events_config": (None, "replicas on one host would have one address"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged serve`."""
    parser.usage = "%(prog)s [MODEL] [flags]"
    _add_server_flags(parser)
    add = parser.add_argument_group("access control").add_argument
    add("--api-key", metavar="KEY", nargs="+", default=[],
        help=f"require one of these keys; the environment variable {API_KEY_VARIABLE} adds one")  # fmt: skip
    add("--api-key-file", metavar="FILE", type=existing_file, help="file with further keys, one per line")
    add("--allowed-origins", metavar="ORIGIN", nargs="+", default=[],
        help="origins of web pages that may send requests, such as https://chat.example.org; *: all "
        "(default: none)")  # fmt: skip
    add("--allowed-hosts", metavar="NAME", nargs="+", default=[],
        help="allowed names in the Host header, in addition to localhost (default: all; none if --host is a "
        "loopback address and no key is set)")  # fmt: skip
    add("--ssl-certfile", metavar="FILE", type=existing_file, help="serve HTTPS with this certificate chain")
    add("--ssl-keyfile", metavar="FILE", type=existing_file,
        help="private key of the certificate, if in a separate file")  # fmt: skip
    add("--ssl-ca-certs", metavar="FILE", type=existing_file, help="require client certificates signed by one of these")
    add = parser.add_argument_group("replicas").add_argument
    add("--ray", action="store_true", help="serve with Ray Serve: needs the extra jpaged[ray]")
    text = "number of engines behind one address, or MIN:MAX to follow the load; needs --ray (default: 1)"
    add("--replicas", metavar="N", help=text)
    parser.add_argument_group("trainers").add_argument("--enable-weight-updates", action="store_true",
        help="serve /pause, /resume, /update_weights, /sleep, /wake_up and the loading of adapters to clients with "
        "an API key")  # fmt: skip
    _add_chat_flags(parser.add_argument_group("chat"))
    add_settings(parser, EngineConfig, positional="model")
    add_settings(parser, Nodes)
    parser.epilog = (
        "Flags of vLLM and SGLang are accepted too: some set a flag of this list, some are not needed (a notice says "
        "why), and the others are refused with a reason."
    )


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    defaults, add = ServerConfig(), parser.add_argument_group("server").add_argument
    add("--config", metavar="FILE",
        help="YAML file with flags as keys, such as max-model-len: 32k; the command line takes precedence")  # fmt: skip
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all network interfaces")
    add("--port", type=int, default=8000, help="port to listen on; 0 for any free port")
    add("--uds", type=Path, metavar="PATH", help="listen on this Unix domain socket instead of a host and a port")
    add("--root-path", default=defaults.root_path, metavar="PATH",
        help="also serve all routes under this path, such as /llm, for a proxy that does not remove it "
        "(default: none)")  # fmt: skip
    add("--served-model-name", metavar="NAME", nargs="+", default=[],
        help="names of the model in requests; responses contain the first (default: the value of --model)")  # fmt: skip
    add("--data-parallel-size", "-dp", type=_at_least_one, default=1, metavar="ENGINES",
        help="number of engines, each on devices of its own; a prompt goes to the engine that has its prefix in the "
        "cache")  # fmt: skip
    add("--max-queue", type=int, default=defaults.max_queue, metavar="REQUESTS",
        help="maximum waiting requests; further ones get HTTP 503 with Retry-After")  # fmt: skip
    add("--max-body-size", type=float, metavar="MIB",
        help="maximum size of a request body (default: 1 MiB plus 16 bytes per token of --max-model-len)")  # fmt: skip
    add("--request-timeout", type=float, metavar="SECONDS",
        help="maximum time from a request to the end of its response (default: no limit)")  # fmt: skip
    add("--drain-timeout", type=float, default=defaults.drain_timeout, metavar="SECONDS",
        help="time for running requests to finish after SIGTERM; a second signal ends them at once")  # fmt: skip
    add("--log-level", choices=LEVELS, default="info", help="lowest severity of the log")
    add("--access-log", default="-", metavar="FILE",
        help="file for one line of JSON per request; -: standard error; none: no access log")  # fmt: skip


def _add_chat_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--chat-template", metavar="FILE", type=existing_file, help="Jinja template instead of the model's own")
    add("--default-chat-template-kwargs", metavar="JSON", action=Object,
        help="variables of the chat template for requests that do not set them (default: none)")  # fmt: skip
    add("--chat-template-content-format", choices=get_args(ContentFormat), default="auto",
        help="form of content for the template; auto: text, or parts if the text would be missing")  # fmt: skip
    add("--trust-request-chat-template", action="store_true", help="accept chat templates in requests")
    add("--allow-special-tokens-in-content", action="store_true",
        help="encode the text of a special token in a message as that token, not as plain text")  # fmt: skip
    add("--ignore-unknown-fields", action="store_true",
        help="ignore unknown fields of requests instead of rejecting them")  # fmt: skip
    add("--reasoning-parser", choices=("auto", "none", *sorted(FORMS)), default="none",
        help="form of reasoning that answers have apart from their text; auto: detected from the chat template "
             "(default: none)")  # fmt: skip
    add("--tool-call-parser", choices=("auto", "none", *sorted(FORMATS)), default="auto",
        help="format of the model's tool calls; auto: detected from its chat template")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Run `jpaged serve`."""
    if args.ray:
        for name, (default, reason) in WITHOUT_RAY.items():
            if getattr(args, name) != default:
                raise ValueError(f"--{name.replace('_', '-')}: can't be combined with --ray: {reason}")
        if args.port == 0:
            raise ValueError("--port: must be a port, not 0, with --ray")
        tls_context(args)  # checks the files
        return _serve_with_ray(args, config_of(args, EngineConfig), server_config(args))
    if args.replicas is not None:
        raise ValueError("--replicas: needs --ray")
    with logging_to(sys.stderr, args.access_log, args.log_level):
        engine, server, tls, nodes = (
            config_of(args, EngineConfig), server_config(args), tls_context(args), config_of(args, Nodes)
        )  # fmt: skip
        find_local(engine.model, revision=engine.revision)  # an error before jax is loaded, which takes seconds
        if nodes.node_rank:
            raise ValueError(f"node_rank: must be 0 for jpaged serve, not {nodes.node_rank}; use jpaged worker")
        with bound_sockets(args) as sockets:
            _serve(args, engine, nodes, server, sockets, tls)


def _serve(
    args: argparse.Namespace, engine_config: EngineConfig, nodes: Nodes, config: ServerConfig,
    sockets: Sequence[socket.socket], tls: ssl.SSLContext | None,
) -> None:  # fmt: skip
    # jax would take three quarters of a GPU's memory; a server has it to itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    if nodes.nnodes > 1 and args.data_parallel_size > 1:
        raise ValueError(f"data_parallel_size: must be 1 with nnodes above 1, not {args.data_parallel_size}")
    with contextlib.ExitStack() as stack:
        with loading() as bars:
            followers = stack.enter_context(leading(nodes, engine_config))
            # Loading jax takes seconds. --help and a bad flag do not need it.
            from jpaged.serving.serve import serve
            from jpaged.start.adapter import adapter_command
            from jpaged.start.load import load_params, start_engine
            from jpaged.start.setup import on_further_devices, prepare

            setup = prepare(engine_config, chat_template=config.chat_template, nnodes=nodes.nnodes)
            if followers is not None:
                followers.check_facts(facts_of(setup))
            read_params = followers.refuse_params if followers else functools.partial(load_params, setup)
            lead = followers.lead if followers else None
            setups = on_further_devices(setup, args.data_parallel_size)
            engines = [start_engine(each, progress=bars, lead=lead, rank=rank) for rank, each in enumerate(setups)]
        read_adapter = lambda name, directory: adapter_command(engines[0].runner, name, directory)
        tokenizer, resolved, model = setup.tokenizer, setup.resolved, setup.resolved.model
        service = Service(
            engines, tokenizer, (args.served_model_name or [args.model])[0], config,
            sampling_defaults=setup.sampling_defaults,
            tool_format=tool_format(args.tool_call_parser, tokenizer, config.chat_template),
            model_facts={  # of /model_info, with SGLang's names
                "model_path": args.model, "tokenizer_path": resolved.config.tokenizer or args.model,
                "model_type": model.model_type, "architectures": [model.architecture],
                "vocab_size": model.vocab_size, "tp_size": resolved.mesh.size,
                "quantization": resolved.weights,
            },
            load_params=read_params if config.enable_weight_updates else None,
            load_adapter=read_adapter if config.enable_weight_updates else None,
        )  # fmt: skip
        if config.chat_template or (tokenizer is not None and sources_of(tokenizer)):
            service.templates.start()  # which takes seconds
        asyncio.run(serve(service, sockets, tls))


def _serve_with_ray(args: argparse.Namespace, engine: EngineConfig, server: ServerConfig) -> None:
    """Serve with Ray Serve until SIGTERM or SIGINT; then running requests finish."""
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


@contextlib.contextmanager
def bound_sockets(args: argparse.Namespace) -> Iterator[Sequence[socket.socket]]:
    """Enter a context with the sockets of the flags, which are closed at its end.

    Raises:
        OSError: an address is invalid or in use.
    """
    with contextlib.ExitStack() as stack:
        try:
            bound = [bound_unix(args.uds)] if args.uds else bind(args.host, args.port)
            sockets = [stack.enter_context(each) for each in bound]
        except (OSError, OverflowError) as error:  # OverflowError: a port above 65535
            raise OSError(f"{'--uds' if args.uds else '--host, --port'}: {error}") from error
        yield sockets


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Return the server's settings from flags, key file and environment.

    Raises:
        ValueError: a value is invalid.
        OSError: the key file can't be read.
    """
    if not all(args.served_model_name):
        raise ValueError("--served-model-name must not be empty")
    keys = list(args.api_key)
    if key := os.environ.get(API_KEY_VARIABLE):
        keys.append(key)
    if args.api_key_file:
        found = [line.strip() for line in args.api_key_file.read_text().splitlines()]
        found = [line for line in found if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"--api-key-file: {args.api_key_file} holds no key")
        keys += found
    origins = args.allowed_origins
    if len(origins) == 1 and origins[0].startswith("["):  # a JSON list, as in vLLM
        try:
            origins = json.loads(origins[0])
        except ValueError as error:
            raise ValueError(f"--allowed-origins: {origins[0]} is not valid JSON: {error}") from error
    # A site whose name leads to this machine (DNS rebinding) can't know a key, nor reach a Unix domain socket.
    only_loopback = is_loopback(args.host) and not (keys or args.uds)
    given = {each.name: getattr(args, each.name) for each in fields(ServerConfig) if hasattr(args, each.name)}
    return ServerConfig(**given | {
        "api_keys": tuple(keys), "chat_template": args.chat_template.read_text() if args.chat_template else None,
        "default_chat_template_kwargs": args.default_chat_template_kwargs or {},
        "max_body_size": None if args.max_body_size is None else int(args.max_body_size * 2**20),
        "allowed_origins": tuple(map(str, origins)),
        "allowed_hosts": tuple(args.allowed_hosts) if args.allowed_hosts or only_loopback else None,
        "aliases": tuple(args.served_model_name[1:]),
    })  # fmt: skip


def _at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def tls_context(args: argparse.Namespace) -> ssl.SSLContext | None:
    """Return the TLS context of the flags; None without a certificate.

    Raises:
        ValueError: a certificate is missing or invalid.
    """
    if args.ssl_certfile is None:
        if args.ssl_keyfile or args.ssl_ca_certs:
            raise ValueError("--ssl-certfile is needed for HTTPS")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        if args.ssl_ca_certs:
            context.load_verify_locations(args.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        raise ValueError(f"--ssl-certfile, --ssl-keyfile or --ssl-ca-certs: {error}") from error
    return context

"""Serve a Llama over HTTP, in the OpenAI API's form.

  jpaged serve                                   the demo model on http://127.0.0.1:8000
  jpaged serve DIR --host 0.0.0.0                a model of yours, for everybody
  jpaged serve org/name --max-model-len 32k --api-key KEY
  jpaged serve --config serve.yaml --port 8001   flags from a file; the command line wins

Settings, addresses, files and the tokenizer are checked before the weights are loaded. The first start compiles every
shape that a step can have; later ones load them from ~/.cache/jpaged.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from jpaged.cli import vllm_flags
from jpaged.cli.loading import loading
from jpaged.cli.parser import count
from jpaged.config import (
    DTYPE_ALIASES,
    DTYPES,
    KERNELS,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    PREEMPTION_MODES,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from jpaged.serving.listen import bind, bound_unix
from jpaged.serving.logs import LEVELS, logging_to
from jpaged.serving.origins import is_loopback
from jpaged.serving.service import ServerConfig, make_service
from jpaged.serving.tools import FORMATS, ToolFormat, detect

API_KEY_VARIABLE = "JPAGED_API_KEY"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [flags]"
    defaults = ServerConfig()
    add = parser.add_argument_group("the server").add_argument
    add("--config", metavar="FILE", help="YAML with flags as keys, such as max-model-len: 32k; the command line wins")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    add("--port", type=int, default=8000, help="port to listen on; 0 for any that is free")
    add("--uds", type=Path, metavar="PATH", help="listen on this Unix domain socket, instead of a host and a port")
    add("--root-path", default=defaults.root_path, metavar="PATH",
        help="serve under this path too, such as /llm, for a proxy that passes it on (default: none)")  # fmt: skip
    add("--served-model-name", metavar="NAME", nargs="+", default=[],
        help="names that clients may ask for; answers have the first (default: as --model)")  # fmt: skip
    add("--max-queue", type=int, default=defaults.max_queue, metavar="REQUESTS",
        help="requests that may wait; for more there is a 503 with Retry-After")  # fmt: skip
    add("--max-body-size", type=float, metavar="MIB",
        help="longest body of a request (default: 1 MiB, and 16 bytes for each token of --max-model-len)")  # fmt: skip
    add("--request-timeout", type=float, metavar="SECONDS", help="longest that an answer may take (default: no limit)")
    add("--drain-timeout", type=float, default=defaults.drain_timeout, metavar="SECONDS",
        help="time for running requests to finish after SIGTERM; a second signal ends them at once")  # fmt: skip
    add("--log-level", choices=LEVELS, default="info", help="least severe messages that are logged")
    add("--access-log", default="-", metavar="FILE",
        help="a line of JSON for each request; - is standard error, none is nowhere")  # fmt: skip

    add = parser.add_argument_group("who may use it").add_argument
    add("--api-key", metavar="KEY", nargs="+", default=[],
        help=f"ask for one of these keys; {API_KEY_VARIABLE} in the environment adds one")  # fmt: skip
    add("--api-key-file", metavar="FILE", type=Path, help="more keys, one on each line")
    add("--allowed-origins", metavar="ORIGIN", nargs="+", default=[],
        help="web pages that may use it, such as https://chat.example.org; * is all (default: none)")  # fmt: skip
    add("--allowed-hosts", metavar="NAME", nargs="+", default=[],
        help="names, besides localhost, that requests may address it by (default: any; none if --host is a "
        "loopback address and no key is needed)")  # fmt: skip
    add("--ssl-certfile", metavar="FILE", type=Path, help="serve HTTPS with this certificate chain")
    add("--ssl-keyfile", metavar="FILE", type=Path, help="its private key, if that is in a file of its own")
    add("--ssl-ca-certs", metavar="FILE", type=Path, help="ask clients for a certificate that one of these has signed")

    add = parser.add_argument_group("chat").add_argument
    add("--chat-template", metavar="FILE", type=Path, help="a Jinja template instead of the model's own")
    add("--trust-request-chat-template", action="store_true", help="take templates from requests, too")
    add("--tool-call-parser", choices=("auto", "none", *sorted(FORMATS)), default="auto",
        help="how the model writes tool calls; auto: as its chat template does")  # fmt: skip
    add("--generation-config", choices=("auto", "vllm"), default="auto",
        help="auto: defaults of sampling parameters as in the model's files; vllm: as in the API")  # fmt: skip
    add_engine_flags(parser, positional=True)
    vllm_flags.add_flags(parser)


def add_engine_flags(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """A flag for each field of EngineConfig, by its name. Every command that loads a model has them.

    Args:
        positional: the model may be given without its flag, too.
    """
    defaults = EngineConfig()
    group = parser.add_argument_group("the model")
    add, either = group.add_argument, group.add_mutually_exclusive_group()
    if positional:
        either.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="the same as --model")
    either.add_argument("--model", default=defaults.model, help="a directory, a hub id, or demo")
    add("--revision", metavar="NAME", help="branch, tag or commit of a hub id (default: main)")
    add("--tokenizer", metavar="MODEL", help="directory or hub id of a tokenizer (default: the model's own)")
    add("--skip-tokenizer-init", action="store_true", help="load no tokenizer: token ids in, token ids out")
    add("--load-format", choices=LOAD_FORMATS, default=defaults.load_format, help="dummy: random weights")
    add("--kv-cache-dtype", choices=tuple(KV_CACHE_DTYPES), default=defaults.kv_cache_dtype,
        help="of the KV pool: fp8 holds twice as many tokens as 16 bits, less exactly (docs/operation.md)")  # fmt: skip
    add("--dtype", choices=("auto", *DTYPES, *DTYPE_ALIASES), default=defaults.dtype,
        help="auto: float32 on a CPU, else the checkpoint's")  # fmt: skip
    add("--max-model-len", type=count, metavar="TOKENS", help="longest sequence, such as 32k (default: the model's)")
    add("--seed", type=int, default=defaults.seed, help="of requests without a seed, and of dummy weights")
    add("--kernels", choices=KERNELS, default=defaults.kernels,
        help="attention kernels; auto: the fastest that the device and the model allow")  # fmt: skip

    add = parser.add_argument_group("memory").add_argument
    add("--gpu-memory-utilization", type=float, default=defaults.gpu_memory_utilization, metavar="SHARE",
        help="share of the memory that jax has for parameters, KV pool and temporaries")  # fmt: skip
    add("--num-gpu-blocks-override", type=count, metavar="BLOCKS",
        help="size of the KV pool, instead of measuring memory")  # fmt: skip
    add("--block-size", type=int, metavar="TOKENS",
        help="tokens per KV block (default: 16; 64 on a CPU for sequences of 2,048 tokens and more)")  # fmt: skip
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=defaults.enable_prefix_caching,
        help="reuse the KV of prompts that begin alike")  # fmt: skip
    add("--swap-space", type=float, default=defaults.swap_space, metavar="GIB",
        help="host memory for the blocks of preempted requests")  # fmt: skip

    add = parser.add_argument_group("scheduling").add_argument
    add("--max-num-seqs", type=count, metavar="SEQS",
        help="most sequences in a step (default: 64 on a CPU, 256 on a GPU)")  # fmt: skip
    add("--max-num-batched-tokens", type=count, metavar="TOKENS",
        help="most tokens in a step (default: 128 on a CPU, 2048 on a GPU, fewer beside decodes)")  # fmt: skip
    add("--async-scheduling", action=argparse.BooleanOptionalAction, default=defaults.async_scheduling,
        help="dispatch a step before the tokens of the one before it are known")  # fmt: skip
    add("--scheduling-policy", choices=SCHEDULING_POLICIES, default=defaults.scheduling_policy,
        help="priority: by the requests' priorities, lower ones first")  # fmt: skip
    add("--preemption-mode", choices=PREEMPTION_MODES, default=defaults.preemption_mode,
        help="treatment of a preempted request's blocks; auto: the cheaper one")  # fmt: skip


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings from flags and defaults."""
    names = (field.name for field in fields(EngineConfig))
    return EngineConfig(**{name: value for name in names if (value := getattr(args, name, None)) is not None})


def run(args: argparse.Namespace) -> None:
    with logging_to(sys.stderr, args.access_log, args.log_level):
        vllm_flags.log_notices(args)
        engine, server, tls = engine_config(args), server_config(args), tls_context(args)
        with bound_sockets(args) as sockets:
            _serve(args, engine, server, sockets, tls)


def _serve(
    args: argparse.Namespace, engine_config: EngineConfig, config: ServerConfig, sockets: Sequence[socket.socket],
    tls: ssl.SSLContext | None,
) -> None:  # fmt: skip
    # jax would take three quarters of a GPU's memory; a server has it to itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    with loading() as bars:
        from jpaged.engine.build import (  # jax takes seconds to load: not for --help, nor for a bad flag
            load_engine,
            prepare,
        )
        from jpaged.serving.serve import serve

        prepared = prepare(engine_config, chat_template=config.chat_template)
        engine, tokenizer, sampling_defaults = load_engine(engine_config, prepared=prepared, progress=bars)
    service = make_service(
        engine, tokenizer, args.served_model_name[0] if args.served_model_name else args.model, config,
        sampling_defaults=sampling_defaults if args.generation_config == "auto" else {},
        tool_format=_tool_format(args, tokenizer, config),
    )  # fmt: skip
    asyncio.run(serve(service, sockets, tls))


@contextlib.contextmanager
def bound_sockets(args: argparse.Namespace) -> Iterator[Sequence[socket.socket]]:
    """The sockets of the flags, closed at the end. Raises OSError if an address is in use, or is none."""
    flag = "--uds" if args.uds else "--host, --port"
    with contextlib.ExitStack() as stack:
        try:
            if args.uds:
                sockets = [stack.enter_context(bound_unix(args.uds))]
            else:
                sockets = [stack.enter_context(each) for each in bind(args.host, args.port)]
        except (OSError, OverflowError) as error:  # OverflowError: a port above 65535
            raise OSError(f"{flag}: {error}") from error
        yield sockets


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Return the server's settings from flags, key file and environment. Raises ValueError or OSError."""
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
    # A site whose name leads to this machine (DNS rebinding) can't know a key, nor reach a Unix domain socket.
    only_loopback = is_loopback(args.host) and not (keys or args.uds)
    return ServerConfig(
        api_keys=tuple(keys), chat_template=args.chat_template.read_text() if args.chat_template else None,
        trust_request_chat_template=args.trust_request_chat_template, max_queue=args.max_queue,
        max_body_size=None if args.max_body_size is None else int(args.max_body_size * 2**20),
        request_timeout=args.request_timeout, drain_timeout=args.drain_timeout,
        allowed_origins=_origins(args.allowed_origins),
        allowed_hosts=tuple(args.allowed_hosts) if args.allowed_hosts or only_loopback else None,
        root_path=args.root_path, aliases=tuple(args.served_model_name[1:]),
    )  # fmt: skip


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    """The values of --allowed-origins; vLLM's users write a list as JSON."""
    if len(given) == 1 and given[0].startswith("["):
        try:
            given = json.loads(given[0])
        except ValueError as error:
            raise ValueError(f"--allowed-origins: {given[0]} is not valid JSON: {error}") from error
    return tuple(map(str, given))


def tls_context(args: argparse.Namespace) -> ssl.SSLContext | None:
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


def _tool_format(args: argparse.Namespace, tokenizer: Any, config: ServerConfig) -> ToolFormat | None:
    name = args.tool_call_parser
    if name == "auto":
        template = config.chat_template or getattr(tokenizer, "chat_template", None)
        name = detect(template) if isinstance(template, str) else None
    return FORMATS.get(name)

"""Serves a model over HTTP, in the OpenAI API's form: `python server.py --help`."""

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from jpaged.config import DTYPES, KERNELS, LOAD_FORMATS, PREEMPTION_MODES, SCHEDULING_POLICIES, EngineConfig


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    defaults = EngineConfig()
    parser = argparse.ArgumentParser(
        prog="server.py",
        description="Serve a Llama over HTTP, in the OpenAI API's form.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=defaults.model, help="a directory, a hub id, or demo")
    add("--served-model-name", metavar="NAME", help="the name that clients ask for (default: as --model)")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    add("--port", type=int, default=8000)
    add("--api-key", metavar="KEY", help="ask clients of /v1 for this key")
    add("--chat-template", metavar="FILE", type=Path, help="a Jinja template instead of the model's own")
    add(
        "--dtype",
        choices=("auto", *DTYPES),
        default=defaults.dtype,
        help="auto: float32 on a CPU, else the checkpoint's",
    )
    add("--seed", type=int, default=defaults.seed, help="of requests without a seed, and of dummy weights")
    add("--load-format", choices=LOAD_FORMATS, default=defaults.load_format, help="dummy: random weights")
    add("--max-model-len", type=int, metavar="TOKENS", help="longest sequence (default: the model's)")
    add("--block-size", type=int, default=defaults.block_size, metavar="TOKENS", help="tokens per KV block")
    add("--gpu-memory-utilization", type=float, default=defaults.gpu_memory_utilization, metavar="SHARE",
        help="share of the memory that jax has for parameters, KV pool and temporaries")  # fmt: skip
    add(
        "--num-gpu-blocks-override", type=int, metavar="BLOCKS", help="size of the KV pool, instead of measuring memory"
    )
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=defaults.enable_prefix_caching,
        help="reuse the KV of prompts that begin alike")  # fmt: skip
    add("--swap-space", type=float, default=defaults.swap_space, metavar="GIB",
        help="host memory for the blocks of preempted requests")  # fmt: skip
    add("--preemption-mode", choices=PREEMPTION_MODES, default=defaults.preemption_mode,
        help="what becomes of a preempted request's blocks; auto: what costs less")  # fmt: skip
    add("--scheduling-policy", choices=SCHEDULING_POLICIES, default=defaults.scheduling_policy,
        help="priority: by the requests' priorities, lower ones first")  # fmt: skip
    add(
        "--max-num-seqs", type=int, metavar="SEQS", help="most sequences in a step (default: 64 on a CPU, 256 on a GPU)"
    )
    add("--max-num-batched-tokens", type=int, metavar="TOKENS",
        help="most tokens in a step (default: 512 on a CPU, 2048 on a GPU)")  # fmt: skip
    add(
        "--kernels",
        choices=KERNELS,
        default=defaults.kernels,
        help="attention kernels (default: auto, the fastest that the device and the model allow)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        run(args)
    except (ValueError, NotImplementedError, OSError) as error:
        sys.exit(f"server.py: error: {' '.join(str(error).split())}")


def run(args: argparse.Namespace) -> None:
    chat_template = args.chat_template.read_text() if args.chat_template else None
    config = EngineConfig(
        model=args.model, dtype=args.dtype, seed=args.seed, load_format=args.load_format,
        max_model_len=args.max_model_len, block_size=args.block_size,
        gpu_memory_utilization=args.gpu_memory_utilization, num_gpu_blocks_override=args.num_gpu_blocks_override,
        enable_prefix_caching=args.enable_prefix_caching, swap_space=args.swap_space,
        preemption_mode=args.preemption_mode, scheduling_policy=args.scheduling_policy, max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens, kernels=args.kernels,
    )  # fmt: skip
    # jax would take three quarters of a GPU's memory; a server has it to itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    from jpaged.async_engine import AsyncEngine  # jax takes seconds to load: not for --help, nor for a bad flag
    from jpaged.load import load_engine
    from jpaged.serving.app import Service
    from jpaged.serving.serve import serve

    engine, tokenizer, sampling_defaults = load_engine(config)
    service = Service(
        AsyncEngine(engine), tokenizer, args.served_model_name or args.model, engine.scheduler.limits.max_model_len,
        sampling_defaults, chat_template=chat_template, api_key=args.api_key,
    )  # fmt: skip
    asyncio.run(serve(service, args.host, args.port))


if __name__ == "__main__":
    main()

"""Plan a deployment: the users that a GPU holds, at which latency, without a GPU.

  jpaged plan                                     Llama-3-8B on one H100, ShareGPT's lengths
  jpaged plan --gpu h200 --model DIR --workload random --input-len 1000 --output-len 200
  jpaged plan --gpu rtx-4090 --model llama-3.1-8b --quantization int8 --max-model-len 16384
  jpaged plan --users 64 128 256                  the latencies of these numbers of users
  jpaged plan --request-rate 2 4 8                the same of Poisson arrivals
  jpaged plan --max-ttft 0.5 --max-tpot 0.03 --think-time 10
  jpaged plan --trace requests.jsonl              the same of the requests of a trace

The engine's own scheduler and allocator run on a virtual clock. The duration of a step is that of the GPU's roofline,
or of a table of measured steps (--costs). Each user sends a request, waits for its answer, thinks, and sends the next
one. Without --users, --request-rate and --trace, the command searches for the largest number of users of which 99 % of
the requests are within --max-ttft and --max-tpot, and repeats the search with another KV dtype, block size and number
of GPUs.
A CPU (--gpu ryzen-9-7950x) reads and multiplies only the experts that a step's tokens take; a GPU all of them.
Results are predictions, not measurements.
"""

import argparse
import asyncio
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from jpaged.bench.report import table
from jpaged.bench.source import open_file
from jpaged.bench.tokens import load_tokenizer
from jpaged.bench.workload import Lengths, Workload, arrivals, fit
from jpaged.cli import workload
from jpaged.cli.parser import count
from jpaged.cli.setting_flags import config_of
from jpaged.progress import track
from jpaged.simulator.capacity import best, estimate, search
from jpaged.simulator.cost import CostTable
from jpaged.simulator.deployment import MAX_USERS, Deployment
from jpaged.simulator.gpu import CPUS, GPUS
from jpaged.simulator.load import MEASURED, LatencyLimits, Load, Traffic, load_of_rate, load_of_trace, load_of_users
from jpaged.simulator.shape import SHAPES, ModelShape
from jpaged.simulator.traffic import load_trace

KV_DTYPES = {"auto": 2, "fp8": 1, "float16": 2, "bfloat16": 2}  # bytes
# Bits of a weight of linear layers and experts, and of one of the embedding and the output matrix, as an engine holds
# them: groups of 32 or 128 weights share a scale of 16 bits and, by kind, a minimum of 16 or 32 bits.
QUANTIZATIONS = {
    None: (16.0, 16.0), "int8": (8.0, 16.0), "fp8": (8.0, 16.0), "int4": (4 + 32 / 32, 16.0),
    "awq": (4 + 48 / 128, 16.0), "gptq": (4 + 48 / 128, 16.0),
    "q8_0": (8 + 16 / 32, 8 + 16 / 32), "q4_0": (4 + 16 / 32, 8 + 16 / 32), "q4_1": (4 + 32 / 32, 8 + 16 / 32),
}  # fmt: skip
# Weights as they are stored: most GPUs have no products for them.
STORED_QUANTIZATIONS = ("awq", "gptq", "q8_0", "q4_0", "q4_1")
DEVICES = GPUS | CPUS


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged plan`."""
    defaults = Deployment.__dataclass_fields__
    add = parser.add_argument_group("deployment").add_argument
    add("--gpu", choices=tuple(DEVICES), default="h100", help="kind of the GPUs, or a CPU")
    add("--model", default="llama-3-8b", metavar="MODEL",
        help=f"a directory or hub id with a config.json, or one of {', '.join(SHAPES)}")  # fmt: skip
    add("--tensor-parallel-size", "-tp", type=int, default=1, metavar="GPUS", help="number of GPUs of one engine")
    add("--quantization", choices=tuple(filter(None, QUANTIZATIONS)),
        help="kind of the weights of linear layers and experts (default: 16 bits); of a CPU or one Hopper GPU only: "
        f"{', '.join(STORED_QUANTIZATIONS)}")  # fmt: skip
    add("--kv-cache-dtype", choices=tuple(KV_DTYPES), default="auto", help="dtype of the KV pool; auto: 16 bits")
    add("--block-size", type=int, default=defaults["block_size"].default, metavar="TOKENS", help="tokens of a block")
    add("--max-model-len", type=count, metavar="TOKENS", help="maximum tokens of a sequence (default: the model's)")
    add("--max-num-seqs", type=count, metavar="SEQUENCES",
        help="maximum sequences of a step (default: one for each user)")  # fmt: skip
    add("--max-num-batched-tokens", type=count, default=defaults["max_num_batched_tokens"].default, metavar="TOKENS",
        help="maximum tokens of a step")  # fmt: skip
    add("--gpu-memory-utilization", type=float, default=defaults["gpu_memory_utilization"].default, metavar="SHARE",
        help="share of the GPU's memory for parameters, KV pool and temporaries")  # fmt: skip
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True,
        help="reuse the KV of prompts with a common beginning")  # fmt: skip
    add("--costs", type=Path, metavar="FILE",
        help="table of measured steps, from benchmarks/engine/step_table.py (default: the GPU's roofline)")  # fmt: skip
    workload.add_flags(parser)
    parser.add_argument("--tokenizer", metavar="MODEL", help="tokenizer that counts the tokens of --workload file")
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and arrivals")

    _add_load_flags(parser.add_argument_group("load"))
    workload.add_out_flag(parser.add_argument_group("report"))


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    limits = LatencyLimits()
    one_of = group.add_mutually_exclusive_group().add_argument
    one_of("--users", type=_users, nargs="+", metavar="N", help="numbers of users, instead of a search")
    one_of("--request-rate", type=_positive, nargs="+", metavar="R",
        help="Poisson arrivals per second, instead of users")  # fmt: skip
    one_of("--trace", type=Path, metavar="FILE",
        help="requests with their arrivals as JSON lines, instead of a workload (docs/planning.md)")  # fmt: skip
    add = group.add_argument
    add("--think-time", type=_think_time, default=0.0, metavar="SECONDS",
        help="time from an answer to the same user's next request")  # fmt: skip
    add("--max-ttft", type=_positive, default=limits.ttft, metavar="SECONDS",
        help="limit of the 99th percentile of time to first token")  # fmt: skip
    add("--max-tpot", type=_positive, default=limits.tpot, metavar="SECONDS",
        help="limit of the 99th percentile of time per output token")  # fmt: skip


def _users(text: str) -> int:
    if (number := count(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def _positive(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, not {text}")
    return number


def _think_time(text: str) -> float:
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0 and finite, not {text}")
    return number


def run(args: argparse.Namespace) -> None:
    """Run `jpaged plan`."""
    deployment, limits = deployment_of(args), LatencyLimits(args.max_ttft, args.max_tpot)
    found: dict[str, list[Load]]
    if args.trace:
        calls = load_trace(args.trace)
        print(_facts(deployment, [(call.num_prompt_tokens, call.output) for call in calls]))
        found = {"": [load_of_trace(deployment, calls)]}
        print(_table(found[""], "requests", [str(len(calls))]))
    else:
        traffic = Traffic(asyncio.run(_lengths(args, deployment.max_model_len)), args.think_time)
        print(_facts(deployment, [(each.prefix_tokens + each.prompt, each.output) for each in traffic.lengths]))
        if given := args.users or args.request_rate:
            number = max(args.num_prompts, 2 * MEASURED)
            loads = (
                load_of_users(deployment, traffic, each)
                if args.users
                else load_of_rate(deployment, traffic, arrivals(number, each, seed=args.seed))
                for each in given
            )
            found = {"": list(track(loads, len(given), "simulated", "load", bar=sys.stderr.isatty()))}
            rates = [f"{rate:g}" for rate in args.request_rate or ()]
            print(_table(found[""], "rate", rates) if rates else _table(found[""]))
        else:
            found = _found(deployment, traffic, limits)
            print(_answer(found, limits))
    if args.out:
        content = {
            "deployment": asdict(replace(deployment, costs=None))
            | {"gpu": deployment.gpu.name, "shape": deployment.shape.name},
            "limits": limits._asdict(),
            "workload": str(args.trace) if args.trace else asdict(config_of(args, Workload)),
            "pool_tokens": deployment.pool_tokens, "costs": deployment.cost.source,
            "loads": {name or "as given": [load._asdict() for load in loads] for name, loads in found.items()},
        }  # fmt: skip
        workload.write_report(args.out, content)


def deployment_of(args: argparse.Namespace) -> Deployment:
    """Return the deployment of the flags."""
    shape = SHAPES.get(args.model)
    if shape is None:  # it is in a directory or under a hub id
        from jpaged.models.registry import read_config  # it loads jax
        from jpaged.start.setup import find_model

        shape = ModelShape.of(read_config(find_model(args.model, weights=False)), args.model)
    gpu = DEVICES[args.gpu]
    if args.quantization in STORED_QUANTIZATIONS and not gpu.multiplies(args.tensor_parallel_size):
        several = "" if args.tensor_parallel_size == 1 else f"{args.tensor_parallel_size} x "
        raise ValueError(
            f"quantization: {args.quantization} is kept on a CPU or one Hopper GPU only: {several}{args.gpu} has int8, "
            "fp8 and int4"
        )
    return Deployment(
        gpu, shape, args.tensor_parallel_size, KV_DTYPES[args.kv_cache_dtype], args.block_size,
        args.max_num_seqs, args.max_num_batched_tokens, args.gpu_memory_utilization, args.enable_prefix_caching,
        CostTable.load(args.costs) if args.costs else None, *QUANTIZATIONS[args.quantization],
        max_model_len=shape.context if args.max_model_len is None else args.max_model_len,
    )  # fmt: skip


async def _lengths(args: argparse.Namespace, room: int) -> list[Lengths]:
    """Return the lengths of the workload's requests, of at most `room` tokens."""
    work = config_of(args, Workload)
    if work.file is None:
        lengths, shortened = fit(work.lengths(), room)
        if shortened:
            print(f"Note: {shortened} of {len(lengths)} requests were shortened to {room} tokens.")
        return lengths
    if (tokenizer := args.tokenizer or args.model) in SHAPES:
        raise ValueError("tokenizer: --workload file needs one, to count the tokens of its texts")
    tokens = _Tokens(tokenizer)
    source = await open_file(work, tokens, room)
    for note in source.notes:
        print(f"Note: {note}.")
    return [Lengths(await tokens.of_prompt(job.content), job.max_tokens or 1) for job in source.jobs("")]


class _Tokens:
    """Token counter with a tokenizer, without chat templates."""

    def __init__(self, tokenizer: str):
        self._tokenizer = load_tokenizer(tokenizer)

    async def ids(self, text: str) -> list[int]:
        """Return the text's token ids, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    async def count(self, text: str) -> int:
        """Return the number of tokens of `ids`."""
        return len(await self.ids(text))

    async def of_prompt(self, content: Any) -> int:
        """Return the number of tokens of a prompt."""
        if isinstance(content, str):
            return await self.count(content)
        if isinstance(content[0], int):
            return len(content)
        return sum([await self.count(str(message.get("content"))) for message in content])


def variants(deployment: Deployment) -> dict[str, Deployment]:
    """Return deployments with one change each, as far as they are possible."""
    gpus, size = 2 * deployment.num_gpus, 4 * deployment.block_size
    changes: dict[str, dict[str, Any]] = {f"--block-size {size}": {"block_size": size}}
    if deployment.costs is None:
        changes = {f"--tensor-parallel-size {gpus}": {"num_gpus": gpus}} | changes
        if deployment.kv_dtype_bytes > 1:
            changes = {"--kv-cache-dtype fp8": {"kv_dtype_bytes": 1}} | changes
    found = {}
    for name, change in changes.items():
        with suppress(ValueError):  # the heads do not divide, for example
            found[name] = replace(deployment, **change)
    return found


def _found(deployment: Deployment, traffic: Traffic, limits: LatencyLimits) -> dict[str, list[Load]]:
    """Return the loads of the searches for a deployment and its variants, and print those of the deployment."""
    own = sorted(track(search(deployment, traffic, limits), None, "simulated", "load", bar=sys.stderr.isatty()))
    print(_table(own))
    load = best(own, limits)
    # The estimate errs alike for all.
    factor = ((load.users if load else None) or 1) / estimate(deployment, traffic, limits)
    cases = variants(deployment)
    with ProcessPoolExecutor(min(len(cases) or 1, os.cpu_count() or 1), get_context("spawn")) as pool:
        runs = [pool.submit(_search, name, case, traffic, limits, factor) for name, case in cases.items()]
        searches = (done.result() for done in as_completed(runs))
        others = dict(track(searches, len(cases), "searched", "deployment", bar=sys.stderr.isatty()))
    return {"": own} | {name: others[name] for name in cases}


def _search(
    name: str, deployment: Deployment, traffic: Traffic, limits: LatencyLimits, factor: float
) -> tuple[str, list[Load]]:
    """Return the loads of a search; `factor` is the capacity of a similar deployment divided by its estimate."""
    start = max(1, round(factor * estimate(deployment, traffic, limits)))
    return name, list(search(deployment, traffic, limits, start))


def _facts(deployment: Deployment, lengths: Sequence[tuple[int, int]]) -> str:
    """Return the facts of a deployment and of requests with some tokens of prompt and output."""
    shape, tokens = deployment.shape, deployment.pool_tokens
    kv_bytes = shape.kv_bytes(deployment.kv_dtype_bytes, deployment.num_gpus)
    inputs, outputs = (fmean(column) for column in zip(*lengths))
    bits, grouped = deployment.weight_bits, deployment.gpu.multiplies(deployment.num_gpus)
    read = ", ".join(f"{shape.experts_read(tokens, grouped):.0f} of {tokens}" for tokens in (1, 8, 64))
    experts = f"experts of a layer that a step reads, by tokens: {read}\n" if shape.num_experts and grouped else ""
    return (
        f"{shape.name}: {shape.num_params / 1e9:.2f}e9 parameters, {deployment.param_bytes / 2**30:.1f} GiB"
        f"{' in 16 bits' if bits == 16 else f', weights of layers in {bits:g} bits'}\n"
        f"KV pool: {tokens:,} tokens of {kv_bytes / 1024:.0f} KiB, {tokens * kv_bytes / 2**30:.1f} GiB\n"
        f"{_windows(deployment)}{_states(deployment)}"
        f"{experts}requests: {inputs:.0f} tokens in, {outputs:.0f} out on average\n"
        f"predicted, not measured; duration of a step: {deployment.cost.source}\n"
    )


def _windows(deployment: Deployment) -> str:
    """Return the memory of a longest sequence of a model whose layers have windows."""
    groups, length = deployment.groups, deployment.max_model_len
    if groups.windows.count(None) == len(groups.windows):
        return ""
    kinds = ", ".join(f"{count} of {window or 'all'}" for window, count in Counter(groups.windows).items())
    return (
        f"groups of {groups.size} layers, by the tokens that they see: {kinds}; a sequence of {length:,} tokens holds "
        f"at most {deployment.kv_bytes(length) / 2**30:.2f} GiB\n"
    )


def _states(deployment: Deployment) -> str:
    """Return the memory of the states of a model with recurrent layers."""
    shape = deployment.shape
    if not shape.state_bytes:
        return ""
    return (
        f"{shape.num_layers - shape.num_attention_layers} recurrent layers: {deployment.num_pages:,} states of "
        f"{shape.state_bytes / 2**20:.1f} MiB, as much as the KV of "
        f"{shape.state_bytes / shape.kv_bytes(deployment.kv_dtype_bytes):,.0f} tokens\n"
    )


def _table(loads: Sequence[Load], title: str = "users", names: Sequence[str] | None = None) -> str:
    head = [title, "requests/s", "output tok/s", "ttft p50 ms", "p99", "tpot p50 ms", "p99",
            "running", "KV used", "preempted", "cached"]  # fmt: skip
    rows = [
        [name, f"{load.requests_per_s:.2f}", f"{load.tokens_per_s:.0f}",
         *(f"{1e3 * seconds:.1f}" for seconds in (load.ttft, load.ttft_p99, load.tpot, load.tpot_p99)),
         f"{load.running:.0f}", f"{load.kv_used:.0%}", f"{load.preemptions:.0%}", f"{load.cached:.0%}"]
        for name, load in zip(names or [str(load.users) for load in loads], loads, strict=True)
    ]  # fmt: skip
    return table([head, *rows])


def _answer(found: Mapping[str, Sequence[Load]], limits: LatencyLimits) -> str:
    rows = [["", "users", "requests/s", "output tok/s", "ttft p99 ms", "tpot p99 ms", "KV used"]]
    for name, loads in found.items():
        load = best(loads, limits)
        cells = ["none", *5 * "-"] if load is None else [
            f"{load.users} or more" if load.users == MAX_USERS else str(load.users),
            f"{load.requests_per_s:.2f}", f"{load.tokens_per_s:.0f}", f"{1e3 * load.ttft_p99:.0f}",
            f"{1e3 * load.tpot_p99:.1f}", f"{load.kv_used:.0%}",
        ]  # fmt: skip
        rows.append([name or "as given", *cells])
    title = "most users with 99 % of the requests within "
    title += f"{limits.ttft:g} s to the first token and {1e3 * limits.tpot:g} ms per token"
    return f"\n{title}:\n\n{table(rows)}"

"""Measures several engines of one process beside one engine: throughput, and the prompt tokens found in their caches.

    JAX_PLATFORMS=cpu python benchmarks/engine/replicas.py --out results      a minute

The demo model on CPU devices, which share the machine's processors: two engines can't be faster than one there, and the
figures show the cost of the division. Prompts have a few common prefixes. "by load" divides them without looking at
their prefixes.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table

PREFIXES, REQUESTS, PREFIX_TOKENS, OUTPUT_TOKENS, CONCURRENCY = 8, 64, 192, 32, 16


def prompts(round_number: int) -> list[list[int]]:
    """Return prompts of token ids, the ones with a common prefix apart from each other."""
    return [
        [10 + n % PREFIXES + 20 * round_number] * PREFIX_TOKENS + [200 + n // PREFIXES, 300 + n]
        for n in range(REQUESTS)
    ]


def clients(num_engines: int) -> list[Any]:
    """Return engines that have compiled their steps, each on a device of its own."""
    from jpaged.config import EngineConfig
    from jpaged.engine.async_engine import AsyncEngine
    from jpaged.start.load import start_engine
    from jpaged.start.setup import on_further_devices, prepare

    config = EngineConfig(
        max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512, num_gpu_blocks_override=600 // num_engines
    )
    replicas = on_further_devices(prepare(config), num_engines)
    return [AsyncEngine(start_engine(each, progress=False)) for each in replicas]


async def seconds(client: Any, round_number: int) -> float:
    """Return the time of all requests, `CONCURRENCY` of them at once."""
    from jpaged.core.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    waiting = iter(enumerate(prompts(round_number)))

    async def work() -> None:
        for number, prompt in waiting:
            async with client.generate(f"{round_number} {number}", [prompt], params) as parts:
                async for _ in parts:
                    pass

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return time.perf_counter() - start


async def measured(client: Any, rounds: int) -> dict[str, float]:
    """Return the median throughput, and the share of prompt tokens found in a cache."""
    client.start()
    await seconds(client, rounds)
    before, times = client.stats(), []
    for round_number in range(rounds):
        times.append(await seconds(client, round_number))
    after = client.stats()
    await client.stop()
    return {
        "tokens_per_s": REQUESTS * OUTPUT_TOKENS / statistics.median(times),
        "cached_share": (after.prefix_hits - before.prefix_hits) / (after.prefix_queries - before.prefix_queries),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "replicas")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each case is timed")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"
    prepare_environment()
    from jpaged.engine.prefix_table import PrefixTable
    from jpaged.engine.router import Router

    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    by_load: PrefixTable[int] = PrefixTable(step=10**6)  # no prompt is so long
    cases = {
        "one engine": lambda: clients(1)[0],
        "two engines, by prefix": lambda: Router(clients(2)),
        "two engines, by load": lambda: Router(clients(2), by_load),
    }
    for name, client in cases.items():
        report.add(experiment="replicas", case=name, **asyncio.run(measured(client(), args.rounds)))
    report.publish(
        "Several engines of one process",
        f"{REQUESTS} requests with {PREFIXES} prefixes of {PREFIX_TOKENS} tokens, {OUTPUT_TOKENS} tokens of output, "
        f"{CONCURRENCY} at once; medians of {args.rounds} rounds. CPU devices share the machine's processors.",
        table(report.rows, ("case", "tokens_per_s", "cached_share")),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

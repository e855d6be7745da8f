"""Throughput of low-rank adapters on a CPU beside the model alone, and the time to load one.

    python benchmarks/engine/adapters.py --out results            some minutes
    python benchmarks/engine/adapters.py --model demo

The model is that of `cpu_serving.py` with random parameters, in float32; adapters have rank 16 in every linear layer.
Each round runs the same requests in turn without slots; in an engine with eight slots, for the model alone, for one
adapter, for eight, and for 200 adapters drawn by Zipf's law. The engine without slots has the speed of one that serves
a single merged adapter. Ratios are to it within a round; medians over the rounds.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from benchmarks.engine.cpu_serving import CONCURRENCY, write_model
from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from jpaged import LLM, SamplingParams
from jpaged.models.adapters import Adapter, Pair, SlotsForm

SLOTS, RANK, ADAPTERS, REQUESTS, PROMPT, OUTPUT = 8, 16, 200, 32, 64, 64
COLUMNS = ("case", "tokens_s", "ratio")


def random_adapter(form: SlotsForm, seed: int) -> Adapter:
    """Return an adapter of all layers on the host."""
    rng = np.random.default_rng(seed)
    pairs = {
        name: Pair(
            rng.standard_normal((RANK, inputs), np.float32) / inputs**0.5,
            rng.standard_normal((RANK, outputs), np.float32) / 100,
        ) for name, (outputs, inputs) in form.layers.items()
    }  # fmt: skip
    return Adapter(pairs, {})


def zipf(count: int, seed: int) -> list[str]:
    """Draw names of adapters: the k-th most popular one has a weight of 1 / k."""
    weights = [1 / (rank + 1) for rank in range(ADAPTERS)]
    return random.Random(seed).choices([f"a{number}" for number in range(ADAPTERS)], weights, k=count)


def throughput(llm: LLM, adapters: Sequence[str | None], seed: int) -> float:
    """Generate for new prompts, one for each adapter, and return the output tokens per second."""
    rng = random.Random(seed)
    size = llm.engine.scheduler.vocab_size
    prompts = [[rng.randrange(3, size) for _ in range(PROMPT)] for _ in adapters]
    params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
    return len(prompts) * OUTPUT / (time.perf_counter() - start)


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__, "adapters")
    parser.add_argument("--model", help="another model; the default has 110 million random parameters")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each case is measured")
    parser.add_argument("--dtype", default="float32", help="dtype of parameters and adapters")
    return parser.parse_args()


def main() -> int:
    prepare_environment()
    args = parse()
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(write_model(Path(folder)))
        settings = dict(
            max_num_seqs=CONCURRENCY, max_model_len=256, dtype=args.dtype, progress=False,
            load_format="auto" if args.model else "dummy",
        )  # fmt: skip
        plain = LLM(model, **settings)
        slotted = LLM(model, enable_lora=True, max_loras=SLOTS, max_lora_rank=RANK, **settings)
    runner = slotted.engine.runner
    for number in range(ADAPTERS):  # of eight different contents: they differ in their names
        slotted.load_adapter(f"a{number}", random_adapter(runner.adapters.form, number % 8))
    cases: dict[str, Callable[[int], float]] = {
        "without slots": lambda seed: throughput(plain, [None] * REQUESTS, seed),
        "slots, model alone": lambda seed: throughput(slotted, [None] * REQUESTS, seed),
        "1 adapter": lambda seed: throughput(slotted, ["a0"] * REQUESTS, seed),
        f"{SLOTS} adapters": lambda seed: throughput(slotted, [f"a{i % SLOTS}" for i in range(REQUESTS)], seed),
        f"{ADAPTERS} adapters": lambda seed: throughput(slotted, zipf(REQUESTS, seed), seed),
    }
    for run in cases.values():
        run(-1)
    for number in range(args.rounds):
        for case, run in cases.items():
            report.add(round=number, case=case, tokens_s=run(number))
    seconds = []
    for number in range(args.rounds * 4):
        start = time.perf_counter()
        slotted.load_adapter(f"a{number}", random_adapter(runner.adapters.form, number % 8))
        loaded = time.perf_counter()
        runner.adapters.apply(_Loads(((slotted.engine.adapters.number(f"a{number}"), 0),)))
        jax.block_until_ready(runner.adapters.slots)
        seconds.append((loaded - start, time.perf_counter() - loaded))
    slotted.engine.scheduler.rows.adapters.clear()
    found = {case: [row["tokens_s"] for row in report.rows if row["case"] == case] for case in cases}
    base = found["without slots"]
    rows = [
        {"case": case, "tokens_s": statistics.median(rates),
         "ratio": statistics.median(rate / alone for rate, alone in zip(rates, base))}
        for case, rates in found.items()
    ]  # fmt: skip
    into_slot = 1000 * statistics.median(each for _, each in seconds)
    report.publish(
        "Low-rank adapters on a CPU",
        f"{args.dtype}; {REQUESTS} requests of {PROMPT} tokens and {OUTPUT} more, {CONCURRENCY} at a time; rank {RANK} "
        f"in every linear layer; {SLOTS} slots. Medians of {args.rounds} rounds.",
        table(rows, COLUMNS),
        f"An adapter moves from the host into a slot in {into_slot:.1f} ms.",
    )
    return 0


class _Loads:
    """A plan that loads adapters only."""

    def __init__(self, adapters: tuple[tuple[int, int], ...]):
        self.adapters = adapters


if __name__ == "__main__":
    sys.exit(main())

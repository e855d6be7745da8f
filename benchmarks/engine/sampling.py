"""Measures sampling on a CPU: the compiled kernels beside the definitions, which XLA compiles.

    JAX_PLATFORMS=cpu python benchmarks/engine/sampling.py --out results      two minutes

Logits of some rows are given. Each row gets a token, its logprob and maybe a list, as in a step of an engine. The
product that makes the logits is no part of it.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table

VOCABULARIES, ROWS, NUM_TOP = (49_152, 151_936), (1, 8, 24), 20
KINDS = {
    "greedy": {},
    "greedy, logprobs of the tokens": {"num_top": 1},
    "greedy, 20 logprobs": {"num_top": NUM_TOP},
    "temperature": {"temperature": 0.8},
    "temperature, logprobs of the tokens": {"temperature": 0.8, "num_top": 1},
    "temperature, top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}


def arguments(rows: int, vocab_size: int, kind: str) -> tuple[Any, ...]:
    """Return logits, a state and the settings of samples."""
    import jax.numpy as jnp
    import numpy as np

    from jpaged.config import MAX_DRAFTS
    from jpaged.runtime.device_rows import empty_state
    from jpaged.runtime.sampling_row import COLUMNS, Sampling

    columns = {
        name: jnp.full((rows, *column.shape), KINDS[kind].get(name, column.neutral), column.dtype)
        for name, column in COLUMNS.items()
    }
    columns |= dict(rows=jnp.arange(rows, dtype=jnp.int32), positions=jnp.arange(rows, dtype=jnp.int32))
    bits, drafts = jnp.zeros((rows, -(-vocab_size // 32)), jnp.uint32), jnp.full((rows, MAX_DRAFTS), -1, jnp.int32)
    logits = 3 * np.random.default_rng(0).standard_normal((rows, vocab_size))
    return jnp.asarray(logits, jnp.float32), empty_state(rows, vocab_size), Sampling(**columns, allowed_bits=bits,
                                                                                     drafts=drafts)  # fmt: skip


def measured(rows: int, vocab_size: int, kind: str, rounds: int) -> dict[str, Any]:
    """Return the timings of both implementations, in interleaved rounds."""
    from benchmarks.shared.timing import Effort, JaxTimed, measure
    from jpaged.runtime.sampler import SampleOptions, sample
    from pallas_kernels import Ops, load

    logits, *rest = arguments(rows, vocab_size, kind)

    def of(module: str) -> JaxTimed:
        run = partial(sample, options=SampleOptions(NUM_TOP, ops=Ops(load(f"pallas_kernels.{module}"))))
        # The logits are the carry, which is donated: nothing is copied.
        call = lambda carry, shared, own: (carry[0], run(carry[0], *shared))
        return JaxTimed(call, (logits + 0, run(logits, *rest)), rest, [0], donate=True)

    timed = {"kernels": of("cpu"), "definitions": of("reference")}
    return measure(timed, Effort(rounds=rounds, samples=3, min_seconds=0.01))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "sampling")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="how often each is measured in turn")
    parser.add_argument("--tiny", action="store_true", help="small shapes: shows that the program works")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_environment()
    from pallas_kernels import ROW_ORDER

    flags = [f"--{name}={value}" for name, value in ROW_ORDER.items()]  # as an engine compiles sampling
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    report = Report(args.out / "results.json", environment(open_device(tiny=True), args.tiny))
    for vocab_size in (100,) if args.tiny else VOCABULARIES:
        for rows in (2,) if args.tiny else ROWS:
            for kind in KINDS:
                timings = {name: timing.row() for name, timing in measured(rows, vocab_size, kind, args.rounds).items()}
                kernels, definitions = timings["kernels"], timings["definitions"]
                report.add(
                    experiment="sampling", vocabulary=vocab_size, rows=rows, kind=kind, kernels_us=kernels["us"],
                    definitions_us=definitions["us"], ratio=kernels["us"] / definitions["us"],
                )  # fmt: skip
    report.publish(
        "Sampling on a CPU",
        f"Microseconds of one call for all rows: medians of {args.rounds} rounds in turn.",
        table(report.rows, ("vocabulary", "rows", "kind", "kernels_us", "definitions_us", "ratio")),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures the ops of recurrent layers on a CPU: the compiled kernels beside the reference.

    JAX_PLATFORMS=cpu python benchmarks/kernels/recurrence.py --out results      two minutes

A layer has 16 heads of 128 keys and 128 values in bfloat16, and a convolution of 4 taps over their 6,144 channels.
Sequences decode one token each, or are one prompt. Pages are donated. "pages once" reads and writes the pages of the
batch without any other work, by XLA: the time below which no decode step can be.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table

CASES = {"decode, 8 sequences": (8, 8), "decode, 64 sequences": (64, 64), "prompt of 2,048 tokens": (1, 2048)}
TINY_CASES = {"decode, 2 sequences": (2, 2), "prompt of 5 tokens": (1, 5)}
TAPS = 4


def arguments(op: str, sequences: int, tokens: int, heads: int, size: int) -> tuple[list[Any], int, Any]:
    """Return the arguments of an op with the pages left out, their place, and the pages."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import Chains

    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) * 0.1, jnp.bfloat16)
    pages = jnp.arange(sequences, dtype=jnp.int32)
    chains = Chains(jnp.asarray(np.linspace(0, tokens, sequences + 1), jnp.int32), pages, pages)
    if op == "delta_rule":
        factors = [jnp.asarray(rng.uniform(0, 1, (tokens, heads)), jnp.float32) for _ in range(2)]
        qkv = [normal(tokens, heads, size) for _ in range(3)]
        return [*qkv, -factors[0], factors[1], chains], 5, jnp.zeros((sequences, heads, size, size), jnp.float32)
    channels = 3 * heads * size
    given = [normal(tokens, channels), normal(channels, TAPS), normal(channels), chains]
    return given, 3, jnp.zeros((sequences, TAPS - 1, channels), jnp.bfloat16)


def measured(op: str, shape: tuple[int, int, int, int], rounds: int) -> dict[str, Any]:
    """Return the timings of an op's implementations, in interleaved rounds."""
    from benchmarks.shared.timing import Effort, JaxTimed, measure
    from pallas_kernels import Ops, load

    given, at, pages = arguments(op, *shape)

    def of(module: str) -> JaxTimed:
        run = getattr(Ops(load(f"pallas_kernels.{module}")), op)

        def call(carry: Any, shared: Any, own: Any) -> Any:
            out, states = run(*shared[:at], carry[0], *shared[at:])
            return states, out  # the output, too: XLA would not compute it otherwise

        out = given[2] if op == "delta_rule" else given[0]
        return JaxTimed(call, (pages + 0, out + 0), given, [0], donate=True)

    once = JaxTimed(lambda states, shared, own: states * 0.999, pages + 0, 0, [0], donate=True)
    timed = {"pages once": once, "kernel": of("cpu"), "reference": of("reference")}
    return measure(timed, Effort(rounds=rounds, samples=3, min_seconds=0.01))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "recurrence")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="how often each is measured in turn")
    parser.add_argument("--tiny", action="store_true", help="small shapes: shows that the program works")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), args.tiny))
    heads, size = (2, 16) if args.tiny else (16, 128)
    for op in ("delta_rule", "causal_conv"):
        for case, (sequences, tokens) in (TINY_CASES if args.tiny else CASES).items():
            timings = measured(op, (sequences, tokens, heads, size), args.rounds)
            for variant, timing in timings.items():
                least = min(timing.row()["us_rounds"])
                report.add(experiment="recurrence", op=op, case=case, variant=variant, **timing.row(), us_least=least)
    report.publish(
        "The ops of recurrent layers on a CPU",
        f"One layer of {heads} heads of {size} keys and values and {3 * heads * size} channels of {TAPS} taps, in "
        f"bfloat16. Microseconds: medians and quartiles, and the least median of one of {args.rounds} rounds in turn.",
        table(report.rows, ("op", "case", "variant", "us", "us_low", "us_high", "us_least")),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures the host's time of dispatching a step to 1, 2, 4 and 8 devices.

    JAX_PLATFORMS=cpu python benchmarks/engine/dispatch.py --out results      some seconds

The step has the arguments of a decode step of an 8B model with 64 sequences: 291 parameters and 64 arrays of the KV
pool, which is donated. It computes nothing. The batch is one packed buffer, as the engine sends it, or one array for
each of its fields. Times are those of the calling thread's processor time, so that other work counts for little.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table

SIZES = (1, 2, 4, 8)
NUM_PARAMS, LAYERS, SEQUENCES = 291, 32, 64


def thread_ms(call: Callable[[], Any], repeats: int) -> float:
    """Return the median processor time of the calling thread."""
    import jax

    times = []
    for _ in range(repeats):
        start = time.thread_time()
        result = call()
        times.append(time.thread_time() - start)
        jax.block_until_ready(result)
    return 1e3 * statistics.median(times[len(times) // 5 :])


def measured(num_devices: int, repeats: int) -> dict[str, float]:
    """Return the milliseconds of a dispatch with the batch in one buffer and in many arrays."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jpaged.models.config import ModelConfig
    from jpaged.runtime.batch import Bucket, Layout
    from jpaged.runtime.placement import ALL, Placement

    config = ModelConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    placement = Placement.on(jax.devices()[:num_devices], config)
    layout = Layout(Bucket(SEQUENCES, SEQUENCES, True), 64)
    buffer, batch = layout.empty()
    divided = NamedSharding(placement.mesh, P(ALL))
    params = [jax.device_put(np.zeros((8, 8), np.float32), divided) for _ in range(NUM_PARAMS)]

    def times(unpack: Callable[[Any], Any], sent: Any) -> float:
        def step(params: list[Any], pool: list[Any], sent: Any) -> tuple[Any, list[Any]]:
            return jnp.stack([array.sum() for array in unpack(sent)]), pool

        run = jax.jit(step, donate_argnums=1, out_shardings=(placement.whole, placement.pool))
        held = [[jax.device_put(np.zeros((2, 8, 2, 2), np.float32), placement.pool) for _ in range(2 * LAYERS)]]

        def call() -> Any:
            result, held[0] = run(params, held[0], placement.put(sent))
            return result

        return thread_ms(call, repeats)

    return {"packed_ms": times(layout.unpack, buffer), "arrays_ms": times(lambda batch: batch, tuple(batch))}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "dispatch")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="numbers of devices")
    parser.add_argument("--repeats", type=int, default=200, metavar="N", help="how many dispatches are timed")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(max(args.sizes))
    prepare_environment()
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    for num_devices in args.sizes:
        report.add(experiment="dispatch", devices=num_devices, **measured(num_devices, args.repeats))
    report.publish(
        "The host's time of a dispatch",
        f"Medians in milliseconds of the calling thread's processor time: {NUM_PARAMS} parameters, {2 * LAYERS} arrays "
        f"of the pool, a batch of {SEQUENCES} sequences in one buffer or in an array for each field.",
        table(report.rows, ("devices", "packed_ms", "arrays_ms")),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

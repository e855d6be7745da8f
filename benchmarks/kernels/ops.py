"""Times the attention and KV-write kernels beside every peer that can be imported.

    python benchmarks/kernels/ops.py --out results                      everything: hours
    python benchmarks/kernels/ops.py --experiments decode paging --head-dims 128 --block-sizes 64 --budget 600
    python benchmarks/kernels/ops.py --tiny                             no GPU: small shapes, to see that it works

Writes results.json (rows, device, versions, date), report.md (tables) and plots into --out. Every output is compared
with numpy in float64 before it is timed. Data is cold: each call reads other blocks, of a pool many times the cache.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import peers
from benchmarks.kernels.bench import Bench
from benchmarks.kernels.ceilings import ceilings
from benchmarks.kernels.expected import WrongOutput
from benchmarks.kernels.implementations import NAMES, WriteTimed, paged, split
from benchmarks.kernels.workloads import (
    LENGTHS,
    TABLES,
    Shape,
    Workload,
    make_pools,
    make_workload,
    pool_blocks,
    random_array,
)
from benchmarks.shared.deadline import Deadline
from benchmarks.shared.device import CACHE, environment, open_device, prepare_environment
from benchmarks.shared.plots import plot
from benchmarks.shared.results import Report, write_tables
from benchmarks.shared.timing import TINY, Effort, measure, ratio

MAX_POOL_SHARE = 0.4  # of the device's memory
MIXED_STEPS = ((64, 4096, 1984), (1, 131072, 512))


def shapes(bench: Bench, head_dims: Sequence[int], block_sizes: Sequence[int]) -> Iterator[Shape]:
    """Llama's 32 query heads on 8 KV heads, for each head dim and block size."""
    for head_dim, block_size in itertools.product(head_dims, block_sizes):
        heads = bench.sized((32, 8), (4, 2))
        yield Shape(head_dim, block_size, *heads, dtype=bench.sized("bfloat16", "float32"))


def _fits(bench: Bench, shape: Shape, blocks: int) -> bool:
    return blocks * shape.block_size * shape.token_bytes <= MAX_POOL_SHARE * bench.device.memory_bytes


def _peers(bench: Bench, workload: Workload) -> dict[str, Callable[[], Any]]:
    return {peer.name: partial(peer.prepare, workload) for peer in bench.peers}


def decode(
    bench: Bench, *, head_dims: Sequence[int], block_sizes: Sequence[int], batches: Sequence[int],
    contexts: Sequence[int], lengths: Sequence[str] = tuple(LENGTHS),
) -> None:  # fmt: skip
    """Decode attention over batch, context, head dim, block size and lengths."""
    for shape in shapes(bench, head_dims, block_sizes):
        cases = list(itertools.product(lengths, contexts, batches))
        wanted = {case: pool_blocks(shape, LENGTHS[case[0]](case[2], case[1]), bench.device.l2_bytes) for case in cases}
        fitting = [blocks for blocks in wanted.values() if _fits(bench, shape, blocks)]
        pools = make_pools(shape, max(fitting)) if fitting else None  # one for all: only the tables differ
        for each in cases:
            kind, context, batch = each
            case = dict(
                experiment="decode", lengths=kind, head_dim=shape.head_dim, block_size=shape.block_size, batch=batch,
                context=context,
            )  # fmt: skip
            if bench.leaves_out(**case):
                continue
            if not _fits(bench, shape, wanted[each]):
                bench.report.add(**case, status="skipped", reason="the pool does not fit the device")
                continue
            workload = make_workload(shape, LENGTHS[kind](batch, context), l2_bytes=bench.device.l2_bytes, pools=pools)
            variants = {name: partial(paged, kernels, workload) for name, kernels in bench.kernels(shape, case).items()}
            timings, notes = bench.compare(case, workload, variants | _peers(bench, workload))
            for name, timing in timings.items():
                rate = workload.bytes / timing.median / 1e9
                share = rate / bench.read_gb_per_s if bench.read_gb_per_s else None
                bench.report.add(
                    **case, variant=name, **timing.row(), bytes=workload.bytes, gb_per_s=rate, of_read_ceiling=share,
                    **notes[name],
                )  # fmt: skip


def splits(
    bench: Bench, *, head_dims: Sequence[int], block_sizes: Sequence[int], batches: Sequence[int],
    contexts: Sequence[int], sizes: Sequence[int],
) -> None:  # fmt: skip
    """The cost of splits of one fixed size for all batches in decode: other sizes beside
    it. Each would do as a fixed size; the best one for each case is the limit of sizes that follow the batch."""
    for shape, batch, context in itertools.product(shapes(bench, head_dims, block_sizes), batches, contexts):
        case = dict(
            experiment="splits", head_dim=shape.head_dim, block_size=shape.block_size, batch=batch, context=context
        )
        if bench.leaves_out(**case):
            continue
        if not _fits(bench, shape, pool_blocks(shape, [context] * batch, bench.device.l2_bytes)):
            bench.report.add(**case, status="skipped", reason="the pool does not fit the device")
            continue
        workload = make_workload(shape, [context] * batch, l2_bytes=bench.device.l2_bytes)
        for name, kernels in bench.kernels(shape, case).items():
            variants: dict[str, Callable[[], Any]] = {f"{name} fixed": partial(paged, kernels, workload)}
            variants |= {f"{name} {size}": partial(split, kernels, workload, size) for size in sizes}
            timings, notes = bench.compare(case, workload, variants)
            for variant, timing in timings.items():
                over = ratio(timing, timings[f"{name} fixed"]) if f"{name} fixed" in timings else None
                bench.report.add(
                    **case, variant=variant, **timing.row(), over_fixed=over,
                    gb_per_s=workload.bytes / timing.median / 1e9, **notes[variant],
                )  # fmt: skip


def paging(
    bench: Bench, *, head_dims: Sequence[int], block_sizes: Sequence[int], batches: Sequence[int],
    contexts: Sequence[int], prompts: Sequence[int] = (),
) -> None:  # fmt: skip
    """Time one kernel through an identity table, whose blocks lie one after another, through a random permutation, and
    through the blocks that jpaged's allocator returns after a long run: only the place of the blocks differs.
    `prompts` adds prefill."""
    kinds: list[tuple[str, int, int]] = [("decode", b, c) for b, c in itertools.product(batches, contexts)]
    kinds += [("prefill", 1, tokens) for tokens in prompts]
    for shape, (kind, batch, context) in itertools.product(shapes(bench, head_dims, block_sizes), kinds):
        case = dict(
            experiment="paging", kind=kind, head_dim=shape.head_dim, block_size=shape.block_size, batch=batch,
            context=context,
        )  # fmt: skip
        if bench.leaves_out(**case):
            continue
        lens = [context] * batch
        if not _fits(bench, shape, pool_blocks(shape, lens, bench.device.l2_bytes)):
            bench.report.add(**case, status="skipped", reason="the pool does not fit the device")
            continue
        first = make_workload(
            shape, lens, q_lens=lens if kind == "prefill" else None, tables="identity",
            l2_bytes=bench.device.l2_bytes, most_sets=128 if kind == "decode" else 8,
        )  # fmt: skip
        wired = {name: first.rewired(make(first.lens, shape, first.blocks_per_set)) for name, make in TABLES.items()}
        for implementation, kernels in bench.kernels(shape, case).items():
            variants: dict[str, Callable[[], Any]] = {
                f"{implementation} {name}": partial(paged, kernels, workload) for name, workload in wired.items()
            }
            compared = {f"{implementation} {name}": workload for name, workload in wired.items()}
            timings, notes = bench.compare(case, first, variants, compared)
            for name, timing in timings.items():
                base = timings.get(f"{implementation} identity")
                bench.report.add(
                    **case, variant=name, **timing.row(), over_identity=ratio(timing, base) if base else None,
                    gb_per_s=first.bytes / timing.median / 1e9, tflop_per_s=first.flops / timing.median / 1e12,
                    **notes[name],
                )  # fmt: skip


def prefill(
    bench: Bench, *, head_dims: Sequence[int], block_sizes: Sequence[int], prompts: Sequence[int],
    batches: Sequence[int] = (1,),
) -> None:  # fmt: skip
    """Whole prompts through the ragged op."""
    for shape, batch, tokens in itertools.product(shapes(bench, head_dims, block_sizes), batches, prompts):
        case = dict(
            experiment="prefill", head_dim=shape.head_dim, block_size=shape.block_size, batch=batch, context=tokens
        )
        if bench.leaves_out(**case):
            continue
        _ragged(bench, case, shape, [tokens] * batch, [tokens] * batch)


def mixed(
    bench: Bench, *, head_dims: Sequence[int], block_sizes: Sequence[int],
    steps: Sequence[tuple[int, int, int]] = MIXED_STEPS,
) -> None:  # fmt: skip
    """Time steps of continuous batching: decodes (how many, and their context) and a chunk of one long prompt."""
    steps = bench.sized(steps, ((3, 64, 40),))
    for shape, (decodes, context, chunk) in itertools.product(shapes(bench, head_dims, block_sizes), steps):
        case = dict(
            experiment="mixed", head_dim=shape.head_dim, block_size=shape.block_size, decodes=decodes, chunk=chunk,
            context=context,
        )  # fmt: skip
        if bench.leaves_out(**case):
            continue
        _ragged(bench, case, shape, [context] * decodes + [2 * chunk], [1] * decodes + [chunk])


def _ragged(bench: Bench, case: dict[str, Any], shape: Shape, lens: list[int], q_lens: list[int]) -> None:
    if not _fits(bench, shape, pool_blocks(shape, lens, bench.device.l2_bytes, 8)):
        bench.report.add(**case, status="skipped", reason="the pool does not fit the device")
        return
    workload = make_workload(shape, lens, q_lens=q_lens, l2_bytes=bench.device.l2_bytes, most_sets=8)
    variants = {name: partial(paged, kernels, workload) for name, kernels in bench.kernels(shape, case).items()}
    timings, notes = bench.compare(case, workload, variants | _peers(bench, workload))
    for name, timing in timings.items():
        rate = workload.flops / timing.median / 1e12
        bench.report.add(
            **case, variant=name, **timing.row(), flops=workload.flops, tflop_per_s=rate, bytes=workload.bytes,
            gb_per_s=workload.bytes / timing.median / 1e9,
            of_matmul_ceiling=rate / bench.matmul_tflop_per_s if bench.matmul_tflop_per_s else None, **notes[name],
        )  # fmt: skip


def write(bench: Bench, *, head_dims: Sequence[int], block_sizes: Sequence[int], tokens: Sequence[int]) -> None:
    """KV writes to random slots, into pools that are updated in place: as the keys come, and rotated on their way."""
    for shape, count in itertools.product(shapes(bench, head_dims, block_sizes), tokens):
        case = dict(experiment="write", head_dim=shape.head_dim, block_size=shape.block_size, tokens=count)
        if bench.leaves_out(**case):
            continue
        calls = bench.sized(64, 4)
        num_blocks = max(1, bench.sized(2**30, 2**18) // (shape.block_size * shape.token_bytes))
        num_slots = num_blocks * shape.block_size
        count = min(count, num_slots // calls)
        order = np.random.default_rng(0).permutation(num_slots)[: calls * count].astype(np.int32)
        slots = order.reshape(calls, count)
        new = [random_array((count, shape.num_kv_heads, shape.head_dim), shape.dtype, seed) for seed in (6, 7)]
        angle = np.random.default_rng(8).uniform(-3, 3, (count, shape.head_dim // 2))
        angles = dict(cos_t=np.cos(angle), sin_t=np.sin(angle))
        ours = bench.kernels(shape, case).items()
        variants = {name: (kernels, {}) for name, kernels in ours}
        variants |= {f"{name} rotated": (kernels, angles) for name, kernels in ours}
        for name, (kernels, angles) in variants.items():
            try:
                options = {key: jnp.asarray(x, jnp.float32) for key, x in angles.items()}
                timed = WriteTimed(kernels, make_pools(shape, num_blocks), new, list(slots), **options)
                timed.compile()
                _check_write(timed, make_pools(shape, num_blocks), new, slots[0], angles)
                timing = measure({name: timed}, bench.effort)[name]
                empty = measure({"empty": timed.empty()}, bench.effort._replace(rounds=1))["empty"]
            except Exception as error:
                bench.fail(error, **case, variant=name)
                continue
            moved = 2 * count * shape.token_bytes  # read and written
            bench.report.add(
                **case, variant=name, **timing.row(), bytes=moved, gb_per_s=moved / timing.median / 1e9,
                host_us=1e6 * empty.median, calls=calls, status="ok",
            )  # fmt: skip


def _check_write(
    timed: WriteTimed, before: Sequence[Any], new: Sequence[Any], slots: np.ndarray, angles: dict[str, np.ndarray]
) -> None:
    """Check to the bit that one call has written its slots and left a neighbour of each unchanged."""
    k, v = (np.asarray(rows, np.float32) for rows in new)
    if angles:
        low, high = np.split(k, 2, axis=-1)
        cos, sin = (x[:, None] for x in angles.values())
        k = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    tolerances = (dict(rtol=2**-7, atol=1e-5) if angles else dict(rtol=0), dict(rtol=0))
    block_size = before[0].shape[2]
    free = np.setdiff1d((slots + 1) % (before[0].shape[0] * block_size), slots)
    for pool, old, rows, tolerance in zip(timed.output(0), before, (k, v), tolerances):
        at = lambda array, where: np.asarray(array[where // block_size, :, where % block_size], np.float32)
        if not np.allclose(at(pool, slots), rows, **dict(atol=0.0) | tolerance):
            raise WrongOutput("a written slot does not hold its values")
        if not np.array_equal(at(pool, free), at(old, free)):
            raise WrongOutput("a neighbour of a written slot has changed")


def experiments(bench: Bench, args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Return the experiments by name, over the command line's choices."""
    grid = dict(head_dims=args.head_dims, block_sizes=args.block_sizes)
    contexts, batches = bench.sized(args.contexts, (40,)), bench.sized(args.batches, (1, 3))
    prompts = bench.sized(args.prompts, (48,))
    return {
        "ceilings": partial(ceilings, bench),
        "decode": partial(decode, bench, **grid, batches=batches, contexts=contexts, lengths=args.lengths),
        "splits": partial(
            splits, bench, **grid, batches=bench.sized((1, 8, 64, 256), (2,)),
            contexts=bench.sized((1024, 4096, 32768), (40,)), sizes=(128, 256, 512, 1024, 2048),
        ),
        "paging": partial(
            paging, bench, **grid, batches=bench.sized((1, 16, 64), (3,)),
            contexts=bench.sized((1024, 4096, 16384), (64,)), prompts=bench.sized((4096,), (48,)),
        ),
        "prefill": partial(prefill, bench, **grid, prompts=prompts),
        "mixed": partial(mixed, bench, **grid),
        "write": partial(write, bench, **grid, tokens=bench.sized((1, 16, 256, 2048), (5,))),
    }  # fmt: skip


def choose_peers(names: Sequence[str], bench: Bench) -> list[peers.Peer]:
    """The peers that can run here, of those whose names start with one of `names` ("all": any); says why others
    can't."""
    found = []
    for peer in peers.ALL:
        if "all" in names or any(peer.name.startswith(name) for name in names):
            reason = peer.available(bench.device)
            if reason is None:
                found.append(peer)
            else:
                bench.report.add(experiment="peers", variant=peer.name, status="skipped", reason=reason)
    return found


def make_bench(args: argparse.Namespace, make_report: Callable[[dict[str, Any]], Report]) -> Bench:
    """A Bench for a command line with the common arguments; `make_report` is given the environment."""
    device = open_device(args.tiny)
    effort = TINY._replace(rounds=min(2, args.rounds)) if args.tiny else Effort(rounds=args.rounds)
    # On a GPU the reference is there to be right: timing it takes minutes and says nothing.
    ours = args.implementations
    if ours is None:
        ours = ("mosaic", "triton") if device.is_gpu else ("reference",)
    report = make_report(environment(device, args.tiny))
    bench = Bench(device, report, args.tiny, effort, Deadline(args.budget), ours)
    bench.peers = choose_peers(args.peers, bench)
    report.environment = environment(device, args.tiny)  # now the peers' versions are known
    report.write()
    return bench


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=CACHE / parser.prog.removesuffix(".py"), help="folder for results")
    parser.add_argument("--tiny", action="store_true", help="small shapes and one sample, on any device")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="start no case after this long")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument(
        "--implementations", nargs="*", choices=NAMES, help="ours (default: mosaic triton; without a GPU reference)"
    )
    parser.add_argument(
        "--peers", nargs="*", default=["all"], metavar="NAME",
        help="beginnings of peers' names: " + ", ".join(peer.name for peer in peers.ALL) + "; default all",
    )  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    names = ("ceilings", "decode", "splits", "paging", "prefill", "mixed", "write")
    parser.add_argument("--experiments", nargs="+", choices=names, default=list(names))
    many = dict(type=int, nargs="+")
    parser.add_argument("--head-dims", **many, default=[128, 64])
    parser.add_argument("--block-sizes", **many, default=[64, 16, 128])
    parser.add_argument("--batches", **many, default=[1, 4, 16, 64, 256])
    parser.add_argument("--contexts", **many, default=[1024, 4096, 16384, 32768])
    parser.add_argument("--prompts", **many, default=[512, 2048, 8192, 32768])
    parser.add_argument("--lengths", nargs="+", choices=tuple(LENGTHS), default=list(LENGTHS))
    args = parser.parse_args(argv)
    if args.tiny:
        args.head_dims, args.block_sizes = args.head_dims[:1], [16]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    bench = make_bench(args, partial(Report, args.out / "results.json"))
    for name, experiment in experiments(bench, args).items():
        if name in args.experiments or name == "ceilings":  # without ceilings, figures say little
            start = time.monotonic()
            experiment()
            bench.report.end_part(name, status="ok", seconds=time.monotonic() - start)
    print(write_tables(bench.report, "Kernels"))
    plot(bench.report)
    wrong = [row for row in bench.report.rows if row.get("status") in ("wrong", "failed")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

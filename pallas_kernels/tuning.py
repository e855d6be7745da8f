"""Tile sizes of the kernels, per device kind and shape class: one table, and the candidates of the search.

A shape class determines a configuration: the kernel, the pools' head dim and their dtype. `tuned.json` holds the
results of `benchmarks/kernels/tune.py` on real devices. Other classes use the defaults here, which were chosen by the
compiler's figures (registers, spills, shared memory) and have not been timed.

No configuration may depend on a batch: a request's result would depend on its neighbours.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

import jax.numpy as jnp

from pallas_kernels.checks import FP8


@dataclasses.dataclass(frozen=True)
class MosaicDecode:
    """Configuration of the Mosaic decode kernel.

    A context is cut into splits, and those into tiles that go through a ring of `stages` of them. Each of a grid of
    `blocks_per_sm` thread blocks per SM walks the splits of the batch in turn.
    """

    tile: int = 64  # tokens
    stages: int = 3
    split: int = 512  # tokens
    blocks_per_sm: int = 2


@dataclasses.dataclass(frozen=True)
class MosaicRagged:
    """Configuration of the Mosaic ragged kernel.

    `warpgroups` of 64 rows share a ring of `stages` KV tiles of `tile` tokens.
    """

    warpgroups: int = 2
    tile: int = 64  # tokens
    stages: int = 3


@dataclasses.dataclass(frozen=True)
class MosaicProduct:
    """Configuration of the Mosaic product kernel.

    A thread block takes tiles of `rows` rows and 64 outputs for each of `warpgroups`. `depth` inputs at a time go
    through a ring of `stages`.
    """

    rows: int = 64
    warpgroups: int = 1
    depth: int = 128
    stages: int = 4
    blocks_per_sm: int = 2


@dataclasses.dataclass(frozen=True)
class TritonDecode:
    """Configuration of the Triton decode kernel. A context is cut into splits, and those into tiles."""

    tile: int = 64  # tokens
    split: int = 512  # tokens
    num_warps: int = 4
    num_stages: int = 3


@dataclasses.dataclass(frozen=True)
class TritonRagged:
    """Configuration of the Triton ragged kernel. A program takes `rows` rows, tokens x query heads of one KV head."""

    rows: int = 64
    tile: int = 64  # tokens
    num_warps: int = 4
    num_stages: int = 3


Tiles = MosaicDecode | MosaicRagged | TritonDecode | TritonRagged
KERNELS: dict[str, type[Tiles]] = {
    "mosaic.decode": MosaicDecode,
    "mosaic.ragged": MosaicRagged,
    "triton.decode": TritonDecode,
    "triton.ragged": TritonRagged,
}

# Differences from the defaults of the classes: (kernel, head dim[, dtype class]) -> configuration.
DEFAULTS: dict[tuple[str | int, ...], Tiles] = {
    ("mosaic.decode", 64): MosaicDecode(stages=4),
    ("mosaic.decode", 128, "fp8"): MosaicDecode(stages=2),
    ("mosaic.decode", 256): MosaicDecode(stages=2, blocks_per_sm=1),
    ("mosaic.ragged", 64): MosaicRagged(tile=128, stages=3),
    ("mosaic.ragged", 64, "fp8"): MosaicRagged(tile=64, stages=3),
    ("mosaic.ragged", 128): MosaicRagged(tile=128, stages=2),
    ("mosaic.ragged", 128, "fp8"): MosaicRagged(tile=64, stages=2),
    ("mosaic.ragged", 256): MosaicRagged(tile=64, stages=2),
    ("mosaic.ragged", 256, "fp8"): MosaicRagged(warpgroups=1, tile=64, stages=2),
    ("triton.decode", 256): TritonDecode(tile=32, num_warps=8),
    ("triton.ragged", 128): TritonRagged(num_warps=8),
    ("triton.ragged", 256): TritonRagged(tile=32, num_warps=8),
}

_CHOICES: dict[str, dict[str, tuple[int, ...]]] = {
    "mosaic.decode": dict(tile=(64, 128), stages=(2, 3, 4, 6), split=(256, 512, 1024), blocks_per_sm=(1, 2, 3)),
    "mosaic.ragged": dict(warpgroups=(1, 2, 3), tile=(64, 128), stages=(2, 3, 4)),
    "triton.decode": dict(tile=(16, 32, 64, 128), split=(256, 512, 1024), num_warps=(2, 4, 8), num_stages=(2, 3, 4, 5)),
    "triton.ragged": dict(rows=(32, 64, 128), tile=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3, 4)),
}


def find(kernel: str, device_kind: str, head_dim: int, pool_dtype: Any) -> Tiles:
    """Return the configuration of a kernel ("mosaic.decode", ...) on a device, for pools of a head dim and a dtype."""
    dtype = jnp.dtype(pool_dtype)
    dtype_class = (
        "fp8" if dtype == FP8 else f"{8 * dtype.itemsize} bit"
    )  # bfloat16 and float16 are equal to the kernels
    default = DEFAULTS.get((kernel, head_dim), KERNELS[kernel]())
    default = DEFAULTS.get((kernel, head_dim, dtype_class), default)
    return _tuned().get((kernel, device_kind, head_dim, dtype_class), default)


def candidates(kernel: str) -> Iterator[Tiles]:
    """Yield every configuration that a search tries; some raise an error in the compilation for some shapes."""
    choices = _CHOICES[kernel]
    for values in itertools.product(*choices.values()):
        yield KERNELS[kernel](**dict(zip(choices, values)))


@functools.cache
def _tuned() -> dict[tuple[str, str, int, str], Tiles]:
    rows = json.loads(resources.files("pallas_kernels").joinpath("tuned.json").read_text())
    keys = ("kernel", "device_kind", "head_dim", "pool_dtype")
    return {tuple(row[key] for key in keys): KERNELS[row["kernel"]](**row["tiles"]) for row in rows}

"""jpaged's own kernels as things that can be timed."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.expected import host
from benchmarks.kernels.workloads import Shape, Workload
from benchmarks.shared.device import Device
from benchmarks.shared.timing import JaxTimed
from pallas_kernels import Kernels, select

NAMES = ("mosaic", "triton", "reference")


class Unsuitable(Exception):
    """Why something can't be timed on a workload, or on this machine."""


def choose(name: str, device: Device, shape: Shape, pool_dtype: str | None = None) -> Kernels:
    """One implementation for a device and a shape. Raises Unsuitable with the reason."""
    try:
        return select(
            name, platform=device.platform, device_kind=device.kind, compute_capability=device.compute_capability,
            dtype=shape.dtype, pool_dtype=pool_dtype, head_dim=shape.head_dim, num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads, block_size=shape.block_size,
        )  # fmt: skip
    except (NotImplementedError, ImportError, AttributeError) as error:
        raise Unsuitable(str(error)) from error


def retiled(kernels: Kernels, tiles: Mapping[str, int]) -> Kernels:
    """The same kernels with some fields of the configuration changed, in each op that has all of them."""

    def changed(op: Callable) -> Callable:
        chosen = getattr(op, "keywords", {}).get("tiles")
        if chosen is None or not tiles.keys() <= {field.name for field in dataclasses.fields(chosen)}:
            return op
        return functools.partial(op, tiles=dataclasses.replace(chosen, **tiles))

    ops = kernels.implementation
    changes = {op: changed(getattr(ops, op)) for op in ("paged_decode_attention", "ragged_paged_attention")}
    return dataclasses.replace(kernels, implementation=ops._replace(**changes))


class HostTimed(JaxTimed):
    """JaxTimed whose outputs come as numpy, in float32."""

    def output(self, index: int) -> np.ndarray:
        return host(super().output(index))


class PagedTimed(HostTimed):
    """An attention op of ours, on every set of a workload in turn; the output of a call is the next one's query.

    XLA computes values that depend only on lengths once for all calls, as it does once for all layers of a step of
    the engine; FlashInfer's `plan`, which does the same work, is not part of its time either.
    """

    def __init__(self, op: Callable, workload: Workload, **options: Any):
        lens = (workload.context_lens,)
        if workload.q_lens is not None:
            lens += (jnp.asarray(workload.cu_q_lens),)

        def call(q, shared, table):
            k_pool, v_pool, lens = shared
            return op(q, k_pool, v_pool, table, *lens, scale=workload.shape.scale, **options)

        super().__init__(
            call, workload.q, (workload.k_pool, workload.v_pool, lens), workload.cycled(workload.set_tables)
        )


def paged(kernels: Kernels, workload: Workload, **options: Any) -> PagedTimed:
    """The op of `kernels` that a workload wants."""
    op = kernels.paged_decode_attention if workload.q_lens is None else kernels.ragged_paged_attention
    return PagedTimed(op, workload, **options)


def split(kernels: Kernels, workload: Workload, tokens: int) -> PagedTimed:
    """Decode with splits of so many tokens. Raises Unsuitable where it is not cut into splits."""
    split = retiled(kernels, dict(split=tokens))
    if split == kernels:
        raise Unsuitable(f"{kernels.name} does not cut contexts into splits")
    return PagedTimed(split.paged_decode_attention, workload)


def dense_kv(workload: Workload, index: int) -> tuple[jax.Array, jax.Array]:
    """One set's keys and values as [S, K, L, H], L the table's width in tokens."""

    def gather(pool, table_sw):
        s, w = table_sw.shape
        _, k, b, h = pool.shape
        return pool[table_sw].transpose(0, 2, 1, 3, 4).reshape(s, k, w * b, h)

    gather = jax.jit(gather)
    table_sw = workload.set_tables[index]
    return gather(workload.k_pool, table_sw), gather(workload.v_pool, table_sw)


class WriteTimed(JaxTimed):
    """A KV write into pools that are updated in place, each time into other blocks."""

    def __init__(
        self, kernels: Kernels, pools: Sequence[jax.Array], tokens: Sequence[jax.Array], slots: Sequence[np.ndarray],
        **options: jax.Array,
    ):  # fmt: skip
        def call(pools, shared, slot_mapping):
            return kernels.write_kv(*pools, *shared, slot_mapping, **options)

        super().__init__(call, tuple(pools), tuple(tokens), [jnp.asarray(s) for s in slots], donate=True)

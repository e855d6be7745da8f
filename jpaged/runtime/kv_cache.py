"""KV pool on the device: the layout of its arrays, and the ops on them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jpaged.config import Limits
from jpaged.core.groups import Groups, group_layers, most_held
from jpaged.models.base import AttentionSpec, LayerSpec, RecurrentSpec
from jpaged.models.config import ModelConfig
from jpaged.models.variation import MAX_SIZE
from jpaged.runtime.batch import Batch
from jpaged.runtime.states import StateLayout
from pallas_kernels import Kernels

Pool = list[jax.Array]  # [k of place 0, v of place 0, k of place 1, ...], each [P, K, B, H], then `States`
NO_STATES = StateLayout(())
NO_PLACE = -1, -1  # of a layer without keys and values


@dataclass(frozen=True)
class KVCache:
    """Layout of a pool, and the ops on it. Pools are arguments: this holds no array.

    Layers of several groups share an array, in which each group has its own blocks.

    Keys and values of an fp8 pool are stored without a scale: numbers past ±448 are clipped.

    Attributes:
        groups: the groups of the model's layers.
        num_kv_heads: number of the model.
        head_dim: head dim of the pool, the model's or more.
        dtype: dtype of the pool.
        windows: the different windows of the model's layers.
        attention_dtype: dtype in which `attend` takes queries, keys and values; None: the one that all of a model have.
        states: layout of the states of recurrent layers, which the pool has after keys and values.
    """

    groups: Groups
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    kernels: Kernels
    windows: tuple[int | None, ...] = (None,)
    attention_dtype: str | None = None
    states: StateLayout = NO_STATES

    @classmethod
    def of(
        cls, model: ModelConfig, block_size: int, dtype: str, kernels: Kernels,
        specs: Sequence[LayerSpec] = (), *, max_model_len: int = MAX_SIZE, attention_dtype: str | None = None,
    ) -> "KVCache":  # fmt: skip
        """Return the layout for a model, with the head dim that the kernels take.

        Args:
            specs: attention or recurrence of each layer; (): all layers attend to all tokens.
            max_model_len: maximum tokens of a sequence.
        """
        windows = [spec.window for spec in specs if isinstance(spec, AttentionSpec)]
        recurrent = [(layer, spec) for layer, spec in enumerate(specs) if isinstance(spec, RecurrentSpec)]
        groups = group_layers(windows or [None] * model.num_hidden_layers, max_model_len)
        for layer, _ in recurrent:  # layers keep their numbers
            groups = groups._replace(places=(*groups.places[:layer], NO_PLACE, *groups.places[layer:]))
        heads, head_dim, different = (
            model.num_key_value_heads,
            kernels.head_dim,
            tuple(dict.fromkeys(windows or [None])),
        )
        states = StateLayout(tuple(recurrent), kernels)
        return cls(groups, heads, block_size, head_dim, dtype, kernels, different, attention_dtype, states)

    def make_work(self, batch: Batch, decode: bool, table_width: int) -> tuple[Any, ...]:
        """Return `Batch.work` of a batch with lengths: lists for each window, none if the kernels take no lists."""
        if self.kernels.make_work is None:
            return ()
        prompts = (None, None) if decode else (batch.cu_q_lens, batch.decodes != 0)
        sizes = dict(num_rows=len(batch.tokens), table_tokens=table_width * self.block_size)
        make_work = functools.partial(self.kernels.make_work, batch.context_lens, *prompts, **sizes, xp=np)
        return tuple(make_work(window=window) for window in self.windows)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of a group, keys and values."""
        itemsize = jnp.dtype(self.dtype).itemsize
        return 2 * self.groups.size * self.num_kv_heads * self.block_size * self.head_dim * itemsize

    def most_blocks(self, limits: Limits) -> int:
        """Return the maximum blocks that a sequence holds at once in all groups."""
        width, reach = limits.blocks_per_seq, limits.max_tokens_in_flight
        return sum(min(width, most or width) for most in most_held(self.groups.windows, self.block_size, reach))

    def shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Return the shape of each array of a pool."""
        return num_blocks, self.num_kv_heads, self.block_size, self.head_dim

    def shapes(self, num_blocks: int, num_pages: int) -> list[tuple[tuple[int, ...], str]]:
        """Return the shape and the dtype of each array of a pool."""
        keys_and_values = [(self.shape(num_blocks), self.dtype)] * (2 * self.groups.size)
        return keys_and_values + [((num_pages, *shape), "float32") for shape in self.states.shapes]

    def allocate(self, num_blocks: int, num_pages: int, sharding: Sharding) -> Pool:
        """Return a pool of zeros.

        It is not left uninitialised because an attention kernel may load a block's unwritten rows, and 0 * NaN is NaN.
        """
        zeros = self.zeros_on(sharding) or jnp.zeros
        return [_maker(zeros, *each, sharding)() for each in self.shapes(num_blocks, num_pages)]

    def zeros_on(self, sharding: Sharding) -> Callable[[tuple[int, ...], str], jax.Array] | None:
        """Return `Kernels.zeros`, which run on one device; None on several."""
        return self.kernels.zeros if sharding.num_devices == 1 else None

    def attend(
        self, pool: Pool, layer: int, spec: AttentionSpec, batch: Batch, decode: bool,
        qkv: tuple[jax.Array, ...], angles: tuple[jax.Array | None, ...], sinks_n: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """Write a layer's keys and values, and return the attention [T, N, H] of its queries.

        Args:
            pool: its arrays of this layer's place are replaced.
            decode: every sequence has one query, a decode token, and query s belongs to sequence s.
            qkv: [T, N, H], [T, K, H], [T, K, H].
            angles: cos and sin [T, H/2] that rotate queries and keys, or None.
            sinks_n: [N] float32, or None.
        """
        group, place = self.groups.places[layer]
        (q_tnh, k_tkh, v_tkh), (cos, sin), at = qkv, angles, slice(2 * place, 2 * place + 2)
        one_k = jnp.ones(self.num_kv_heads, jnp.float32)
        scales: dict[str, Any] = dict(k_scale_k=one_k, v_scale_k=one_k) if "float8" in self.dtype else {}
        rotation: dict[str, Any] = {} if cos is None else dict(cos_t=cos, sin_t=sin, q_tnh=q_tnh)
        k, v = pool[at]
        k, v, *rotated = self.kernels.write_kv(k, v, k_tkh, v_tkh, batch.slot_mapping[group], **rotation, **scales)
        pool[at] = k, v
        q_tnh = rotated[0] if rotated else q_tnh
        work = dict(zip(self.windows, batch.work)).get(spec.window)
        options: dict[str, Any] = spec._asdict() | scales | {"work": work, "sinks_n": sinks_n}
        layout = batch.block_tables[group], batch.context_lens
        if decode:
            return cast(jax.Array, self.kernels.paged_decode_attention(q_tnh, k, v, *layout, **options))
        options |= {"decode_s": batch.decodes}
        return cast(jax.Array, self.kernels.ragged_paged_attention(q_tnh, k, v, *layout, batch.cu_q_lens, **options))

    def copy(self, pool: Pool, sources_c: jax.Array, destinations_c: jax.Array) -> Pool:
        """Copy whole blocks in all arrays of keys and values; destination -1 copies nothing."""
        keys_and_values, states = self.parts(pool)
        return [self.kernels.copy_blocks(array, sources_c, destinations_c) for array in keys_and_values] + states

    def parts(self, pool: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the arrays of keys and values, and those of states."""
        count = 2 * self.groups.size
        return pool[:count], pool[count:]


def gather(pool: Pool, sources_c: jax.Array) -> list[jax.Array]:
    """Return C blocks of a pool of A arrays, each [A, K, B, H]."""
    return list(jnp.stack([array[sources_c] for array in pool], axis=1))


def scatter(pool: Pool, blocks: list[jax.Array], destinations_c: jax.Array) -> Pool:
    """Return a pool with C blocks, each [A, K, B, H], at the destinations; destination -1 writes nothing."""
    # A negative index would be the last block; one past the end is dropped.
    at_c = jnp.where(destinations_c < 0, pool[0].shape[0], destinations_c)
    return [array.at[at_c].set(each, mode="drop") for array, each in zip(pool, jnp.stack(blocks, axis=1), strict=True)]


@functools.cache  # a pool that is allocated again compiles nothing
def _maker(
    zeros: Callable[..., jax.Array], shape: tuple[int, ...], dtype: str, sharding: Sharding
) -> Callable[[], jax.Array]:
    """Return a compiled function that makes one array of a pool."""
    return jax.jit(functools.partial(zeros, shape, dtype), out_shardings=sharding)

"""Steps as jax lowers them from the forms of their arguments: nothing runs, and no array is held."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.stages import Lowered

from jpaged.runtime.batch import Bucket, Shapes
from jpaged.runtime.kv_cache import KVCache
from jpaged.runtime.placement import Placement, form_of
from jpaged.runtime.sampling_row import ROW_WORDS
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.step import Step


@dataclass(frozen=True)
class Lowering:
    """The functions of a step with the forms of their arguments, which a call of them with arrays of these forms uses.

    Attributes:
        leaves, state, last_tokens: forms of the arguments of `Step`.
        hidden: size and dtype of hidden states.
        slots: forms of the slots of adapters; None: there are none.
    """

    step: Step
    shapes: Shapes
    cache: KVCache
    placement: Placement
    leaves: list[jax.ShapeDtypeStruct]
    state: Any
    last_tokens: jax.ShapeDtypeStruct
    hidden: tuple[int, str]
    slots: Any = None

    def forward(self, bucket: Bucket, num_blocks: int, num_pages: int = 1, *, with_adapters: bool = False) -> Lowered:
        """Return the model's part of a step with a pool of this size, without adapters or with them."""
        form = partial(jax.ShapeDtypeStruct, sharding=self.placement.pool)
        pool = [form(*each) for each in self.cache.shapes(num_blocks, num_pages)]
        buffer = self._whole((self.shapes.layouts[bucket].size,), "int32")
        slots = self.slots if with_adapters else None
        return self.step.forward.lower(self.leaves, pool, self.last_tokens, buffer, bucket, slots)

    def sampling(self, bucket: Bucket, settings: Settings) -> Lowered:
        """Return the sampling of a step."""
        size, dtype = self.hidden
        x_sd, rows_sf = self._whole((bucket.num_seqs, size), dtype), self._whole((bucket.num_seqs, ROW_WORDS), "int32")
        bits = form_of(self.shapes.no_bits[bucket.num_seqs])
        return self.step.choose.lower(self.leaves, self.state, self.last_tokens, x_sd, rows_sf, bits, settings)

    def scores(self, bucket: Bucket) -> Lowered:
        """Return the logprobs of the prompts of a step."""
        size, dtype = self.hidden
        x_td, targets_t = self._whole((bucket.num_tokens, size), dtype), self._whole((bucket.num_tokens,), "int32")
        return self.step.score.lower(self.leaves, x_td, targets_t)

    def all(self, bucket: Bucket, num_blocks: int, num_pages: int = 1) -> Iterator[Lowered]:
        """Yield all parts of a step, lowered one after the other."""
        yield self.forward(bucket, num_blocks, num_pages)
        if self.slots is not None:
            yield self.forward(bucket, num_blocks, num_pages, with_adapters=True)
        yield from (self.sampling(bucket, settings) for settings in self.step.settings)
        if not bucket.decode:
            yield self.scores(bucket)

    @property
    def _whole(self) -> Any:
        return partial(jax.ShapeDtypeStruct, sharding=self.placement.whole)

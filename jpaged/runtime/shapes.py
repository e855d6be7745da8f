"""Shapes of steps: their batches, and the memory that their executables need."""

from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import Sharding

from jpaged.runtime.batch import Bucket, Buckets, Layout, MakeWork, no_work
from jpaged.runtime.memory import temporaries
from jpaged.runtime.placement import Placement
from jpaged.runtime.sampling_row import ROW_WORDS
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.sampling_state import SamplingState
from jpaged.runtime.step import Step


class Shapes:
    """Shapes of all steps.

    Args:
        table_width: W, the maximum blocks of a sequence.
        make_work: makes the lists of work of the attention kernels.

    Attributes:
        layouts: layouts of the batches of each bucket.
        no_bits: by the number of samples, masks that no sample uses. They stay on the device: they are large, and most
            steps have no others.
    """

    def __init__(
        self, buckets: Buckets, table_width: int, vocab_size: int, placement: Placement, make_work: MakeWork = no_work
    ):
        self.buckets, self._placement = buckets, placement
        self._table_width, self._num_words, self._make_work = table_width, -(-vocab_size // 32), make_work
        self.layouts: dict[Bucket, Layout] = {}
        self.no_bits: dict[int, jax.Array] = {}
        self.add(buckets.all)

    def add(self, buckets: Iterable[Bucket]) -> None:
        """Add shapes of steps."""
        self.buckets.add(buckets)
        for bucket in buckets:
            self.layouts[bucket] = Layout(bucket, self._table_width, self._make_work)
            if bucket.num_seqs not in self.no_bits:
                bits = np.zeros((bucket.num_seqs, self._num_words), np.uint32)
                self.no_bits[bucket.num_seqs] = self._placement.put(bits)

    def padding(self, bucket: Bucket) -> jax.Array:
        """Return the buffer of a batch of padding only."""
        buffer: jax.Array = self._placement.put(self.layouts[bucket].empty()[0])
        return buffer

    def on_devices(self, shape: tuple[int, ...], dtype: str, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
        """Return the description of an array, for functions that are compiled and not run; whole by default."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or self._placement.whole)

    def model_temporaries(
        self, step: Step, params: list[jax.Array], pool: list[jax.ShapeDtypeStruct], last_tokens_r: jax.Array
    ) -> int:
        """Return the bytes that the model's part of the largest steps needs in addition to parameters and pool."""
        return temporaries(
            step.forward.lower(params, pool, last_tokens_r, self.padding(bucket), bucket) for bucket in self._largest
        )

    def sampling_temporaries(
        self, step: Step, params: list[jax.Array], state: SamplingState, last_tokens_r: jax.Array, hidden_size: int,
        dtype: str,
    ) -> int:  # fmt: skip
        """Return the bytes that the largest steps need for samples and prompt logprobs."""
        lowered = []
        for bucket in self._largest:
            x_sd = self.on_devices((bucket.num_seqs, hidden_size), dtype)
            rows_sf = self.on_devices((bucket.num_seqs, ROW_WORDS), "int32")
            bits = self.no_bits[bucket.num_seqs]
            lowered.append(step.choose.lower(params, state, last_tokens_r, x_sd, rows_sf, bits, Settings.ANY))
            if not bucket.decode:
                x_td = self.on_devices((bucket.num_tokens, hidden_size), dtype)
                targets_t = self.on_devices((bucket.num_tokens,), "int32")
                lowered.append(step.score.lower(params, x_td, targets_t))
        return temporaries(lowered)

    @property
    def _largest(self) -> tuple[Bucket, Bucket]:
        return self.buckets.decode[-1], self.buckets.mixed[-1]

"""Shapes of steps, and the layouts of their batches."""

from collections.abc import Iterable

import jax
import numpy as np

from jpaged.runtime.batch import Bucket, Buckets, Layout, MakeWork, no_work
from jpaged.runtime.placement import Placement


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

"""The query tiles of a ragged batch against a plain loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cuts import decode_rows, query_tiles


def check(tiled, q_lens, marked, *, num_rows: int, tile_q: int, align: int) -> None:
    """Compare the tiles of a batch; `marked` sequences of one row are decode tokens."""
    sequences, cu = len(q_lens), np.concatenate([[0], np.cumsum(q_lens)])
    decode_s, row_s = decode_rows(jnp.asarray(cu, jnp.int32), jnp.asarray(marked))
    assert decode_s.tolist() == (marked & (q_lens == 1)).tolist()
    assert row_s.tolist() == np.where(decode_s, cu[:-1], -1).tolist()
    tiles = tiled(jnp.asarray(cu, jnp.int32), decode_s)
    owner = np.repeat([*range(sequences), sequences], [*q_lens, num_rows - cu[-1]])
    seen = np.zeros(num_rows, int)
    for seq, row in zip(tiles.seq_i.tolist(), tiles.row_i.tolist(), strict=True):
        if seq >= 0:
            assert row % align == 0
            rows = np.arange(max(row, tiles.first_row_s1[seq]), min(row + tile_q, tiles.row_end_s1[seq]))
            assert len(rows) and (owner[rows] == seq).all()
            seen[rows] += 1
    np.testing.assert_array_equal(seen, [not (s < sequences and decode_s[s]) for s in owner])


@pytest.mark.parametrize("align", [1, 8, *(pytest.param(align, marks=pytest.mark.deep) for align in (2, 4))])
def test_every_row_is_in_one_tile_of_its_sequence(align):
    """Also where all sequences are short, which takes the most tiles; decode tokens are in none."""
    rng = np.random.default_rng(align)
    for most in (2, 3, 10, 60):
        sequences, tile_q = int(rng.integers(1, 9)), int(rng.choice([8, 16, 32]))
        batches = rng.integers(0, most, (5, sequences))
        num_rows = max(1, int(batches.sum(1).max() + rng.integers(0, 20)))
        # As kernels call it: op by op, each shape would compile dozens of functions.
        tiled = jax.jit(functools.partial(query_tiles, num_rows=num_rows, tile_q=tile_q, align=align))
        for q_lens in batches:
            check(tiled, q_lens, rng.random(sequences) < 0.5, num_rows=num_rows, tile_q=tile_q, align=align)


def test_all_sequences_of_one_row_are_decode_rows_by_default():
    decode_s, row_s = decode_rows(jnp.array([0, 1, 1, 4, 5]), None)
    assert decode_s.tolist() == [True, False, False, True] and row_s.tolist() == [0, -1, -1, 4]

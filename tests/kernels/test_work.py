"""Lists of work of the Mosaic kernels: those of the host are those of the device, and the kernels take both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic, select
from pallas_kernels.checks import MAX_CONTEXT
from pallas_kernels.mosaic.combine import QueryRows
from pallas_kernels.mosaic.ring import TMA_ROWS
from pallas_kernels.mosaic.work import DecodeWork
from tests.kernels import cases
from tests.kernels.implementations import ops_of
from tests.kernels.mosaic_interpreter import interpreting


def maker(num_heads: int, num_kv_heads: int, head_dim: int, pool_dtype: str = "bfloat16", **sizes):
    sizes |= dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, pool_dtype=pool_dtype, tiles={})
    return functools.partial(mosaic.make_work, **sizes)


@pytest.mark.parametrize(
    "group, window",
    [(4, 700), (7, None), *(pytest.param(*case, marks=pytest.mark.deep) for case in ((4, None), (7, 700)))],
)
def test_the_host_makes_the_lists_of_the_device(group, window):
    rng = np.random.default_rng(group)
    make = maker(2 * group, 2, 128, num_rows=90, table_tokens=MAX_CONTEXT, window=window)
    on_device = jax.jit(functools.partial(make, xp=jnp))
    for _ in range(3):
        q_lens = rng.choice([0, 1, 1, 5, 20], 6)
        contexts = np.where(q_lens > 0, q_lens + rng.choice([0, 500, 513, 40_000], 6), 0).astype(np.int32)
        cu = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        decodes = rng.random(6) < 0.7
        for args in ((contexts, cu, decodes), (contexts, None, None)):
            with jax.transfer_guard("disallow"):  # an op of jax would wait for all steps before
                host = make(*args, xp=np)
            device = on_device(*args)
            for ours, theirs in zip(jax.tree.leaves(host), jax.tree.leaves(device), strict=True):
                assert isinstance(ours, np.ndarray) and ours.dtype == theirs.dtype and ours.shape == theirs.shape
            splits = host.splits if args[1] is None else host.decode.splits
            used = int(splits.num_splits[0])  # past them anything may stand
            for ours, theirs in zip(_without_splits(host), _without_splits(device), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            theirs = device.splits if args[1] is None else device.decode.splits
            np.testing.assert_array_equal(splits.work_i4[:used], theirs.work_i4[:used])


def _without_splits(work) -> list:
    if isinstance(work, DecodeWork):
        return jax.tree.leaves(work)[1:]
    return jax.tree.leaves((work.tiles, work.context_s1, work.decode.splits[1:], work.decode.row_s))


@pytest.mark.parametrize(
    "q_lens", [pytest.param(None, id="decode"), pytest.param([1, 9, 0, 1, 1], id="mixed", marks=pytest.mark.deep)]
)
def test_kernels_take_the_hosts_lists(q_lens):
    num_kv_heads = 2 if q_lens else 1
    batch = cases.make_batch([30, 9, 0, 17, 600], q_lens=q_lens, num_kv_heads=num_kv_heads, group=4)
    ops = ops_of(mosaic)
    op = ops.paged_decode_attention if q_lens is None else ops.ragged_paged_attention
    table, contexts, *cu = batch.args[3:]
    sizes = dict(num_rows=len(batch.q), table_tokens=table.shape[1] * 16, window=None)
    make = maker(4 * num_kv_heads, num_kv_heads, 64, **sizes)

    with interpreting(num_sms=2):
        attend = jax.jit(lambda args, work: op(*args, **batch.options, work=work))
        found, other = (
            np.asarray(attend(batch.args, make(lens, *(cu or [None]), None, xp=np)), np.float64)
            for lens in (contexts, contexts // 2)
        )
    batch.check(found)
    assert (other != found).any(), "lists of shorter contexts change the result"


def test_each_box_of_queries_holds_the_heads_of_its_kv_head():
    for num_heads, num_kv_heads, num_rows in [(32, 8, 3), (9, 3, 8), (4, 4, 5), (16, 1, 3), (28, 4, 2), (6, 3, 4)]:
        group, rows = num_heads // num_kv_heads, QueryRows.of(num_rows, num_heads, num_kv_heads)
        m = -(-group // TMA_ROWS) * TMA_ROWS
        for row in range(num_rows):
            for head in range(num_kv_heads):
                first, lead = (each(row, head, num_kv_heads) for each in (rows.first, rows.lead))
                box = first // TMA_ROWS * TMA_ROWS
                assert first - box == lead and lead + group <= m
                assert not rows.direct or (first == row * num_heads + head * group and box + m <= num_rows * num_heads)
    assert QueryRows.of(64, 32, 8).direct and not QueryRows.of(64, 28, 4).direct and not QueryRows.of(1, 4, 4).direct


def test_select_binds_the_lists_to_the_model():
    sizes = dict(dtype="bfloat16", head_dim=128, num_heads=32, num_kv_heads=8, block_size=16)
    h200 = dict(platform="gpu", device_kind="NVIDIA H200", compute_capability=9.0)
    work = select("mosaic", **h200, **sizes).make_work(
        np.array([600, 0], np.int32), None, None, num_rows=2, table_tokens=8192, window=None, xp=np
    )
    assert work.splits.num_splits.tolist() == [2] and work.row_s.tolist() == [0, 1]
    assert select("triton", **h200, **sizes).make_work is None

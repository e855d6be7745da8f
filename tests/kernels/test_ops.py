"""Every implementation against a plain float64 loop; and proofs that the comparison can fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import merge_attention
from tests.kernels import cases
from tests.kernels.implementations import ALL, CPU, MOSAIC, REFERENCE, TRITON

DTYPES = (jnp.bfloat16, jnp.float16)
# Numbers of random cases: each is compiled, and an interpreter takes seconds.
FEW, MANY = {REFERENCE: 2, CPU: 4}, {REFERENCE: 64, CPU: 128, TRITON: 64, MOSAIC: 48}

every = pytest.mark.parametrize("kernels", ALL, ids=[kernels.name for kernels in ALL])
every_usually_the_cpus = pytest.mark.parametrize(
    "kernels", [pytest.param(k, id=k.name, marks=[] if k is CPU else [pytest.mark.deep]) for k in ALL]
)

# Slow in the interpreters; their shapes are compiled and their rules checked in test_compile.py and test_hardware.py.
SLOW = {
    "block 128, head dim 256, 16 heads on one", "block 8, head dim 256, 16 heads on one", "block 128, float16",
    "block 32, 7 heads on one",
}  # fmt: skip
# Their options come together in "sinks, window, capped, fp8". test_triton.py has the options, too.
SINGLE = {
    "fp8, lse", "fp8, lse, two splits", "sinks", "window, capped", "window over a split's edge, capped", "peaked",
    "head dim 256, window, capped", "block 64, float16", "head dim 80",
}  # fmt: skip
SMALL = "small: sinks, window, capped, fp8, lse"
SLOW_IN = {
    REFERENCE: SLOW | SINGLE | {
        "block 8, head dim 128", "block 16", "padding only", "prompts, chunks and decodes", SMALL,
    },
    CPU: SLOW | SINGLE - {"peaked", "block 64, float16", "head dim 80"} | {SMALL},
    TRITON: SLOW | SINGLE | {
        "block 8, head dim 128", "padding only", "prompts, chunks and decodes", SMALL,
    },
    MOSAIC: SLOW | SINGLE | {
        "block 8, head dim 128", "padding only", "sinks, window, capped, fp8", "block 16",
        "prompts, chunks and decodes",
    },
}  # fmt: skip
# Each option of a write is in another case, too.
FEW_WRITES = {
    "one KV head, block 8, head dim 64", "block 128, head dim 256, float16", "fp8, rotated", "queries, fp8",
    "queries, two thread blocks", "queries, head dim 80",
}  # fmt: skip


def examples(*tiers):
    """Each implementation with its number of random cases in each tier; many of them are deep."""
    return pytest.mark.parametrize(
        ("kernels", "examples"),
        [
            pytest.param(kernels, count, id=f"{kernels.name}-{count}", marks=[pytest.mark.deep] if tier is MANY else [])
            for tier in tiers
            for kernels, count in tier.items()
        ],
    )


def tiered(named):
    """Each implementation with cases by their names, slow ones in the deep tier."""
    return pytest.mark.parametrize(
        ("kernels", "case"),
        [
            pytest.param(
                kernels, case, id=f"{name}-{kernels.name}",
                marks=[pytest.mark.deep] if name in SLOW_IN[kernels] else [],
            )
            for name, case in named.items()
            for kernels in ALL
        ],
    )  # fmt: skip


def drawn(examples, strategy, check) -> None:
    """Run `check` on some examples of a strategy, the same at every run."""

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def run(case):
        check(case)

    run()


@tiered(cases.DECODE)
def test_decode(kernels, case, request):
    optimize_some(case, request)
    batch = cases.make_batch(**case)
    batch.check(batch.run(kernels.paged_decode_attention))


def optimize_some(case, request) -> None:
    """Take the code of users for cases with most options, and for all in the deep tier."""
    if "sinks" in case:
        request.getfixturevalue("optimized_code")


@tiered(cases.RAGGED)
def test_ragged(kernels, case, request):
    optimize_some(case, request)
    batch = cases.make_batch(**case)
    batch.check(batch.run(kernels.ragged_paged_attention))


@pytest.mark.parametrize(
    ("kernels", "case"),
    [
        pytest.param(
            kernels, case, id=f"{name}-{kernels.name}",
            marks=[] if kernels is CPU or name in FEW_WRITES else [pytest.mark.deep],
        )
        for name, case in cases.WRITE.items()
        for kernels in ALL
    ],
)  # fmt: skip
def test_write(kernels, case):
    write = cases.make_write(**case)
    write.check(*kernels.write_kv(*write.args, **write.options))


@examples(MANY)
def test_any_decode(kernels, examples):
    strategy = cases.batches(ragged=False, long=kernels is not REFERENCE, dtypes=DTYPES)
    drawn(examples, strategy, lambda batch: batch.check(batch.run(kernels.paged_decode_attention)))


@examples(MANY)
def test_any_ragged(kernels, examples):
    strategy = cases.batches(ragged=True, long=False, dtypes=DTYPES)
    drawn(examples, strategy, lambda batch: batch.check(batch.run(kernels.ragged_paged_attention)))


@examples(FEW, MANY)
def test_any_write(kernels, examples):
    def check(write):
        write.check(*kernels.write_kv(*write.args, **write.options))

    drawn(examples, cases.writes(dtypes=DTYPES), check)


@examples(FEW, MANY)
def test_any_copy(kernels, examples):
    """All sources are read before any destination is written: chains, swaps, and a source for two."""

    def check(draw):
        order, sources, seed = draw
        pool = np.random.default_rng(seed).standard_normal((6, 2, 8, 64)).astype(jnp.bfloat16)
        destinations = np.array([-1 if d == 5 else d for d in order[: len(sources)]], np.int32)
        out = kernels.copy_blocks(pool, np.array(sources, np.int32), destinations)
        expected = np.array(pool, np.float32)
        for source, destination in zip(sources, destinations.tolist()):
            if destination >= 0:
                expected[destination] = pool[source]
        np.testing.assert_array_equal(np.asarray(out, np.float32), expected)

    sources = st.lists(st.integers(0, 5), min_size=1, max_size=6)
    drawn(examples, st.tuples(st.permutations(range(6)), sources, st.integers(0, 99)), check)


@pytest.mark.parametrize(  # Triton: test_triton.py
    ("kernels", "q_lens"),
    [
        pytest.param(REFERENCE, None, id="reference-decode"), pytest.param(CPU, [1, 2, 40], id="cpu-ragged"),
        pytest.param(REFERENCE, [1, 2, 40], id="reference-ragged", marks=pytest.mark.deep),
        pytest.param(CPU, None, id="cpu-decode", marks=pytest.mark.deep),
    ],
)  # fmt: skip
def test_float32(kernels, q_lens):
    """In float32 the remaining difference is the order of the sums."""
    batch = cases.make_batch([1, 17, 300], q_lens=q_lens, group=2, dtype=jnp.float32, return_lse=True)
    batch.check(batch.run(attention(kernels, q_lens)))


@every_usually_the_cpus
def test_a_row_depends_neither_on_neighbours_nor_on_chunks(kernels):
    """To the bit: the last rows of a prompt, in one piece among others, as a chunk alone, and the last one alone."""
    batch = cases.make_batch([9, 70], q_lens=[9, 70], num_kv_heads=1, group=2)
    chunk = cases.replace(
        batch,
        q=batch.q[-25:],
        block_tables=batch.block_tables[1:],
        context_lens=batch.context_lens[1:],
        cu_q_lens=np.array([0, 25], np.int32),
    )
    ragged = kernels.ragged_paged_attention
    expected = batch.run(ragged)
    np.testing.assert_array_equal(chunk.run(ragged), expected[-25:])
    one = cases.replace(chunk, q=batch.q[-1:], cu_q_lens=np.array([0, 1], np.int32))
    np.testing.assert_array_equal(one.run(ragged, decode_s=np.array([False])), expected[-1:])


@pytest.mark.parametrize("num_seqs", [48, pytest.param(256, marks=pytest.mark.deep)])
@every_usually_the_cpus
def test_a_decode_row_has_the_same_bits_alone_in_a_large_step_and_beside_prompts(kernels, num_seqs):
    """One request of two splits: three times in a large decode step, alone in a wider table, and in mixed steps."""
    rng, at = np.random.default_rng(0), [0, num_seqs // 3, num_seqs - 1]
    contexts = rng.integers(0, 2, num_seqs)
    contexts[at] = 530
    batch = cases.make_batch(contexts.tolist(), num_kv_heads=1, group=2, block_size=16, return_lse=True)
    queries, tables = batch.q.copy(), batch.block_tables.copy()
    queries[at], tables[at] = batch.q[0], batch.block_tables[0]
    batch = cases.replace(batch, q=queries, block_tables=tables)
    decode, ragged = kernels.paged_decode_attention, kernels.ragged_paged_attention
    alone = cases.replace(
        batch,
        q=batch.q[:1],
        block_tables=np.pad(batch.block_tables[:1], ((0, 0), (0, 3))),
        context_lens=batch.context_lens[:1],
    )
    expected = [x[0] for x in alone.run(decode)]

    def check(out, row):
        for x, one in zip(out, expected, strict=True):
            np.testing.assert_array_equal(x[row], one)

    together = batch.run(decode)
    for row in at:
        check(together, row)
    for q_lens in ([20, 1], [1, 17]):  # behind a prompt and before one, which reads the same blocks
        mine = q_lens.index(1)
        rows = [batch.q[:1] if i == mine else batch.q[2 : 2 + n] for i, n in enumerate(q_lens)]
        step = cases.replace(
            batch,
            q=np.concatenate(rows),
            block_tables=np.stack([batch.block_tables[0]] * len(q_lens)),
            context_lens=np.array([530 if i == mine else n for i, n in enumerate(q_lens)], np.int32),
            cu_q_lens=np.cumsum([0, *q_lens], dtype=np.int32),
        )
        check(step.run(ragged), sum(q_lens[:mine]))


@every_usually_the_cpus
def test_parts_merge(kernels):
    """A shared prefix attended once, and the rest of each sequence: together the attention over the whole."""
    batch = cases.make_batch([96, 96], num_kv_heads=1, group=2, return_lse=True)
    prefix = cases.replace(batch, context_lens=np.array([64, 32], np.int32))
    rest = cases.replace(
        batch,
        # The first goes on after four blocks, the second after two.
        block_tables=np.stack([np.pad(batch.block_tables[0, 4:], (0, 2)), batch.block_tables[1, 2:]]),
        context_lens=np.array([32, 64], np.int32),
    )
    op = kernels.paged_decode_attention
    parts = [op(*part.args, **part.options) for part in (prefix, rest)]
    out, lse = jax.jit(merge_attention)(*parts[0], *parts[1])
    batch.check((np.asarray(out, np.float64), np.asarray(lse)))


def attention(kernels, q_lens):
    return kernels.paged_decode_attention if q_lens is None else kernels.ragged_paged_attention


@pytest.mark.deep
class TestTheChecks:
    """They are only worth something if they can fail. `test_mosaic.py` plants errors in kernels."""

    @every
    @pytest.mark.parametrize("q_lens", [None, [9]], ids=["decode", "ragged"])
    def test_a_slot_too_many_is_nan(self, kernels, q_lens):
        batch = cases.make_batch([12], q_lens=q_lens, num_kv_heads=1)
        long = cases.replace(batch, context_lens=batch.context_lens + 1)
        assert np.isnan(long.run(attention(kernels, q_lens))[-1]).all()

    @pytest.mark.parametrize("q_lens", [None, [9]], ids=["decode", "ragged"])
    def test_a_context_one_too_short_is_noticed(self, q_lens):
        batch = cases.make_batch([12], q_lens=q_lens, num_kv_heads=1)
        short = cases.replace(batch, context_lens=batch.context_lens - 1)
        with pytest.raises(AssertionError, match="Mismatched elements"):
            batch.check(short.run(attention(REFERENCE, q_lens)))

    @pytest.mark.parametrize("q_lens", [None, [9]], ids=["decode", "ragged"])
    @pytest.mark.parametrize("wrong", [dict(window=6), dict(soft_cap=1.1), dict(scale=0.13)])
    def test_a_wrong_option_is_noticed(self, q_lens, wrong):
        batch = cases.make_batch([12], q_lens=q_lens, num_kv_heads=1, window=5, soft_cap=1.0, return_lse=True)
        with pytest.raises(AssertionError, match="Mismatched elements"):
            batch.check(batch.run(attention(REFERENCE, q_lens), **wrong))

    def test_a_wrong_slot_is_noticed(self):
        write = cases.make_write()
        slots = np.where(write.slot_mapping < 0, np.int32(-1), (write.slot_mapping + 1) % 48)
        with pytest.raises(AssertionError):
            write.check(*REFERENCE.write_kv(*write.args[:4], slots))

    def test_a_wrong_scale_is_noticed(self):
        write = cases.make_write(fp8=True)
        options = write.options | dict(v_scale_k=write.options["v_scale_k"] * 1.3)
        with pytest.raises(AssertionError):
            write.check(*REFERENCE.write_kv(*write.args, **options))

"""Attention and writes on a CPU: parts of contexts, tiles of queries, wrong numbers, and the memory of the pool."""

import dataclasses
import functools
import itertools
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu
from pallas_kernels.cpu import attention, code, contexts, decode, ffi, prompt, team, writes
from tests.kernels import cases
from tests.kernels.implementations import CPU, REFERENCE, jitted, ops_of, wrapped

PART = contexts.PART
KINDS = {
    "float32": dict(dtype=jnp.float32),
    "bfloat16": dict(dtype=jnp.bfloat16),
    "fp8": dict(dtype=jnp.bfloat16, fp8=True),
    "float16, window, capped": dict(dtype=jnp.float16, window=PART + 44, soft_cap=2.0),
}


def kinds(*usual):
    """Each kind of arrays; unnamed kinds are in the deep tier."""
    marks = {name: [] if name in usual else [pytest.mark.deep] for name in KINDS}
    return pytest.mark.parametrize("kind", [pytest.param(KINDS[name], id=name, marks=marks[name]) for name in KINDS])


@pytest.fixture
def fresh_ops(monkeypatch):
    """Return a function that gives ops whose code is written anew, with the replacements of a test."""
    numbers, register, own = itertools.count(), ffi.register, uuid.uuid4()  # other processes have no such code

    def fresh():
        number = next(numbers)
        for module in (attention, writes):
            named = lambda name, *writers, **options: register(f"{name}_{own}_{number}", *writers, **options)
            monkeypatch.setattr(module, "register", named)
        return wrapped(cpu, jitted)

    return fresh


def rows_of(batch: cases.Batch, first: int, stop: int, context: int) -> cases.Batch:
    """Return some rows of a batch of one sequence, as a chunk of its prompt that ends at `context`."""
    return dataclasses.replace(
        batch,
        q=batch.q[first:stop],
        context_lens=np.array([context], np.int32),
        cu_q_lens=np.array([0, stop - first], np.int32),
    )


class TestParts:
    """The context of a decode token is cut into parts."""

    @kinds("float32", "fp8")
    def test_contexts_at_the_edges_of_parts(self, kind):
        contexts = [0, 1, PART - 1, PART, PART + 1, 2 * PART + 40, 3 * PART]
        batch = cases.make_batch(contexts, group=3, block_size=16, return_lse=True, **kind)
        batch.check(batch.run(CPU.paged_decode_attention))

    @kinds("bfloat16", "float16, window, capped")
    def test_a_decode_token_has_the_same_bits_in_a_mixed_step(self, kind):
        context = 2 * PART + 7
        batch = cases.make_batch([context], group=3, **kind)
        alone = batch.run(CPU.paged_decode_attention)
        step = dataclasses.replace(
            batch,
            q=np.repeat(batch.q, 41, axis=0),
            block_tables=np.repeat(batch.block_tables, 3, axis=0),
            context_lens=np.array([30, context, context], np.int32),
            cu_q_lens=np.array([0, 30, 31, 41], np.int32),
        )
        np.testing.assert_array_equal(step.run(CPU.ragged_paged_attention)[30], alone[0])

    def test_a_part_that_is_left_out_is_noticed(self, fresh_ops, monkeypatch):
        merge = decode.DecodeWriter.merge
        monkeypatch.setattr(
            decode.DecodeWriter, "merge", lambda self, s, parts: merge(self, s, self.code.at(parts, 1, code.F32))
        )
        batch = cases.make_batch([2 * PART], dtype=jnp.float32)
        with pytest.raises(AssertionError, match="Mismatched elements"):
            batch.check(batch.run(fresh_ops().paged_decode_attention))


class TestPrompts:
    """Queries of prompts are computed in units of several hundred rows."""

    @kinds(*KINDS)
    def test_a_query_has_the_same_bits_in_any_chunk(self, kind):
        length = 410
        batch = cases.make_batch([length], q_lens=[length], num_kv_heads=1, group=3, block_size=16, **kind)
        whole = batch.run(CPU.ragged_paged_attention)
        batch.check(whole)
        for first, stop in ((0, 1), (0, 65), (63, 64), (64, 300), (299, 410), (409, 410)):
            chunk = rows_of(batch, first, stop, stop)
            found = chunk.run(CPU.ragged_paged_attention, decode_s=np.array([False]))
            np.testing.assert_array_equal(found, whole[first:stop])

    @kinds("bfloat16", "float16, window, capped")
    def test_a_query_has_the_same_bits_whatever_the_size_of_blocks(self, kind):
        """Tiles of keys lie in one block or in several."""
        batch = cases.make_batch([200], q_lens=[150], num_kv_heads=1, group=3, block_size=64, **kind)
        whole = batch.run(CPU.ragged_paged_attention)
        parts = np.arange(8, dtype=np.int32)
        small = dataclasses.replace(
            batch,
            k_pool=batch.k_pool.reshape(-1, 1, 8, 64),
            v_pool=batch.v_pool.reshape(-1, 1, 8, 64),
            block_tables=(batch.block_tables[..., None] * 8 + parts).reshape(1, -1),
        )
        np.testing.assert_array_equal(small.run(CPU.ragged_paged_attention), whole)

    def test_a_missing_mask_is_noticed(self, fresh_ops, monkeypatch):
        monkeypatch.setattr(prompt.PromptWriter, "_mask", lambda *_: None)
        batch = cases.make_batch([100], q_lens=[100], dtype=jnp.float32)
        with pytest.raises(AssertionError, match="Mismatched elements"):
            batch.check(batch.run(fresh_ops().ragged_paged_attention))

    def test_a_result_of_earlier_tiles_that_is_not_scaled_is_noticed(self, fresh_ops, monkeypatch):
        softmax = prompt.PromptWriter._softmax
        one = lambda self, *args: (softmax(self, *args), self.vector(1.0))[1]
        monkeypatch.setattr(prompt.PromptWriter, "_softmax", one)
        batch = cases.make_batch([100], q_lens=[100], dtype=jnp.float32)
        with pytest.raises(AssertionError, match="Mismatched elements"):
            batch.check(batch.run(fresh_ops().ragged_paged_attention))


@pytest.mark.parametrize("instructions", [{}, {"has_bf16_dot"}, {"has_bf16_dot", "has_bf16_tiles"}])
def test_bfloat16_by_each_kind_of_instructions(instructions, fresh_ops, monkeypatch):
    host = code.Machine.host()
    chosen = {name: name in instructions for name in ("has_bf16_dot", "has_bf16_tiles")}
    if any(chosen[name] > getattr(host, name) for name in chosen):
        pytest.skip("this machine lacks them")
    monkeypatch.setattr(code.Machine, "host", lambda: host._replace(**chosen))
    ops = fresh_ops()
    for fp8, q_lens in itertools.product((False, True), ([120], [37])):
        batch = cases.make_batch([120], q_lens=q_lens, group=3, block_size=16, fp8=fp8, return_lse=True)
        batch.check(batch.run(ops.ragged_paged_attention))


@pytest.mark.parametrize("name, wrong", [
    ("block_tables", -(2**31)), ("block_tables", 2**31 - 1), ("context_lens", 2**31 - 1), ("context_lens", -7),
    ("cu_q_lens", 2**31 - 1), ("cu_q_lens", -(2**31)),
])  # fmt: skip
def test_no_number_reads_or_writes_outside_the_arrays(name, wrong):
    batch = cases.make_batch([70, 300, 5], q_lens=[40, 1, 5])
    wrong = np.full_like(getattr(batch, name), wrong)
    batch = dataclasses.replace(batch, **{name: wrong})
    jax.block_until_ready(CPU.ragged_paged_attention(*batch.args, **batch.options))


class TestWrites:
    @pytest.mark.parametrize("head_dim", [20, 36, 80])
    def test_head_dims_that_fill_no_whole_vectors(self, head_dim):
        for fp8 in (False, True):
            write = cases.make_write(head_dim=head_dim, pool_head_dim=80, rotated=True, group=2, fp8=fp8)
            write.check(*CPU.write_kv(*write.args, **write.options))

    @pytest.mark.parametrize("slot", [-(2**31), -1, 48, 2**31 - 1])
    def test_slots_outside_the_pool_write_nothing(self, slot):
        write = cases.make_write(dtype=jnp.float32)
        slots = np.full_like(write.slot_mapping, slot)
        for pool in CPU.write_kv(*write.args[:4], slots):
            assert np.isnan(pool).all()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("fp8", [False, True])
    def test_numbers_are_rounded_as_the_reference_rounds_them(self, dtype, fp8):
        """All exponents, halves between two numbers, subnormal numbers, zeros, and those past the ends."""
        exponents, fractions = 2.0 ** np.arange(-12, 12), 1 + np.arange(64) / 64
        numbers = np.outer(exponents, fractions).astype("float32").reshape(-1, 1, 64)
        numbers = np.concatenate([numbers, -numbers, 0 * numbers[:1], -0 * numbers[:1]]).astype(np.dtype(dtype))
        scales = dict(k_scale_k=np.ones(1, np.float32), v_scale_k=np.ones(1, np.float32)) if fp8 else {}
        pool = np.zeros((len(numbers), 1, 1, 64), jnp.dtype("float8_e4m3fn" if fp8 else dtype))
        args = pool, pool, numbers, numbers, np.arange(len(numbers), dtype=np.int32)
        found, expected = (kernels.write_kv(*args, **scales) for kernels in (CPU, REFERENCE))
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(ours).view("u1"), np.asarray(theirs).view("u1"))

    def test_a_donated_pool_is_not_copied(self):
        write = cases.make_write(rotated=True, group=2)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(k_pool, v_pool, k, v, slots, options):
            ops = ops_of(cpu)
            k_pool, v_pool, q = ops.write_kv(k_pool, v_pool, k, v, slots, **options)
            tables, lengths = jnp.zeros((7, 1), jnp.int32), jnp.full(7, 9, jnp.int32)
            return k_pool, v_pool, ops.paged_decode_attention(q, k_pool, v_pool, tables, lengths, scale=1.0)

        k_pool, v_pool = (jnp.array(pool) for pool in write.args[:2])
        places = [pool.unsafe_buffer_pointer() for pool in (k_pool, v_pool)]
        compiled = step.lower(k_pool, v_pool, *write.args[2:], write.options).compile()
        assert " copy(" not in compiled.as_text()
        written = compiled(k_pool, v_pool, *write.args[2:], write.options)
        assert [pool.unsafe_buffer_pointer() for pool in written[:2]] == places
        assert k_pool.is_deleted()

    def test_a_pool_that_is_still_needed_is_copied(self):
        write = cases.make_write()
        k_pool, v_pool = (jnp.array(pool) for pool in write.args[:2])
        write.check(*CPU.write_kv(k_pool, v_pool, *write.args[2:]))
        assert np.isnan(k_pool).all() and np.isnan(v_pool).all()

    def test_other_dtypes_are_an_error(self):
        with jax.enable_x64(True):
            pool, x = jnp.zeros((1, 1, 8, 64), "float64"), jnp.zeros((1, 1, 64), "float64")
            with pytest.raises(NotImplementedError, match="float64 into pools of float64 is not supported"):
                ops_of(cpu).write_kv(pool, pool, x, x, jnp.zeros(1, jnp.int32))


@pytest.mark.parametrize("spins, has_futex", [(0, True), (0, False), (10**9, True)], ids=["sleeps", "yields", "spins"])
def test_the_calling_thread_waits_for_the_others(spins, has_futex, fresh_ops, monkeypatch):
    """In each way: results of all units are there when the call returns."""
    monkeypatch.setattr(ffi, "SPINS", spins)
    monkeypatch.setattr(ffi, "WORTH_A_THREAD_NS", 1)
    if not has_futex:
        monkeypatch.setattr(team, "FUTEX", None)
    batch = cases.make_batch([600] * 3, group=3)
    attend = jax.jit(functools.partial(fresh_ops().paged_decode_attention, **batch.options))
    expected = batch.run(CPU.paged_decode_attention)
    for _ in range(50):
        np.testing.assert_array_equal(np.asarray(attend(*batch.args), np.float64), expected)

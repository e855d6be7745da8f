"""Test process of `selftest`: it runs the ops of one implementation on small fixed cases.

It compares them with the reference. It reads a request from stdin. It writes a line to stdout once its cases are on the
device, and one after each op: a JSON string, the error or "". Anything that a library prints goes to stderr.

The cases are hard to pass by chance: slots without a token are NaN, blocks lie in random order, table entries past a
context are -1, and scores differ so much that a few keys decide each row.
"""

import ctypes
import dataclasses
import functools
import json
import os
import pickle
import random
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, ops
from pallas_kernels.checks import FP8
from pallas_kernels.ops import Ops
from pallas_kernels.options import Chains
from pallas_kernels.selftest import MAX_REASON, START_LIMIT_S, Subject
from pallas_kernels.weights import MIDDLE, PACKED, Weight, pack

NUM_TOKENS = 37  # of a write
# The edges of blocks, of tiles (64, 128) and of splits (512), and a padding row.
CONTEXTS = (530, 1, 17, 0, 128, 65)
Q_LENS = (1, 1, 17, 0, 40, 1)  # of a mixed step: decode tokens, a whole prompt, padding, a chunk
PADDING_ROWS = 3
OUTPUTS, INPUTS = 192, 1024  # of a weight
EXPERT_ROWS = (20, 0, 17)  # of a product with experts
COPIES = ((0, 1, 2, 0, 3), (1, 0, 3, 4, -1))  # a swap, a chain, one source of two, and padding
# Sequences of a recurrent layer: a prompt, decode tokens in a chain, padding, and a chunk that reads the chain's page.
DELTA_LENS, DELTA_READS, DELTA_WRITES = (17, 1, 1, 1, 0, 12), (-1, 1, -2, -2, 0, 1), (0, 2, -1, 3, 4, 5)
HEADS, KEY_DIM, VALUE_DIM = (2, 4), 128, 96  # of queries and keys, and of values
REFERENCE = Ops(ops.load(dispatch.REFERENCE))
PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h
GRACE_S = 30  # by which the process that waits has ended this one, unless it is gone


@dataclasses.dataclass(frozen=True)
class OpTest:
    """Test of an op: its options, its arguments, and the expected outputs with a tolerance.

    Attributes:
        donated: the arguments that the op updates in place.
    """

    op: str
    options: dict[str, Any]
    args: tuple[Any, ...]
    expected: tuple[jax.Array, ...]
    donated: tuple[int, ...] = ()
    rtol: float = 0.0
    atol: float = 0.0

    def error(self, ops: Ops) -> str | None:
        """Run it under jit, as an engine does, and describe the error of the result; None if it is right."""
        run = jax.jit(functools.partial(getattr(ops, self.op), **self.options), donate_argnums=self.donated)
        out = jax.tree.leaves(jax.block_until_ready(run(*self.args)))
        errors = [difference(*pair, self.rtol, self.atol) for pair in zip(out, self.expected, strict=True)]
        return next(filter(None, errors), None)


def difference(out: jax.Array, expected: jax.Array, rtol: float, atol: float) -> str | None:
    """Describe how an array differs from the expected one beyond a tolerance; None if it does not."""
    if out.shape != expected.shape:
        return f"wrong shape (got {list(out.shape)}, expected {list(expected.shape)})"
    nans, wrong, most = jax.device_get(_compare(out, expected, rtol, atol))
    if nans:
        return f"wrong result: {nans} of {out.size} values are NaN and should not be, or the reverse"
    if wrong:
        return f"wrong result: {wrong} of {out.size} values are off by up to {most:.2g} (allowed {atol:.2g})"
    return None


@jax.jit
def _compare(out: jax.Array, expected: jax.Array, rtol: float, atol: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Count differing NaNs and differences beyond the tolerance, and return the largest difference."""
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    both = ~jnp.isnan(out) & ~jnp.isnan(expected)
    off = jnp.where(both, jnp.abs(out - expected), 0)
    wrong = both & (off > atol + rtol * jnp.abs(expected))
    return (jnp.isnan(out) != jnp.isnan(expected)).sum(), wrong.sum(), off.max()


def make_trials(subject: Subject) -> dict[str, Callable[[], OpTest]]:
    """Return the tests of `selftest.TESTS`, each as a function that puts its case on the device."""
    return {
        "write_kv": lambda: _write(subject, rotated=False),
        "write_kv with rope": lambda: _write(subject, rotated=True),
        "copy_blocks": lambda: _copy(subject),
        "paged_decode_attention": lambda: _attention(subject, None),
        "ragged_paged_attention": lambda: _attention(subject, Q_LENS),
        "product": lambda: _product(subject, None),
        "product of experts": lambda: _mxfp4_product(subject) if subject.mxfp4 else _product(subject, EXPERT_ROWS),
        "product of 4 bits": lambda: _grouped_product(subject),
        "delta_rule": lambda: _delta_rule(subject),
    }


def _write(subject: Subject, *, rotated: bool) -> OpTest:
    """Return a test that writes tokens to random slots of pools of NaN, every third of them padding."""
    num_blocks = -(-NUM_TOKENS // subject.block_size) + 2
    slots = random.Random(0).sample(range(num_blocks * subject.block_size), NUM_TOKENS)
    slots[::3] = [-1] * len(slots[::3])

    @jax.jit
    def make(key: jax.Array) -> tuple[dict[str, jax.Array], tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        shape = (NUM_TOKENS, subject.num_kv_heads, subject.head_dim)
        k, v = (_uniform(key, i, shape).astype(subject.dtype) for i in range(2))
        pools = [jnp.full(_pool_shape(subject, num_blocks), jnp.nan, subject.pool_dtype) for _ in range(2)]
        options = _scales(subject, key)
        if rotated:
            angle = 4 * _uniform(key, 2, (NUM_TOKENS, subject.head_dim // 2))
            q = _uniform(key, 3, (NUM_TOKENS, subject.num_heads, subject.head_dim)).astype(subject.dtype)
            options |= dict(cos_t=jnp.cos(angle), sin_t=jnp.sin(angle), q_tnh=q)
        args = (*pools, k, v, jnp.asarray(slots, jnp.int32))
        return options, args, REFERENCE.write_kv(*args, **options)

    options, args, expected = make(_key())
    fp8, eps = jnp.dtype(subject.pool_dtype) == FP8, float(jnp.finfo(subject.dtype).eps)
    rtol = (eps if rotated or fp8 else 0.0) + (float(jnp.finfo(FP8).eps) if fp8 else 0.0)
    # The step between fp8's smallest numbers; of a rotation, the loss where its two products cancel.
    atol = 2**-9 if fp8 else 1e-6 if rotated else 0.0
    return OpTest("write_kv", options, args, expected, donated=(0, 1), rtol=rtol, atol=atol)


def _copy(subject: Subject) -> OpTest:
    @jax.jit
    def make(key: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        pool = _uniform(key, 0, _pool_shape(subject, 6)).astype(subject.pool_dtype)
        args = (pool, *(jnp.asarray(blocks, jnp.int32) for blocks in COPIES))
        return args, REFERENCE.copy_blocks(*args)

    args, expected = make(_key())
    return OpTest("copy_blocks", {}, args, (expected,), donated=(0,))


def _attention(subject: Subject, q_lens: Sequence[int] | None) -> OpTest:
    """Return a test of attention over CONTEXTS: one query token each, or the last `q_lens` tokens of each.

    The weights of V and the output are each rounded once to q's dtype, which moves a mean of V, at most 1, by half an
    eps. The tolerance is twice that sum. A missing or foreign key moves a row by much more.
    """
    op = "paged_decode_attention" if q_lens is None else "ragged_paged_attention"
    tables, used = _tables(subject.block_size)
    lists = [tables, CONTEXTS]
    if q_lens is not None:
        lists.append([sum(q_lens[:s]) for s in range(len(q_lens) + 1)])
    rows = len(CONTEXTS) if q_lens is None else sum(q_lens) + PADDING_ROWS

    @jax.jit
    def make(key: jax.Array) -> tuple[dict[str, jax.Array], tuple[jax.Array, ...], jax.Array]:
        shape = _pool_shape(subject, len(used))
        used_pb = jnp.arange(subject.block_size) < jnp.asarray(used)[:, None]
        inside_h = jnp.arange(subject.pool_head_dim) < subject.head_dim
        pools = [jnp.where(inside_h, _uniform(key, i, shape), 0) for i in range(2)]
        pools = [jnp.where(used_pb[:, None, :, None], pool, jnp.nan).astype(subject.pool_dtype) for pool in pools]
        q = (3.5 * _uniform(key, 2, (rows, subject.num_heads, subject.head_dim))).astype(subject.dtype)
        args = [jnp.asarray(numbers, jnp.int32) for numbers in lists]
        scales = _scales(subject, key)
        if subject.sinks:
            scales |= dict(sinks_n=4 * _uniform(key, 5, (subject.num_heads,)))
        exact = [q.astype(jnp.float32), *(pool if pool.dtype == FP8 else pool.astype(jnp.float32) for pool in pools)]
        with jax.default_matmul_precision("highest"):
            expected = getattr(REFERENCE, op)(*exact, *args, scale=subject.head_dim**-0.5, **scales)
        return scales, (q, *pools, *args), expected

    scales, args, expected = make(_key())
    eps = 1e-4 if jnp.dtype(subject.dtype) == jnp.float32 else float(jnp.finfo(subject.dtype).eps)
    return OpTest(op, dict(scale=subject.head_dim**-0.5, **scales), args, (expected,), atol=2 * eps)


def _product(subject: Subject, sizes: Sequence[int] | None) -> OpTest:
    """Return a test of the product of 37 rows, with a weight or with gated weights of experts in 8 bits.

    All numbers are small integers, so that sums are exact and a result is rounded once, a gate a few times.
    """
    shape = (*(() if sizes is None else (len(sizes),)), OUTPUTS, INPUTS)
    static: dict[str, Any] = {} if sizes is None else dict(activation="silu")

    @jax.jit
    def make(key: jax.Array) -> tuple[dict[str, Any], tuple[Any, ...], jax.Array]:
        x = jnp.round(3 * _uniform(key, 0, (NUM_TOKENS, INPUTS))).astype(subject.dtype)
        values = [jnp.round(3 * _uniform(key, 1 + i, shape)) for i in range(2)]
        options: dict[str, Any] = {}
        if sizes is None:
            weight = Weight(values[0].astype(subject.dtype), bias=_uniform(key, 3, (OUTPUTS,)))
        else:
            scales = (0.75 + 0.25 * _uniform(key, 4, shape[:-1])) / INPUTS
            weight, up = (Weight(value.astype(jnp.int8), scales) for value in values)
            options |= dict(up=up, sizes_e=jnp.asarray(sizes, jnp.int32))
        with jax.default_matmul_precision("highest"):
            expected = REFERENCE.product(x.astype(jnp.float32), weight, dtype=subject.dtype, **options, **static)
        return options, (x, weight), expected

    options, args, expected = make(_key())
    eps = float(jnp.finfo(subject.dtype).eps)
    return OpTest("product", options | static, args, (expected,), rtol=2 * eps, atol=1e-6)


def _mxfp4_product(subject: Subject) -> OpTest:
    """Return a test of the gated product of 37 rows with experts in MXFP4, with biases. Sums without them are exact."""
    shape = len(EXPERT_ROWS), OUTPUTS, INPUTS

    @jax.jit
    def make(key: jax.Array) -> tuple[dict[str, Any], tuple[Any, ...], jax.Array]:
        x = jnp.round(3 * _uniform(key, 0, (NUM_TOKENS, INPUTS))).astype(subject.dtype)

        def weight(i: int) -> Weight:
            codes = jnp.floor(8 + 8 * _uniform(key, i, shape)).clip(0, 15)
            exponents = jnp.floor(118 + 2 * _uniform(key, i + 1, (*shape[:2], INPUTS // PACKED)))
            bias = 4 * _uniform(key, i + 2, shape[:2])
            return Weight(pack(codes), exponents.astype(jnp.uint8), bias=bias)

        gate, up = weight(1), weight(4)
        options: dict[str, Any] = dict(up=up, sizes_e=jnp.asarray(EXPERT_ROWS, jnp.int32))
        with jax.default_matmul_precision("highest"):
            exact = x.astype(jnp.float32)
            expected = REFERENCE.product(exact, gate, activation="swiglu_oai", dtype=subject.dtype, **options)
        return options, (x, gate), expected

    options, args, expected = make(_key())
    eps = float(jnp.finfo(subject.dtype).eps)
    return OpTest("product", dict(activation="swiglu_oai", **options), args, (expected,), rtol=2 * eps, atol=1e-5)


def _grouped_product(subject: Subject) -> OpTest:
    """Return a test of a gated product of 37 rows with weights of 4 bits in groups, which 16 bits hold exactly."""

    @jax.jit
    def make(key: jax.Array) -> tuple[dict[str, Any], tuple[Any, ...], jax.Array]:
        x = jnp.round(3 * _uniform(key, 0, (NUM_TOKENS, INPUTS))).astype(subject.dtype)

        def weight(i: int) -> Weight:
            groups = OUTPUTS, INPUTS // PACKED
            scales = 2 ** jnp.round(_uniform(key, i, groups)) / INPUTS
            minima = (jnp.round(3 * _uniform(key, i + 1, groups)) - MIDDLE) * scales
            numbers = jnp.floor(8 + 8 * _uniform(key, i + 2, (OUTPUTS, INPUTS)))
            return Weight(pack(numbers), scales.astype(jnp.float16), minima.astype(jnp.float16))

        gate, up = weight(1), weight(4)
        with jax.default_matmul_precision("highest"):
            expected = REFERENCE.product(x.astype(jnp.float32), gate, up=up, activation="silu", dtype=subject.dtype)
        return dict(up=up), (x, gate), expected

    options, args, expected = make(_key())
    eps = float(jnp.finfo(subject.dtype).eps)
    return OpTest("product", dict(activation="silu", **options), args, (expected,), rtol=2 * eps, atol=1e-6)


def _delta_rule(subject: Subject) -> OpTest:
    """Return a test of the gated delta rule over pages of NaN, of which one that is read holds a state."""
    num_tokens, (key_heads, heads) = sum(DELTA_LENS) + PADDING_ROWS, HEADS
    starts = [sum(DELTA_LENS[:s]) for s in range(len(DELTA_LENS) + 1)]

    @jax.jit
    def make(key: jax.Array) -> tuple[tuple[Any, ...], tuple[jax.Array, ...]]:
        chains = Chains(*(jnp.asarray(numbers, jnp.int32) for numbers in (starts, DELTA_READS, DELTA_WRITES)))
        q, k = (2 * _uniform(key, i, (num_tokens, key_heads, KEY_DIM)) / KEY_DIM**0.5 for i in range(2))
        v = _uniform(key, 2, (num_tokens, heads, VALUE_DIM))
        log_decay, beta = (0.5 + 0.5 * _uniform(key, 3 + i, (num_tokens, heads)) for i in range(2))
        states = jnp.full((len(DELTA_WRITES), heads, KEY_DIM, VALUE_DIM), jnp.nan, jnp.float32)
        states = states.at[1].set(_uniform(key, 5, states.shape[1:]))
        q, k, v = (x.astype(subject.dtype) for x in (q, k, v))
        args = q, k, v, -log_decay, beta, states, chains
        return args, REFERENCE.delta_rule(*args)

    args, expected = make(_key())
    return OpTest("delta_rule", {}, args, expected, donated=(5,), rtol=float(jnp.finfo(subject.dtype).eps), atol=1e-5)


def _tables(block_size: int) -> tuple[list[list[int]], list[int]]:
    """Return block tables of CONTEXTS with blocks in random order, and the number of tokens in each block."""
    num_blocks = [-(-n // block_size) for n in CONTEXTS]
    order = iter(random.Random(0).sample(range(sum(num_blocks) + 2), sum(num_blocks)))
    used = [0] * (sum(num_blocks) + 2)
    tables = []
    for n, blocks in zip(CONTEXTS, num_blocks):
        table = [next(order) for _ in range(blocks)]
        for i, block in enumerate(table):
            used[block] = min(block_size, n - i * block_size)
        tables.append(table + [-1] * (max(num_blocks) + 1 - blocks))
    return tables, used


def _pool_shape(subject: Subject, num_blocks: int) -> tuple[int, ...]:
    return num_blocks, subject.num_kv_heads, subject.block_size, subject.pool_head_dim


def _key() -> jax.Array:
    """Return an argument of jitted functions, so that XLA does not fold the computations that depend on it."""
    return jax.random.key(0, impl="unsafe_rbg")  # the one that compiles fastest


def _uniform(key: jax.Array, i: int, shape: tuple[int, ...]) -> jax.Array:
    """Return numbers between -1 and 1."""
    return jax.random.uniform(jax.random.fold_in(key, i), shape, jnp.float32, -1, 1)


def _scales(subject: Subject, key: jax.Array) -> dict[str, jax.Array]:
    """Return the scales of fp8 pools; {} for other pools."""
    if jnp.dtype(subject.pool_dtype) != FP8:
        return {}
    names = ("k_scale_k", "v_scale_k")
    return {name: 0.75 + 0.25 * _uniform(key, 3 + i, (subject.num_kv_heads,)) for i, name in enumerate(names)}


def main() -> None:
    """Run the tests of a request on stdin."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # the process that waits may be killed; this one then frees the device at once
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    subject, tests, device, limit_s = pickle.load(sys.stdin.buffer)
    signal.alarm(int(START_LIMIT_S) + GRACE_S)
    jax.config.update("jax_default_device", jax.devices()[device])
    make = make_trials(subject)
    trials = [make[test]() for test in tests]
    jax.block_until_ready([(trial.args, trial.expected) for trial in trials])
    print(json.dumps(""), file=answers)
    for trial in trials:
        signal.alarm(int(limit_s) + GRACE_S)
        print(json.dumps(error_of(subject, trial)), file=answers)


def error_of(subject: Subject, trial: OpTest) -> str:
    """Run one test and return its error, "" for none."""
    try:
        return trial.error(Ops(ops.load(subject.module, subject.tiles))) or ""
    except Exception as raised:
        return f"{type(raised).__name__}: {' '.join(str(raised).split())}"[:MAX_REASON]

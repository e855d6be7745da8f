"""Random streams of tokens for the ops of recurrent layers, the calls that compute them, and their correct results.

Pages that no stream has written, and tokens that no sequence owns, hold NaN: an implementation that reads one shows it.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from pallas_kernels import CONTINUES, NO_STATE, Chains

NUM_PAGES = 12


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens of a stream in one call, as a chain of sequences.

    Attributes:
        lens: the tokens of each sequence.
        reads: the page of the state before, or NO_STATE.
        writes: the page of each sequence's state, or -1.
    """

    stream: int
    lens: Sequence[int]
    reads: int
    writes: Sequence[int]

    @property
    def written(self) -> list[int]:
        """The pages that are written: sequences without tokens write none."""
        return [page for page, n in zip(self.writes, self.lens) if n and page >= 0]


@dataclasses.dataclass(frozen=True)
class Call:
    """Pieces in the order of the batch, with padding."""

    pieces: Sequence[Piece]
    num_tokens: int = 0  # of the padded batch; less than there are: no padding
    num_sequences: int = 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """An op with its arguments for all tokens of each stream.

    Attributes:
        streams: the arguments of each stream, with the tokens as their first axis.
        states: the pages before the first call.
        run: (op, arguments of a batch, states, chains) -> (output, states).
        expected: (arguments of a stream, state before, or None for zeros) -> (output, state after), in float64.
        tolerance: of results and states, in units of their largest number.
    """

    streams: Sequence[Sequence[np.ndarray]]
    states: np.ndarray
    run: Callable
    expected: Callable
    tolerance: float

    def compute(self, op, calls: Sequence[Call]) -> tuple[list[np.ndarray], np.ndarray]:
        """Run calls one after the other, and return the outputs of each stream and the pages."""
        states, outputs = self.states, [[] for _ in self.streams]
        done = [0] * len(self.streams)
        for call in calls:
            rows, lens, reads, writes = [], [], [], []
            for piece in call.pieces:
                first = done[piece.stream]
                done[piece.stream] += sum(piece.lens)
                rows.append([x[first : done[piece.stream]] for x in self.streams[piece.stream]])
                lens += piece.lens
                reads += [piece.reads, *[CONTINUES] * (len(piece.lens) - 1)]
                writes += piece.writes
            padding = max(0, call.num_sequences - len(lens))
            cu = np.cumsum([0, *lens, *[0] * padding])
            chains = Chains(*(np.asarray(x, np.int32) for x in (
                cu, reads + [NO_STATE] * padding, writes + [-1] * padding,
            )))  # fmt: skip
            out, states = self.run(op, [_padded(x, call.num_tokens) for x in zip(*rows)], states, chains)
            out, at = np.asarray(out), 0
            assert (out[cu[-1] :] == 0).all(), "tokens that no sequence owns must be 0"
            for piece, arrays in zip(call.pieces, rows):
                outputs[piece.stream].append(out[at : at + len(arrays[0])])
                at += len(arrays[0])
        return [np.concatenate(out) for out in outputs], np.asarray(states)

    def check(self, op, calls: Sequence[Call]) -> None:
        """Assert that calls have the right results: to rounding, and to the bit those of each stream alone and whole.

        The calls have all tokens of each stream, and its last sequence with tokens writes a page.
        """
        outputs, states = self.compute(op, calls)
        written = np.zeros(NUM_PAGES, bool)
        for piece in (piece for call in calls for piece in call.pieces):
            written[piece.written] = True
        np.testing.assert_array_equal(bits(states[~written]), bits(self.states[~written]), "pages of no sequence")
        for i, stream in enumerate(self.streams):
            pieces = [piece for call in calls for piece in call.pieces if piece.stream == i]
            reads, page = pieces[0].reads, pieces[-1].written[-1]
            alone = dataclasses.replace(self, streams=[stream])
            [whole], pages = alone.compute(op, [Call([Piece(0, [len(stream[0])], reads, [page])], 16)])
            np.testing.assert_array_equal(bits(outputs[i]), bits(whole), f"outputs of stream {i}")
            np.testing.assert_array_equal(bits(states[page]), bits(pages[page]), f"state of stream {i}")
            before = None if reads == NO_STATE else np.asarray(self.states[reads], np.float64)
            out, state = self.expected(*(np.asarray(x, np.float64) for x in stream), before)
            close(whole, out, self.tolerance)
            close(pages[page], state, self.tolerance)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def close(out: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Assert that results are right to within float32's sums and the rounding of their dtype."""
    roundoff = float(jnp.finfo(out.dtype).eps) / 2
    np.testing.assert_allclose(
        np.asarray(out, np.float64), expected, rtol=roundoff, atol=tolerance * np.abs(expected).max(initial=1e-3)
    )


def _padded(arrays: Sequence[np.ndarray], num_tokens: int) -> jnp.ndarray:
    x = np.concatenate(arrays)
    rows = max(0, num_tokens - len(x))
    return jnp.asarray(np.concatenate([x, np.full((rows, *x.shape[1:]), np.nan, x.dtype)]))


def delta(
    lens: Sequence[int], *, heads=(2, 4), sizes=(16, 24), dtype=jnp.float32, v_dtype=None, filled=(0, 1), seed=0
) -> Problem:  # fmt: skip
    """Streams of the gated delta rule, with K and H `heads` of D and V `sizes`; the pages `filled` hold states."""
    rng = np.random.default_rng(seed)
    (k_heads, v_heads), (d, v) = heads, sizes
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    streams = [
        (
            (unit(rng.standard_normal((t, k_heads, d))) * 0.7).astype(dtype),
            unit(rng.standard_normal((t, k_heads, d))).astype(dtype),
            rng.standard_normal((t, v_heads, v)).astype(v_dtype or dtype),
            -rng.exponential(0.3, (t, v_heads)).astype(np.float32),
            rng.uniform(0.1, 1, (t, v_heads)).astype(np.float32),
        )
        for t in lens
    ]
    run = lambda op, arrays, states, chains: op(*arrays, states, chains)
    return Problem(streams, _pages(rng, (v_heads, d, v), np.float32, filled), run, gated_delta_rule, 3e-6)


def conv(
    lens: Sequence[int], *, channels=40, width=4, dtype=jnp.float32, state_dtype=None, bias=True, activation="silu",
    filled=(0, 1), seed=0,
) -> Problem:  # fmt: skip
    """Streams of a causal convolution; the pages `filled` hold states."""
    rng = np.random.default_rng(seed)
    weight = jnp.asarray(rng.standard_normal((channels, width)), dtype)
    bias_c = jnp.asarray(rng.standard_normal(channels), dtype) if bias else None
    streams = [(rng.standard_normal((t, channels)).astype(dtype),) for t in lens]
    run = lambda op, arrays, states, chains: op(*arrays, weight, bias_c, states, chains, activation=activation)

    def expected(x_tc, before):
        return convolution(x_tc, weight, bias_c, before, activation)

    # Inputs in the pages are numbers of the inputs' dtype.
    states = _pages(rng, (width - 1, channels), dtype, filled).astype(state_dtype or dtype)
    return Problem(streams, states, run, expected, 1e-6)


def _pages(rng, shape: tuple[int, ...], dtype, filled: Sequence[int]) -> np.ndarray:
    states = np.full((NUM_PAGES, *shape), np.nan)
    states[list(filled)] = rng.standard_normal((len(filled), *shape))
    return states.astype(dtype)


def gated_delta_rule(q_tkd, k_tkd, v_thv, log_decay_th, beta_th, before) -> tuple[np.ndarray, np.ndarray]:
    """Compute the recurrence in the arrays' own precision."""
    heads = v_thv.shape[1]
    q_thd, k_thd = (np.repeat(x, heads // x.shape[1], axis=1) for x in (q_tkd, k_tkd))
    state = np.zeros((heads, q_thd.shape[2], v_thv.shape[2])) if before is None else before.copy()
    out = np.zeros_like(v_thv)
    for t in range(len(v_thv)):
        for h in range(heads):
            state[h] *= np.exp(log_decay_th[t, h])
            change = (v_thv[t, h] - k_thd[t, h] @ state[h]) * beta_th[t, h]
            state[h] += np.outer(k_thd[t, h], change)
            out[t, h] = q_thd[t, h] @ state[h]
    return out, state


def convolution(x_tc, weight_cw, bias_c, before, activation) -> tuple[np.ndarray, np.ndarray]:
    """Compute the convolution in float64."""
    weight = np.asarray(weight_cw, np.float64)
    width = weight.shape[1]
    before = np.zeros((width - 1, x_tc.shape[1])) if before is None else before
    x = np.concatenate([before, x_tc])
    y = np.zeros_like(x_tc) + (0 if bias_c is None else np.asarray(bias_c, np.float64))
    for tap in range(width):
        y += weight[:, tap] * x[tap : tap + len(x_tc)]
    return y if activation is None else y / (1 + np.exp(-y)), x[len(x_tc) :]


# Calls for streams of these lengths. Pages 0 and 1 hold states before the first call.
LENS = (13, 7, 9, 1)
CALLS = {
    "alone and whole": [Call([Piece(i, [n], NO_STATE, [2 + i])]) for i, n in enumerate(LENS)],
    "together": [Call([Piece(i, [n], NO_STATE, [2 + i]) for i, n in enumerate(LENS)], 32, 9)],
    "in another order, with padding": [
        Call([Piece(i, [n], NO_STATE, [9 - i]) for i, n in reversed([*enumerate(LENS)])], 48, 9)
    ],
    # Pieces of one and two tokens: shorter than the state of a convolution.
    "cut into calls": [
        Call([Piece(0, [2], NO_STATE, [2]), Piece(1, [1], NO_STATE, [3])], 4, 4),
        Call([Piece(1, [1], 3, [3]), Piece(2, [5], NO_STATE, [4]), Piece(0, [1], 2, [2])], 32, 9),
        Call([Piece(0, [9], 2, [5]), Piece(3, [1], NO_STATE, [6]), Piece(2, [1], 4, [4]), Piece(1, [4], 3, [3])],
             32, 9),
        Call([Piece(2, [3], 4, [4]), Piece(0, [1], 5, [2]), Piece(1, [1], 3, [8])], 32, 9),
    ],
    "chains": [
        Call([Piece(0, [1, 1, 1, 2, 1], NO_STATE, [2, 2, -1, 5, 6]), Piece(1, [2, 1], NO_STATE, [3, 4])], 32, 9),
        Call([Piece(2, [9], NO_STATE, [8]), Piece(1, [1, 1, 1, 1], 4, [4, -1, 10, 4]), Piece(3, [1], NO_STATE, [9]),
              Piece(0, [3, 4], 6, [-1, 2])], 32, 9),
    ],
    "from pages that two chains read": [
        Call([Piece(0, [13], 0, [2]), Piece(1, [3, 4], 0, [3, 4]), Piece(2, [9], 1, [1]), Piece(3, [1], NO_STATE, [5])],
             32, 9),
    ],
    # Fresh streams next to a page with old data; the page that a fresh sequence writes holds old data, too.
    "over old data": [Call([Piece(i, [n], NO_STATE, [i]) for i, n in enumerate(LENS)], 32, 9)],
    "with empty sequences": [
        Call([Piece(0, [13, 0], NO_STATE, [2, 7]), Piece(1, [0], 0, [9]), Piece(1, [7], 0, [3]),
              Piece(2, [9, 0], 1, [4, 5])], 32, 9),
        Call([Piece(3, [1], NO_STATE, [6])], 32, 9),
    ],
}  # fmt: skip

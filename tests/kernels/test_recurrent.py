"""The ops of recurrent layers: right results, and the same bits for any cut of a sequence into calls and chains."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import CONTINUES, NO_STATE, Chains, Ops, load, recurrent, select
from tests.kernels import chains as cases
from tests.kernels.chains import CALLS, LENS, Call, Piece, conv, delta
from tests.kernels.triton_interpreter import interpreting


class Compiled:
    """The ops of a module, compiled once for each shape; those of Triton for Pallas's interpreter."""

    def __init__(self, module: str):
        self.name, ops = module, Ops(load(f"pallas_kernels.{module}"))
        self._delta_rule = jax.jit(lambda *args: ops.delta_rule(*args))
        self.causal_conv = jax.jit(lambda *args, **options: ops.causal_conv(*args, **options),
                                   static_argnames="activation")  # fmt: skip

    def delta_rule(self, *args):
        with interpreting():
            return self._delta_rule(*args)


REFERENCE, CPU, TRITON = map(Compiled, ("reference", "cpu", "triton"))
name_of = lambda kernels: kernels.name
BFLOAT16 = jnp.bfloat16
CALLS_IN_DTYPES = pytest.mark.parametrize(
    "calls, dtype",
    [
        *(pytest.param(calls, jnp.float32, id=f"{name}-float32") for name, calls in CALLS.items()),
        *(
            pytest.param(calls, BFLOAT16, id=f"{name}-bfloat16", marks=[] if name == "chains" else [pytest.mark.deep])
            for name, calls in CALLS.items()
        ),
    ],
)


# The interpreter of Triton's kernel takes seconds for each shape.
@pytest.mark.parametrize(
    "kernels", [REFERENCE, CPU, pytest.param(TRITON, marks=pytest.mark.deep)], ids=["reference", "cpu", "triton"]
)
class TestDeltaRule:
    @CALLS_IN_DTYPES
    def test_calls(self, kernels, calls, dtype):
        delta(LENS, dtype=dtype).check(kernels.delta_rule, calls)

    @pytest.mark.parametrize(
        "case",
        [
            dict(heads=(1, 1), sizes=(1, 1)),
            dict(heads=(2, 6), sizes=(13, 37), dtype=jnp.float16),
            dict(heads=(3, 3), sizes=(128, 128), dtype=jnp.float32, v_dtype=BFLOAT16),
            dict(heads=(1, 4), sizes=(64, 32), dtype=BFLOAT16, v_dtype=jnp.float32),
        ],
        ids=str,
    )
    def test_shapes_and_dtypes(self, kernels, case):
        delta(LENS, **case).check(kernels.delta_rule, CALLS["chains"])

    def test_no_tokens(self, kernels):
        problem = delta([0])
        chains = Chains(jnp.zeros(2, jnp.int32), jnp.array([0]), jnp.array([3]))
        out, states = kernels.delta_rule(*problem.streams[0], problem.states, chains)
        assert out.shape == (0, 4, 24)
        np.testing.assert_array_equal(states, problem.states)

    def test_a_long_sequence(self, kernels):
        problem = delta([300], heads=(1, 2), sizes=(128, 32))
        cuts = [1, 63, 64, 65, 107]
        problem.check(kernels.delta_rule, [Call([Piece(0, [n], 2 if i else 1, [2])], 128) for i, n in enumerate(cuts)])


class TestTriton:
    """A part of these in the usual tier."""

    @pytest.mark.parametrize("calls", ["chains", "with empty sequences"])
    def test_calls(self, calls):
        delta(LENS, heads=(1, 2), sizes=(12, 20), dtype=BFLOAT16).check(TRITON.delta_rule, CALLS[calls])

    def test_keys_that_no_register_holds_are_refused(self):
        problem = delta([2], heads=(1, 1), sizes=(257, 4))
        with pytest.raises(NotImplementedError, match="keys of 257 numbers, supported are up to 256"):
            problem.compute(TRITON.delta_rule, [Call([Piece(0, [2], NO_STATE, [2])])])


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=name_of)  # GPUs take the reference's
class TestCausalConv:
    @CALLS_IN_DTYPES
    def test_calls(self, kernels, calls, dtype):
        conv(LENS, dtype=dtype).check(kernels.causal_conv, calls)

    @pytest.mark.parametrize(
        "case",
        [
            dict(width=2, bias=False, activation=None),
            dict(width=5, channels=1300, activation="relu"),
            dict(dtype=jnp.float16, channels=48, activation="gelu_pytorch_tanh"),
            dict(dtype=BFLOAT16, state_dtype=jnp.float32),
        ],
        ids=str,
    )
    def test_shapes_dtypes_and_activations(self, kernels, case, monkeypatch):
        expected = {"gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True), "relu": jax.nn.relu}
        name = case.get("activation", "silu")
        if name in expected:
            plain = cases.convolution
            activate = lambda *args: (lambda y, state: (np.asarray(expected[name](y), np.float64), state))(
                *plain(*args[:-1], None)
            )
            monkeypatch.setattr(cases, "convolution", activate)
        conv(LENS, **case).check(kernels.causal_conv, CALLS["chains"])


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=name_of)
def test_a_convolution_of_no_tokens(kernels):
    problem = conv([0])
    chains = Chains(jnp.zeros(2, jnp.int32), jnp.array([0]), jnp.array([3]))
    out, states = problem.run(kernels.causal_conv, problem.streams[0], problem.states, chains)
    assert out.shape == (0, 40)
    np.testing.assert_array_equal(states, problem.states)


@pytest.mark.parametrize("module", ["pallas_kernels.reference", "pallas_kernels.cpu"])
@pytest.mark.parametrize("name, problem, states_at", [("delta_rule", delta([4]), 5), ("causal_conv", conv([4]), 3)])
def test_donated_pages_are_written_in_place(module, name, problem, states_at):
    def op(*args, **options):
        nonlocal kept
        run = functools.partial(getattr(Ops(load(module)), name), **options)
        out, states = jax.jit(run, donate_argnums=states_at)(*args)
        kept = args[states_at].is_deleted() and states.unsafe_buffer_pointer() == address
        return out, states

    kept = False
    states = jnp.asarray(problem.states)
    address = states.unsafe_buffer_pointer()
    chains = Chains(jnp.array([0, 4]), jnp.array([NO_STATE]), jnp.array([3]))
    problem.run(op, [jnp.asarray(x) for x in problem.streams[0]], states, chains)
    assert kept


class TestPlantedFaults:
    """Each fault is found by the same checks that the implementations pass."""

    @staticmethod
    def fails(problem, op, name):
        with pytest.raises(AssertionError):
            problem.check(op, CALLS[name])

    @staticmethod
    def reference(name):
        """Return an op of the reference, which is traced again."""
        return jax.jit(lambda *args, **options: getattr(pallas_kernels, name)(*args, **options),
                       static_argnames="activation")  # fmt: skip

    @pytest.mark.deep
    def test_pages_of_the_step_before(self):
        for name, problem in (("delta_rule", delta(LENS)), ("causal_conv", conv(LENS))):
            op, at = self.reference(name), 5 if name == "delta_rule" else 3
            held = {}

            def late(*args, op=op, at=at, held=held, **options):
                out, states = op(*args[:at], held.get("before", args[at]), *args[at + 1 :], **options)
                held["before"] = args[at]
                return out, states

            problem.check(op, CALLS["cut into calls"])
            self.fails(problem, late, "cut into calls")

    @pytest.mark.deep
    def test_decay_after_the_update(self):
        def updated(state, q, k, v, log_decay, beta):
            state, _ = plain(state, q, k, v, jnp.zeros_like(log_decay), beta)
            state *= jnp.exp(log_decay)[:, None, None]
            return state, recurrent._sum_d(q.astype(jnp.float32)[..., None] * state)

        plain = recurrent._updated
        with mock.patch.object(recurrent, "_updated", updated):
            self.fails(delta(LENS), self.reference("delta_rule"), "alone and whole")

    def test_old_state_of_a_fresh_sequence(self):
        old = lambda states, page: states[jnp.maximum(page, 0)]
        with mock.patch.object(recurrent, "_stored", old):
            self.fails(delta(LENS), self.reference("delta_rule"), "over old data")
        places = recurrent._places
        with mock.patch.object(recurrent, "_places", lambda chains: places(chains)._replace(
            page=jnp.maximum(places(chains).page, 0)
        )):  # fmt: skip
            self.fails(conv(LENS), self.reference("causal_conv"), "over old data")

    @pytest.mark.parametrize("call", [pytest.param("cut into calls", marks=pytest.mark.deep), "chains"])
    def test_chains_that_ignore_the_sequence_before(self, call):
        for name, problem in (("delta_rule", delta(LENS)), ("causal_conv", conv(LENS))):
            op = self.reference(name)

            def alone(*args, op=op, **options):
                *arrays, chains = args
                return op(*arrays, chains._replace(reads_s=jnp.maximum(chains.reads_s, NO_STATE)), **options)

            if call == "chains":
                self.fails(problem, alone, call)
            else:
                problem.check(alone, CALLS[call])  # there are no chains of several sequences

    def test_state_of_a_short_chunk_off_by_one(self):
        """After fewer tokens than the state has rows, its first rows are the last ones of the state before."""

        def inputs(x_tc, states, at, tokens):
            short = (tokens < at.first) & (tokens.shape == at.first.shape)
            return plain(x_tc, states, at, jnp.where(short, tokens - 1, tokens))

        plain = recurrent._inputs
        with mock.patch.object(recurrent, "_inputs", inputs):
            self.fails(conv(LENS), self.reference("causal_conv"), "cut into calls")

    @pytest.mark.deep
    def test_a_page_read_after_its_chain_has_written_it(self):
        """A convolution whose tokens read the inputs before their chain from the page as it is then."""

        def one_by_one(x_tc, weight_cw, bias_c, states, chains, activation):
            cu, reads, writes = (np.asarray(x) for x in chains)
            out, page, first = jnp.zeros_like(x_tc), NO_STATE, 0
            for s in range(len(reads)):
                page = reads[s] if reads[s] != CONTINUES else page
                first = cu[s] if reads[s] != CONTINUES else first
                # All tokens of the chain so far, from the page that the sequences before may have written.
                part = Chains(*(jnp.array(x, jnp.int32) for x in ([0, cu[s + 1] - first], [page], [writes[s]])))
                y, states = op(x_tc[first : cu[s + 1]], weight_cw, bias_c, states, part, activation=activation)
                out = out.at[cu[s] : cu[s + 1]].set(y[cu[s] - first :])
            return out, states

        op = self.reference("causal_conv")
        in_place = [Call([Piece(0, [1, 2], 0, [0, 2])])]
        elsewhere = [Call([Piece(0, [1, 2], 0, [3, 2])])]
        problem = conv([3])
        problem.check(one_by_one, elsewhere)
        problem.check(op, in_place)
        with pytest.raises(AssertionError):
            problem.check(one_by_one, in_place)


class TestRefusals:
    @staticmethod
    def delta_rule(ops=pallas_kernels, **changed):
        names = "q_tkd", "k_tkd", "v_thv", "log_decay_th", "beta_th"
        problem = delta([3])
        chains = Chains(jnp.array([0, 3]), jnp.array([NO_STATE]), jnp.array([2]))
        arguments = dict(zip(names, map(jnp.asarray, problem.streams[0]))) | dict(states=problem.states, chains=chains)
        ops.delta_rule(**arguments | changed)

    @staticmethod
    def causal_conv(ops=pallas_kernels, **changed):
        chains = Chains(jnp.array([0, 3]), jnp.array([NO_STATE]), jnp.array([2]))
        arguments = dict(
            x_tc=jnp.ones((3, 40)), weight_cw=jnp.ones((40, 4)), bias_c=None, states=jnp.ones((5, 3, 40)), chains=chains
        )
        ops.causal_conv(**arguments | changed)

    @pytest.mark.parametrize(
        "changed, message",
        [
            (dict(states=jnp.zeros((4, 4, 16))), r"states has shape \[4, 4, 16\], expected \[P, H, D, V\]"),
            (dict(states=jnp.zeros((4, 4, 16, 24), BFLOAT16)), r"states is bfloat16\[4, 4, 16, 24\], expected float32"),
            (dict(states=jnp.zeros((4, 3, 16, 24))), r"q_tkd has 2 heads, expected a divisor of the states' 3 heads"),
            (dict(states=jnp.zeros((4, 4, 8, 24))), r"q_tkd is float32\[3, 2, 16\], expected float32\[3, 2, 8\]"),
            (dict(q_tkd=jnp.zeros((3, 2, 16), jnp.int32)), "q_tkd is int32, expected float32, bfloat16 or float16"),
            (dict(k_tkd=jnp.zeros((3, 2, 16), BFLOAT16)), r"k_tkd is bfloat16\[3, 2, 16\], expected float32"),
            (dict(v_thv=jnp.zeros((2, 4, 24))), r"v_thv is float32\[2, 4, 24\], expected float32\[3, 4, 24\]"),
            (dict(log_decay_th=jnp.zeros((3, 2))), r"log_decay_th is float32\[3, 2\], expected float32\[3, 4\]"),
            (dict(beta_th=jnp.zeros((3, 4), BFLOAT16)), r"beta_th is bfloat16\[3, 4\], expected float32"),
        ],
    )
    def test_delta_rule(self, changed, message):
        with pytest.raises(ValueError, match=message):
            self.delta_rule(**changed)

    @pytest.mark.parametrize(
        "changed, message",
        [
            (dict(x_tc=jnp.zeros((3, 2, 40))), r"x_tc has shape \[3, 2, 40\], expected \[T, C\]"),
            (
                dict(weight_cw=jnp.zeros((40, 1))),
                r"weight_cw has shape \[40, 1\], expected \[40, W\] with W at least 2",
            ),
            (dict(bias_c=jnp.zeros(39)), r"bias_c is float32\[39\], expected float32\[40\]"),
            (dict(states=jnp.zeros((5, 2, 40))), r"states is float32\[5, 2, 40\], expected float32\[5, 3, 40\]"),
            (dict(states=jnp.zeros((5, 3, 40), BFLOAT16)), r"states is bfloat16\[5, 3, 40\], expected float32"),
            (dict(activation="tanh"), r"activation is 'tanh', expected one of \['silu'"),
        ],
    )
    def test_causal_conv(self, changed, message):
        with pytest.raises(ValueError, match=message):
            self.causal_conv(**changed)

    @pytest.mark.parametrize(
        "chains, message",
        [
            (([0, 3], [[-1]], [2]), r"chains: reads_s has shape \[1, 1\], expected \[S\] with S at least 1"),
            (([0, 3], [-1], [2, 3]), r"chains: writes_s is int32\[2\], expected int32\[1\]"),
            (([0, 1, 3], [-1], [2]), r"chains: cu_q_lens_s1 is int32\[3\], expected int32\[2\]"),
        ],
    )
    @pytest.mark.parametrize("op", ["delta_rule", "causal_conv"])
    def test_shapes_of_chains(self, op, chains, message):
        with pytest.raises(ValueError, match=message):
            getattr(self, op)(chains=Chains(*(jnp.array(x, jnp.int32) for x in chains)))

    @pytest.mark.parametrize(
        "chains, message",
        [
            (([0, 4], [-1], [2]), r"cu_q_lens_s1\[1\] is 4, allowed are 0 to 3: 3 tokens"),
            (([0, 2, 1], [-1, -1], [2, 3]), "cu_q_lens_s1 must start at 0 and never fall"),
            (([0, 3], [99], [2]), r"reads_s\[0\] is 99, allowed are -2 to"),
            (([0, 3], [-1], [99]), r"writes_s\[0\] is 99, allowed are -1 to"),
            (([0, 0, 3], [-1, -2], [-1, 3]), "reads_s: sequence 1 continues a sequence without tokens"),
            (([0, 3], [-2], [3]), "reads_s: sequence 0 continues a sequence without tokens"),
            (([0, 2, 3], [1, 2], [2, 3]), r"writes_s\[0\] is page 2, which another chain reads or writes"),
            (([0, 2, 3], [1, 2], [4, 4]), r"writes_s\[0\] is page 4, which another chain reads or writes"),
        ],
    )
    @pytest.mark.parametrize("op", ["delta_rule", "causal_conv"])
    def test_values_of_chains_in_debug(self, op, chains, message):
        chains = Chains(*(jnp.array(x, jnp.int32) for x in chains))
        debug = Ops(load("pallas_kernels.reference"), debug=True)
        with pytest.raises(ValueError, match=message):
            getattr(self, op)(debug, chains=chains)

    @pytest.mark.parametrize("op", ["delta_rule", "causal_conv"])
    def test_right_chains_pass_in_debug(self, op):
        chains = Chains(*(jnp.array(x, jnp.int32) for x in ([0, 1, 2, 3, 3], [0, -2, 0, -1], [2, 2, 3, -1])))
        getattr(self, op)(Ops(load("pallas_kernels.reference"), debug=True), chains=chains)

    def test_derivatives(self):
        with pytest.raises(NotImplementedError, match="causal_conv has no derivative"):
            jax.grad(lambda x: pallas_kernels.causal_conv(
                x, jnp.ones((40, 4)), None, jnp.ones((5, 3, 40)), Chains(*jnp.array([[0, 3], [-1, -1], [2, -1]]))
            )[0].sum())(jnp.ones((3, 40)))  # fmt: skip


def test_wrong_values_read_and_write_nothing_outside_the_arrays():
    """As the other CPU kernels: a page outside the pool is its nearest page to read, and is not written."""
    problem = delta([3])
    wrong = Chains(*(jnp.array(x, jnp.int32) for x in ([0, 2, 99, 5], [1, 99, -2], [77, 2, 99])))
    right = Chains(*(jnp.array(x, jnp.int32) for x in ([0, 2, 3, 3], [1, cases.NUM_PAGES - 1, -1], [-1, 2, -1])))
    states = jnp.asarray(problem.states)
    for found, expected in zip(*(CPU.delta_rule(*problem.streams[0], states, chains) for chains in (wrong, right))):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "platform, name, chosen",
    [("cpu", "auto", "cpu"), ("cpu", "reference", "reference"), ("tpu", "auto", "reference")],
)
def test_selection_names_the_implementations(platform, name, chosen):
    model = dict(dtype="bfloat16", head_dim=64, num_heads=4, num_kv_heads=2, block_size=16)
    kernels = select(name, platform=platform, device_kind=platform, compute_capability=None, **model)
    account = {choice.op: choice.implementation for choice in kernels.account}
    assert account["delta_rule"] == account["causal_conv"] == chosen
    is_reference = kernels.implementation.delta_rule is recurrent.delta_rule
    assert is_reference == (chosen == "reference")

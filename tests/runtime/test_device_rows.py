"""The rows of sequences on the device: changes by plans, donation, and recovery."""

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import SamplingParams
from jpaged.core.plan import Admitted, StepPlan
from jpaged.models.config import ModelConfig
from jpaged.runtime.device_rows import DeviceRows, empty_state
from jpaged.runtime.row_table import RowTable
from tests.runtime.caches import placement_of

V, R = 37, 3
LLAMA = ModelConfig(
    vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
STATEFUL = SamplingParams(logit_bias={7: 2.0, 8: 1.0}, allowed_token_ids=[7, 8, 9])


def make(num_rows: int = R, copy_sizes: tuple[int, ...] = (2, 4)) -> DeviceRows:
    return DeviceRows(RowTable(num_rows, 4, 8), V, copy_sizes, placement_of(LLAMA))


def admitted(row: int, params: SamplingParams = STATEFUL, **fields) -> Admitted:
    """Return a sequence of two tokens of prompt and four of output."""
    return Admitted(row, (5, 6, 7, 7, 9, 8), 2, params, 0, ((),), **fields)


def arrays(rows: DeviceRows) -> list[np.ndarray]:
    """Return copies, for a view could not be donated."""
    return [np.array(array) for array in rows.state]


def test_an_admitted_sequence_is_written_into_its_row():
    """The last token of the output is not counted yet: the step that takes it in does that."""
    rows = make()
    before = rows.state
    rows.apply(StepPlan(admitted=(admitted(1, banned=(8,)),)))
    assert all(array.is_deleted() for array in before), "donated"
    counts, in_prompt, bias, listed = arrays(rows)
    assert {token: int(counts[1, token]) for token in counts[1].nonzero()[0]} == {7: 2, 9: 1}
    assert in_prompt[1].nonzero()[0].tolist() == [5, 6]
    assert {token: float(bias[1, token]) for token in (bias[1] > -np.inf).nonzero()[0]} == {7: 2.0, 9: 0.0}
    assert (listed[1] == -1).all()
    assert not any(array[[0, 2]].any() for array in arrays(rows)), "the other rows are as they were"
    rows.apply(StepPlan(admitted=(admitted(2, SamplingParams(logprob_token_ids=[8, 6])),)))
    assert arrays(rows)[3][2].tolist()[:3] == [8, 6, -1]


def test_a_sequence_without_state_is_written_on_the_host_alone():
    rows = make()
    rows.apply(StepPlan(admitted=(admitted(1, SamplingParams()), admitted(2))))
    assert not any(array[1].any() for array in arrays(rows)) and arrays(rows)[2][2].any()
    assert rows.table.tokens[1][:6].tolist() == [5, 6, 7, 7, 9, 8]
    before = rows.state
    rows.apply(StepPlan(row_copies=((1, 0),)))
    assert rows.state is before, "a row without state is not copied on the device"


def test_rows_are_copied_before_others_take_their_place():
    rows = make()
    rows.apply(StepPlan(admitted=(admitted(1),)))
    copied, before = arrays(rows), rows.state
    bias = SamplingParams(logit_bias={3: 4.0})
    rows.apply(StepPlan(row_copies=((1, 0),), released_rows=(1,), admitted=(admitted(1, bias),)))
    assert all(array.is_deleted() for array in before), "donated"
    for array, old in zip(arrays(rows), copied):
        np.testing.assert_array_equal(array[0], old[1])
    assert arrays(rows)[2][1, 3] == 4.0


def test_the_warm_up_changes_nothing():
    rows = make()
    rows.apply(StepPlan(admitted=tuple(admitted(row) for row in range(R))))
    before = arrays(rows)
    rows.warm_up()
    for array, old in zip(arrays(rows), before):
        np.testing.assert_array_equal(array, old)


def test_the_warm_up_compiles_every_change():
    """The shapes are of this test alone, for jax shares the executables of equal shapes."""
    rows = make(5, (2, 4))
    rows.warm_up()
    sizes = rows._copy._cache_size(), rows._write._cache_size()
    rows.apply(StepPlan(admitted=tuple(admitted(row) for row in range(3))))
    rows.apply(StepPlan(row_copies=((0, 1),)))
    rows.apply(StepPlan(row_copies=((0, 1), (1, 2), (2, 0))))
    assert (rows._copy._cache_size(), rows._write._cache_size()) == sizes


def test_rows_begin_empty_on_their_device():
    rows = make()
    for array, expected in zip(rows.state, empty_state(R, V)):
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == expected.dtype
    assert rows.last_tokens.tolist() == [0] * R and rows.last_tokens.dtype == jnp.int32
    assert all(x.devices() == {jax.devices()[0]} and x.committed for x in (*rows.state, rows.last_tokens))


def test_recovery_makes_only_the_arrays_that_are_lost():
    rows = make()
    rows.apply(StepPlan(admitted=(admitted(1),)))
    state, last_tokens = rows.state, rows.last_tokens
    rows.recover()
    assert rows.state is state and rows.last_tokens is last_tokens
    state.bias.delete()
    rows.recover()
    assert rows.last_tokens is last_tokens and not any(array.any() for array in arrays(rows))
    state = rows.state
    last_tokens.delete()
    rows.recover()
    assert rows.state is state and rows.last_tokens.tolist() == [0] * R

"""What every implementation must do, against a plain float64 loop; and proofs that the comparison can fail."""

import numpy as np
import pytest

from tests.kernels import cases
from tests.kernels.implementations import MOSAIC, REFERENCE


@pytest.fixture(params=[REFERENCE, MOSAIC], ids=["reference", "mosaic"])
def kernels(request):
    return request.param


@pytest.mark.parametrize("case", cases.DECODE.values(), ids=cases.DECODE.keys())
def test_decode(kernels, case):
    batch = cases.make_batch(**case)
    batch.check(batch.run(kernels.paged_decode_attention))


@pytest.mark.parametrize("case", cases.RAGGED.values(), ids=cases.RAGGED.keys())
def test_ragged(kernels, case):
    batch = cases.make_batch(**case)
    batch.check(batch.run(kernels.ragged_paged_attention))


@pytest.mark.parametrize("case", cases.WRITE.values(), ids=cases.WRITE.keys())
def test_write(kernels, case):
    batch = cases.make_write(**case)
    batch.check(*kernels.write_kv(*batch.args))


def attention(kernels, q_lens):
    return kernels.paged_decode_attention if q_lens is None else kernels.ragged_paged_attention


@pytest.mark.parametrize("q_lens", [None, [9]], ids=["decode", "ragged"])
def test_a_context_one_too_short_is_noticed(kernels, q_lens):
    batch = cases.make_batch([12], q_lens=q_lens, num_kv_heads=1)
    short = cases.replace(batch, context_lens=batch.context_lens - 1)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        batch.check(short.run(attention(kernels, q_lens)))


@pytest.mark.parametrize("q_lens", [None, [9]], ids=["decode", "ragged"])
def test_a_slot_too_many_is_nan(kernels, q_lens):
    batch = cases.make_batch([12], q_lens=q_lens, num_kv_heads=1)
    long = cases.replace(batch, context_lens=batch.context_lens + 1)
    assert np.isnan(long.run(attention(kernels, q_lens))[-1]).all()

"""Parts of an engine."""

import dataclasses
import types

import pytest

from jpaged.start.assemble import eos_token_ids
from tests.start.test_resolve import MODEL


@pytest.mark.parametrize("own, expected", [(None, (2, 3)), (3, (2, 3)), (5, (2, 3, 5)), (128, (2, 3))])
def test_texts_end_with_the_tokenizers_own_token_too(own, expected):
    model = dataclasses.replace(MODEL, eos_token_ids=(2, 3))
    assert eos_token_ids(model, types.SimpleNamespace(eos_token_id=own)) == expected
    assert eos_token_ids(model, None) == (2, 3)

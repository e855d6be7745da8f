"""The sampling settings of one sample as a row of 32-bit words: packed on the host, unpacked in the step.

`Sampling` declares each setting once. The layout of the row, the values of padding and the settings that a step is
compiled for follow from it. Imports only numpy.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np

from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.runtime.sampling_settings import Settings

Array = Any  # traced jax arrays inside the step, numpy in tests
Value = float | tuple[int, ...]  # of a column of one row

# A lower temperature counts as 0, because dividing by it would overflow.
MIN_TEMPERATURE = 1e-5


class Column(NamedTuple):
    """Column of a sampling row.

    Attributes:
        dtype: dtype in the step. The row holds a bool as an int32.
        neutral: value without effect. It is also the value of padding.
        settings: the settings that an executable must be compiled for to apply other values.
        source: returns the value for a request's parameters; None: the host computes it.
        shape: shape of one sample's value.
    """

    dtype: type[np.generic | bool]
    neutral: float
    settings: Settings = Settings.GREEDY
    source: Callable[..., float] | None = None
    shape: tuple[int, ...] = ()


def _top_k(params: SamplingParams) -> int:
    """Return `top_k`, 0 for all tokens."""
    return params.top_k if 0 < params.top_k < 2**31 else 0


class Sampling(NamedTuple):
    """Sampling settings of S samples. A setting that no sample uses costs no pass over the logits."""

    temperature: Annotated[Array, Column(np.float32, 0, Settings.DRAWN, lambda params: params.temperature)]  # 0: greedy
    top_k: Annotated[Array, Column(np.int32, 0, Settings.FILTERED, _top_k)]  # 0: all
    top_p: Annotated[Array, Column(np.float32, 1, Settings.FILTERED, lambda params: params.top_p)]  # 1: all
    min_p: Annotated[Array, Column(np.float32, 0, Settings.FILTERED, lambda params: params.min_p)]  # 0: all
    seeds: Annotated[Array, Column(np.uint32, 0, shape=(2,))]  # [S, 2], the high and the low half
    presence: Annotated[Array, Column(np.float32, 0, Settings.ANY, lambda params: params.presence_penalty)]
    frequency: Annotated[Array, Column(np.float32, 0, Settings.ANY, lambda params: params.frequency_penalty)]
    repetition: Annotated[Array, Column(np.float32, 1, Settings.ANY, lambda params: params.repetition_penalty)]
    stateful: Annotated[Array, Column(bool, 0, Settings.ANY, lambda params: params.has_state)]  # bias, penalties, lists
    # Process log-probabilities, as beam search does, and list the processed ones.
    beam: Annotated[Array, Column(bool, 0, Settings.ANY, lambda params: isinstance(params, BeamSearchParams))]
    num_top: Annotated[Array, Column(np.int32, 0, Settings.ANY)]  # length of the list of tokens; 0: no rank either
    masked: Annotated[Array, Column(bool, 0, Settings.ANY)]  # whether `allowed_bits` apply
    num_prompt_tokens: Annotated[Array, Column(np.int32, 0)]
    rows: Annotated[Array, Column(np.int32, -1)]  # the sequence's row of the state; -1: padding
    positions: Annotated[Array, Column(np.int32, 0)]  # of the sample in its sequence
    last_tokens: Annotated[Array, Column(np.int32, 0)]  # the token before the sample, as in `Batch.tokens`
    num_drafts: Annotated[Array, Column(np.int32, 0)]  # drafts directly before the sample, the last one included
    allowed_bits: Array  # [S, ceil(V / 32)] uint32, bit t % 32 of word t // 32: token t is allowed
    drafts: Array  # [S, MAX_DRAFTS] int32, the drafts before the sample, -1 past them

    @property
    def filtered(self) -> Array:
        """Whether unlikely tokens are removed before a token is drawn, [S] bool."""
        removes = (getattr(self, name) != column.neutral for name, column in FILTERS.items())
        return reduce(or_, removes) & (self.temperature > 0)


COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Sampling, include_extras=True).items()
    if name in Sampling._fields and hasattr(hint, "__metadata__")
}
FILTERS = {name: column for name, column in COLUMNS.items() if column.settings is Settings.FILTERED}

ROW = np.dtype(
    [(name, np.int32 if column.dtype is bool else column.dtype, column.shape) for name, column in COLUMNS.items()]
)
ROW_WORDS = ROW.itemsize // 4  # F: a row of `ROW` is [F] int32 in the same memory
NEUTRAL = np.array(tuple(column.neutral for column in COLUMNS.values()), ROW)  # as padding has


def pack(
    params: SamplingParams | BeamSearchParams, computed: Mapping[str, Value]
) -> tuple[tuple[Value, ...], Settings]:
    """Return a sequence's values for a row of `ROW`, and the settings that an executable must be compiled for.

    Beams and greedy sequences draw no tokens, so their temperature and filters are neutral.

    Args:
        computed: the values of columns without a source; others are neutral.
    """
    draws = isinstance(params, SamplingParams) and params.temperature >= MIN_TEMPERATURE
    values: list[Value] = []
    settings = Settings.GREEDY
    for name, column in COLUMNS.items():
        value = computed.get(name, column.neutral)
        if column.source is not None and (draws or column.settings is Settings.ANY):
            value = column.source(params)
        if value != column.neutral:
            settings = max(settings, column.settings)
        values.append(value)
    return tuple(values), settings

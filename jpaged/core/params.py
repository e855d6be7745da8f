"""Parameters of a request, checked field by field, with the names of vLLM and of the OpenAI API."""

import copy
import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass, field, fields
from functools import cached_property, partial, wraps
from typing import Any, Literal, Self

from jpaged.config import MAX_DRAFTS
from jpaged.core.pooling import MEAN, POOLINGS

# Every step applies stop strings, stop tokens and bad words to every sequence. These limits bound the cost of a step.
MAX_STOPS = 64
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 1024
MAX_WORD_LENGTH = 256  # characters of a stop string or a bad word
MAX_LOGIT_BIASES = 4096
MAX_BEAM_WIDTH = 64
# Most likely tokens that a step can return for one sequence. A beam needs `beam_width` tokens, and all that may end it.
MAX_TOP = 2 * MAX_BEAM_WIDTH


class InvalidParameter(ValueError):
    """Invalid parameter of a request. The message names the value and the limit.

    Attributes:
        code: error code for programs, if this kind of error has one.
    """

    code: str | None = None

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class ContextLengthExceeded(InvalidParameter):
    """Request for more tokens than the model or the KV pool has room for."""

    code = "context_length_exceeded"


Predicate = Callable[[Any], bool]


def _rule[T](default: T, allowed: str, holds: Predicate) -> T:
    """Return a field whose values must satisfy a predicate, which `allowed` describes."""
    return field(default=default, metadata={"allowed": allowed, "holds": holds})


def _number(low: float, high: float = math.inf) -> Predicate:
    largest = sys.float_info.max
    low, high = max(low, -largest), min(high, largest)  # comparisons are exact, with integers of any length
    return lambda x: isinstance(x, int | float) and not isinstance(x, bool) and low <= x <= high


def _integer(low: float, high: float = math.inf) -> Predicate:
    return lambda x: isinstance(x, int) and not isinstance(x, bool) and low <= x <= high


def _optional(holds: Predicate) -> Predicate:
    return lambda x: x is None or holds(x)


def _series(holds: Predicate, low: int = 0, high: float = math.inf) -> Predicate:
    return lambda xs: isinstance(xs, tuple) and low <= len(xs) <= high and all(map(holds, xs))


def _is_flag(x: object) -> bool:
    return isinstance(x, bool)


def _is_empty(x: object) -> bool:
    return isinstance(x, list | tuple | dict) and not x


def _words(high: int) -> Predicate:
    return _series(lambda x: isinstance(x, str) and 0 < len(x) <= MAX_WORD_LENGTH, high=high)


_TOKEN = _integer(0)
# The allowed values in words, and their predicate.
_FLAG = "true or false", _is_flag
_OPTIONAL_COUNT = "a whole number of at least 1", _optional(_integer(1))
_LOGPROBS = "at least 0, -1 for the whole vocabulary, or none", _optional(_integer(-1))
_PENALTY = "between -2 and 2", _number(-2, 2)
_STOPS = f"a string of 1 to {MAX_WORD_LENGTH} characters, or up to {MAX_STOPS} of them", _words(MAX_STOPS)
_BAD_WORDS = f"up to {MAX_BAD_WORDS} strings of 1 to {MAX_WORD_LENGTH} characters", _words(MAX_BAD_WORDS)
_WIDTH = {"allowed": f"a whole number between 1 and {MAX_BEAM_WIDTH}", "holds": _integer(1, MAX_BEAM_WIDTH)}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Constraint of a whole output, in one of the first five fields.

    Attributes:
        json: a JSON schema, as a dict or as text.
        regex: a regular expression for the whole output.
        choice: the allowed outputs.
        grammar: a context-free grammar, in Lark's form or in GBNF.
        json_object: any JSON object.
        disable_any_whitespace: JSON without spaces and newlines.
        whitespace_pattern: a regular expression for the white space inside JSON; by default at most 24 characters.
        prelude: rules of a grammar in Lark's form; the rule `prelude` is the text in front of the constrained one, such
            as reasoning. None: there is none.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Series[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    prelude: str | None = None

    def __post_init__(self) -> None:
        _settle_arrays(self)
        kinds = ("json", "regex", "choice", "grammar", "json_object")
        chosen = [name for name in kinds if getattr(self, name) not in (None, False)]
        if len(chosen) != 1:
            present = " and ".join(chosen) or "none"
            raise InvalidParameter("structured_outputs", f"must have one of {', '.join(kinds)}, not {present}")
        if self.choice is not None and not (self.choice and all(isinstance(text, str) for text in self.choice)):
            raise InvalidParameter("structured_outputs", f"choice must be texts, not {shown(self.choice)}")
        spacing = [name for name in ("disable_any_whitespace", "whitespace_pattern") if getattr(self, name)]
        if spacing and chosen[0] not in ("json", "json_object"):
            raise InvalidParameter("structured_outputs", f"{spacing[0]} is allowed only for JSON, not for {chosen[0]}")
        if len(spacing) > 1:
            raise InvalidParameter("structured_outputs", f"{spacing[1]} contradicts {spacing[0]}")


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """Common parameters of sampling and beam search.

    Attributes:
        max_tokens: maximum output tokens; None: as many as the lengths of the model and the KV pool allow.
        min_tokens: output tokens before which no end-of-sequence token, stop token or stop string ends the text.
        stop: strings that end the text; they are not part of it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the text, in addition to the model's end-of-sequence tokens.
        ignore_eos: continue after an end-of-sequence token.
        presence_penalty: subtracted from the logit of every token in the output.
        frequency_penalty: subtracted from the logit of every token in the output, times its count there.
        repetition_penalty: divides the positive logits, multiplies the negative ones, of every token in the prompt or
            the output (CTRL, arXiv:1909.05858).
        logit_bias: {token id: number added to its logit}.
        allowed_token_ids: the only tokens that may be chosen; None: all tokens.
        bad_words: texts that the output never contains, each with its tokens at the start of a word and inside one.
        logprobs: number of most likely tokens to return with their logprobs, in addition to the chosen one; -1: all
            tokens; None: no logprobs. Logprobs are of the model's distribution, before temperature and the other
            parameters. The engine limits the number (max_logprobs).
        prompt_logprobs: the same for each token of the prompt except the first.
        truncate_prompt_tokens: number of tokens to keep of the prompt; -1: as many as max_model_len has room for.
        truncation_side: the side of the prompt that `truncate_prompt_tokens` removes, "left" or "right".
        detokenize: return text; False returns token ids with empty texts.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: the constraint of the output, up to its end-of-sequence token.
        certificate: return a `Certificate` with each output, by which `LLM.replay` can check it.
    """

    max_tokens: int | None = _rule(16, *_OPTIONAL_COUNT)
    min_tokens: int = _rule(0, "a whole number of at least 0", _integer(0))
    stop: str | Series[str] = _rule((), *_STOPS)
    stop_token_ids: Series[int] = _rule((), f"up to {MAX_STOP_TOKENS} token ids", _series(_TOKEN, high=MAX_STOP_TOKENS))
    include_stop_str_in_output: bool = _rule(False, *_FLAG)
    ignore_eos: bool = _rule(False, *_FLAG)
    presence_penalty: float = _rule(0.0, *_PENALTY)
    frequency_penalty: float = _rule(0.0, *_PENALTY)
    repetition_penalty: float = _rule(1.0, "above 0", lambda x: _number(0)(x) and x != 0)
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Series[int] | None = _rule(None, "token ids", _optional(_series(_TOKEN)))
    bad_words: Series[str] = _rule((), *_BAD_WORDS)
    logprobs: int | None = _rule(None, *_LOGPROBS)
    prompt_logprobs: int | None = _rule(None, *_LOGPROBS)
    truncate_prompt_tokens: int | None = _rule(
        None, "at least 1, or -1", lambda x: _optional(_integer(-1))(x) and x != 0
    )
    truncation_side: str = _rule("left", '"left" or "right"', lambda x: x in ("left", "right"))
    detokenize: bool = _rule(True, *_FLAG)
    skip_special_tokens: bool = _rule(True, *_FLAG)
    structured_outputs: StructuredOutputsParams | None = None
    certificate: bool = _rule(False, *_FLAG)

    def __post_init__(self) -> None:
        settle = partial(object.__setattr__, self)
        _settle_arrays(self)
        settle("stop", (self.stop,) if isinstance(self.stop, str) else _tuple(self.stop or ()))
        for name in ("bad_words", "stop_token_ids"):
            settle(name, _tuple(getattr(self, name) or ()))
        if self.allowed_token_ids is not None:
            settle("allowed_token_ids", _tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            settle("logit_bias", _settled_bias(self.logit_bias))
        for each in fields(self):
            holds, value = each.metadata.get("holds"), getattr(self, each.name)
            if holds is not None and not holds(value):
                raise InvalidParameter(each.name, f"must be {each.metadata['allowed']}, not {shown(value)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", f"{self.min_tokens} exceeds max_tokens ({self.max_tokens})")
        if self.stop and not self.detokenize:
            raise InvalidParameter("stop", "needs detokenize, because stop strings are found in the text")
        if self.allowed_token_ids == ():
            raise InvalidParameter("allowed_token_ids", "must allow at least one token")
        if self.structured_outputs is not None:
            for name in ("allowed_token_ids", "bad_words", "ignore_eos"):
                if getattr(self, name) not in (None, (), False):
                    raise InvalidParameter(name, "can't be combined with structured_outputs, which may leave no token")

    @cached_property
    def has_state(self) -> bool:
        """Whether a token depends on more than the logits: earlier tokens, a bias, or the tokens to list with it."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
            or bool(self.bad_words)
            or getattr(self, "logprob_token_ids", None) is not None
        )

    def clone(self) -> Self:
        """Return a deep copy. `dataclasses.replace` returns one with other values."""
        return copy.deepcopy(self)

    def truncated(self, prompt_token_ids: list[int], max_model_len: int) -> list[int]:
        """Return the part of a prompt that `truncate_prompt_tokens` keeps."""
        keep = self.truncate_prompt_tokens
        if keep == -1:
            keep = max(1, max_model_len - (self.max_tokens or 1))
        if keep is None:
            return prompt_token_ids
        return prompt_token_ids[:keep] if self.truncation_side == "right" else prompt_token_ids[-keep:]


# Keywords of vLLM's SamplingParams that are accepted only without effect: the reason for refusing a value, and the
# predicate for values, other than None, that have no effect.
FOREIGN: Mapping[str, tuple[str, Predicate]] = {
    "spaces_between_special_tokens": ("a tokenizer puts no spaces between special tokens", _is_flag),
    "skip_clone": ("parameters are immutable and never cloned", _is_flag),
    "output_kind": ("LLM returns whole outputs, and AsyncEngine returns deltas", lambda x: False),
    "flat_logprobs": ("logprobs are a list of dictionaries by token", lambda x: x is False),
    "guided_decoding": ("its name today is structured_outputs", lambda x: False),
    "extra_args": ("there are no extensions", _is_empty),
    "logits_processors": ("tokens are sampled on the device", _is_empty),
    "thinking_token_budget": ("reasoning is part of the text", lambda x: x == -1),
    "repetition_detection": ("not supported", lambda x: False),
    "num_logprobs": ("its name is logprobs", lambda x: False),
}


def _taking_foreign[T](kind: type[T]) -> type[T]:
    """Let a class take the keywords of FOREIGN, drop values without effect, and raise InvalidParameter for others."""
    init: Any = kind.__init__

    @wraps(init)
    def __init__(self: T, **values: Any) -> None:
        for name in values.keys() & FOREIGN.keys():
            reason, has_no_effect = FOREIGN[name]
            if (value := values.pop(name)) is not None and not has_no_effect(value):
                raise InvalidParameter(name, f"must be absent, not {shown(value)}: {reason}")
        init(self, **values)

    setattr(kind, "__init__", __init__)  # noqa: B010  # mypy can't assign it
    return kind


@_taking_foreign
@dataclass(frozen=True, kw_only=True)
class SamplingParams(GenerationParams):
    """Parameters of sampling. The keywords of vLLM in FOREIGN are accepted with values that have no effect.

    Attributes:
        n: number of outputs to return.
        best_of: number of outputs to generate; the `n` with the highest logprob per token are returned.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1: all.
        top_p: keep the smallest set of tokens with at least this probability, after top_k.
        min_p: keep tokens at least this likely relative to the most likely one.
        seed: makes a request's tokens repeatable, independent of other requests; choice i equals a single choice with
            seed + i. None: draw from the engine's seed.
        logprob_token_ids: tokens to list with their logprobs, after the chosen one and instead of the most likely ones.
        num_speculative_tokens: maximum drafts of each output in a step; 0: none; None: as the engine is set.
        kept_tokens: return the set of tokens that each token was drawn from (`CompletionOutput.kept_tokens`).
        pooling: return a vector of the prompt (`CompletionOutput.pooled`): the model's last hidden state of its last
            token, "last", or the mean of those of all tokens, "mean". It needs one output of one token.
    """

    n: int = _rule(1, "a whole number of at least 1", _integer(1))
    best_of: int | None = _rule(None, *_OPTIONAL_COUNT)
    temperature: float = _rule(1.0, "a number of at least 0", _number(0))
    top_k: int = _rule(0, "a whole number of at least 1, or 0 or -1 for all tokens", _integer(-1))
    top_p: float = _rule(1.0, "above 0 and at most 1", lambda x: _number(0, 1)(x) and x != 0)
    min_p: float = _rule(0.0, "between 0 and 1", _number(0, 1))
    seed: int | None = _rule(None, "a whole number of at most 64 bits", _optional(_integer(-(2**63), 2**64 - 1)))
    logprob_token_ids: Series[int] | None = _rule(
        None,
        f"1 to {MAX_TOP} different token ids",
        _optional(lambda xs: _series(_TOKEN, 1, MAX_TOP)(xs) and len(set(xs)) == len(xs)),
    )
    num_speculative_tokens: int | None = _rule(
        None, f"a whole number between 0 and {MAX_DRAFTS}", _optional(_integer(0, MAX_DRAFTS))
    )
    kept_tokens: bool = _rule(False, *_FLAG)
    pooling: str | None = _rule(None, '"last" or "mean"', _optional(lambda x: x in POOLINGS))

    def __post_init__(self) -> None:
        object.__setattr__(self, "logprob_token_ids", _tuple(plain(self.logprob_token_ids)))
        super().__post_init__()
        if self.logprob_token_ids is not None and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidParameter("best_of", f"{self.best_of} is below n ({self.n})")
        if self.pooling is not None and (self.max_tokens, self.num_sequences) != (1, 1):
            raise InvalidParameter("pooling", "needs max_tokens=1 and n=1")
        if self.pooling == MEAN and self.prompt_logprobs is None:
            object.__setattr__(self, "prompt_logprobs", 0)  # the prompt's hidden states come with its logprobs

    @property
    def num_sequences(self) -> int:
        """Number of outputs to generate."""
        return self.best_of or self.n

    @property
    def num_outputs(self) -> int:
        """Number of outputs to return."""
        return self.n


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(GenerationParams):
    """Parameters of beam search as in Hugging Face's `generate(num_beams=...)`.

    Penalties and biases act on log-probabilities.

    Attributes:
        beam_width: number of live beams.
        n: number of best hypotheses to return; None: `beam_width`.
        length_penalty: exponent of the length by which a hypothesis's sum of logprobs is divided.
        early_stopping: True ends with the first `beam_width` hypotheses. False ends once the best live beam, scored at
            its present length, can't beat the worst of them. "never" scores it at the length that favours it most.
    """

    beam_width: int = field(metadata=_WIDTH)
    n: int | None = _rule(None, *_OPTIONAL_COUNT)
    length_penalty: float = _rule(1.0, "between -16 and 16", _number(-16, 16))  # a length to this power is a float
    early_stopping: bool | Literal["never"] = _rule(
        False, 'true, false or "never"', lambda x: x is True or x is False or x == "never"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_outputs > self.beam_width:
            raise InvalidParameter("n", f"{self.n} exceeds beam_width ({self.beam_width})")

    @property
    def num_sequences(self) -> int:
        """Number of live beams."""
        return self.beam_width

    @property
    def num_outputs(self) -> int:
        """Number of hypotheses to return."""
        return self.n or self.beam_width


Params = SamplingParams | BeamSearchParams


def plain(value: Any) -> Any:
    """Return arrays as lists, array scalars as numbers, and any other value unchanged.

    Arrays are recognised by `tolist`, which NumPy and JAX have in common.
    """
    return value.tolist() if hasattr(value, "tolist") else value


def _settle_arrays(params: "StructuredOutputsParams | GenerationParams") -> None:
    for each in fields(params):
        object.__setattr__(params, each.name, plain(getattr(params, each.name)))


def _settled_bias(value: Mapping[int, float]) -> dict[int, float]:
    try:  # keys of JSON are strings
        bias = {int(token): plain(number) for token, number in dict(value).items()}
    except (TypeError, ValueError):
        bias = {-1: 0.0}
    if len(bias) > MAX_LOGIT_BIASES:
        raise InvalidParameter("logit_bias", f"must have at most {MAX_LOGIT_BIASES} entries, not {len(bias)}")
    if not all(_TOKEN(token) and _number(-100, 100)(number) for token, number in bias.items()):
        raise InvalidParameter("logit_bias", f"must give token ids numbers between -100 and 100, not {shown(value)}")
    return bias


def _tuple(value: object) -> object:
    """Return a tuple of any series; other values are returned unchanged, and their field's rule rejects them."""
    return tuple(map(plain, value)) if isinstance(value, Series) and not isinstance(value, str) else value


def shown(value: object) -> str:
    """Return a value, or its beginning, for a message."""
    text = reprlib.Repr(maxstring=60, maxother=60, maxlong=60).repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""What a caller asks for, how it is generated, and what it gets back. Pure: no device, no clock, no randomness."""

import math
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from enum import StrEnum

from jpaged.core.block_table import BlockTable


class InvalidParameter(ValueError):
    """The caller's error: `field` names what is wrong; the message says what was given and what is allowed."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, in the words of vLLM and of the OpenAI API.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens that holds this much probability, after top_k.
        min_p: keep tokens at least this likely relative to the most likely one.
        max_tokens: None is as many as the model's and the pool's length allow.
        stop: strings that end the text; they are not part of it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end it, besides the model's own end-of-sequence tokens.
        ignore_eos: go on after an end-of-sequence token.
        seed: makes a request's tokens repeatable, whatever runs beside it; None draws from the engine's seed.
        logprobs: 0 returns the logprob of each chosen token (of the model's own distribution, before temperature
            and the rest); None returns none.
        skip_special_tokens: leave special tokens out of the text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    stop: str | Series[str] = ()
    stop_token_ids: Series[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))

        def check(field: str, ok: bool, allowed: str) -> None:
            if not ok:
                raise InvalidParameter(field, f"must be {allowed}, not {getattr(self, field)!r}")

        def number(value: object) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

        def integer(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        check("temperature", number(self.temperature) and self.temperature >= 0, "a number of at least 0")
        check(
            "top_k", integer(self.top_k) and self.top_k >= -1, "a whole number of at least 1, or 0 or -1 for all tokens"
        )
        check("top_p", number(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1")
        check("min_p", number(self.min_p) and 0 <= self.min_p <= 1, "between 0 and 1")
        limit = self.max_tokens
        check("max_tokens", limit is None or (integer(limit) and limit >= 1), "a whole number of at least 1")
        check("stop", all(isinstance(s, str) and s for s in self.stop), "a non-empty string, or several")
        check("stop_token_ids", all(integer(t) for t in self.stop_token_ids), "whole numbers")
        in_range = self.seed is None or (integer(self.seed) and -(2**63) <= self.seed < 2**64)
        check("seed", in_range, "a whole number of at most 64 bits")
        check(
            "logprobs",
            self.logprobs is None or (integer(self.logprobs) and self.logprobs == 0),
            "0 (the chosen token) or none",
        )


@dataclass(eq=False)
class Sequence:
    """One branch of generation: `0 <= num_computed_tokens <= num_tokens`, and a block table of its own.

    Attributes:
        tokens: prompt and output; the first `num_prompt_tokens` are the prompt.
        num_computed_tokens: how many of them have their KV written.
        num_cached_tokens: how many of the prompt's came from the prefix cache when it was first admitted.
        block_keys: prefix-cache keys of its full blocks, as far as they have been needed.
    """

    request: "Request"
    tokens: list[int]
    num_prompt_tokens: int
    table: BlockTable
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def append(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def fork(self) -> "Sequence":
        """A second branch from here on, which shares every block until one of the two writes into it."""
        return Sequence(
            self.request, list(self.tokens), self.num_prompt_tokens, self.table.fork(), self.num_computed_tokens,
            self.num_cached_tokens, list(self.block_keys), list(self.logprobs), self.text,
        )  # fmt: skip

    def free(self) -> None:
        """Gives its blocks back; what was computed into them is forgotten."""
        self.table.free()
        self.num_computed_tokens = 0


@dataclass(eq=False)
class Request:
    """What a caller asked for. `seed` and `max_tokens` are resolved: no None in them."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    prompt: str | None = None
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one step added to one sequence of a request."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class Logprob:
    """One token's natural-log probability under the model, with the token's text."""

    logprob: float
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One finished sequence. `logprobs`, if asked for, holds {token id: Logprob} per token."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request, in the words of vLLM."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = True

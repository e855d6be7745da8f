"""Requests, their sequences, and their results. Pure: no device, no clock, no randomness."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from jpaged.core.bans import Bans
from jpaged.core.beam import BeamSearch
from jpaged.core.block_table import BlockTable
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.plan import Sample


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"
    ERROR = "error"  # the stop reason says why: NON_FINITE, or a constraint that can't be followed any further


NON_FINITE = "the model's logits are not finite"  # a stop reason


@dataclass(eq=False)
class Sequence:
    """One branch of generation: `0 <= num_computed_tokens <= num_tokens + pending`, and a block table of its own.

    Attributes:
        tokens: prompt and output; the first `num_prompt_tokens` are the prompt.
        index: which of its request's choices it is; its seed is the request's plus this.
        num_computed_tokens: how many tokens have their KV written, once the steps in flight have run.
        in_flight: how many scheduled steps that it is part of have not been committed.
        pending: how many tokens these sample for it.
        num_cached_tokens: how many of the prompt's came from the prefix cache when it was first admitted.
        nodes: places of its full blocks in the prefix cache, as far as they are known.
        epoch: of the prefix cache when its first token was computed; in a later one it is not remembered.
        leader: while it waits, after a preemption, for another branch to compute the tokens that they share: that
            branch, and how many tokens they share.
        steady_until: the position before which it goes on by one token and one sample in each step, in a block of its
            own and without a mask, for any samples.
        row: its row on the device while it runs, or until the last step in flight that it is part of is committed.
        decoder: turns its tokens into text; None without a tokenizer. Each branch has its own.
        constraint: the state of its constraint, or None; each branch has its own.
        samples: one for each token of output.
    """

    request: "Request"
    tokens: list[int]
    table: BlockTable
    index: int = 0
    num_computed_tokens: int = 0
    in_flight: int = 0
    pending: int = 0
    num_cached_tokens: int = 0
    nodes: list[int] = field(default_factory=list)
    epoch: int = 0
    leader: "tuple[Sequence, int] | None" = None
    steady_until: int = 0
    row: int | None = None
    decoder: Any = None
    constraint: Any = None
    samples: list[Sample] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def seed(self) -> int:
        """The seed of its samples, of 64 bits."""
        return (self.request.seed + self.index) % 2**64

    @property
    def behind(self) -> int:
        """The number of tokens that can be computed next: known tokens and those that steps in flight will sample, but
        none after a sample that the host must see first or that ends the sequence."""
        request, known = self.request, len(self.tokens) + self.pending
        if self.pending and (request.waits or known - len(request.prompt_token_ids) >= request.max_tokens):
            return 0
        return known - self.num_computed_tokens

    def append(self, sample: Sample) -> None:
        self.tokens.append(sample.token)
        self.samples.append(sample)
        self.cumulative_logprob += sample.logprob
        if self.constraint is not None:
            self.constraint.take(sample.token)

    def fork(self, index: int) -> "Sequence":
        """Another branch from here on, which shares every block until one of the two writes into it."""
        child = self.branch(index)
        child.table = self.table.fork()
        child.num_computed_tokens, child.nodes, child.epoch = self.num_computed_tokens, list(self.nodes), self.epoch
        return child

    def branch(self, index: int) -> "Sequence":
        """Return a new branch with the tokens so far and without blocks."""
        return Sequence(
            self.request, list(self.tokens), BlockTable(self.table.pool), index,
            num_cached_tokens=self.num_cached_tokens, decoder=copy.copy(self.decoder),
            constraint=copy.copy(self.constraint), samples=list(self.samples),
            cumulative_logprob=self.cumulative_logprob, text=self.text,
        )  # fmt: skip

    def free(self) -> None:
        """Give its blocks back, and forget their content."""
        self.table.free()
        self.num_computed_tokens, self.nodes, self.leader = 0, [], None

    def num_samples(self, end: int) -> int:
        """Return the number of tokens that are sampled once those before position `end` are computed: none inside the
        prompt, one for each branch at its end."""
        if end < len(self.tokens):
            return 0
        return self.request.num_sequences if self.request.unforked else 1


@dataclass(eq=False)
class Request:
    """A caller's request. `seed` and `max_tokens` are resolved and not None.

    Attributes:
        rank: requests run in its order, and give way in the reverse order.
        cache_salt: only requests with the same salt share cached prefixes.
        client: whose turns it takes in the queue; None for none.
        bans: the tokens that its output may not have next.
        end_tokens: the tokens that end its output.
        num_top: how many of the most likely tokens to list with each sample; None for neither list nor rank.
        admitted: whether it has run; a preempted request has.
        beam: the search, if this is one; its live beams are `sequences`, until in the end its best hypotheses are.
        find_stop: which stop string the text of a sequence holds once a token is added; None for none.
        prompt_samples: logprobs of the prompt's tokens but the first, as far as they are computed.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | BeamSearchParams
    seed: int
    max_tokens: int
    prompt: str | None = None
    rank: tuple[int, int, int] = (0, 0, 0)
    client: str | None = None
    cache_salt: str = ""
    bans: Bans = field(default_factory=Bans)
    end_tokens: frozenset[int] = frozenset()
    num_top: int | None = None
    admitted: bool = False
    beam: BeamSearch[Sequence] | None = None
    find_stop: Callable[[Sequence, int], str | None] | None = None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_samples: list[Sample] = field(default_factory=list)

    @cached_property
    def num_sequences(self) -> int:
        """How many sequences it grows into, once its prompt is computed."""
        return self.params.num_sequences

    @property
    def live(self) -> list[Sequence]:
        if len(self.sequences) == 1:
            return [] if self.sequences[0].finish_reason else self.sequences
        return [sequence for sequence in self.sequences if not sequence.finish_reason]

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason for sequence in self.sequences)

    @property
    def unforked(self) -> bool:
        """Whether all its sequences are still one, and will be drawn from the same logits."""
        return self.beam is None and len(self.sequences) < self.num_sequences

    @property
    def waits(self) -> bool:
        """Whether the host must see a sample before the next step: it chooses among candidates, forks, or makes a mask
        that depends on the token."""
        return self._host_bound or len(self.sequences) < self.num_sequences

    @cached_property
    def _host_bound(self) -> bool:
        return self.beam is not None or self.params.structured_outputs is not None or self.bans.follow_output

    @property
    def seats(self) -> int:
        """How many sequences of a step it may need."""
        return self.num_sequences if self.beam or self.unforked else len(self.live)

    @property
    def streams(self) -> bool:
        """Whether its outputs are known as they grow, not only when all have ended."""
        return self.beam is None and self.num_sequences == self.params.num_outputs

    @property
    def outputs(self) -> list[Sequence]:
        """The sequences to return, best first where there is a choice. Meant for a request that has finished."""
        if self.beam is None and not self.streams:
            best = sorted(self.sequences, key=lambda s: -s.cumulative_logprob / max(1, s.num_output_tokens))
            return best[: self.params.num_outputs]
        return self.sequences[: self.params.num_outputs]


class OutputDelta(NamedTuple):
    """The addition of one step to one output of a request.

    Attributes:
        prompt_samples: logprobs of the prompt's tokens but the first, with the first delta of each output, if they
            were asked for.
        num_cached_tokens: how many of the prompt's tokens came from the prefix cache.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # a tuple's method of this name is not used
    text: str
    samples: list[Sample]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_samples: list[Sample] | None = None
    num_cached_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [sample.token for sample in self.samples]


@dataclass(frozen=True)
class Logprob:
    """One token's natural-log probability under the model, with its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
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


@dataclass
class RequestMetrics:
    """Times of a request in seconds, named as in vLLM's `RequestStateStats`; 0 for an event that did not happen.

    Attributes:
        arrival_time: time of the call on the wall clock (`time.time`). The other times are on `time.monotonic`.
        queued_ts: time at which the engine accepted the request.
        scheduled_ts: start of the first step that computed tokens of it.
        first_token_latency: seconds from the call to the first token.
        num_generation_tokens: number of generated tokens, those of outputs that are not returned included.
    """

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """A finished request, in the words of vLLM. `prompt_logprobs`, if asked for, begins with None for the first
    token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    metrics: RequestMetrics | None = None

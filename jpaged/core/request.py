"""Requests, their sequences, and their results, without device, clock or randomness."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from jpaged.core.bans import Bans
from jpaged.core.beam import BeamSearch
from jpaged.core.block_table import BlockTable
from jpaged.core.certificate import Certificate
from jpaged.core.drafts import Drafter
from jpaged.core.params import BeamSearchParams, Params, SamplingParams
from jpaged.core.plan import Sample


class FinishReason(StrEnum):
    """Reason for the end of a sequence."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"
    ERROR = "error"  # the stop reason says why: NON_FINITE, or a constraint that can't be followed any further


Ending = tuple[FinishReason, int | str | None]  # with the stop reason

# Stop reasons.
NON_FINITE = "the model's logits are not finite"
NOTHING_LEFT = "no token may come next"  # bad words ban all tokens


class RequestFault(Exception):
    """Exception in the work on one request, with its cause as `__cause__`. Other requests can continue."""

    def __init__(self, request: "Request"):
        super().__init__(request.request_id)
        self.request = request


class Decoder(Protocol):
    """Conversion of one sequence's output tokens to text. Copies (`copy.copy`) continue independently."""

    def step(self, token: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add a token; return the text that is certain now, and the stop string that ends it, if any."""

    def flush(self) -> str:
        """Return the text that was held back because it could become a stop string."""


class Constraint(Protocol):
    """State of one sequence's output in a grammar. Copies (`copy.copy`) continue independently."""

    def take(self, token: int) -> None:
        """Advance by a token."""

    def forced(self) -> list[int]:
        """Return the next tokens as far as the grammar allows no others."""

    def allowed(self, tokens: list[int]) -> int:
        """Return how many of some tokens the grammar allows next, one after the other."""

    @property
    def error(self) -> str | None:
        """Reason why the grammar can't be followed further; None if it can."""


@dataclass(eq=False, slots=True)
class Sequence:
    """Branch of a request's generation, with its own block table.

    The order `0 <= num_computed_tokens <= num_tokens + pending` always holds.

    Attributes:
        tokens: prompt and output; the first `num_prompt_tokens` are the prompt.
        index: place among the request's choices. The seed of the sequence is the request's seed plus this.
        num_computed_tokens: number of tokens whose KV is written once the steps in flight have run.
        in_flight: number of scheduled steps with this sequence that are not committed.
        pending: number of tokens that these steps sample for the sequence.
        num_cached_tokens: number of prompt tokens from the prefix cache at the first admission.
        nodes: nodes of the full blocks in the prefix cache, as far as they are known.
        known_until: number of tokens whose keys and values were in the prefix cache at the last admission. With
            recurrent layers, the state after them is kept: other prompts may have this beginning.
        epoch: epoch of the prefix cache when the first token was computed. In a later epoch, no block of the sequence
            enters the prefix cache.
        leader: after a preemption, another branch that computes the shared tokens first, and the number of these
            tokens; None if the sequence waits for no other.
        steady_until: the position before which every step computes one token and samples one, whatever the samples
            are. Until then no other table holds the last block, and no mask is needed.
        leaves_at: the position from which on the window of a group of layers has passed a block; 0: unknown.
        row: row on the device while the sequence runs, or until the last of its steps in flight is committed.
        drafter: proposes next tokens, or None. Branches have separate ones.
        num_read: number of output tokens that have been read for the text and the client.
        decoder: converts the output to text; None without a tokenizer. Branches have separate decoders.
        constraint: state in the request's grammar, or None. Branches have separate states.
        samples: one for each output token.
        mixed_from: number of the output tokens before the first one that may depend on KV of older parameters; None:
            there is no such token.
        certificate: that of the finished output, if the request wants one.
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
    known_until: int = 0
    epoch: int = 0
    leader: "tuple[Sequence, int] | None" = None
    steady_until: int = 0
    leaves_at: int = 0
    row: int | None = None
    drafter: Drafter | None = None
    num_read: int = 0
    decoder: Decoder | None = None
    constraint: Constraint | None = None
    samples: list[Sample] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    mixed_from: int | None = None
    certificate: Certificate | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output."""
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def seed(self) -> int:
        """Seed of the samples, of 64 bits."""
        return (self.request.seed + self.index) % 2**64

    @property
    def behind(self) -> int:
        """Number of tokens that can be computed next.

        Known tokens and tokens that steps in flight will sample can be computed. No token can follow a sample that ends
        the sequence, or that the host must see first.
        """
        known = len(self.tokens) + self.pending
        if self.pending and (self.waits or known >= self.request.max_length):
            return 0
        return known - self.num_computed_tokens

    @property
    def behind_in_prompt(self) -> int:
        """Number of tokens of the prompt that are not computed."""
        return max(0, len(self.request.prompt_token_ids) - self.num_computed_tokens)

    @property
    def most_drafts(self) -> int:
        """Number of drafts after which a sample is not beyond the maximum length."""
        return self.request.max_length - len(self.tokens) - 1

    @property
    def waits(self) -> bool:
        """Whether the host must see the last sample before the next step, for the request or for a draft."""
        drafter = self.drafter
        return self.request.waits or (drafter is not None and self.num_computed_tokens >= drafter.rests_until)

    def append(self, sample: Sample) -> None:
        """Add a sampled token."""
        token = sample[0]  # an index takes half the time of an attribute
        self.tokens.append(token)
        self.samples.append(sample)
        self.cumulative_logprob += sample[1]
        if self.constraint is not None:
            self.constraint.take(token)

    def cut(self, num_output_tokens: int) -> None:
        """Drop the output after its first tokens. The sequence has ended there."""
        del self.tokens[self.num_prompt_tokens + num_output_tokens :], self.samples[num_output_tokens:]
        self.cumulative_logprob = math.fsum(sample.logprob for sample in self.samples)

    def branch(self, index: int) -> "Sequence":
        """Return a new branch with the tokens so far and without blocks."""
        return Sequence(
            self.request,
            list(self.tokens),
            BlockTable(self.table.pool),
            index,
            num_cached_tokens=self.num_cached_tokens,
            drafter=copy.copy(self.drafter),
            num_read=self.num_read,
            decoder=copy.copy(self.decoder),
            constraint=copy.copy(self.constraint),
            samples=list(self.samples),
            cumulative_logprob=self.cumulative_logprob,
            text=self.text,
            mixed_from=self.mixed_from,
        )

    def free(self) -> None:
        """Free the blocks and forget their nodes."""
        self.table.free()
        self.num_computed_tokens, self.nodes, self.leader, self.leaves_at = 0, [], None, 0


@dataclass
class RequestMetrics:
    """Times of a request in seconds, named as in vLLM's `RequestStateStats`; 0 for an event that did not happen.

    Attributes:
        arrival_time: time of the call of `LLM` on the wall clock (`time.time`). The other times are on the engine's
            clock (`time.monotonic`).
        queued_ts: time at which the engine accepted the request.
        scheduled_ts: dispatch of the first step that computed tokens of the request.
        first_token_latency: seconds from the call of `LLM` to the first token.
        num_generation_tokens: number of generated tokens, including those of outputs that are not returned.
    """

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """Request with resolved `seed` and `max_tokens`, which are not None.

    Attributes:
        rank: requests run in this order, and are preempted in the reverse order.
        client: the client whose turn in the queue this request takes, or None.
        tenant: the tenant whose share of steps, rows and blocks this request takes. All requests without a tenant
            together have the share of one.
        tenant_turn: number of the last turn among the tenant's requests; 0 before the first.
        cache_salt: only requests with the same salt share cached prefixes and, for drafts, past outputs.
        pin_s: seconds after its end for which the cached prefix of its prompt and outputs is pinned.
        adapter: number of the low-rank adapter that computes it; None: the model alone does.
        eos_tokens: the end-of-sequence tokens that end the output; none with `ignore_eos`.
        num_top: number of most likely tokens to list with each sample; None: neither list nor rank.
        admitted: whether the request has run; True for a preempted request.
        find_stop: returns the stop string that the text of a sequence contains once a token is added; None: there are
            no stop strings to find.
        prompt_samples: logprobs of the prompt's tokens except the first, as far as they are computed.
        sums: sums of the hidden states before them, for the mean of `pooling`.
        fingerprints: fingerprints of the parameters that have computed the request, if it wants certificates.
        num_sequences: number of sequences once the prompt is computed.
        max_length: number of tokens of prompt and output at which a sequence ends.
        beam: state of a beam search, or None. The live beams are `sequences`, which hold the best hypotheses once the
            search has ended.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: Params
    seed: int
    max_tokens: int
    prompt: str | None = None
    rank: tuple[int, int, int] = (0, 0, 0)
    client: str | None = None
    tenant: str | None = None
    tenant_turn: int = 0
    cache_salt: str = ""
    pin_s: float = 0.0
    adapter: int | None = None
    bans: Bans = field(default_factory=Bans)
    eos_tokens: frozenset[int] = frozenset()
    num_top: int | None = None
    admitted: bool = False
    find_stop: Callable[[Sequence, int], str | None] | None = None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_samples: list[Sample] = field(default_factory=list)
    sums: list[bytes] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    fingerprints: tuple[str, ...] = ()
    num_sequences: int = field(init=False)
    max_length: int = field(init=False)
    end_tokens: frozenset[int] = field(init=False)
    beam: BeamSearch[Sequence] | None = field(init=False, default=None)
    _host_bound: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self.num_sequences = params.num_sequences
        self.max_length = len(self.prompt_token_ids) + self.max_tokens
        self.end_tokens = self.eos_tokens.union(params.stop_token_ids)
        if isinstance(params, BeamSearchParams):
            self.beam = BeamSearch(params.beam_width, self.max_tokens, params.length_penalty, params.early_stopping)
        self._host_bound = self.beam is not None or params.structured_outputs is not None or self.bans.follow_output

    @property
    def live(self) -> list[Sequence]:
        """Sequences that have not finished."""
        if len(self.sequences) == 1:
            return [] if self.sequences[0].finish_reason else self.sequences
        return [sequence for sequence in self.sequences if not sequence.finish_reason]

    @property
    def finished(self) -> bool:
        """Whether all sequences have finished."""
        return all(sequence.finish_reason for sequence in self.sequences)

    @property
    def unforked(self) -> bool:
        """Whether one sequence still stands for several, whose first tokens will be drawn from the same logits."""
        return self.beam is None and len(self.sequences) < self.num_sequences

    @property
    def waits(self) -> bool:
        """Whether the host must see a sample before the next step.

        The host chooses among candidates, forks, or creates a mask that depends on the token.
        """
        return self._host_bound or len(self.sequences) < self.num_sequences

    @property
    def may_have_drafts(self) -> bool:
        """Whether its sequences may have drafts. Beams have none: the host compares their candidates."""
        return isinstance(self.params, SamplingParams) and self.params.num_speculative_tokens != 0

    @property
    def seats(self) -> int:
        """Number of sequences of a step that the request may need."""
        return self.num_sequences if self.beam or self.unforked else len(self.live)

    @property
    def streams(self) -> bool:
        """Whether the outputs are known while they grow, and not only after all have ended."""
        return self.beam is None and self.num_sequences == self.params.num_outputs

    def ending(self, token: int, num_output_tokens: int) -> Ending | None:
        """Return how an output of some tokens ends with the last of them; None if it continues."""
        if token in self.end_tokens:
            return FinishReason.STOP, None if token in self.eos_tokens else token
        return (FinishReason.LENGTH, None) if num_output_tokens >= self.max_tokens else None

    @property
    def outputs(self) -> list[Sequence]:
        """Sequences of a finished request to return, best first if there is a choice."""
        outputs = self.sequences
        if self.beam is None and not self.streams:
            outputs = sorted(outputs, key=lambda s: -s.cumulative_logprob / max(1, s.num_output_tokens))
        return outputs[: self.params.num_outputs]


class OutputDelta(NamedTuple):
    """Addition of one step to one output of a request.

    Attributes:
        prompt_samples: logprobs of the prompt's tokens except the first, if requested, in the first delta of each
            output.
        certificate: that of the whole output, if requested, in its last delta.
        pooled: vector of the prompt, if requested.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # a tuple's method of this name is not used
    text: str
    samples: list[Sample]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_samples: list[Sample] | None = None
    num_cached_tokens: int = 0
    certificate: Certificate | None = None
    pooled: list[float] | None = None

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the samples."""
        return [sample.token for sample in self.samples]


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token under the model, with its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One finished sequence.

    Attributes:
        logprobs: {token id: Logprob} for each token, if requested.
        versions: number of parameter updates before each token was drawn.
        certificate: if requested, unless an abort or an error ended the output.
        kept_tokens: if requested, the tokens that each token was drawn from, ceil(V / 8) bytes: bit t % 8 of byte
            t // 8 is 1 for token t. Masks, top-k, top-p and min-p keep them; at temperature 0 it is the token alone.
        pooled: vector of the prompt, if requested (`SamplingParams.pooling`).
        mixed_from: number of tokens before the first one that may depend on KV of older parameters than its own, after
            an update with `in_flight="keep"`; None: there is no such token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    versions: list[int] = field(default_factory=list)
    certificate: Certificate | None = None
    mixed_from: int | None = None
    kept_tokens: list[bytes] | None = None
    pooled: list[float] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """Finished request, with vLLM's field names.

    `prompt_logprobs`, if requested, begins with None for the first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    metrics: RequestMetrics | None = field(default=None, compare=False)

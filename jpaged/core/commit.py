"""Commit of a step's results: tokens, endings, forks and beams."""

import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Series
from types import MappingProxyType
from typing import NamedTuple

from jpaged.core.branches import advance_beams
from jpaged.core.drafting import MOST_BESIDE, Drafting
from jpaged.core.drafts import Offer
from jpaged.core.memory import Memory
from jpaged.core.plan import Sample, StepResult
from jpaged.core.planned_step import PlannedStep
from jpaged.core.queue import Queues
from jpaged.core.request import NON_FINITE, NOTHING_LEFT, FinishReason, Request, Sequence


class Committed(NamedTuple):
    """Changes of a committed step.

    Attributes:
        advanced: the sequences that got a token, without sequences still inside their prompts and sequences that ended
            meanwhile. For a beam search, the live beams, or, once it has ended, its outputs.
        served: the requests with computed tokens in the step, without requests that have ended meanwhile.
        preempted: the requests that lost their blocks for this step, each with whether the blocks were swapped out.
        resumed: the requests whose blocks were swapped in.
        verified: for each sequence with drafts, the numbers of drafts and of those that were kept.
        faults: the requests whose commit raised an exception. They must be expelled (`Scheduler.recover`).
    """

    advanced: Series[Sequence] = ()
    served: Series[Request] = ()
    preempted: Series[tuple[Request, bool]] = ()
    resumed: Series[Request] = ()
    verified: Series[tuple[int, int]] = ()
    faults: Mapping[Request, Exception] = MappingProxyType({})


class Commit:
    """Commit of one step. An exception in the work on one request leaves the other requests as they would be without.

    Attributes:
        samples_of_beams: samples of each beam search, which advances after all rows of the step.
        kept: number of drafts of each sequence that are now part of its output.
    """

    def __init__(self, queues: Queues, memory: Memory, drafting: Drafting):
        self.queues, self.memory, self.drafting = queues, memory, drafting
        self.advanced: list[Sequence] = []
        self.served: list[Request] = []  # the rows of a request are next to each other
        self.samples_of_beams: dict[Request, list[Sample]] = {}
        self.kept: Counter[Sequence] = Counter()
        self.faults: dict[Request, Exception] = {}
        self.offers: dict[Sequence, Offer] = {}  # of sequences that sleep
        self.waiting: set[Sequence] = set()  # for the result of this step
        self.num_woken = 0  # sequences that now wait for the result of a later step in flight

    def run(self, step: PlannedStep, result: StepResult) -> Committed:
        """Commit all rows of a step, then its beam searches."""
        assert step.plan is not None, "only complete plans are committed"
        self._remember_resumed(step)
        advanced, served, faults, memory = self.advanced, self.served, self.faults, self.memory
        at, samples, prompts, size = 0, result.samples, result.prompt, memory.pool.block_size
        caching, has_windows = memory.pool.enable_prefix_caching, memory.pool.has_windows
        has_pages = memory.pool.num_pages > 0
        rows, drafts = step.plan.rows, dict(step.plan.drafts)
        for index, (sequence, (_, start, count, num_samples)) in enumerate(zip(step.sequences, rows, strict=True)):
            request, first, at = sequence.request, at, at + num_samples
            sequence.in_flight -= 1
            if num_samples:
                sequence.pending -= 1
            if faults and request in faults:
                continue
            try:
                if sequence.finish_reason:
                    if not sequence.in_flight:
                        memory.release(sequence)
                    continue
                if index in drafts:
                    if sequence.tokens[start:] != [drafts[index]]:  # another token, or an earlier draft, was not kept
                        continue
                    self.kept[sequence] += 1
                if not served or served[-1] is not request:
                    served.append(request)
                prompt = prompts.get(index, ()) if prompts else ()
                # All samples of a sequence are drawn from the same logits. NaN is unequal to itself.
                if (num_samples and samples[first][1] != samples[first][1]) or (prompt and _has_nan(prompt)):
                    self._fail(request)
                    continue
                if caching and (start + count) // size > len(sequence.nodes):
                    memory.remember(sequence, start + count)
                if has_windows and start + count >= sequence.leaves_at:
                    memory.leave(sequence, start + count)
                if has_pages:
                    memory.remember_state(sequence, start + count)
                if prompt:
                    request.prompt_samples.extend(prompt)
                    if index in result.sums:
                        request.sums.append(result.sums[index])
                if num_samples == 1 and not request.beam:
                    self._take(sequence, samples[first])
                    if index not in drafts:
                        advanced.append(sequence)
                elif num_samples:
                    self._branch(sequence, samples[first:at])
            except Exception as error:
                faults[request] = error
        assert at == len(samples), f"{len(samples)} samples of {at}"
        return self._finish(step)

    def _remember_resumed(self, step: PlannedStep) -> None:
        """Add the blocks that came from the host to the prefix cache."""
        for request, sequences in step.resumed.items():
            try:
                for sequence, computed in sequences:
                    if not sequence.finish_reason:
                        self.memory.remember(sequence, computed)
            except Exception as error:
                self.faults[request] = error

    def _take(self, sequence: Sequence, sample: Sample) -> None:
        """Add a token to a sequence, which it may end."""
        sequence.append(sample)
        request, token = sequence.request, sample[0]
        if token in request.end_tokens or len(sequence.tokens) >= request.max_length:
            ending = request.ending(token, sequence.num_output_tokens)
            assert ending is not None
            finish(sequence, *ending, self.queues, self.memory)
        elif request.bans.follow_output and request.bans.leave_none(sequence.tokens, sequence.num_output_tokens):
            finish(sequence, FinishReason.STOP, NOTHING_LEFT, self.queues, self.memory)
        elif sequence.waits:
            self.waiting.add(sequence)
        elif (drafter := sequence.drafter) and (offer := drafter.offer(sequence.tokens, (), drafter.most)):
            self.offers[sequence] = offer

    def _branch(self, sequence: Sequence, samples: Series[Sample]) -> None:
        """Keep the sample of a beam, or fork a sequence into one branch for each sample."""
        request = sequence.request
        if request.beam:
            self.samples_of_beams.setdefault(request, []).append(samples[0])
            return
        branches = [sequence, *(self.memory.fork(sequence, index) for index in range(1, len(samples)))]
        request.sequences = branches
        for branch, sample in zip(branches, samples, strict=True):
            self._take(branch, sample)
            if not branch.finish_reason:
                self.memory.rows.choose(branch)
        self.advanced += branches

    def _fail(self, request: Request) -> None:
        """End a request whose logits are not finite. The cache forgets its blocks, whose KV may be invalid too."""
        self.samples_of_beams.pop(request, None)
        ended = request.live
        for sequence in ended:
            for node in sequence.nodes:  # first, because their files are known as long as they are
                self.memory.forget_node(node)
            for block_id in sequence.table.held:
                self.memory.pool.forget(block_id)
        for sequence in ended:
            finish(sequence, FinishReason.ERROR, NON_FINITE, self.queues, self.memory)
        self.advanced += [sequence for sequence in ended if sequence not in self.advanced]

    def _finish(self, step: PlannedStep) -> Committed:
        for request, samples in self.samples_of_beams.items():
            try:
                self.advanced += advance_beams(request, samples, self.memory)
                if request.finished:
                    self.queues.drop(request)
            except Exception as error:
                self.faults[request] = error
        if self.offers:
            self._wake()
        verified = [self._settle(*each) for each in Counter(step.sequences[i] for i, _ in step.drafts).items()]
        advanced, served = self.advanced, self.served
        if self.faults:
            advanced = [sequence for sequence in advanced if sequence.request not in self.faults]
            served = [request for request in served if request not in self.faults]
        return Committed(advanced, served, step.preempted, list(step.resumed), verified, self.faults)

    def _wake(self) -> None:
        """Wake up the sequences whose drafts are expected to pay; all that have some, if the others wait anyway."""
        num_seqs, max_drafts = sum(len(request.live) for request in self.queues.running), self.drafting.max_drafts
        waits = MOST_BESIDE * len(self.waiting) >= num_seqs
        for sequence in self.offers if waits else self.drafting.choose(self.offers, num_seqs, max_drafts):
            if sequence.drafter is not None and not sequence.finish_reason:
                sequence.drafter.rests_until = sequence.steady_until = 0
                self.num_woken += sequence.pending > 0

    def _settle(self, sequence: Sequence, drafts: int) -> tuple[int, int]:
        """Let a sequence continue after its last token, without the drafts that were not kept; return both numbers."""
        kept = self.kept[sequence]
        if not sequence.finish_reason and sequence.request not in self.faults:
            assert sequence.drafter is not None, "nobody proposed the drafts"
            sequence.drafter.learn(drafts, kept)
            sequence.num_computed_tokens = sequence.num_tokens - 1
            sequence.table.rewind(sequence.num_computed_tokens)
            self.memory.rows.choose(sequence)
        return drafts, kept


def finish(
    sequence: Sequence, reason: FinishReason, stop_reason: int | str | None, queues: Queues, memory: Memory
) -> None:
    """End a sequence, and with its last one the request."""
    sequence.finish_reason, sequence.stop_reason = reason, stop_reason
    if sequence.drafter is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
        sequence.drafter.end(sequence.tokens, sequence.num_prompt_tokens)
    memory.release(sequence)
    if sequence.request.finished:
        queues.drop(sequence.request)


def _has_nan(samples: Series[Sample]) -> bool:
    return any(math.isnan(sample.logprob) for sample in samples)

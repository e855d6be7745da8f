"""Branches of one request: their next tokens, and the beams of a search from one step to the next."""

from jpaged.core.beam import Beam, Candidate
from jpaged.core.memory import Memory
from jpaged.core.plan import Sample
from jpaged.core.request import FinishReason, Request, Sequence


def next_counts(request: Request, budget: int, memory: Memory, spare: int) -> dict[Sequence, int]:
    """Return the number of next tokens of each sequence of a running request, within the budget.

    The last token of each sequence waits until all sequences have their blocks. The last tokens of beams are computed
    in one step, because they are compared with each other.

    Args:
        spare: maximum entries of the plan beyond one of each sequence.
    """
    live = request.live
    if len(live) == 1:
        (sequence,) = live
        count = min(sequence.behind, budget, memory.most(sequence, spare))
        return {sequence: count} if count > 0 else {}
    while any(memory.follow(sequence) for sequence in live):
        pass  # a sequence that has started may lead another
    together = request.beam is not None
    held_back = together or any(sequence.leader for sequence in live)
    counts: dict[Sequence, int] = {}
    for sequence in live:
        count = 0 if sequence.leader else min(sequence.behind - held_back, budget, memory.most(sequence, spare))
        if (place := memory.leads_to(sequence)) is not None:
            count = min(count, place - sequence.num_computed_tokens)
        if count > 0:
            counts[sequence] = count
            budget -= count
            spare -= len(memory.ends(sequence, count)) - 1
    at_their_last = all(s.behind - counts.get(s, 0) == 1 for s in live)
    if together and at_their_last and budget >= len(live) and (len(counts) <= spare or not memory.divides):
        counts = {sequence: counts.get(sequence, 0) + 1 for sequence in live}
    return counts


def advance_beams(request: Request, samples: list[Sample], memory: Memory) -> list[Sequence]:
    """Extend the live beams of a request by their samples of one step; return them, or the outputs if it has ended."""
    search, parents = request.beam, request.live
    assert search is not None and len(samples) == len(parents), f"{len(samples)} of {len(parents)} beams were run"
    beams = [Beam(parent.cumulative_logprob, s.top_tokens, s.top_logprobs) for parent, s in zip(parents, samples)]
    live = search.advance(
        beams, parents[0].num_output_tokens + 1, lambda c: _hypothesis(parents[c.beam], c, samples[c.beam])
    )
    for beam in set(range(len(parents))) - {candidate.beam for candidate in live}:
        memory.release(parents[beam])
    if search.done:
        # Where every token is forbidden, the beams end as they are.
        request.sequences = [beam for _, beam in search.hypotheses] or parents
        for index, sequence in enumerate(request.sequences):
            sequence.index, sequence.finish_reason = index, sequence.finish_reason or FinishReason.STOP
        return request.outputs
    children: list[Sequence] = []
    for index, candidate in enumerate(live):
        parent = parents[candidate.beam]
        children.append(memory.fork(parent, index) if parent in children else parent)
    for index, (child, candidate) in enumerate(zip(children, live)):
        child.index = index
        child.append(_sample(candidate, samples[candidate.beam], request))
        memory.rows.choose(child)
    request.sequences = children
    return children


def _sample(candidate: Candidate, sample: Sample, request: Request) -> Sample:
    """Return the sample of a candidate, whose beam got `sample`, with as many alternatives as were requested."""
    _, _, token, logprob, rank = candidate
    listed = slice(request.params.logprobs or 0)
    return Sample(token, logprob, rank, sample.top_tokens[listed], sample.top_logprobs[listed], sample.version)


def _hypothesis(parent: Sequence, candidate: Candidate, sample: Sample) -> Sequence | None:
    """Return the sequence of a candidate that ends; None if it continues."""
    request, token = parent.request, candidate.token
    ending = request.ending(token, parent.num_output_tokens + 1)
    if (ending is None or ending[0] == FinishReason.LENGTH) and request.find_stop:
        stop = request.find_stop(parent, token)
        ending = (FinishReason.STOP, stop) if stop is not None else ending
    if ending is None:
        return None
    hypothesis = parent.branch(0)
    hypothesis.append(_sample(candidate, sample, request))
    hypothesis.finish_reason, hypothesis.stop_reason = ending
    return hypothesis

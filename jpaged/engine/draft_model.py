"""Draft model: a smaller model that continues the sequences of an engine, in an engine of its own."""

import contextlib
from collections.abc import Sequence as Series
from typing import TYPE_CHECKING

from jpaged.core.commands import Command, ResetPrefixCache, Sleep, UpdateParams, WakeUp
from jpaged.core.drafting import Wanted
from jpaged.core.params import InvalidParameter, SamplingParams
from jpaged.core.request import Request, Sequence

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine


class DraftModel:
    """Draft model. Each round of drafts is a request for each sequence, of which the prefix cache knows most tokens.

    A token's random bits depend on its seed and its position, and a request has the seed of its sequence. Both models
    then draw the same token unless their distributions differ there (a coupling of both by shared Gumbel noise).

    Args:
        engine: an engine without a tokenizer. It has no other requests, and no drafts.
    """

    def __init__(self, engine: "Engine"):
        self._engine = engine

    def propose(self, wanted: Series[Wanted]) -> dict[Sequence, list[int]]:
        """Return the drafts of some sequences, at most as many as each wants.

        A long text takes several rounds, each with a chunk of it. Until then the sequence has no drafts, so that the
        others do not wait for it.
        """
        engine, asked = self._engine, {}
        for sequence, count in wanted:
            with contextlib.suppress(InvalidParameter):  # a sequence that exceeds the pool, or a token of padding
                asked[sequence] = self._ask(sequence, count)
        engine.step()
        for request in asked.values():
            if not request.finished and not request.sequences[0].num_output_tokens:
                engine.abort(request.request_id)
        while engine.has_work:
            engine.step()
        return {sequence: request.sequences[0].output_token_ids for sequence, request in asked.items()}

    def _ask(self, sequence: Sequence, count: int) -> Request:
        """Queue a request for the next tokens of a sequence, drawn as it draws them."""
        theirs = sequence.request.params
        assert isinstance(theirs, SamplingParams), "beams have no drafts"
        params = SamplingParams(
            temperature=theirs.temperature, top_k=theirs.top_k, top_p=theirs.top_p, min_p=theirs.min_p,
            logit_bias=theirs.logit_bias, seed=sequence.seed, max_tokens=count, ignore_eos=True, detokenize=False,
        )  # fmt: skip
        request_id = f"{sequence.request.request_id}-{sequence.index}"
        return self._engine.add(request_id, [*sequence.tokens], params, cache_salt=sequence.request.cache_salt)

    def control(self, command: Command) -> None:
        """Follow a command of the engine. The draft model keeps its parameters, on the host while it sleeps."""
        match command:
            case Sleep():
                self._engine.control(Sleep(level=1))
            case WakeUp() | ResetPrefixCache():
                self._engine.control(command)
            case UpdateParams():
                self._engine.control(WakeUp(frozenset({"weights"})))

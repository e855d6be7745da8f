"""The engine: requests in, one step at a time, text out. Single-threaded; the runner is handed to it."""

import random
from collections.abc import Sequence as Series
from typing import Protocol

from tokenizers import Tokenizer

from jpaged.core.request import (
    CompletionOutput,
    FinishReason,
    InvalidParameter,
    Logprob,
    OutputDelta,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
)
from jpaged.core.scheduler import ScheduleDecision, Scheduler
from jpaged.tokenizer import Detokenizer


class Runner(Protocol):
    """What the engine asks of the device side."""

    def step(self, decision: ScheduleDecision) -> tuple[Series[int], Series[float]]:
        """Token and logprob for each sequence of the decision, in order."""


class Engine:
    """`add`, `abort`, `step`.

    Args:
        tokenizer: None for an engine that takes and gives token ids alone.
        seed: of the seeds of requests that bring none.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, tokenizer: Tokenizer | None = None, *, seed: int = 0):
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self._seeds = random.Random(seed)
        self._detokenizers: dict[Sequence, Detokenizer] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, *, prompt: str | None = None
    ) -> Request:
        """Queues a request. Raises InvalidParameter for one that could never run."""
        if params.stop and self.tokenizer is None:
            raise InvalidParameter("stop", "needs a tokenizer, and this engine has none; use stop_token_ids")
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        request = self.scheduler.add(request_id, prompt_token_ids, params, seed=seed, prompt=prompt)
        for sequence in request.sequences:
            if self.tokenizer is not None:
                self._detokenizers[sequence] = Detokenizer(
                    self.tokenizer, prompt_token_ids, stop=params.stop,
                    include_stop=params.include_stop_str_in_output, skip_special_tokens=params.skip_special_tokens,
                )  # fmt: skip
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request at any moment; unknown and ended ones are ignored."""
        request = self.scheduler.abort(request_id)
        for sequence in request.sequences if request else ():
            self._detokenizers.pop(sequence, None)

    def step(self) -> list[OutputDelta]:
        """One step of the device, and what it added to each sequence that it moved on."""
        decision = self.scheduler.schedule()
        assert decision.num_scheduled_tokens or not self.has_work, "there is work, and none of it was scheduled"
        if not decision.num_scheduled_tokens:
            return []
        token_ids, logprobs = self.runner.step(decision)
        return [self._delta(sequence) for sequence in self.scheduler.update(decision, token_ids, logprobs)]

    def _delta(self, sequence: Sequence) -> OutputDelta:
        token, request, text = sequence.tokens[-1], sequence.request, ""
        detokenizer = self._detokenizers.get(sequence)
        if detokenizer:
            # A token that ends the text is not part of it.
            if sequence.finish_reason != FinishReason.STOP or request.params.include_stop_str_in_output:
                text, stop = detokenizer.step(token)
                if stop is not None and sequence.finish_reason:
                    sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, stop
                elif stop is not None:
                    self.scheduler.finish(sequence, FinishReason.STOP, stop)
            if sequence.finish_reason:
                text += detokenizer.flush()
                del self._detokenizers[sequence]
            sequence.text += text
        return OutputDelta(
            request.request_id, request.sequences.index(sequence), text, [token], sequence.logprobs[-1:],
            sequence.finish_reason, sequence.stop_reason,
        )  # fmt: skip


def request_output(request: Request, tokenizer: Tokenizer | None) -> RequestOutput:
    """A request as vLLM users know it."""

    def completion(index: int, sequence: Sequence) -> CompletionOutput:
        token_ids = sequence.output_token_ids
        logprobs = None
        if request.params.logprobs is not None:
            texts = [tokenizer.decode([t], skip_special_tokens=False) if tokenizer else None for t in token_ids]
            logprobs = [{t: Logprob(p, s)} for t, p, s in zip(token_ids, sequence.logprobs, texts)]
        return CompletionOutput(
            index,
            sequence.text,
            token_ids,
            sum(sequence.logprobs),
            logprobs,
            sequence.finish_reason,
            sequence.stop_reason,
        )

    outputs = [completion(i, sequence) for i, sequence in enumerate(request.sequences)]
    cached = sum(sequence.num_cached_tokens for sequence in request.sequences)
    return RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, outputs, cached)

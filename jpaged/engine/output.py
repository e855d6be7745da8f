"""Output of requests: deltas for streams, and whole results in vLLM's form."""

from collections.abc import Iterable

from jpaged.core.params import SamplingParams
from jpaged.core.plan import Sample
from jpaged.core.pooling import pooled
from jpaged.core.request import CompletionOutput, Logprob, OutputDelta, Request, RequestOutput, Sequence
from jpaged.tokenizer import Vocabulary


def whole_deltas(request: Request) -> list[OutputDelta]:
    """Return each output of a request that has ended, as one delta."""
    return [delta_of(each, index, each.text, each.samples) for index, each in enumerate(request.outputs)]


def delta_of(sequence: Sequence, index: int, text: str, samples: list[Sample]) -> OutputDelta:
    """Return an addition to one of the outputs of a request. The first one has the samples of the prompt."""
    request = sequence.request
    first = len(samples) == sequence.num_output_tokens and request.params.prompt_logprobs is not None
    return OutputDelta(
        request.request_id, index, text, samples, sequence.finish_reason, sequence.stop_reason,
        request.prompt_samples if first else None, sequence.num_cached_tokens, sequence.certificate,
        _pooled(request, sequence),
    )  # fmt: skip


def request_output(request: Request, vocabulary: Vocabulary | None) -> RequestOutput:
    """Return the outputs of a request in vLLM's form."""
    params, prompt_logprobs = request.params, None
    ranked = not (isinstance(params, SamplingParams) and params.logprob_token_ids)
    if params.prompt_logprobs is not None:
        prompt_logprobs = [None, *_logprobs(request.prompt_samples, vocabulary)]
    outputs, keeps = [], isinstance(params, SamplingParams) and params.kept_tokens
    for index, sequence in enumerate(request.outputs):
        logprobs = _logprobs(sequence.samples, vocabulary, ranked=ranked) if params.logprobs is not None else None
        output = CompletionOutput(
            index, sequence.text, sequence.output_token_ids, sequence.cumulative_logprob, logprobs,
            sequence.finish_reason, sequence.stop_reason, [sample.version for sample in sequence.samples],
            sequence.certificate, sequence.mixed_from, [each.kept for each in sequence.samples] if keeps else None,
            _pooled(request, sequence),
        )  # fmt: skip
        outputs.append(output)
    cached = max(sequence.num_cached_tokens for sequence in request.sequences)
    return RequestOutput(
        request.request_id, request.prompt, request.prompt_token_ids, outputs, cached, prompt_logprobs,
        metrics=request.metrics,
    )  # fmt: skip


def _pooled(request: Request, sequence: Sequence) -> list[float] | None:
    """Return the vector of the prompt, if requested; None also if an abort has ended the request before its token."""
    params = request.params
    if not (isinstance(params, SamplingParams) and params.pooling and sequence.samples):
        return None
    return pooled(params.pooling, sequence.samples[0].hidden, request.sums, len(request.prompt_token_ids))


def _logprobs(
    samples: Iterable[Sample], vocabulary: Vocabulary | None, *, ranked: bool = True
) -> list[dict[int, Logprob]]:
    """Return the logprobs of each sample by token: the chosen token first, then the listed ones.

    Args:
        ranked: whether the listed ones are the most likely, best first.
    """

    def text(token: int) -> str | None:
        return vocabulary.text(token) if vocabulary else None

    logprobs = []
    for sample in samples:
        by_token = {sample.token: Logprob(sample.logprob, sample.rank, text(sample.token))}
        for rank, (token, logprob) in enumerate(zip(sample.top_tokens, sample.top_logprobs), 1):
            by_token.setdefault(token, Logprob(logprob, rank if ranked else None, text(token)))
        logprobs.append(by_token)
    return logprobs

"""Responses with vectors and scores of prompts."""

import array
import math
import sys
from base64 import b64encode
from typing import Any

from jpaged.core.pooling import normalized
from jpaged.core.request import OutputDelta
from jpaged.serving.answer import Answer
from jpaged.serving.codec import JsonObject
from jpaged.serving.embeddings import EmbeddingsRequest, GenerativeScoringRequest, PromptsRequest, ScoreRequest

NUMBER_BYTES = 24  # of a number in JSON, at most


class PromptsAnswer[Body: PromptsRequest](Answer):
    """Answer with one result for each prompt."""

    object_name = "list"

    def __init__(self, request: Body, *args: Any):
        super().__init__(*args)
        self._request = request
        self._results: dict[int, list[float]] = {}

    @property
    def size(self) -> int:
        """Approximate bytes of the whole body."""
        return NUMBER_BYTES * sum(map(len, self._results.values()))

    def add(self, prompt: int, delta: OutputDelta) -> int:
        """Add a delta to its choice, and keep its result."""
        self._results[prompt] = self._result(delta)
        return super().add(prompt, delta)

    def _result(self, delta: OutputDelta) -> list[float]:
        raise NotImplementedError

    def _usage(self) -> JsonObject:
        return super()._usage() | {"completion_tokens": 0, "total_tokens": self._prompt_tokens}


class EmbeddingsAnswer(PromptsAnswer[EmbeddingsRequest]):
    """Answer of `/v1/embeddings`."""

    prefix = "embd-"

    def whole(self) -> JsonObject:
        """Return the body of a response."""
        data = [
            {"object": "embedding", "index": prompt, "embedding": self._shown(vector)}
            for prompt, vector in sorted(self._results.items())
        ]
        return {**self._head, "object": self.object_name, "data": data, "usage": self._usage()}

    def _result(self, delta: OutputDelta) -> list[float]:
        assert delta.pooled is not None, "a vector was requested"
        kept = self._request.dimensions
        return normalized(delta.pooled, kept) if self._request.use_activation else delta.pooled[:kept]

    def _shown(self, vector: list[float]) -> list[float] | str:
        if self._request.encoding_format == "float":
            return vector
        numbers = array.array("f", vector)
        if sys.byteorder == "big":
            numbers.byteswap()
        return b64encode(numbers.tobytes()).decode()


class ScoresAnswer(PromptsAnswer[ScoreRequest]):
    """Answer of `/v1/score` and `/generative_scoring`."""

    prefix = "score-"

    def whole(self) -> JsonObject:
        """Return the body of a response."""
        scores = [each for _, each in sorted(self._results.items())]
        if not isinstance(self._request, GenerativeScoringRequest):
            return {"scores": scores, "model": self._head["model"], "usage": self._usage(), "object": "scoring"}
        data = [{"index": index, "object": "score", "score": first} for index, (first, *_) in enumerate(scores)]
        return {**self._head, "object": self.object_name, "data": data, "usage": self._usage()}

    def _result(self, delta: OutputDelta) -> list[float]:
        (sample,) = delta.samples
        logprobs = dict(zip(sample.top_tokens, sample.top_logprobs, strict=True))
        chances = [math.exp(logprobs[label]) for label in self._request.label_token_ids]
        total = sum(chances) if self._request.apply_softmax else 1.0
        return [chance / total for chance in chances]

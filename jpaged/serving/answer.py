"""What goes back to the client: the bodies of both endpoints, whole and in chunks."""

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from jpaged.core.request import FinishReason, OutputDelta, Sample
from jpaged.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest

LEAST_LOGPROB = -9999.0  # JSON has no -inf; this is the API's word for a token that can't be


class Prompt(NamedTuple):
    """What the model is given of a prompt; `text` is None where only the tokens are known."""

    token_ids: list[int]
    text: str | None = None


class _Token(NamedTuple):
    """One token as text; `logprob` and `top`, the most likely ones, are None for the first token of a prompt."""

    text: str
    logprob: float | None = None
    top: list[tuple[str, float]] | None = None


@dataclass
class _Choice:
    """One choice: all of it so far, or, when streaming, what has not been sent yet."""

    text: str = ""
    tokens: list[_Token] = field(default_factory=list)
    offset: int = 0
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Answer:
    """Collects deltas into choices; subclasses give the two endpoints' forms.

    Choice i of prompt p is number p * n + i of the answer. Only choices that go back count as tokens of completion.
    """

    prefix = object_name = chunk_name = ""

    def __init__(self, model: str, tokenizer: Tokenizer, body: GenerationRequest, prompts: Sequence[Prompt]):
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.prompts = prompts
        self._completion_tokens = 0
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._num_choices = body.num_choices
        self._num_top = body.num_top_logprobs
        self._prompt_top = body.prompt_logprobs
        self._choices: dict[int, _Choice] = {}

    def add(self, prompt: int, delta: OutputDelta) -> int:
        """Takes a delta of a prompt into its choice; returns the choice's index."""
        index = prompt * self._num_choices + delta.index
        if index not in self._choices:
            self._choices[index] = self._opened(self.prompts[prompt], delta.prompt_samples or [])
        choice = self._choices[index]
        self._completion_tokens += len(delta.samples)
        choice.text += delta.text
        if self._num_top is not None:
            choice.tokens += [self._token(sample, self._num_top) for sample in delta.samples]
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        return index

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = [self._finished(i, choice) | self._end(choice) for i, choice in sorted(self._choices.items())]
        return {**self._head, "object": self.object_name, "choices": choices, "usage": self._usage()}

    def opening(self) -> Iterable[dict[str, Any]]:
        """Chunks that come before any text."""
        return ()

    def chunk(self, prompt: int, delta: OutputDelta) -> dict[str, Any] | None:
        """The chunk for a delta, or None while there is nothing to show."""
        index = self.add(prompt, delta)
        choice = self._choices[index]
        if not (choice.text or choice.tokens or choice.finish_reason):
            return None
        body = {**self._head, "object": self.chunk_name, "choices": [self._part(index, choice) | self._end(choice)]}
        choice.offset += sum(len(token.text) for token in choice.tokens)
        choice.text, choice.tokens = "", []
        return body

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage."""
        return {**self._head, "object": self.chunk_name, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        given, made = sum(len(prompt.token_ids) for prompt in self.prompts), self._completion_tokens
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}

    def _opened(self, prompt: Prompt, samples: Sequence[Sample]) -> _Choice:
        """A choice before any text, with what is known of its prompt's tokens but the first."""
        choice = _Choice()
        if self._prompt_top is not None:
            choice.prompt_logprobs = [None, *(self._logprobs_by_id(sample, self._prompt_top) for sample in samples)]
        return choice

    def _token(self, sample: Sample, num_top: int) -> _Token:
        top = [(self._text(token), _in_json(logprob)) for token, logprob in sample.top[:num_top]]
        return _Token(self._text(sample.token), _in_json(sample.logprob), top)

    def _logprobs_by_id(self, sample: Sample, num_top: int) -> dict[str, Any]:
        """As vLLM has them: the prompt's own token first, then the most likely ones."""
        ranked = {sample.token: (sample.logprob, sample.rank)}
        for rank, (token, logprob) in enumerate(sample.top[:num_top], 1):
            ranked.setdefault(token, (logprob, rank))
        return {
            str(token): {"logprob": _in_json(logprob), "rank": rank, "decoded_token": self._text(token)}
            for token, (logprob, rank) in ranked.items()
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _end(self, choice: _Choice) -> dict[str, Any]:
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _finished(self, index: int, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, index: int, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(Answer):
    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, body: CompletionRequest, prompts: Sequence[Prompt]):
        super().__init__(model, tokenizer, body, prompts)
        self._echo, self._only_echo = body.echo, body.only_echo
        self._skip_special_tokens = body.skip_special_tokens is not False

    def add(self, prompt: int, delta: OutputDelta) -> int:
        if self._only_echo:
            delta = replace(delta, text="", samples=[], finish_reason=FinishReason.LENGTH, stop_reason=None)
        return super().add(prompt, delta)

    def _opened(self, prompt: Prompt, samples: Sequence[Sample]) -> _Choice:
        choice = super()._opened(prompt, samples)
        if self._echo:
            choice.text = self._prompt_text(prompt)
            if self._num_top is not None:
                first = _Token(self._text(prompt.token_ids[0]))
                choice.tokens = [first, *(self._token(sample, self._num_top) for sample in samples)]
        return choice

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=self._skip_special_tokens)

    def _finished(self, index: int, choice: _Choice) -> dict[str, Any]:
        body = self._part(index, choice)
        return body if self._prompt_top is None else body | {"prompt_logprobs": choice.prompt_logprobs}

    def _part(self, index: int, choice: _Choice) -> dict[str, Any]:
        return {"index": index, "text": choice.text, "logprobs": self._token_logprobs(choice)}

    def _token_logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        offsets, at = [], choice.offset
        for token in choice.tokens:
            offsets.append(at)
            at += len(token.text)
        return {
            "tokens": [token.text for token in choice.tokens],
            "token_logprobs": [token.logprob for token in choice.tokens],
            "top_logprobs": [_by_text(token) for token in choice.tokens],
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: Tokenizer, body: ChatRequest, prompt: Prompt):
        super().__init__(model, tokenizer, body, [prompt])

    def whole(self) -> dict[str, Any]:
        body = super().whole()
        return body if self._prompt_top is None else body | {"prompt_logprobs": self._choices[0].prompt_logprobs}

    def opening(self) -> Iterable[dict[str, Any]]:
        for index in range(self._num_choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None} | self._end(_Choice())
            yield {**self._head, "object": self.chunk_name, "choices": [choice]}

    def _finished(self, index: int, choice: _Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text}
        return {"index": index, "message": message, "logprobs": self._token_logprobs(choice)}

    def _part(self, index: int, choice: _Choice) -> dict[str, Any]:
        return {"index": index, "delta": {"content": choice.text}, "logprobs": self._token_logprobs(choice)}

    def _token_logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        content = [
            _entry(token.text, token.logprob) | {"top_logprobs": [_entry(*other) for other in token.top or ()]}
            for token in choice.tokens
        ]
        return {"content": content}


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _by_text(token: _Token) -> dict[str, float | None] | None:
    """The token's own logprob, then the best ones; where two have one text, the first of them."""
    if token.top is None:
        return None
    logprobs = {token.text: token.logprob}
    for text, logprob in token.top:
        logprobs.setdefault(text, logprob)
    return logprobs


def _in_json(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)

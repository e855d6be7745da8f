"""What goes back to the client: the bodies of both endpoints, whole and in chunks."""

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from jpaged.core.request import OutputDelta


@dataclass
class _Choice:
    """One choice: all of it so far, or, when streaming, what has not been sent yet."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    offset: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Answer:
    """Collects deltas into choices; subclasses give the two endpoints' forms."""

    prefix = object_name = chunk_name = ""

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool):
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._choices: dict[int, _Choice] = {}

    def add(self, index: int, delta: OutputDelta) -> _Choice:
        """Takes a delta into its choice."""
        choice = self._choices.setdefault(index, _Choice())
        self.completion_tokens += len(delta.token_ids)
        choice.text += delta.text
        if self._logprobs:
            choice.tokens += [self._tokenizer.decode([t], skip_special_tokens=False) for t in delta.token_ids]
            choice.logprobs += delta.logprobs
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        return choice

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = [self._finished(i, choice) | self._end(choice) for i, choice in sorted(self._choices.items())]
        return {**self._head, "object": self.object_name, "choices": choices, "usage": self._usage()}

    def opening(self, count: int) -> Iterable[dict[str, Any]]:
        """Chunks that come before any text of `count` choices."""
        return ()

    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        """The chunk for a delta, or None while there is nothing to show."""
        choice = self.add(index, delta)
        if not (choice.text or choice.tokens or choice.finish_reason):
            return None
        body = {**self._head, "object": self.chunk_name, "choices": [self._part(index, choice) | self._end(choice)]}
        choice.offset += sum(map(len, choice.tokens))
        choice.text, choice.tokens, choice.logprobs = "", [], []
        return body

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage."""
        return {**self._head, "object": self.chunk_name, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}

    def _end(self, choice: _Choice) -> dict[str, Any]:
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _finished(self, index: int, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, index: int, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(Answer):
    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def _finished(self, index: int, choice: _Choice) -> dict[str, Any]:
        return {"index": index, "text": choice.text, "logprobs": self._token_logprobs(choice)}

    _part = _finished

    def _token_logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        offsets, at = [], choice.offset
        for token in choice.tokens:
            offsets.append(at)
            at += len(token)
        top = [{token: logprob} for token, logprob in zip(choice.tokens, choice.logprobs)]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return dict(zip(names, (choice.tokens, choice.logprobs, top, offsets)))


class ChatAnswer(Answer):
    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, count: int) -> Iterable[dict[str, Any]]:
        for index in range(count):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None} | self._end(_Choice())
            yield {**self._head, "object": self.chunk_name, "choices": [choice]}

    def _finished(self, index: int, choice: _Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text}
        return {"index": index, "message": message, "logprobs": self._token_logprobs(choice)}

    def _part(self, index: int, choice: _Choice) -> dict[str, Any]:
        return {"index": index, "delta": {"content": choice.text}, "logprobs": self._token_logprobs(choice)}

    def _token_logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(choice.tokens, choice.logprobs)
        ]
        return {"content": content}

"""Responses to the client: the bodies of completions and chats, complete and in chunks."""

import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jpaged.core.certificate import Certificate
from jpaged.core.plan import Sample
from jpaged.core.request import FinishReason, OutputDelta
from jpaged.serving.codec import JsonObject
from jpaged.serving.dialect import CHATS, Dialect
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from jpaged.serving.reasoning_parsers.parser import ReasoningParser
from jpaged.serving.tool_parsers.calls import ToolCallDelta
from jpaged.serving.tool_parsers.parser import ToolParser
from jpaged.tokenizer import TokenDecoder, Vocabulary

LEAST_LOGPROB = -9999.0  # stands for -inf, which JSON does not have, as in OpenAI's API
VOCABULARY = 2**17  # approximate number of entries in a list of all tokens
NEARBY = 16  # characters in which a prompt's token is searched if the tokenizer has changed the prompt's text

type NewParser = Callable[[], ToolParser] | None
type NewReasoningParser = Callable[[], ReasoningParser] | None


class Prompt(NamedTuple):
    """Prompt as the model gets it; `text` is None if only the tokens are known."""

    token_ids: list[int]
    text: str | None = None


class _Token(NamedTuple):
    """Token with its offset in the text. The first token of a prompt has no sample."""

    token: int
    offset: int
    sample: Sample | None = None

    @property
    def logprob(self) -> float | None:
        return None if self.sample is None else _in_json(self.sample.logprob)


@dataclass
class Choice:
    """One choice: all of it so far or, when streaming, the part that has not been sent yet.

    Attributes:
        decoder: decodes new tokens, whose offsets follow from the texts; None if offsets are not returned.
        length: characters of the decoded text. A character of several tokens counts when the last of them is there.
        parser: finds tool calls in the text; None without tools.
        reasoning_parser: finds reasoning in front of the text; None if it is part of the text.
    """

    text: str = ""
    tokens: list[_Token] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    kept_tokens: list[str] = field(default_factory=list)
    calls: dict[int, ToolCallDelta] = field(default_factory=dict)
    decoder: TokenDecoder | None = None
    length: int = 0
    prompt_logprobs: list[JsonObject | None] | None = None
    parser: ToolParser | None = None
    reasoning: str = ""
    reasoning_parser: ReasoningParser | None = None
    opened: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    certificate: Certificate | None = None


class Answer:
    """Collector of deltas into choices; subclasses implement the forms of the endpoints.

    Choice i of prompt p is number p * n + i of the answer. Only returned choices count as completion tokens.
    """

    prefix = object_name = chunk_name = ""
    dialect: Dialect = CHATS

    def __init__(self, model: str, vocabulary: Vocabulary, body: GenerationRequest, prompts: Sequence[Prompt]):
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self.prompts = prompts
        self._completion_tokens = self._reasoning_tokens = 0
        self._shows_reasoning = True
        self._cached_tokens = [0] * len(prompts)
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._vocabulary = vocabulary
        self._names = Vocabulary(None) if body.return_tokens_as_token_ids else vocabulary  # of tokens in logprobs
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._options = body.stream_options or StreamOptions()
        self._num_choices = body.num_choices
        self._num_top = body.num_top_logprobs if body.logprob_token_ids is None else len(body.logprob_token_ids)
        self._prompt_top = body.prompt_logprobs
        self._with_ids, self._with_kept = bool(body.return_token_ids), bool(body.kept_tokens)
        self._choices: dict[int, Choice] = {}

    def add(self, prompt: int, delta: OutputDelta) -> int:
        """Add a delta to its choice and return the choice's index."""
        index = prompt * self._num_choices + delta.index
        if index not in self._choices:
            self._choices[index] = self._opened(self.prompts[prompt], delta.prompt_samples or [])
        choice = self._choices[index]
        self._completion_tokens += len(delta.samples)
        self._cached_tokens[prompt] = delta.num_cached_tokens
        for sample in delta.samples if self._num_top is not None else ():
            text = choice.decoder.step(sample.token) if choice.decoder else ""
            start = choice.length + _bytes_before(text, self._vocabulary.text(sample.token))
            choice.tokens.append(_Token(sample.token, start, sample))
            choice.length += len(text)
        if choice.reasoning_parser is None:
            self._add_text(choice, delta)
        else:
            self._add_parts(choice, choice.reasoning_parser, delta)
        if self._with_ids:
            choice.token_ids += delta.token_ids
        if self._with_kept:
            choice.kept_tokens += [b64encode(sample.kept).decode() for sample in delta.samples]
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        choice.certificate = delta.certificate
        return index

    def whole(self) -> JsonObject:
        """Return the body of a response without streaming."""
        choices = [
            self._finished(i, c) | self._end(c) | {"token_ids": None} | self._ids(i, c)
            for i, c in sorted(self._choices.items())
        ]
        unused = dict.fromkeys(("service_tier", "system_fingerprint", "kv_transfer_params"))
        return {**self._head, "object": self.object_name, "choices": choices, "usage": self._usage(), **unused}

    @property
    def size(self) -> int:
        """Approximate bytes of the whole body."""
        counts = self._num_top or 0, self._prompt_top or 0
        entries = 1 + (VOCABULARY if -1 in counts else max(counts))
        kept = VOCABULARY // 6 if self._with_kept else 0  # a bit of each token, in base64
        return 64 * entries * (self._completion_tokens + self._prompt_tokens) + kept * self._completion_tokens

    def opening(self) -> Iterable[JsonObject]:
        """Return the chunks that precede any text."""
        return ()

    def chunk(self, index: int) -> JsonObject | None:
        """Return the additions to a choice since its last chunk, or None if there are none to show."""
        choice = self._choices[index]
        has_text = choice.text or choice.reasoning or choice.calls
        if not (has_text or choice.tokens or choice.token_ids or choice.finish_reason):
            return None
        part = self._part(index, choice) | self._ids(index, choice) | self._end(choice)
        choice.text, choice.tokens, choice.token_ids, choice.calls, choice.opened = "", [], [], {}, True
        choice.reasoning, choice.kept_tokens = "", []
        return self._chunk(part)

    def events(self, index: int) -> Iterable[JsonObject]:
        """Return the events about a choice since its last ones."""
        return () if (chunk := self.chunk(index)) is None else (chunk,)

    def closing(self) -> Iterable[JsonObject]:
        """Return the events that follow the end of all choices."""
        if self._options.include_usage:
            yield {**self._head, "object": self.chunk_name, "choices": [], "usage": self._usage()}

    def stream_end(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails."""
        return self.dialect.stream_end(error)

    def record(self) -> JsonObject:
        """Return the fields for the log."""
        usage = self._usage()
        reasons = [choice.finish_reason and str(choice.finish_reason) for choice in self._choices.values()]
        counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        return {"id": self.id, **counts, "cached_tokens": sum(self._cached_tokens), "finish_reasons": reasons}

    def _usage(self) -> JsonObject:
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._completion_tokens}
        details = {"cached_tokens": sum(self._cached_tokens)}
        return counts | {"total_tokens": sum(counts.values()), "prompt_tokens_details": details}

    def _chunk(self, choice: JsonObject) -> JsonObject:
        """Return a chunk of one choice.

        Its usage is that of the response so far; it is null if only the last chunk of the stream has a usage.
        """
        chunk = {**self._head, "object": self.chunk_name, "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _add_parts(self, choice: Choice, parser: ReasoningParser, delta: OutputDelta) -> None:
        """Add the reasoning of a delta and the rest of its text, in the order of the output."""
        pieces = parser.feed(delta.text, is_last=delta.finish_reason is not None)
        if parser.is_reasoning or any(piece.is_reasoning for piece in pieces):
            self._reasoning_tokens += len(delta.samples)
        for piece in pieces:
            if not piece.is_reasoning:
                self._add_text(choice, delta._replace(text=piece.text, finish_reason=None))
            elif self._shows_reasoning:
                self._add_reasoning(choice, piece.text)
        if delta.finish_reason:
            self._add_text(choice, delta._replace(text=""))

    def _add_reasoning(self, choice: Choice, text: str) -> None:
        choice.reasoning += text

    def _add_text(self, choice: Choice, delta: OutputDelta) -> None:
        if choice.parser is None:
            choice.text += delta.text
            return
        parts = [choice.parser.feed(delta.text)]
        if delta.finish_reason:
            parts.append(choice.parser.finish())
        for part in parts:
            choice.text += part.content
            for call in part.calls:  # one addition to each call in a chunk: some clients read only the first
                if call.index in choice.calls:
                    choice.calls[call.index].arguments += call.arguments
                else:
                    choice.calls[call.index] = call

    def _ids(self, index: int, choice: Choice) -> JsonObject:
        return {"token_ids": choice.token_ids} if self._with_ids else {}

    def _opened(self, prompt: Prompt, samples: Sequence[Sample]) -> Choice:
        """Return a choice before any text, with the logprobs of its prompt's tokens except the first."""
        choice = Choice()
        if self._prompt_top is not None:
            choice.prompt_logprobs = [None, *(self._logprobs_by_id(sample, self._prompt_top) for sample in samples)]
        return choice

    def _logprobs_by_id(self, sample: Sample, num_top: int) -> JsonObject:
        """Return logprobs in vLLM's form: the prompt's own token first, then the most likely ones."""
        ranked = {sample.token: (sample.logprob, sample.rank)}
        for rank, (token, logprob) in enumerate(_top(sample, num_top), 1):
            ranked.setdefault(token, (logprob, rank))
        return {
            str(token): {"logprob": _in_json(logprob), "rank": rank, "decoded_token": self._vocabulary.text(token)}
            for token, (logprob, rank) in ranked.items()
        }

    def _end(self, choice: Choice) -> JsonObject:
        end: JsonObject = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        kept: JsonObject = {"kept_tokens": choice.kept_tokens} if self._with_kept else {}
        return end | kept | ({"certificate": choice.certificate.as_json()} if choice.certificate else {})

    def _finished(self, index: int, choice: Choice) -> JsonObject:
        raise NotImplementedError

    def _part(self, index: int, choice: Choice) -> JsonObject:
        raise NotImplementedError


class CompletionAnswer(Answer):
    """Answer of `/v1/completions`."""

    prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def __init__(self, model: str, vocabulary: Vocabulary, body: CompletionRequest, prompts: Sequence[Prompt]):
        super().__init__(model, vocabulary, body, prompts)
        self._echo, self._only_echo = body.echo, body.only_echo
        self._skip_special_tokens = body.skip_special_tokens is not False

    def add(self, prompt: int, delta: OutputDelta) -> int:
        """Add a delta to its choice and return the choice's index; a prompt that is only echoed gets no text."""
        if self._only_echo:
            delta = delta._replace(text="", samples=[], certificate=None)
            delta = delta._replace(finish_reason=FinishReason.LENGTH, stop_reason=None)
        return super().add(prompt, delta)

    def _opened(self, prompt: Prompt, samples: Sequence[Sample]) -> Choice:
        choice = super()._opened(prompt, samples)
        if self._echo:
            if (text := prompt.text) is None and (tokenizer := self._vocabulary.tokenizer):
                text = tokenizer.decode(prompt.token_ids, skip_special_tokens=self._skip_special_tokens)
            choice.text = text or ""
            if self._num_top is not None:
                skips = self._skip_special_tokens or prompt.text is not None
                offsets = _offsets(choice.text, prompt.token_ids, self._vocabulary, skips)
                choice.tokens = list(map(_Token, prompt.token_ids, offsets, [None, *samples]))
                choice.length = len(choice.text)
        choice.decoder = TokenDecoder(self._vocabulary, prompt.token_ids, skip_special_tokens=self._skip_special_tokens)
        return choice

    def _ids(self, index: int, choice: Choice) -> JsonObject:
        """Return the token ids of a chunk; a choice's first chunk includes the prompt's."""
        ids = super()._ids(index, choice)
        prompt = None if choice.opened else self.prompts[index // self._num_choices].token_ids
        return ids and ids | {"prompt_token_ids": prompt}

    def _finished(self, index: int, choice: Choice) -> JsonObject:
        return self._part(index, choice) | {"prompt_logprobs": choice.prompt_logprobs, "prompt_token_ids": None}

    def _part(self, index: int, choice: Choice) -> JsonObject:
        return {"index": index, "text": choice.text, "logprobs": self._token_logprobs(choice)}

    def _token_logprobs(self, choice: Choice) -> JsonObject | None:
        if self._num_top is None:
            return None
        return {
            "tokens": [self._names.text(token.token) for token in choice.tokens],
            "token_logprobs": [token.logprob for token in choice.tokens],
            "top_logprobs": [self._by_text(token) for token in choice.tokens],
            "text_offset": [token.offset for token in choice.tokens],
        }

    def _by_text(self, token: _Token) -> dict[str, float | None] | None:
        """Return the token's own logprob, then the best ones; of tokens with equal text, only the first."""
        if token.sample is None:
            return None
        texts = self._names.texts
        logprobs = {texts[token.token]: token.logprob}
        # A hot loop, so without calls: 20 entries for each token of each stream.
        for other, logprob in _top(token.sample, self._num_top):
            if (text := texts[other]) not in logprobs:
                logprobs[text] = LEAST_LOGPROB if logprob < LEAST_LOGPROB else logprob
        return logprobs


class ChatAnswer(Answer):
    """Answer of `/v1/chat/completions`."""

    prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, vocabulary: Vocabulary, body: ChatRequest, prompt: Prompt, new_parser: NewParser,
        new_reasoning_parser: NewReasoningParser = None,
    ):  # fmt: skip
        super().__init__(model, vocabulary, body, [prompt])
        self._new_parser, self._new_reasoning_parser = new_parser, new_reasoning_parser
        self._names_tool = body.names_tool
        self._shows_reasoning = body.include_reasoning is not False
        self._role = body.answer_role
        self._echo = body.messages[-1].text if body.echo and body.messages[-1].role == self._role else ""

    def whole(self) -> JsonObject:
        """Return the body of a response without streaming."""
        prompt = {"prompt_token_ids": None, "prompt_logprobs": self._choices[0].prompt_logprobs}
        return super().whole() | prompt | self._prompt_ids()

    def opening(self) -> Iterable[JsonObject]:
        """Yield a chunk with the role for each choice."""
        for index in range(self._num_choices):
            delta = {"role": self._role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None} | self._end(Choice())
            yield self._chunk(choice) | self._prompt_ids()

    def _prompt_ids(self) -> JsonObject:
        return {"prompt_token_ids": self.prompts[0].token_ids} if self._with_ids else {}

    def _opened(self, prompt: Prompt, samples: Sequence[Sample]) -> Choice:
        choice = super()._opened(prompt, samples)
        choice.parser = self._new_parser and self._new_parser()
        choice.reasoning_parser = self._new_reasoning_parser and self._new_reasoning_parser()
        choice.text = self._echo
        return choice

    def _usage(self) -> JsonObject:
        if self._new_reasoning_parser is None:
            return super()._usage()
        return super()._usage() | {"completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens}}

    def _end(self, choice: Choice) -> JsonObject:
        end = super()._end(choice)
        # With a `tool_choice` that names the function, `finish_reason` is "stop", as in OpenAI's API.
        called = choice.parser is not None and choice.parser.called and not self._names_tool
        return end | {"finish_reason": "tool_calls"} if called and end["finish_reason"] == FinishReason.STOP else end

    def _finished(self, index: int, choice: Choice) -> JsonObject:
        unused = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        message: JsonObject = {"role": self._role, "content": choice.text, **unused}
        message |= _reasoning_fields(choice.reasoning)
        if choice.calls:
            calls = [_call(call) for call in choice.calls.values()]
            message |= {"content": choice.text or None, "tool_calls": calls}
        return {"index": index, "message": message, "logprobs": self._token_logprobs(choice)}

    def _part(self, index: int, choice: Choice) -> JsonObject:
        delta: JsonObject = {"content": choice.text} if choice.text else {}
        if choice.reasoning:
            delta |= _reasoning_fields(choice.reasoning)
        if choice.calls:
            delta["tool_calls"] = [{"index": index} | _call(call) for index, call in choice.calls.items()]
        return {"index": index, "delta": delta, "logprobs": self._token_logprobs(choice)}

    def _token_logprobs(self, choice: Choice) -> JsonObject | None:
        if self._num_top is None:
            return None
        content = [
            self._entry(sample.token, sample.logprob)
            | {"top_logprobs": [self._entry(*other) for other in _top(sample, self._num_top)]}
            for sample in (token.sample for token in choice.tokens)
            if sample is not None
        ]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> JsonObject:
        text, data = self._names.text(token), self._vocabulary.bytes(token)
        return {"token": text, "logprob": _in_json(logprob), "bytes": list(data)}


def _reasoning_fields(reasoning: str) -> JsonObject:
    """Return reasoning under both of the names that clients read."""
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}


def _offsets(text: str, tokens: Sequence[int], vocabulary: Vocabulary, skip_special_tokens: bool) -> list[int]:
    """Return the offset of each token of a prompt in the prompt's text.

    The text may contain special tokens, although `skip_special_tokens` leaves them out of other texts. The tokenizer
    may have added a space to the text, or changed it.
    """
    decoder, end, offsets = TokenDecoder(vocabulary, [], skip_special_tokens=skip_special_tokens), 0, []
    for token in tokens:
        spelling, piece, start = vocabulary.text(token), decoder.step(token), end
        if token in vocabulary.special and text.startswith(spelling, end):
            piece = spelling
        elif not text.startswith(piece, end):
            if piece[0] == " " and text.startswith(piece[1:], end):
                piece = piece[1:]
            else:
                start = max(end, text.find(piece, end, end + len(piece) + NEARBY))
        offsets.append(min(start + _bytes_before(piece, spelling), len(text)))
        end = min(start + len(piece), len(text))
    return offsets


def _bytes_before(piece: str, spelling: str) -> int:
    """Return the characters of a decoded piece before the text of its last token: bytes of earlier, cut-off tokens."""
    return len(piece) - len(spelling) if piece.endswith(spelling) else 0


def _call(call: ToolCallDelta) -> JsonObject:
    """Return an addition to a call in the API's form; only the first one has the id, the type and the name."""
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _top(sample: Sample, count: int | None) -> Iterator[tuple[int, float]]:
    """Return the first `count` of a sample's most likely tokens with their logprobs; -1: all of them."""
    end = None if count == -1 else count
    return zip(sample.top_tokens[:end], sample.top_logprobs[:end])


def _in_json(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)

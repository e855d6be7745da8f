"""Answer of `/v1/messages`: a message with blocks, or their events."""

from collections.abc import Iterable
from typing import Any

from jpaged.core.request import FinishReason
from jpaged.serving import dialect
from jpaged.serving.codec import JsonObject, loads
from jpaged.serving.messages import MessagesRequest
from jpaged.serving.parts import Part, PartsAnswer


class MessagesAnswer(PartsAnswer):
    """Message with a block for the reasoning, for each text and for each call."""

    prefix = "msg_"
    dialect = dialect.MESSAGES

    def __init__(self, request: MessagesRequest, *args: Any):
        super().__init__(*args)
        self._stop_sequences = request.stop_sequences or []

    def whole(self) -> JsonObject:
        """Return the body of a response without streaming."""
        return self._message([_block(part) for part in self.parts], self._stop(), self._message_usage())

    def opening(self) -> Iterable[JsonObject]:
        """Yield the event that precedes any block. Whether the prompt is cached is known only later."""
        stop = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": self._message([], stop, self._message_usage())}

    def closing(self) -> Iterable[JsonObject]:
        """Yield the events that follow the last block."""
        yield {"type": "message_delta", "delta": self._stop(), "usage": self._message_usage()}
        yield {"type": "message_stop"}

    def _message(self, content: list[JsonObject], stop: JsonObject, usage: JsonObject) -> JsonObject:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._head["model"]}
        return {**head, "content": content, **stop, "usage": usage}

    def _stop(self) -> JsonObject:
        reason, text = self.ending
        if reason != FinishReason.STOP:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(text, str) and text in self._stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": text}
        called = any(part.call_id is not None for part in self.parts)
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    def _message_usage(self) -> JsonObject:
        usage = self._usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def _begun(self, part: Part) -> Iterable[JsonObject]:
        block = _block(part)
        return [{"type": "content_block_start", "index": len(self.parts) - 1, "content_block": block}]

    def _grown(self, part: Part, text: str) -> Iterable[JsonObject]:
        delta = {"type": "text_delta", "text": text}
        if part.is_reasoning:
            delta = {"type": "thinking_delta", "thinking": text}
        if part.call_id is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        return [{"type": "content_block_delta", "index": len(self.parts) - 1, "delta": delta}]

    def _ended(self, part: Part) -> Iterable[JsonObject]:
        return [{"type": "content_block_stop", "index": len(self.parts) - 1}]


def _block(part: Part) -> JsonObject:
    if part.is_reasoning:
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.call_id is None:
        return {"type": "text", "text": part.text}
    call_id = f"toolu_{part.call_id.removeprefix('call_')}"
    return {"type": "tool_use", "id": call_id, "name": part.name, "input": _arguments(part.text)}


def _arguments(text: str) -> JsonObject:
    """Return arguments as Anthropic's client reads them from a stream, also if they are cut off."""
    try:
        arguments = loads(text, may_be_cut=True) if text else {}
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}

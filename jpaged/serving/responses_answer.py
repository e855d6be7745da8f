"""Answer of `/v1/responses`: a response with items, or their events."""

import uuid
from collections.abc import Iterable
from typing import Any

from jpaged.core.request import FinishReason
from jpaged.serving import dialect
from jpaged.serving.codec import JsonObject
from jpaged.serving.errors import ApiError
from jpaged.serving.parts import Part, PartsAnswer
from jpaged.serving.responses import ReasoningConfig, ResponsesRequest, TextConfig


class ResponsesAnswer(PartsAnswer):
    """Response with an item for the reasoning, a message for each text, and an item for each call."""

    prefix = "resp_"
    dialect = dialect.RESPONSES
    needs_part = True  # a loop of an agent ends with a message

    def __init__(self, request: ResponsesRequest, *args: Any):
        super().__init__(*args)
        self._request, self._function_names = request, request.names
        self._item_ids: list[str] = []  # of the items
        self._num_events = 0

    def whole(self) -> JsonObject:
        """Return the body of a response without streaming."""
        return self._finished_response()

    def opening(self) -> Iterable[JsonObject]:
        """Yield the events that precede any item."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def closing(self) -> Iterable[JsonObject]:
        """Yield the event with the whole response."""
        response = self._finished_response()
        yield self._event(f"response.{response['status']}", response=response)

    def stream_end(self, error: ApiError) -> bytes:
        """Return the event with a response that has failed."""
        if self.parts:
            self.parts[-1].cut_off = True
        failed = self._response("failed") | {"error": {"code": error.code, "message": error.message}}
        return self.dialect.frames([self._event("response.failed", response=failed)])

    def _finished_response(self) -> JsonObject:
        reason, _ = self.ending
        if reason == FinishReason.STOP:
            return self._response("completed")
        why = "max_output_tokens" if reason == FinishReason.LENGTH else str(reason)
        return self._response("incomplete") | {"incomplete_details": {"reason": why}}

    def _response(self, status: str) -> JsonObject:
        request, text = self._request, self._request.text or TextConfig()
        form = text.format.model_dump(by_alias=True) if text.format else {"type": "text"}
        choice = request.tool_choice or "auto"
        reasoning = request.reasoning or ReasoningConfig()
        is_over = status != "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._head["model"],
            "output": [self._item(number) for number in range(len(self.parts))] if is_over else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": form, "verbosity": text.verbosity},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in request.served_tools],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": self._response_usage() if is_over else None,
            "user": request.user,
        }

    def _response_usage(self) -> JsonObject:
        usage = self._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _event(self, kind: str, /, **fields: Any) -> JsonObject:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _item(self, number: int) -> JsonObject:
        """Return an item that has ended."""
        part = self.parts[number]
        status = "incomplete" if part.cut_off else "completed"
        if part.call_id is not None:
            return self._call(part, number, status)
        return self._text_item(part, number, status, [_content(part, part.text)])

    def _text_item(self, part: Part, number: int, status: str, content: list[JsonObject]) -> JsonObject:
        if part.is_reasoning:
            kind: JsonObject = {"type": "reasoning", "status": status, "summary": []}
        else:
            kind = {"type": "message", "status": status, "role": "assistant"}
        return {"id": self._item_ids[number], **kind, "content": content}

    def _call(self, part: Part, number: int, status: str) -> JsonObject:
        fields = {"type": "function_call", "status": status, "call_id": part.call_id}
        namespace, name = self._name(part)
        space = {} if namespace is None else {"namespace": namespace}
        return {"id": self._item_ids[number], **fields, **space, "name": name, "arguments": part.text}

    def _name(self, part: Part) -> tuple[str | None, str | None]:
        """Return the namespace and the name of a call's function."""
        return self._function_names.get(part.name or "", (None, part.name))

    def _begun(self, part: Part) -> Iterable[JsonObject]:
        prefix = "rs" if part.is_reasoning else "msg" if part.call_id is None else "fc"
        self._item_ids.append(f"{prefix}_{uuid.uuid4().hex}")
        number, name = len(self._item_ids) - 1, "response.output_item.added"
        if part.call_id is not None:
            return [self._event(name, output_index=number, item=self._call(part, number, "in_progress"))]
        added = self._event(name, output_index=number, item=self._text_item(part, number, "in_progress", []))
        return [added, self._text_event("response.content_part.added", part=_content(part, ""))]

    def _grown(self, part: Part, text: str) -> Iterable[JsonObject]:
        if part.call_id is not None:
            return [self._item_event("response.function_call_arguments.delta", delta=text)]
        if part.is_reasoning:
            return [self._text_event("response.reasoning_text.delta", delta=text)]
        return [self._text_event("response.output_text.delta", delta=text, logprobs=part.new_logprobs)]

    def _ended(self, part: Part) -> Iterable[JsonObject]:
        number = len(self._item_ids) - 1
        if part.call_id is not None:
            whole = {"name": self._name(part)[1], "arguments": part.text}
            events = [self._item_event("response.function_call_arguments.done", **whole)]
        else:
            name = "reasoning_text" if part.is_reasoning else "output_text"
            logprobs: JsonObject = {} if part.is_reasoning else {"logprobs": part.logprobs}
            events = [
                self._text_event(f"response.{name}.done", text=part.text, **logprobs),
                self._text_event("response.content_part.done", part=_content(part, part.text)),
            ]
        return [*events, self._event("response.output_item.done", output_index=number, item=self._item(number))]

    def _item_event(self, kind: str, /, **fields: Any) -> JsonObject:
        """Return an event about the last item."""
        return self._event(kind, item_id=self._item_ids[-1], output_index=len(self._item_ids) - 1, **fields)

    def _text_event(self, kind: str, /, **fields: Any) -> JsonObject:
        """Return an event about the text of the last item."""
        return self._item_event(kind, content_index=0, **fields)


def _content(part: Part, text: str) -> JsonObject:
    """Return the content of an item of a text or of reasoning."""
    if part.is_reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": part.logprobs if text else []}

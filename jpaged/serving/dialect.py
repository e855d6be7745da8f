"""Forms of errors and event streams in the APIs of the server."""

import re
from collections.abc import Iterable

from jpaged.serving.codec import JsonObject, dumps
from jpaged.serving.errors import NO_THREADS, ApiError

# Types in Anthropic's API of errors, by their HTTP status.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}

# The numbers of an error about the context: its length, and the requested one.
LENGTHS = re.compile(r"context length is (\d+) tokens.* requested (\d+) tokens")


class Dialect:
    """Form of OpenAI's completions and chats: unnamed events, of which the last is `[DONE]`.

    Attributes:
        error_schema: name of the schema of errors in the OpenAPI document.
        id_headers: headers of a response with the request's id.
        end: last bytes of every stream.
    """

    error_schema = "Error"
    id_headers: tuple[str, ...] = ("X-Request-Id",)
    end = b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> JsonObject:
        """Return the body of a response with an error."""
        return error.body

    def frames(self, events: Iterable[JsonObject]) -> bytes:
        """Return events as they are sent."""
        return b"".join([b"data: %b\n\n" % dumps(event) for event in events])

    def stream_end(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails: an event with the error, because it is too late for a status."""
        return self.frames([self.error(error)]) + self.end


class NamedEvents(Dialect):
    """Form with events that have their type as a name, as in OpenAI's Responses API. The last one ends the stream."""

    end = b""

    def frames(self, events: Iterable[JsonObject]) -> bytes:
        """Return events as they are sent, each with its name."""
        return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dumps(event)) for event in events)

    def stream_end(self, error: ApiError) -> bytes:
        """Return the end of a stream whose answer is unknown; answers have one with the number of the event."""
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self.frames([{"type": "error", **fields}])


class Anthropic(NamedEvents):
    """Form of Anthropic's API. Errors also have the field and the code of OpenAI's form."""

    error_schema = "AnthropicError"
    id_headers = ("X-Request-Id", "request-id")

    def error(self, error: ApiError) -> JsonObject:
        """Return the body of a response with an error."""
        kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        message = error.message
        if error.code == "context_length_exceeded":
            # After these words agents shorten their history, by the difference of the numbers.
            lengths = LENGTHS.search(message)
            numbers = f"{lengths[2]} tokens > {lengths[1]} maximum: " if lengths else ""
            message = f"prompt is too long: {numbers}{message}"
        details = {"details": {"error_code": error.code}} if error.code == NO_THREADS else {}
        return {
            "type": "error",
            "error": {"type": kind, "message": message, "param": error.param, "code": error.code} | details,
        }

    def stream_end(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails."""
        return self.frames([self.error(error)])


CHATS, RESPONSES, MESSAGES = Dialect(), NamedEvents(), Anthropic()

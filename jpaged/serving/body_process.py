"""Processes that check the JSON of large bodies.

Parsing a mebibyte that holds no valid request takes up to 20 ms with the GIL, for which every step would wait.
"""

import os

from pydantic import BaseModel

from jpaged.child import ChildFailed, Children, confine, serve
from jpaged.serving import embeddings, messages, protocol, responses
from jpaged.serving.codec import dumps
from jpaged.serving.errors import ApiError
from jpaged.serving.parse import parse

TIMEOUT_S = 30.0
MAX_MEMORY_BYTES = 8 * 2**30
NICENESS = 10  # steps have the processor first
KINDS = vars(protocol) | vars(responses) | vars(messages) | vars(embeddings)  # the classes of bodies by their names

type Fault = tuple[int, str, str | None, str]


class BodyProcess:
    """Handle of the processes in their parent. They start with the first large bodies, one for each caller."""

    def __init__(self) -> None:
        self._children = Children("jpaged.serving.body_process", None)

    def text_length(self, kind: type[BaseModel], data: bytes, ignore_unknown: bool) -> tuple[int, str]:
        """Return the `text_length` of a body, whose kind is one of KINDS, and the field with the text.

        The length is 0 if the process fails.

        Raises:
            ApiError: 400, as `parse`.
        """
        question = dumps([kind.__name__, data.decode("latin-1"), ignore_unknown]).decode()
        try:
            length, field, fault = self._children.ask(question, TIMEOUT_S)
        except ChildFailed:
            return 0, ""
        if fault is not None:
            status, message, param, code = fault
            raise ApiError(status, message, param, code=code)
        return length, field


def _answer(question: tuple[str, str, bool]) -> tuple[int, str, Fault | None]:
    kind, data, ignore_unknown = question
    try:
        body = parse(KINDS[kind], data.encode("latin-1"), ignore_unknown=ignore_unknown)
    except ApiError as error:
        return 0, "", (error.status, error.message, error.param, error.code)
    return getattr(body, "text_length", 0), getattr(body, "text_field", "prompt"), None


if __name__ == "__main__":
    os.nice(NICENESS)
    confine(MAX_MEMORY_BYTES)
    serve(lambda _: _answer)

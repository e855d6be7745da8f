"""Processes that render chat templates.

A template of forty bytes, of a request or of a checkpoint, can fill the memory or loop forever.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.chat import Template, render
from jpaged.child import ChildFailed, Children, confine, serve
from jpaged.serving.codec import dumps

RENDER_TIMEOUT_S = 5.0
MAX_MEMORY_BYTES = 2 * 2**30


class TemplateProcess:
    """Handle of the processes in their parent. They start with the first conversations, one for each caller."""

    def __init__(self) -> None:
        self._children = Children("jpaged.serving.template_process", None)
        self._slow: deque[int] = deque(maxlen=256)  # hashes of questions that took too long

    def start(self) -> None:
        """Start a process before the first conversation, without waiting for it."""
        self._children.start()

    def render(
        self, template: Template, messages: Sequence[Mapping[str, Any]], max_characters: int, **options: Any
    ) -> tuple[str, int]:
        """Return the text of a conversation up to `max_characters`, and its length, with the options of `chat.render`.

        Raises:
            ValueError: the template rejects the conversation, or takes too much time.
        """
        question = dumps([template, messages, max_characters, options]).decode()
        late = f"the chat template was not rendered within {RENDER_TIMEOUT_S:g} seconds"
        if self._slow and hash(question) in self._slow:
            raise ValueError(late)
        try:
            text, length, fault = self._children.ask(question, RENDER_TIMEOUT_S)
        except ChildFailed:
            self._slow.append(hash(question))
            raise ValueError(late) from None
        if fault is not None:
            raise ValueError(fault)
        return text, length


def _answer(question: list[Any]) -> tuple[str, int, str | None]:
    template, messages, max_characters, options = question
    try:
        text = render(Template(*template), messages, **options)
    except ValueError as error:
        return "", 0, str(error)
    return text[:max_characters], len(text), None


if __name__ == "__main__":
    confine(MAX_MEMORY_BYTES)
    render(Template("", {}), [{"role": "user", "content": ""}])  # imports transformers
    serve(lambda _: _answer)

"""Process that renders the chat templates of requests.

A template of forty bytes can fill the memory or loop forever.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jpaged.child import Child, ChildFailed, confine, serve

RENDER_TIMEOUT_S = 5.0
MAX_MEMORY_BYTES = 2 * 2**30
# Parameters of render_jinja_template.
OPTIONS = {
    "conversations", "tools", "documents", "chat_template", "return_assistant_tokens_mask", "continue_final_message",
    "add_generation_prompt",
}  # fmt: skip


class TemplateProcess:
    """Handle of the process in its parent.

    Args:
        special_tokens: a tokenizer's `special_tokens_map`, whose names are variables of templates.
    """

    def __init__(self, special_tokens: Mapping[str, Any]):
        self._child = Child("jpaged.template_process", {name: str(token) for name, token in special_tokens.items()})

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], max_characters: int, *,
        variables: Mapping[str, Any], **options: Any,
    ) -> str:  # fmt: skip
        """Return the text of a conversation.

        Args:
            variables: variables of the template.
            options: options of transformers' `render_jinja_template`, which are variables of templates with the same
                names.

        Raises:
            ValueError: the template rejects the conversation, takes too much time, or produces too long a text.
        """
        if taken := variables.keys() & {"messages", *OPTIONS}:
            raise ValueError(f"a template has no variable of its own called {min(taken)!r}")
        settled = {**variables, **options, "conversations": [messages], "chat_template": template}
        question = {"max_characters": max_characters, "options": settled}
        text: str
        try:
            text, fault = self._child.ask(question, RENDER_TIMEOUT_S)
        except ChildFailed:
            raise ValueError(f"the chat template was not rendered within {RENDER_TIMEOUT_S:g} seconds") from None
        if fault is not None:
            raise ValueError(f"the chat template refuses these messages: {fault}")
        return text


def _setup(special_tokens: dict[str, str]) -> Callable[[dict[str, Any]], tuple[str | None, str | None]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(question: dict[str, Any]) -> tuple[str | None, str | None]:
        options = special_tokens | question["options"]
        try:
            rendered: Any = render_jinja_template(**options)
        except MemoryError:
            return None, "it needs too much memory"
        except Exception as error:  # templates raise any type
            return None, str(error)
        text = rendered[0][0]
        if len(text) > question["max_characters"]:
            return None, f"{len(text)} characters exceed {question['max_characters']}"
        return text, None

    return render


if __name__ == "__main__":
    confine(MAX_MEMORY_BYTES)
    serve(_setup)

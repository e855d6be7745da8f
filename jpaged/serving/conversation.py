"""Messages, tools and options of a conversation, in the form of the OpenAI API."""

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from pydantic import ConfigDict, Field

from jpaged.serving.codec import JsonObject, loads
from jpaged.serving.errors import invalid
from jpaged.serving.fields import Items, Nothing, Open, Strict

# Longer lists would take the event loop's time to check.
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_TOOLS = 128
# Variables by which templates switch reasoning on and off.
THINKING = ("enable_thinking", "thinking")


class TextPart(TypedDict):  # a request may have thousands, and dictionaries are made in half the time of models
    """Text in the content of a message."""

    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)  # type: ignore[misc]

    type: Literal["text"]
    text: str


class FunctionCall(Open):
    """Name and arguments of a tool call."""

    name: str
    arguments: str


class ToolCall(Open):
    """Tool call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self, new_id: Callable[[str], str] = str) -> JsonObject:
        """Return the call with its arguments as an object, as templates print them.

        Arguments that are not JSON stay as they are: a model may have been cut off while it wrote them.
        """
        arguments: Any = self.function.arguments
        with suppress(ValueError):
            arguments = loads(arguments or "{}")
        return {
            "id": new_id(self.id),
            "type": self.type,
            "function": {"name": self.function.name, "arguments": arguments},
        }


class ChatMessage(Open):
    """Message of a conversation."""

    role: str = Field(min_length=1)
    content: str | Annotated[Items[TextPart], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Items[ToolCall] | None = Field(default=None, description="calls that the assistant has made")
    tool_call_id: str | None = Field(default=None, description="the call that this message answers")
    # A message with one of these says more than its text.
    audio: Nothing = None
    function_call: Nothing = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return "".join(part["text"] for part in self.content) if isinstance(self.content, list) else self.content or ""

    def for_template(self, knows_developers: bool = True, new_id: Callable[[str], str] = str) -> JsonObject:
        """Return the message in the form of chat templates.

        Args:
            knows_developers: whether the template has a role "developer"; otherwise it becomes the system's.
            new_id: return the id of a call as the template accepts it.

        Raises:
            ApiError: the role does not allow a field.
        """
        if self.content is None and not self.tool_calls:
            raise invalid("messages", f"content is required in a message of the {self.role}")
        if self.tool_calls and self.role != "assistant":
            raise invalid("messages", f"tool_calls are the assistant's, not the {self.role}'s")
        if self.tool_call_id is None and self.role == "tool":
            raise invalid("messages", "tool_call_id is required in a message of a tool")
        role = "system" if self.role == "developer" and not knows_developers else self.role
        message: JsonObject = {"role": role, "content": self.text}
        for name in ("name", "reasoning_content", "reasoning"):
            if getattr(self, name):
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template(new_id) for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = new_id(self.tool_call_id)
        return message


class Function(Open):
    """Function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$", description="1 to 64 letters, digits, _, . and -")
    description: str | None = None
    parameters: JsonObject | None = Field(default=None, description="a JSON schema")
    strict: bool | None = None


class Tool(Open):
    """Tool that the model may call."""

    type: Literal["function"]
    function: Function


class Conversation(Strict):
    """Arguments of a chat template."""

    text_field: ClassVar = "messages"  # the field that `text_length` is about
    may_be_folded: ClassVar = False  # if the template rejects the order of its roles, see `transcript.fold`

    messages: Items[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: Items[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @property
    def text_length(self) -> int:
        """Number of characters of all messages."""
        return sum(len(message.text) for message in self.messages)

    @property
    def answer_role(self) -> str:
        """Role of the answer: that of the last message if no generation prompt follows it."""
        return "assistant" if self._prompting else self.messages[-1].role

    @property
    def _prompting(self) -> bool:
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def template_options(self) -> JsonObject:
        """Return the options of `chat.render`; ApiError 400 if they contradict each other."""
        going_on = bool(self.continue_final_message)
        if going_on and self.add_generation_prompt:
            raise invalid("continue_final_message", "contradicts add_generation_prompt: true")
        levels = {name: level for name in ("reasoning_effort", "verbosity") if (level := getattr(self, name))}
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()] or None
        effort = self.reasoning_effort
        switches = dict.fromkeys(THINKING, effort != "none") if effort else {}
        variables = switches | (self.chat_template_kwargs or {}) | levels
        prompting = {"add_generation_prompt": self._prompting, "continue_final_message": going_on}
        return {"tools": tools, "variables": variables, **prompting}

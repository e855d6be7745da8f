"""Body of `/v1/responses` in the form of OpenAI's API, and its translation to a chat."""

from typing import Annotated, Any, ClassVar, Literal, assert_never

from pydantic import Discriminator, Field, Tag

from jpaged.serving.codec import JsonObject
from jpaged.serving.conversation import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Function
from jpaged.serving.errors import invalid
from jpaged.serving.fields import Items, Open
from jpaged.serving.protocol import MAX_METADATA, JsonObjectFormat, TextFormat
from jpaged.serving.transcript import Transcript
from jpaged.serving.translated import Tolerant, TranslatedChat

MAX_NAME = 64  # characters of a function's name in a chat
LOGPROBS = "message.output_text.logprobs"
NOT_STORED = "absent, because nothing is stored: send the whole conversation as input"


class ItemText(Open):
    """Text in the content of an item."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class ItemRefusal(Open):
    """Refusal in a message of the assistant."""

    type: Literal["refusal"]
    refusal: str


ItemParts = (
    str | Annotated[Items[Annotated[ItemText | ItemRefusal, Field(discriminator="type")]], Field(max_length=MAX_PARTS)]
)


class MessageItem(Open):
    """Message of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemParts


class CallItem(Open):
    """Call that the assistant has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class ResultItem(Open):
    """Result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: ItemParts


class NoteItem(Open):
    """Text of a named tool without a call, such as Codex's goal. It becomes a message of the user."""

    type: Literal["function_call_output"]
    name: str
    output: ItemParts


class ReasoningText(Open):
    """Text of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Open):
    """Reasoning of the assistant. Its summary and encrypted content are not the model's text, and are ignored."""

    type: Literal["reasoning"]
    content: Annotated[Items[ReasoningText], Field(max_length=MAX_PARTS)] | None = None


class ReferenceItem(Open):
    """Reference to an item of an earlier response, which is refused."""

    type: Literal["item_reference"]


def _item_kind(item: Any) -> Any:
    if not isinstance(item, dict):
        return "message"
    kind = item.get("type") or "message"
    return "note" if kind == "function_call_output" and "name" in item and item.get("call_id") is None else kind


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[NoteItem, Tag("note")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(_item_kind),
]


class FunctionTool(Function):
    """Function that the model may call."""

    type: Literal["function"]


class ForeignTool(Open):
    """Tool of a type that is not served. It is ignored."""

    type: str


def _member_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "function" if kind == "function" else "foreign"


def _tool_kind(tool: Any) -> str:
    return "namespace" if isinstance(tool, dict) and tool.get("type") == "namespace" else _member_kind(tool)


Member = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[ForeignTool, Tag("foreign")], Discriminator(_member_kind)
]


class NamespaceTool(Open):
    """Functions with a common name, such as those of an MCP server."""

    type: Literal["namespace"]
    name: str
    description: str = ""
    tools: Annotated[Items[Member], Field(max_length=MAX_TOOLS)]

    def serves(self, tool: Any) -> bool:
        """Return whether a member is a function whose full name is not too long."""
        return isinstance(tool, FunctionTool) and len(full_name(self.name, tool.name)) <= MAX_NAME


ToolOfAnyType = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[ForeignTool, Tag("foreign")],
    Discriminator(_tool_kind),
]


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a function."""
    return name if namespace is None else f"{namespace}__{name}"


class FunctionChoice(Open):
    """Choice of a function by its name."""

    type: Literal["function"]
    name: str
    namespace: str | None = None

    def for_chat(self) -> JsonObject:
        """Return the choice as chats have it."""
        return {"type": self.type, "function": {"name": full_name(self.namespace, self.name)}}


class AllowedChoice(Open):
    """Choice of some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS)]

    def for_chat(self) -> JsonObject:
        """Return the choice as chats have it."""
        return {
            "type": self.type,
            self.type: {"mode": self.mode, "tools": [tool.for_chat() for tool in self.tools]},
        }


class FlatSchemaFormat(Open):
    """Format of a text by a JSON schema."""

    type: Literal["json_schema"]
    name: str = "answer"
    json_schema: JsonObject = Field(alias="schema")
    strict: bool | None = None


class TextConfig(Open):
    """Form of the answer's text."""

    format: Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Open):
    """Wishes about reasoning. Summaries are not made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesChat(TranslatedChat):
    """Chat request of a body of `/v1/responses`."""

    original_names: ClassVar = {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text",
        "verbosity": "text",
        "reasoning_effort": "reasoning",
    }


class ResponsesRequest(Tolerant):
    """Body of `/v1/responses`. Nothing is stored, so a request has the whole conversation."""

    text_field: ClassVar = "input"

    input: str | Annotated[Items[Item], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    tools: Annotated[Items[ToolOfAnyType], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None = Field(
        default=None,
        description='"none", "auto", "required", {"type": "function", "name": NAME} or '
        '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}',
    )
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Items[str] | None = None
    stop: str | Items[str] | None = Field(default=None, description="a text or a list of texts")
    metadata: dict[str, str] | None = Field(
        default=None, max_length=MAX_METADATA, description=f"up to {MAX_METADATA} texts by name"
    )
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    user: str | None = None
    store: bool | None = None
    previous_response_id: None = Field(default=None, description=NOT_STORED)
    conversation: None = Field(default=None, description=NOT_STORED)
    prompt: None = Field(default=None, description="absent, because no prompts are stored: send instructions and input")
    background: Literal[False] | None = Field(default=None, description="false, because nothing is stored")
    top_logprobs: int | None = None

    @property
    def served_tools(self) -> list[FunctionTool | NamespaceTool]:
        """Tools that the model may call, in their namespaces."""
        return [_served(tool) for tool in self.tools or () if not isinstance(tool, ForeignTool)]

    @property
    def names(self) -> dict[str, tuple[str | None, str]]:
        """Namespace and name of each function by its full name."""
        members = [(space, tool.name) for space, tool in self._functions]
        return {full_name(space, name): (space, name) for space, name in members}

    @property
    def ignored(self) -> list[str]:
        """Names of the parts of the request that are ignored."""
        spaces = [tool for tool in self.tools or () if isinstance(tool, NamespaceTool)]
        members = [(space, tool) for space in spaces for tool in space.tools if not space.serves(tool)]
        foreign = [
            tool for tool in (*(self.tools or ()), *(tool for _, tool in members)) if isinstance(tool, ForeignTool)
        ]
        kinds = dict.fromkeys(tool.type for tool in foreign)
        long = [full_name(space.name, tool.name) for space, tool in members if isinstance(tool, FunctionTool)]
        return [
            *self.unknown_fields, *(f"tools of type {kind}" for kind in kinds), *(f"tool {name}" for name in long),
            *["store"] * bool(self.store),
        ]  # fmt: skip

    @property
    def _functions(self) -> list[tuple[str | None, FunctionTool]]:
        """Functions that the model may call, with their namespaces."""
        functions: list[tuple[str | None, FunctionTool]] = []
        for tool in self.served_tools:
            if isinstance(tool, NamespaceTool):
                functions += [(tool.name, member) for member in tool.tools if isinstance(member, FunctionTool)]
            else:
                functions.append((None, tool))
        return functions

    @property
    def text_length(self) -> int:
        """Number of characters of all items."""
        return self._transcript().text_length

    def chat(self) -> ResponsesChat:
        """Return the chat request; ApiError 400 if a field is invalid."""
        if any(isinstance(item, ReferenceItem) for item in self.input):
            raise invalid("input", "item_reference: nothing is stored; send store: false and whole items")
        functions, text = [_function(*each) for each in self._functions], self.text or TextConfig()
        return ResponsesChat.of(
            self.common()
            | {
                "messages": self._transcript().messages,
                "tools": functions or None,
                "tool_choice": self._tool_choice() if functions or self.tool_choice not in ("auto", "none") else None,
                "parallel_tool_calls": self.parallel_tool_calls,
                "prompt_cache_key": self.prompt_cache_key,
                "prompt_cache_retention": self.prompt_cache_retention,
                "max_tokens": self.max_output_tokens,
                "stop": self.stop,
                "response_format": _response_format(text),
                "verbosity": text.verbosity,
                "reasoning_effort": self.reasoning and self.reasoning.effort,
                "logprobs": bool(self.top_logprobs) or LOGPROBS in (self.include or ()) or None,
                "top_logprobs": self.top_logprobs,
            }
        )

    def _tool_choice(self) -> Any:
        return self.tool_choice.for_chat() if isinstance(self.tool_choice, Open) else self.tool_choice

    def _transcript(self) -> Transcript:
        transcript = Transcript()
        transcript.instruct([self.instructions] if self.instructions else [])
        for item in [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            match item:
                case MessageItem():
                    transcript.say(item.role, _joined(item.content))
                case CallItem():
                    transcript.call(item.call_id, full_name(item.namespace, item.name), item.arguments)
                case ResultItem():
                    transcript.result(item.call_id, _joined(item.output))
                case NoteItem():
                    transcript.say("user", f"{item.name}: {_joined(item.output)}")
                case ReasoningItem():
                    transcript.think("".join(part.text for part in item.content or ()))
                case ReferenceItem():
                    pass
                case _:
                    assert_never(item)
        return transcript


def _served(tool: FunctionTool | NamespaceTool) -> FunctionTool | NamespaceTool:
    if isinstance(tool, FunctionTool):
        return tool
    return tool.model_copy(update={"tools": [each for each in tool.tools if tool.serves(each)]})


def _function(namespace: str | None, tool: FunctionTool) -> JsonObject:
    fields = tool.model_dump(exclude={"type"}) | {"name": full_name(namespace, tool.name)}
    return {"type": "function", "function": fields}


def _joined(parts: ItemParts) -> str:
    if isinstance(parts, str):
        return parts
    return "".join(part.text if isinstance(part, ItemText) else part.refusal for part in parts)


def _response_format(text: TextConfig) -> JsonObject | None:
    if isinstance(text.format, FlatSchemaFormat):
        schema = {"name": text.format.name, "schema": text.format.json_schema, "strict": text.format.strict}
        return {"type": "json_schema", "json_schema": schema}
    return None if text.format is None else text.format.model_dump()

"""Bodies of `/v1/messages` and `/v1/messages/count_tokens` in the form of Anthropic's API, and their translation."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, assert_never

from pydantic import Discriminator, Field, Tag

from jpaged.serving.codec import JsonObject, dumps
from jpaged.serving.conversation import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, THINKING
from jpaged.serving.errors import NO_THREADS, invalid
from jpaged.serving.fields import Items, Open
from jpaged.serving.transcript import Transcript
from jpaged.serving.translated import Tolerant, TranslatedChat

# Claude Code's first block of the system. It has a hash that differs in every request, so that no prefix would repeat.
BILLING = "x-anthropic-billing-header:"


# Seconds of the lifetimes of `cache_control`.
PIN_LIFETIMES = {"5m": 300.0, "1h": 3600.0}


class CacheControl(Open):
    """Wish to find the prompt up to here in the cache later: its whole prefix is pinned."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cacheable(Open):
    """Part of a prompt with such a wish."""

    cache_control: CacheControl | None = None


class TextBlock(Cacheable):
    """Text in the content of a message."""

    type: Literal["text"]
    text: str


class ToolUseBlock(Cacheable):
    """Call that the assistant has made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class ToolReference(Cacheable):
    """Tool that a search has found. The definition of a deferred tool stands here in the prompt."""

    type: Literal["tool_reference"]
    tool_name: str


ResultPart = Annotated[TextBlock | ToolReference, Field(discriminator="type")]


class ToolResultBlock(Cacheable):
    """Result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[Items[ResultPart], Field(max_length=MAX_PARTS)] | None = None

    @property
    def found(self) -> list[str]:
        """Names of the tools that the result refers to."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.tool_name for part in parts if isinstance(part, ToolReference)]


class ThinkingBlock(Open):
    """Reasoning of the assistant."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Open):
    """Encrypted reasoning, which is ignored."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]


class MessageParam(Open):
    """Message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Items[Block], Field(max_length=MAX_PARTS)]


class ClientTool(Cacheable):
    """Tool that the client runs."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$", description="1 to 64 letters, digits, _, . and -")
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    defer_loading: bool | None = None

    @property
    def definition(self) -> str:
        """The tool as a text, as agents announce it to the model."""
        fields = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return f"<functions>\n<function>{dumps(fields).decode()}</function>\n</functions>"


class ServerTool(Open):
    """Tool that Anthropic's servers run. It is ignored."""

    type: str


def _tool_kind(tool: Any) -> str:
    return "client" if not isinstance(tool, dict) or tool.get("type") in (None, "custom") else "server"


AnyTool = Annotated[
    Annotated[ClientTool, Tag("client")] | Annotated[ServerTool, Tag("server")], Discriminator(_tool_kind)
]


class ToolChoice(Open):
    """Choice between tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Open):
    """Wish for reasoning, which sets variables of the template. A budget is not a limit, and is ignored."""

    type: Literal["enabled", "disabled", "adaptive"]


class SchemaFormat(Open):
    """Format of the answer by a JSON schema."""

    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(Open):
    """Form of the answer, and the effort of the reasoning, which is a variable of the template."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class MessagesChat(TranslatedChat):
    """Chat request of a body of `/v1/messages`.

    Attributes:
        deferred_tools: names of tools whose definitions are in the messages, so that the template does not get them.
    """

    original_names: ClassVar = {
        "prompt": "messages",
        "stop": "stop_sequences",
        "response_format": "output_config",
        "reasoning_effort": "output_config",
    }

    deferred_tools: list[str] | None = None

    def template_options(self) -> JsonObject:
        """Return the options of `chat.render`, without deferred tools."""
        options, deferred = super().template_options(), self.deferred_tools or ()
        tools = [tool for tool in options["tools"] or () if tool["function"]["name"] not in deferred]
        return options | {"tools": tools or None}


class CountTokensRequest(Tolerant):
    """Body of `/v1/messages/count_tokens`."""

    text_field: ClassVar = "messages"

    model: str
    messages: Annotated[Items[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[Items[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: Annotated[Items[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    @property
    def ignored(self) -> list[str]:
        """Names of the parts of the request that are ignored."""
        kinds = dict.fromkeys(tool.type for tool in self.tools or () if isinstance(tool, ServerTool))
        return [*self.unknown_fields, *(f"tools of type {kind}" for kind in kinds)]

    @property
    def text_length(self) -> int:
        """Number of characters of all messages."""
        return self._transcript().text_length

    def chat(self) -> MessagesChat:
        """Return the chat request; ApiError 400 if a field is invalid."""
        return MessagesChat.of(self._chat_fields())

    def _chat_fields(self) -> JsonObject:
        messages, output = self._transcript().messages, self.output_config or OutputConfig()
        found = self._found_tools
        known = [tool for tool in self._client_tools if not tool.defer_loading or tool.name in found]
        tools, deferred = [_function(tool) for tool in known], [tool.name for tool in known if tool.defer_loading]
        fields = self.common() | {"messages": messages, "tools": tools or None, "pin_s": self._pin_s}
        fields["deferred_tools"] = deferred or None
        fields |= self._choice(bool(tools))
        if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            fields["continue_final_message"] = True  # the beginning of the answer
        if output.format is not None:
            schema = {"name": "answer", "schema": output.format.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.thinking is None or self.thinking.type != "disabled":
            fields["reasoning_effort"] = output.effort
        if self.thinking is not None and self.thinking.type != "adaptive":
            switches = dict.fromkeys(THINKING, self.thinking.type == "enabled")
            fields["chat_template_kwargs"] = switches | (self.chat_template_kwargs or {})
        return fields

    @property
    def _client_tools(self) -> list[ClientTool]:
        return [tool for tool in self.tools or () if isinstance(tool, ClientTool)]

    @property
    def _found_tools(self) -> set[str]:
        """Names of the tools that results of the conversation refer to."""
        contents = [message.content for message in self.messages if isinstance(message.content, list)]
        results = [block for content in contents for block in content if isinstance(block, ToolResultBlock)]
        return {name for result in results for name in result.found}

    @property
    def _pin_s(self) -> float | None:
        """Seconds for which the prefix is pinned: the longest that a part of the prompt asks for."""
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        wishes = [part.cache_control for part in (*blocks, *(self.tools or ())) if isinstance(part, Cacheable)]
        lifetimes = [PIN_LIFETIMES[wish.ttl or "5m"] for wish in (*wishes, self.cache_control) if wish]
        return max(lifetimes, default=self.pin_s)

    def _choice(self, has_tools: bool) -> JsonObject:
        """Return the fields of a chat for the choice between tools."""
        choice = self.tool_choice
        if choice is None or not (has_tools or choice.type in ("any", "tool")):
            return {}
        wanted: Any = {"any": "required", "auto": "auto", "none": "none"}.get(choice.type)
        if choice.type == "tool":
            wanted = {"type": "function", "function": {"name": choice.name or ""}}
        return {"tool_choice": wanted, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}

    def _transcript(self) -> Transcript:
        transcript = Transcript()
        system = [self.system] if isinstance(self.system, str) else [block.text for block in self.system or ()]
        transcript.instruct(text for text in system if text and not text.startswith(BILLING))
        deferred = {tool.name: tool.definition for tool in self._client_tools if tool.defer_loading}
        for message in self.messages:
            _add(transcript, message, deferred)
        return transcript


class MessagesRequest(CountTokensRequest):
    """Body of `/v1/messages`."""

    max_tokens: int
    stop_sequences: Items[str] | None = None
    thread: JsonObject | None = None

    def _chat_fields(self) -> JsonObject:
        if self.thread is not None:
            raise invalid("thread", "nothing is stored: send the whole conversation as messages", code=NO_THREADS)
        return super()._chat_fields() | {"max_tokens": self.max_tokens, "stop": self.stop_sequences or None}


def _function(tool: ClientTool) -> JsonObject:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _add(transcript: Transcript, message: MessageParam, deferred: Mapping[str, str]) -> None:
    """Add a message: its calls and results, and the texts between them.

    Args:
        deferred: definitions of deferred tools by their names.
    """
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            transcript.say(message.role, "\n".join(texts))
            texts.clear()

    for block in (
        [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    ):
        match block:
            case TextBlock():
                if not (message.role == "system" and block.text.startswith(BILLING)):
                    texts.append(block.text)
                continue
            case ThinkingBlock():
                end_text()
                transcript.think(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                end_text()
                transcript.call(block.id, block.name, dumps(block.input).decode())
            case ToolResultBlock():
                end_text()
                transcript.result(block.tool_use_id, _result(block, deferred))
            case _:
                assert_never(block)
    end_text()


def _result(block: ToolResultBlock, deferred: Mapping[str, str]) -> str:
    if isinstance(block.content, str):
        return block.content
    texts = [
        part.text if isinstance(part, TextBlock) else deferred.get(part.tool_name, part.tool_name)
        for part in block.content or ()
    ]
    return "\n".join(texts)

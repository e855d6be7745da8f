"""Bodies of `/v1/messages` and `/v1/messages/count_tokens` in the form of Anthropic's API, and their translation."""

from typing import Annotated, Any, ClassVar, Literal, assert_never

from pydantic import Discriminator, Field, Tag

from jpaged.serving.codec import JsonObject, dumps
from jpaged.serving.conversation import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, THINKING
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


class ToolResultBlock(Cacheable):
    """Result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[Items[TextBlock], Field(max_length=MAX_PARTS)] | None = None


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
    """Chat request of a body of `/v1/messages`."""

    original_names: ClassVar = {
        "prompt": "messages",
        "stop": "stop_sequences",
        "response_format": "output_config",
        "reasoning_effort": "output_config",
    }


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
        tools = [_function(tool) for tool in self.tools or () if isinstance(tool, ClientTool)]
        fields = self.common() | {"messages": messages, "tools": tools or None, "pin_s": self._pin_s}
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
        for message in self.messages:
            _add(transcript, message)
        return transcript


class MessagesRequest(CountTokensRequest):
    """Body of `/v1/messages`."""

    max_tokens: int
    stop_sequences: Items[str] | None = None

    def _chat_fields(self) -> JsonObject:
        return super()._chat_fields() | {"max_tokens": self.max_tokens, "stop": self.stop_sequences or None}


def _function(tool: ClientTool) -> JsonObject:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _add(transcript: Transcript, message: MessageParam) -> None:
    """Add a message: its calls and results, and the texts between them."""
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
                transcript.result(block.tool_use_id, _result(block))
            case _:
                assert_never(block)
    end_text()


def _result(block: ToolResultBlock) -> str:
    if isinstance(block.content, str):
        return block.content
    return "\n".join(part.text for part in block.content or ())

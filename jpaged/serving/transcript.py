"""Messages of a chat, put together from the items of another API."""

from collections.abc import Iterable, Sequence

from jpaged.serving.codec import JsonObject

INSTRUCTIONS = ("system", "developer")


class Transcript:
    """Messages in the form of OpenAI's chats, in the order in which they are added.

    Instructions at the beginning become one message of the system, because some templates allow only one. A text, its
    reasoning and the calls after it become one message of the assistant.
    """

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self._reasoning = ""  # of the assistant's next message

    @property
    def text_length(self) -> int:
        """Number of characters of all messages."""
        return sum(len(message["content"] or "") for message in self.messages)

    def instruct(self, texts: Iterable[str]) -> None:
        """Add instructions in front of the conversation."""
        for text in texts:
            self.say("system", text)

    def say(self, role: str, text: str) -> None:
        """Add a message without calls."""
        if role == "assistant":
            self._say_more(text)
            return
        self._reasoning = ""
        if role in INSTRUCTIONS and not self.messages:
            role = "system"
        elif role in INSTRUCTIONS and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
            return
        self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Add reasoning of the assistant; it is dropped unless a text or a call of the assistant follows."""
        self._reasoning += text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of the assistant."""
        if not self._is_assistants():
            self._begin(None)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        self._reasoning = ""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _say_more(self, text: str) -> None:
        if self._is_assistants() and "tool_calls" in self.messages[-1]:
            self.messages[-1]["content"] = (self.messages[-1]["content"] or "") + text
        else:
            self._begin(text)

    def _begin(self, text: str | None) -> None:
        """Begin a message of the assistant."""
        reasoning = {"reasoning_content": self._reasoning} if self._reasoning else {}
        self.messages.append({"role": "assistant", "content": text} | reasoning)
        self._reasoning = ""

    def _is_assistants(self) -> bool:
        """Return whether the last message is the assistant's, and no reasoning of another one has followed."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant" and not self._reasoning


def fold(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return messages with instructions only in front, and no two messages of the user in a row.

    Later instructions become text of the user, where they are: in front they would change the cached prefix.
    """
    folded: list[JsonObject] = []
    for message in messages:
        if folded and message["role"] in INSTRUCTIONS:
            message = message | {"role": "user"}
        if folded and folded[-1]["role"] == message["role"] == "user":
            before = folded.pop()
            message = before | {"content": f"{before['content']}\n\n{message['content']}"}
        folded.append(message)
    return folded

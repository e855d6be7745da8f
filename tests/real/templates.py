"""Real chat templates, and the messages that they write."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jpaged.chat import Template, render
from tests.real.sources import LLAMA_CPP, VLLM

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
# Marks at the end of a message of the assistant.
TAIL = re.compile(r"(\s|<[^<>\n]*>|\[e~\[)*$")


def templates() -> dict[str, str]:
    """Return the sources by name. The names of vLLM's templates begin with "vllm-"."""
    paths = {path.stem: path for path in sorted(LLAMA_CPP.folder("templates").iterdir())}
    paths |= {f"vllm-{path.stem}": path for path in sorted(VLLM.folder("templates").iterdir())}
    return {name: path.read_text() for name, path in paths.items()}


def common_start(first: str, second: str) -> str:
    """Return the longest text with which two texts begin."""
    end = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:end]


class Output(NamedTuple):
    """Message of the assistant as a model would have written it.

    Attributes:
        prompt: text in front of it, with the beginning of the message.
        text: with the marks at the end of the message.
    """

    prompt: str
    text: str

    @property
    def is_several(self) -> bool:
        """Whether the template divides the message into several."""
        header = self.prompt[self.prompt.rfind("<") :].strip()
        return len(header) > 3 and header in self.text


def output(source: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Output:
    """Return the last message, which is the assistant's, as a template writes it."""
    template = Template(source, SPECIAL)
    whole = render(template, messages, tools=tools, add_generation_prompt=False)
    before = render(template, messages[:-1], tools=tools, add_generation_prompt=False)
    header = render(template, messages[:-1], tools=tools)
    before = common_start(before, common_start(whole, header))  # some templates end each conversation with a mark
    header = header.removeprefix(before)
    # A template may begin the message in another way when it asks for one: up to a mark, both are equal.
    ends = [end for end in range(len(header) + 1) if end == len(header) or header[:end].endswith((">", "]", "\n"))]
    begin = len(before) + max((end for end in ends if whole.startswith(header[:end], len(before))), default=0)
    if whole.startswith("</think>", begin):  # as in a prompt that asks for no reasoning
        begin += len("</think>")
    return Output(whole[:begin], whole[begin:])

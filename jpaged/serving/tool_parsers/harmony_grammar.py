"""Grammars of calls in OpenAI's harmony form, in which each text is a message in a channel.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.form import Form
from jpaged.serving.tool_parsers.grammar import CallGrammar, answer_rule, speller

FINAL = "<|channel|>final<|message|>"
BETWEEN = "<|end|><|start|>assistant"


def earlier_messages(tokens: Mapping[str, int], channels: Sequence[str]) -> str:
    """Return rules in Lark of `earlier`: any number of messages in some channels, before another one."""
    spell = speller(tokens)
    names = " | ".join(map(spell, channels))
    message = f"{spell('<|channel|>')} ({names}) {spell('<|message|>')} BODY {spell(BETWEEN)}"
    return f"earlier: ({message})*\nBODY: /(?s:.*)/"


class HarmonyGrammar(CallGrammar):
    """Grammars of an output with one call at its end, which ends it."""

    def __init__(self, form: Form, tokens: Mapping[str, int], functions: Sequence[Function], parallel: bool):
        super().__init__(form, tokens, functions, False)
        self._call = self.call(form.start)
        self._earlier = earlier_messages(tokens, ["analysis", "commentary"])

    def only_calls(self) -> str:
        """Return a grammar of a call."""
        return self._grammar(f"start: {self._call}")

    def with_answer(self, answer: Any) -> str:
        """Return a grammar of a call, or of a final message in JSON that fits the schema `answer`."""
        return self._grammar(f"start: {self._call} | {self.spell(FINAL)} answer\n{answer_rule(answer)}")

    def lazy(self, but: Sequence[str]) -> str:
        """Return a grammar of messages, of which the last may be a call."""
        return self._grammar(f"start: earlier ({self._call} | {self.spell(FINAL)} BODY)\n{self._earlier}")

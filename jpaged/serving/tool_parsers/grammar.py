"""Grammars of tool calls in llguidance's form, as Lark text, with calls in the exact spacing of chat templates.

A mark that is a special token of the tokenizer is this token in a grammar; other marks are text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.form import Form, Spell
from jpaged.serving.tool_parsers.raw_text import text_but
from jpaged.structured.sound import WHITE_SPACE, sound_schema


def speller(tokens: Mapping[str, int]) -> Spell:
    """Return a function that writes a text in Lark.

    Args:
        tokens: ids of the special tokens in texts.
    """
    pattern = re.compile(f"({'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True)))})" if tokens else "($^)")

    def spell(text: str) -> str:
        parts = [part for part in pattern.split(text) if part]
        return " ".join(f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts)

    return spell


def any_text(tokens: Iterable[int]) -> str:
    """Return a grammar of any text with some special tokens."""
    marks = "".join(f" | <[{token}]>" for token in tokens)
    return f"start: (TEXT{marks})*\nTEXT: /(?s:.+)/\n"


class CallGrammar:
    """Grammars of the calls of some functions.

    Args:
        parallel: whether there may be more than one call.

    Raises:
        ValueError: the arguments of a function can't be written in the form. Other errors of a schema are found when
            the grammar is compiled.
    """

    def __init__(self, form: Form, tokens: Mapping[str, int], functions: Sequence[Function], parallel: bool):
        assert functions, "no functions, no calls"
        self._form, self._parallel = form, parallel
        self._names = [function.name for function in functions]
        self.spell = spell = speller(tokens)
        opening, closing = (spell(form.opening), spell(form.closing)) if not form.body.is_list else ("", "")
        names = [f"call_{index}" for index in range(len(functions))]
        self.rules = [f"call: {opening} ({' | '.join(names)}) {closing}"]
        for function, name in zip(functions, names):
            self.rules += form.body.rules(function, name, spell)

    def only_calls(self) -> str:
        """Return a grammar of one call or, with parallel calls, of one or more."""
        return self._grammar(f"start: {self._series(self._form.start)}")

    def with_answer(self, answer: Any) -> str:
        """Return a grammar of either calls or a JSON text that fits the schema `answer`."""
        schema = json.dumps(sound_schema(answer) | {"x-guidance": {"whitespace_pattern": WHITE_SPACE}})
        return self._grammar(f"start: {self._series(self._form.start)} | answer\nanswer: %json {schema}")

    def lazy(self, but: Sequence[str]) -> str:
        """Return a grammar of any text; but once a call begins, it must be a valid one.

        Args:
            but: beginnings that the text does not have.
        """
        form, text = self._form, text_but(but)
        if not (mark := form.start.strip()):
            assert form.begins is not None, form
            text += f" & ~/{form.begins(self._names)}(?s:.*)/"
            return self._grammar(f"start: TEXT | {self._prefix()} {self._series('')}\nTEXT: {text}")
        rest = self._run(form.start[form.start.index(mark) + len(mark) :])
        begin = self.spell(mark)
        if begin.startswith("<[") and " " not in begin:
            before = f"before: TEXT {begin}"
        else:
            before = f"before[lazy]: TEXT {begin}"
        start = f"(before {rest})* TEXT" if self._parallel else f"TEXT | before {rest}"
        return self._grammar(f"start: {start}\n{before}\nTEXT: {text}")

    def _prefix(self) -> str:
        prefix = self.spell(self._form.prefix)
        return f"({prefix})?" if prefix else ""

    def _series(self, start: str) -> str:
        """Return the expression of one run or, if each call is a run of its own, of several."""
        run, form = self._run(start), self._form
        if not self._parallel or form.repeats or form.body.is_list:
            return run
        separator = self.spell(form.separator)
        return f"{run} ({separator} {run})*"

    def _run(self, start: str) -> str:
        form, calls = self._form, "call"
        if form.body.is_list:
            more = f" ({self.spell(', ')} call)*" if self._parallel else ""
            calls = f'{self.spell(form.opening)} "[" call{more} "]" {self.spell(form.closing)}'
        elif form.repeats and self._parallel:
            calls = f"call ({self.spell(form.separator)} call)*"
        return f"{self.spell(start)} {calls} {self.spell(form.end)}".strip()

    def _grammar(self, head: str) -> str:
        return "\n".join([head, *self.rules]) + "\n"

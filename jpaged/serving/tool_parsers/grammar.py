"""Grammars of tool calls in llguidance's form, as Lark text, with calls in the exact spacing of chat templates.

A mark that is a special token of the tokenizer is this token in a grammar; other marks are text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.form import Form, Spell
from jpaged.serving.tool_parsers.raw_text import escaped, text_but
from jpaged.structured.sound import WHITE_SPACE, sound_schema


def speller(tokens: Mapping[str, int]) -> Spell:
    """Return a function that writes a text in Lark.

    Args:
        tokens: ids of the special tokens in texts.
    """
    pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

    def spell(text: str) -> str:
        parts, at = [], 0
        for match in pattern.finditer(text) if tokens else ():
            parts += [text[at : match.start()], match[0]]
            at = match.end()
        return " ".join(
            f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in (*parts, text[at:]) if part
        )

    return spell


def any_text(tokens: Iterable[int], but: Sequence[str]) -> str:
    """Return a grammar of any text with some special tokens.

    Args:
        but: beginnings that the text does not have.
    """
    marks = "".join(f" | <[{token}]>" for token in tokens)
    return f"start: (TEXT{marks})*\nTEXT: /(?s:.+)/ & {text_but(but)}\n"


def answer_rule(schema: Any) -> str:
    """Return the rule in Lark of `answer`, a JSON text that fits a schema."""
    return f"answer: %json {json.dumps(sound_schema(schema) | {'x-guidance': {'whitespace_pattern': WHITE_SPACE}})}"


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
        self.spell = speller(tokens)
        self.rules: list[str] = []
        for index, function in enumerate(functions):
            self.rules += form.body.rules(function, f"call_{index}", self.spell)
        self._heads = [form.body.head(function) for function in functions]

    def call(self, before: str) -> str:
        """Return the expression of a call behind a text. Both are one text, because a lexer does not go back."""
        calls = (f"{self.spell(before + head)} call_{index}" for index, head in enumerate(self._heads))
        return f"({' | '.join(calls)})"

    def only_calls(self) -> str:
        """Return a grammar of one call or, with parallel calls, of one or more."""
        return self._grammar(f"start: {self._calls()}")

    def with_answer(self, answer: Any) -> str:
        """Return a grammar of either calls or a JSON text that fits the schema `answer`."""
        return self._grammar(f"start: {self._calls()} | answer\n{answer_rule(answer)}")

    def lazy(self, but: Sequence[str]) -> str:
        """Return a grammar of any text; but once a call begins, it must be a valid one.

        Args:
            but: beginnings that the text does not have.
        """
        form, text = self._form, text_but(but)
        if not (mark := form.start.strip()):
            assert form.begins is not None, form
            prefixes = [escaped(form.prefix)] if form.prefix and form.closing else []
            text += "".join(f" & ~/{begin}(?s:.*)/" for begin in (form.begins(self._names), *prefixes))
            return self._grammar(f"start: TEXT | {self._calls()}\nTEXT: {text}")
        rules, ways = [], []
        for index, each in enumerate(form.starts):
            begin, behind = self.spell(each), form.start.partition(mark)[2] if each == mark else ""
            lazy = "" if begin.startswith("<[") else "[lazy]"
            rules.append(f"before_{index}{lazy}: TEXT {begin}")
            ways.append(f"before_{index} {self._run(behind, opens=each != form.opening)}")
        call = f"({' | '.join(ways)})"
        start = f"{call}* TEXT" if self._parallel else f"TEXT | {call}"
        return self._grammar("\n".join([f"start: {start}", *rules, f"TEXT: {text}"]))

    def _calls(self) -> str:
        """Return the expression of one run or, if each call is a run of its own, of several.

        Calls without a mark in front may stand without a mark behind, too.
        """
        form = self._form
        if form.prefix and form.closing:
            return f"{self._run(form.prefix)} | {self._run('', closes=False)}"
        run, several = self._run(form.start), form.repeats or form.body.is_list
        if not self._parallel or several:
            return run
        return f"{run} ({self._run(form.separator + form.start)})*"

    def _run(self, start: str, *, opens: bool = True, closes: bool = True) -> str:
        """Return the expression of a run."""
        form, parallel = self._form, self._parallel
        begin = start + form.opening * opens
        between, end = form.closing + form.separator + form.opening, form.closing * closes
        if form.body.is_list:
            begin, between, end = f"{begin}[", ", ", f"]{end}"
        more = f" {self.call(between)}*" if parallel and (form.repeats or form.body.is_list) else ""
        return f"{self.call(begin)}{more} {self.spell(end + form.end)}".strip()

    def _grammar(self, head: str) -> str:
        return "\n".join([head, *self.rules]) + "\n"

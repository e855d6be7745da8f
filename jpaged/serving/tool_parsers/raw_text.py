"""Expressions of texts in Lark: any text, and texts without quotation marks, which end at a mark."""

import json
import re
from collections.abc import Sequence
from typing import Any

from jpaged.core.params import shown
from jpaged.serving.tool_parsers.form import Spell
from jpaged.serving.tool_parsers.schema import resolve, texts_of


def text_rules(schema: Any, name: str, mark: str, spell: Spell, but: Sequence[str] = ()) -> list[str]:
    """Return rules in Lark, of which `name` is a text that fits a schema, with the mark behind it.

    The length and the pattern of a text are kept, and its `format` is not.

    Args:
        but: further marks, which the text does not have.

    Raises:
        ValueError: the pattern or a length is not one.
    """
    resolved = resolve(schema)
    schema = resolved if isinstance(resolved, dict) else {}
    upper, ending, inner = name.upper(), spell(mark), mark.strip()
    if (texts := texts_of(schema)) is not None:
        return [f"{name}: ({' | '.join(spell(text) for text in texts)}) {ending}"]
    kept = _pattern(schema) + "".join(f" & ~/(?s:.*){escaped(each)}(?s:.*)/" for each in but)
    if spell(inner).startswith("<["):  # a special token, which no text has
        before = json.dumps(mark[: mark.index(inner)]) if mark != inner else ""
        return [f"{name}: {upper} {spell(inner)}", f"{upper}: ({kept}) {before}"]
    # The parser would end the text at its mark.
    return [f"{name}[lazy]: {upper} {ending}", f"{upper}: {kept} & ~/(?s:.*){escaped(inner)}(?s:.*)/"]


def text_but(openings: Sequence[str]) -> str:
    """Return the expression in Lark of any text that begins with none of some texts."""
    return " & ".join(["/(?s:.*)/", *(rf"~/[ \t\r\n]*{escaped(opening)}(?s:.*)/" for opening in openings)])


def escaped(text: str) -> str:
    """Return a regular expression of a text in Lark."""
    return re.escape(text).replace("/", r"\/").replace(r"\ ", " ").replace("\\\n", r"\n")


def _pattern(schema: dict[str, Any]) -> str:
    """Return the expression in Lark of the texts that fit a schema."""
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if not (isinstance(low, int) and (high == "" or isinstance(high, int))):
        raise ValueError(f"tools: minLength and maxLength must be whole numbers, not {shown(low)} and {shown(high)}")
    length = "*" if (low, high) == (0, "") else f"{{{low},{high}}}"
    expression = f"/(?s:.{length})/"
    if (pattern := schema.get("pattern")) is None:
        return expression
    if not isinstance(pattern, str):
        raise ValueError(f"tools: pattern must be a text, not {shown(pattern)}")
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else "(?s:.*)"
    inside = pattern.removeprefix("^").removesuffix("$") if not end else pattern.removeprefix("^")
    return f"{expression} & /{begin}({re.sub(r'(?<!\\)/', r'\\/', inside)}){end}/"

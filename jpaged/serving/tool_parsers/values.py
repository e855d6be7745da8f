"""Texts of a model that stand for values of other types.

They are converted as vLLM's parsers do (https://docs.vllm.ai/en/latest/features/tool_calling/): the text of a value
stays a text if its type is "string" or unknown. Otherwise it becomes a JSON value of one of the types, or stays a text
if it is none.
"""

import json
import math
from collections.abc import Callable

from jpaged.serving.codec import loads
from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.literals import json_of
from jpaged.serving.tool_parsers.schema import KINDS, properties_of, types_of

WORDS = {"true": True, "false": False, "none": None, "null": None}


def types_by_name(function: Function) -> dict[str, frozenset[str]]:
    """Return the types of a function's arguments; empty if its schema does not list the arguments."""
    try:
        return {name: types_of(schema) for name, schema in properties_of(function)[0].items()}
    except ValueError:
        return {}


def converter(types: frozenset[str]) -> Callable[[str], str] | None:
    """Return the conversion of a text in quotation marks to JSON; None: a text is allowed, or any type."""
    return None if not types or "string" in types else lambda text: converted(text, types)


def converted(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: of one of the types if the text is one, else a string."""
    try:
        value = loads(text.strip())
    except ValueError:
        written = json_of(text.strip()) if text.strip().startswith(("[", "{")) else None  # Seed-OSS writes Python
        value = WORDS.get(text.strip().lower(), text) if written is None else loads(written)
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(text, ensure_ascii=False)
    kind = KINDS.get(type(value), "null")
    if kind in types - {"string"} or (kind == "integer" and "number" in types):
        return json.dumps(value, ensure_ascii=False)
    if kind == "number" and "integer" in types and value.is_integer():
        return json.dumps(int(value))
    return json.dumps(text, ensure_ascii=False)

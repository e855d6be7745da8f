"""Patterns in JSON schemas, written so that llguidance keeps them.

Where a class of characters has all control characters, llguidance 1.9 accepts the escapes of a quotation mark and of a
backslash, too: it accepts a quotation mark for [^"].
"""

import json
from collections.abc import Iterator
from typing import Any

from jpaged.structured.subschemas import subschemas


def sound_patterns(schema: Any) -> Any:
    """Return a schema in whose patterns no class of characters contains NUL, which is of no use in texts.

    Args:
        schema: the schema, or its JSON; invalid JSON is returned as it is.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return schema
    for node in subschemas(root):
        if isinstance(pattern := node.get("pattern"), str):
            node["pattern"] = without_nul(pattern)
        if isinstance(named := node.get("patternProperties"), dict):
            node["patternProperties"] = {without_nul(name): value for name, value in named.items()}
    return root


def without_nul(pattern: str) -> str:
    """Return a regular expression without NUL in its classes of characters."""
    return "".join(f"[{part}&&[^\\x00]]" if part[0] == "[" and part[-1] == "]" else part for part in _parts(pattern))


def _parts(pattern: str) -> Iterator[str]:
    """Yield the outermost classes of characters of an expression, and the characters between them."""
    at, begin, depth = 0, 0, 0
    while at < len(pattern):
        size = 2 if pattern[at] == "\\" else 1
        part, at = pattern[at : at + size], at + size
        if part == "[":
            begin, depth = (begin, depth + 1) if depth else (at - 1, 1)
            at += pattern.startswith("^", at)
            at += pattern.startswith("]", at)  # as the first character it stands for itself
        elif part == "]" and depth:
            depth -= 1
            if not depth:
                yield pattern[begin:at]
        elif not depth:
            yield part
    if depth:
        yield pattern[begin:]  # never closed, as llguidance will say

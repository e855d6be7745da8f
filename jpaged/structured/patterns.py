"""Patterns in JSON schemas, written so that llguidance keeps them.

Where a class of characters has all control characters, llguidance 1.9 accepts the escapes of a quotation mark and of a
backslash, too: it accepts a quotation mark for [^"].
"""

from collections.abc import Iterable, Iterator
from typing import Any


def strip_nul(schemas: Iterable[dict[str, Any]]) -> None:
    """Take NUL, which is of no use in texts, out of the classes of characters in the patterns of schemas, in place."""
    for schema in schemas:
        if isinstance(pattern := schema.get("pattern"), str):
            schema["pattern"] = without_nul(pattern)
        if isinstance(named := schema.get("patternProperties"), dict):
            schema["patternProperties"] = {without_nul(name): value for name, value in named.items()}


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

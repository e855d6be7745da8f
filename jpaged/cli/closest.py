"""Suggestion for a mistyped name."""

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that a mistyped or abbreviated one stands for; None if no name is close to it."""
    names = [name for name in known if name != word]
    if matches := difflib.get_close_matches(word, names, n=1, cutoff=0.83):
        return matches[0]
    longer = [name for name in names if len(word.strip("-")) > 3 and name.startswith(word)]
    return longer[0] if len(longer) == 1 else None

"""Parameters as a trainer passes them."""

from collections.abc import Mapping
from typing import Any


def nested(leaves: Mapping[str, Any]) -> dict:
    """Return leaves by dotted names as nested dicts."""
    tree: dict = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(int(parent) if parent.isdigit() else parent, {})
        at[last] = leaf
    return tree

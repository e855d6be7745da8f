"""Schemas within a JSON schema."""

from collections.abc import Iterator
from typing import Any

NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # objects with schemas by name
DATA = {"const", "enum", "default", "examples"}


def subschemas(root: Any) -> Iterator[dict[str, Any]]:
    """Yield all schemas within a value."""
    values = [root]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            yield value
            for name, part in value.items():
                if name in NAMED and isinstance(part, dict):
                    values += part.values()
                elif name not in DATA:
                    values.append(part)

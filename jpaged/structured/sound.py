"""JSON schemas, written so that llguidance keeps them."""

import json
from collections.abc import Iterator
from typing import Any

from jpaged.structured.numbers import tighten_bounds
from jpaged.structured.patterns import strip_nul

# Of JSON: without a bound a model may go on indenting for ever.
WHITE_SPACE = r"[ \n\r\t]{1,24}"
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # objects with schemas by name
DATA = {"const", "enum", "default", "examples"}


def sound_schema(schema: Any) -> Any:
    """Return a schema that llguidance keeps where it would not keep the given one.

    Args:
        schema: the schema, or its JSON; invalid JSON is returned as it is.

    Raises:
        ValueError: a bound can't be kept.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return schema
    schemas = list(subschemas(root))
    tighten_bounds(schemas)
    strip_nul(schemas)
    return root


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

"""JSON schemas, written so that llguidance keeps them."""

from typing import Any

from jpaged.structured.numbers import sound_numbers
from jpaged.structured.patterns import sound_patterns

# Of JSON: without a bound a model may go on indenting for ever.
WHITE_SPACE = r"[ \n\r\t]{1,24}"


def sound_schema(schema: Any) -> Any:
    """Return a schema that llguidance keeps where it would not keep the given one.

    Args:
        schema: the schema, or its JSON; invalid JSON is returned as it is.

    Raises:
        ValueError: a bound can't be kept.
    """
    return sound_patterns(sound_numbers(schema))

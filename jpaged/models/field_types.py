"""Check of the values that files give to the fields of a dataclass."""

import reprlib
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

MAX_SIZE = 2**31 - 1

Hf = dict[str, Any]  # the content of a config.json


def require(fits: bool, name: str, rule: str, value: object) -> None:
    """Raise ValueError if a value does not fit; the message has the field's name, its rule and the value."""
    if not fits:
        raise ValueError(f"{name}: must be {rule}, not {value}")


def check_types(config: Any) -> None:
    """Check the values that a file gives to a dataclass's fields.

    Raises:
        ValueError: a value has the wrong type.
    """
    kinds: dict[Any, tuple[str, Callable[[Any], bool]]] = {
        int: ("a whole number", lambda x: type(x) is int and abs(x) <= MAX_SIZE),
        float: ("a finite number", lambda x: type(x) in (int, float) and abs(x) <= sys.float_info.max),
        bool: ("true or false", lambda x: isinstance(x, bool)),
        str: ("a text", lambda x: isinstance(x, str)),
    }
    for each in fields(config):
        value, hint = getattr(config, each.name), each.type
        if hint == float | None:
            if value is None:
                continue
            hint = float
        if hint in kinds:
            rule, fits = kinds[hint]
            require(fits(value), each.name, rule, reprlib.repr(value))

"""JSON schemas, written so that llguidance keeps them.

llguidance 1.9 accepts an exclusive whole bound itself if the other bound lies within the same unit, farther from 0: it
accepts 0 for 0 < x <= 0.5. It rounds bounds from 2**53 on, and has no numbers beyond 64 bits. Where a class of
characters has all control characters, it accepts the escapes of a quotation mark and of a backslash, too: it accepts a
quotation mark for [^"].
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# Of JSON: without a bound a model may go on indenting for ever.
WHITE_SPACE = r"[ \n\r\t]{1,24}"
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # objects with schemas by name
DATA = {"const", "enum", "default", "examples"}
EXACT = 2**53
LARGEST = 2**63 - 1024  # the largest float within 64 bits
LEAST = 1e-45  # below any float32 above 0; llguidance can't parse its own expressions of numbers with many more digits


def sound_schema(schema: Any) -> Any:
    """Return a schema that llguidance keeps where it would not keep the given one.

    Args:
        schema: the schema, or its JSON; invalid JSON is returned as it is.

    Raises:
        ValueError: a bound can't be kept.
    """
    try:
        root = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except (ValueError, RecursionError):
        return schema
    schemas = list(subschemas(root))
    tighten_bounds(schemas)
    for schema in schemas:
        if isinstance(pattern := schema.get("pattern"), str):
            schema["pattern"] = without_nul(pattern)
        if isinstance(named := schema.get("patternProperties"), dict):
            schema["patternProperties"] = {without_nul(name): value for name, value in named.items()}
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


class _Side(NamedTuple):
    """Names of a side's bounds. `sign` times a bound is a lower bound."""

    inclusive: str
    exclusive: str
    sign: int


SIDES = (_Side("minimum", "exclusiveMinimum", 1), _Side("maximum", "exclusiveMaximum", -1))


class _Bound(NamedTuple):
    name: str
    value: Any  # an int or a float
    is_exclusive: bool


def tighten_bounds(schemas: Sequence[dict[str, Any]]) -> None:
    """Make the bounds of schemas inclusive, in place, where llguidance would not keep them.

    The new bounds differ from the old ones by a few units in the last place of a float. Bounds beyond 64 bits become
    the largest numbers within.

    Args:
        schemas: all schemas within one: bounds of a number may stand in several, as with allOf or $ref.
    """
    lower, upper = ([bound.value for schema in schemas for bound in _bounds(schema, side)] for side in SIDES)
    closest = _closest(upper, 1), _closest(lower, -1)
    for schema in schemas:
        for side, others in zip(SIDES, closest):
            _tighten(schema, side, others)


def _closest(others: list[float], sign: int) -> dict[int, float]:
    """Return, by whole numbers from 0, the closest other bound in the unit above. `sign` times a number counts."""
    fractions = sorted(sign * other for other in others if 0 < sign * other < EXACT and other % 1)
    return {math.floor(other): other for other in reversed(fractions)}


def _bounds(schema: dict[str, Any], side: _Side) -> list[_Bound]:
    """Return the bounds of a side. In older drafts `exclusiveMinimum: true` makes `minimum` exclusive."""
    values = schema.get(side.inclusive), schema.get(side.exclusive)
    bounds = (_Bound(side.inclusive, values[0], values[1] is True), _Bound(side.exclusive, values[1], True))
    return [bound for bound in bounds if type(bound.value) in (int, float)]


def _tighten(schema: dict[str, Any], side: _Side, closest: dict[int, float]) -> None:
    """Replace the bounds of a side that llguidance would not keep together with the others."""
    for bound in _bounds(schema, side):
        other = closest.get(side.sign * bound.value) if bound.is_exclusive else None
        if other is None and abs(bound.value) < EXACT:
            continue
        if other is not None and bound.value == 0 and other < LEAST:
            raise ValueError(f"{bound.name}: 0 must be at least {LEAST} from the other bound")
        inside = _inside(bound, side.sign)
        inclusive: Any = schema.get(side.inclusive)
        if bound.name == side.exclusive and type(inclusive) in (int, float):
            inside = side.sign * max(side.sign * inclusive, side.sign * inside)
        if bound.is_exclusive:
            del schema[side.exclusive]
        schema[side.inclusive] = inside


def _inside(bound: _Bound, sign: int) -> float:
    """Return the first number inside a bound that llguidance reads as one inside."""
    if sign * bound.value > LARGEST:
        limit = f"at most {LARGEST}" if sign > 0 else f"at least {-LARGEST}"
        raise ValueError(f"{bound.name}: must be {limit}, not {bound.value}")
    exact = max(sign * bound.value, -LARGEST)
    inside = float(exact)
    if bound.value == 0:
        inside = LEAST
    elif abs(exact) < EXACT:
        inside = math.nextafter(inside, math.inf, steps=4)  # it may read a fraction as one of the next floats
    elif inside < exact or (inside == exact and bound.is_exclusive):
        inside = math.nextafter(inside, math.inf)
    return sign * (int(inside) if inside.is_integer() else inside)


def without_nul(pattern: str) -> str:
    """Return a regular expression without NUL, which is of no use in texts, in its classes of characters."""
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

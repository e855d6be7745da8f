"""JSON schemas of arguments: types of values, and rules of grammars for them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jpaged.core.params import shown
from jpaged.serving.conversation import Function
from jpaged.structured.sound import sound_schema

# Of the arguments in a grammar: without a bound, a weak model may write white space without end.
SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
MAX_DEPTH = 16  # of references and unions
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
UNIONS = ("anyOf", "oneOf", "allOf")
DEFINITIONS = ("$defs", "definitions")


def arguments_of(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments.

    Raises:
        ValueError: it has another type than "object".
    """
    parameters = {"type": "object"} | (function.parameters or {})
    if (kind := parameters["type"]) != "object":
        name = shown(function.name)
        raise ValueError(f'tools: the parameters of {name} must have the type "object", not {shown(kind)}')
    return parameters


def properties_of(function: Function) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the schemas of a function's arguments by name, and the names of the required ones.

    Raises:
        ValueError: the schema does not list the arguments.
    """
    parameters = arguments_of(function)
    named = parameters.get("properties", {})
    required = parameters.get("required", [])
    if not (isinstance(named, dict) and isinstance(required, list)) or any(each in parameters for each in UNIONS):
        message = "must list properties and required arguments, because this form of calls names each argument"
        raise ValueError(f"tools: the parameters of {shown(function.name)} {message}")
    kept = {key: parameters[key] for key in DEFINITIONS if key in parameters}
    schemas = {name: _within(schema, kept) for name, schema in named.items()}
    return schemas | {name: {} for name in required if name not in schemas}, frozenset(required)


def _within(schema: Any, definitions: Mapping[str, Any]) -> Any:
    return schema | dict(definitions) if isinstance(schema, dict) else schema


def json_rule(schema: Any) -> str:
    """Return the expression in Lark of the JSON texts that fit a schema."""
    spaced = schema | {"x-guidance": SPACING} if isinstance(schema, dict) else schema
    return f"%json {json.dumps(sound_schema(spaced))}"


def types_of(schema: Any) -> frozenset[str]:
    """Return the types that a schema allows by `type`, `enum`, `const`, unions and references; none: unknown."""
    return frozenset(_types(schema, schema, MAX_DEPTH))


def _types(schema: Any, root: Any, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or not depth:
        return
    kind = schema.get("type")
    yield from [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else ()
    if kind is None:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        yield from (KINDS.get(type(value), "null") for value in values or ())
    for union in UNIONS:
        for part in schema.get(union) or ():
            yield from _types(part, root, depth - 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(_resolved(reference, root), root, depth - 1)


def resolve(schema: Any) -> Any:
    """Return the schema that a schema refers to, with its definitions; the schema itself if it is no reference."""
    for _ in range(MAX_DEPTH):
        if not (isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str)):
            break
        kept = {key: schema[key] for key in DEFINITIONS if key in schema}
        schema = _within(_resolved(reference, schema), kept)
    return schema


def _resolved(reference: str, root: Any) -> Any:
    for key in reference.removeprefix("#").strip("/").split("/"):
        root = root.get(key) if isinstance(root, dict) else None
    return root


def texts_of(schema: Any) -> Sequence[str] | None:
    """Return the allowed texts of a schema with `const` or `enum`, if all of its values are texts."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) and values and all(isinstance(each, str) for each in values) else None


def in_order(parts: Sequence[tuple[str, bool]], separator: str) -> str:
    """Return the expression in Lark of parts in their order, with a separator between two.

    Args:
        parts: expressions, and whether they are required.
        separator: an expression; "": none.
    """

    def behind(index: int) -> str:
        later = (f"{separator} {part}".strip() if must else f"({separator} {part})?" for part, must in parts[index:])
        return " ".join(later)

    if not separator:
        return behind(0)
    ways = []
    for index, (part, must) in enumerate(parts):
        ways.append(f"{part} {behind(index + 1)}".strip())
        if must:
            return f"({' | '.join(ways)})"
    return f"({' | '.join(ways)})?" if ways else ""

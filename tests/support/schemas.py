"""Random JSON schemas and regular expressions, small enough for a small model to finish."""

import random
from typing import Any

WORDS = ("name", "age", "kind", "is_red", "größe", "a b", 'quo"te', "back\\slash", "x/y", "", "items")
DEPTH = 3
FORMATS = ("date", "uuid", "ipv4", "email")  # those that jsonschema checks by itself


def schema(rng: random.Random, depth: int = DEPTH) -> dict[str, Any]:
    """A schema whose every kind of value is reachable and ends."""
    simple = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    compound = ["array", "object", "object", "anyOf", "tuple"]
    kinds = compound if depth == DEPTH else simple + compound if depth else simple
    match rng.choice(kinds):
        case "string":
            return {"type": "string"} | _string(rng)
        case "integer":
            low = rng.randint(-1000, 1000)
            return rng.choice(
                [{"type": "integer"}, {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 50)}]
            )
        case "number":
            low = rng.randint(-10, 10)
            return rng.choice(
                [
                    {"type": "number", "minimum": low, "exclusiveMaximum": low + 1.5},
                    {"type": "number", "minimum": 0, "maximum": 1},
                ]
            )
        case "enum":
            return {
                "enum": rng.sample(
                    [1, -2.5, "red", "green", "Größe 7", None, True, ["a", 1], {"k": "v"}], rng.randint(1, 4)
                )
            }
        case "const":
            return {"const": rng.choice([0, "exactly this", {"a": [1, 2, {"b": None}]}, False])}
        case "array":
            low = rng.randint(0, 2)
            return {
                "type": "array",
                "items": schema(rng, depth - 1),
                "minItems": low,
                "maxItems": low + rng.randint(0, 2),
            }
        case "tuple":
            items = [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "object":
            names = rng.sample(WORDS, rng.randint(1, 4))
            return {
                "type": "object",
                "properties": {name: schema(rng, depth - 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "anyOf":
            return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case kind:
            return {"type": kind}


def _string(rng: random.Random) -> dict[str, Any]:
    match rng.randrange(4):
        case 0:
            return {"maxLength": rng.randint(0, 12)}
        case 1:
            return {"minLength": (low := rng.randint(1, 5)), "maxLength": low + rng.randint(0, 5)}
        case 2:
            return {"pattern": f"^{regex(rng, 1)}$"}
        case _:
            return {"format": rng.choice(FORMATS)}


def regex(rng: random.Random, depth: int = 3) -> str:
    """An expression that Python's `re` reads as llguidance does and soon decides: groups are not repeated."""
    atoms = [r"[a-f]", r"[0-9]", "x", "(?:yes)", r"[^a-z\n\"\\]", r"\.", r"[äöü]", "-"]
    parts = []
    for _ in range(rng.randint(1, 3)):
        if depth and rng.random() < 0.4:
            branches = [regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            parts.append(f"(?:{'|'.join(branches)})" + rng.choice(["", "", "?"]))
        else:
            low = rng.randint(0, 2)
            parts.append(rng.choice(atoms) + rng.choice(["", "?", f"{{{low},{low + rng.randint(0, 3)}}}"]))
    return "".join(parts)

"""The definition of a setting: its flag, help text, checks and documentation follow from it."""

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args, get_origin


@dataclass(frozen=True)
class Setting:
    """The description of one field of a settings dataclass.

    Attributes:
        help: one sentence without a full stop.
        group: the heading in --help.
        default: the text of a default that the model or the device decides.
        choices: the allowed values of a text.
        low, above, below, high: the bounds of a number; `above` and `below` exclude their values.
        power_of_two: the number must be one.
        unit: the unit of a number, or the kind of a text, in upper case: a placeholder in --help.
        flag: the name of the flag, if it differs from the name of the field.
    """

    help: str
    group: str
    default: str | None = None
    choices: tuple[str, ...] | None = None
    low: float | None = None
    above: float | None = None
    below: float | None = None
    high: float | None = None
    power_of_two: bool = False
    unit: str | None = None
    flag: str | None = None

    @property
    def text(self) -> str:
        """The help, with a default that is decided later."""
        return f"{self.help} (default: {self.default})" if self.default else self.help

    @property
    def allowed(self) -> str:
        """The allowed values in words, "" if all are."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.low is not None and self.high is not None:
            bounds = f"between {self.low:g} and {self.high:g}"
        else:
            parts = [("at least", self.low), ("above", self.above), ("below", self.below), ("at most", self.high)]
            bounds = " and ".join(f"{words} {bound:g}" for words, bound in parts if bound is not None)
        return f"a power of two {bounds}" if self.power_of_two else bounds

    def allows(self, value: Any) -> bool:
        """Return whether a value of the right type is allowed."""
        if isinstance(value, str | Mapping):
            return not self.choices or value in self.choices
        finite = not isinstance(value, float) or math.isfinite(value)
        above_low = (self.low is None or value >= self.low) and (self.above is None or value > self.above)
        below_high = (self.high is None or value <= self.high) and (self.below is None or value < self.below)
        return finite and above_low and below_high and not (self.power_of_two and value & (value - 1))


def setting(default: Any, help: str, *, group: str, by: str | None = None, **description: Any) -> Any:
    """Return a dataclass field with its `Setting`; `by` is the text of a default that is decided later."""
    return field(default=default, metadata={"setting": Setting(help, group, by, **description)})


def settings(config: type[Any]) -> Iterator[tuple[Field[Any], Setting]]:
    """Yield the fields of a dataclass that are settings."""
    return ((each, each.metadata["setting"]) for each in fields(config) if "setting" in each.metadata)


def kind(each: Field[Any]) -> tuple[type, bool]:
    """Return the type of a field's values, and whether None is one."""
    optional = isinstance(each.type, types.UnionType)
    stated = next(one for one in get_args(each.type) if one is not types.NoneType) if optional else each.type
    expected = get_origin(stated) or stated
    assert isinstance(expected, type)
    return expected, optional


KINDS = {
    str: "a text", Path: "a path", bool: "true or false", int: "a whole number", float: "a number",
    Mapping: "a JSON object",
}  # fmt: skip


def check(config: Any) -> None:
    """Check all settings of a dataclass. Raises ValueError with the field, the allowed values and the given one."""
    for each, description in settings(type(config)):
        value, (expected, optional) = getattr(config, each.name), kind(each)
        name = description.flag or each.name
        if value is None and optional:
            continue
        number: Any = {int: Integral, float: Real}.get(expected)
        if not isinstance(value, number or expected) or (number and isinstance(value, bool)):
            raise ValueError(f"{name}: must be {description.allowed or KINDS[expected]}, not {value!r}")
        if not description.allows(value):
            raise ValueError(f"{name}: must be {description.allowed}, not {value!r}")


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return two mappings as one. Values of the second take precedence; mappings in both are merged likewise."""
    both = {
        name: merged(first[name], second[name])
        for name in first.keys() & second.keys()
        if isinstance(first[name], Mapping) and isinstance(second[name], Mapping)
    }
    return {**first, **second, **both}


def documentation(config: type[Any]) -> str:
    """Return the Attributes section of a dataclass's docstring."""
    lines = [f"        {each.name}: {description.text}." for each, description in settings(config)]
    return "\n".join(["", "    Attributes:", *lines, ""])

"""Flags that follow from the settings of a dataclass."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any

from jpaged.cli.parser import count
from jpaged.cli.peer_flags import Object
from jpaged.setting import Setting, kind, settings

SHORT_FLAGS = {"tensor_parallel_size": ["-tp"]}  # vLLM's


def add_settings(
    parser: argparse.ArgumentParser, config: type[Any], *, positional: str = "", defaults: bool = True,
    description: str | None = None,
) -> None:  # fmt: skip
    """Add a flag for each setting of a dataclass, in the groups of the settings.

    Args:
        positional: the field whose value may also stand without its flag.
        defaults: False leaves fields without a flag out of the parsed arguments.
        description: text of the groups in --help.
    """
    groups: dict[str, Any] = {}
    for each, setting in settings(config):
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group, description)
        group, flag = groups[setting.group], "--" + (setting.flag or each.name).replace("_", "-")
        if each.name == positional:
            group = group.add_mutually_exclusive_group()
            group.add_argument(
                each.name, nargs="?", metavar=setting.unit, default=argparse.SUPPRESS, help=f"the same as {flag}"
            )
        group.add_argument(
            flag, *SHORT_FLAGS.get(each.name, ()), dest=each.name, help=setting.text,
            default=each.default if defaults else argparse.SUPPRESS, **_values(each, setting),
        )  # fmt: skip


def config_of[T](args: argparse.Namespace, config: type[T]) -> T:
    """Return a dataclass with the values of its flags, and defaults for the others."""
    names = (each.name for each in fields(config))  # type: ignore[arg-type]
    return config(**{name: value for name in names if (value := getattr(args, name, None)) is not None})


def _values(each: Field[Any], setting: Setting) -> dict[str, Any]:
    """Return argparse's options for the values of a field."""
    expected, _ = kind(each)
    if expected is bool:
        return {"action": "store_true" if each.default is False else argparse.BooleanOptionalAction}
    if setting.choices:
        return {"choices": setting.choices}
    if expected is Mapping:
        return {"metavar": setting.unit, "action": Object}
    parse: Callable[[str], Any] = count if expected is int else expected

    def parse_open(text: str) -> Any:
        return None if text == "auto" else parse(text)  # None: the model or the device decides

    parse_open.__name__ = parse.__name__  # for argparse's messages
    is_open = setting.default and expected is not str
    return {"metavar": setting.unit, "type": parse_open if is_open else parse}

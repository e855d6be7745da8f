"""Translation of command lines with flags of vLLM and SGLang, by the table of `jpaged.flags`."""

import argparse
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.flags import Flag, Table, as_text, parsed
from jpaged.setting import merged


class Object(argparse.Action):
    """Action of a flag whose value is a JSON object; objects of several such flags are merged."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Merge the object with the objects of earlier flags."""
        if not isinstance(content := parsed(values), dict):
            raise argparse.ArgumentError(self, f"must be a JSON object, not {values}")
        setattr(namespace, self.dest, merged(getattr(namespace, self.dest, None) or {}, content))


class Translation:
    """Translation of a command line to jpaged's flags.

    Args:
        table: flags of vLLM and SGLang; None: none are accepted.
        actions: argparse's actions of the command's flags, by flag.

    Attributes:
        notices: notices of the flags without an effect.
    """

    def __init__(self, table: Table | None, actions: Mapping[str, argparse.Action]):
        self._table, self._actions = table or Table(()), actions
        self.notices: list[str] = []

    def words(self, args: Sequence[str]) -> list[str]:
        """Return the words of a command line with jpaged's flags only; unknown flags stay as they are.

        Raises:
            ValueError: a flag is not supported; the message has the flag, its value and the reason.
        """
        left = deque(args)
        out: list[str] = []
        while left:
            if (word := left.popleft()) == "--":
                return [*out, word, *left]
            out += self._word(word, left)
        return out

    def _word(self, word: str, left: deque[str]) -> list[str]:
        name, equals, value = _split(word)
        if not name.startswith("-") or " " in name:  # a value or a text
            return [word]
        action, (base, dot, path) = self._actions.get(name), name.partition(".")
        flag = self._table.find(name)
        if action and not (flag and flag.ours == name):
            return _switch(name, value, action) if equals and action.nargs == 0 else [name + equals + value]
        if dot and isinstance(self._actions.get(base), Object):
            text = value if equals else _next(left, word)
            return [f"{base}={json.dumps(_nested(path.split('.'), parsed(text)))}"]
        if flag:
            content = value if equals else _value(flag, left, word)
            if dot and flag.ours:
                return self._applied(base, _nested(path.split("."), parsed(content)))
            return self._applied(name, content)
        positive = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") and not equals else ""
        if isinstance(self._actions.get(positive), argparse._StoreTrueAction):
            return []
        if positive and self._table.find(positive):
            return self._applied(positive, False)
        return [word]

    def _applied(self, name: str, value: Any) -> list[str]:
        """Return the words of a flag of the table."""
        try:
            effects = list(self._table.effects(name, value))
        except ValueError as error:
            text = "" if isinstance(value, bool) else f" {as_text(value)}"
            raise ValueError(f"{name}{text}: {error}") from None
        words: list[str] = []
        for ours, result, notice in effects:
            if ours is None:
                self.notices.append(f"{name}: {notice}")
            elif (action := self._actions.get(ours)) is None:
                words.append(name)  # unknown to this command
            elif action.nargs == 0:
                words += _switch(ours, as_text(result), action)
            else:
                words.append(f"{ours}={as_text(result)}")
        return words


def _split(word: str) -> tuple[str, str, str]:
    """Return a flag with dashes, "=" and its value; -O3 has the value 3."""
    if word.startswith("-O") and word[2:].isdigit():
        return "-O", "=", word[2:]
    flag, equals, value = word.partition("=")
    base, dot, path = flag.partition(".")
    return (base.replace("_", "-") if base.startswith("--") else base) + dot + path, equals, value


def _switch(name: str, value: str, action: argparse.Action) -> list[str]:
    """Return the words of a switch for `--flag=true` or `--flag=false`."""
    if value.lower() not in ("true", "false"):
        return [f"{name}={value}"]
    if value.lower() == "true":
        return [name]
    return [f"--no-{name.removeprefix('--')}"] if isinstance(action, argparse.BooleanOptionalAction) else []


def _value(flag: Flag, left: deque[str], word: str) -> Any:
    """Take the value that follows a flag; the value of a switch is True."""
    if flag.nargs == 0:
        return True
    if flag.nargs == "+":
        values = []
        while left and not left[0].startswith("-"):
            values.append(left.popleft())
        return values
    if flag.nargs == "?" and (not left or left[0].startswith("-")):
        return True
    return _next(left, word)


def _next(left: deque[str], word: str) -> str:
    if not left or left[0].startswith("--"):
        raise ValueError(f"argument {word}: expected one argument")
    return left.popleft()


def _nested(path: Sequence[str], value: Any) -> Any:
    """Return {"a": {"b": value}} for the path a, b."""
    return {path[0]: _nested(path[1:], value)} if path else value

"""Flags of vLLM and SGLang, and the keywords of vLLM's `LLM`: their effect in jpaged.

Each flag that jpaged does not have under the same name is in one of three classes: it sets a flag of jpaged, it is not
needed (a notice says why), or it is refused (an error says why). `flags.toml` is the table.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any, NamedTuple

from jpaged.config import EngineConfig
from jpaged.setting import kind, merged, settings

OFF = frozenset({"", "0", "false", "none", "null", "{}", "[]"})  # values that leave a feature unused

Nargs = int | str  # as in argparse; 0: a switch
NARGS: dict[str, Nargs] = {"switches": 0, "values": 1, "options": "?", "lists": "+"}


@dataclass(frozen=True)
class Flag:
    """Flags with the same effect.

    Attributes:
        names: the flags; one with `*` is a pattern.
        nargs: number of values on the command line.
        ours: flag of jpaged that they set; None: they set none.
        field: field of the JSON object of `ours` that they set; "": they set all of it.
        convert: values of `ours` for some values; others stay as they are.
        harmless: values without an effect; None: all.
        reason: why these have no effect.
        refusal: the error for other values.
    """

    names: tuple[str, ...]
    nargs: Nargs
    ours: str | None = None
    field: str = ""
    convert: Mapping[str, Any] | None = None
    harmless: frozenset[str] | None = frozenset()
    reason: str = ""
    refusal: str = ""

    def converted(self, value: Any) -> Any:
        """Return a value as `ours` takes it. Raises ValueError if it is not supported."""
        if self.field:
            return {self.field: parsed(value)}
        if not self.convert:
            return value
        text = as_text(value)
        if self.nargs == 0:
            text = "false" if text.lower() in OFF else "true"
        if self.refusal and text not in self.convert:
            raise ValueError(self.refusal)
        return self.convert.get(text, value)


class Effect(NamedTuple):
    """Effect of a flag with a value: it sets `ours` to `value`; if that is None, `notice` says why it has none."""

    ours: str | None
    value: Any
    notice: str


class Table:
    """Flags by name.

    Args:
        flags: a name stands in one of them, or matches the pattern of one.
    """

    def __init__(self, flags: Iterable[Flag]):
        self.flags = tuple(flags)
        self._exact = {name: flag for flag in self.flags for name in flag.names if "*" not in name}
        self._patterns = {name: flag for flag in self.flags for name in flag.names if "*" in name}
        self._with_fields = {name.partition(".")[0] for name in (*self._exact, *self._patterns) if "." in name}

    @classmethod
    def read(cls, package: str, name: str) -> "Table":
        """Read a table in TOML; the comment at the head of `flags.toml` describes the format."""
        content = tomllib.loads(resources.files(package).joinpath(name).read_text(encoding="utf-8"))
        return cls(_flags(content))

    @property
    def names(self) -> Set[str]:
        """Names of the flags, without patterns."""
        return self._exact.keys()

    def matches(self, name: str) -> list[Flag]:
        """Return the entry of a flag, or the entries whose patterns it matches."""
        if name in self._exact:
            return [self._exact[name]]
        return [flag for pattern, flag in self._patterns.items() if fnmatchcase(name, pattern)]

    def find(self, name: str) -> Flag | None:
        """Return the entry of a flag such as --enable-lora, or of a field of one such as -cc.mode; None without one."""
        if matches := self.matches(name):
            return matches[0]
        base, dot, _ = name.partition(".")
        return self.find(base) if dot else None

    def effects(self, name: str, value: Any) -> Iterator[Effect]:
        """Yield the effects of a flag of the table: one, or one for each field of an object.

        Args:
            value: of the command line (a text, or True or False for a switch) or of Python.

        Raises:
            ValueError: the flag is not supported with this value; the message is the reason.
        """
        flag = self.find(name)
        assert flag is not None, name
        if name in self._with_fields and isinstance(members := parsed(value), Mapping) and members:
            for member, inner in members.items():
                yield from self.effects(f"{name}.{member}", inner)
        elif flag.ours:
            yield Effect(flag.ours, flag.converted(value), "")
        elif flag.harmless is None or as_text(value).lower() in flag.harmless:
            yield Effect(None, None, flag.reason)
        else:
            raise ValueError(flag.refusal)


# The meaning of an entry that is only a text, by section of a table.
SECTIONS = {"sets": "values", "needless": "switches", "refused": "options"}


def _flags(content: Mapping[str, Mapping[str, Any]]) -> Iterator[Flag]:
    """Yield the flags of a table as TOML has it."""
    for section, alone in SECTIONS.items():
        for key, entry in content[section].items():
            rules = {alone: entry} if isinstance(entry, str) else dict(entry)
            lists = {nargs: tuple(rules.pop(name).split()) for name, nargs in NARGS.items() if name in rules}
            for nargs, names in lists.items():
                if section == "sets":
                    ours, _, field = key.partition(".")
                    yield Flag(names, nargs, ours, field, **rules)
                elif section == "needless":
                    yield Flag(names, nargs, harmless=None, reason=f"not needed, {key}", **rules)
                else:
                    unused = OFF if nargs == NARGS["options"] else frozenset()
                    harmless, reason = unused.union(rules.get("harmless", ())), rules.get("reason", "the default")
                    yield Flag(names, nargs, harmless=harmless, reason=reason, refusal=key)


ENGINE = Table.read("jpaged", "flags.toml")


def parsed(value: Any) -> Any:
    """Return the value of a text in JSON; other values and other texts as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def as_text(value: Any) -> str:
    """Return a value as the command line has it."""
    return value if isinstance(value, str) else json.dumps(value)


def engine_settings(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of `EngineConfig` that keywords of `LLM` set, and notices of keywords without an effect.

    None, and "auto" for a setting that the model or the device decides, leave a setting open.

    Raises:
        TypeError: a keyword is unknown.
        ValueError: a keyword is not supported with its value. Both messages have the keyword and the reason.
    """
    names = {each.name for each in fields(EngineConfig)}
    decided = {each.name for each, one in settings(EngineConfig) if one.default and kind(each)[0] in (int, float)}
    values: dict[str, Any] = {}
    notices: list[str] = []
    for keyword, value in keywords.items():
        for ours, result, notice in _effects(keyword, value, names) if value is not None else ():
            name = (ours or "").removeprefix("--").replace("-", "_")
            if ours is None:
                notices.append(f"{keyword}: {notice}")
            elif name not in names:
                raise ValueError(f"{keyword}: a setting of jpaged serve, not of an engine")
            elif isinstance(result, Mapping) and isinstance(values.get(name), Mapping):
                values[name] = merged(values[name], result)
            elif not (result == "auto" and name in decided):
                values[name] = result
    return values, notices


def _effects(keyword: str, value: Any, names: Set[str]) -> list[Effect]:
    """Return the effects of a keyword; `names` are the fields of `EngineConfig`."""
    name = "--" + keyword.replace("_", "-")
    flag = ENGINE.find(name)
    if keyword in names and not (flag and flag.ours == name):
        return [Effect(name, value, "")]
    if flag is None:
        close = difflib.get_close_matches(keyword, names, n=1, cutoff=0.8)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise TypeError(f"{keyword}: not a setting of an engine, whose settings are those of EngineConfig{hint}")
    try:
        return list(ENGINE.effects(name, value))
    except ValueError as error:
        raise ValueError(f"{keyword}: {error}") from None

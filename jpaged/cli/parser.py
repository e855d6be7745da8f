"""Parser with suggestions for mistyped flags, errors of one line, and a config file with flags as keys."""

import argparse
import difflib
import functools
import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from jpaged.cli.peer_flags import Object, Translation
from jpaged.flags import Table, as_text

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def count(text: str) -> int:
    """Parse a number such as 4096, 32k (32,000), 25.6k or 32K (32,768). It is a type of flags."""
    match = re.fullmatch(r"(-?\d+)|(\d+(?:\.\d+)?)([kmg])|(\d+)([KMG])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 4096, 32k (32,000) or 32K (32,768)")
    plain, decimal, unit, binary, binary_unit = match.groups()
    if plain:
        return int(plain)
    value = float(decimal) * UNITS[unit] if decimal else int(binary) * UNITS[binary_unit]
    return round(value)


def existing_file(text: str) -> Path:
    """Return the path of a file. It is a type of flags."""
    path = Path(text)
    if not path.exists() or path.is_dir():  # a pipe is allowed
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return path


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter of help texts: it keeps examples as they are, and adds defaults to flags where they are informative."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is False or action.default in (None, [], argparse.SUPPRESS)
        if silent or not action.option_strings or not action.help or "default" in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap paragraphs at the terminal's width; indented ones stay as they are."""
        filled = [
            "\n".join(indent + line for line in part.splitlines())
            if part.startswith(" ")
            else textwrap.fill(part, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
            for part in text.strip().split("\n\n")
        ]
        return "\n\n".join(filled)


class Parser(argparse.ArgumentParser):
    """Parser of one command's flags. Flags can't be abbreviated, but may have underscores as in `--max_model_len`.

    If --config is one of the flags, it names a YAML file with more flags. The command line takes precedence.

    Args:
        prog: name of the command in messages.
        description: help text.
        peers: flags of vLLM and SGLang that are accepted. The parsed arguments have `notices`, one for each of these
            flags without an effect.
        flags_elsewhere: returns the flags of each other command, for errors about a flag of another command.
    """

    def __init__(
        self, prog: str, description: str | None, peers: Table | None,
        flags_elsewhere: Callable[[], Mapping[str, Collection[str]]],
    ):  # fmt: skip
        formatter = functools.partial(HelpFormatter, max_help_position=32)
        super().__init__(prog, "%(prog)s [flags]", description, allow_abbrev=False, formatter_class=formatter)
        self._peers, self._flags_elsewhere = peers, flags_elsewhere

    @property
    def flags(self) -> Collection[str]:
        """Names of all flags, with their dashes."""
        return self._option_string_actions

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the flags of the command line and of the file that --config names."""
        translation = Translation(self._peers, self._option_string_actions)
        words = self._known(args or (), translation)
        if path := self._config(words):
            try:
                words_of_file = read_config(path, self._option_string_actions, self._peers)
            except (ValueError, OSError) as error:
                self.error(f"--config: {' '.join(str(error).split())}")
            namespace = super().parse_args(self._known(words_of_file, translation), namespace)
        namespace = super().parse_args(words, namespace)
        namespace.notices = translation.notices
        return namespace

    def _known(self, args: Sequence[str], translation: Translation) -> list[str]:
        """Return the words of a command line with the command's flags. An unknown flag is an error."""
        try:
            words = translation.words(args)
        except ValueError as error:
            self.error(str(error))
        for word in words:
            flag = word.partition("=")[0]
            if flag == "--":
                break
            if flag.startswith("--") and " " not in flag and flag not in self.flags:
                if meant := closest(flag.replace("_", "-"), {*self.flags, *(self._peers.names if self._peers else ())}):
                    self.error(f"unknown flag {flag}; did you mean {meant}?")
                if homes := [command for command, flags in self._flags_elsewhere().items() if flag in flags]:
                    self.error(f"unknown flag {flag}; it is one of {', '.join(homes)}")
                self.error(f"unknown flag {flag}; {self.prog} --help lists them")
        return words

    def _config(self, words: Sequence[str]) -> str | None:
        """Return the value of --config; None if the command does not have it."""
        if "--config" not in self.flags:
            return None
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--config")
        try:
            path: str | None = parser.parse_known_args(words)[0].config
            return path
        except argparse.ArgumentError:  # it has no value, which is for this parser to say
            return None

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and a message of one line."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def read_config(path: str, actions: Mapping[str, argparse.Action], peers: Table | None = None) -> list[str]:
    """Return a file's flags as words of a command line.

    Args:
        actions: the actions of the command's flags, by name with dashes.
        peers: flags of vLLM and SGLang that are accepted too.

    Raises:
        ValueError: the file is not such a mapping, a key is not a flag, or a value is invalid for its flag.
        OSError: the file can't be read.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must have flags as keys, such as port: 8000")
    names = [flag[2:] for flag in actions if flag.startswith("--") and flag not in ("--help", "--config")]
    words: list[str] = []
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if peers and name not in names and peers.find(f"--{name}"):
            words.append(f"--{name}={as_text(value)}")
            continue
        if name not in names:
            hint = closest(name, names)
            raise ValueError(f"{path}: unknown key {key}" + (f"; did you mean {hint}?" if hint else ""))
        try:
            words += _words(name, actions[f"--{name}"], value)
        except ValueError as error:
            raise ValueError(f"{path}: {key}: {error}") from error
    return words


def _words(name: str, action: argparse.Action, value: Any) -> Iterator[str]:
    if isinstance(action, Object) and isinstance(value, dict):
        yield f"--{name}={json.dumps(value)}"
        return
    if isinstance(action, Object) and value is None:  # as vLLM writes an object that is not set
        return
    if value is None or isinstance(value, dict):
        raise ValueError("a value is missing" if value is None else "a mapping is no value of a flag")
    values = value if isinstance(value, list) else [value]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {value!r}")
        if isinstance(action, argparse.BooleanOptionalAction):
            positive = name.removeprefix("no-")
            yield f"--{positive}" if value == (name == positive) else f"--no-{positive}"
        elif value:
            yield f"--{name}"
    elif any(isinstance(each, bool | list | dict | None) for each in values):
        raise ValueError(f"{value!r} is no value of this flag; quote a text such as 'yes' or 'none'")
    elif action.nargs in ("+", "*"):
        yield from (f"--{name}", *map(str, values))
    elif isinstance(value, list):
        raise ValueError("takes one value, not a list")
    else:
        yield f"--{name}={value}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that a mistyped or abbreviated one stands for; None if no name is close to it."""
    names = [name for name in known if name != word]
    if matches := difflib.get_close_matches(word, names, n=1, cutoff=0.83):
        return matches[0]
    longer = [name for name in names if len(word.strip("-")) > 3 and name.startswith(word)]
    return longer[0] if len(longer) == 1 else None

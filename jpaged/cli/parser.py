"""Parser with suggestions for mistyped flags and errors of one line."""

import argparse
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jpaged.cli.closest import closest
from jpaged.cli.config_file import read_config
from jpaged.cli.peer_flags import Translation
from jpaged.flags import Table

Flags = Mapping[str, Collection[str]]  # of each command
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

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, **{"max_help_position": 32, **options})

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is False or action.default in (None, [], argparse.SUPPRESS)
        if silent or not action.option_strings or not action.help or "default" in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap paragraphs at the terminal's width; indented ones stay as they are."""
        paragraphs = text.strip().split("\n\n")
        filled = [
            "\n".join(indent + line for line in paragraph.splitlines())
            if paragraph.startswith(" ")
            else textwrap.fill(
                paragraph, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )
            for paragraph in paragraphs
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
        flags_elsewhere: returns the flags of the other commands, for errors about a flag of another command.
    """

    def __init__(
        self, prog: str, description: str | None, peers: Table | None, flags_elsewhere: Callable[[], Flags] = dict
    ):
        usage = "%(prog)s [flags]"
        super().__init__(prog, usage, description, allow_abbrev=False, formatter_class=HelpFormatter)
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
                self.error(f"unknown flag {flag}{self._hint(flag)}")
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

    def _hint(self, flag: str) -> str:
        if meant := closest(flag.replace("_", "-"), {*self.flags, *(self._peers.names if self._peers else ())}):
            return f"; did you mean {meant}?"
        if homes := [command for command, flags in self._flags_elsewhere().items() if flag in flags]:
            return f"; it is one of {', '.join(homes)}"
        return f"; {self.prog} --help lists them"

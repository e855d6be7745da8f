"""A parser that knows which flag was meant, and whose errors are one line."""

import argparse
import difflib
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn


def closest(given: str, known: Iterable[str]) -> str | None:
    """The known name that a mistyped one was most likely meant to be."""
    return next(iter(difflib.get_close_matches(given, list(known), n=1, cutoff=0.7)), None)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Examples as they are written, and after each flag its default, if it has one that says something."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, **{"max_help_position": 32, **options})

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is False or action.default in (None, [], argparse.SUPPRESS)
        if silent or not action.option_strings or not action.help or "default" in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs to the terminal's width; those that are indented stay as they are."""
        paragraphs = text.strip().split("\n\n")
        filled = [
            "\n".join(indent + line for line in paragraph.splitlines())
            if paragraph.startswith(" ")
            else textwrap.fill(paragraph, width, initial_indent=indent, subsequent_indent=indent)
            for paragraph in paragraphs
        ]
        return "\n\n".join(filled)


class Parser(argparse.ArgumentParser):
    """A parser of one command's flags; they can't be shortened.

    Args:
        flags_elsewhere: gives every other command's flags, for one that is none of this command's.
    """

    def __init__(
        self, *args: Any, flags_elsewhere: Callable[[], Mapping[str, Collection[str]]] | None = None, **options: Any
    ):
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": HelpFormatter, **options})
        self._flags_elsewhere = flags_elsewhere or dict

    @property
    def flags(self) -> Collection[str]:
        """Every flag's name, with its dashes."""
        return self._option_string_actions

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        for given in args or ():
            flag = given.partition("=")[0]
            if flag == "--":
                break
            if flag.startswith("--") and " " not in flag and flag not in self.flags:
                self.error(f"unknown flag {flag}{self._hint(flag)}")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _hint(self, flag: str) -> str:
        if meant := closest(flag, self.flags):
            return f"; did you mean {meant}?"
        if homes := [command for command, flags in self._flags_elsewhere().items() if flag in flags]:
            return f"; it is one of {', '.join(homes)}"
        return f"; {self.prog} --help lists them"

"""Config file of --config: flags as keys of a YAML mapping."""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from jpaged.cli.closest import closest
from jpaged.cli.peer_flags import Object
from jpaged.flags import Table, as_text


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
    names = [
        flag.removeprefix("--") for flag in actions if flag.startswith("--") and flag not in ("--help", "--config")
    ]
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

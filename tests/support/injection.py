"""Exceptions in the functions that get the data of one request, found by introspection."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any


class Injected(Exception):
    """The exception of a test."""


def functions_of(modules: list[ModuleType]) -> dict[str, tuple[object, str, Any]]:
    """The functions and methods that modules define, by qualified name, each with its owner, its name there and itself.

    Properties are left out: they are attributes of the data.
    """
    found: dict[str, tuple[object, str, Any]] = {}
    for module in modules:
        owners = [
            module,
            *(c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__),
        ]
        for owner in owners:
            for name, value in vars(owner).items():
                function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                generated = not isinstance(function, FunctionType) or function.__module__ != module.__name__
                if not generated and inspect.getsourcefile(function) == module.__file__:
                    found[f"{module.__name__}.{function.__qualname__}"] = owner, name, value
    return found


@contextmanager
def wrapped(
    functions: dict[str, tuple[object, str, Any]], before: Callable[[str, tuple[Any, ...]], None]
) -> Iterator[None]:
    """Call `before(name, arguments)` at each call of the functions, wherever they were imported."""
    undo: list[tuple[object, str, Any]] = []
    for qualified, (owner, name, value) in functions.items():
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value

        @functools.wraps(function)
        def wrapper(*args: Any, _function: Any = function, _name: str = qualified, **kwargs: Any) -> Any:
            before(_name, (*args, *kwargs.values()))
            return _function(*args, **kwargs)

        replacement = type(value)(wrapper) if value is not function else wrapper
        places: list[tuple[object, str]] = [(owner, name)]
        if isinstance(owner, ModuleType):
            others = [m for key, m in sys.modules.items() if key.startswith("jpaged.") and m is not owner]
            places += [(m, key) for m in others for key, held in vars(m).items() if held is value]
        for place, key in places:
            undo.append((place, key, vars(place)[key]))
            setattr(place, key, replacement)
    try:
        yield
    finally:
        for place, key, value in reversed(undo):
            setattr(place, key, value)

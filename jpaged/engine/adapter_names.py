"""Names of an engine's adapters. Each load of a name has a number of its own, by which requests and plans know it."""

import itertools
from collections.abc import Callable, Iterator

from jpaged.core.params import InvalidParameter


class AdapterNames:
    """The adapters that new requests may have, by name, and earlier ones that some requests still have."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._counter = itertools.count()
        self._retired: dict[int, str] = {}

    def __iter__(self) -> Iterator[str]:
        return iter([*self._numbers])

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def number(self, name: str | None) -> int | None:
        """Return the number of a name; InvalidParameter if there is no such adapter."""
        if name is not None and name not in self._numbers:
            raise InvalidParameter("adapter", f"{name!r} is not loaded; loaded: {', '.join(self._numbers) or 'none'}")
        return None if name is None else self._numbers[name]

    def name_of(self, number: int) -> str | None:
        """Return the name of an adapter that some request may have; None if none has it any more."""
        current = (name for name, each in self._numbers.items() if each == number)
        return next(current, None) or self._retired.get(number)

    def next_number(self) -> int:
        """Return a number for a new adapter."""
        return next(self._counter)

    def add(self, name: str, number: int) -> None:
        """Give a name to an adapter, in place of an earlier one."""
        self._retire(name)
        self._numbers[name] = number

    def remove(self, name: str) -> None:
        """Take a name away; ValueError if there is no such adapter."""
        if name not in self._numbers:
            raise ValueError(f"adapter: {name!r} is not loaded")
        self._retire(name)

    def take_unused(self, is_used: Callable[[int], bool]) -> list[int]:
        """Return the adapters without a name that no request has, and forget them."""
        unused = [number for number in self._retired if not is_used(number)]
        for number in unused:
            del self._retired[number]
        return unused

    def _retire(self, name: str) -> None:
        if (number := self._numbers.pop(name, None)) is not None:
            self._retired[number] = name

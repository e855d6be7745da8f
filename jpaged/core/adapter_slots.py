"""Slots of low-rank adapters on the device: which adapter each holds, and how many sequences use it."""

import itertools
from collections import Counter
from collections.abc import Iterable

from jpaged.core.plan import NO_SLOT
from jpaged.core.queue import RequestQueue
from jpaged.core.request import Request

MOST_PASSED = 256  # requests that start before one that waits for a slot


class AdapterSlots:
    """Slots of `size` adapters. An adapter without running sequences stays until another one needs its slot.

    An adapter is a number, and another number for each of its versions.
    """

    def __init__(self, size: int = 0):
        self.size = size
        self._slots: dict[int, int] = {}  # of resident adapters, the least recently used first
        self._users = Counter[int]()  # sequences with rows, by adapter
        self._loads: dict[int, int] = {}  # {slot: adapter} since the last plan
        self._free = list(range(size))[::-1]

    def has_room(self, adapter: int | None) -> bool:
        """Return whether a sequence with this adapter can run now."""
        return adapter is None or adapter in self._slots or bool(self._free) or len(self._users) < self.size

    def is_used(self, adapter: int) -> bool:
        """Return whether a running sequence has this adapter."""
        return adapter in self._users

    def take(self, adapter: int | None) -> int:
        """Return the slot of a further sequence's adapter, which replaces another one if it is not resident."""
        if adapter is None:
            return NO_SLOT
        slot = self._slots.pop(adapter, None)
        if slot is None:
            if not self._free:
                self.forget(next(each for each in self._slots if each not in self._users))
            slot = self._free.pop()
            self._loads[slot] = adapter
        self._slots[adapter] = slot
        self._users[adapter] += 1
        return slot

    def release(self, adapter: int | None) -> None:
        """Record that a sequence with this adapter has left its row."""
        if adapter is not None:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]

    def forget(self, adapter: int) -> None:
        """Empty the slot of an adapter that no sequence uses, if it has one."""
        assert adapter not in self._users, f"adapter {adapter} is in use"
        if (slot := self._slots.pop(adapter, None)) is not None:
            self._free.append(slot)
            self._loads.pop(slot, None)

    def loads(self) -> tuple[tuple[int, int], ...]:
        """Return (adapter, slot) of the loads for the next plan, and reset them."""
        loads, self._loads = tuple((adapter, slot) for slot, adapter in self._loads.items()), {}
        return loads

    def clear(self) -> None:
        """Empty all slots."""
        self._slots.clear()
        self._users.clear()
        self._loads.clear()
        self._free = list(range(self.size))[::-1]

    def check_invariants(self, adapters: Iterable[int | None]) -> None:
        """Check the slots against the adapters of all sequences that have rows."""
        expected = Counter(adapter for adapter in adapters if adapter is not None)
        assert self._users == expected, f"users: {self._users}, expected {expected}"
        assert self._users.keys() <= self._slots.keys(), "an adapter in use has no slot"
        slots = Counter([*self._slots.values(), *self._free])
        assert slots == Counter(range(self.size)), f"slots: {slots}"


class Passing:
    """The order of waiting requests, in which some pass one that waits for a slot.

    They need none: they have no adapter, or one that running sequences have. Slots therefore do not change their
    adapter with each request. At most `MOST_PASSED` requests pass a request, so that it starts.
    """

    def __init__(self) -> None:
        self._first: Request | None = None
        self._num_passed = 0

    def next(self, waiting: RequestQueue, slots: AdapterSlots) -> Request:
        """Return the request to start next; it may lack a slot."""
        first = waiting.first
        if slots.has_room(first.adapter):
            return first
        if first is not self._first:
            self._first, self._num_passed = first, 0
        if self._num_passed < MOST_PASSED:
            for request in itertools.islice(waiting, 1, 1 + MOST_PASSED):
                if request.adapter is None or slots.is_used(request.adapter):
                    return request
        return first

    def admit(self, request: Request) -> None:
        """Record that a request starts."""
        if request is not self._first:
            self._num_passed += 1
        else:
            self._first = None

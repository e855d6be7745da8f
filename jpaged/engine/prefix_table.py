"""Choice of a replica for a prompt: the one whose prefix cache holds the longest part of it, unless it is busy."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence


class PrefixTable[Replica: Hashable]:
    """Table of the replicas that were last given each prefix of past prompts.

    Prefixes are multiples of `step` long. Each is stored as a hash of 64 bits: two prefixes with one hash cost a wrong
    choice, and no wrong result. The least recently used prefixes are dropped, longer ones before the shorter ones that
    they continue.

    Args:
        capacity: maximum number of stored prefixes, about 150 bytes each.
        step: tokens, characters or bytes between two prefixes. Blocks of the replicas' caches are a good size.
        max_imbalance: a replica is chosen for its prefixes only if its load exceeds the smallest load by at most this.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(self, capacity: int = 100_000, step: int = 64, max_imbalance: float = 8):
        for name, value, low in (("capacity", capacity, 1), ("step", step, 1), ("max_imbalance", max_imbalance, 0)):
            if value < low:
                raise ValueError(f"{name}: must be at least {low}, not {value}")
        self._capacity, self._step, self._max_imbalance = capacity, step, max_imbalance
        self._owners: OrderedDict[int, Replica] = OrderedDict()  # by prefix, least recently used first
        self._num_prefixes: Counter[Replica] = Counter()

    def __len__(self) -> int:
        return len(self._owners)

    def choose(
        self, prompt: str | bytes | Sequence[int], loads: Mapping[Replica, float], *, salt: Hashable = ""
    ) -> Replica:
        """Return the replica for a prompt, in time proportional to its length.

        The replica that was last given the longest stored prefix is chosen, among those of `loads` that are not too
        busy. If there is none, the least loaded replica is chosen, of several the one with the fewest prefixes, and of
        several the first.

        Args:
            prompt: text or token ids. All prompts of a table must be of one kind to have common prefixes.
            loads: running and waiting requests of each available replica.
            salt: prompts with different salts have no common prefixes.

        Raises:
            ValueError: `loads` is empty.
        """
        if not loads:
            raise ValueError("loads: must hold at least one replica")
        limit = min(loads.values()) + self._max_imbalance
        chosen: Replica | None = None
        for prefix in self._prefixes(prompt, salt):
            owner = self._owners.get(prefix)
            if owner is not None and loads.get(owner, limit + 1) <= limit:
                chosen = owner
        if chosen is not None:
            return chosen
        return min(loads, key=lambda replica: (loads[replica], self._num_prefixes[replica]))

    def remember(self, prompt: str | bytes | Sequence[int], replica: Replica, *, salt: Hashable = "") -> None:
        """Store the prefixes of a prompt that a replica was given, in place of their earlier owners."""
        # The longest first, so that no prefix is dropped before its continuations.
        for prefix in reversed([*self._prefixes(prompt, salt)]):
            earlier = self._owners.pop(prefix, None)
            if earlier is not None:
                self._count(earlier, -1)
            self._owners[prefix] = replica
            self._count(replica, 1)
        while len(self._owners) > self._capacity:
            _, owner = self._owners.popitem(last=False)
            self._count(owner, -1)

    def forget(self, replica: Replica) -> None:
        """Drop the prefixes of a replica whose cache is lost, in time proportional to the table's size."""
        for prefix in [prefix for prefix, owner in self._owners.items() if owner == replica]:
            del self._owners[prefix]
        del self._num_prefixes[replica]

    def _count(self, replica: Replica, change: int) -> None:
        self._num_prefixes[replica] += change
        if not self._num_prefixes[replica]:
            del self._num_prefixes[replica]

    def _prefixes(self, prompt: str | bytes | Sequence[int], salt: Hashable) -> Iterator[int]:
        """Yield the hashes of the prefixes, the shortest first, at most as many as the table can hold."""
        prefix, step = hash(salt), self._step
        for start in range(0, min(len(prompt) // step, self._capacity) * step, step):
            part = prompt[start : start + step]
            prefix = hash((prefix, part if isinstance(part, str | bytes) else tuple(part)))
            yield prefix

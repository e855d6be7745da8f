"""Changes of the prefix cache for routers: texts that come to a memory of the engine, and texts that leave it."""

from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.core.blocks import Block, Node
from jpaged.core.text_key import key_of


@dataclass
class Stored:
    """Whole blocks that follow each other in a text and have come to a memory.

    Attributes:
        keys: of the texts up to the end of each block (`text_key`).
        parent: key of the text before the first one; None: the text begins with it.
        tokens: the tokens of all blocks.
        salt: of the text, with its adapter (`salt_with`).
        kind: group of layers, or the number after all groups for states of recurrent layers.
        on_host: whether the memory is the host's; else it is the device's.
    """

    keys: list[bytes]
    parent: bytes | None
    tokens: list[int]
    salt: str
    kind: int
    on_host: bool


@dataclass
class Removed:
    """Blocks that have left a memory, with the attributes of `Stored`."""

    keys: list[bytes]
    kind: int
    on_host: bool


@dataclass
class Cleared:
    """All texts have left all memories."""


CacheEvent = Stored | Removed | Cleared


class CacheEvents:
    """Record of the changes of a prefix tree. Blocks that no request can find, or that are not whole, are left out.

    The changes of one kind in one memory keep their order, and those that follow each other are one event. All events
    before and after a `Cleared` keep theirs, too.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._events: list[CacheEvent] = []
        self._last: dict[tuple[int, bool], Stored | Removed] = {}

    def take(self) -> Sequence[CacheEvent]:
        """Return the changes since the last call."""
        taken, self._events = self._events, []
        self._last.clear()
        return taken

    def clear(self) -> None:
        """Add the loss of all texts."""
        self._last.clear()
        self._events.append(Cleared())

    def store(self, node: Node, block: Block) -> None:
        """Add a block of a node that holds its text now."""
        if not self._is_told(node):
            return
        assert node.salt is not None, "the text can be found"
        key, before = key_of(node), node.before.key if node.before else None
        last = self._last.get((block.group, block.is_copy))
        if isinstance(last, Stored) and last.keys[-1] == before:
            last.keys.append(key)
            last.tokens += node.tokens
        else:
            self._add(Stored([key], before, [*node.tokens], node.salt, block.group, block.is_copy))

    def remove(self, node: Node, block: Block) -> None:
        """Add a block of a node that holds its text no longer."""
        if not self._is_told(node):
            return
        last = self._last.get((block.group, block.is_copy))
        if isinstance(last, Removed):
            last.keys.append(key_of(node))
        else:
            self._add(Removed([key_of(node)], block.group, block.is_copy))

    def _is_told(self, node: Node) -> bool:
        return node.salt is not None and len(node.tokens) == self._block_size

    def _add(self, event: Stored | Removed) -> None:
        self._events.append(event)
        self._last[event.kind, event.on_host] = event

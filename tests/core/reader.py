"""A reader of the events of a prefix cache, which a router would keep, and its comparison with the cache itself."""

from jpaged.core.cache_events import Cleared, Removed, Stored
from jpaged.core.prefix_tree import PrefixTree
from jpaged.core.text_key import first_key, next_key

Memory = tuple[int, bool]  # kind of blocks, and whether they are on the host
Text = tuple[str, tuple[int, ...]]


class Reader:
    """Texts that each memory holds by its events alone.

    Attributes:
        texts: salt and tokens of each text, by its key.
        held: keys of the texts in each memory.
    """

    def __init__(self, tree: PrefixTree):
        self._tree, self._size = tree, tree.block_size
        self.texts: dict[bytes, Text] = {}
        self.held: set[tuple[bytes, Memory]] = set()
        self.num_events = 0

    def read(self) -> None:
        """Read the new events."""
        for event in self._tree.events.take():
            self.num_events += 1
            match event:
                case Stored(keys, parent, tokens, salt, kind, on_host):
                    before = (salt, ()) if parent is None else self.texts[parent]
                    assert before[0] == salt and len(tokens) == self._size * len(keys)
                    for index, key in enumerate(keys):
                        text = (salt, (*before[1], *tokens[: (index + 1) * self._size]))
                        assert self.texts.setdefault(key, text) == text, "two texts have one key"
                        assert (key, (kind, on_host)) not in self.held, "a text is stored twice"
                        self.held.add((key, (kind, on_host)))
                case Removed(keys, kind, on_host):
                    for key in keys:
                        self.held.remove((key, (kind, on_host)))
                case Cleared():
                    self.held.clear()

    def check(self) -> None:
        """Compare the texts with those of the cache, which are computed from scratch."""
        self.read()
        found, paths = set(), [(salt, first_key(salt)) for salt in self._tree.children if isinstance(salt, str)]
        while paths:
            parent, before = paths.pop()
            for node in self._tree.children.get(parent, ()):
                if len(node.tokens) == self._size:
                    key = next_key(before, node.tokens)
                    paths.append((node.number, key))
                    for block in node.held:
                        found.add((key, (block.group, block.is_copy)))
        assert self.held == found, "a reader of the events knows other texts than the cache holds"

"""Third tier of the prefix cache: files of blocks, which outlive the engine."""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import NamedTuple

from jpaged.core.block_pool import BlockPool
from jpaged.core.blocks import Block, Node, Parent
from jpaged.core.text_key import first_key, key_of, next_key, split_salt

Files = Sequence[tuple[int, str]]  # blocks, on the device or on the host, with the names of their files; -1 - p: page p


class Arrival(NamedTuple):
    """File that is read for a block on the device.

    Attributes:
        number: number of the block in its text.
        text: tokens of the block.
    """

    block_id: int
    name: str
    number: int
    text: tuple[int, ...]


class DiskTier:
    """Files of blocks that have been on the host, by names that stand for texts.

    A name is the key of a text (`text_key`). Requests with adapters have no files, because the numbers of adapters are
    those of one engine. Files are written when a block comes to the host, and read when a request with their text is to
    start. Their content moves to the device in the next plan.

    Args:
        host: the pool on the host.
        arriving: takes the blocks of the device whose content comes from files, with None.
        names: names of the files, the least recently used first.
        most: maximum number of files.
        token_s: time in which a token can be computed, in seconds; 0: unknown.

    Attributes:
        read_s: time of reading a file, in seconds, as far as it is known.
        fetching: id of the request whose files are read in parts, of which some are left; None: there is none.
        num_read: number of files that were read.
    """

    def __init__(
        self, device: BlockPool, host: BlockPool, arriving: MutableMapping[int, int | None], names: Iterable[str],
        most: int, token_s: float,
    ):  # fmt: skip
        self.device, self.host, self.most, self.token_s = device, host, most, token_s
        self._moves = arriving
        self.read_s, self.num_read = 0.0, 0
        self.fetching: str | None = None
        self._names = dict.fromkeys(names)  # in the order of use
        self._written: list[tuple[int, str]] = []
        self._deleted: list[str] = []
        self._arriving: list[Arrival] = []
        self._parents: dict[int, Parent] = {}  # of the blocks of the text that arrives, by number
        self._held: list[Block] = []  # its blocks, on the device and on the host
        self._limit()

    def write(self, block: Block) -> None:
        """Write the file of a block that has come to the host, unless there is one."""
        if block.node is None or (name := self.name_of(block.node, block.group)) is None:
            return
        if name not in self._names:
            self._written.append((self._number(self.host, block.block_id), name))
        self._use(name)
        self._limit()

    def unsaved(self) -> Files:
        """Return the cached blocks on the device that have no file, and count them as written."""
        found: list[tuple[int, str]] = []
        for block in self.device.free_blocks():
            node = block.node
            if node is None or len(node.tokens) < self.device.block_size:
                continue
            if (name := self.name_of(node, block.group)) and name not in self._names:
                found.append((self._number(self.device, block.block_id), name))
        found = found[max(0, len(found) - self.most) :]
        for _, name in found:
            self._use(name)
        self._limit()
        return found

    def take(self) -> tuple[Files, list[str]]:
        """Return the places to write with the names of their files, and the names of files to delete."""
        taken = self._written, self._deleted
        self._written, self._deleted = [], []
        return taken

    def abandon(self) -> None:
        """Forget the reads and writes under way, after the pools have been cleared."""
        for _, name in self._written:
            self._names.pop(name, None)
        self._written, self._arriving, self._held, self.fetching = [], [], [], None

    def forget(self, node: Node) -> None:
        """Delete the files of a node."""
        for kind in range(len(node.blocks)):
            if (name := self.name_of(node, kind)) in self._names:
                self._delete(str(name))

    def clear(self) -> None:
        """Delete all files."""
        for name in list(self._names):
            self._delete(name)

    def want(self, request_id: str, tokens: Sequence[int], salt: str, num_blocks: int, most_s: float) -> Files:
        """Return the files to read next for a text, with blocks for them, which stay taken until `arrive`.

        Args:
            request_id: the request whose text it is; if files are left, it becomes `fetching`.
            num_blocks: blocks that the request needs to start.
            most_s: maximum seconds that the reading may take.
        """
        self.fetching = None
        if not self._names or split_salt(salt)[0] is not None:
            return []
        device, groups = self.device, len(self.device.windows)
        path = [node for node, _ in device.tree.walk(tokens, salt, None)]
        num_used = sum(block.ref_count > 0 for node in path for block in node.blocks[:groups] if block)
        if num_blocks - num_used > device.num_free:
            return []
        missing = list(self._missing(path, tokens, salt))
        if not missing:
            return []
        texts = len({index for _, index, _, _ in missing})
        if self.token_s and len(missing) * self.read_s > texts * device.block_size * self.token_s:
            self.read_s *= 0.98  # the disk may have been busy
            return []
        # New blocks must not take those of the text itself.
        self._held = [block for node in path for block in (*node.blocks, *node.copies) if block]
        for block in self._held:
            self._pool_of(block).share(block.block_id)
        most = max(1, int(min(most_s / self.read_s, len(missing)))) if self.read_s else len(missing)
        arrivals = self._arriving = []
        for name, index, kind, text in missing[:most]:
            block_id = device.allocate_page() if kind == groups else device.allocate(kind)
            if block_id is None:
                break
            arrivals.append(Arrival(block_id, name, index, text))
        if not arrivals:
            self._release()
        elif len(arrivals) == most < len(missing):
            self.fetching = request_id
        path = [node for node, _ in device.tree.walk(tokens, salt, None)]  # nodes without blocks may have gone
        self._parents = {0: salt} | {index + 1: node.number for index, node in enumerate(path)}
        return [(self._number(device, each.block_id), each.name) for each in arrivals]

    def arrive(self, found: Sequence[bool], seconds: float) -> None:
        """Take the blocks whose files were read into the prefix cache, and forget the other files.

        Args:
            seconds: time of reading all of them.
        """
        each_s = seconds / len(self._arriving)
        self.read_s = each_s if not self.read_s else 0.7 * self.read_s + 0.3 * each_s
        for arrival, is_there in zip(self._arriving, found, strict=True):
            parent = self._parents.get(arrival.number)  # none if a file before this one is lost
            if not is_there:
                self._names.pop(arrival.name, None)
            elif parent is not None:
                node = self.device.node_of(parent, arrival.text)
                self._parents[arrival.number + 1] = node.number
                self.device.tree.attach(node, self.device.block(arrival.block_id))
                self._moves[arrival.block_id] = None
                self._use(arrival.name)
                self.num_read += 1
        self._release()

    def _release(self) -> None:
        """Let a text's blocks be given away, the end of the text first."""
        for arrival in reversed(self._arriving):
            self.device.free(arrival.block_id)
        for block in reversed(self._held):
            self._pool_of(block).free(block.block_id)
        self._arriving, self._held = [], []

    def _pool_of(self, block: Block) -> BlockPool:
        return self.host if block.is_copy else self.device

    def name_of(self, node: Node, kind: int) -> str | None:
        """Return the name of a block's file; None if there can be none."""
        has_files = node.salt is not None and split_salt(node.salt)[0] is None
        return f"{key_of(node).hex()}-{kind}" if has_files else None

    def _missing(
        self, path: Sequence[Node], tokens: Sequence[int], salt: str
    ) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
        """Yield the files of a text whose blocks are in no memory, and are part of the longest prefix with files.

        Each has its name, the number of its block, its kind (group of layers, or the number after all groups for a
        page), and the tokens of the block.

        Args:
            path: the nodes of the text.
        """
        size, kinds, groups = self.device.block_size, self.host.tree.num_kinds, len(self.device.windows)
        key, found, texts = first_key(salt), [], []
        starts, end = [0] * groups, 0  # of each group, the block after the last missing one; the end of the prefix
        for index in range(len(tokens) // size):
            text = tuple(tokens[index * size : (index + 1) * size])
            node = path[index] if index < len(path) else None
            key = key_of(node) if node else next_key(key, text)
            lacking = [kind for kind in range(kinds) if not (node and (node.blocks[kind] or node.copies[kind]))]
            named = [(kind, f"{key.hex()}-{kind}") for kind in lacking]
            found.append([(kind, name) for kind, name in named if name in self._names])
            texts.append(text)
            lost = {kind for kind, name in named if name not in self._names}
            for group in lost - {groups}:
                starts[group] = index + 1
            if all(start <= self.device.first_seen(group, (index + 1) * size) for group, start in enumerate(starts)):
                end = end if groups in lost else index + 1
            elif any(starts[group] for group in self.device.whole):
                break
        first = [self.device.first_seen(group, end * size) if self.device.whole else 0 for group in range(groups)]
        for index, (text, named) in enumerate(zip(texts[:end], found)):
            for kind, name in named:
                if index >= first[kind] if kind < groups else index == end - 1:
                    yield name, index, kind, text

    @staticmethod
    def _number(pool: BlockPool, block_id: int) -> int:
        return block_id if block_id < pool.num_blocks else pool.num_blocks - 1 - block_id

    def _use(self, name: str) -> None:
        self._names.pop(name, None)
        self._names[name] = None

    def _delete(self, name: str) -> None:
        del self._names[name]
        self._deleted.append(name)

    def _limit(self) -> None:
        while len(self._names) > self.most:
            self._delete(next(iter(self._names)))

"""Events of the prefix cache. In all runs of `traffic`, a reader of the events knows the texts of the cache."""

import pytest

from jpaged.core.cache_events import CacheEvents, Cleared, Removed, Stored
from jpaged.core.prefix_tree import PrefixTree
from jpaged.core.text_key import first_key, next_key, salt_with
from tests.core import chance
from tests.core.traffic import add, drain, make

SIZE = 4
TEXT = list(range(1, 15))  # three blocks and a half


def keys(tokens, salt=""):
    """Return the keys of the whole blocks of a text."""
    found = [first_key(salt)]
    for at in range(0, len(tokens) - SIZE + 1, SIZE):
        found.append(next_key(found[-1], tokens[at : at + SIZE]))
    return found[1:]


class Recorder:
    """A scheduler with a record of all its events."""

    def __init__(self, **options):
        self.scheduler, self.runner = make(size=SIZE, **options)
        self.events, take = [], self.scheduler.pool.tree.events.take
        self.scheduler.pool.tree.events.take = lambda: self.events.extend(new := take()) or new
        self._count = 0

    def run(self, prompt, **options):
        """Return the events of a request that generates one token."""
        self._count += 1
        params = add(self.scheduler, "params", prompt, max_tokens=1).params
        self.scheduler.abort("params")
        self.scheduler.add(str(self._count), prompt, params, seed=0, **options)
        drain(self.scheduler, self.runner)
        return self.new()

    def new(self):
        self.scheduler.check_invariants()
        new, self.events[:] = [*self.events], []
        return new


def test_whole_blocks_are_told_once():
    recorder = Recorder(adapters=1)
    assert recorder.run(TEXT) == [Stored(keys(TEXT), None, TEXT[:12], "", 0, False)]
    assert recorder.run(TEXT) == []
    longer = [*TEXT[:12], 30, 31, 32, 33, 34]
    assert recorder.run(longer) == [Stored(keys(longer)[3:], keys(TEXT)[2], longer[12:16], "", 0, False)]
    salted = salt_with(3, "mine")
    assert recorder.run(TEXT, adapter=3, cache_salt="mine") == [
        Stored(keys(TEXT, salted), None, TEXT[:12], salted, 0, False)
    ]  # fmt: skip
    recorder.scheduler.pool.reset_prefix_cache()
    assert recorder.new() == [Cleared()]
    assert recorder.run(TEXT) == [Stored(keys(TEXT), None, TEXT[:12], "", 0, False)]


def test_an_evicted_text_goes_to_the_host_and_returns():
    recorder, other = Recorder(blocks=4, host=8), list(range(30, 44))
    recorder.run(TEXT)
    events = recorder.run(other)
    stored = {(key, each.on_host) for each in events if isinstance(each, Stored) for key in each.keys}
    removed = {(key, each.on_host) for each in events if isinstance(each, Removed) for key in each.keys}
    assert stored == {*((key, False) for key in keys(other)), *((key, True) for key in keys(TEXT))}
    assert removed == {(key, False) for key in keys(TEXT)}
    back = [each for each in recorder.run(TEXT) if isinstance(each, Stored) and not each.on_host]
    assert sorted(key for each in back for key in each.keys) == sorted(keys(TEXT))


def _forgets_the_host(patch):
    remove = CacheEvents.remove
    patch.setattr(CacheEvents, "remove", lambda self, node, block: block.is_copy or remove(self, node, block))


def _is_silent_about_a_reset(patch):
    patch.setattr(CacheEvents, "clear", lambda self: None)


def _joins_branches(patch):
    """The branches of a text are one event."""
    store = CacheEvents.store

    def joined(self, node, block):
        last = self._last.get((block.group, block.is_copy))
        if isinstance(last, Stored) and node.before and node.before.key is not None:
            node.before.key = last.keys[-1]
        store(self, node, block)

    patch.setattr(CacheEvents, "store", joined)


def _tells_lost_texts(patch):
    """A text whose beginning is lost gets the key of a first block."""
    patch.setattr(CacheEvents, "_is_told", lambda self, node: len(node.tokens) == self._block_size)
    add_node = PrefixTree.add

    def with_salt(self, parent, tokens):
        node, shorter = add_node(self, parent, tokens)
        node.salt = node.salt or ""
        return node, shorter

    patch.setattr(PrefixTree, "add", with_salt)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [_forgets_the_host, _is_silent_about_a_reset, _joins_branches, _tells_lost_texts])
def test_a_reader_finds_a_fault(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        for seed in range(90):
            chance.run(seed)

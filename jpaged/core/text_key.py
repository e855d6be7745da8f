"""Keys of cached texts: hashes (SHA-256) of a salt, which names an adapter, and of all tokens up to a block's end."""

import array
import hashlib
from collections.abc import Sequence

from jpaged.core.blocks import Node


def salt_with(adapter: int | None, salt: str) -> str:
    """Return the salt of the cached prefixes of an adapter's requests; it differs from that of any other pair."""
    if adapter is None and "\0" not in salt:
        return salt
    return f"{'' if adapter is None else adapter}\0{salt}"


def split_salt(salt: str) -> tuple[int | None, str]:
    """Return the adapter and the salt that `salt_with` has joined."""
    adapter, joint, rest = salt.partition("\0")
    return (int(adapter) if adapter else None, rest) if joint else (None, salt)


def first_key(salt: str) -> bytes:
    """Return the key of the empty text with a salt."""
    return hashlib.sha256(b"salt" + salt.encode(errors="surrogatepass")).digest()


def next_key(key: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a text that some tokens continue."""
    return hashlib.sha256(key + array.array("i", tokens).tobytes()).digest()


def key_of(node: Node) -> bytes:
    """Return the key of the text up to the end of a node that can be found, and keep it in the nodes on its way."""
    path = [node]
    while path[-1].key is None and (before := path[-1].before):
        path.append(before)
    for each in reversed(path):
        if each.key is None:
            assert each.salt is not None, f"the text before node {each.number} is lost"
            before_key = each.before.key if each.before else first_key(each.salt)
            assert before_key is not None, "the node before it is on the path"
            each.key = next_key(before_key, each.tokens)
    assert node.key is not None, "it was the last one"
    return node.key

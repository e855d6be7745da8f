"""Changes of the prefix cache as messages in the format of vLLM 0.33, which routers read."""

from collections.abc import Callable, Sequence

import msgspec

from jpaged.core.cache_events import CacheEvent, Removed, Stored
from jpaged.core.groups import Windows
from jpaged.core.text_key import split_salt

DEVICE, HOST = "GPU", "CPU"  # vLLM's names of memories; the pool has the first one on a CPU, too


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Message of vLLM's of this name."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Message of vLLM's of this name."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Message of vLLM's of this name."""


Message = BlockStored | BlockRemoved | AllBlocksCleared


class EventMessages:
    """Translation of events to messages.

    Args:
        windows: the window of each group of layers; the states of recurrent layers are one more group.
    """

    def __init__(self, block_size: int, windows: Windows):
        self._block_size = block_size
        attention = [("sliding_window" if window else "full_attention", window) for window in windows]
        self._kinds: list[tuple[str, int | None]] = [*attention, ("mamba", None)]

    def of(self, event: CacheEvent, adapter_name: Callable[[int], str | None]) -> Message:
        """Return the message of an event."""
        match event:
            case Stored():
                return self._stored(event, adapter_name)
            case Removed(keys, group, on_host):
                return BlockRemoved(_hashes(keys), HOST if on_host else DEVICE, group)
        return AllBlocksCleared()

    def _stored(self, event: Stored, adapter_name: Callable[[int], str | None]) -> BlockStored:
        (adapter, salt), (kind, window) = split_salt(event.salt), self._kinds[event.kind]
        name = None if adapter is None else adapter_name(adapter)
        extra: list[tuple[str, ...] | None] = [(name,) if name else None for _ in event.keys]
        if salt and event.parent is None:
            extra[0] = (name, salt) if name else (salt,)
        return BlockStored(
            block_hashes=_hashes(event.keys), parent_block_hash=_hashes([event.parent])[0] if event.parent else None,
            token_ids=event.tokens, block_size=self._block_size, lora_id=None, medium=HOST if event.on_host else DEVICE,
            lora_name=name, extra_keys=extra if any(extra) else None, group_idx=event.kind, kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )  # fmt: skip


def _hashes(keys: Sequence[bytes]) -> list[int]:
    """Return the first 8 bytes of keys as numbers."""
    return [int.from_bytes(key[:8], "big") for key in keys]

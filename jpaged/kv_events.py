"""Setting `kv_events_config`, with the keys of vLLM's."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

ADDRESS = re.compile(r"tcp://.+:\d+|(ipc|inproc)://.+")
Count = Annotated[int, msgspec.Meta(ge=1)]


class KVEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sockets on which an engine tells the changes of its prefix cache.

    Addresses are those of ZeroMQ. Those with `*` or `::`, ipc and inproc are bound, and others are connected to. Engine
    i of several adds i to a port.

    Attributes:
        enable_kv_cache_events: whether there are events.
        publisher: "null": there are none.
        endpoint: address of a PUB socket. The events contain the tokens of prompts.
        replay_endpoint: address of a ROUTER socket, which sends past batches again, from a number on.
        buffer_steps: number of past batches that it can send.
        hwm: maximum number of batches that wait for a slow reader, which misses others.
        max_queue_size: maximum number of batches that wait for the sockets; others are lost.
        topic: first frame of each message.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    hwm: Count = 100_000
    max_queue_size: Count = 100_000
    topic: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> "KVEvents | None":
        """Return the settings of a `kv_events_config`, None if there are no events.

        Raises:
            ValueError: the config is invalid.
        """
        try:
            made = msgspec.convert(dict(config or {}), cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"kv_events_config: {error}") from None
        for key in ("endpoint", "replay_endpoint"):
            if (address := getattr(made, key)) is not None and not ADDRESS.fullmatch(address):
                wanted = "tcp://host:port, ipc://path or inproc://name"
                raise ValueError(f"kv_events_config.{key}: must be {wanted}, not {address!r}")
        return made if made.enable_kv_cache_events and made.publisher != "null" else None

    def of_engine(self, rank: int) -> "KVEvents":
        """Return the settings of one engine of several."""
        again = self.replay_endpoint
        return msgspec.structs.replace(
            self, endpoint=_address_of(self.endpoint, rank), replay_endpoint=again and _address_of(again, rank)
        )


def _address_of(address: str, rank: int) -> str:
    if not rank:
        return address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}" if address.startswith("tcp:") else f"{address}_dp{rank}"

"""Processes that share one model, with the flags' names of SGLang."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from jpaged.setting import check, setting

GROUP = "several hosts"
HEARTBEAT_TIMEOUT_S = SHUTDOWN_TIMEOUT_S = 10


@dataclass(frozen=True)
class Nodes:
    """Processes of a replica: a leader, of rank 0, and its followers."""

    nnodes: int = setting(1, "number of hosts that share the model", group=GROUP, low=1, unit="NODES")
    node_rank: int = setting(0, "number of this host, 0 for the leader", group=GROUP, low=0, unit="RANK")
    dist_init_addr: str | None = setting(
        None, "address of the leader for jax.distributed; plans are sent to followers from the next port", group=GROUP,
        unit="HOST:PORT",
    )  # fmt: skip

    heartbeat_timeout: int | None = setting(
        None, "time without a sign of another host after which jax ends this one", by="10", group=GROUP, low=1,
        unit="SECONDS",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank: must be below nnodes ({self.nnodes}), not {self.node_rank}")
        if self.nnodes > 1:
            host, _, port = (self.dist_init_addr or "").rpartition(":")
            if not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 65535):
                raise ValueError(
                    "dist_init_addr: must be HOST:PORT with a port between 1 and 65534 if nnodes is above 1, "
                    f"not {self.dist_init_addr!r}"
                )
        for name in ("dist_init_addr", "heartbeat_timeout") if self.nnodes == 1 else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: needs nnodes above 1, not {self.nnodes}")

    @property
    def coordinator_address(self) -> tuple[str, int]:
        """Host and port of jax.distributed on the leader."""
        host, _, port = (self.dist_init_addr or "").rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def channel_address(self) -> tuple[str, int]:
        """Host and port on which the leader accepts its followers."""
        host, port = self.coordinator_address
        return host, port + 1


@contextlib.contextmanager
def cluster(nodes: Nodes) -> Iterator[None]:
    """Connect this process with the others of a replica, in the context.

    Raises:
        RuntimeError: the others can't be reached in time.
    """
    import jax  # takes seconds

    # A lost process is noticed by its connection at once. If not, jax aborts the others (SIGABRT) after the heartbeat's
    # timeout. It would also handle SIGTERM, to tell programs that save checkpoints.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        nodes.dist_init_addr, nodes.nnodes, nodes.node_rank, cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=nodes.heartbeat_timeout or HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
        coordinator_bind_address=nodes.dist_init_addr if nodes.node_rank == 0 else None,
    )  # fmt: skip
    yield
    jax.distributed.shutdown()

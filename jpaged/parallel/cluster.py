"""Processes of `jax.distributed`, whose devices together hold one model."""

import contextlib
from collections.abc import Iterator

import jax

from jpaged.parallel.nodes import Nodes

# A lost process is noticed by its connection at once. If not, jax aborts the others (SIGABRT) after this time.
HEARTBEAT_TIMEOUT_S = 10
SHUTDOWN_TIMEOUT_S = 10


@contextlib.contextmanager
def cluster(nodes: Nodes) -> Iterator[None]:
    """Connect this process with the others of a replica, in the context.

    Raises:
        RuntimeError: the others can't be reached in time.
    """
    # jax would handle SIGTERM, to tell programs that save checkpoints.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        nodes.dist_init_addr, nodes.nnodes, nodes.node_rank, cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=nodes.heartbeat_timeout or HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
        coordinator_bind_address=nodes.dist_init_addr if nodes.node_rank == 0 else None,
    )  # fmt: skip
    yield
    jax.distributed.shutdown()

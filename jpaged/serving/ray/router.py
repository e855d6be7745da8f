"""Request router of Ray Serve that sends prompts to the replicas with their prefixes in the cache."""

import time
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jpaged.engine.prefix_table import PrefixTable
from jpaged.serving.ray.messages import Forwarded, Prefix

CHOICE_TIMEOUT_S = 30.0  # from the choice of a replica to its acceptance of the request


class PrefixRouter(RequestRouter):
    """Router by the prefixes of prompts. Each process that sends requests has one router with one table.

    Each request gets the replica that is chosen for it. (With Ray's FIFOMixin the oldest waiting request would get it.)
    """

    # Ray's 0.1 s is too short for a replica whose processor is busy. Its prompts would go to another replica.
    queue_len_response_deadline_s = 2.0

    def initialize_state(self, max_imbalance: float = 8, capacity: int = 100_000, step: int = 64) -> None:
        """Set the options, which are `PrefixTable`'s. Ray Serve calls this with `request_router_kwargs`."""
        self._table = PrefixTable[ReplicaID](capacity, step, max_imbalance)
        self._chosen: dict[str, tuple[ReplicaID, float]] = {}  # by request that is not yet routed, with its time
        self._running: dict[str, ReplicaID] = {}  # by request
        self._num_requests: Counter[ReplicaID] = Counter()
        self._known: set[ReplicaID] = set()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, and then all replicas by their loads, in case the chosen one is full."""
        limit = time.monotonic() - CHOICE_TIMEOUT_S  # Ray reports no request that was cancelled before it was sent
        while self._chosen and (oldest := next(iter(self._chosen.items())))[1][1] < limit:
            self._drop_chosen(oldest[0])
        if pending_request is not None:
            self._drop_chosen(pending_request.metadata.internal_request_id)  # of an earlier attempt
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        # Ray's count includes the requests of other routers, but expires some seconds after the last report.
        reported, own = self.replica_queue_len_cache, self._num_requests
        loads = {each: max(reported.get(each) or 0, own[each]) for each in sorted(replicas, key=str)}
        by_load = sorted(loads, key=loads.__getitem__)
        if pending_request is None or not by_load:
            return [[replicas[each]] for each in by_load]
        prefix, chosen = _prefix(pending_request), by_load[0]
        if prefix is not None:
            chosen = self._table.choose(prefix.prompt, loads, salt=prefix.salt)
            self._table.remember(prefix.prompt, chosen, salt=prefix.salt)
        # Requests that arrive before this one has been sent see the choice.
        self._chosen[pending_request.metadata.internal_request_id] = chosen, time.monotonic()
        self._num_requests[chosen] += 1
        return [[replicas[each]] for each in (chosen, *by_load)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Handle a request that a replica has accepted."""
        request_id = pending_request.metadata.internal_request_id
        self._drop_chosen(request_id)
        self._running[request_id] = replica_id
        self._num_requests[replica_id] += 1
        if prefix := _prefix(pending_request):
            self._table.remember(prefix.prompt, replica_id, salt=prefix.salt)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Handle the end of a request, or of an attempt to send it."""
        self._drop_chosen(internal_request_id)
        if self._running.pop(internal_request_id, None) is not None:
            self._num_requests[replica_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Handle a change of the replicas: the caches of ended replicas are lost."""
        present = {replica.replica_id for replica in replicas}
        for gone in self._known - present:
            self._table.forget(gone)
        self._known = present
        super().update_replicas(replicas)

    def _drop_chosen(self, request_id: str) -> None:
        if request_id in self._chosen:
            replica, _ = self._chosen.pop(request_id)
            self._num_requests[replica] -= 1


def _prefix(request: PendingRequest | None) -> Prefix | None:
    first = request.args[0] if request is not None and request.args else None
    return first.prefix if isinstance(first, Forwarded) else None

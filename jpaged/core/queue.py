"""Requests in the order of service, the queues of a scheduler, and the turns of clients."""

import bisect
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator

from jpaged.core.request import Request

MAX_CHUNK = 512
MAX_IDLE_CLIENTS = 1024

_rank = operator.attrgetter("rank")


class Ranked:
    """Requests ordered by `Request.rank`.

    They are in chunks of at most `MAX_CHUNK` requests. An insertion or a removal therefore moves only a few requests,
    even near the front of a long queue. No chunk is empty except the only one of an empty queue.
    """

    def __init__(self) -> None:
        self._chunks: list[list[Request]] = [[]]
        self._len = 0
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(self._chunks)

    def __contains__(self, request: Request) -> bool:
        index, at = self._place(request)
        return self._chunks[index][at : at + 1] == [request]

    @property
    def first(self) -> Request:
        """First request."""
        return self._chunks[0][0]

    def add(self, request: Request) -> None:
        """Insert a request at its rank."""
        index, at = self._place(request)
        chunk = self._chunks[index]
        chunk.insert(at, request)
        if len(chunk) > MAX_CHUNK:
            half = len(chunk) // 2
            self._chunks[index : index + 1] = chunk[:half], chunk[half:]
        self._len += 1
        self.num_prompt_tokens += len(request.prompt_token_ids)

    def remove(self, request: Request) -> None:
        """Remove a request."""
        index, at = self._place(request)
        chunk = self._chunks[index]
        assert chunk[at : at + 1] == [request], f"{request.request_id} is not in the queue"
        del chunk[at]
        if not chunk and len(self._chunks) > 1:
            del self._chunks[index]
        self._len -= 1
        self.num_prompt_tokens -= len(request.prompt_token_ids)

    def _place(self, request: Request) -> tuple[int, int]:
        """Return the chunk of a request's rank, and the place there: that of the request or of the next one."""
        # A rank above all others belongs to the last chunk.
        index = bisect.bisect_left(self._chunks, request.rank, hi=len(self._chunks) - 1, key=lambda c: c[-1].rank)
        return index, bisect.bisect_left(self._chunks[index], request.rank, key=_rank)


class RequestQueue(Ranked):
    """Requests in the order of service.

    Attributes:
        tenants: the requests of each tenant that has any.
    """

    def __init__(self) -> None:
        super().__init__()
        self._admitted: set[Request] = set()
        self._of_client: Counter[str | None] = Counter()
        self.tenants: dict[str | None, Ranked] = defaultdict(Ranked)

    @property
    def first_admitted(self) -> Request | None:
        """First request that was admitted before it was added, or None."""
        return min(self._admitted, key=_rank, default=None)

    def count(self, client: str | None) -> int:
        """Return the number of requests of one client."""
        return self._of_client[client]

    def add(self, request: Request) -> None:
        """Insert a request at its rank."""
        super().add(request)
        if request.admitted:
            self._admitted.add(request)
        self._of_client[request.client] += 1
        self.tenants[request.tenant].add(request)

    def remove(self, request: Request) -> None:
        """Remove a request."""
        super().remove(request)
        self._admitted.discard(request)
        self._of_client[request.client] -= 1
        if not self._of_client[request.client]:
            del self._of_client[request.client]
        self.tenants[request.tenant].remove(request)
        if not self.tenants[request.tenant]:
            del self.tenants[request.tenant]


class Queues:
    """All requests that have not ended. Each is in one place: waiting, running, or parked.

    Attributes:
        parked: requests that are kept from `waiting` while others are tried without them; None: no trial is going on.
        owed: the tokens that tenants have had beyond their shares.
        tenant_turns: numbers of the turns of requests. Within a tenant, the request whose last turn ended first comes
            next.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Request] = {}
        self.waiting, self.running = RequestQueue(), RequestQueue()
        self.parked: dict[Request, None] | None = None
        self.owed: dict[str | None, int] = {}
        self.tenant_turns = itertools.count(1)

    def add(self, request: Request) -> None:
        """Let a new request wait, or park it during a trial."""
        if self.parked is None:
            self.waiting.add(request)
        else:
            self.parked[request] = None
        self.by_id[request.request_id] = request

    def admit(self, request: Request) -> None:
        """Move a waiting request to the running ones."""
        request.admitted = True
        self.waiting.remove(request)
        self.running.add(request)

    def preempt(self, request: Request) -> None:
        """Move a running request back to its place among the waiting ones."""
        self.running.remove(request)
        self.waiting.add(request)

    def drop(self, request: Request) -> None:
        """Forget a request that has ended."""
        if self.parked is None or self.parked.pop(request, request) is not None:
            (self.running if request in self.running else self.waiting).remove(request)
        del self.by_id[request.request_id]

    def restart(self, tried: Collection[Request] | None) -> None:
        """Let all requests wait that have not ended; with `tried`, park all others until `release`."""
        self.waiting, self.running, parked = RequestQueue(), RequestQueue(), dict[Request, None]()
        self.by_id = {name: request for name, request in self.by_id.items() if not request.finished}
        for request in self.by_id.values():
            if tried is None or request in tried:
                self.waiting.add(request)
            else:
                parked[request] = None
        self.parked = None if tried is None else parked

    def release(self, requests: Iterable[Request] | None = None) -> None:
        """Let parked requests wait; None: all of them, which ends the trial."""
        assert self.parked is not None, "nothing is parked"
        for request in list(self.parked) if requests is None else requests:
            if self.parked.pop(request, request) is None:  # the request has not ended meanwhile
                self.waiting.add(request)
        if requests is None:
            self.parked = None

    def check_invariants(self) -> None:
        """Check that every request is in one place."""
        queued = [*self.waiting, *self.running, *(self.parked or ())]
        assert sorted(map(id, queued)) == sorted(map(id, self.by_id.values())), "a request is lost, or queued twice"


class Turns:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996) over the clients' sequences.

    Each request gets a start tag: the tag of the latest started request, or the end of the client's previous request if
    that is later. A client with many waiting requests therefore shares the engine with the others. Requests of
    different clients that never wait keep the order of their arrival.
    """

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}
        self._max_clients = MAX_IDLE_CLIENTS

    def take(self, client: str | None, num_sequences: int) -> int:
        """Return the start tag of a client's next request. Requests without a client keep the order of arrival."""
        if client is None:
            return self._now
        if len(self._ends) > self._max_clients:
            # Forget idle clients. If no client is idle, a fixed limit would make each further call look at all of them.
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
            self._max_clients = max(MAX_IDLE_CLIENTS, 2 * len(self._ends))
        start = max(self._now, self._ends.get(client, 0))
        self._ends[client] = start + num_sequences
        return start

    def start(self, turn: int) -> None:
        """Record that a request with this start tag has started."""
        self._now = max(self._now, turn)

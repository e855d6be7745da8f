"""Requests in the order of service, and the turns of clients."""

import bisect
from collections import Counter
from collections.abc import Iterator

from jpaged.core.request import Request

MAX_IDLE_CLIENTS = 1024


class RequestQueue:
    """Requests ordered by `Request.rank`."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._of_client: Counter[str | None] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        at = self._place(request)
        return at < len(self._requests) and self._requests[at] is request

    @property
    def first(self) -> Request:
        """First request."""
        return self._requests[0]

    @property
    def last(self) -> Request:
        """Last request."""
        return self._requests[-1]

    def count(self, client: str | None) -> int:
        """Return the number of requests of one client."""
        return self._of_client[client]

    def add(self, request: Request) -> None:
        """Insert a request at its rank."""
        self._requests.insert(self._place(request), request)
        self._of_client[request.client] += 1

    def remove(self, request: Request) -> None:
        """Remove a request."""
        assert request in self, f"{request.request_id} is not in the queue"
        del self._requests[self._place(request)]
        self._of_client[request.client] -= 1
        if not self._of_client[request.client]:
            del self._of_client[request.client]

    def _place(self, request: Request) -> int:
        return bisect.bisect_left(self._requests, request.rank, key=lambda other: other.rank)


class Turns:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996) over the clients' sequences.

    Each request gets a start tag: the tag of the latest started request, or the end of the client's previous request if
    that is later. A client with many waiting requests therefore shares the engine with the others. Requests of
    different clients that never wait keep the order of their arrival.
    """

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}

    def take(self, client: str | None, num_sequences: int) -> int:
        """Return the start tag of a client's next request. Requests without a client keep the order of arrival."""
        if client is None:
            return self._now
        if len(self._ends) > MAX_IDLE_CLIENTS:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        start = max(self._now, self._ends.get(client, 0))
        self._ends[client] = start + num_sequences
        return start

    def start(self, turn: int) -> None:
        """Record that a request with this start tag has started."""
        self._now = max(self._now, turn)

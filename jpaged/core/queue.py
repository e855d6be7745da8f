"""Requests in the order in which they are served."""

import bisect
from collections.abc import Iterator

from jpaged.core.request import Request


class RequestQueue:
    """Ordered by `Request.rank`, whatever order they come in."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        at = self._place(request)
        return at < len(self._requests) and self._requests[at] is request

    @property
    def first(self) -> Request:
        return self._requests[0]

    @property
    def last(self) -> Request:
        return self._requests[-1]

    def add(self, request: Request) -> None:
        self._requests.insert(self._place(request), request)

    def remove(self, request: Request) -> None:
        assert request in self, f"{request.request_id} is not in the queue"
        del self._requests[self._place(request)]

    def _place(self, request: Request) -> int:
        return bisect.bisect_left(self._requests, request.rank, key=lambda other: other.rank)

"""Shares of tenants: of the tokens of a step, and of rows and blocks."""

from collections import Counter
from collections.abc import Iterator, Mapping

from jpaged.core.block_pool import BlockPool
from jpaged.core.queue import RequestQueue
from jpaged.core.request import Request

Tenant = str | None
Group = tuple[int, Tenant]  # the requests of a tenant with one priority


def divide[K](total: int, wants: Mapping[K, int]) -> dict[K, int]:
    """Return max-min fair shares: who wants less than an equal share gets that, and the others divide the rest."""
    shares: dict[K, int] = {}
    for place, key in enumerate(sorted(wants, key=wants.__getitem__)):
        shares[key] = min(wants[key], total // (len(wants) - place))
        total -= shares[key]
    return shares


class Shares:
    """Shares of the k tenants that have requests, in one step.

    A step of n tokens costs `overhead + n`. It costs at most k times what the tenant with the fewest tokens would pay
    for a step alone, so that each tenant advances at least at 1/k of its speed alone.

    The share of a request in rows and blocks is the larger one of its two fractions. A tenant's fair share is 1/k. Its
    first running request has its place in any case, and so the first request of all continues until it ends.

    Args:
        budget: maximum tokens of the step.
        chunk: tokens of a prompt after which its turn ends.
        turns: numbers of the turns of requests: within a tenant, the one whose last turn ended first comes next.
        owed: the tokens of earlier steps that tenants have had beyond their shares; it is updated.

    Attributes:
        order: the running requests by priority, then by what the earlier requests of their tenants hold, then by rank.
            The last one is preempted first.
        grants: tokens of running requests.
        left: tokens of each group for its waiting requests.
    """

    def __init__(
        self, running: RequestQueue, waiting: RequestQueue, pool: BlockPool, num_rows: int,
        *, budget: int, overhead: float, chunk: int, turns: Iterator[int], owed: dict[Tenant, int],
    ):  # fmt: skip
        self._pool, self._num_rows, self._chunk, self._turns = pool, num_rows, chunk, turns
        self._num_tenants = len(running.tenants.keys() | waiting.tenants.keys())
        self._held: Counter[Tenant] = Counter()
        self._before: dict[Request, int] = {}
        self._wants: dict[Request, int] = {}
        groups: dict[Group, list[Request]] = {}
        for request in running:
            self._wants[request] = sum(sequence.behind for sequence in request.live)
            groups.setdefault(_group(request), []).append(request)
            self._before[request] = self._held[request.tenant]
            self._held[request.tenant] += self._weight(request)
        self.order = sorted(running, key=lambda request: (request.rank[0], self._before[request], request.rank))
        wants = {group: sum(map(self._wants.__getitem__, requests)) for group, requests in groups.items()}
        for requests in waiting.tenants.values():
            group = _group(requests.first)
            wants[group] = wants.get(group, 0) + requests.num_prompt_tokens
        of_tenants: Counter[Tenant] = Counter()
        for (_, tenant), want in wants.items():
            of_tenants[tenant] += want
        fewest = max(1, min(of_tenants.values()))
        total = min(budget, (self._num_tenants - 1) * overhead + self._num_tenants * fewest)
        self.grants: dict[Request, int] = {}
        self.left: dict[Group, int] = {}
        self._grant(int(total), budget, wants, groups, owed)

    def is_over(self, request: Request) -> bool:
        """Return whether a waiting request would extend what its tenant holds beyond a fair share."""
        held = self._held[request.tenant]
        return held > 0 and self._is_unfair(held + self._weight(request))

    def entitled(self, waiting: RequestQueue) -> list[Request]:
        """Return the waiting requests of the next tenant that are within its fair share, as far as it has tokens."""
        first, found = self.next_waiting(waiting), []
        if first is not None and not self.is_over(first):
            held, left = self._held[first.tenant], self.room(first)
            for request in waiting.tenants[first.tenant]:
                weight = self._weight(request)
                if left <= 0 or request.rank[0] > first.rank[0] or (held and self._is_unfair(held + weight)):
                    break
                found.append(request)
                held, left = held + weight, left - len(request.prompt_token_ids)
        return found

    def num_yielding(self, request: Request) -> int:
        """Return how many of the last requests in `order` yield to a waiting one: those beyond fair shares."""
        held, number = self._held.copy(), 0
        for victim in reversed(self.order):
            is_equal = victim.rank[0] >= request.rank[0]
            if not (is_equal and self._before[victim] and self._is_unfair(held[victim.tenant])):
                break
            held[victim.tenant] -= self._weight(victim)
            number += 1
        return number

    def admit(self, request: Request, num_tokens: int) -> None:
        """Record that a waiting request runs, and has so many tokens in the step."""
        self._held[request.tenant] += self._weight(request)
        self.left[_group(request)] = self.left.get(_group(request), 0) - num_tokens

    def room(self, request: Request) -> int:
        """Return the number of tokens that a waiting request may have: 0, or enough for all of its branches."""
        left = self.left.get(_group(request), 0)
        return max(left, _unit(request)) if left > 0 else 0

    def next_waiting(self, waiting: RequestQueue) -> Request | None:
        """Return the request to admit next: by priority, those beyond a fair share last, then by rank."""
        firsts = [requests.first for requests in waiting.tenants.values()]
        firsts = [request for request in firsts if self.room(request)]
        return min(firsts, key=lambda request: (request.rank[0], self.is_over(request), request.rank), default=None)

    def _grant(
        self, total: int, budget: int, wants: Mapping[Group, int], groups: Mapping[Group, list[Request]],
        owed: dict[Tenant, int],
    ) -> None:  # fmt: skip
        """Divide the tokens, by priority, then equally; within a group, by turns."""
        for requests in groups.values():
            requests.sort(key=lambda request: (request.turn, request.rank))
        for priority in sorted({priority for priority, _ in wants}):
            shares = divide(total, {group: want for group, want in wants.items() if group[0] == priority})
            larger = self._larger_share(shares, groups, owed)
            if larger and (unit := _unit(groups[larger][0])) <= budget:
                owed[larger[1]] = unit - shares.pop(larger)
                shares = {larger: unit, **divide(budget - unit, shares)}
            for group, share in shares.items():
                total, budget = max(0, total - share), budget - share
                if group != larger and group[1] in owed:
                    paid = max(0, min(owed[group[1]], share - 1))
                    share, owed[group[1]] = share - paid, owed[group[1]] - paid
                    if not owed[group[1]]:
                        del owed[group[1]]
                for request in groups.get(group, ()):
                    want = self._wants[request]
                    tokens = min(want, share)
                    if tokens > 0 and (tokens == want or tokens >= _unit(request)):
                        self.grants[request] = tokens
                        share -= tokens
                        if self._ends_turn(request, tokens):
                            request.turn = next(self._turns)
                self.left[group] = share

    def _ends_turn(self, request: Request, tokens: int) -> bool:
        if tokens == self._wants[request] or len(request.sequences) > 1:
            return True
        start = request.sequences[0].num_computed_tokens
        return (start + tokens) // self._chunk > start // self._chunk

    def _larger_share(
        self, shares: Mapping[Group, int], groups: Mapping[Group, list[Request]], owed: Mapping[Tenant, int]
    ) -> Group | None:
        """Return a group whose next request has more sequences than its share has tokens, and which owes none.

        Branches of a request advance together, so it gets them at once, and its tenant has fewer in the next steps.
        """
        found = [
            group for group, share in shares.items()
            if group in groups and group[1] not in owed
            and share < min(_unit(groups[group][0]), self._wants[groups[group][0]])
        ]  # fmt: skip
        return min(found, key=lambda group: groups[group][0].turn, default=None)

    def _weight(self, request: Request) -> int:
        """Return a request's share of the rows or of the blocks, in units of 1 / (rows * blocks)."""
        num_blocks = sum(-(-len(sequence.tokens) // self._pool.block_size) for sequence in request.live)
        return max(num_blocks * self._num_rows, request.seats * self._pool.num_blocks)

    def _is_unfair(self, weight: int) -> bool:
        return weight * self._num_tenants > self._num_rows * self._pool.num_blocks


def _group(request: Request) -> Group:
    return request.rank[0], request.tenant


def _unit(request: Request) -> int:
    """Return the fewest tokens with which a request advances: one for each of its branches."""
    return len(request.live)

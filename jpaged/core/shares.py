"""Shares of tenants: of the tokens of a step, and of rows and blocks."""

from collections import Counter
from collections.abc import Mapping

from jpaged.core.memory import Memory
from jpaged.core.planned_step import PlannedStep
from jpaged.core.queue import Queues
from jpaged.core.request import Request

Tenant = str | None
Group = tuple[int, Tenant]  # the requests of a tenant with one priority


def divide[K](total: int, wants: Mapping[K, int]) -> dict[K, int]:
    """Return max-min fair shares: a want below an equal share is met, and the other keys divide the rest."""
    shares: dict[K, int] = {}
    for place, key in enumerate(sorted(wants, key=wants.__getitem__)):
        shares[key] = min(wants[key], total // (len(wants) - place))
        total -= shares[key]
    return shares


class Shares:
    """Shares of the k tenants that have requests, in one step.

    A step of n tokens costs `overhead + n`. It costs at most k times the cost of a step with only the tokens of the
    tenant that wants the fewest. Each tenant therefore advances at 1/k of its speed without the others, or faster.

    The share of a request in rows and blocks is the larger one of its two fractions. A tenant's fair share is 1/k. The
    first running request of a tenant keeps its place whatever it holds, so the first request of all continues until it
    ends.

    Args:
        queues: the requests. The turns and debts of their tenants are updated.
        budget: maximum tokens of the step.
        chunk: tokens of a prompt after which its turn ends.

    Attributes:
        order: the running requests by priority, then by what the earlier requests of their tenants hold, then by rank.
            The last one is preempted first.
        grants: tokens of running requests.
        left: tokens of each group for its waiting requests.
    """

    def __init__(self, queues: Queues, memory: Memory, budget: int, overhead: float, chunk: int):
        self._queues, self._waiting, self._running, self._memory = queues, queues.waiting, queues.running, memory
        self._num_rows, self._num_blocks = memory.rows.size, memory.pool.num_blocks
        self._chunk = chunk
        self._num_tenants = len(self._running.tenants.keys() | self._waiting.tenants.keys())
        self._held: Counter[Tenant] = Counter()
        self._before: dict[Request, int] = {}
        self._wants: dict[Request, int] = {}
        self._groups: dict[Group, list[Request]] = {}
        for request in self._running:
            self._wants[request] = sum(sequence.behind for sequence in request.live)
            self._groups.setdefault(_group(request), []).append(request)
            self._before[request] = self._held[request.tenant]
            self._held[request.tenant] += self._weight(request)
        self.order = sorted(self._running, key=lambda request: (request.rank[0], self._before[request], request.rank))
        self.grants: dict[Request, int] = {}
        self.left: dict[Group, int] = {}
        self._grant(budget, overhead)

    def is_over(self, request: Request) -> bool:
        """Return whether a waiting request would extend what its tenant holds beyond a fair share."""
        held = self._held[request.tenant]
        return held > 0 and self._is_unfair(held + self._weight(request))

    def num_victims(self, step: PlannedStep, headroom: int) -> int:
        """Return how many of the last running requests must yield to waiting ones within their tenant's fair share.

        Args:
            headroom: tokens of each running sequence for which blocks must stay free.
        """
        entitled = self._entitled()
        if not entitled:
            return 0
        most, pool, number = self._num_yielding(entitled[0]), self._memory.pool, 0
        headroom *= len(pool.windows)
        seats = sum(request.seats for request in self._running)
        blocks = pool.num_free - step.lack(self._running)
        for request in entitled:
            blocks -= self._memory.num_held(request) + step.lack([request])
            victims = number
            while seats + request.seats > self._num_rows or blocks < seats * headroom // pool.block_size:
                if victims == most:
                    return number
                victims += 1
                victim = self.order[-victims]
                seats -= victim.seats
                blocks += self._memory.num_held(victim) + step.lack([victim])
            seats, number = seats + request.seats, victims
        return number

    def _entitled(self) -> list[Request]:
        """Return the waiting requests of the next tenant that are within its fair share, as far as it has tokens."""
        first, entitled = self.next_waiting(), list[Request]()
        if first is not None and not self.is_over(first):
            held, left = self._held[first.tenant], self.room(first)
            for request in self._waiting.tenants[first.tenant]:
                weight = self._weight(request)
                if left <= 0 or request.rank[0] > first.rank[0] or (held and self._is_unfair(held + weight)):
                    break
                entitled.append(request)
                held, left = held + weight, left - len(request.prompt_token_ids)
        return entitled

    def _num_yielding(self, request: Request) -> int:
        """Return how many of the last requests in `order` yield to a waiting one, because they exceed fair shares."""
        held, number = self._held.copy(), 0
        for victim in reversed(self.order):
            is_equal = victim.rank[0] >= request.rank[0]
            if not (is_equal and self._before[victim] and self._is_unfair(held[victim.tenant])):
                break
            held[victim.tenant] -= self._weight(victim)
            number += 1
        return number

    def admit(self, request: Request, num_tokens: int) -> None:
        """Record that a waiting request runs, with `num_tokens` in the step."""
        self._held[request.tenant] += self._weight(request)
        self.left[_group(request)] = self.left.get(_group(request), 0) - num_tokens

    def room(self, request: Request) -> int:
        """Return the number of tokens that a waiting request may have: 0, or enough for all of its branches."""
        left = self.left.get(_group(request), 0)
        return max(left, _unit(request)) if left > 0 else 0

    def next_waiting(self) -> Request | None:
        """Return the request to admit next: by priority, then requests within a fair share, then by rank."""
        firsts = [requests.first for requests in self._waiting.tenants.values()]
        firsts = [request for request in firsts if self.room(request)]
        return min(firsts, key=lambda request: (request.rank[0], self.is_over(request), request.rank), default=None)

    def _grant(self, budget: int, overhead: float) -> None:
        """Divide the tokens of the step, by priority, then equally; within a group, by turns."""
        wants = {group: sum(map(self._wants.__getitem__, requests)) for group, requests in self._groups.items()}
        for waiting in self._waiting.tenants.values():
            group = _group(waiting.first)
            wants[group] = wants.get(group, 0) + waiting.num_prompt_tokens
        of_tenants: Counter[Tenant] = Counter()
        for (_, tenant), want in wants.items():
            of_tenants[tenant] += want
        fewest = max(1, min(of_tenants.values()))
        total = int(min(budget, (self._num_tenants - 1) * overhead + self._num_tenants * fewest))
        for requests in self._groups.values():
            requests.sort(key=lambda request: (request.tenant_turn, request.rank))
        for priority in sorted({priority for priority, _ in wants}):
            shares = divide(total, {group: want for group, want in wants.items() if group[0] == priority})
            larger = self._larger_share(shares)
            if larger and (unit := _unit(self._groups[larger][0])) <= budget:
                self._queues.owed[larger[1]] = unit - shares.pop(larger)
                shares = {larger: unit, **divide(budget - unit, shares)}
            for group, share in shares.items():
                total, budget = max(0, total - share), budget - share
                self._spend(group, share if group == larger else self._paid(group[1], share))

    def _paid(self, tenant: Tenant, share: int) -> int:
        """Return the rest of a share after the debt of its tenant, at least one token."""
        owed = self._queues.owed.pop(tenant, 0)
        paid = max(0, min(owed, share - 1))
        if owed > paid:
            self._queues.owed[tenant] = owed - paid
        return share - paid

    def _spend(self, group: Group, share: int) -> None:
        """Grant the tokens of a group to its running requests, and leave the rest to its waiting ones."""
        for request in self._groups.get(group, ()):
            want = self._wants[request]
            tokens = min(want, share)
            if tokens > 0 and (tokens == want or tokens >= _unit(request)):
                self.grants[request] = tokens
                share -= tokens
                start, chunk = request.sequences[0].num_computed_tokens, self._chunk
                if tokens == want or len(request.sequences) > 1 or (start + tokens) // chunk > start // chunk:
                    request.tenant_turn = next(self._queues.tenant_turns)
        self.left[group] = share

    def _larger_share(self, shares: Mapping[Group, int]) -> Group | None:
        """Return a group whose next request has more sequences than its share has tokens, and whose tenant owes none.

        Branches of a request advance together. The group gets a token for each at once, and fewer in the next steps.
        """
        short: list[Group] = []
        for group, share in shares.items():
            if group in self._groups and group[1] not in self._queues.owed:
                first = self._groups[group][0]
                if share < min(_unit(first), self._wants[first]):
                    short.append(group)
        return min(short, key=lambda group: self._groups[group][0].tenant_turn, default=None)

    def _weight(self, request: Request) -> int:
        """Return a request's share of the rows or of the blocks, in units of 1 / (rows * blocks)."""
        pool = self._memory.pool
        num_blocks = sum(pool.most_blocks(-(-len(sequence.tokens) // pool.block_size)) for sequence in request.live)
        return max(num_blocks * self._num_rows, request.seats * self._num_blocks)

    def _is_unfair(self, weight: int) -> bool:
        return weight * self._num_tenants > self._num_rows * self._num_blocks


def _group(request: Request) -> Group:
    return request.rank[0], request.tenant


def _unit(request: Request) -> int:
    """Return the fewest tokens with which a request advances: one for each of its branches."""
    return len(request.live)

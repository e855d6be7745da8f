"""The systems that the paper compares, as policies of memory and batching for one scheduler, model and step.

The baselines replace two decisions of the scheduler: the memory that a request gets when it is admitted, and the time
of admission. Everything else, from chunked prefill to the kernels, is the same for all.
"""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.paper.buddy import BuddyPool
from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.planned_step import PlannedStep
from jpaged.core.request import Request
from jpaged.core.scheduler import HEADROOM, Scheduler
from jpaged.core.shares import Shares

Reservation = Callable[[Request, Limits], int]  # tokens


def reserve_max(request: Request, limits: Limits) -> int:
    """Orca (Max): the longest sequence that the model allows."""
    return limits.max_model_len


def reserve_pow2(request: Request, limits: Limits) -> int:
    """Orca (Pow2): at most twice the output, the next power of two."""
    output = 1 << (request.max_tokens - 1).bit_length()
    return min(limits.max_model_len, len(request.prompt_token_ids) + output)


def reserve_oracle(request: Request, limits: Limits) -> int:
    """Orca (Oracle): the true length, which no real system knows."""
    return len(request.prompt_token_ids) + request.max_tokens


class Reserving:
    """A scheduler that reserves contiguous memory for the whole of a request as it is admitted. The reservation is the
    request's block table, filled from the start."""

    reservation: Reservation
    pool: BuddyPool
    limits: Limits

    def _find_room(self, request: Request, reserved: int) -> bool:
        (sequence,) = request.sequences
        block_ids = self.pool.reserve(self.reservation(request, self.limits))
        sequence.table.block_ids[0].extend(block_ids or ())
        return block_ids is not None


class Static(Scheduler):
    """A scheduler of whole batches: the next one is formed, as far as memory allows, when the last one has ended."""

    _forming = True

    def _schedule_waiting(self, budget: int, step: PlannedStep, shares: Shares | None) -> None:
        self._forming |= not self.running
        if not self._forming:
            return
        super()._schedule_waiting(budget, step, shares)
        # A step's tokens may be too few for the prompts of a batch: it is formed in several steps.
        self._forming = sum(row.num_tokens for row in step.rows) >= self.limits.max_num_batched_tokens


class ReservingScheduler(Reserving, Scheduler):
    """Iteration-level scheduling on contiguous reservations, as in Orca."""


class StaticReservingScheduler(Reserving, Static):
    """Static batches of contiguous reservations, as in FasterTransformer."""


class Policy(NamedTuple):
    """A system of the comparison.

    Attributes:
        title: name in tables and plots.
        scheduler: class of the scheduler.
        reservation: of a policy that reserves contiguous memory.
        prefixes: whether requests share cached prefixes.
        shares: whether the outputs of one request share their blocks.
        block_size: None: the one that is asked for.
    """

    title: str
    scheduler: type[Scheduler] = Scheduler
    reservation: Reservation | None = None
    prefixes: bool = False
    shares: bool = True
    block_size: int | None = None

    @property
    def together(self) -> bool:
        """Whether the answers of a batch are known at its end only."""
        return issubclass(self.scheduler, Static)

    def make(self, limits: Limits, pool_tokens: int, vocab_size: int, **options: object) -> Scheduler:
        """A scheduler with a pool of so many tokens."""
        limits = limits_of(self, limits)
        num_blocks = pool_tokens // limits.block_size
        kind = BuddyPool if self.reservation else BlockPool
        pool = kind(num_blocks, limits.block_size, enable_prefix_caching=self.prefixes)
        headroom = 0 if self.reservation else HEADROOM
        scheduler = self.scheduler(pool, limits, vocab_size=vocab_size, headroom=headroom, **options)
        if self.reservation:
            scheduler.reservation = self.reservation
        return scheduler


def limits_of(policy: Policy, limits: Limits) -> Limits:
    if policy.block_size is None:
        return limits
    return Limits(limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens, policy.block_size)


POLICIES = {
    "static": Policy("static batches, contiguous (FasterTransformer)", StaticReservingScheduler, reserve_max,
                     shares=False),
    "static-paged": Policy("static batches, paged", Static, shares=False),
    "orca-max": Policy("Orca (Max)", ReservingScheduler, reserve_max, shares=False),
    "orca-pow2": Policy("Orca (Pow2)", ReservingScheduler, reserve_pow2, shares=False),
    "orca-oracle": Policy("Orca (Oracle)", ReservingScheduler, reserve_oracle, shares=False),
    "unshared": Policy("paged, nothing shared", shares=False),
    "paged": Policy("paged"),
    "prefix": Policy("paged, prefix cache", prefixes=True),
    "radix": Policy("token-level radix tree (RadixAttention)", prefixes=True, block_size=1),
}  # fmt: skip

"""A cost model with steps of equal duration, and small engines with it."""

from typing import NamedTuple

from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.scheduler import Scheduler
from jpaged.simulator.cost import StepLoad
from jpaged.simulator.engine import VOCAB_SIZE, VirtualEngine


class Constant(NamedTuple):
    step_s: float
    source: str = "a constant"

    def seconds(self, load: StepLoad) -> float:
        return self.step_s


SECOND = Constant(1.0)


def engine(
    num_blocks=64, block_size=4, tokens=64, seqs=8, *, caching=False, kind=Scheduler, cost=SECOND, host=0, **options
):  # fmt: skip
    pool = BlockPool(num_blocks, block_size, enable_prefix_caching=caching)
    host_pool = BlockPool(host, block_size, enable_prefix_caching=False, copies_of=pool) if host else None
    limits = Limits(num_blocks * block_size, seqs, tokens, block_size)
    scheduler = kind(
        pool, limits, vocab_size=VOCAB_SIZE, preemption="recompute", host_pool=host_pool, block_swap_cost=1.0
    )
    return VirtualEngine(scheduler, cost, **options)

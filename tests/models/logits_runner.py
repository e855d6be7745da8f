"""Logits of a text through the whole paged path: scheduler, batches, and the model's paged forward."""

import jax
import numpy as np

from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Done, Sample, StepResult
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine
from jpaged.runtime.batch import Buckets, Layout, make_batch
from jpaged.runtime.row_table import RowTable
from jpaged.runtime.step import forward
from tests.runtime.caches import cache_of, placement_of

BLOCK, PAGES = 8, 3


class LogitsRunner:
    """Runs plans through the model's paged forward, keeps the logits of every position, samples greedily."""

    def __init__(self, model, limits: Limits, buckets: Buckets):
        width = -(-limits.max_model_len // BLOCK)
        cache = cache_of(model.config, BLOCK, "float32")
        self.vocab_size = model.config.vocab_size
        self.num_pages, has_states = (PAGES, True) if cache.states.layers else (0, False)
        self.pool = cache.allocate(width, self.num_pages, placement_of(model.config).pool)
        self.buckets, self.rows, self.last = buckets, RowTable(1, width, BLOCK), 0
        self.layouts = {bucket: Layout(bucket, width, has_states=has_states) for bucket in buckets.all}
        self.logits: dict[int, np.ndarray] = {}

        def run(pool, batch, decode):
            x, pool = forward(model, cache, pool, batch, decode=decode)
            return model.logits(x), pool

        self.run = jax.jit(run, static_argnums=2)

    def dispatch(self, plan, make_masks=None):
        self.rows.apply(plan)
        bucket, _, batch, *_ = make_batch(plan, self.rows, self.buckets, self.layouts)
        batch = batch._replace(decodes=batch.decodes != 0, tokens=np.where(batch.tokens < 0, self.last, batch.tokens))
        logits, self.pool = self.run(self.pool, batch, bucket.decode)
        logits = np.asarray(logits)
        for position, row in zip(batch.positions[: plan.num_tokens], logits):
            self.logits[int(position)] = row
        self.last = int(logits[plan.num_tokens - 1].argmax(-1))
        return Done(StepResult([Sample(self.last, 0.0)] * plan.rows[0].num_samples))

    def recover(self):
        """The pool is not donated, so nothing is lost."""


def generate(runner: LogitsRunner, limits: Limits, prompt: list[int], new_tokens: int) -> list[int]:
    """The prompt and the greedy tokens after it. The runner then has the logits of every position but the last."""
    pool = BlockPool(-(-limits.max_model_len // BLOCK), BLOCK, num_pages=runner.num_pages)
    engine = Engine(Scheduler(pool, limits, vocab_size=runner.vocab_size), runner)
    request = engine.add("0", prompt, SamplingParams(max_tokens=new_tokens))
    while engine.has_work:
        engine.step()
    return request.sequences[0].tokens

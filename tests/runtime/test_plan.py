"""A plan is a value: it drives another runner, and the order of its commit changes no token."""

import pickle
import random
import subprocess
import sys

import numpy as np
import pytest

from jpaged.core.block_pool import BlockPool
from jpaged.core.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.core.request import FinishReason
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine
from tests.runtime.replay import BLOCK_SIZE, LIMITS, LLAMA, NUM_BLOCKS, Recorded, make_runner
from tests.support.models import byte_tokenizer

pytestmark = pytest.mark.slow


class Recorder:
    """A runner that keeps every plan, the masks of its rows, and its result."""

    def __init__(self, runner):
        self.runner, self.steps, self.pending = runner, [], []

    def dispatch(self, plan, make_masks=None):
        masks = None if make_masks is None else make_masks()
        self.steps.append(Recorded(plan, masks))
        self.pending.append(self.runner.dispatch(plan, None if masks is None else lambda: masks))
        return self.pending[-1]

    def recover(self):
        self.runner.recover()


class Watch:
    """A runner that notes how many steps were in flight when another one was dispatched."""

    def __init__(self, engine):
        self.engine, self.runner, self.most_in_flight = engine, engine.runner, 0

    def dispatch(self, plan, make_masks=None):
        self.most_in_flight = max(self.most_in_flight, len(self.engine._in_flight))
        return self.runner.dispatch(plan, make_masks)

    def recover(self):
        self.runner.recover()


@pytest.fixture(scope="module")
def runner():
    return make_runner()


def engine_on(runner, *, preemption: str = "swap", max_in_flight: int = 2) -> Engine:
    host = BlockPool(32, BLOCK_SIZE, enable_prefix_caching=False)
    scheduler = Scheduler(
        BlockPool(NUM_BLOCKS, BLOCK_SIZE), LIMITS, vocab_size=LLAMA.vocab_size, host_pool=host, preemption=preemption,
        eos_token_ids=[7],
    )  # fmt: skip
    return Engine(scheduler, runner, byte_tokenizer(), seed=0, max_in_flight=max_in_flight)


STOP = ["wR", "YT"]  # each comes in two steps


def kinds() -> list[tuple[list[int], SamplingParams | BeamSearchParams, dict]]:
    """Requests of every kind, more than fit at once."""
    drawn = {"temperature": 1.0, "max_tokens": 12}
    shared = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    return [
        (shared, SamplingParams(**drawn, seed=1), {}),
        (shared, SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2), {}),
        ([20, 21], SamplingParams(**drawn, seed=2, n=3, presence_penalty=1.0), {}),
        ([30, 31, 32], BeamSearchParams(beam_width=3, max_tokens=9), {}),
        (shared[:6], SamplingParams(**drawn, seed=3, min_tokens=6, stop_token_ids=list(range(100, 140))), {}),
        ([40], SamplingParams(**drawn, seed=4, top_k=20, top_p=0.9, min_p=0.01, logit_bias={9: 3.0}), {}),
        (list(range(50, 75)), SamplingParams(temperature=0.7, max_tokens=9, seed=5, repetition_penalty=1.3), {}),
        ([80, 81], SamplingParams(**drawn, seed=6), {"bad_words": ((81, 5), (9,))}),
        (shared, SamplingParams(**drawn, seed=7, n=2, best_of=3), {}),
        ([60, 61], SamplingParams(**drawn, seed=9, stop=STOP), {}),
        ([62], BeamSearchParams(beam_width=2, max_tokens=9, stop=STOP), {}),
        (
            [63, 64],
            SamplingParams(**drawn, seed=10, structured_outputs=StructuredOutputsParams(regex="[a-m]{3,9}")),
            {},
        ),
    ]


def generate(engine: Engine, abort_at: dict[int, str] | None = None) -> list[list[tuple]]:
    """The tokens, logprobs and finish reasons of every choice; a request is aborted after so many steps."""
    requests, steps = [], 0
    grammars = engine.grammar_compiler()
    assert grammars is not None
    for number, (prompt, params, options) in enumerate(kinds()):
        if params.structured_outputs:
            options |= {"constraint": grammars.compile(params.structured_outputs)}
        requests.append(engine.add(str(number), prompt, params, **options))
    while engine.has_work:
        if abort_at and steps in abort_at:
            engine.abort(abort_at[steps])
        engine.step()
        steps += 1
    engine.scheduler.check_invariants()
    assert engine.scheduler.pool.num_used == 0
    return [
        [(tuple(s.output_token_ids), tuple(s.samples), s.finish_reason, s.stop_reason) for s in request.outputs]
        for request in requests
    ]


@pytest.mark.deep
def test_another_process_gives_the_same_results_for_the_same_plans(runner, tmp_path):
    recorder = Recorder(runner)
    engine = engine_on(recorder)
    generate(engine)
    plans = [step.plan for step in recorder.steps]
    assert pickle.loads(pickle.dumps(plans)) == plans
    for part in ("swap_out", "swap_in", "block_copies", "row_copies", "chosen", "entries", "masked", "released_rows"):
        assert any(getattr(plan, part) for plan in plans), f"the plans must include {part}"
    (tmp_path / "steps").write_bytes(pickle.dumps(recorder.steps))
    command = [sys.executable, "-m", "tests.runtime.replay", str(tmp_path / "steps")]
    replayed = pickle.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert replayed == [pending.result() for pending in recorder.pending]


@pytest.mark.parametrize("preemption", [pytest.param("recompute", marks=pytest.mark.deep), "swap"])
def test_overlap_changes_no_token(runner, preemption):
    """Of any kind of request, all in one batch, with preemptions."""
    results, overlapping, counts = [], [], []
    for max_in_flight in (1, 2):
        engine = engine_on(runner, preemption=preemption, max_in_flight=max_in_flight)
        engine.runner = watch = Watch(engine)
        results.append(generate(engine))
        overlapping.append(watch.most_in_flight)
        counts.append(engine.scheduler.num_preemptions)
    assert overlapping == [0, 1] and min(counts) > 0
    stops = [stop_reason for choices in results[0] for *_, stop_reason in choices]
    assert any(stop in STOP for stop in stops), "a stop string must end a text"
    for found, expected in zip(*results, strict=True):
        assert_same(found, expected)


def assert_same(found: list[tuple], expected: list[tuple]) -> None:
    """Products round otherwise in steps of another size, and so logprobs differ in their last bits."""
    told = [[(tokens, *ending) for tokens, _, *ending in choices] for choices in (found, expected)]
    assert told[0] == told[1]
    logprobs = [[s.logprob for _, samples, *_ in choices for s in samples] for choices in (found, expected)]
    np.testing.assert_allclose(*logprobs, atol=1e-5, rtol=0)


def test_overlap_and_aborts_change_no_token_of_the_others(runner):
    rng = random.Random(0)
    whole = generate(engine_on(runner, max_in_flight=1))
    for _ in range(5):
        aborts = {step: str(rng.randrange(len(whole))) for step in rng.sample(range(1, 25), 4)}
        for choices, expected in zip(generate(engine_on(runner), aborts), whole, strict=True):
            if not any(choice[2] == FinishReason.ABORT for choice in choices):
                assert_same(choices, expected)

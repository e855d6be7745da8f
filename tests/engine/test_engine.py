"""The engine over a fake runner that spells out a given text."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.commands import Pause, Resume, UpdateParams
from jpaged.core.params import BeamSearchParams, InvalidParameter, SamplingParams, StructuredOutputsParams
from jpaged.core.plan import Done, Sample, StepResult
from jpaged.core.request import FinishReason
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine
from jpaged.engine.output import request_output
from jpaged.tokenizer import Vocabulary
from tests.core import traffic
from tests.support.fake_runner import FakeRunner, generate
from tests.support.models import EOS, VOCAB, byte_tokenizer

TOKENIZER = byte_tokenizer()


class Speller:
    """Gives every sequence the next token of a fixed text, then the end-of-sequence token."""

    def __init__(self, text: str):
        self.tokens = [*TOKENIZER.encode(text).ids, EOS]
        self.num_prompt = {}  # of each row

    def dispatch(self, plan, make_masks=None):
        self.num_prompt |= {row: self.num_prompt[source] for source, row in plan.row_copies}
        self.num_prompt |= {admitted.row: admitted.num_prompt_tokens for admitted in plan.admitted}
        told = [
            row.start + row.num_tokens - self.num_prompt[row.row] for row in plan.rows for _ in range(row.num_samples)
        ]
        return Done(StepResult([Sample(self.tokens[min(n, len(self.tokens) - 1)], -0.5, 1) for n in told]))

    def recover(self):
        """Nothing is computed, so nothing is lost."""


class FailingSpeller(Speller):
    """Raises in every fourth step: branches that share their beginning take two to be computed again."""

    num_steps = 0

    def dispatch(self, plan, make_masks=None):
        self.num_steps += 1
        if self.num_steps % 4 == 1:
            raise MemoryError
        return super().dispatch(plan)


def run(text: str, runner=Speller, **params):
    pool = BlockPool(32, 4)
    scheduler = Scheduler(pool, Limits(64, 4, 16), vocab_size=VOCAB, eos_token_ids=[EOS])
    engine = Engine(scheduler, runner(text), TOKENIZER)
    request = engine.add("0", TOKENIZER.encode("ask").ids, SamplingParams(**{"max_tokens": 40} | params), prompt="ask")
    deltas = []
    while engine.has_work:
        try:
            deltas += engine.step().deltas
        except MemoryError:
            engine.scheduler.check_invariants()
    engine.scheduler.check_invariants()
    assert pool.num_used == 0
    output = request_output(request, Vocabulary(TOKENIZER))
    (completion,) = output.outputs
    assert "".join(d.text for d in deltas) == completion.text
    assert [t for d in deltas for t in d.token_ids] == completion.token_ids
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1) and deltas[-1].finish_reason
    return output, completion


def test_text_tokens_and_logprobs():
    output, completion = run("Grüße, 世界!", logprobs=0)
    assert output.prompt == "ask" and output.prompt_token_ids == TOKENIZER.encode("ask").ids and output.finished
    assert completion.text == "Grüße, 世界!"
    assert completion.token_ids == [*TOKENIZER.encode("Grüße, 世界!").ids, EOS]
    assert completion.finish_reason == "stop" and completion.stop_reason is None
    assert completion.cumulative_logprob == -0.5 * len(completion.token_ids)
    first = completion.logprobs[0]
    assert {t: (p.logprob, p.decoded_token) for t, p in first.items()} == {TOKENIZER.encode("G").ids[0]: (-0.5, "G")}


def test_length_ends_before_a_character_is_whole():
    _, completion = run("a世", max_tokens=2)
    assert (completion.text, completion.finish_reason) == ("a", "length")


@pytest.mark.parametrize("include, text", [(False, "one "), (True, "one two")])
def test_a_stop_string(include, text):
    _, completion = run("one two three", stop=["nope", "two"], include_stop_str_in_output=include)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", "two")


def test_a_stop_string_that_is_complete_with_the_last_token_allowed():
    _, completion = run("abcd", stop="cd", max_tokens=4)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", "cd")


def test_what_was_held_for_a_stop_string_comes_out_at_the_end():
    _, completion = run("abc", stop="cd")
    assert (completion.text, completion.finish_reason) == ("abc", "stop")


def test_a_stop_token_is_not_part_of_the_text():
    token = TOKENIZER.encode("c").ids[0]
    _, completion = run("abcd", stop_token_ids=[token])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", token)


def test_ignore_eos():
    _, completion = run("ab", ignore_eos=True, max_tokens=5)
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("ab", "length", 5)


def test_abort_leaves_nothing():
    engine = Engine(Scheduler(BlockPool(8, 4), Limits(32, 2, 8), vocab_size=VOCAB), Speller("abc"), TOKENIZER)
    request = engine.add("0", [1], SamplingParams())
    engine.step()
    engine.abort("0")
    engine.abort("0")
    assert not engine.has_work and engine.scheduler.pool.num_used == 0
    assert request.sequences[0].finish_reason == FinishReason.ABORT
    assert not engine.step().deltas


@pytest.mark.parametrize("params", [{"logprobs": 0, "stop": "6"}, {"best_of": 3, "max_tokens": 20}])
def test_step_runner_raises_requests_continue(params):
    assert run("123456789", FailingSpeller, **params) == run("123456789", **params)


def trace_lines(engine, fail_at: int) -> int:
    """Step the engine until it has no work, or raise MemoryError before a given line of the scheduler, its pools and
    tables, and end with that step. Return the number of lines that ran."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        # An exception in `recover` itself is no failure of a step.
        if "jpaged/core/" not in frame.f_code.co_filename or frame.f_code.co_name == "recover":
            return None
        if event == "line" and (count := count + 1) == fail_at:
            raise MemoryError
        return trace

    sys.settrace(trace)
    try:
        while engine.has_work and not engine.step().faults:
            pass
    except MemoryError:
        assert count >= fail_at
    finally:
        sys.settrace(None)
    return count


def test_step_exception_at_any_line_leaves_the_engine_usable():
    def loaded():
        scheduler, runner = traffic.make(blocks=8, host=8, preemption="swap")
        engine = Engine(scheduler, runner, seed=1)
        engine.add("forks", [1, 2, 3], SamplingParams(n=3, max_tokens=6, presence_penalty=1))
        engine.add("beams", [1, 2, 4], BeamSearchParams(beam_width=3, max_tokens=4))
        engine.add("long", [5] * 17, SamplingParams(max_tokens=9))
        return engine

    engine = loaded()
    lines = trace_lines(engine, -1)
    assert engine.scheduler.num_swapped_blocks, "the load must include swaps"
    for fail_at in range(1, lines, max(1, lines // 40)):
        engine = loaded()
        assert trace_lines(engine, fail_at) >= fail_at
        engine.scheduler.check_invariants()
        for name in ("forks", "beams", "long"):
            engine.abort(name)
        traffic.assert_nothing_leaked(engine.scheduler)
        request = engine.add("next", [1, 2, 3], SamplingParams(max_tokens=5, seed=0))
        while engine.has_work:
            engine.step()
        assert request.sequences[0].output_token_ids == generate([1, 2, 3], 5)


def test_without_a_tokenizer():
    engine = Engine(Scheduler(BlockPool(8, 4), Limits(32, 2, 8), vocab_size=VOCAB), Speller("abc"))
    with pytest.raises(InvalidParameter, match="stop: needs a tokenizer"):
        engine.add("0", [1], SamplingParams(stop="x"))
    request = engine.add("0", [1], SamplingParams(max_tokens=2, logprobs=0))
    while engine.has_work:
        engine.step()
    completion = request_output(request, None).outputs[0]
    assert completion.text == "" and len(completion.token_ids) == 2
    assert next(iter(completion.logprobs[0].values())).decoded_token is None


def test_requests_without_a_seed_get_different_ones_from_the_engines():
    def seeds(seed):
        scheduler = Scheduler(BlockPool(8, 4), Limits(32, 2, 8), vocab_size=VOCAB)
        engine = Engine(scheduler, Speller(""), seed=seed)
        return [engine.add(str(i), [1], SamplingParams()).seed for i in range(3)]

    assert seeds(1) == seeds(1) != seeds(2) and len(set(seeds(1))) == 3


def started_and_late():
    """An engine with a request that has started, and a function that adds one later."""
    scheduler = Scheduler(BlockPool(8, 4), Limits(32, 2, 8), vocab_size=VOCAB)
    engine = Engine(scheduler, FakeRunner(8, 4, scheduler=scheduler))
    started = engine.add("started", [1, 2], SamplingParams(max_tokens=4))
    engine.step()
    return engine, started, lambda: engine.add("late", [3], SamplingParams(max_tokens=2))


def finish(engine):
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("updates", [0, 1])
def test_a_pause_that_waits_starts_nothing_and_no_update_ends_it(updates):
    engine, started, add_late = started_and_late()
    engine.control(Pause("wait"))
    for _ in range(updates):
        engine.control(UpdateParams({}))
    late = add_late()
    finish(engine)
    assert engine.is_paused and started.finished and not late.admitted
    engine.control(Resume())
    finish(engine)
    assert late.finished


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_pause_does_not_end_the_wait_of_an_update(mode):
    engine, started, add_late = started_and_late()
    engine.control(UpdateParams({}, "wait"))
    engine.control(Pause(mode))
    assert engine.is_updating and engine.scheduler.holds_new
    late = add_late()
    engine.control(Resume())
    while engine.is_updating:
        assert not late.admitted
        engine.step()
    assert started.finished
    finish(engine)
    assert late.finished


def test_an_update_that_waited_does_not_end_a_pause_that_waits():
    engine, started, add_late = started_and_late()
    engine.control(UpdateParams({}, "wait"))
    engine.control(Pause("wait"))
    late = add_late()
    finish(engine)
    engine.step()
    assert started.finished and engine.is_paused and not engine.is_updating and not late.admitted
    engine.control(Resume())
    finish(engine)
    assert late.finished and not engine.scheduler.holds_new


SETTLED = {
    "temperature": [np.float32(0.5), jnp.bfloat16(0.5), np.array(0.5)],
    "max_tokens": [np.int64(4), jnp.int8(4)],
    "ignore_eos": [np.bool_(True), jnp.array(True)],
    "stop_token_ids": [np.array([1, 2]), jnp.array([1, 2]), [np.int64(1), jnp.array(2)]],
    "allowed_token_ids": [np.array([1, 2])],
    "stop": [np.array(["a", "b"]), np.array("a"), [np.str_("a")]],
    "logit_bias": [{np.int64(3): np.float32(1.5)}, {"3": jnp.array(1.5)}],
}


@pytest.mark.parametrize("field", SETTLED)
def test_params_arrays_become_plain_values(field):
    for value in SETTLED[field]:
        settled = getattr(SamplingParams(**{field: value}), field)
        parts = next(iter(settled.items())) if field == "logit_bias" else settled
        parts = parts if isinstance(parts, tuple) else [parts]
        assert {type(part) for part in parts} <= {bool, int, float, str}
    assert SamplingParams(**{field: SETTLED[field][0]}) == SamplingParams(**{field: PLAIN[field]})


PLAIN = {
    "temperature": 0.5, "max_tokens": 4, "ignore_eos": True, "stop_token_ids": [1, 2], "allowed_token_ids": [1, 2],
    "stop": ["a", "b"], "logit_bias": {3: 1.5},
}  # fmt: skip


def test_params_arrays_of_beams_and_structured_outputs():
    params = BeamSearchParams(
        beam_width=np.int32(2), early_stopping=np.bool_(True),
        structured_outputs=StructuredOutputsParams(choice=np.array(["a", "b"])),
    )  # fmt: skip
    plain = StructuredOutputsParams(choice=["a", "b"])
    assert params == BeamSearchParams(beam_width=2, early_stopping=True, structured_outputs=plain)

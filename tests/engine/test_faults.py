"""An exception in the work on one request ends this request alone: injected into every function that gets its data."""

import itertools

import pytest

from jpaged import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged import tokenizer as tokenizers
from jpaged.core import (
    admission,
    bans,
    beam,
    block_table,
    branches,
    commit,
    memory,
    plan,
    planned_step,
    queue,
    scheduler,
)
from jpaged.core import request as requests
from jpaged.core.plan import Admitted
from jpaged.core.request import Request, Sequence
from jpaged.engine import engine as engines
from jpaged.engine import output
from jpaged.engine.engine import Engine
from jpaged.engine.guard import Guard
from jpaged.runtime import batch, device_rows, row_table, sampling_row
from jpaged.structured import grammar, masks
from tests.support.injection import Injected, functions_of, wrapped

MODULES = [
    admission, bans, beam, block_table, branches, commit, memory, plan, planned_step, queue, scheduler, requests,
    engines, output, batch, device_rows, row_table, sampling_row, grammar, masks, tokenizers,
]  # fmt: skip
PHRASE = StructuredOutputsParams(regex="(one|two|three) (cats|dogs)+")


def load() -> dict[str, SamplingParams | BeamSearchParams]:
    """Eight requests that together make use of every path, on a pool that is too small for them."""
    greedy = {"temperature": 0, "ignore_eos": True}
    return {
        "forks": SamplingParams(n=3, seed=5, max_tokens=9, presence_penalty=0.5, logit_bias={70: 1.0}, min_tokens=2),
        "beams": BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True, stop=["zz"]),
        "constrained": SamplingParams(seed=6, max_tokens=20, structured_outputs=PHRASE, stop=["gs"]),
        "scored": SamplingParams(max_tokens=30, prompt_logprobs=1, logprobs=2, bad_words=["xy", "e"], **greedy),
        "best of": SamplingParams(best_of=2, n=1, seed=1, max_tokens=12, stop=["qq"], temperature=1.0),
        **{f"plain {i}": SamplingParams(max_tokens=30 + i, **greedy) for i in range(3)},
    }


@pytest.fixture(scope="module")
def shop(loaded):
    """Makes engines with a small pool around the runner of `loaded`."""
    return Shop(loaded.engine)


class Shop:
    def __init__(self, engine):
        self.whole = engine
        self.constraint = engine.grammar_compiler().compile(PHRASE)

    def engine(self) -> Engine:
        old = self.whole.scheduler
        self.whole.runner.recover()
        made = scheduler.Scheduler(
            scheduler.BlockPool(26, old.limits.block_size), old.limits, vocab_size=old.vocab_size,
            eos_token_ids=old.eos_token_ids, preemption="recompute",
        )  # fmt: skip
        return Engine(made, self.whole.runner, self.whole.tokenizer, max_in_flight=2)


def run(shop, victim=None, before=None, functions=None):
    """The outputs of the load, and the names of the requests that ended with a fault or were refused."""
    engine = shop.engine()
    guard, added, faults, refused = Guard(engine), {}, {}, []
    state = {"victim": None, "params": None}

    def call(name, args):
        if before and any(_belongs(arg, state) for arg in args):
            before(name)

    with wrapped(functions or {}, call):
        for name, params in load().items():
            if name == victim:
                state["params"] = params
            constraint = shop.constraint if params.structured_outputs else None
            prompt = engine.tokenizer.encode(f"A prompt of the {name}").ids
            try:
                added[name] = engine.add(name, prompt, params, constraint=constraint)
            except Injected:
                refused.append(name)
            if name == victim:
                state["victim"] = added.get(name)
        while engine.has_work:
            faults |= {request.request_id: error for request, error in guard.step().faults.items()}
    engine.scheduler.check_invariants()
    assert not engine.scheduler.requests and engine.scheduler.pool.num_used == 0
    ended = {name: [s.output_token_ids for s in request.outputs] for name, request in added.items()}
    for name in faults:
        assert any(s.finish_reason for s in added[name].sequences)
    return ended, {*faults, *refused}


def _belongs(value, state, depth=2) -> bool:
    """Whether a value is of the request on which a function shall fail."""
    victim, params = state["victim"], state["params"]
    if value is None or params is None:
        return False
    if value is params or (isinstance(value, Admitted) and value.params is params):
        return True
    if isinstance(value, list | tuple | dict) and depth and 0 < len(value) < 100:  # of this request alone
        if any(isinstance(each, Request | Sequence) for each in value):
            return False  # a function of all requests that handles each by itself
        if any(value is each for each in _owned(victim)):
            return True
        return all(_belongs(each, state, depth - 1) for each in (value.values() if isinstance(value, dict) else value))
    if victim is None:
        return False
    if isinstance(value, Request):
        return value is victim
    if isinstance(value, Sequence):
        return value.request is victim
    return any(value is each for each in _owned(victim))


def _owned(victim) -> list:
    if victim is None:
        return []
    parts = [each for s in victim.sequences for each in (s.table, s.decoder, s.constraint, s.tokens)]
    return [each for each in (victim.bans, victim.beam, victim.prompt_token_ids, *parts) if each is not None]


@pytest.fixture(scope="module")
def undisturbed(shop):
    expected, faults = run(shop)
    assert not faults and expected.keys() == load().keys()
    return expected


def names_for(shop, victim, functions) -> list[str]:
    """The functions that get data of a request."""
    found: dict[str, int] = {}
    run(shop, victim, lambda name: found.update({name: found.get(name, 0) + 1}), functions)
    return list(found)


VICTIMS = ("forks", "beams", "constrained", "scored", "plain 1")


@pytest.mark.parametrize(
    ("victim", "every"),
    [("forks", 5), *(pytest.param(victim, 1, marks=pytest.mark.deep) for victim in VICTIMS)],
)
def test_exception_in_any_function_ends_one_request_of_eight(shop, undisturbed, victim, every):
    """In every fifth of the functions in the usual tier."""
    functions = functions_of(MODULES)
    names = names_for(shop, victim, functions)
    assert len(names) > 30, names
    names = names[::every]
    ended = 0
    for name in names:

        def fail(called, name=name):
            if called == name:
                raise Injected(name)

        outputs, faults = run(shop, victim, fail, {name: functions[name]})
        assert faults <= {victim}, (name, faults)
        for other, tokens in outputs.items():
            assert other in faults or tokens == undisturbed[other], f"{name}: {other}"
        ended += bool(faults)
    assert ended > 0.9 * len(names), f"{ended} of {len(names)}"


@pytest.mark.parametrize("name", ["forward", "choose"])
def test_an_exception_of_one_step_ends_no_request(shop, monkeypatch, name):
    """Not even if there is only one."""
    engine = shop.engine()
    guard, calls = Guard(engine), itertools.count()
    original = getattr(engine.runner.step, name)
    monkeypatch.setattr(engine.runner.step, name, lambda *args: 1 / (next(calls) - 2) and original(*args))
    request = engine.add("0", engine.tokenizer.encode("Once").ids, SamplingParams(max_tokens=6, ignore_eos=True))
    while engine.has_work:
        assert not guard.step().faults
    assert next(calls) > 6 and len(request.sequences[0].output_token_ids) == 6

"""Drafts on a real model: the outputs are those without drafts, to the bit, and come in fewer steps."""

import dataclasses
import functools
import itertools
import operator

import numpy as np
import pytest

from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.commands import ResetPrefixCache, UpdateParams
from jpaged.core.params import SamplingParams, StructuredOutputsParams
from jpaged.core.plan import Done, Sample, StepResult
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine
from jpaged.engine.output import request_output
from jpaged.serving.metrics import Metrics
from jpaged.tokenizer import Vocabulary
from tests.core import traffic
from tests.support import models
from tests.support.trees import nested

TOKENIZER = models.byte_tokenizer()
CONFIG = {"method": "ngram", "num_speculative_tokens": 3}
STORY = "one two three one two "


class Speller:
    """A runner that gives every sequence the tokens of a fixed text."""

    def __init__(self, text: str):
        self.tokens, self.num_prompt, self.num_steps = [*TOKENIZER.encode(text).ids, models.EOS], {}, 0

    def dispatch(self, plan, make_masks=None):
        self.num_steps += 1
        self.num_prompt |= {row: self.num_prompt[source] for source, row in plan.row_copies}
        self.num_prompt |= {admitted.row: admitted.num_prompt_tokens for admitted in plan.admitted}
        places = [r.start + r.num_tokens - self.num_prompt[r.row] for r in plan.rows for _ in range(r.num_samples)]
        return Done(StepResult([Sample(self.tokens[min(n, len(self.tokens) - 1)], -0.5 - n, 1) for n in places]))


def spell(text: str, *, depth: int = 1, drafts: bool = True, **params):
    """Return the output, the deltas and the number of steps of a request that gets a fixed text."""
    limits = Limits(96, 4, 16, speculative_config=CONFIG if drafts else None)
    scheduler, runner = (
        Scheduler(BlockPool(48, 4), limits, vocab_size=models.VOCAB, eos_token_ids=[models.EOS]),
        Speller(text),
    )
    engine, deltas = Engine(scheduler, runner, TOKENIZER, max_in_flight=depth), []
    request = engine.add("0", TOKENIZER.encode("ask").ids, SamplingParams(**{"max_tokens": 60} | params))
    while engine.has_work:
        deltas += engine.step().deltas
        scheduler.check_invariants()
    assert scheduler.pool.num_used == 0
    return request_output(request, Vocabulary(TOKENIZER)).outputs, deltas, runner.num_steps


@pytest.mark.parametrize("depth, expected", [(1, [False] * 6), (2, [False, True, True] * 2)])
def test_the_time_of_a_step_begins_with_the_result_before_it(monkeypatch, depth, expected):
    limits = Limits(96, 4, 16, speculative_config=CONFIG)
    scheduler = Scheduler(BlockPool(48, 4), limits, vocab_size=models.VOCAB, eos_token_ids=[])
    engine = Engine(scheduler, Speller("abcdef"), TOKENIZER, max_in_flight=depth)
    ticks, found = itertools.count(1), []
    monkeypatch.setattr(engine, "_clock", lambda: float(next(ticks)))
    learn = lambda plan, seconds, *, overlaps: found.append((seconds, overlaps))
    monkeypatch.setattr(scheduler.drafting, "learn_step", learn)
    for number in range(2):
        engine.add(str(number), TOKENIZER.encode("ask").ids, SamplingParams(max_tokens=3))
        while engine.has_work:
            engine.step()
        [next(ticks) for _ in range(1000)]  # without work
    assert [overlaps for _, overlaps in found] == expected
    assert all(seconds < 20 for seconds, _ in found), "no step has the idle time"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "params",
    [{}, {"stop": ["two o"]}, {"stop": ["two o"], "include_stop_str_in_output": True},
     {"stop": ["e o"], "min_tokens": 30},
     {"max_tokens": 41}, {"stop_token_ids": TOKENIZER.encode("#").ids}, {"n": 2, "logprobs": 0}, {"best_of": 3},
     {"bad_words": ["zz"]}, {"min_tokens": 20}, {"ignore_eos": True}],
    ids=str,
)  # fmt: skip
def test_text_ends_where_it_ends_without_drafts(params, depth):
    text = "one two three " * 3 + "# one two"
    outputs, deltas, steps = spell(text, depth=depth, **params)
    expected, plain_deltas, plain_steps = spell(text, drafts=False, **params)
    assert outputs == expected and steps < plain_steps
    for index in range(len(outputs)):
        for part in ("text", "token_ids"):
            ours, theirs = ([getattr(d, part) for d in each if d.index == index] for each in (deltas, plain_deltas))
            assert functools.reduce(operator.add, ours) == functools.reduce(operator.add, theirs)
    assert [d.finish_reason for d in deltas if d.finish_reason] == [
        d.finish_reason for d in plain_deltas if d.finish_reason
    ]


def test_a_repeated_answer_comes_in_fewer_steps_until_the_prefix_cache_is_reset():
    limits = Limits(96, 4, 16, speculative_config={"method": "suffix"})
    scheduler = Scheduler(BlockPool(48, 4), limits, vocab_size=models.VOCAB, eos_token_ids=[models.EOS])
    runner = Speller("a quick brown fox jumps over the lazy dog")
    engine, steps, texts = Engine(scheduler, runner, TOKENIZER), [], set()

    def ask(salt="", **params):
        before = runner.num_steps
        params = SamplingParams(max_tokens=60, **params)
        request = engine.add(str(len(steps)), TOKENIZER.encode("ask").ids, params, cache_salt=salt)
        while engine.has_work:
            engine.step()
        texts.add(request.sequences[0].text)
        steps.append(runner.num_steps - before)

    ask()
    ask()
    ask(salt="b")
    ask(stop=["fox"])
    ask(presence_penalty=1.0)
    engine.control(ResetPrefixCache())
    ask()
    first, again, other_salt, stopped, penalized, after_reset = steps
    assert first == other_salt == after_reset > 2 * again
    assert again == penalized > stopped
    assert texts == {"a quick brown fox jumps over the lazy dog", "a quick brown "}


def test_metrics_count_drafts_under_vllms_names():
    scheduler, runner = traffic.make(blocks=64, drafts=3)
    engine = Engine(scheduler, runner)
    page = Metrics("m", [engine.stats])
    engine.add(
        "0",
        [1, 2],
        SamplingParams(max_tokens=40),
    )
    kept = []
    while engine.has_work:
        output = engine.step()
        page.engines[0].stepped(scheduler, output)
        kept += [number for _, number in output.committed.verified]
    lines = dict(line.rsplit(" ", 1) for line in page.render().decode().splitlines() if "spec_decode" in line)
    labels = 'engine="0",model_name="m"'
    assert float(lines[f"vllm:spec_decode_num_drafts_total{{{labels}}}"]) == len(kept) > 5
    assert float(lines[f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}}"]) == sum(kept) > 5
    assert float(lines[f"vllm:spec_decode_num_draft_tokens_total{{{labels}}}"]) > sum(kept)
    first = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}}'
    assert float(lines[first]) == sum(number > 0 for number in kept)


@pytest.fixture(scope="module")
def engine(with_draft_model) -> Engine:
    """An engine with drafts from texts, of a model whose tokens are characters."""
    limits = dataclasses.replace(with_draft_model.limits, speculative_config=CONFIG)
    scheduler = Scheduler(BlockPool(200, 8), limits, vocab_size=models.VOCAB, eos_token_ids=[models.EOS])
    return Engine(scheduler, with_draft_model.runner, with_draft_model.tokenizer, max_in_flight=2)


def run(
    engine: Engine, requests, *, drafts: bool = True, exact: bool = True, blocks: int = 200, mode: str = "recompute",
    depth: int = 1,
):  # fmt: skip
    """Return tokens, text, endings and logprob bits of the requests on the engine's runner, and the scheduler.

    The engine's draft model gives drafts if it has one.
    """
    config = engine.limits.speculative_config if drafts else None
    limits = dataclasses.replace(engine.limits, speculative_config=config, exact=exact)
    host = BlockPool(40, 8, enable_prefix_caching=False) if mode == "swap" else None
    scheduler = Scheduler(
        BlockPool(blocks, 8), limits, vocab_size=models.VOCAB, eos_token_ids=[models.EOS], host_pool=host,
        preemption=mode,
    )  # fmt: skip
    draft_model = engine._draft_model if drafts else None
    other = Engine(scheduler, engine.runner, engine.tokenizer, max_in_flight=depth, draft_model=draft_model)
    compiler = other.grammar_compiler()
    added = []
    for i, (prompt, params) in enumerate(requests):
        grammar = compiler.compile(params.structured_outputs) if params.structured_outputs else None
        added.append(other.add(str(i), TOKENIZER.encode(prompt).ids, params, constraint=grammar))
    while other.has_work:
        other.step()
        scheduler.check_invariants()
    found = [
        [
            (s.tokens, s.text, s.finish_reason, s.stop_reason, [_bits(each) for each in s.samples])
            for s in request.outputs
        ]
        for request in added
    ]
    return found, scheduler


def _bits(sample: Sample) -> tuple:
    logprobs = np.float32([sample.logprob, *sample.top_logprobs]).tobytes()
    return sample.token, logprobs, sample.rank, sample.top_tokens, sample.kept


def mixed() -> list[tuple[str, SamplingParams]]:
    """Return requests of every kind, with texts that repeat themselves."""
    phrase = StructuredOutputsParams(regex="(yes yes no ){6}")
    schema = StructuredOutputsParams(json={"type": "object", "properties": {"long name": {"const": "a b"}},
                                           "required": ["long name"], "additionalProperties": False})  # fmt: skip
    kinds = [
        dict(temperature=0), dict(temperature=0, logprobs=2), dict(temperature=0.4),
        dict(temperature=1.0, top_k=5, n=2),
        dict(temperature=0, structured_outputs=phrase), dict(temperature=0.7, structured_outputs=schema),
        dict(temperature=0, presence_penalty=0.5), dict(temperature=0, logit_bias={101: 3.0}, logprobs=0),
        dict(temperature=0.5, bad_words=["on", "ttt"]), dict(temperature=0, min_tokens=20),
        dict(temperature=0, stop=["ee"]), dict(temperature=0, prompt_logprobs=1),
        # Few tokens are likely, and which of them top_p keeps depends on the counts of drafts.
        dict(top_p=0.7, frequency_penalty=0.1, kept_tokens=True, logit_bias={101: 9.0, 110: 9.0, 111: 9.0}),
    ]  # fmt: skip
    return [(STORY * (1 + i % 3), SamplingParams(max_tokens=40, seed=i, **kind)) for i, kind in enumerate(kinds)]


SWAP, RECOMPUTE = ({"blocks": 40, "mode": mode} for mode in ("swap", "recompute"))


def in_deep(*options: dict) -> list:
    return [pytest.param(each, marks=pytest.mark.deep) for each in options]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [SWAP | {"depth": 2}, *in_deep({}, {"depth": 2}, SWAP, RECOMPUTE, RECOMPUTE | {"depth": 2})],
    ids=str,
)
def test_drafts_change_no_bit(engine, options):
    requests = mixed()
    expected, plain = run(engine, requests, drafts=False)
    found, scheduler = run(engine, requests, **options)
    assert found == expected
    assert scheduler.num_kept > 30 and scheduler.num_drafts > scheduler.num_kept and plain.num_drafts == 0
    assert (scheduler.num_swapped_blocks > 0) == (options.get("mode") == "swap")
    assert (scheduler.num_preemptions > 0) == ("mode" in options)
    alone = [run(engine, [request], **options)[0][0] for request in requests[:6]]
    assert alone == expected[:6]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_an_exact_preemption_by_recompute_changes_no_bit(engine, depth):
    """Tokens of outputs are computed again as decode tokens, and those of prompts as tokens of prompts."""
    requests = mixed()
    expected, _ = run(engine, requests, drafts=False)
    found, scheduler = run(engine, requests, drafts=False, blocks=30, depth=depth)
    assert found == expected and scheduler.num_preemptions > 5 and not scheduler.num_swapped_blocks
    others, _ = run(engine, requests, drafts=False, exact=False, blocks=30, depth=depth)
    assert others != expected, "chunks of outputs have other bits, so that this test would find them"


@pytest.mark.slow
def test_a_chat_that_goes_on_has_the_bits_of_a_new_one(engine):
    """With `exact`, an answer in the prompt of the next turn is a prompt's text, and not that of an earlier output."""
    params = SamplingParams(max_tokens=30, temperature=0)
    answer = run(engine, [(STORY, params)])[0][0][0][1]
    limits = dataclasses.replace(engine.limits, speculative_config=None, exact=True)
    found = []
    for turns in ([STORY, STORY + answer + STORY], [STORY + answer + STORY]):
        scheduler = Scheduler(BlockPool(200, 8), limits, vocab_size=models.VOCAB, eos_token_ids=[models.EOS])
        other = Engine(scheduler, engine.runner, engine.tokenizer)
        for i, prompt in enumerate(turns):
            request = other.add(str(i), TOKENIZER.encode(prompt).ids, params)
            while other.has_work:
                other.step()
        found.append([_bits(each) for each in request.sequences[0].samples])
    assert found[0] == found[1]


@pytest.mark.slow
def test_tokens_that_a_grammar_forces_come_in_fewer_steps(engine):
    requests = [mixed()[4]]
    _, scheduler = run(engine, requests)
    assert scheduler.num_kept == scheduler.num_drafts >= 25


@pytest.mark.slow
def test_an_update_of_parameters_between_drafts_and_their_result(engine):
    """The drafts of a step that is lost are computed again, with the new parameters."""
    engine.add("0", TOKENIZER.encode(STORY).ids, SamplingParams(max_tokens=30, temperature=0))
    for _ in range(5):
        engine.step()
    tree = dict(zip(engine.runner.tree.expected, engine.runner.params, strict=True))
    engine.control(UpdateParams(nested(tree)))
    request = engine.scheduler.requests["0"]
    while engine.has_work:
        engine.step()
        engine.scheduler.check_invariants()
    expected, _ = run(engine, [(STORY, SamplingParams(max_tokens=30, temperature=0))], drafts=False)
    assert request.sequences[0].tokens == expected[0][0][0]

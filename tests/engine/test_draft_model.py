"""A draft model beside a model: outputs have the bits of an engine without drafts, also if the draft model fails."""

import dataclasses

import pytest

from jpaged.core.commands import ResetPrefixCache, Sleep, UpdateParams, WakeUp
from jpaged.core.params import SamplingParams
from jpaged.engine.draft_model import DraftModel
from jpaged.engine.engine import Engine
from jpaged.start import pool
from jpaged.start.setup import prepare
from tests.core import traffic
from tests.engine.conftest import drafting_config, drafts_of
from tests.engine.test_drafts import RECOMPUTE, STORY, SWAP, TOKENIZER, in_deep, mixed, run
from tests.support import checkpoints, models
from tests.support.trees import nested

pytestmark = pytest.mark.slow


@pytest.fixture
def engine(with_draft_model) -> Engine:
    return with_draft_model


@pytest.fixture
def directory(characters):
    return characters


def drafting(engine: Engine) -> Engine:
    return engine._draft_model._engine


def check_nothing_is_left(engine: Engine) -> None:
    scheduler = drafting(engine).scheduler
    scheduler.check_invariants()
    assert not scheduler.requests and scheduler.pool.num_used == 0


@pytest.mark.parametrize("options", [SWAP | {"depth": 2}, *in_deep({}, {"depth": 2}, RECOMPUTE)], ids=str)
def test_its_drafts_change_no_bit(engine, options):
    requests = mixed()
    expected, plain = run(engine, requests, drafts=False)
    found, scheduler = run(engine, requests, **options)
    assert found == expected and plain.num_drafts == 0
    assert scheduler.num_kept > 100 and scheduler.num_drafts > scheduler.num_kept
    assert (scheduler.num_preemptions > 0) == ("mode" in options)
    check_nothing_is_left(engine)


def test_both_models_draw_the_same_tokens(engine, monkeypatch):
    """At a high temperature, most drafts are kept because both models draw with the same random bits."""
    params = [SamplingParams(max_tokens=60, temperature=1.5, top_k=30, top_p=0.95, seed=i, n=2) for i in range(3)]
    requests = [(STORY, each) for each in params]
    _, scheduler = run(engine, requests)
    assert scheduler.num_kept > 0.8 * scheduler.num_drafts > 50
    add = drafting(engine).add

    def add_with_other_seed(name, tokens, params, **options):
        return add(name, tokens, dataclasses.replace(params, seed=7), **options)

    monkeypatch.setattr(drafting(engine), "add", add_with_other_seed)
    _, scheduler = run(engine, requests)
    assert scheduler.num_kept < 0.5 * scheduler.num_drafts


def test_a_long_prompt_is_computed_in_several_rounds_beside_the_drafts_of_others(engine):
    drafting(engine).control(ResetPrefixCache())
    engine.add("short", TOKENIZER.encode(STORY).ids, SamplingParams(max_tokens=30, temperature=0))
    while not engine.scheduler.num_drafts:
        engine.step()
    engine.add("long", TOKENIZER.encode(STORY * 5).ids, SamplingParams(max_tokens=30, temperature=0))
    drafted = {"short": [], "long": []}
    while engine.has_work:
        plan = engine.step().plan
        for name, request in engine.scheduler.requests.items():
            row = request.sequences[0].row
            if request.sequences[0].num_output_tokens and row is not None:
                drafted[name].append(any(plan.rows[index].row == row for index, _ in plan.drafts))
    assert drafted["long"].index(True) >= 2, "a prompt of 110 tokens, and 48 in a step"
    assert all(drafted["short"][: drafted["long"].index(True)])
    check_nothing_is_left(engine)


def test_later_rounds_compute_new_tokens_only(engine):
    drafting(engine).control(ResetPrefixCache())
    scheduler = drafting(engine).scheduler
    queries, hits = scheduler.prefix_queries, scheduler.prefix_hits
    _, found = run(engine, [(STORY * 3, SamplingParams(max_tokens=40, temperature=0))])
    computed = scheduler.prefix_queries - queries - (scheduler.prefix_hits - hits)
    assert found.num_drafted > 8 and computed < len(TOKENIZER.encode(STORY * 3).ids) + 12 * found.num_drafted


def test_salts_divide_its_prefix_cache_too(engine):
    drafting(engine).control(ResetPrefixCache())
    scheduler, hits = drafting(engine).scheduler, []
    for salt in ("a", "a", "b"):
        before = scheduler.prefix_hits
        engine.add("0", TOKENIZER.encode(STORY).ids, SamplingParams(max_tokens=3, temperature=0), cache_salt=salt)
        while engine.has_work:
            engine.step()
        hits.append(scheduler.prefix_hits - before)
    assert hits[1] > hits[0] == hits[2]


def test_an_engine_goes_on_without_a_draft_model_that_fails(directory, engine, monkeypatch, caplog):
    requests = mixed()[:4]
    expected, _ = run(engine, requests, drafts=False)
    broken, calls, dispatch = drafting(engine), [], drafting(engine).runner.dispatch

    def failing(*args):
        calls.append(args)
        if len(calls) > 6:
            raise RuntimeError("no memory")
        return dispatch(*args)

    monkeypatch.setattr(broken.runner, "dispatch", failing)
    found, scheduler = run(engine, requests, depth=2)
    assert found == expected and scheduler.num_drafted > 0 and len(calls) == 7
    assert scheduler.drafting.max_drafts == 0
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "the draft model has failed, and is not used until the next start"
    ]
    for name in [*broken.scheduler.requests]:
        broken.abort(name)


def test_where_its_pool_is_full_some_sequences_have_no_drafts(engine, monkeypatch):
    requests = [(STORY * 3, SamplingParams(max_tokens=30, temperature=0, seed=i)) for i in range(6)]
    expected, _ = run(engine, requests, drafts=False)
    small, _ = traffic.make(blocks=9, size=8, seqs=8, tokens=48, length=160)
    small.vocab_size = models.VOCAB
    few = DraftModel(Engine(small, drafting(engine).runner))
    monkeypatch.setattr(engine, "_draft_model", few)
    found, scheduler = run(engine, requests)
    assert found == expected and scheduler.num_kept > 0
    assert scheduler.drafting.max_drafts > 0, "sequences that are longer than the pool do not end the draft model"
    assert max(len(request[0][0]) for request in found) > 9 * 8 and small.pool.num_used == 0 and not small.requests


def test_it_sleeps_wakes_and_forgets_with_the_engine(engine):
    tree = dict(zip(engine.runner.tree.expected, engine.runner.params, strict=True))
    expected, _ = run(engine, mixed()[:2], drafts=False)
    runner = drafting(engine).runner
    engine.control(Sleep(level=2))
    assert not runner.params
    engine.control(UpdateParams(nested(tree)))
    assert runner.params
    engine.control(WakeUp())
    found, scheduler = run(engine, mixed()[:2])
    assert found == expected and scheduler.num_kept > 0
    theirs = drafting(engine).scheduler.pool
    epoch = theirs.epoch
    engine.control(ResetPrefixCache())
    assert theirs.epoch > epoch


def test_an_abort_leaves_nothing_of_it(engine):
    for i in range(4):
        engine.add(str(i), TOKENIZER.encode(STORY).ids, SamplingParams(max_tokens=60, temperature=0))
    while engine.scheduler.num_drafts < 5:
        engine.step()
    engine.abort("1")
    engine.step()
    for name in ("0", "2", "3"):
        engine.abort(name)
    while engine.has_work:
        engine.step()
    check_nothing_is_left(engine)


def test_a_draft_model_needs_the_tokens_of_the_model(directory, tmp_path):
    checkpoints.write(tmp_path, models.TINY | {"vocab_size": models.VOCAB + 8}, generation={"eos_token_id": 0})
    config = drafting_config(directory, speculative_config=drafts_of(tmp_path))
    with pytest.raises(ValueError, match=r"speculative_config.model: .* must have the tokens of the model"):
        prepare(config)
    models.write_tokenizer(tmp_path)  # a vocabulary that is only padded
    assert prepare(config).draft_model.resolved.model.vocab_size == models.VOCAB + 8


def test_errors_of_a_draft_model_name_the_setting(directory):
    for settings, message in (
        ({"model": "/no/such/model"}, "speculative_config: the draft model: model: /no/such/model is not a directory"),
        ({"quantization": "int3"}, "speculative_config: the draft model: quantization: must be one of"),
        ({"revision": "v1"}, "speculative_config: the draft model: revision: only a hub id has revisions"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(drafting_config(directory, speculative_config=drafts_of(directory, **settings)))


def test_a_draft_model_has_the_limits_of_the_engine_and_fewer_sequences(directory):
    config = drafting_config(
        directory, max_model_len=None, max_num_seqs=16, num_gpu_blocks_override=64,
        speculative_config=drafts_of(directory),
    )  # fmt: skip
    setup = prepare(config)
    limits = setup.draft_model.resolved.limits
    assert limits.max_model_len == setup.resolved.limits.max_model_len
    assert limits.max_num_seqs == 16 and limits.block_size == 8 and limits.speculative_config is None
    few = prepare(dataclasses.replace(config, speculative_config=drafts_of(directory, num_speculative_tokens=1)))
    assert few.draft_model.resolved.limits.max_num_seqs == 8, "a step has room for eight drafts"


def test_both_pools_share_the_memory(engine, monkeypatch):
    """The draft model's has room for all its sequences, or as many blocks as the other one will have."""
    runner, block = drafting(engine).runner, 2**20
    beside = engine.runner.blocks.block_bytes
    assert pool.fill_memory(runner, 0.9, wanted=40, moved_bytes=0, beside=beside) == 40
    monkeypatch.setattr(pool.os, "sysconf", lambda name: block if name == "SC_PAGE_SIZE" else 4)
    expected = block // (runner.blocks.block_bytes + beside)
    assert pool.fill_memory(runner, 0.9, wanted=10**6, moved_bytes=0, beside=beside) == expected > 0

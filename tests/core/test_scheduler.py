"""The scheduler, driven by a fake runner: however it is scheduled, every request gets the tokens it gets alone."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.request import FinishReason, InvalidParameter, SamplingParams
from jpaged.core.scheduler import Scheduler
from tests.fake_runner import VOCAB, FakeRunner, generate, next_token


def make(blocks=16, size=4, *, seqs=4, tokens=16, length=64, cache=True, eos=()):
    pool = BlockPool(blocks, size, enable_prefix_caching=cache)
    scheduler = Scheduler(pool, Limits(length, seqs, tokens), vocab_size=VOCAB, eos_token_ids=eos)
    return scheduler, FakeRunner(blocks, size)


def add(scheduler, name, prompt, **params):
    return scheduler.add(str(name), prompt, SamplingParams(**params), seed=0)


def step(scheduler, runner):
    decision = scheduler.schedule()
    scheduler.check_invariants()
    assert decision.num_tokens <= scheduler.limits.max_num_batched_tokens
    assert len(decision.num_scheduled_tokens) <= scheduler.limits.max_num_seqs
    assert decision.num_scheduled_tokens or not scheduler.has_work, "a step that does nothing would last for ever"
    advanced = scheduler.update(decision, *runner.step(decision))
    scheduler.check_invariants()
    return decision, advanced


def drain(scheduler, runner):
    while scheduler.has_work:
        step(scheduler, runner)
    assert scheduler.pool.num_used == 0


def test_one_request_runs_to_its_length():
    scheduler, runner = make()
    request = add(scheduler, 0, [1, 2, 3, 4, 5], max_tokens=7)
    drain(scheduler, runner)
    (sequence,) = request.sequences
    assert sequence.output_token_ids == generate([1, 2, 3, 4, 5], 7)
    assert sequence.logprobs == [-float(t) for t in sequence.output_token_ids]
    assert sequence.finish_reason == FinishReason.LENGTH and runner.num_steps == 7


def test_a_long_prompt_is_computed_in_chunks_beside_running_ones():
    scheduler, runner = make(tokens=8)
    add(scheduler, "short", [1], max_tokens=9)
    add(scheduler, "long", list(range(20)), max_tokens=1)
    counts = []
    while scheduler.has_work:
        decision, _ = step(scheduler, runner)
        counts.append(list(decision.num_scheduled_tokens.values()))
    assert counts[:4] == [[1, 7], [1, 7], [1, 6], [1]]


def test_first_come_first_served():
    scheduler, runner = make(seqs=2)
    requests = [add(scheduler, i, [i + 1, 7], max_tokens=3) for i in range(5)]
    order = []
    while scheduler.has_work:
        _, advanced = step(scheduler, runner)
        order += [requests.index(s.request) for s in advanced if s.finish_reason]
    assert order == [0, 1, 2, 3, 4]


def test_the_youngest_gives_way_and_comes_back_first():
    scheduler, runner = make(blocks=6, size=2, seqs=3)
    requests = [add(scheduler, i, [i, i, i], max_tokens=9) for i in range(3)]
    preempted = []
    while scheduler.has_work:
        decision, _ = step(scheduler, runner)
        preempted += [requests.index(r) for r in decision.preempted]
    assert preempted[:2] == [2, 1] and scheduler.num_preemptions == len(preempted)
    assert [r.sequences[0].output_token_ids for r in requests] == [generate([i, i, i], 9) for i in range(3)]


def test_a_prefix_is_computed_once_and_the_last_token_always():
    scheduler, runner = make()
    prompt = list(range(12))
    first = add(scheduler, 0, prompt, max_tokens=1)
    drain(scheduler, runner)
    again = add(scheduler, 1, prompt, max_tokens=1)
    longer = add(scheduler, 2, [*prompt, 40], max_tokens=1)
    decision, _ = step(scheduler, runner)
    assert [s.num_cached_tokens for r in (first, again, longer) for s in r.sequences] == [0, 8, 12]
    assert list(decision.num_scheduled_tokens.values()) == [4, 1]


def test_generated_tokens_are_cached_too():
    scheduler, runner = make()
    request = add(scheduler, 0, [1, 2, 3], max_tokens=6)
    drain(scheduler, runner)
    follow_up = add(scheduler, 1, request.sequences[0].tokens, max_tokens=1)
    drain(scheduler, runner)
    assert follow_up.sequences[0].num_cached_tokens == 8, "all but the last token's KV was written"


def test_without_a_cache_everything_is_computed():
    scheduler, runner = make(cache=False)
    for i in range(2):
        request = add(scheduler, i, list(range(12)), max_tokens=1)
        drain(scheduler, runner)
    assert request.sequences[0].num_cached_tokens == 0


def test_end_of_sequence_and_stop_tokens():
    prompt = [5, 6]
    tokens = generate(prompt, 4)
    assert tokens[3] not in tokens[:3]
    scheduler, runner = make(eos=[tokens[3]])
    at_eos = add(scheduler, 0, prompt, max_tokens=9)
    ignoring = add(scheduler, 1, prompt, max_tokens=9, ignore_eos=True)
    at_stop = add(scheduler, 2, prompt, max_tokens=9, stop_token_ids=[tokens[1]])
    drain(scheduler, runner)
    ended = [
        (len(s.output_token_ids), s.finish_reason, s.stop_reason)
        for r in (at_eos, ignoring, at_stop)
        for s in r.sequences
    ]
    stop = tokens.index(tokens[1]) + 1
    assert ended == [(4, "stop", None), (9, "length", None), (stop, "stop", tokens[1])]


def test_abort_at_any_moment_frees_everything():
    for moment in range(8):
        scheduler, runner = make(blocks=5, size=2, tokens=3, seqs=2)
        for i in range(3):
            add(scheduler, i, [1, 2, 3, 4, i], max_tokens=4)
        for _ in range(moment):
            step(scheduler, runner)
        for i in range(3):
            scheduler.abort(str(i))
            scheduler.check_invariants()
        assert not scheduler.has_work and scheduler.pool.num_used == 0
        assert scheduler.abort("0") is None and scheduler.abort("never seen") is None


def test_an_abort_between_schedule_and_update_is_left_alone():
    scheduler, runner = make()
    request = add(scheduler, 0, [1, 2], max_tokens=3)
    decision = scheduler.schedule()
    results = runner.step(decision)
    scheduler.abort("0")
    assert scheduler.update(decision, *results) == []
    assert request.sequences[0].finish_reason == FinishReason.ABORT and scheduler.pool.num_used == 0


def test_fork_shares_until_written_and_both_branches_go_on():
    scheduler, runner = make(size=4)
    request = add(scheduler, 0, [1, 2, 3, 4, 5], max_tokens=8)
    step(scheduler, runner)
    child = scheduler.fork(request.sequences[0])
    used = scheduler.pool.num_used
    child.tokens[-1] = (child.tokens[-1] + 1) % VOCAB  # the branches must differ, or sharing could not go wrong
    forked = list(child.tokens)
    decision, _ = step(scheduler, runner)
    assert len(decision.block_copies) == 1 and scheduler.pool.num_used == used + 1
    drain(scheduler, runner)
    assert request.sequences[0].output_token_ids == generate([1, 2, 3, 4, 5], 8)
    assert child.tokens == forked + generate(forked, 13 - len(forked))


def test_a_forked_request_is_preempted_as_one():
    scheduler, runner = make(blocks=7, size=2, seqs=4)
    old = add(scheduler, "old", [9, 9, 9], max_tokens=8)
    young = add(scheduler, "young", [8, 8, 8], max_tokens=3)
    step(scheduler, runner)
    child = scheduler.fork(young.sequences[0])
    drain(scheduler, runner)
    assert scheduler.num_preemptions > 0
    assert old.sequences[0].output_token_ids == generate([9, 9, 9], 8)
    assert child.output_token_ids == young.sequences[0].output_token_ids == generate([8, 8, 8], 3)


@pytest.mark.parametrize(
    "prompt, params, field, numbers",
    [
        ([], {}, "prompt", "at least one"),
        ([VOCAB], {}, "prompt", f"token id {VOCAB} is outside the vocabulary [0, {VOCAB})"),
        ([-1], {}, "prompt", "-1"),
        ([True], {}, "prompt", "True"),
        ([1] * 64, {}, "prompt", "64 tokens; at most 63"),
        ([1] * 10, {"max_tokens": 55}, "max_tokens", "55 after a prompt of 10 tokens exceeds 64"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids", str(VOCAB)),
    ],
)
def test_what_can_never_run_is_refused(prompt, params, field, numbers):
    scheduler, _ = make()
    with pytest.raises(InvalidParameter) as error:
        add(scheduler, 0, prompt, **params)
    assert error.value.field == field and numbers in str(error.value)
    assert not scheduler.has_work


def test_the_pool_limits_a_sequence_too():
    scheduler, runner = make(blocks=2, size=4)
    with pytest.raises(InvalidParameter, match=r"at most 8 fit .*what the KV pool can hold"):
        add(scheduler, 0, [1] * 9)
    request = add(scheduler, 0, [1] * 6, max_tokens=None)
    drain(scheduler, runner)
    assert len(request.sequences[0].tokens) == 9, "the last token needs no slot"


def test_a_request_id_in_use_is_refused():
    scheduler, _ = make()
    add(scheduler, 0, [1])
    with pytest.raises(InvalidParameter, match="request_id"):
        add(scheduler, 0, [2])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(5, 24),
    size=st.sampled_from([1, 2, 4, 8]),
    seqs=st.integers(1, 5),
    tokens=st.integers(5, 20),
    cache=st.booleans(),
)
def test_any_traffic_gives_what_each_request_gives_alone(seed, blocks, size, seqs, tokens, cache):
    """Random arrivals, aborts and forks in pools so small that preemption is common, with shared prefixes."""
    rng = random.Random(seed)
    scheduler, runner = make(blocks, size, seqs=seqs, tokens=tokens, length=40, cache=cache, eos=[0])
    room = scheduler.max_sequence_len
    requests, forks = [], []
    for arrival in range(12):
        prefix = [rng.randrange(1, 3)] * rng.randrange(0, 9)
        prompt = [*prefix, rng.randrange(VOCAB)][: room - 1]
        limit = rng.randint(1, min(12, room - len(prompt)))
        requests.append(add(scheduler, arrival, prompt, max_tokens=limit, ignore_eos=rng.random() < 0.5))
        for _ in range(rng.randrange(4)):
            if scheduler.has_work:
                step(scheduler, runner)
        if rng.random() < 0.15:
            scheduler.abort(str(rng.randrange(arrival + 1)))
            scheduler.check_invariants()
        forkable = [
            r.sequences[0] for r in scheduler.running.values()
            if len(r.sequences) == 1 and not r.sequences[0].finish_reason and 2 * -(-room // size) <= blocks
        ]  # fmt: skip
        if forkable and seqs >= 2 and rng.random() < 0.3:
            running = sum(len(r.sequences) for r in scheduler.running.values())
            if running < seqs:
                forks.append(scheduler.fork(rng.choice(forkable)))
                scheduler.check_invariants()
    drain(scheduler, runner)
    for sequence in [r.sequences[0] for r in requests] + forks:
        got = sequence.output_token_ids
        params, prompt = sequence.request.params, sequence.request.prompt_token_ids
        expected = generate(prompt, sequence.request.max_tokens)
        if not params.ignore_eos and 0 in expected:
            expected = expected[: expected.index(0) + 1]
        if sequence.finish_reason == FinishReason.ABORT:
            assert got == expected[: len(got)]
        else:
            assert got == expected


def test_the_fake_runner_notices_a_wrong_block():
    """Otherwise none of the above would prove anything."""
    scheduler, runner = make()
    request = add(scheduler, 0, [1, 2, 3, 4, 5], max_tokens=4)
    step(scheduler, runner)
    table = request.sequences[0].table
    table.block_ids[0] = scheduler.pool.allocate()
    with pytest.raises(AssertionError, match="did not write"):
        runner.step(scheduler.schedule())
    assert next_token([1, 2]) == next_token([1, 2]) != next_token([2, 1])

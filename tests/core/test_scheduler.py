"""The scheduler, driven by a fake runner: however it is scheduled, every request gets the tokens it gets alone."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.core.drafts import ASLEEP, Offer
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.plan import Sample, StepResult
from jpaged.core.request import NON_FINITE, FinishReason
from tests.core.traffic import Oracle, add, assert_as_alone, drain, draw, make, step
from tests.support.fake_runner import beams, generate, next_token


def test_one_request_runs_to_its_length():
    scheduler, runner = make()
    request = add(scheduler, 0, [1, 2, 3, 4, 5], max_tokens=7)
    drain(scheduler, runner)
    (sequence,) = request.sequences
    assert sequence.output_token_ids == generate([1, 2, 3, 4, 5], 7)
    assert [sample.logprob for sample in sequence.samples] == [-float(t) for t in sequence.output_token_ids]
    assert sequence.finish_reason == FinishReason.LENGTH and runner.num_steps == 7


def test_a_long_prompt_is_computed_in_chunks_beside_running_ones():
    scheduler, runner = make(tokens=8)
    add(scheduler, "short", [1], max_tokens=9)
    add(scheduler, "long", list(range(20)), max_tokens=1)
    counts = []
    while scheduler.has_work:
        done = step(scheduler, runner)
        counts.append(done.counts)
    assert counts[:4] == [[1, 7], [1, 7], [1, 6], [1]]


def test_chunks_beside_decodes_are_shorter():
    scheduler, runner = make(tokens=16, tokens_beside_decodes=8)
    add(scheduler, "short", [1], max_tokens=3)
    add(scheduler, "long", list(range(40)), max_tokens=1)
    counts = [step(scheduler, runner).counts for _ in range(4)]
    assert counts == [[1, 15], [1, 7], [1, 7], [11]], "the last step has no decode beside the prompt"


def test_decodes_behind_a_prompt_shorten_its_chunk():
    """Under "priority" a prompt may come before a sequence that is past its own."""
    scheduler, runner = make(tokens=16, tokens_beside_decodes=8, policy="priority")
    add(scheduler, "first", [1], max_tokens=9)
    step(scheduler, runner)
    scheduler.add("urgent", list(range(20)), SamplingParams(max_tokens=1), seed=0, priority=-1)
    assert [step(scheduler, runner).counts for _ in range(3)] == [[1, 7], [8], [5, 1]]


def test_first_come_first_served():
    scheduler, runner = make(seqs=2)
    requests = [add(scheduler, i, [i + 1, 7], max_tokens=3) for i in range(5)]
    order = []
    while scheduler.has_work:
        advanced = step(scheduler, runner).advanced
        order += [requests.index(s.request) for s in advanced if s.finish_reason]
    assert order == [0, 1, 2, 3, 4]


def test_the_youngest_gives_way_and_comes_back_first():
    scheduler, runner = make(blocks=6, size=2, seqs=3)
    requests = [add(scheduler, i, [i, i, i], max_tokens=9) for i in range(3)]
    preempted = []
    while scheduler.has_work:
        done = step(scheduler, runner)
        preempted += [requests.index(r) for r in done.preempted]
    assert preempted[:2] == [2, 1] and scheduler.num_preemptions == len(preempted)
    assert [r.sequences[0].output_token_ids for r in requests] == [generate([i, i, i], 9) for i in range(3)]


def test_a_prefix_is_computed_once_and_the_last_token_always():
    scheduler, runner = make()
    prompt = list(range(12))
    first = add(scheduler, 0, prompt, max_tokens=1)
    drain(scheduler, runner)
    again = add(scheduler, 1, prompt, max_tokens=1)
    longer = add(scheduler, 2, [*prompt, 40], max_tokens=1)
    done = step(scheduler, runner)
    assert [s.num_cached_tokens for r in (first, again, longer) for s in r.sequences] == [0, 11, 12]
    assert done.counts == [1, 1]
    assert len(done.plan.block_copies) == 1, "the last block is shared up to its last token, and copied to be written"


def test_generated_tokens_are_cached_too():
    scheduler, runner = make()
    request = add(scheduler, 0, [1, 2, 3], max_tokens=6)
    drain(scheduler, runner)
    follow_up = add(scheduler, 1, request.sequences[0].tokens, max_tokens=1)
    drain(scheduler, runner)
    assert follow_up.sequences[0].num_cached_tokens == 8, "all but the last token's KV was written"


def test_the_second_turn_of_a_short_chat_reuses_the_first_in_a_block_that_was_never_full():
    scheduler, runner = make(size=64, length=128)
    first = add(scheduler, "first", list(range(20)), max_tokens=8)
    drain(scheduler, runner)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks and sum(scheduler.pool.states()) == 128
    chat = [*first.sequences[0].tokens, *range(10)]
    second, other = add(scheduler, "second", chat, max_tokens=4), add(scheduler, "other", chat[:24], max_tokens=1)
    done = step(scheduler, runner)
    assert [request.sequences[0].num_cached_tokens for request in (second, other)] == [27, 23]
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (20 + 38 + 24, 27 + 23)
    assert done.counts == [11, 1] and len(done.plan.block_copies) == 2
    drain(scheduler, runner)
    assert second.sequences[0].output_token_ids == generate(chat, 4)
    assert sum(map(bool, scheduler.pool.states())) == 1, "the second turn offers all that the others did"


@pytest.mark.parametrize("drawn", [False, True])
def test_an_aborted_request_leaves_its_last_block_once_a_token_was_drawn(drawn):
    scheduler, runner = make(size=64, tokens=16, length=128)
    prompt = list(range(24))
    add(scheduler, "aborted", prompt, max_tokens=8)
    for _ in range(1 + 2 * drawn):
        step(scheduler, runner)
    scheduler.abort("aborted")
    scheduler.check_invariants()
    assert scheduler.pool.match(prompt).num_tokens == 24 * drawn


def test_a_swapped_request_that_is_aborted_leaves_nothing():
    scheduler, runner = make(blocks=4, size=4, host=8, preemption="swap")
    requests = [add(scheduler, i, [i] * 6, max_tokens=9) for i in (1, 2)]
    while not (swapped := [request for request in step(scheduler, runner).preempted]):
        pass
    assert swapped == requests[1:] and scheduler.host_pool.num_used
    scheduler.abort("2")
    scheduler.check_invariants()
    assert scheduler.host_pool.num_used == 0
    drain(scheduler, runner)


def test_beams_that_are_dropped_leave_their_full_blocks_alone():
    scheduler, runner = make(size=4)
    scheduler.add("0", [1] * 6, BeamSearchParams(beam_width=3, max_tokens=7), seed=0)
    drain(scheduler, runner)
    cached = [block for block in scheduler.pool._blocks if block.node is not None]
    assert cached and all(len(block.node.tokens) == 4 for block in cached)


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
    request, other = (add(scheduler, i, [1 + i, 2], max_tokens=3) for i in range(2))
    plan = scheduler.schedule()
    results = runner.step(plan)
    scheduler.abort("0")
    assert scheduler.commit(plan, results).advanced == other.sequences
    assert request.sequences[0].finish_reason == FinishReason.ABORT
    drain(scheduler, runner)


def test_parallel_samples_share_until_they_write():
    scheduler, runner = make(size=4)
    request = add(scheduler, 0, [1, 2, 3, 4, 5], n=3, max_tokens=8)
    step(scheduler, runner)
    assert len(request.sequences) == 3 and scheduler.pool.num_used == 2, "one prompt's blocks under three sequences"
    done = step(scheduler, runner)
    assert len(done.plan.block_copies) == 2 and scheduler.pool.num_used == 4, "the last writer needs no copy"
    drain(scheduler, runner)
    assert [s.output_token_ids for s in request.sequences] == [generate([1, 2, 3, 4, 5], 8, seed) for seed in range(3)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_parallel_samples_are_preempted_as_one_and_share_again(mode):
    scheduler, runner = make(blocks=10, size=2, seqs=4, host=10, preemption=mode, cache=False)
    old = add(scheduler, "old", [9, 9, 9], max_tokens=14)
    young = add(scheduler, "young", [8, 8, 8, 8, 8, 8], n=3, max_tokens=5)
    most, used = 0, []
    while scheduler.has_work:
        done = step(scheduler, runner)
        most = max(most, scheduler.pool.num_used)
        used.append(len(done.plan.swap_in))
    assert scheduler.num_preemptions > 0 and (sum(used) > 0) == (mode == "swap")
    assert old.sequences[0].output_token_ids == generate([9, 9, 9], 14)
    assert [s.output_token_ids for s in young.sequences] == [generate([8] * 6, 5, seed) for seed in range(3)]


def test_what_comes_back_from_the_host_is_found_again():
    scheduler, runner = make(blocks=6, size=2, host=6, preemption="swap")
    add(scheduler, "old", [9, 9, 9], max_tokens=8)
    add(scheduler, "young", [8, 8, 8, 8], max_tokens=5)
    while not step(scheduler, runner).resumed:
        pass
    assert scheduler.pool.match([8, 8, 8, 8]).num_tokens == 4
    drain(scheduler, runner)


def test_a_request_between_the_oldest_and_the_victim_still_runs_in_that_step():
    scheduler, runner = make(blocks=6, size=2, seqs=3)
    requests = [add(scheduler, i, prompt, max_tokens=4) for i, prompt in enumerate(([1, 1, 1, 1], [2, 2, 2], [3] * 3))]
    while not (done := step(scheduler, runner)).preempted:
        pass
    assert done.preempted == requests[2:]
    assert done.served == requests[:2]


def test_nothing_is_admitted_without_a_token_left_in_the_budget():
    scheduler, _ = make(tokens=4)
    first, second = (add(scheduler, i, [1 + i] * 8, max_tokens=1) for i in range(2))
    assert [scheduled.num_tokens for scheduled in scheduler.schedule().rows] == [4]
    assert list(scheduler.running) == [first] and list(scheduler.waiting) == [second]


def test_a_request_without_budget_is_left_out_of_a_step():
    scheduler, runner = make(tokens=4, policy="priority")
    late = add(scheduler, "late", [1], max_tokens=9)
    step(scheduler, runner)
    scheduler.add("urgent", [2] * 12, SamplingParams(max_tokens=1), seed=0, priority=-1)
    counts = [step(scheduler, runner).counts for _ in range(4)]
    assert counts == [[1, 3], [4], [4], [1, 1]]
    assert late.sequences[0].num_output_tokens == 3


@pytest.mark.parametrize("tokens", [4, 5, 7])
def test_preempted_beams_are_computed_again_within_the_budget(tokens):
    """Their last tokens come in one step, for they are compared with each other."""
    for token in range(16):
        scheduler, runner = make(blocks=16, size=2, seqs=5, tokens=tokens, cache=False, preemption="recompute")
        old = add(scheduler, "old", [9] * 11, max_tokens=18)
        params = BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True)
        young = scheduler.add("young", [token] * 6, params, seed=0)
        last = add(scheduler, "last", [7], max_tokens=12)
        drain(scheduler, runner)
        assert scheduler.num_preemptions > 0
        for request in (old, young, last):
            assert_as_alone(request)


def test_admission_leaves_the_blocks_that_resumed_requests_lack():
    scheduler, runner = make(blocks=5, size=2, host=10, preemption="swap", cache=False)
    add(scheduler, "old", [1, 1, 1], max_tokens=4)
    young = add(scheduler, "young", [1, 1, 1], max_tokens=5)
    late, preempted = None, []
    while scheduler.has_work:
        done = step(scheduler, runner)
        preempted += done.preempted
        if young in done.preempted:
            late = add(scheduler, "late", [1] * 5, max_tokens=3)
        if young in done.resumed:
            # Its next token opens a block, and all others that are free would be those of the late request.
            assert scheduler.memory.lack(young) == 1 and late in scheduler.waiting
    assert preempted == [young]


def test_admission_leaves_the_blocks_that_two_resumed_requests_lack():
    scheduler, runner = make(blocks=6, size=2, host=12, preemption="swap", cache=False)
    for name, length, max_tokens in (("old", 3, 5), ("middle", 1, 7), ("young", 1, 7)):
        add(scheduler, name, [1] * length, max_tokens=max_tokens)
    preempted = []
    while scheduler.has_work:
        done = step(scheduler, runner)
        preempted += [request.request_id for request in done.preempted]
        if len(preempted) == 1 and done.preempted:
            add(scheduler, "late", [1, 1, 1], max_tokens=3)
    assert preempted == ["young", "middle", "young"], "late would be let in for no more than a step"


@pytest.mark.parametrize("headroom, preempted", [(0, ["young"]), (4, [])])
def test_without_headroom_a_request_is_preempted_soon_after_its_admission(headroom, preempted):
    scheduler, runner = make(blocks=6, size=2, cache=False, headroom=headroom)
    add(scheduler, "old", [1] * 5, max_tokens=6)
    add(scheduler, "young", [1] * 6, max_tokens=2)
    seen = []
    while scheduler.has_work:
        seen += [request.request_id for request in step(scheduler, runner).preempted]
    assert seen == preempted


@pytest.mark.parametrize("headroom, waits", [(0, False), (8, True)])
def test_a_swapped_request_comes_back_only_beside_the_headroom(headroom, waits):
    scheduler, runner = make(blocks=10, size=2, host=8, preemption="swap", cache=False)
    old = add(scheduler, "old", [1] * 4, max_tokens=9)
    add(scheduler, "middle", [2] * 4, max_tokens=5)
    young = add(scheduler, "young", [3] * 4, max_tokens=9)
    while not step(scheduler, runner).preempted:
        pass
    assert list(scheduler.waiting) == [young]
    scheduler.headroom = headroom
    while young in scheduler.waiting:
        step(scheduler, runner)
    assert old.finished == waits


@pytest.mark.parametrize("running, waits", [(3, False), (4, True), (7, True)])
def test_headroom_of_less_than_a_block_adds_up_over_the_running_sequences(running, waits):
    """Four times 16 tokens are a block of 64."""
    scheduler, runner = make(blocks=running + 1, size=64, seqs=9, tokens=99, length=128, cache=False)
    for name in range(running):
        add(scheduler, name, [1], max_tokens=9)
    step(scheduler, runner)
    scheduler.headroom = 16
    late = add(scheduler, "late", [1], max_tokens=1)
    step(scheduler, runner)
    assert len(scheduler.running) == running and late.finished == (not waits)


def test_a_request_of_the_whole_pool_is_admitted_with_any_headroom():
    scheduler, runner = make(blocks=4, size=4, cache=False, headroom=64)
    for name in "ab":
        add(scheduler, name, [1] * 12, max_tokens=5)
    drain(scheduler, runner)
    assert not scheduler.requests and scheduler.num_preemptions == 0


def test_a_victim_of_one_block_is_swapped_too():
    scheduler, runner = make(blocks=2, size=8, host=1, preemption="swap")
    add(scheduler, "old", [1, 2, 3, 4, 5, 6, 7], max_tokens=4)
    young = add(scheduler, "young", [5, 6], max_tokens=4)
    while not (done := step(scheduler, runner)).preempted:
        pass
    assert done.preempted == [young] and scheduler.num_swapped_blocks == 1
    drain(scheduler, runner)


@pytest.mark.parametrize(
    "preemption, cost, host, swaps",
    [("auto", 2.9, 2, True), ("auto", 3.0, 2, False), ("swap", 100.0, 2, True), ("swap", 0.0, 1, False)],
)
def test_a_victim_is_swapped_if_there_is_room_and_it_costs_less_than_computing_again(preemption, cost, host, swaps):
    """The victim holds 6 tokens in 2 blocks."""
    scheduler, runner = make(blocks=4, size=4, host=host, preemption=preemption, block_swap_cost=cost)
    add(scheduler, "old", [1, 2, 3, 4, 5, 6, 7], max_tokens=4)
    young = add(scheduler, "young", [5, 6, 7, 8, 9], max_tokens=4)
    scheduler.num_swapped_blocks = 5
    while not (done := step(scheduler, runner)).preempted:
        computed = young.sequences[0].num_computed_tokens
    assert done.preempted == [young] and computed == 6
    assert bool(done.plan.swap_out) == swaps and scheduler.num_swapped_blocks == 5 + 2 * swaps
    drain(scheduler, runner)


def test_beams_have_the_logprobs_and_ranks_of_their_tokens():
    scheduler, runner = make()
    request = scheduler.add("0", [1, 2], BeamSearchParams(beam_width=2, max_tokens=3, logprobs=2), seed=0)
    unlisted = scheduler.add("1", [1, 2], BeamSearchParams(beam_width=2, max_tokens=3), seed=0)
    step(scheduler, runner)
    assert [beam.index for beam in request.sequences] == [0, 1]
    drain(scheduler, runner)
    for index, beam in enumerate(request.outputs):
        assert beam.index == index and len(beam.samples) == 3
        for i, sample in enumerate(beam.samples):
            tokens, logprobs = beams(beam.tokens[: 2 + i])
            assert (sample.token, sample.logprob) == (tokens[sample.rank - 1], logprobs[sample.rank - 1])
            assert (sample.top_tokens, sample.top_logprobs) == (tokens[:2], logprobs[:2])
    assert [sample[3:5] for beam in unlisted.outputs for sample in beam.samples] == [([], [])] * 6


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_stop_string_ends_its_beam_only_also_at_the_last_token(max_tokens):
    scheduler, runner = make()
    params = BeamSearchParams(beam_width=2, max_tokens=max_tokens, length_penalty=0.0)
    request = scheduler.add("0", [1, 2], params, seed=0)
    best = beams([1, 2])[0][0]
    request.find_stop = lambda sequence, token: "stop" if (sequence.tokens, token) == ([1, 2], best) else None
    drain(scheduler, runner)
    stopped, other = request.outputs
    assert (stopped.output_token_ids, stopped.finish_reason, stopped.stop_reason) == ([best], "stop", "stop")
    assert (other.num_output_tokens, other.finish_reason, other.stop_reason) == (max_tokens, "length", None)


class Script:
    """A constraint that notes the tokens that it is given."""

    def __init__(self):
        self.taken = ()

    def take(self, token):
        self.taken += (token,)


def test_branches_start_from_equal_texts_and_go_on_by_themselves():
    scheduler, runner = make()
    add(scheduler, "before", list(range(12)), max_tokens=1)
    drain(scheduler, runner)
    request = add(scheduler, "0", list(range(12)), n=2, max_tokens=2)
    (sequence,) = request.sequences
    sequence.decoder, sequence.constraint, sequence.text = ["decoder"], Script(), "text"
    drain(scheduler, runner)
    first, second = request.sequences
    assert first.decoder == second.decoder == ["decoder"] and first.decoder is not second.decoder
    assert first.text == second.text == "text" and first.num_cached_tokens == second.num_cached_tokens == 11
    for branch in request.sequences:
        assert list(branch.constraint.taken) == branch.output_token_ids
    assert first.output_token_ids != second.output_token_ids


def test_cached_tokens_are_those_of_the_first_admission():
    """Neither later chunks of the prompt change them, nor another admission after a preemption."""
    scheduler, runner = make(blocks=5, size=4, tokens=2, preemption="recompute")
    prompt = list(range(16))
    add(scheduler, "first", prompt[:9], max_tokens=1)
    drain(scheduler, runner)
    scheduler.prefix_queries = scheduler.prefix_hits = 0
    old = add(scheduler, "old", [40], max_tokens=14)
    again = add(scheduler, "again", prompt, max_tokens=2)
    most = 0
    while not step(scheduler, runner).preempted:
        most = max(most, again.sequences[0].num_computed_tokens)
        assert again.sequences[0].num_cached_tokens == 8
    assert 8 < most < len(prompt), "it is preempted between two chunks of its prompt"
    drain(scheduler, runner)
    assert again.sequences[0].output_token_ids == generate(prompt, 2) and scheduler.num_preemptions == 1
    assert [request.sequences[0].num_cached_tokens for request in (old, again)] == [0, 8]
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (1 + len(prompt), 8)


def admitted(scheduler, runner):
    """The requests in the order of their first step."""
    order = {}
    while scheduler.has_work:
        done = step(scheduler, runner)
        order |= dict.fromkeys(request.request_id for request in done.served)
    return list(order)


def test_clients_take_turns_in_the_queue():
    scheduler, runner = make(seqs=1)
    for i in range(5):
        add(scheduler, f"a{i}", [1, i], client="a", max_tokens=2)
    step(scheduler, runner)
    add(scheduler, "b0", [2, 0], client="b", max_tokens=2)
    add(scheduler, "b1", [2, 1], client="b", max_tokens=2)
    add(scheduler, "c0", [3, 0], client="c", max_tokens=2)
    assert scheduler.waiting.count("a") == 4 and scheduler.waiting.count("b") == 2
    assert admitted(scheduler, runner) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]
    assert scheduler.waiting.count("a") == 0


def test_a_request_with_many_sequences_takes_as_many_turns():
    scheduler, runner = make(seqs=4)
    add(scheduler, "a0", [1], client="a", n=4, max_tokens=3)
    add(scheduler, "a1", [2], client="a", n=4, max_tokens=3)
    step(scheduler, runner)
    for i in range(4):
        add(scheduler, f"b{i}", [3, i], client="b", max_tokens=2)
    assert admitted(scheduler, runner) == ["a0", "b0", "b1", "b2", "b3", "a1"]


def test_requests_without_a_client_come_in_the_order_of_arrival():
    scheduler, runner = make(seqs=1)
    for name in "abcd":
        add(scheduler, name, [1], max_tokens=1)
    assert admitted(scheduler, runner) == list("abcd")


@pytest.mark.parametrize("where", ["output", "second branch", "prompt"])
def test_logits_that_are_not_finite_end_their_request_alone(where):
    scheduler, runner = make(size=4)
    other = add(scheduler, "other", [7, 7, 7], max_tokens=5)
    bad = add(scheduler, "bad", [5] * 9, n=2, max_tokens=5, prompt_logprobs=0)
    last = add(scheduler, "last", [8], max_tokens=5)
    if where != "prompt":
        step(scheduler, runner)
        step(scheduler, runner)
    plan = scheduler.schedule()
    samples, prompt, _ = runner.step(plan)
    at = max(i for i, scheduled in enumerate(plan.rows) if scheduler.rows[scheduled.row].request is bad)
    at -= where == "output"
    wrong = Sample(3, math.nan, 1)
    if where == "prompt":
        prompt[at] = [wrong]
    else:
        samples[at] = wrong
    advanced = list(scheduler.commit(plan, StepResult(samples, prompt)).advanced)
    assert {(s.finish_reason, s.stop_reason) for s in bad.sequences} == {(FinishReason.ERROR, NON_FINITE)}
    assert set(bad.sequences) <= set(advanced) and len(advanced) == len(set(advanced))
    assert last.sequences[0] in advanced
    assert scheduler.pool.match([5] * 9).num_tokens == 0, "its KV may be as bad, so nobody may share it"
    scheduler.check_invariants()
    drain(scheduler, runner)
    assert other.sequences[0].output_token_ids == generate([7, 7, 7], 5)
    assert last.sequences[0].output_token_ids == generate([8], 5)


def test_a_beam_whose_logits_are_not_finite_ends_its_search():
    scheduler, runner = make()
    request = scheduler.add("0", [1], BeamSearchParams(beam_width=3, max_tokens=5), seed=0)
    step(scheduler, runner)
    plan = scheduler.schedule()
    samples = runner.step(plan).samples
    samples[1] = Sample(0, math.nan, 1, [3], [math.nan])
    advanced = scheduler.commit(plan, StepResult(samples)).advanced
    assert advanced == request.sequences and {s.stop_reason for s in advanced} == {NON_FINITE}
    assert not scheduler.has_work and scheduler.pool.num_used == 0


@pytest.mark.parametrize("late", [False, True], ids=["before the step", "after the step"])
def test_after_a_failed_step_everything_is_computed_again(late):
    """Of running, swapped and waiting requests, two of them with a finished branch."""
    scheduler, runner = make(blocks=14, size=2, seqs=5, host=12, preemption="swap")
    requests = [add(scheduler, "old", [1] * 5, max_tokens=12), add(scheduler, "two", [2, 2], n=2, max_tokens=9)]
    requests += [add(scheduler, f"young {i}", [3 + i] * 3, max_tokens=9, presence_penalty=1) for i in range(3)]
    while not any(len(s.table) for request in scheduler.waiting for s in request.live):
        step(scheduler, runner)
    scheduler.finish(requests[1].sequences[0], FinishReason.STOP)
    lengths = [[s.num_tokens for s in request.sequences] for request in requests]
    plan = scheduler.schedule()
    if late:
        runner.step(plan)
    scheduler.recover()
    runner.recover()
    scheduler.check_invariants()
    assert not scheduler.running and list(scheduler.waiting) == requests
    assert scheduler.pool.num_used == scheduler.host_pool.num_used == 0
    assert scheduler.pool.match([1] * 4).num_tokens == 0
    assert [[s.num_tokens for s in request.sequences] for request in requests] == lengths
    drain(scheduler, runner)
    assert_as_alone(requests[0])
    assert requests[1].sequences[1].output_token_ids == generate([2, 2], 9, 1)
    for request in requests[2:]:
        assert_as_alone(request)


def test_the_next_step_tells_of_the_running_requests_that_a_failure_has_restarted():
    scheduler, runner = make()
    running = [add(scheduler, name, [1, 2, 3], max_tokens=4) for name in "ab"]
    step(scheduler, runner)
    add(scheduler, "waiting", [1, 2, 3], max_tokens=4)
    for _ in range(2):
        scheduler.recover()
        runner.recover()
    scheduler.abort("b")
    assert step(scheduler, runner).committed.preempted == [(running[0], False)]
    assert step(scheduler, runner).preempted == [] and scheduler.num_preemptions == 2


def test_prompt_logprobs_that_nobody_has_seen_are_computed_again():
    """They are told with the first token, and so they come from the parameters that it comes from."""
    scheduler, runner = make(tokens=4)
    whole, part = (add(scheduler, str(n), [*range(n)], max_tokens=3, prompt_logprobs=0) for n in (3, 9))
    while not part.prompt_samples:
        step(scheduler, runner)
    samples = list(whole.prompt_samples)
    scheduler.recover()
    runner.recover()
    assert len(samples) == 2 and whole.prompt_samples == samples and not part.prompt_samples
    drain(scheduler, runner)
    for request in (whole, part):
        assert_as_alone(request)


def test_requests_that_have_started_go_on_while_new_ones_are_held():
    scheduler, runner = make(blocks=5, size=2)
    started = [add(scheduler, str(i), [1 + i] * 3, max_tokens=6) for i in range(2)]
    while not any(request.admitted for request in scheduler.waiting):  # one of them is preempted
        step(scheduler, runner)
    new = add(scheduler, "new", [5], max_tokens=2)
    scheduler.waiting.remove(new)
    new.rank = (-1, *new.rank[1:])  # it would go first
    scheduler.waiting.add(new)
    scheduler.holds_new = True
    while scheduler.has_started:
        step(scheduler, runner)
    assert all(request.finished for request in started) and not new.admitted
    assert scheduler.schedule() is None and list(scheduler.waiting) == [new]
    scheduler.holds_new = False
    drain(scheduler, runner)


def test_a_failed_step_forgets_requests_that_have_ended():
    scheduler, _ = make()
    request = add(scheduler, "a", [1, 2, 3], max_tokens=2)
    scheduler.schedule()
    request.sequences[0].finish_reason = FinishReason.STOP
    scheduler.recover()
    assert not scheduler.has_work and not scheduler.waiting


def diverged(n, prompt, length, **options):
    """A scheduler whose only request, of n samples of `length` tokens, waits to be computed again."""
    scheduler, runner = make(size=2, cache=False, **options)
    request = add(scheduler, "a", prompt, n=n, max_tokens=length + 1 - len(prompt))
    while request.sequences[-1].num_tokens < length:
        step(scheduler, runner)
    scheduler.recover()
    runner.recover()
    return scheduler, runner, request


def test_branches_that_wait_for_each_other_lack_what_they_do_not_share():
    scheduler, _, request = diverged(3, [1, 2, 3, 4, 5], 9, blocks=30)
    scheduler.memory.share_prefixes(request)
    assert [s.leader[1] for s in request.live if s.leader] == [5, 5]
    assert scheduler.memory.lack(request) == 5 + 3 + 3, "blocks of two tokens; the third one is copied"


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_branch_with_the_text_of_another_waits_for_what_that_computes_only(more):
    """Greedy branches have equal texts, of unequal lengths after a step without budget for all of them. A branch does
    not compute its last token while another one waits for it."""
    scheduler, runner, request = diverged(2, [1, 2, 3, 4, 5], 7, blocks=30)
    first, second = request.sequences
    second.tokens = [*first.tokens, *range(more)]
    for _ in range(more):
        second.samples.append(second.samples[-1])
    scheduler.memory.share_prefixes(request)
    assert [s.leader and s.leader[1] for s in (first, second)] == [None, 6]
    for sequence in request.sequences:
        sequence.free()
    drain(scheduler, runner)


@pytest.mark.parametrize("free, admitted", [(11, True), (10, False)])
def test_branches_are_admitted_if_they_fit_to_the_block(free, admitted):
    scheduler, _, request = diverged(3, [1, 2, 3, 4, 5], 9, blocks=30)
    for _ in range(30 - free):
        scheduler.pool.allocate()
    scheduler.schedule()
    assert (request in scheduler.running) == admitted


def test_sequences_that_go_on_with_kv_of_older_parameters_are_marked():
    scheduler, runner = make(blocks=40, seqs=4, tokens=8, size=2)
    growing = add(scheduler, "growing", [1, 2, 3], max_tokens=9)
    for _ in range(3):
        step(scheduler, runner)
    forking = add(scheduler, "forking", list(range(20)), max_tokens=4, n=2)
    step(scheduler, runner)
    assert forking.unforked and forking.sequences[0].num_computed_tokens
    waiting = add(scheduler, "waiting", [1, 2, 3, 5], max_tokens=2, n=2)
    scheduler.keep_kv()
    later = add(scheduler, "later", [1, 2, 3, 4], max_tokens=2)
    step(scheduler, runner)
    scheduler.keep_kv()
    drain(scheduler, runner)
    marked = [[s.mixed_from for s in request.sequences] for request in (growing, forking, waiting, later)]
    assert marked == [[4], [0, 0], [None, None], [None]], "the first update counts, and nothing old is found"


def test_branches_that_wait_for_old_kv_of_another_are_marked():
    scheduler, runner, request = diverged(2, [1, 2, 3, 4, 5], 9, blocks=30)
    step(scheduler, runner)
    first, second = sorted(request.live, key=lambda sequence: sequence.leader is not None)
    assert first.num_computed_tokens and second.leader and not second.num_computed_tokens
    scheduler.keep_kv()
    assert [s.mixed_from for s in request.live] == [s.num_output_tokens for s in request.live]
    drain(scheduler, runner)


@pytest.mark.parametrize("token", [1, 5, 8])
def test_beams_that_are_computed_again_lose_no_step(token):
    scheduler, runner = make(size=2, cache=False, tokens=30, seqs=16)
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    request = scheduler.add("a", [token] * 5, params, seed=0)
    for _ in range(5):
        step(scheduler, runner)
    assert {s.num_output_tokens for s in request.sequences} == {5}
    scheduler.recover()
    runner.recover()
    for _ in range(2):  # the first beam, then the unshared tokens of the others and the last tokens of all
        step(scheduler, runner)
    assert {s.num_output_tokens for s in request.sequences} == {6}


def test_beams_may_take_the_whole_budget():
    scheduler, runner = make(seqs=3, tokens=3)
    request = scheduler.add("a", [1, 2], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True), seed=0)
    drain(scheduler, runner)
    assert_as_alone(request)


def test_a_request_comes_back_from_the_host_if_it_fits_to_the_block():
    scheduler, runner = make(blocks=4, size=2, host=8, preemption="swap", cache=False)
    add(scheduler, "old", [1], max_tokens=3)
    young = add(scheduler, "young", [2] * 5, max_tokens=3)
    for _ in range(3):
        done = step(scheduler, runner)
    assert done.preempted == [young] and list(scheduler.requests) == ["young"]
    done = step(scheduler, runner)
    assert done.resumed == [young] and scheduler.pool.num_used + scheduler.memory.lack(young) == 4


def test_prefix_hits_add_up():
    scheduler, runner = make(size=2)
    for name in range(3):
        add(scheduler, name, [1, 2, 3, 4, 5], max_tokens=1)
        drain(scheduler, runner)
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (15, 8)


def test_a_newcomer_comes_before_the_second_request_of_another_client():
    """Also after requests of no client, whose arrivals are no turns."""
    scheduler, runner = make(seqs=1)
    for name in range(5):
        add(scheduler, name, [1], max_tokens=1)
    for name in range(5, 9):
        add(scheduler, name, [1], client="a", max_tokens=1)
    order = []
    while scheduler.has_work:
        done = step(scheduler, runner)
        order += [request.request_id for request in done.served]
        if order[-1] == "5":
            add(scheduler, "late", [1], client="b", max_tokens=1)
    assert order == ["0", "1", "2", "3", "4", "5", "late", "6", "7", "8"]


def test_beams_that_may_go_nowhere_end_as_they_are():
    scheduler, runner = make()
    request = scheduler.add("0", [1], BeamSearchParams(beam_width=2, max_tokens=5), seed=0)
    step(scheduler, runner)
    texts = [s.output_token_ids for s in request.sequences]
    plan = scheduler.schedule()
    samples = [Sample(0, 0.0, 1, [3], [-math.inf]) for _ in runner.step(plan).samples]
    assert scheduler.commit(plan, StepResult(samples)).advanced == request.outputs
    assert [s.output_token_ids for s in request.outputs] == texts
    assert {s.finish_reason for s in request.outputs} == {FinishReason.STOP}
    assert not scheduler.has_work and scheduler.pool.num_used == 0


@pytest.mark.deep
@settings(max_examples=1000, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(6, 24),
    size=st.sampled_from([1, 2, 4, 8]),
    seqs=st.integers(1, 6),
    tokens=st.integers(6, 20),
    cache=st.booleans(),
    mode=st.sampled_from(["recompute", "swap", "auto"]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_any_traffic_gives_what_each_request_gives_alone(seed, blocks, size, seqs, tokens, cache, mode, policy):
    """Random arrivals and aborts of requests of every kind, in pools so small that preemption is common."""
    rng = random.Random(seed)
    scheduler, runner = make(
        blocks, size, seqs=seqs, tokens=tokens, length=40, cache=cache, eos=[0], host=rng.choice([0, 3, 20]),
        preemption=mode, policy=policy, block_swap_cost=rng.choice([0, size, 2 * size]),
    )  # fmt: skip
    requests = []
    for arrival in range(12):
        prompt, params, options = draw(rng, scheduler)
        requests.append(scheduler.add(str(arrival), prompt, params, seed=0, **options))
        for _ in range(rng.randrange(4)):
            if scheduler.has_work:
                step(scheduler, runner)
        if rng.random() < 0.15:
            scheduler.abort(str(rng.randrange(arrival + 1)))
            scheduler.check_invariants()
    drain(scheduler, runner)
    for request in requests:
        assert_as_alone(request, scheduler.eos_token_ids)


def test_a_block_that_was_partly_filled_at_a_reset_is_never_remembered():
    scheduler, runner = make(size=4)
    request = add(scheduler, "old", [1, 2, 3], max_tokens=9)
    step(scheduler, runner)
    scheduler.pool.reset_prefix_cache()
    drain(scheduler, runner)
    assert request.sequences[0].num_tokens == 12
    assert scheduler.pool.match(request.sequences[0].tokens).num_tokens == 0
    add(scheduler, "new", [1, 2, 3], max_tokens=9)
    drain(scheduler, runner)
    assert scheduler.pool.match(request.sequences[0].tokens).num_tokens == 11, "the same text, begun after the reset"


def test_blocks_that_were_on_the_host_at_a_reset_are_never_remembered():
    scheduler, runner = make(blocks=6, size=2, host=6, preemption="swap")
    _, young = (add(scheduler, i, [1 + i] * 4, max_tokens=6) for i in range(2))
    while young not in scheduler.waiting or not len(young.sequences[0].table):
        step(scheduler, runner)
    scheduler.pool.reset_prefix_cache()
    drain(scheduler, runner)
    assert scheduler.num_swapped_blocks > 0
    assert scheduler.pool.match(young.sequences[0].tokens).num_tokens == 0


def test_a_sequence_that_ends_costs_one_row_of_the_step_in_flight():
    scheduler, runner = make(seqs=1)
    (last,) = generate([1, 2], 1)
    first = scheduler.add("first", [1, 2], SamplingParams(max_tokens=9, stop_token_ids=[last]), seed=0)
    second = add(scheduler, "second", [3], max_tokens=1)
    plans = [scheduler.schedule() for _ in range(2)]
    pending = [runner.dispatch(plan) for plan in plans]
    assert [len(plan.rows) for plan in plans] == [1, 1]
    assert scheduler.commit(plans[0], pending[0].result()).advanced == first.sequences
    assert first.finished and scheduler.pool.num_used > 0, "the step in flight still writes its block"
    assert scheduler.schedule() is None, "and its row is not free"
    assert not scheduler.commit(plans[1], pending[1].result()).advanced
    assert scheduler.pool.num_used == 0
    drain(scheduler, runner)
    assert first.sequences[0].output_token_ids == [last] and second.sequences[0].output_token_ids == generate([3], 1)


def test_a_request_waits_for_the_samples_that_the_host_must_see():
    """Others overlap, up to the last token that they may have."""

    def in_flight(params, **options):
        scheduler, runner = make(seqs=4)
        scheduler.add("0", [1, 2], params, seed=0, **options)
        counts = []
        while (plan := scheduler.schedule()) is not None:
            runner.dispatch(plan)
            counts.append(len(plan.rows))
        return counts

    assert in_flight(SamplingParams(max_tokens=3)) == [1, 1, 1]
    assert in_flight(SamplingParams(max_tokens=3, min_tokens=2)) == [1, 1, 1], "its mask follows from the length alone"
    assert in_flight(SamplingParams(max_tokens=3), bad_words=((7,),)) == [1, 1, 1], "a bias"
    assert in_flight(SamplingParams(max_tokens=3), bad_words=((7, 8),)) == [1]
    assert in_flight(SamplingParams(max_tokens=3, n=2)) == [1]
    assert in_flight(BeamSearchParams(beam_width=2, max_tokens=3)) == [1]


def test_the_fake_runner_notices_a_wrong_block():
    """Otherwise none of the above would prove anything."""
    scheduler, runner = make()
    request = add(scheduler, 0, [1, 2, 3, 4, 5], max_tokens=4)
    step(scheduler, runner)
    (sequence,) = request.sequences
    sequence.table.block_ids[0][0] = scheduler.pool.allocate()
    scheduler.rows.change(sequence, 0, 1)
    with pytest.raises(AssertionError, match="did not write"):
        runner.step(scheduler.schedule())
    assert next_token([1, 2]) == next_token([1, 2]) != next_token([2, 1])


def test_sequences_that_wait_for_the_host_meet_in_one_step():
    """They do not take turns with those of a step in flight, which wait as well."""
    scheduler, runner = make(blocks=256, seqs=24, tokens=64)

    def ask(name, bad_words=((7, 8),)):
        scheduler.add(name, [1, 2, int(name)], SamplingParams(max_tokens=30), seed=0, bad_words=bad_words)
        plan = scheduler.schedule()
        return plan, plan and runner.dispatch(plan)

    first = ask("1")
    assert ask("2") == (None, None), "a step for the second one alone would separate them for good"
    scheduler.commit(first[0], first[1].result())
    both = scheduler.schedule()
    assert len(both.rows) == 2
    for name in range(3, 17):
        ask(name, bad_words=())
    scheduler.commit(both, runner.step(both))
    most = scheduler.schedule()
    assert len(most.rows) == 16 and scheduler.schedule() is None, "an eighth of them waits"
    pending = runner.dispatch(most)
    ask("17", bad_words=())
    scheduler.commit(most, pending.result())
    all_of_them, pending = scheduler.schedule(), None
    pending = runner.dispatch(all_of_them)
    assert len(all_of_them.rows) == 17
    overlapping = scheduler.schedule()
    assert len(overlapping.rows) == 15, "most of them go on"
    runner.dispatch(overlapping)
    scheduler.commit(all_of_them, pending.result())


def test_when_a_sequence_wakes_up_for_drafts_all_meet_after_the_step_in_flight():
    scheduler, runner = make(drafts=2)
    requests = [add(scheduler, str(i), [1, 2, i], max_tokens=20) for i in range(3)]
    for request in requests:
        request.sequences[0].drafter = Sleeper(request)
    first = scheduler.schedule()
    pending = runner.dispatch(first)
    second = scheduler.schedule()
    assert len(second.rows) == 3, "nobody waits"
    later = runner.dispatch(second)
    requests[1].sequences[0].drafter.is_tired = False
    scheduler.commit(first, pending.result())
    assert scheduler.schedule() is None
    scheduler.commit(second, later.result())
    third = scheduler.schedule()
    assert {row.row for row in third.rows} == {row.row for row in first.rows} and third.drafts


class Sleeper(Oracle):
    """A drafter that sleeps as long as it is tired."""

    def __init__(self, request):
        super().__init__(request)
        self.rests_until, self.is_tired = ASLEEP, True

    def offer(self, tokens, forced, most):
        return None if self.is_tired else Offer([1] * most, [1.0] * most)

"""Where drafts come from, and how many of them are computed."""

import copy
import itertools
from collections import Counter

import pytest

from jpaged.config import EngineConfig, Limits, Speculation
from jpaged.core.drafts import (
    ASLEEP,
    INDEXED_AT_ONCE,
    MAX_REST,
    MAX_REST_OF_MODEL,
    NOTHING,
    UNKNOWN,
    DecodeCosts,
    Drafter,
    Lookup,
    ModelDrafter,
    Odds,
    Rounds,
)
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.runtime.batch import Buckets
from tests.core import traffic

SETTINGS = Speculation(num_tokens=4, longest=8, shortest=2)
COSTS = DecodeCosts([3.0 + tokens for tokens in range(64)])


def drafter_of(settings=SETTINGS, costs=COSTS, most=None):
    return Drafter(settings, costs, [Lookup(settings.longest, settings.shortest)], most)


def test_a_continuation_follows_the_longest_match_and_the_latest_of_equal_ones():
    lookup = Lookup(longest=8, shortest=2)
    assert lookup.following([1, 2, 3, 7, 2, 3], 2) == ([7, 2], 2)
    assert lookup.following([1, 2, 3, 7, 2, 3, 8, 2, 3], 1) == ([8], 2), "the latest"
    assert lookup.following([1, 2, 3, 7, 2, 3, 8, 2, 3, 1, 2, 3], 1) == ([7], 3), "the longest"
    assert lookup.following([1, 2, 3, 7, 2, 3, 8, 2, 3, 1, 2, 3, 9], 1) == NOTHING


def test_a_continuation_that_reaches_the_end_repeats_itself():
    assert Lookup(4, 2).following([5, 6, 5, 6], 5).tokens == [5, 6, 5, 6, 5]
    assert Lookup(4, 2).following([5, 5, 5], 3).tokens == [5, 5, 5]


@pytest.mark.parametrize("shortest", [1, 2, 3])
def test_fewer_equal_tokens_are_no_match(shortest):
    tokens = [1, 2, 3, 9, 8, 2, 3]
    assert Lookup(8, shortest).following(tokens, 1) == (([9], 2) if shortest <= 2 else NOTHING)
    assert Lookup(8, shortest).following(tokens[:shortest], 1) == NOTHING, "a text that is too short"


def test_a_long_prompt_is_indexed_in_several_steps():
    tokens = [*range(INDEXED_AT_ONCE + 10), 0, 1]
    lookup = Lookup(8, 2)
    assert lookup.following(tokens, 1) == NOTHING and lookup.following(tokens, 1) == ([2], 2)


def test_copies_of_a_drafter_continue_independently():
    one = drafter_of(costs=UNKNOWN)
    one.propose([1, 2, 3, 1, 2], (), 4, 0)
    other = copy.copy(one)
    assert one.propose([1, 2, 3, 1, 2, 9, 9, 9], (), 4, 0) == [9] * 4
    assert other.propose([1, 2, 3, 1, 2, 3, 1], (), 2, 0) == [2, 3]


def test_more_drafts_are_kept_where_more_were_right():
    drafter, tokens = drafter_of(), [1, 2, 3, 4, 5, 6, 1, 2]
    counts = [len(drafter.propose(tokens, (), 4, others)) for others in (0, 40)]
    assert counts[0] == 2 and counts[1] == 0, "beside many other tokens a step costs what its tokens cost"
    drafter = drafter_of()
    for _ in range(20):
        drafter.learn(*[len(drafter.propose(tokens, (), 4, 0))] * 2)
    assert len(drafter.propose(tokens, (), 4, 0)) == 4
    for _ in range(10):
        drafter.learn(2, 0)
    assert drafter.propose(tokens, (), 4, 0) == []


def test_where_tokens_cost_nothing_all_drafts_are_computed():
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]
    assert len(drafter_of(costs=UNKNOWN).propose(tokens, (), 9, 100)) == SETTINGS.num_tokens


def test_a_sequence_wakes_up_for_drafts_that_are_expected_to_pay():
    drafter, tokens = drafter_of(), list(range(10))
    assert drafter.rests_until == ASLEEP and drafter.propose(tokens, (), 4, 0) == []
    assert not drafter.see([*tokens, 1], 0) and drafter.rests_until == ASLEEP
    assert drafter.see([*tokens, 1, 2], 0) and drafter.rests_until == 0
    assert not drafter.see([*tokens, 1, 2, 3], 0), "it is awake"
    assert copy.copy(drafter).propose([*tokens, 1, 2, 3], (), 4, 0) == [4, 5]
    assert drafter.propose([*tokens, 1, 2, 9], (), 4, 0) == [] and drafter.rests_until == ASLEEP


@pytest.mark.parametrize(
    "others, waits, expected", [(0, False, True), (7, False, True), (40, False, False), (40, True, True)]
)
def test_a_sequence_that_does_not_wait_anyway_has_drafts_for_more_tokens_than_the_step_loses(others, waits, expected):
    drafter = drafter_of(costs=UNKNOWN)
    for right in (0, 0, 1, 0):
        drafter.learn(4, right)
    drafts = drafter.propose([1, 2, 3, 4, 5, 6, 1, 2], (), 4, others, waits=waits)
    assert bool(drafts) == expected, "less than one of them is expected to be kept"


def test_sequences_share_what_they_learn_about_matches_of_a_length():
    odds, tokens = Odds(SETTINGS.longest), [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]
    lookup = lambda: [Lookup(SETTINGS.longest, SETTINGS.shortest)]
    fresh = lambda: Drafter(SETTINGS, COSTS, lookup(), odds=odds)
    assert fresh().propose(tokens[:8], (), 4, 0) and fresh().propose(tokens, (), 4, 0)
    for _ in range(20):
        wrong = fresh()
        if drafts := wrong.propose(tokens[:8], (), 4, 0):
            wrong.learn(len(drafts), 0)
    assert not fresh().propose(tokens[:8], (), 4, 0), "drafts after two equal tokens were wrong"
    assert fresh().propose(tokens, (), 4, 0), "those after five were not"
    for _ in range(400):
        fresh().propose(tokens[:8], (), 4, 0)
    assert fresh().propose(tokens[:8], (), 4, 0), "after a long time they are tried again"


def test_tokens_that_a_grammar_forces_tell_nothing_about_other_drafts():
    drafter, tokens = drafter_of(), [1, 2, 3, 4, 5, 6, 1, 2]
    other = copy.copy(drafter)
    for _ in range(10):
        drafts = drafter.propose(tokens, [7, 8], 4, 0)
        drafter.learn(len(drafts), len(drafts))
    assert drafter.propose(tokens, (), 4, 0) == other.propose(tokens, (), 4, 0)


def test_after_drafts_that_do_not_pay_the_search_rests_longer_each_time():
    drafter, tokens, rests = drafter_of(), [1, 2, 3, 1, 2, 3, 1, 2], []
    for _ in range(6):
        assert not drafter.see(tokens, 40) and drafter.rests_until == ASLEEP
        before = len(tokens)
        while len(tokens) <= drafter._searches_from:
            assert not drafter.see(tokens, 40) and copy.copy(drafter).propose(tokens, (), 4, 0) == []
            tokens = [*tokens, 3, 1, 2]
        rests.append(drafter._searches_from - before + 1)
    assert rests == [3, 7, 15, MAX_REST, MAX_REST, MAX_REST]
    assert drafter.propose(tokens, (), 4, 0) == [3, 1] and drafter.rests_until == 0, "beside few others they pay"


def test_where_few_drafts_were_right_later_ones_are_expected_to_be_wrong_for_some_time():
    drafter, tokens = drafter_of(), [1, 2, 3, 1, 2, 3, 1, 2]
    counts = []
    for number in range(60):
        found = drafter.propose(tokens, (), 4, 1)
        if found and number < 40:
            drafter.learn(len(found), 0)
        counts.append(bool(found))
        while len(tokens) <= drafter._searches_from:
            tokens = [*tokens, 3, 1, 2]
    assert sum(counts[:10]) > sum(counts[30:40]), "the usual share has fallen"
    assert any(counts[40:]), "and rises again"


def test_long_contexts_make_drafts_cost_more():
    costs = DecodeCosts(COSTS.seconds, context=0.01)
    tokens = [*range(6), *range(-5000, 0), 0, 1]
    assert len(drafter_of().propose(tokens, (), 4, 0)) == 0, "the index is not complete yet"
    one, other = drafter_of(), drafter_of(costs=costs)
    for drafter in (one, other):
        drafter.propose(tokens, (), 4, 0)
    longer = [*tokens, 9, 9, 9, 0, 1]
    assert len(one.propose(longer, (), 4, 0)) == 2 and other.propose(longer, (), 4, 0) == []


def test_tokens_that_a_grammar_forces_are_drafts_whatever_the_odds():
    drafter = drafter_of()
    drafter.learn(4, 0)
    assert drafter.propose([1, 2, 3], [7, 8, 9, 7, 8], 4, 30, waits=True) == [7, 8, 9, 7]
    steep = drafter_of(costs=DecodeCosts([1.0] * 32 + [2.0] * 32))
    drafts = steep.propose([1, 2, 3], [7, 8, 9, 7, 8], 4, 29, waits=True)
    assert drafts == [7], "a step of 32 costs twice as much"


@pytest.mark.parametrize(
    "params, expected",
    [(SamplingParams(), True), (SamplingParams(n=2, logit_bias={1: 2.0}), True),
     (BeamSearchParams(beam_width=2), False), (SamplingParams(presence_penalty=0.5), True),
     (SamplingParams(num_speculative_tokens=0), False)],
)  # fmt: skip
def test_beams_have_no_drafts(params, expected):
    scheduler, _ = traffic.make(drafts=2)
    request = scheduler.add("0", [1, 2], params, seed=0)
    assert (request.sequences[0].drafter is not None) == expected


def test_a_request_may_have_fewer_drafts():
    scheduler, _ = traffic.make()
    scheduler.drafting.settings = SETTINGS
    limited, none = (scheduler.add(str(i), [1, 2], SamplingParams(num_speculative_tokens=i), seed=0) for i in (2, 0))
    assert none.sequences[0].drafter is None
    assert len(drafter_of(costs=UNKNOWN, most=2).propose([1, 2, 3, 1, 2], (), 9, 0)) == 2
    assert len(copy.copy(drafter_of(costs=UNKNOWN, most=2)).propose([1, 2, 3, 1, 2], (), 9, 0)) == 2
    assert limited.sequences[0].drafter is not None


def test_a_step_has_room_for_the_drafts_of_eight_sequences_and_preempts_nothing_for_them():
    scheduler, runner = traffic.make(blocks=200, seqs=20, tokens=200, drafts=3)
    for i in range(20):
        traffic.add(scheduler, i, [1, 2, i], max_tokens=30)
    most = 0
    while scheduler.has_work:
        most = max(most, len(traffic.step(scheduler, runner).plan.drafts))
    assert 12 < most <= scheduler.limits.max_num_drafts == 24
    scheduler, runner = traffic.make(blocks=2, size=4, seqs=2, drafts=4, cache=False)
    for i in range(2):
        traffic.add(scheduler, i, [1, 2], max_tokens=2)
    traffic.drain(scheduler, runner)
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("tokens, decodes", [(8, 8), (30, 30), (40, 40), (64, 40)])
def test_a_step_has_no_more_decode_tokens_than_its_budget(tokens, decodes):
    limits = Limits(64, 8, tokens, speculative_config={"num_speculative_tokens": 4})
    assert limits.max_num_decodes == decodes
    buckets = Buckets(limits)
    buckets.keep(buckets.mixed[-1:])  # the only one at a start that compiles the others later
    assert buckets.fit(decodes, decodes, True) == buckets.all[0]


def test_the_room_of_a_step_is_divided_among_the_sequences_that_find_drafts():
    scheduler, runner = traffic.make(blocks=200, seqs=8, tokens=200, drafts=2)
    for i in range(8):
        traffic.add(scheduler, i, [1, 2, 1, 2, 1, 2, 1], max_tokens=30)
    plans = []
    while scheduler.has_work:
        plans.append(traffic.step(scheduler, runner).plan)
    full = [plan for plan in plans if len(plan.drafts) == scheduler.limits.max_num_drafts == 16]
    counts = [Counter(plan.rows[place].row for place, _ in plan.drafts) for plan in full]
    assert counts and all(set(count.values()) == {2} for count in counts)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"method": "eagle3"}, "config.method: must be one of ngram, suffix, draft_model, not 'eagle3': other sources"),
        ({"method": ["ngram"]}, "must be one of ngram, suffix, draft_model, not .'ngram'."),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: must be a whole number between 1 and"),
        ({"num_speculative_tokens": 33}, "between 1 and 32, not 33"),
        ({"prompt_lookup_max": 1.5}, "speculative_config.prompt_lookup_max: must be a whole number between 1 and 64"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min: must be at most prompt_lookup_max .3."),
        ({"draft_model": "x"}, "unknown draft_model .allowed with the method ngram: num_speculative_tokens, prompt_"),
        ({"suffix_decoding_max_tree_depth": 9}, "unknown suffix_decoding_max_tree_depth .allowed with the met"),
        ({"method": "suffix", "prompt_lookup_max": 4}, "unknown prompt_lookup_max .allowed with the method suffix: n"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 65}, "_depth: must be a whole number between 1 and 64"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "requests: must be a whole number between 0"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": True}, "factor: must be a number between 0 and 32, n"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "prob: must be a number between 0 and 1, not 1."),
        ({"method": "draft_model"}, "speculative_config.model: must name the draft model"),
        ({"model": 7}, "speculative_config.model: must be a text, not 7"),
        ({"model": "m", "prompt_lookup_max": 4}, "unknown prompt_lookup_max .allowed with the method draft_model: num"),
    ],
)  # fmt: skip
def test_errors_name_the_key(config, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(speculative_config=config)


def test_settings_have_the_names_of_vllm():
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 3}
    assert Speculation.of(config) == Speculation(5, 4, 3)
    assert Speculation.of({}) == Speculation() and Speculation.of(None) is None
    assert Speculation.of({"prompt_lookup_max": 1}) == Speculation(longest=1, shortest=1)
    suffix = {"suffix_decoding_max_tree_depth": 9, "suffix_decoding_max_cached_requests": 7}
    suffix |= {"suffix_decoding_max_spec_factor": 2, "suffix_decoding_min_token_prob": 0.5, "num_speculative_tokens": 3}
    model = {"model": "small", "revision": "main", "quantization": "int4", "num_speculative_tokens": 5}
    assert Speculation.of(model) == Speculation(5, model="small", revision="main", quantization="int4")
    assert Speculation.of(model | {"method": "draft_model"}) == Speculation.of(model)
    assert Speculation.of({"method": "suffix", **suffix}) == Speculation(3, 9, 2, 7, 2, 0.5)
    assert Speculation.of({"method": "suffix", "num_speculative_tokens": None}) == Speculation(8, 24, 2, 10_000, 1, 0.1)


MODEL_COSTS = DecodeCosts([0.3] * 64)  # a tenth of a step of one token


def model_drafter(costs=COSTS, model_costs=MODEL_COSTS, longest=1000, most=None):
    return ModelDrafter(SETTINGS, costs, longest, Rounds(model_costs), most)


def test_a_draft_model_computes_as_many_drafts_as_pay():
    dear = DecodeCosts([3.5] * 64)
    assert model_drafter(model_costs=UNKNOWN).wanted(10, 4, 0) == model_drafter().wanted(10, 4, 0) == 4
    assert model_drafter(model_costs=dear).wanted(10, 4, 0) == 0
    assert model_drafter(costs=UNKNOWN, model_costs=UNKNOWN).wanted(10, 9, 60) == SETTINGS.num_tokens
    long, by_token = (DecodeCosts([start + each * n for n in range(400)]) for start, each in ((3.0, 1.0), (0.1, 0.2)))
    sure = model_drafter(long, by_token)
    for _ in range(20):
        sure.learn(4, 4)
    assert sure.wanted(10, 4, 0) == sure.wanted(10, 4, 1) == 4
    assert sure.wanted(10, 4, 60) == 0, "with 60 others that have drafts, each draft of both models has its price"
    assert sure.rests_until > 10 and copy.copy(sure).wanted(10, 4, 1) == 0, "a copy rests with it"


def test_rounds_of_a_draft_model_cost_what_past_rounds_took():
    rounds = Rounds(MODEL_COSTS)
    drafter = ModelDrafter(SETTINGS, COSTS, 1000, rounds)
    assert drafter.wanted(10, 4, 0) == 4 and rounds.cost(4, 1, 10) == pytest.approx(1.2) and rounds.cost(0, 1, 10) == 0
    rounds.learn(4, 1, 10, 1000.0)
    assert rounds.cost(4, 1, 10) < 2, "a single round that took very long is not believed"
    for _ in range(60):
        rounds.learn(4, 1, 10, 14.2)
    assert rounds.cost(2, 1, 10) == pytest.approx(13.6, rel=0.01) and drafter.wanted(11, 4, 0) == 0
    tokens = 11
    while not drafter.wanted(tokens, 4, 0):
        tokens = drafter.rests_until + 1
    assert 11 < tokens < 5000, "it is tried again"
    for _ in range(60):
        rounds.learn(4, 1, 10, 1.2)
    assert drafter.wanted(tokens, 4, 0) == 4, "it is faster again"
    unknown = Rounds(UNKNOWN)
    unknown.learn(4, 1, 10, 1.0)
    assert unknown.cost(4, 1, 10) == 0


def test_a_draft_model_is_asked_within_its_context_and_the_limit_of_the_request():
    drafter = model_drafter(UNKNOWN, UNKNOWN, longest=20)
    assert [drafter.wanted(n, 4, 0) for n in (16, 18, 19)] == [4, 2, 1] and drafter.wanted(20, 4, 0) == 0
    assert model_drafter(UNKNOWN, UNKNOWN, most=2).wanted(5, 4, 0) == 2
    assert model_drafter(UNKNOWN, UNKNOWN).wanted(5, 0, 0) == 0


def test_a_draft_model_that_does_not_pay_is_asked_less_often():
    drafter, tokens, asked = model_drafter(), 10, []
    while tokens < 2000:
        if drafter.wanted(tokens, 4, 0):
            asked.append(tokens)
            drafter.learn(1, 0)
        tokens = max(tokens, drafter.rests_until) + 1
    assert 5 < len(asked) < 25, "one trial after each rest"
    assert max(later - before for before, later in itertools.pairwise(asked)) == MAX_REST_OF_MODEL + 1
    for _ in range(9):
        drafter.learn(1, 1)
    drafter.learn(9, 0)
    while drafter.wanted(tokens, 4, 0):
        drafter.learn(1, 0)
    assert drafter.rests_until - tokens < 9, "it was right for a while"
    drafter = model_drafter()
    drafter.learn(4, 3)
    assert drafter.wanted(10, 4, 0) > 0, "three of four in a trial"


def test_drafts_of_a_model_follow_the_tokens_that_it_knew():
    drafter = model_drafter(UNKNOWN, UNKNOWN)
    drafter.take(3, [7, 8, 9])
    assert drafter.propose([1, 2, 3], (), 2, 0) == [7, 8] and drafter.propose([1, 2, 3], (), 0, 0) == []
    assert drafter.propose([1, 2, 3, 4], (), 4, 0) == []
    assert drafter.propose([1, 2, 3], [5], 4, 0) == [5], "a grammar knows more"
    assert copy.copy(drafter).propose([1, 2, 3], (), 4, 0) == [], "a branch has other tokens"


def test_the_drafts_of_a_step_are_divided_among_the_sequences():
    scheduler, runner = traffic.make(blocks=64, seqs=12, tokens=64, drafts=3, method="draft_model")
    for i in range(12):
        traffic.add(scheduler, i, [1, 2 + i], max_tokens=20)
        if i in (0, 3, 5, 11):
            plan = scheduler.schedule()
            scheduler.commit(plan, runner.step(plan))
            assert {count for _, count in scheduler.wanted_drafts()} == {min(3, 3 * 8 // (i + 1))}
    assert len(scheduler.wanted_drafts()) == 12


def test_requests_without_drafts_and_prompts_want_none():
    scheduler, runner = traffic.make(blocks=64, tokens=4, drafts=3, method="draft_model")
    traffic.add(scheduler, "long", list(range(2, 11)), max_tokens=20)
    assert scheduler.wanted_drafts() == []
    for wanted in (0, 0, 1):
        plan = scheduler.schedule()
        scheduler.commit(plan, runner.step(plan))
        assert len(scheduler.wanted_drafts()) == wanted, "the first token of the output comes first"
    traffic.add(scheduler, "none", [1, 2], max_tokens=20, num_speculative_tokens=0)
    scheduler.add("beam", [1, 3], BeamSearchParams(beam_width=2, max_tokens=5), seed=0)
    for _ in range(3):
        plan = scheduler.schedule()
        assert scheduler.wanted_drafts() == [], "it is in a step in flight"
        scheduler.commit(plan, runner.step(plan))
        assert [sequence.request.request_id for sequence, _ in scheduler.wanted_drafts()] == ["long"]
    scheduler.drafting.stop()
    assert scheduler.wanted_drafts() == []

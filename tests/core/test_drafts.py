"""Where drafts come from, and how many of them are computed."""

import copy
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest

from jpaged.config import EngineConfig, Limits, Speculation
from jpaged.core.block_pool import BlockPool
from jpaged.core.draft_costs import UNKNOWN, DecodeCosts, DraftModelLimits
from jpaged.core.drafting import Drafting
from jpaged.core.drafts import (
    ASLEEP,
    INDEXED_AT_ONCE,
    MAX_REST,
    MAX_REST_OF_MODEL,
    MAX_TRIED,
    NOTHING,
    PASSED_OVER,
    Drafter,
    Lookup,
    ModelDrafter,
    Odds,
    Offer,
)
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.plan import Scheduled, StepPlan
from jpaged.runtime.batch import Buckets
from tests.core import traffic

SETTINGS = Speculation(num_tokens=4, longest=8, shortest=2)
COSTS = DecodeCosts([3.0 + tokens for tokens in range(64)])
TEXT = [1, 2, 3, 4, 5, 6, 1, 2]  # two equal tokens before drafts


def drafter_of(settings=SETTINGS, most=None, odds=None):
    return Drafter(settings, [Lookup(settings.longest, settings.shortest)], most, odds)


class Branch(SimpleNamespace):
    """Attributes of a sequence that the choice of drafts reads."""

    def __init__(self, drafter, num_tokens=10, most_drafts=100, **values):
        super().__init__(
            drafter=drafter, num_tokens=num_tokens, most_drafts=most_drafts, num_computed_tokens=num_tokens - 1,
            pending=0, num_prompt_tokens=1, constraint=None, **values,
        )  # fmt: skip

    __hash__ = object.__hash__


def drafting_of(costs=COSTS, model=None, max_num_seqs=64, **config):
    config = {"num_speculative_tokens": 4, **({"model": "any"} if model else {}), **config}
    limits = Limits(64, max_num_seqs, 512, speculative_config=config)
    return Drafting(limits, BlockPool(4, 4), costs, model)


def chosen(drafting, *offers, num_seqs, room=100, num_waiting=0, num_tokens=10):
    """Return the number of drafts of each of some sequences, whose drafts have these chances."""
    branches = [Branch(drafter_of(), num_tokens) for _ in offers]
    found = {branch: Offer([7] * len(each), each) for branch, each in zip(branches, offers)}
    drafts = drafting.choose(found, num_seqs, room, num_waiting)
    return [len(drafts.get(branch, ())) for branch in branches]


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
    one = drafter_of()
    one.offer([1, 2, 3, 1, 2], (), 4)
    other = copy.copy(one)
    assert one.offer([1, 2, 3, 1, 2, 9, 9, 9], (), 4).tokens == [9] * 4
    assert other.offer([1, 2, 3, 1, 2, 3, 1], (), 2).tokens == [2, 3]


def test_chances_follow_those_of_the_sequence_and_of_matches_as_long():
    odds = Odds(SETTINGS.longest)
    drafter, other = drafter_of(odds=odds), drafter_of(odds=odds)
    first = drafter.offer(TEXT, (), 4)
    assert first == Offer([3, 4, 5, 6], pytest.approx([0.9, 0.81, 0.729, 0.6561]))
    for _ in range(20):
        other.offer(TEXT, (), 4)
        other.learn(4, 1)
    after = drafter.offer(TEXT, (), 4).chances
    assert after[0] == pytest.approx(0.9, abs=0.01), "all drafts after two equal tokens were kept"
    assert after[1] < 0.15, "those after three were not: the draft before them is the third"
    assert after[3] / after[2] == pytest.approx(0.9), "nobody knows more of those after five"
    assert other.offer(TEXT, (), 4).chances[0] < 0.7, "half of the drafts of this sequence"


def test_after_many_drafts_that_did_not_pay_they_are_tried_again():
    odds = Odds(SETTINGS.longest)
    for _ in range(MAX_TRIED):
        odds.learn(2, False)
    for _ in range(MAX_TRIED // 2):
        odds.learn(3, True)
    assert odds.after(2) < 0.05 and odds.after(3) > 0.95
    for _ in range(PASSED_OVER - 1):
        odds.pass_over(2)
    assert odds.after(2) < 0.05
    odds.pass_over(2)
    assert odds.after(2) == odds.after(99) == 0.9 and odds.after(3) > 0.95


def test_later_drafts_count_more_than_old_ones():
    odds = Odds(SETTINGS.longest)
    for is_kept in [True] * 1000 + [False] * 2 * MAX_TRIED:
        odds.learn(99, is_kept)
    assert odds.after(8) < 0.2


def test_a_sequence_wakes_up_for_its_drafts_and_sleeps_without_any():
    drafter, tokens = drafter_of(), list(range(10))
    assert drafter.rests_until == ASLEEP and drafter.offer(tokens, (), 4) is None
    assert drafter.offer([*tokens, 1, 2], (), 4) and drafter.rests_until == ASLEEP, "they may not pay"
    drafter.wake_up()
    assert drafter.rests_until == 0 == copy.copy(drafter).rests_until
    assert drafter.offer([*tokens, 1, 2, 9], (), 4) is None and drafter.rests_until == ASLEEP


def test_tokens_that_a_grammar_forces_are_certain_and_tell_nothing_about_other_drafts():
    drafter = drafter_of()
    before = drafter.offer(TEXT, (), 4)
    for _ in range(10):
        assert drafter.offer(TEXT, [7, 8, 9, 7, 8], 3) == ([7, 8, 9], [1.0] * 3)
        drafter.learn(3, 0)
        drafter.rest(len(TEXT))
    assert drafter.offer(TEXT, (), 4) == before and drafter.offer(TEXT, [7], 0) is None


def test_after_drafts_that_do_not_pay_the_search_rests_longer_each_time():
    drafter, tokens, rests = drafter_of(), [1, 2, 3, 1, 2, 3, 1, 2], []
    for _ in range(6):
        assert drafter.offer(tokens, (), 4)
        drafter.rest(len(tokens))
        before = len(tokens)
        while copy.copy(drafter).offer(tokens, (), 4) is None:
            assert drafter.offer(tokens, (), 4) is None and drafter.rests_until == ASLEEP
            tokens = [*tokens, tokens[-3]]
        rests.append(len(tokens) - before)
    assert rests == [3, 7, 15, MAX_REST, MAX_REST, MAX_REST]
    drafter.wake_up()
    drafter.rest(len(tokens))
    assert drafter.offer([*tokens, tokens[-3]], (), 4), "rests are short again after drafts that paid"


def test_drafts_for_which_a_step_has_no_room_may_pay_in_the_next_one():
    branches, drafting = [Branch(drafter_of()) for _ in range(2)], drafting_of(UNKNOWN)
    for _ in range(5):
        offers = {branch: branch.drafter.offer(TEXT, (), 4) for branch in branches}
        assert None not in offers.values(), "no search rests"
        assert len(drafting.choose(offers, num_seqs=8, room=1)) == 1
    drafting.choose({branches[0]: Offer([1], [0.01])}, num_seqs=8, room=1)
    assert branches[0].drafter.offer(TEXT, (), 4) is None, "these did not pay"


def test_the_drafts_of_a_step_are_those_with_which_it_gives_the_most_tokens_for_its_time():
    chances = [0.9, 0.8, 0.5, 0.2, 0.1]
    assert chosen(drafting_of(), chances, num_seqs=1) == [3], "4 seconds for a token, and 1 for each draft"
    assert chosen(drafting_of(UNKNOWN), chances, num_seqs=1) == [5], "all cost the same"
    assert chosen(drafting_of(), chances, num_seqs=40) == [0], "a step of 40 tokens costs what its tokens cost"
    assert chosen(drafting_of(), chances, num_seqs=1, room=2) == [2]
    assert chosen(drafting_of(UNKNOWN), [0.5], num_seqs=8) == [1]
    assert chosen(drafting_of(UNKNOWN), [0.3], num_seqs=8) == [0], "the gain is smaller than the error of the estimate"
    assert chosen(drafting_of(), num_seqs=1) == []


def test_several_sequences_pay_together_for_a_step_that_costs_more():
    steps = drafting_of(DecodeCosts([1.0] * 9 + [1.4] * 56))  # as with a shape of more rows
    assert chosen(steps, [0.9, 0.8], num_seqs=8) == [0]
    assert chosen(steps, *[[0.9, 0.8]] * 3, [0.1], num_seqs=8) == [2, 2, 2, 1]
    assert chosen(steps, *[[1.0] * 8] * 12, num_seqs=16, room=100) == [3] * 8 + [2] * 4, "32 in all, shared equally"


def test_few_sequences_with_drafts_beside_many_miss_every_other_step():
    flat = drafting_of(UNKNOWN)
    assert chosen(flat, [0.9], num_seqs=8) == [1]
    assert chosen(flat, [0.9], num_seqs=9) == [0] and chosen(flat, [0.9, 0.9], num_seqs=9) == [2]
    assert chosen(flat, [0.9], [0.9], num_seqs=9) == [1, 1], "all others wait with two of nine"
    assert chosen(flat, [0.9], num_seqs=9, num_waiting=1) == [1], "they wait for another one, too"


def test_long_contexts_make_drafts_cost_more():
    costs = DecodeCosts(COSTS.seconds, context=0.01)
    assert chosen(drafting_of(costs), [0.9, 0.8], num_seqs=1, num_tokens=5) == [2]
    assert chosen(drafting_of(costs), [0.9, 0.8], num_seqs=1, num_tokens=5000) == [0]


def plan_of(num_seqs, drafts=0, *, num_tokens=1, masked=()):
    rows = tuple(Scheduled(0, 10, num_tokens, 1) for _ in range(num_seqs + drafts))
    return StepPlan(rows=rows, drafts=tuple((i, 7) for i in range(drafts)), masked=masked)


def test_steps_teach_what_it_costs_not_to_overlap():
    def taught(*steps):
        drafting = drafting_of(DecodeCosts([1.0] * 64))
        for plan, seconds, overlaps in steps:
            drafting.learn_step(plan, seconds, overlaps=overlaps)
        return chosen(drafting, [0.9], num_seqs=8)

    plain, drafted = (plan_of(8), 1.0, True), (plan_of(8, 8), 1.05, False)
    assert taught() == taught(plain) == taught(plain, drafted) == [1]
    assert taught(plain, *[(plan_of(8, 8), 1.3, False)] * 9) == [0]
    assert taught((plan_of(8), 1.3, True), *[(plan_of(8, 8), 1.3, False)] * 9) == [1], "others take as long"
    assert taught(*[(plan_of(8, 8), 1.3, False)] * 9) == [1], "no step overlaps"
    between = (plan_of(8), 1.5, False)
    assert taught(plain, *[drafted, between] * 9) == [0], "the steps between drafts take longer for their sake"
    assert taught(plain, *[drafted, (plan_of(8, masked=((0, frozenset()),)), 1.5, False)] * 9) == [1], "not these"
    assert taught(plain, *[drafted, (plan_of(8, num_tokens=9), 1.5, False)] * 9) == [1], "a prompt tells nothing"
    assert taught(plain, *[(plan_of(8, 8), 1.3, False)] * 9, *[plain] * 1000) == [1], "they are tried again"


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
    assert len(drafter_of(most=2).offer([1, 2, 3, 1, 2], (), 9).tokens) == 2
    assert len(copy.copy(drafter_of(most=2)).offer([1, 2, 3, 1, 2], (), 9).tokens) == 2
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


def model_of(costs=MODEL_COSTS, longest=1000):
    return DraftModelLimits(longest, costs)


def wanted(drafting, drafter, num_tokens=10, others=0, **values):
    """Return the number of drafts that a sequence wants of the draft model, and each of the others with as many."""
    branches = [Branch(each, num_tokens, **values) for each in [drafter, *(copy.copy(drafter) for _ in range(others))]]
    found = dict(drafting.wanted(branches))
    assert len({found.get(branch, 0) for branch in branches}) == 1
    return found.get(branches[0], 0)


def test_a_draft_model_computes_as_many_drafts_as_pay():
    fresh = lambda: ModelDrafter(SETTINGS, 1000)
    assert wanted(drafting_of(model=model_of()), fresh()) == 4
    assert wanted(drafting_of(model=model_of(UNKNOWN)), fresh()) == 4
    assert wanted(drafting_of(model=model_of(DecodeCosts([3.5] * 64))), fresh()) == 0
    assert wanted(drafting_of(UNKNOWN, model_of(UNKNOWN)), fresh(), others=7) == SETTINGS.num_tokens
    long, by_token = (DecodeCosts([start + each * n for n in range(400)]) for start, each in ((3.0, 1.0), (0.1, 0.2)))
    sure = ModelDrafter(SETTINGS, 1000)
    for _ in range(20):
        sure.learn(4, 4)
    both = drafting_of(long, model_of(by_token))
    assert wanted(both, copy.copy(sure)) == wanted(both, copy.copy(sure), others=1) == 4
    assert wanted(both, sure, others=31) == 0, "with 31 others that have drafts, each draft of both has its price"
    assert sure.rests_until > 10 and wanted(both, copy.copy(sure), others=1) == 0, "a copy rests with it"


def test_rounds_of_a_draft_model_cost_what_past_rounds_took():
    drafting, drafter, tokens = drafting_of(model=model_of()), ModelDrafter(SETTINGS, 9999), 10
    round_of_four = [(Branch(drafter), 4)]
    drafting.learn_round(round_of_four, 1000.0)
    assert wanted(drafting, drafter) == 4, "a single round that took very long is not believed"
    for _ in range(60):
        drafting.learn_round(round_of_four, 14.2)
    assert wanted(drafting, drafter) == 0
    while not wanted(drafting, drafter, tokens) and tokens < 5000:
        tokens = drafter.rests_until + 1
    assert 11 < tokens < 5000, "it is tried again"
    for _ in range(60):
        drafting.learn_round(round_of_four, 1.2)
    assert wanted(drafting, drafter, tokens) == 4, "it is faster again"


def test_a_draft_model_is_asked_within_its_context_and_the_limit_of_the_request():
    drafting = drafting_of(UNKNOWN, model_of(UNKNOWN))
    fresh = lambda most=None: ModelDrafter(SETTINGS, 20, most)
    assert [wanted(drafting, fresh(), n) for n in (16, 18, 19, 20)] == [4, 2, 1, 0]
    assert wanted(drafting, fresh(most=2), 5) == 2
    assert wanted(drafting, fresh(), 5, most_drafts=1) == 1 and wanted(drafting, fresh(), 5, most_drafts=0) == 0


def test_a_draft_model_that_does_not_pay_is_asked_less_often():
    drafting, drafter = drafting_of(model=model_of()), ModelDrafter(SETTINGS, 5000)
    tokens, asked = 10, []
    while tokens < 2000:
        if wanted(drafting, drafter, tokens):
            asked.append(tokens)
            drafter.learn(1, 0)
        tokens = max(tokens, drafter.rests_until) + 1
    assert 5 < len(asked) < 25, "one trial after each rest"
    assert max(later - before for before, later in itertools.pairwise(asked)) == MAX_REST_OF_MODEL + 1
    for _ in range(9):
        drafter.learn(1, 1)
    drafter.learn(9, 0)
    while wanted(drafting, drafter, tokens):
        drafter.learn(1, 0)
    assert drafter.rests_until - tokens < 9, "it was right for a while"
    drafter = ModelDrafter(SETTINGS, 5000)
    drafter.learn(4, 3)
    assert wanted(drafting, drafter) > 0, "three of four in a trial"


def test_drafts_of_a_model_follow_the_tokens_that_it_knew():
    drafter = ModelDrafter(SETTINGS, 1000)
    drafter.take(3, [7, 8, 9])
    assert drafter.offer([1, 2, 3], (), 2).tokens == [7, 8] and drafter.offer([1, 2, 3], (), 0) is None
    assert drafter.offer([1, 2, 3, 4], (), 4) is None
    assert drafter.offer([1, 2, 3], [5], 4).tokens == [5], "a grammar knows more"
    assert copy.copy(drafter).offer([1, 2, 3], (), 4) is None, "a branch has other tokens"


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

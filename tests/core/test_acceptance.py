"""The limits of requests: the largest that the scheduler accepts, and the exact messages of its refusals."""

from dataclasses import replace

import pytest

from jpaged.core.params import MAX_TOP, BeamSearchParams, InvalidParameter, SamplingParams
from tests.core.traffic import add, drain, make
from tests.support.fake_runner import VOCAB


@pytest.mark.parametrize(
    "params, field",
    [
        (SamplingParams(n=5), "n"),
        (SamplingParams(n=2, best_of=5), "best_of"),
        (BeamSearchParams(beam_width=5), "beam_width"),
    ],
)
def test_more_sequences_than_a_step_holds_are_refused_by_the_name_of_their_parameter(params, field):
    scheduler, _ = make(seqs=4)
    with pytest.raises(InvalidParameter) as error:
        scheduler.add("0", [1], params, seed=0)
    assert str(error.value) == f"{field}: 5 sequences exceed the 4 of a step (max_num_seqs)"
    assert error.value.field == field


TOO_LONG = (
    "This model's maximum context length is 64 tokens (max_model_len). However, you requested {} tokens ({} in the "
)
TOO_LONG += "prompt, {} in the completion). Please reduce the length of the prompt or completion."
OUTSIDE = f"is outside the vocabulary [0, {VOCAB})"


@pytest.mark.parametrize(
    "prompt, params, told",
    [
        ([], {}, "prompt: must hold at least one token"),
        ([0, VOCAB], {}, f"prompt: token id {VOCAB} {OUTSIDE}"),
        ([1, -1], {}, f"prompt: token id -1 {OUTSIDE}"),
        ([1, True], {}, f"prompt: token id True {OUTSIDE}"),
        ([1] * 64, {}, f"prompt: {TOO_LONG.format(80, 64, 16)}"),
        ([1] * 65, {"max_tokens": None}, f"prompt: {TOO_LONG.format(66, 65, 1)}"),
        ([1] * 10, {"max_tokens": 55}, f"max_tokens: {TOO_LONG.format(65, 10, 55)}"),
        ([1], {"stop_token_ids": [0, VOCAB]}, f"stop_token_ids: {VOCAB} {OUTSIDE}"),
        ([1], {"allowed_token_ids": [VOCAB + 1]}, f"allowed_token_ids: {VOCAB + 1} {OUTSIDE}"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, f"logit_bias: {VOCAB} {OUTSIDE}"),
    ],
)
def test_what_can_never_run_is_refused(prompt, params, told):
    scheduler, _ = make()
    with pytest.raises(InvalidParameter) as error:
        add(scheduler, 0, prompt, **params)
    assert str(error.value) == told and error.value.field == told.partition(":")[0]
    assert not scheduler.has_work


@pytest.mark.parametrize("prompt, params", [([0, VOCAB - 1], {}), ([1] * 10, {"max_tokens": 54})])
def test_what_just_fits_is_accepted(prompt, params):
    scheduler, _ = make()
    add(scheduler, 0, prompt, stop_token_ids=[VOCAB - 1], allowed_token_ids=[0], logit_bias={VOCAB - 1: 1}, **params)


def test_the_pool_limits_sequences_that_share_a_prompt():
    scheduler, _ = make(blocks=6, size=4)
    words = (
        r"context length is 17 tokens \(the size of the KV pool, for 2 sequences\).* 18 tokens \(9 in the prompt, 9 in"
    )
    with pytest.raises(InvalidParameter, match=words):
        add(scheduler, "more", [1] * 9, n=2, max_tokens=9)
    add(scheduler, "fits", [1] * 9, n=2, max_tokens=8)


def test_a_request_keeps_what_it_was_given():
    scheduler, _ = make(eos=[0])
    request = scheduler.add("a", [1], SamplingParams(logprobs=3), seed=5, prompt="text", client="b", cache_salt="c")
    assert (request.prompt, request.seed, request.client, request.cache_salt) == ("text", 5, "b", "c")
    assert request.num_top == 3


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_numbers_of_logprobs_have_a_limit_and_may_be_the_whole_vocabulary(name):
    scheduler, _ = make()
    scheduler.limits = replace(scheduler.limits, max_logprobs=VOCAB - 1)
    add(scheduler, "fits", [1], **{name: VOCAB - 1})
    for count in (VOCAB, -1):
        with pytest.raises(InvalidParameter) as error:
            add(scheduler, "more", [1], **{name: count})
        assert str(error.value) == f"{name}: must be at most {VOCAB - 1} (max_logprobs), not {count}"
    scheduler.limits = replace(scheduler.limits, max_logprobs=VOCAB)
    assert getattr(add(scheduler, "all", [1], **{name: -1}).params, name) == VOCAB


@pytest.mark.parametrize("options, num_top", [({}, 3), ({"logprobs": 9}, 9), ({"stop": "a"}, MAX_TOP)])
def test_beams_list_as_many_tokens_as_may_end_or_go_on(options, num_top):
    scheduler, _ = make(eos=[0])
    assert scheduler.add("a", [1], BeamSearchParams(beam_width=2, **options), seed=0).num_top == num_top


def test_beams_and_all_that_end_them_have_a_limit(monkeypatch):
    monkeypatch.setattr("jpaged.core.admission.MAX_TOP", 64 + 49)
    scheduler, _ = make(seqs=64, tokens=64, blocks=900, eos=[0, 1])
    params = BeamSearchParams(beam_width=64, stop_token_ids=range(1, 49), max_tokens=4)
    scheduler.add("fits", [1], params, seed=0)
    with pytest.raises(InvalidParameter) as error:
        scheduler.add("more", [1], replace(params, stop_token_ids=range(1, 50)), seed=0)
    assert str(error.value) == "stop_token_ids: 49 and a beam_width of 64 are more than 113"


def test_the_pool_limits_a_sequence_too():
    scheduler, runner = make(blocks=2, size=4)
    with pytest.raises(InvalidParameter, match=r"9 tokens \(the size of the KV pool\)"):
        add(scheduler, 0, [1] * 9)
    request = add(scheduler, 0, [1] * 6, max_tokens=None)
    drain(scheduler, runner)
    assert len(request.sequences[0].tokens) == 9, "the last token needs no slot"


def test_the_longest_sequence_fills_the_pool():
    scheduler, _ = make(blocks=6, size=4, length=64)
    assert scheduler.capacity.max_sequence_len() == 25
    assert scheduler.capacity.max_sequence_len(prompt_len=9, num_sequences=2) == 8 + 2 * 4 + 1


def test_a_refused_request_takes_no_turn_of_its_client():
    scheduler, _ = make()
    with pytest.raises(InvalidParameter, match="bad_words"):
        params = SamplingParams(allowed_token_ids=[7])
        scheduler.add("refused", [1], params, seed=0, client="a", bad_words=[(7,)])
    assert add(scheduler, "first", [1], client="a").rank < add(scheduler, "second", [1], client="b").rank


def test_a_request_id_in_use_is_refused():
    scheduler, _ = make()
    add(scheduler, "a", [1])
    with pytest.raises(InvalidParameter, match=r"^request_id: 'a' is already in use$"):
        add(scheduler, "a", [2])


def test_a_priority_without_its_policy_is_refused():
    scheduler, _ = make()
    with pytest.raises(InvalidParameter, match=r"^priority: must be 0 under the policy 'fcfs', not -1$") as error:
        scheduler.add("a", [1], SamplingParams(), seed=0, priority=-1)
    assert error.value.field == "priority"

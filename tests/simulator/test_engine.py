"""Simulated runs: times by hand, and the schedule of the scheduler itself."""

from collections import Counter

import pytest

from jpaged.bench.workload import Lengths
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Sample, StepResult
from jpaged.core.scheduler import Scheduler
from jpaged.simulator.engine import Candidates, branch, drive, drive_steps, params_of
from jpaged.simulator.traffic import Call, Schedule, Users, calls_of, load_trace, save_trace
from tests.simulator.constant import engine

LENGTHS = [Lengths(5 + 7 * i % 23, 1 + 5 * i % 17) for i in range(40)]


class Recording(Scheduler):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.plans, self.sampled, self.peak, self.outputs = [], Counter(), 0, {}

    def schedule(self):
        self.plans.append(super().schedule())
        self.peak = max(self.peak, self.pool.num_used)
        return self.plans[-1]

    def commit(self, plan, result):
        committed = super().commit(plan, result)
        self.sampled.update(sequence.request.request_id for sequence in committed.advanced)
        self.outputs |= {s.request.request_id: s.output_token_ids for s in committed.advanced}
        self.check_invariants()
        return committed


def test_times_of_two_requests_by_hand():
    """Steps of one second and 8 tokens.

    1: the first request's prompt. 2: its second token, and 7 tokens of the other's prompt. 3: its last token, and the
    rest of that prompt. 4: the other's last token.
    """
    made = engine(tokens=8)
    first, second = calls_of([Lengths(5, 3), Lengths(10, 2)], [0.0, 0.5])
    assert drive(made, Schedule([first, second])) == [(first, 1.0, 3.0, 0), (second, 3.0, 4.0, 1)]
    assert made.now == 4.0 and made.steps == 4


def test_time_passes_without_requests():
    made = engine()
    calls = calls_of([Lengths(5, 1), Lengths(5, 2)], [0.25, 7.5])
    assert [(each.first, each.end) for each in drive(made, Schedule(calls))] == [(1.25, 1.25), (8.5, 9.5)]
    assert made.steps == 3


def test_normalised_latency_is_per_token_from_the_arrival():
    (served,) = drive(engine(), Schedule(calls_of([Lengths(5, 4)], [0.0])))
    assert served.normalised == 1.0


def test_last_step_has_the_state_before_requests_end():
    made = engine()
    seen = [made.last for _ in drive_steps(made, Schedule(calls_of([Lengths(5, 1), Lengths(3, 2)])))]
    assert seen == [(1.0, 2, 2, 2 + 1), (1.0, 1, 1, 1)]


@pytest.mark.parametrize("num_blocks", [256, 12])
def test_schedule_equals_that_of_the_scheduler_driven_by_hand(num_blocks):
    calls = calls_of(LENGTHS)
    made = engine(num_blocks, tokens=32, kind=Recording)
    drive(made, Schedule(calls))
    assert (made.scheduler.num_preemptions > 0) == (num_blocks == 12)

    other = engine(num_blocks, tokens=32, kind=Recording).scheduler
    for i, call in enumerate(calls):
        prompt = [text for text, tokens in call.prompt for _ in range(tokens)]
        other.add(f"{i}.0", prompt, SamplingParams(temperature=1.0, max_tokens=call.output, ignore_eos=True), seed=0)
    while other.has_work:
        plan = other.schedule()
        answers = [calls[int(other.rows[row].request.request_id[:-2])].answer for row, _, _, n in plan.rows if n]
        other.commit(plan, StepResult([Sample(answer, 0.0) for answer in answers]))
    assert made.scheduler.plans == other.plans
    assert made.scheduler.sampled == other.sampled == {f"{i}.0": call.output for i, call in enumerate(calls)}


def test_runs_are_deterministic():
    def run():
        made = engine(24, tokens=32, caching=True)
        calls = [*calls_of(LENGTHS[:12], width=2), *calls_of(LENGTHS[:6], width=3, beam=True)]
        return drive(made, Users(calls, 4, think_s=0.5)), made.steps, made.scheduler.num_preemptions

    assert run() == run()


def test_outputs_share_the_prompt_and_then_need_blocks_of_their_own():
    """A prompt of two full blocks, and 4 further tokens of each of three outputs."""
    made = engine(kind=Recording)
    (served,) = drive(made, Schedule(calls_of([Lengths(8, 5)], width=3)))
    assert (served.first, served.end) == (1.0, 5.0)
    assert made.scheduler.peak == 2 + 3
    assert made.scheduler.sampled == {"0.0": 3 * 5}


def test_outputs_do_not_become_equal_by_a_preemption():
    """The outputs of a preempted request are computed again, and share nothing but the prompt."""
    made = engine(11, kind=Recording, caching=True)
    old, new = calls_of([Lengths(4, 22), Lengths(4, 12)])
    made.add("old", old, SamplingParams(max_tokens=22, ignore_eos=True))
    made.add("new", new, SamplingParams(n=3, temperature=1.0, max_tokens=12, ignore_eos=True))
    ended = {}
    while made.scheduler.has_work:
        ended |= {request.request_id: request for request in made.step()}
    assert made.scheduler.num_preemptions
    outputs = [sequence.output_token_ids for sequence in ended["new"].sequences]
    assert outputs == [[branch(new.answer, i)] * 12 for i in range(3)] and len(set(map(tuple, outputs))) == 3
    assert ended["old"].sequences[0].output_token_ids == [old.answer] * 22


def test_first_token_of_a_preempted_request_keeps_its_time():
    made = engine(7)
    served = drive(made, Schedule(calls_of([Lengths(4, 22), Lengths(4, 12)])))
    assert made.scheduler.num_preemptions
    assert [(each.number, each.first) for each in served] == [(0, 1.0), (1, 1.0)] and served[1].end > 22


@pytest.mark.parametrize("shares", [True, False])
def test_separate_requests_share_only_the_cached_prompt(shares):
    made = engine(kind=Recording, caching=True)
    (served,) = drive(made, Schedule(calls_of([Lengths(8, 5)], width=3)), shares=shares)
    assert (served.first, served.end) == (1.0, 5.0)
    assert made.scheduler.peak == (2 + 3 if shares else 3 * 3)
    assert made.scheduler.sampled == ({"0.0": 15} if shares else {f"0.{i}": 5 for i in range(3)})
    if not shares:
        assert made.scheduler.outputs == {f"0.{i}": [branch(served.call.answer, i)] * 5 for i in range(3)}


def test_a_call_ends_with_the_last_of_its_requests():
    """Two rows, so that the third request of the call waits for one of them."""
    (served,) = drive(engine(seqs=2), Schedule(calls_of([Lengths(4, 3)], width=3)), shares=False)
    assert (served.first, served.end) == (1.0, 6.0)


def test_later_prompts_find_an_earlier_answer_in_the_cache():
    question = Call(0.0, ((0, 8),), 9, answer=1)
    follow_up = Call(50.0, ((0, 8), (1, 8), (2, 3)), 1, answer=3)
    stranger = Call(60.0, ((0, 8), (4, 8), (2, 3)), 1, answer=5)
    made = engine(caching=True)
    drive(made, Schedule([question, follow_up, stranger]))
    assert (made.scheduler.prefix_queries, made.scheduler.prefix_hits) == (8 + 19 + 19, 16 + 8)


def test_moves_to_the_host_run_beside_a_step_and_moves_back_before_it():
    """A pool of 8 blocks, with steps of one second and moves of half a second.

    The first text fills 5 blocks. The second one takes 6: three moves to the host, in 1.5 s. The third request needs
    the first text again and one block more: three moves back, in 1.5 s, and four blocks of the second text leave, in
    2 s.
    """
    calls = [Call(0.0, ((0, 20),), 1, 9), Call(5.0, ((1, 24),), 1, 9), Call(10.0, ((0, 20), (2, 4)), 1, 9)]
    made = engine(8, caching=True, host=16, block_move_s=0.5)
    assert [each.end for each in drive(made, Schedule(calls))] == [1.0, 5.0 + 1.5, 10.0 + 1.5 + 2.0]
    assert (made.scheduler.memory.tier.num_out, made.scheduler.memory.tier.num_back) == (3 + 4, 3)
    assert made.scheduler.prefix_hits == 20
    alone = engine(8, caching=True)
    assert [each.end for each in drive(alone, Schedule(calls))] == [1.0, 6.0, 11.0]
    assert alone.scheduler.prefix_hits == 8, "without a host, two blocks are left"


def test_step_of_moves_only_takes_their_time():
    """Five blocks return for the tokens of more than a step, while four full ones leave. Then the request starts."""
    calls = [Call(0.0, ((0, 20),), 1, 9), Call(5.0, ((1, 31),), 1, 9), Call(10.0, ((0, 20), (2, 4)), 1, 9)]
    made = engine(8, tokens=8, caching=True, host=16, block_move_s=0.1)
    made.scheduler.memory.tier.cost = 3.9
    assert drive(made, Schedule(calls))[-1].end == pytest.approx(10.0 + 4 * 0.1 + 5 * 0.1 + 1.0)


def test_pins_last_for_their_seconds():
    made = engine(8, caching=True)
    calls = [Call(0.0, ((0, 8),), 1, 9), Call(2.0, ((1, 24),), 1, 9), Call(5.0, ((2, 8),), 1, 9)]
    drive(made, Schedule([call._replace(pin_s=10.0) for call in calls]))
    assert made.scheduler.memory.pins.count == 8
    drive(made, Schedule([Call(13.5, ((3, 4),), 1, 9)]))
    assert made.scheduler.memory.pins.count < 8


def test_beams_run_together_and_end_at_the_full_length():
    made = engine(kind=Recording)
    (served,) = drive(made, Schedule(calls_of([Lengths(8, 5)], width=4, beam=True)))
    assert (served.first, served.end) == (1.0, 5.0)
    assert [sum(row.num_samples for row in plan.rows) for plan in made.scheduler.plans] == [1, 4, 4, 4, 4]


def test_candidates_of_a_beam_are_probabilities_in_descending_order():
    candidates = Candidates()
    for _ in range(50):
        sample = candidates.of(7, 8)
        assert list(sample.top_tokens) == list(range(7, 15)) and len(sample.top_logprobs) == 8
        assert list(sample.top_logprobs) == sorted(sample.top_logprobs, reverse=True) and sample.top_logprobs[0] < 0
    assert Candidates(1).of(0, 4) == Candidates(1).of(0, 4)


def test_together_returns_the_answers_of_a_batch_at_its_end():
    calls = calls_of([Lengths(4, 1), Lengths(4, 3)])
    assert [each[1:] for each in drive(engine(), Schedule(calls), together=True)] == [(3.0, 3.0, 0), (3.0, 3.0, 1)]
    assert [each[1:] for each in drive(engine(), Schedule(calls))] == [(1.0, 1.0, 0), (1.0, 3.0, 1)]


def test_a_run_is_driven_step_by_step():
    made = engine()
    steps = drive_steps(made, Schedule(calls_of([Lengths(4, 2), Lengths(4, 9)])))
    assert [[each.number for each in next(steps)] for _ in range(5)] == [[], [0], [], [], []]
    assert made.now == 5.0 and made.scheduler.has_work


def test_requests_that_can_never_run_are_an_error():
    made = engine()
    made.scheduler.holds_new = True
    with pytest.raises(RuntimeError, match="1 requests wait, and none can be scheduled"):
        drive(made, Schedule(calls_of([Lengths(4, 2)])))


def test_params_of_a_call():
    (shared,) = params_of(6, 2, beam=False, shares=True)
    assert (shared.n, shared.max_tokens, shared.ignore_eos) == (2, 6, True)
    assert [each.n for each in params_of(6, 2, beam=False, shares=False)] == [1, 1]
    (beam,) = params_of(6, 2, beam=True, shares=True)
    assert beam.beam_width == 2


def test_saved_trace_replays_to_the_same_results(tmp_path):
    calls = calls_of(LENGTHS, [0.7 * i for i in range(len(LENGTHS))], width=2)
    save_trace(calls, tmp_path / "trace")
    first, second = (drive(engine(), Schedule(each)) for each in (calls, load_trace(tmp_path / "trace")))
    assert first == second

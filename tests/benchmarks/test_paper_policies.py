"""The baselines of the paper's evaluation: reservations in a buddy system, static batches, traces, memory by kind."""

import random
import statistics

import pytest

from benchmarks.paper.buddy import BuddyPool
from benchmarks.paper.memory import Kinds, MemoryWatch, kinds
from benchmarks.paper.policies import POLICIES, Policy
from benchmarks.paper.traces import HISTORY, SHOTS, WORKLOADS, chatbot, main
from jpaged.config import Limits
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Sample, StepResult
from jpaged.core.scheduler import Scheduler
from jpaged.simulator.cost import StepLoad
from jpaged.simulator.engine import VOCAB_SIZE, VirtualEngine, drive
from jpaged.simulator.traffic import Call, Schedule, load_trace

LIMITS = Limits(max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64, block_size=4)


class OneSecond:
    source = "each step takes a second"

    def seconds(self, load: StepLoad) -> float:
        return 1.0


# The buddy system


def test_runs_are_powers_of_two_at_multiples_of_their_size():
    pool = BuddyPool(13, 4)
    assert pool.reserve(4 * 5) == [0, 1, 2, 3, 4] and pool.reserved == 8
    assert pool.reserve(4 * 3) == [8, 9, 10] and pool.reserved == 12
    assert pool.reserve(4 * 2) is None, "blocks 5 to 7 and 11 are lost by rounding, and 12 is alone"
    assert pool.reserve(4) == [12] and pool.num_free == 4
    pool.check_invariants([[[0, 1, 2, 3, 4]], [[8, 9, 10]], [[12]]])


def test_freed_neighbours_are_merged():
    pool = BuddyPool(16, 4)
    runs = [pool.reserve(16) for _ in range(4)]
    assert pool.reserve(4) is None
    for block_id in (*runs[0], *runs[2]):
        pool.free(block_id)
    assert pool.reserve(4 * 8) is None, "two free runs of 4 that are no buddies"
    for block_id in runs[3]:
        pool.free(block_id)
    assert pool.reserve(4 * 8) == list(range(8, 16))
    for block_id in (*range(8, 16), *runs[1]):
        pool.free(block_id)
    assert pool.reserve(4 * 16) == list(range(16))


def test_random_reservations_never_overlap_and_leave_nothing():
    rng, pool, held = random.Random(0), BuddyPool(61, 4), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            for block_id in held.pop(rng.randrange(len(held))):
                pool.free(block_id)
        elif block_ids := pool.reserve(rng.randint(1, 80)):
            size = 1 << (len(block_ids) - 1).bit_length()
            assert block_ids == list(range(block_ids[0], block_ids[0] + len(block_ids))) and block_ids[0] % size == 0
            held.append(block_ids)
        pool.check_invariants([block_ids] for block_ids in held)
        assert pool.reserved == sum(1 << (len(block_ids) - 1).bit_length() for block_ids in held)
    for block_ids in held:
        for block_id in block_ids:
            pool.free(block_id)
    assert pool.reserve(4 * 32) == list(range(32)) and pool.reserved == 32


# Policies


def call(prompt: int, output: int, arrival: float = 0.0, text: int = 1, **options) -> Call:
    return Call(arrival, ((text, prompt),), output, text + 1, **options)


def scheduler_of(name: str, pool_tokens: int = 256) -> Scheduler:
    return POLICIES[name].make(LIMITS, pool_tokens, VOCAB_SIZE)


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult([Sample(7, 0.0) for row in plan.rows for _ in range(row.num_samples)]))
    scheduler.check_invariants()


@pytest.mark.parametrize("name, held", [("orca-max", 64), ("orca-pow2", 28), ("orca-oracle", 24), ("paged", 12)])
def test_the_memory_of_a_request_of_9_tokens_and_13_of_output(name, held):
    scheduler = scheduler_of(name)
    scheduler.add("a", [1] * 9, SamplingParams(max_tokens=13, ignore_eos=True), seed=0)
    step(scheduler)
    (sequence,) = scheduler.requests["a"].sequences
    assert len(sequence.table) * 4 == held
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks and scheduler.num_preemptions == 0


@pytest.mark.parametrize("name, at_once", [("orca-max", 4), ("orca-oracle", 8), ("paged", 9)])
def test_the_reservation_decides_how_many_requests_run_at_once(name, at_once):
    """256 slots; requests of 12 + 5 tokens take 64 or, rounded, 32. In pages, nine prompts have 3 blocks each, and the
    ninth leaves 4 more for each of the eight before it."""
    limits = Limits(64, 16, 256, block_size=4)
    scheduler = POLICIES[name].make(limits, 256, VOCAB_SIZE)
    for i in range(20):
        scheduler.add(str(i), [i] * 12, SamplingParams(max_tokens=5, ignore_eos=True), seed=0)
    most = 0
    while scheduler.has_work:
        step(scheduler)
        most = max(most, len(scheduler.running))
    assert most == at_once


def run(policy: Policy, calls: list[Call], **options):
    engine = VirtualEngine(policy.make(LIMITS, 256, VOCAB_SIZE), OneSecond(), **options)
    return drive(engine, Schedule(calls), shares=policy.shares, together=policy.together)


def test_a_static_batch_ends_as_a_whole_and_the_next_one_waits_for_it():
    calls = [call(4, 2, 0.0), call(4, 5, 0.0, text=3), call(4, 1, 0.5, text=5)]
    assert [(s.call.output, s.end) for s in run(POLICIES["static-paged"], calls)] == [(2, 5.0), (5, 5.0), (1, 6.0)]
    assert [(s.call.output, s.end) for s in run(POLICIES["paged"], calls)] == [(2, 2.0), (1, 2.0), (5, 5.0)]


def test_a_static_batch_is_formed_in_several_steps_if_its_prompts_need_them():
    scheduler = scheduler_of("static-paged")
    for i in range(5):
        scheduler.add(str(i), [i] * 20, SamplingParams(max_tokens=8, ignore_eos=True), seed=0)
    step(scheduler)  # 64 tokens
    assert len(scheduler.running) == 4
    step(scheduler)
    assert len(scheduler.running) == 5, "the prompts of the batch were more than a step's tokens"
    scheduler.add("late", [9] * 4, SamplingParams(max_tokens=1, ignore_eos=True), seed=0)
    step(scheduler)
    assert len(scheduler.running) == 5 and len(scheduler.waiting) == 1


@pytest.mark.parametrize("name, blocks", [("unshared", 6), ("paged", 4)])
def test_outputs_of_one_request_share_the_prompt_unless_the_policy_forbids_it(name, blocks):
    used = []
    run(POLICIES[name], [call(8, 4, width=2)], on_plan=lambda scheduler: used.append(scheduler.pool.num_used))
    assert max(used) == blocks  # two blocks of prompt, and one of 3 written tokens for each output


@pytest.mark.parametrize("name, cached", [("paged", 0), ("prefix", 12), ("radix", 13)])
def test_prefixes_are_matched_by_blocks_or_by_tokens(name, cached):
    scheduler = scheduler_of(name)
    calls = [
        Call(0.0, ((1, 13), (2, 5)), 1, 3), Call(9.0, ((1, 13), (4, 5)), 1, 5),
    ]  # fmt: skip
    drive(VirtualEngine(scheduler, OneSecond()), Schedule(calls))
    assert scheduler.prefix_hits == cached


# Memory


def test_kinds_of_memory_by_hand():
    scheduler = scheduler_of("orca-max")
    scheduler.add("a", [1] * 9, SamplingParams(max_tokens=13, ignore_eos=True), seed=0)
    step(scheduler)
    # Of 256 slots, 9 hold tokens, 12 further ones will (the last token is never written), 43 of 64 never do.
    assert kinds(scheduler) == Kinds(9 / 256, 12 / 256, 43 / 256, 192 / 256)


def test_kinds_of_memory_of_pages_and_of_shared_blocks():
    scheduler = scheduler_of("paged")
    scheduler.add("a", [1] * 8, SamplingParams(n=2, max_tokens=3, ignore_eos=True), seed=0)
    step(scheduler)
    assert kinds(scheduler) == Kinds(8 / 256, 0, 0, 248 / 256), "both outputs hold the same two blocks"
    step(scheduler)
    # Each writes into a block of its own: one token of two that it will hold, two slots that it never uses.
    assert kinds(scheduler) == Kinds(10 / 256, 2 / 256, 4 / 256, 240 / 256)


def test_memory_is_watched_only_while_requests_wait():
    watch = MemoryWatch(every=1)
    scheduler = POLICIES["orca-max"].make(LIMITS, 64, VOCAB_SIZE)
    engine = VirtualEngine(scheduler, OneSecond(), on_plan=watch)
    drive(engine, Schedule([call(4, 2), call(4, 2, text=3)]))
    assert watch.running == [1, 1], "the second request waits for the two steps of the first one"
    assert sum(watch.mean()) == pytest.approx(1) and watch.mean().tokens == 4.5 / 64
    assert MemoryWatch().mean() is None and MemoryWatch().mean_running() is None


# Traces


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_seed_decides_a_trace_and_its_arrivals_have_the_rate(name):
    one, same, other = (WORKLOADS[name](400, 2.0, seed=seed) for seed in (1, 1, 2))
    assert one == same != other and len(one) == 400
    assert one[-1].arrival == pytest.approx(200, rel=0.2)
    assert max(each.num_prompt_tokens + each.output for each in one) <= 2048
    assert {(each.width, each.beam) for each in one} == {
        (int(name.split()[-1]) if "," in name else 1, "beam" in name)
    }  # fmt: skip


def test_few_shot_prompts_share_their_prefix():
    for shots, tokens in SHOTS.items():
        calls = WORKLOADS[f"{shots}-shot"](50, 1.0)
        assert {each.prompt[0] for each in calls} == {(0, tokens)} and len({each.prompt[1] for each in calls}) == 50


def test_chatbot_prompts_hold_the_end_of_the_history():
    calls = chatbot(2000, 1.0)
    assert max(each.num_prompt_tokens for each in calls) == HISTORY
    assert statistics.fmean(each.num_prompt_tokens == HISTORY for each in calls) > 0.3
    by_answer = {each.answer: each for each in calls}
    for each in calls:
        if len(each.prompt) > 1:  # not cut: the history ends with an answer to an earlier round
            text, tokens = each.prompt[-2]
            assert by_answer[text].output == tokens and each.prompt[:-2] == by_answer[text].prompt


def test_a_scaled_trace_has_a_quarter_of_the_lengths():
    whole, quarter = (WORKLOADS["sharegpt"](4000, 1.0, scale=scale) for scale in (1.0, 0.25))
    for attribute in ("num_prompt_tokens", "output"):
        means = [statistics.fmean(getattr(each, attribute) for each in calls) for calls in (whole, quarter)]
        assert means[1] == pytest.approx(means[0] / 4, rel=0.05)
    assert max(each.num_prompt_tokens + each.output for each in quarter) <= 512


def test_a_trace_is_saved_from_the_command_line_and_read_again(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    assert main(["chatbot", "--rate", "2", "--count", "30", "--save", str(path)]) == 0
    assert load_trace(path) == chatbot(30, 2.0) and "30 requests" in capsys.readouterr().out


def test_a_file_in_sharegpts_form_becomes_a_trace(tmp_path):
    source, path = tmp_path / "sharegpt.json", tmp_path / "trace.jsonl"
    source.write_text(
        '[{"conversations": [{"from": "human", "value": "Who lives in the old mill?"},'
        ' {"from": "gpt", "value": "The little fox lives in the old mill."}]},'
        ' {"conversations": [{"from": "gpt", "value": "no question"}]}]'
    )
    assert main(["file", "--rate", "1", "--file", str(source), "--save", str(path)]) == 0
    (only,) = load_trace(path)
    assert 3 < only.num_prompt_tokens < 20 and 3 < only.output < 20
    with pytest.raises(SystemExit):
        main(["sharegpt", "--rate", "1", "--file", str(source), "--save", str(path)])

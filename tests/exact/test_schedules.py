"""Each request has the tokens and logprobs that it has alone, to the bit, under every schedule."""

import dataclasses
import random

import pytest

from jpaged.config import DRAFTING_SEQS
from jpaged.core.memory import Memory
from jpaged.core.pooling import POOLINGS
from jpaged.runtime import step
from pallas_kernels import ROW_ORDER
from tests.exact.asked import KINDS, Asked
from tests.exact.cases import Case, runner_of
from tests.exact.conftest import FEW, SMALL, Subject, small_subject, subject_of
from tests.exact.schedules import SEQS, TOKENS, Schedule, run
from tests.support.kernel_code import optimized

pytestmark = pytest.mark.slow

MODELS = ("demo", "llama", "gemma3", "gemma2", "qwen3-moe", "qwen3.5")
EVERY = [
    *(Case(model, dtype, kernels) for model in MODELS for dtype in ("float32", "bfloat16")
      for kernels in ("auto", "reference")),
    *(Case("llama", dtype, kernels, quantization) for quantization in ("int8", "int4", "fp8")
      for dtype in ("float32", "bfloat16") for kernels in ("auto", "reference")),
    *(Case("llama", dtype, kernels, "int4", activation_dtype="int8") for dtype in ("float32", "bfloat16")
      for kernels in ("auto", "reference")),
    *(Case("llama", dtype, kernels, kv_cache_dtype="fp8") for dtype in ("float32", "bfloat16")
      for kernels in ("auto", "reference")),
]  # fmt: skip


# Matches of single tokens, most of which are wrong, and past outputs, most of which are right.
PROPOSERS = ({"method": "ngram", "prompt_lookup_min": 1}, {"method": "suffix"})
DRAFT_MODEL = {"model": "the model with other weights"}  # the drafting runner of the subject


def of_few_blocks(schedule: Schedule, preemption: str) -> Schedule:
    return schedule._replace(blocks=max(16, 3 * schedule.seqs // 2), preemption=preemption)


def check(subject: Subject, seqs: int, tokens: int, *, every: bool = True) -> None:
    """Compare the requests together, in three orders, in chunks of several sizes, from the prefix cache and swapped.

    Without `every`: in one order, in chunks of one size, with a cache and with steps that overlap.
    """
    usual = Schedule(tokens, seqs)
    together = subject.run(usual)
    assert together.bits == subject.alone and together.scheduler.prefix_hits > 0
    for size in (4, 7, 64) if every else (7,):
        assert subject.differing(Schedule(size, min(size, seqs), caches=size != 64)) == [], f"steps of {size} tokens"
    swapped = subject.run(of_few_blocks(usual, "swap"))
    assert swapped.bits == subject.alone
    assert swapped.scheduler.num_preemptions > 0 and swapped.scheduler.num_swapped_blocks > 0
    again = subject.run(of_few_blocks(usual, "swap"), subject.asked * 2, together=False)
    assert again.bits == subject.alone * 2 and again.scheduler.memory.tier.num_back > 0, "prefixes come from the host"
    recomputed = subject.run(of_few_blocks(usual._replace(exact=True), "recompute"))
    assert recomputed.bits == subject.alone and recomputed.scheduler.num_preemptions > 0
    if not every:
        return
    for seed in range(2):
        order = random.Random(seed).sample(range(len(subject.asked)), len(subject.asked))
        shuffled = subject.run(usual, [subject.asked[i] for i in order])
        assert shuffled.bits == [subject.alone[i] for i in order]
    for changed in (usual._replace(overlaps=False), usual._replace(caches=False)):
        assert subject.differing(changed) == [], changed
    # Steps of one token hold one sequence.
    single = [i for i, (_, params) in enumerate(subject.asked) if params.num_sequences == 1]
    assert len(single) > len(subject.asked) / 2
    stepwise = subject.run(Schedule(1, 1, caches=False), [subject.asked[i] for i in single])
    assert stepwise.bits == [subject.alone[i] for i in single]


def check_drafts(subject: Subject, proposer: dict, seqs: int, tokens: int, *, every: bool) -> None:
    """Compare the requests with drafts, each of them twice: its first output gives drafts of the second.

    Steps of half the sequences have room for their drafts in the same shapes.
    """
    config = proposer | {"num_speculative_tokens": max(1, seqs // 2 // DRAFTING_SEQS)}
    usual = Schedule(tokens, seqs // 2, speculative_config=config)
    drafted = subject.run(usual, 2 * subject.asked)
    assert drafted.bits == 2 * subject.alone
    kept, dropped = drafted.scheduler.num_kept, drafted.scheduler.num_drafts - drafted.scheduler.num_kept
    assert (dropped if proposer.get("method") == "ngram" else kept) > 0
    schedules = [of_few_blocks(usual, "swap")]
    if every:
        schedules += [of_few_blocks(usual._replace(exact=True), "recompute"), usual._replace(overlaps=False)]
        schedules += [usual._replace(tokens=7, seqs=min(7, usual.seqs)), usual._replace(caches=False)]
    for schedule in schedules:
        ran = subject.run(schedule, 2 * subject.asked)
        assert ran.bits == 2 * subject.alone, schedule
        # In small steps the draft model reads a prompt for as long as the outputs grow.
        assert ran.scheduler.num_drafts > 0 or schedule.tokens < usual.tokens, schedule
        assert ran.scheduler.num_preemptions > 0 or schedule.blocks == usual.blocks


def test_requests_are_of_every_kind_and_end_for_several_reasons(llama):
    assert len(llama.asked) == FEW + len(POOLINGS) == 4 * len(KINDS) + 2
    sequences = [sequence for outputs, *_ in llama.alone for sequence in outputs]
    assert len({finish for _, _, finish, *_ in sequences}) > 1
    stops = {stop for _, _, _, stop, *_ in sequences}
    assert {type(stop) for stop in stops} == {str, int, type(None)}, "stop strings, stop tokens, and neither"
    assert sum(len(outputs) == 3 for outputs, *_ in llama.alone) == FEW / 4, "choices and beams"
    assert sum(bool(prompt) for _, prompt, _ in llama.alone) > FEW / 4, "logprobs of prompts"


def test_a_schedule_changes_no_bit(llama):
    check(llama, **SMALL)


def test_a_schedule_changes_no_bit_of_a_model_with_windows(gemma3, monkeypatch):
    left, leave = [], Memory.leave

    def count(memory, sequence, position):
        before = len(sequence.table.held)
        leave(memory, sequence, position)
        left.append(before - len(sequence.table.held))

    monkeypatch.setattr(Memory, "leave", count)
    check(gemma3, **SMALL, every=False)
    assert sum(left) > 50, "windows have passed blocks"


def test_a_schedule_changes_no_bit_of_a_model_with_recurrent_layers(qwen35):
    check(qwen35, **SMALL, every=False)
    check_drafts(qwen35, PROPOSERS[1], **SMALL, every=False)


def test_a_schedule_changes_no_bit_of_rows_of_int8(tmp_path):
    subject = small_subject(Case("llama", "bfloat16", quantization="int4", activation_dtype="int8"), tmp_path)
    check(subject, **SMALL, every=False)
    check_drafts(subject, PROPOSERS[1], **SMALL, every=False)


@pytest.mark.parametrize("proposer", PROPOSERS, ids=str)
def test_drafts_change_no_bit(llama, proposer):
    check_drafts(llama, proposer, **SMALL, every=False)


@pytest.mark.deep
def test_a_schedule_changes_no_bit_of_the_reference(tmp_path):
    limits = SMALL | {"tokens": 64}
    subject = subject_of(Case("llama", kernels="reference"), tmp_path, **limits)
    check(subject, **limits)
    for proposer in PROPOSERS:
        check_drafts(subject, proposer, **limits, every=True)


@pytest.mark.xfail(strict=True, reason="without `exact`, generated tokens are computed again in a prompt's order")
def test_a_recompute_changes_no_bit(llama):
    assert llama.differing(of_few_blocks(Schedule(**SMALL), "recompute")) == []


def test_steps_are_compiled_with_one_order_of_a_row():
    assert step.model_options("cpu", has_quantized_weights=False) == step.sampling_options("cpu") == ROW_ORDER


@pytest.fixture(scope="module")
def as_users_compile():
    """Optimized code, which computes many numbers at once; other tests do without."""
    with optimized(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "ROW_ORDER", ROW_ORDER | {"xla_backend_optimization_level": "3"})
        yield


@pytest.mark.deep
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_a_schedule_changes_no_bit_in_optimized_code(case, as_users_compile, tmp_path):
    subject = subject_of(case, tmp_path, seqs=SEQS, tokens=TOKENS)
    check(subject, SEQS, TOKENS)
    for proposer in PROPOSERS:
        check_drafts(subject, proposer, SEQS, TOKENS, every=True)
    other = case._replace(quantization="fp8" if case.quantization == "int8" else "int8", activation_dtype="auto")
    drafting, _ = runner_of(other, tmp_path, seqs=SEQS, tokens=TOKENS)
    check_drafts(subject._replace(drafting=drafting), DRAFT_MODEL, SEQS, TOKENS, every=True)


def test_a_prompt_that_begins_with_another_request_s_prompt_has_its_bits_alone(llama):
    """At every length that is found in the cache, whole blocks and a part of one."""
    text = llama.asked[0].prompt[:1] * 3 + list(range(40))
    params = dataclasses.replace(llama.asked[0].params, prompt_logprobs=None)
    asked = [Asked(text[:count], params) for count in (9, 16, 17, 24, 31, 43)]
    alone = [llama.run(Schedule(**SMALL), [each]).bits[0] for each in asked]
    after = run(llama.runner, llama.tokenizer, asked, Schedule(**SMALL), together=False)
    assert after.bits == alone and after.scheduler.prefix_hits > 60

"""Compilation beside traffic: the thread, and an engine that is ready with one shape."""

import gc
import logging
import subprocess
import sys
import threading

import pytest

from jpaged import LLM, ModelConfig, SamplingParams
from jpaged.runtime import runner
from jpaged.runtime.background import Background
from jpaged.runtime.batch import Bucket
from tests.runtime.test_runner import Compilations
from tests.support.random_model import random_model

LLAMA = ModelConfig(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
)  # fmt: skip
LARGEST, OTHERS = Bucket(64, 4, False), [Bucket(1, 1, True), Bucket(4, 4, True)]


class Owner:
    """Owner of a thread."""


def test_jobs_run_in_order(caplog):
    done, owner = [], Owner()
    with caplog.at_level(logging.INFO):
        Background(owner, [lambda i=i: done.append(i) for i in range(3)]).wait()
    assert done == [0, 1, 2] and caplog.messages[-1] == "all shapes are compiled"


def test_the_thread_ends_with_its_owner_after_the_job_that_runs():
    done, running, may_end, owner = [], threading.Event(), threading.Event(), Owner()

    def first():
        running.set()
        may_end.wait()
        done.append("first")

    thread = Background(owner, [first, lambda: done.append("second")])
    running.wait()
    del owner
    gc.collect()
    may_end.set()
    thread.wait()
    assert done == ["first"]


def test_a_job_that_fails_is_logged_and_the_last(caplog):
    def fail():
        raise RuntimeError("no room")

    done, owner = [], Owner()
    Background(owner, [fail, lambda: done.append(1)]).wait()
    assert not done and "larger ones serve their steps" in caplog.text and "no room" in caplog.text


def test_a_program_ends_while_a_job_runs_once_it_is_done():
    program = """
import threading, time
from jpaged.runtime.background import Background
class Owner: pass
owner, running = Owner(), threading.Event()
def first():
    running.set()
    time.sleep(0.2)
    print("first", flush=True)
thread = Background(owner, [first, lambda: print("second", flush=True)])
running.wait()
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "first\n" and not found.stderr


class Held:
    """A background whose jobs the test runs."""

    def __init__(self, owner, jobs):
        self.jobs = jobs

    def run(self):
        for job in self.jobs:
            job()


@pytest.fixture
def llm(monkeypatch):
    """An engine whose other shapes wait for the test."""
    monkeypatch.setattr(runner, "Background", Held)
    model = random_model(LLAMA, "float32", seed=0)
    return LLM(model, block_size=8, num_gpu_blocks_override=40, progress=False, max_num_seqs=4,
               max_num_batched_tokens=64)  # fmt: skip


PROMPTS = [[5, 6, 7], list(range(90)), [8]]
PARAMS = [
    SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=1), SamplingParams(max_tokens=5, temperature=0),
    SamplingParams(max_tokens=6, temperature=0, n=2, presence_penalty=1, prompt_logprobs=1),
]  # fmt: skip


def answers(llm):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.reset_prefix_cache()
    # XLA's sums in other shapes may differ in their last bits.
    return [[(each.token_ids, round(each.cumulative_logprob, 3)) for each in output.outputs] for output in outputs]


def used(llm, monkeypatch):
    """Returns the set of the shapes of steps from now on."""
    found, forward = set(), llm.engine.runner._forward
    monkeypatch.setattr(
        llm.engine.runner,
        "_forward",
        lambda buffer, bucket, *slots: found.add(bucket) or forward(buffer, bucket, *slots),
    )
    return found


@pytest.mark.slow
def test_one_shape_serves_all_requests_and_others_join_without_a_difference(llm, monkeypatch):
    found = used(llm, monkeypatch)
    alone = answers(llm)
    assert found == {LARGEST} == set(llm.engine.runner.shapes.buckets.all)
    llm.engine.runner.background.run()
    assert set(llm.engine.runner.shapes.buckets.all) >= {LARGEST, *OTHERS}
    with Compilations() as compilations:
        assert answers(llm) == alone
    assert compilations.count == 0, "calls use the executables that were compiled ahead"
    assert found > {LARGEST}


@pytest.mark.slow
def test_shapes_join_a_sleeping_engine_and_one_with_other_parameters(llm):
    before = answers(llm)
    llm.sleep()
    llm.engine.runner.background.run()
    llm.wake_up()
    assert answers(llm) == before
    llm.update_params(random_model(LLAMA, "float32", seed=1))
    with Compilations() as compilations:
        assert answers(llm) != before
    assert compilations.count == 0


@pytest.mark.slow
@pytest.mark.parametrize("warm_up", [pytest.param(True, marks=pytest.mark.deep), False])
def test_a_setting_leaves_nothing_to_the_background(monkeypatch, warm_up):
    monkeypatch.setattr(runner, "Background", None)
    model = random_model(LLAMA, "float32", seed=0)
    llm = LLM(model, block_size=8, num_gpu_blocks_override=40, progress=False, max_num_seqs=4,
              max_num_batched_tokens=64, warm_up=warm_up)  # fmt: skip
    assert set(llm.engine.runner.shapes.buckets.all) == {LARGEST, *OTHERS}
    assert llm.engine.runner.late == (set() if warm_up else {LARGEST, *OTHERS})

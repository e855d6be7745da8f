"""Everything that shares blocks, on real models, in pools with room and in pools so small that requests are preempted,
by recompute and by swap: each request has its result alone."""

import functools
import json
import random

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jpaged.config import EngineConfig, Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine
from jpaged.models.checkpoint import Form, load_safetensors
from jpaged.models.registry import read_config
from jpaged.runtime.batch import Bucket, Buckets
from jpaged.runtime.runner import ModelRunner
from tests.oracle import make_beam_fixtures
from tests.support import checkpoints, runners
from tests.support.models import byte_tokenizer

pytestmark = pytest.mark.slow

FIXTURES = json.loads(make_beam_fixtures.FIXTURE.read_text())
BLOCK, ROOM, HOST = 4, 640, 300
LIMITS = Limits(max_model_len=96, max_num_seqs=64, max_num_batched_tokens=64, block_size=BLOCK)
# Blocks of the pool, and the preemption mode.
POOLS = {"room": (ROOM, "recompute"), "recompute": (100, "recompute"), "swap": (100, "swap")}


@pytest.fixture(scope="module")
def runner_of(tmp_path_factory):
    """runner_of(model, seed): one runner for each architecture, with the parameters of the seed put in."""

    def load(name: str, seed: int):
        config, directory = checkpoints.CASES[name], tmp_path_factory.mktemp(name)
        checkpoints.write(directory, config)
        save_file(make_beam_fixtures.sharpen(checkpoints.tensors(config, seed)), directory / "model.safetensors")
        return load_safetensors(directory, read_config(directory), Form("float32"), progress=False)

    @functools.cache
    def runner(name: str) -> ModelRunner:
        config = EngineConfig(num_gpu_blocks_override=ROOM, swap_space=1.0)
        runner = runners.runner_of(load(name, 0), config, LIMITS)
        buckets = runner.shapes.buckets
        buckets.decode, buckets.mixed = (Bucket(64, 64, True),), (Bucket(64, 64, False),)  # soon compiled
        runner.blocks.host.transfers = runner.blocks.host.transfers[:1]
        return runner

    def with_seed(name: str, seed: int) -> ModelRunner:
        runner(name).params = jax.tree.leaves(nnx.split(load(name, seed))[1])
        return runner(name)

    return with_seed


def engine_on(runner: ModelRunner, pool: str, tokenizer=None) -> Engine:
    blocks, mode = POOLS[pool]
    scheduler = Scheduler(
        BlockPool(blocks, BLOCK), LIMITS, vocab_size=runner.vocab_size, preemption=mode,
        host_pool=BlockPool(HOST, BLOCK, enable_prefix_caching=False) if mode == "swap" else None,
    )  # fmt: skip
    return Engine(scheduler, runner, tokenizer)


def run(engine: Engine, requests):
    """Outputs of (prompt, params) pairs that are all there at once."""
    added = [engine.add(str(i), prompt, params) for i, (prompt, params) in enumerate(requests)]
    while engine.has_work:
        engine.step()
    scheduler = engine.scheduler
    scheduler.check_invariants()
    assert scheduler.pool.num_used == 0 and not (scheduler.host_pool and scheduler.host_pool.num_used)
    return [request.outputs for request in added]


def beam_params(options: dict, vocab_size: int) -> BeamSearchParams:
    banned = {token for (token,) in options.get("bad_words_ids", ())} | set(options.get("suppress_tokens", ()))
    return BeamSearchParams(
        beam_width=options["num_beams"], max_tokens=options["max_new_tokens"],
        length_penalty=options["length_penalty"], early_stopping=options["early_stopping"],
        stop_token_ids=options.get("eos_token_id", ()), min_tokens=options.get("min_new_tokens", 0),
        repetition_penalty=options.get("repetition_penalty", 1.0),
        allowed_token_ids=[t for t in range(vocab_size) if t not in banned] if banned else None,
    )  # fmt: skip


# One model in the usual tier: the logits of each equal transformers' in test_logits.py.
MODELS = [
    pytest.param(name, marks=[] if name == "gqa-tied" else pytest.mark.deep)
    for name in sorted({case["model"] for case in FIXTURES})
]


@pytest.mark.parametrize(
    "pool", [*(pytest.param(pool, marks=pytest.mark.deep) for pool in ("room", "recompute")), "swap"]
)
@pytest.mark.parametrize("model", MODELS)
def test_beam_search_equals_transformers(model, pool, runner_of):
    """Tokens and scores; where blocks are few, all searches run at once and preempt each other."""
    preempted = swapped = 0
    for seed in sorted({case["seed"] for case in FIXTURES if case["model"] == model}):
        cases = [case for case in FIXTURES if (case["model"], case["seed"]) == (model, seed)]
        engine = engine_on(runner_of(model, seed), pool)
        found = run(
            engine, [(case["prompt"], beam_params(case["options"], engine.runner.vocab_size)) for case in cases]
        )
        for case, hypotheses in zip(cases, found, strict=True):
            assert [h.output_token_ids for h in hypotheses] == [tokens for _, tokens in case["hypotheses"]]
            penalty = case["options"]["length_penalty"]
            scores = [h.cumulative_logprob / h.num_output_tokens**penalty for h in hypotheses]
            np.testing.assert_allclose(scores, [score for score, _ in case["hypotheses"]], atol=2e-4, rtol=0)
        preempted += engine.scheduler.num_preemptions
        swapped += engine.scheduler.num_swapped_blocks
    assert (preempted > 0) == (pool != "room") and (swapped > 0) == (pool == "swap")


# Every parameter at once


def any_request(rng: random.Random, words: list[str]) -> tuple[list[int], SamplingParams | BeamSearchParams]:
    """A request with parameters of its own, most of them set."""

    def often(value, default=None):
        return value if rng.random() < 0.6 else default

    prompt = [rng.randrange(3)] * rng.randrange(12) + [rng.randrange(96) for _ in range(rng.randint(1, 20))]
    common = {
        "max_tokens": rng.randint(4, 16),
        "min_tokens": often(4, 0),
        "stop_token_ids": often([rng.randrange(96) for _ in range(12)], ()),
        "presence_penalty": often(rng.uniform(-2, 2), 0.0),
        "frequency_penalty": often(rng.uniform(-2, 2), 0.0),
        "repetition_penalty": often(rng.uniform(0.7, 1.6), 1.0),
        "logit_bias": often({rng.randrange(96): rng.uniform(-5, 5) for _ in range(6)}),
        "allowed_token_ids": often(rng.sample(range(96), 60)),
        "bad_words": often(rng.sample(words, 20), ()),
        "logprobs": often(rng.randint(0, 20)),
        "prompt_logprobs": often(rng.randint(0, 20)),
        "truncate_prompt_tokens": often(rng.randint(1, 30)),
    }
    if rng.random() < 0.25:
        return prompt, BeamSearchParams(beam_width=rng.randint(1, 5), length_penalty=rng.uniform(0, 2), **common)
    return prompt, SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]), best_of=often(3), seed=rng.getrandbits(64),
        temperature=rng.choice([0.0, 0.4, 1.0]), top_k=often(rng.randint(1, 40), 0),
        top_p=often(rng.uniform(0.3, 1), 1.0), min_p=often(rng.uniform(0, 0.2), 0.0), **common,
    )  # fmt: skip


def outcome(sequences) -> list:
    """Return the result of a request with rounded logprobs."""
    return [(s.output_token_ids, s.text, s.finish_reason, s.stop_reason) for s in sequences]


def logprobs(sequences) -> list[float]:
    request = sequences[0].request
    samples = [*request.prompt_samples, *(sample for sequence in sequences for sample in sequence.samples)]
    return [value for s in samples for value in (s.logprob, *s.top_logprobs)]


def test_each_request_gives_alone_what_it_gives_beside_64_others_and_after_preemptions(runner_of):
    rng, runner = random.Random(5), runner_of("gqa-tied", 0)
    tokenizer = byte_tokenizer()
    words = [tokenizer.decode([a, b]) for a in range(40) for b in range(40)][:: rng.randint(3, 7)]
    words += [tokenizer.decode([a]) for a in range(20)]
    requests = [any_request(rng, words) for _ in range(64)]
    alone = []
    for request in requests:
        alone += run(engine_on(runner, "room", tokenizer), [request])
    for pool in POOLS:
        engine = engine_on(runner, pool, tokenizer)
        together = run(engine, requests)
        assert (engine.scheduler.num_preemptions > 0) == (pool != "room")
        assert (engine.scheduler.num_swapped_blocks > 0) == (pool == "swap")
        for mine, theirs in zip(alone, together, strict=True):
            assert outcome(mine) == outcome(theirs)
            # All steps have one shape here, so the bits are equal: attention depends on nothing else in the step. After
            # a recompute, generated tokens are attended as rows of a prompt, which agree to rounding.
            atol = 1e-5 if pool == "recompute" else 0
            np.testing.assert_allclose(logprobs(mine), logprobs(theirs), atol=atol, rtol=0)
    assert len({s.finish_reason for sequences in alone for s in sequences}) > 1, "some must end early"


@pytest.mark.deep
def test_logprobs_alone_and_beside_64_others_have_the_same_bits_in_the_usual_shapes(runner_of, monkeypatch):
    rng, runner, tokenizer = random.Random(6), runner_of("gqa-tied", 0), byte_tokenizer()
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=2)
    requests = [([rng.randrange(96) for _ in range(rng.randint(1, 20))], params) for _ in range(64)]
    monkeypatch.setattr(runner.shapes, "buckets", Buckets(LIMITS))
    alone = [run(engine_on(runner, "room", tokenizer), [request])[0] for request in requests]
    together = run(engine_on(runner, "room", tokenizer), requests)
    assert [outcome(sequences) for sequences in alone] == [outcome(sequences) for sequences in together]
    assert list(map(logprobs, alone)) == list(map(logprobs, together))


def test_choices_are_what_their_seeds_give_alone(runner_of):
    engine = engine_on(runner_of("gqa-tied", 0), "room")
    params = {"max_tokens": 12, "temperature": 0.8, "frequency_penalty": 0.5}
    requests = [([7, 8, 9], SamplingParams(n=4, seed=2**64 - 2, **params))]
    requests += [([7, 8, 9], SamplingParams(seed=(2**64 - 2 + i) % 2**64, **params)) for i in range(4)]
    together, *alone = run(engine, requests)
    assert outcome(together) == [outcome(sequences)[0] for sequences in alone]
    assert len({tuple(s.output_token_ids) for s in together}) == 4


def test_the_best_of_several_come_back_best_first(runner_of):
    engine = engine_on(runner_of("gqa-tied", 0), "room")
    params = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "stop_token_ids": list(range(0, 96, 7))}
    best, every = run(
        engine, [([40, 2], SamplingParams(n=2, best_of=6, **params)), ([40, 2], SamplingParams(n=6, **params))]
    )
    ranked = sorted(every, key=lambda s: -s.cumulative_logprob / s.num_output_tokens)
    assert outcome(best) == outcome(ranked[:2]) and len({s.num_output_tokens for s in every}) > 1

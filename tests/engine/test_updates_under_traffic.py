"""Updates of parameters in all ways while requests of every kind run in a pool that is too small for them."""

import dataclasses

import jax
import pytest

from jpaged import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.core.block_pool import BlockPool
from jpaged.core.commands import UpdateParams
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine
from tests.serving.client import build
from tests.support import models
from tests.support.trees import nested

pytestmark = pytest.mark.slow

BLOCKS = 24
LONG = dict(max_tokens=40, ignore_eos=True)
PHRASE = "[a-z ]{40}"
STORY = "once upon a time "


@pytest.fixture(scope="module")
def engines(tiny):
    """Two engines of a model whose tokens are characters; the second one has only ever had the new parameters."""
    return with_few_blocks(build(tiny).engine), with_few_blocks(build(tiny).engine)


def with_few_blocks(whole):
    """An engine on the runner of another one."""
    limits = dataclasses.replace(whole.limits, max_num_seqs=8, max_num_batched_tokens=32)
    scheduler = Scheduler(
        BlockPool(BLOCKS, limits.block_size), limits, vocab_size=whole.scheduler.vocab_size, eos_token_ids=[models.EOS],
        host_pool=BlockPool(64, limits.block_size, enable_prefix_caching=False), preemption="swap",
    )  # fmt: skip
    return Engine(scheduler, whole.runner, whole.tokenizer, max_in_flight=2)


@pytest.fixture
def parameters(engines):
    """The old and the new parameters, as nested dicts by the names of the engine's."""
    served, fresh = engines
    old = served.runner.params
    new = [jax.numpy.flip(x) for x in old]
    trees = [nested(dict(zip(served.runner.tree.expected, arrays, strict=True))) for arrays in (old, new)]
    fresh.control(UpdateParams(trees[1]))
    yield trees
    served.control(UpdateParams(trees[0]))


def start(engine):
    """One request of each kind; those whose further tokens a fresh engine can tell come first."""
    ids = lambda text: engine.tokenizer.encode(text).ids
    phrase = StructuredOutputsParams(regex=PHRASE)
    return [
        engine.add("greedy", ids(STORY + "a"), SamplingParams(temperature=0, **LONG)),
        engine.add("drawn", ids(STORY + "b"), SamplingParams(seed=2**40, top_p=0.9, **LONG)),
        engine.add("four", ids(STORY), SamplingParams(n=4, seed=5, temperature=0.8, **LONG)),
        engine.add("phrase", ids("c"), SamplingParams(seed=6, structured_outputs=phrase, max_tokens=40),
                   constraint=engine.grammar_compiler().compile(phrase)),
        engine.add("beam", ids(STORY), BeamSearchParams(beam_width=3, max_tokens=30, ignore_eos=True)),
    ]  # fmt: skip


def finish(engine):
    while engine.has_work:
        engine.step()
    engine.scheduler.check_invariants()
    assert engine.scheduler.pool.num_used == 0


def continued(fresh, request, sequence, count):
    """The tokens after the first `count` ones of a sequence, by an engine without the old parameters."""
    params = dataclasses.replace(request.params, n=1, seed=sequence.seed % 2**63, max_tokens=40 - count)
    constraint = None
    if params.structured_outputs:
        rest = StructuredOutputsParams(regex=f"[a-z ]{{{40 - count}}}")
        params = dataclasses.replace(params, structured_outputs=rest)
        constraint = fresh.grammar_compiler().compile(params.structured_outputs)
    found = fresh.add("fresh", sequence.tokens[: sequence.num_prompt_tokens + count], params, constraint=constraint)
    finish(fresh)
    return found.sequences[0].output_token_ids


@pytest.mark.parametrize("in_flight", ["recompute", "keep", "wait"])
@pytest.mark.parametrize("steps", [pytest.param(4, marks=pytest.mark.deep), 25])
def test_tokens_after_an_update(engines, parameters, in_flight, steps):
    served, fresh = engines
    preempted = served.scheduler.num_swapped_blocks
    requests = start(served)
    for _ in range(steps):
        served.step()
    first = served.runner.params_version
    begun = {request.request_id: request.admitted for request in requests}
    counts = {id(s): s.num_output_tokens for request in requests for s in request.sequences}
    served.control(UpdateParams(parameters[1], in_flight))
    served.scheduler.check_invariants()
    finish(served)
    assert served.scheduler.num_swapped_blocks > preempted, "the pool was too small"
    for request in requests:
        for sequence in request.outputs:
            versions = [sample.version for sample in sequence.samples]
            assert versions == sorted(versions) and set(versions) <= {first, first + 1}
            if in_flight == "wait":
                assert set(versions) == {first if begun[request.request_id] else first + 1}
            elif in_flight == "recompute" and not request.beam:
                count = counts.get(id(sequence), 0)
                assert versions == [first] * count + [first + 1] * (40 - count)
                assert sequence.output_token_ids[count:] == continued(fresh, request, sequence, count)
    later = start(served)
    expected = start(fresh)
    finish(served), finish(fresh)
    for mine, theirs in zip(later, expected):
        tokens = [[sequence.output_token_ids for sequence in request.outputs] for request in (mine, theirs)]
        assert tokens[0] == tokens[1], "no block of the old parameters is matched"

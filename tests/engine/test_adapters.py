"""Adapters in an engine: answers do not depend on neighbours, slots or schedule, and nothing is compiled."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, BeamSearchParams, InvalidParameter, LoRARequest, SamplingParams, load
from jpaged.rl import RolloutWorker
from jpaged.rl.causal import token_logprobs
from tests.core.test_adapter_slots import assert_slots
from tests.models.test_adapters import write_adapter
from tests.runtime.test_runner import Compilations
from tests.support import checkpoints, models
from tests.support.few_shapes import few_shapes

RANKS = 2 * (1, 8, 5, 4)  # each further rank has shapes of its own to compile
NAMES = [f"a{i}" for i in range(len(RANKS))]
GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)


def tree_of(form, seed: int, rank: int, size: float = 0.5) -> dict:
    """A trainer's arrays of an adapter of all layers."""
    rng, tree = np.random.default_rng(seed), {}
    for name, (outputs, inputs) in form.layers.items():
        node = tree
        for each in name.split("."):
            node = node.setdefault(each, {})
        node["lora_a"] = jnp.asarray(rng.normal(size=(inputs, rank)) * inputs**-0.5, jnp.float32)
        node["lora_b"] = jnp.asarray(rng.normal(size=(rank, outputs)) * size, jnp.float32)
    return tree


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    checkpoints.write(directory, models.TINY | {"num_hidden_layers": 1}, generation={"eos_token_id": models.EOS})
    models.write_tokenizer(directory)
    return directory


def engine(directory, **settings) -> LLM:
    settings = dict(
        max_num_seqs=8, max_num_batched_tokens=32, max_model_len=96, block_size=8, num_gpu_blocks_override=22,
        swap_space=0, preemption_mode="recompute", exact=True, seed=1, progress=False,
    ) | settings  # fmt: skip
    with few_shapes():
        return LLM(str(directory), **settings)


@pytest.fixture(scope="module")
def llm(directory) -> LLM:
    """An engine with two slots, eight adapters of four ranks, and blocks for few requests."""
    llm = engine(directory, enable_lora=True, max_loras=2, max_lora_rank=8)
    llm.engine.scheduler.headroom = 0  # so that requests are preempted
    form = llm.engine.runner.adapters.form
    for number, name in enumerate(NAMES):
        llm.load_adapter(name, tree_of(form, number, RANKS[number]), scale=1 + number / 4)
    return llm


def bits(output) -> list:
    return [
        [(token, float(ranked[token].logprob).hex()) for token, ranked in zip(each.token_ids, each.logprobs)]
        for each in output.outputs
    ]


def asked() -> list:
    """(prompt, parameters, adapter) of mixed requests, whose prompts share beginnings."""
    rng = random.Random(3)
    texts = ["abcdefghij" * 3, "abcdefghij" * 2 + "xyz", "q", "hello world " * 3]
    params = [
        GREEDY,
        dataclasses.replace(GREEDY, temperature=1.0, seed=5),
        dataclasses.replace(GREEDY, temperature=0.8, n=3, seed=7, presence_penalty=0.5),
        BeamSearchParams(beam_width=3, max_tokens=10),
    ]
    return [(rng.choice(texts), rng.choice(params), rng.choice([None, *NAMES])) for _ in range(36)]


def generate(llm: LLM, requests: list) -> list:
    prompts, params, adapters = map(list, zip(*requests))
    return llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)


def shown(output) -> list:
    return bits(output) if output.outputs[0].logprobs else [(each.token_ids, each.text) for each in output.outputs]


class TestAnswers:
    def test_together_as_alone(self, llm):
        """With chunks, shared prefixes, forks, beams, preemption, and slots that change their adapters."""
        requests = asked()
        before = llm.engine.stats().num_preemptions
        together = [shown(each) for each in generate(llm, requests)]
        assert llm.engine.stats().num_preemptions > before
        for request, found in zip(requests, together, strict=True):
            llm.reset_prefix_cache()
            assert shown(*generate(llm, [request])) == found, request

    def test_rows_of_the_model_alone_have_its_bits(self, llm, directory):
        base, requests = engine(directory), asked()
        alone = [(prompt, params, None) for prompt, params, adapter in requests if adapter is None]
        expected = [shown(each) for each in base.generate(*map(list, list(zip(*alone))[:2]), use_tqdm=False)]
        found = [shown(each) for each, (*_, adapter) in zip(generate(llm, requests), requests) if adapter is None]
        assert found == expected

    def test_of_chats_and_beams(self, llm):
        messages, template = [{"role": "user", "content": "abc"}], "{{ messages[0].content }}"
        (chat,) = llm.chat(messages, GREEDY, False, chat_template=template, lora_request="a1")
        assert chat.outputs[0].token_ids == llm.generate("abc", GREEDY, lora_request="a1")[0].outputs[0].token_ids
        beams = BeamSearchParams(beam_width=2, max_tokens=6)
        (found,) = llm.beam_search("abc", beams, use_tqdm=False, lora_request="a1")
        assert shown(found) == shown(*generate(llm, [("abc", beams, "a1")]))
        assert shown(found) != shown(*generate(llm, [("abc", beams, None)]))

    def test_adapters_share_no_prefix(self, llm):
        prompt = "the same text of several blocks"
        llm.reset_prefix_cache()
        cached = [
            llm.generate(prompt, GREEDY, lora_request=name, use_tqdm=False)[0].num_cached_tokens
            for name in ("a0", "a1", None, "a0")
        ]
        assert cached[:3] == [0, 0, 0]
        assert cached[3] > 0

    @pytest.mark.deep
    def test_drafts_change_no_bit(self, llm, directory):
        drafting = engine(
            directory, enable_lora=True, max_loras=2, max_lora_rank=8,
            speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        )  # fmt: skip
        form = drafting.engine.runner.adapters.form
        for number, name in enumerate(NAMES):
            drafting.load_adapter(name, tree_of(form, number, RANKS[number]), scale=1 + number / 4)
        requests = [each for each in asked() if isinstance(each[1], SamplingParams)]
        assert [shown(each) for each in generate(drafting, requests)] == [
            shown(each) for each in generate(llm, requests)
        ]
        assert drafting.engine.stats().num_drafts > 0


class TestLoading:
    def test_an_update_changes_no_bit_of_another_adapter_and_compiles_nothing(self, llm):
        form = llm.engine.runner.adapters.form
        ask = lambda name: shown(*generate(llm, [("abc", GREEDY, name)]))
        llm.load_adapter("changing", tree_of(form, 10, 4))
        before = {name: ask(name) for name in (None, "a1", "changing")}
        with Compilations() as compilations:
            for number in range(3):
                llm.load_adapter("changing", tree_of(form, 11 + number, 4))
                after = {name: ask(name) for name in before}
        assert compilations.count == 0
        assert after["changing"] != before.pop("changing")
        assert {name: after[name] for name in before} == before
        llm.load_adapter("changing", tree_of(form, 10, 4))
        llm.unload_adapter("changing")

    def test_a_replaced_adapter_serves_its_requests_to_their_end(self, llm):
        form, core = llm.engine.runner.adapters.form, llm.engine
        params = dataclasses.replace(GREEDY, max_tokens=20)
        llm.load_adapter("x", tree_of(form, 20, 4))
        expected = shown(*generate(llm, [("abc", params, "x")]))
        core.add("old", llm.read_prompt("abc")[0], params, adapter="x")
        core.step()
        llm.load_adapter("x", tree_of(form, 21, 4))
        assert len(core.runner.adapters._adapters) == len(NAMES) + 2
        core.add("new", llm.read_prompt("abc")[0], params, adapter="x")
        requests = dict(core.scheduler.requests)
        while core.has_work:
            core.step()
        tokens = {name: list(each.sequences[0].output_token_ids) for name, each in requests.items()}
        assert tokens["old"] == [token for token, _ in expected[0]]
        assert tokens["new"] != tokens["old"]
        llm.unload_adapter("x")
        assert len(core.runner.adapters._adapters) == len(NAMES)

    @pytest.mark.parametrize("loads", [50, pytest.param(1000, marks=pytest.mark.deep)])
    def test_many_loads_under_traffic(self, llm, loads):
        """Loads, evictions and unloads between steps; every request ends, and the invariants hold."""
        form, core, rng = llm.engine.runner.adapters.form, llm.engine, random.Random(0)
        trees = [tree_of(form, 30 + number, 2) for number in range(4)]
        names, ended, count = [], set(), 0
        for number in range(loads):
            name = f"t{rng.randrange(12)}"
            if name in core.adapters and rng.random() < 0.4:
                llm.unload_adapter(name)
                names.remove(name)
            else:
                llm.load_adapter(name, trees[number % 4])
                names = [*{*names, name}]
            if names and len(core.scheduler.requests) < 12:
                params = dataclasses.replace(GREEDY, max_tokens=rng.randint(1, 6))
                core.add(f"r{number}", [1, 2, 3], params, adapter=rng.choice([*names, None]))
                count += 1
            ended.update(each.request_id for each in core.step().ended)
            core.scheduler.check_invariants()
        while core.has_work:
            ended.update(each.request_id for each in core.step().ended)
        assert len(ended) == count > loads / 4
        for name in names:
            llm.unload_adapter(name)
        assert len(core.runner.adapters._adapters) == len(NAMES)
        assert_slots(core.scheduler.rows.adapters, used=0)

    def test_on_several_devices(self, llm, directory):
        """Matrices are divided as the weights that they change, and updates compile nothing."""
        divided = engine(directory, enable_lora=True, max_loras=2, max_lora_rank=8, tensor_parallel_size=2, exact=False)
        store = divided.engine.runner.adapters
        for number, name in enumerate(NAMES):
            divided.load_adapter(name, tree_of(store.form, number, RANKS[number]), scale=1 + number / 4)
        requests = asked()[:12]
        tokens = lambda outputs: [[each.token_ids for each in output.outputs] for output in outputs]
        assert tokens(generate(divided, requests)) == tokens(generate(llm, requests))
        with Compilations() as compilations:
            divided.load_adapter("a1", tree_of(store.form, 70, RANKS[1]))
            generate(divided, [("abc", GREEDY, "a1")])
        assert compilations.count == 0
        size = lambda array: array.addressable_shards[0].data.nbytes / array.nbytes
        parts = {name: (size(a), size(b)) for name, (a, b) in zip(store.form.layers, store.slots, strict=True)}
        assert parts["layers.0.self_attn.q_proj"] == parts["layers.0.mlp.up_proj"] == (1, 0.5)
        assert parts["layers.0.self_attn.o_proj"] == parts["layers.0.mlp.down_proj"] == (0.5, 1)

    def test_a_directory_by_a_request_of_vllms_form(self, llm, tmp_path):
        shapes = {
            "model.layers.0.self_attn.q_proj": llm.engine.runner.adapters.form.layers["layers.0.self_attn.q_proj"]
        }
        write_adapter(tmp_path, shapes, rank=4)
        request = LoRARequest("saved", 1, str(tmp_path))
        (output,) = llm.generate("abc", GREEDY, lora_request=request, use_tqdm=False)
        assert shown(output) == shown(*generate(llm, [("abc", GREEDY, "saved")]))
        llm.unload_adapter("saved")


class TestRollouts:
    def test_of_an_adapter_that_is_updated(self, llm):
        """Two workers share the engine; the update of one changes nothing for the other."""
        form = llm.engine.runner.adapters.form
        params = SamplingParams(n=2, max_tokens=8, temperature=1, seed=3, ignore_eos=True)
        workers = [RolloutWorker(llm, width=32, adapter=name, scale=0.5) for name in ("one", "two")]
        for number, worker in enumerate(workers):
            worker.update(tree_of(form, 40 + number, 4))
        before = [worker.generate(["abc", "q"], params) for worker in workers]
        for worker, rollouts in zip(workers, before):
            np.testing.assert_allclose(worker.score(rollouts), rollouts.logprobs, atol=1e-4)
        assert (before[0].tokens != before[1].tokens).any()
        workers[0].update(tree_of(form, 50, 4))
        after = [worker.generate(["abc", "q"], params) for worker in workers]
        np.testing.assert_array_equal(after[1].tokens, before[1].tokens)
        np.testing.assert_array_equal(after[1].logprobs, before[1].logprobs)
        assert (after[0].tokens != before[0].tokens).any()
        for name in ("one", "two"):
            llm.unload_adapter(name)

    def test_a_trainer_has_their_logprobs_to_the_bit_and_derivatives(self, llm, directory):
        form, model = llm.engine.runner.adapters.form, load(str(directory), progress=False)
        worker, tree = RolloutWorker(llm, width=24, adapter="trained", scale=0.5), tree_of(form, 60, 5)
        worker.update(tree)
        rollouts = worker.generate(["abc", "quiz"], SamplingParams(n=2, max_tokens=8, seed=3, ignore_eos=True))

        @jax.jit
        def logprobs(tree):
            given = jnp.asarray(rollouts.tokens), jnp.asarray(rollouts.is_output), worker.numerics
            found = token_logprobs(model, *given, adapter=tree, scale=0.5)
            return jnp.where(rollouts.is_output, found, 0)

        np.testing.assert_array_equal(logprobs(tree), np.where(rollouts.is_output, rollouts.logprobs, 0))
        loss = lambda tree: logprobs(tree).sum()
        gradient = jax.grad(loss)(tree)
        rng = np.random.default_rng(0)
        direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)
        moved = lambda by: float(loss(jax.tree.map(lambda x, d: x + by * d, tree, direction)))
        expected = sum(float((g * d).sum()) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction)))
        assert (moved(1e-3) - moved(-1e-3)) / 2e-3 == pytest.approx(expected, rel=0.05)
        llm.unload_adapter("trained")


class TestErrors:
    def test_of_names(self, llm):
        with pytest.raises(
            InvalidParameter, match=r"^adapter: 'none' is not loaded; loaded: a0, a1, a2, a3, a4, a5, a6, a7$"
        ):
            llm.generate("abc", GREEDY, lora_request="none", use_tqdm=False)
        with pytest.raises(ValueError, match=r"^adapter: 'none' is not loaded$"):
            llm.unload_adapter("none")
        with pytest.raises(ValueError, match=r"^name: must be a non-empty text, not ''$"):
            llm.load_adapter("", {})
        with pytest.raises(InvalidParameter, match=r"^lora_request: must be one or as many as prompts \(2\), not 1$"):
            llm.generate(["a", "b"], GREEDY, lora_request=["a0"], use_tqdm=False)

    def test_a_rank_above_that_of_slots(self, llm):
        tree = tree_of(llm.engine.runner.adapters.form, 0, 9)
        with pytest.raises(ValueError, match=r"has rank 9, more than max_lora_rank \(8\)$"):
            llm.load_adapter("large", tree)
        assert "large" not in llm.engine.adapters

    def test_without_slots(self, directory):
        with pytest.raises(ValueError, match=r"^adapter: this engine has no slots for adapters \(enable_lora\)$"):
            engine(directory).load_adapter("x", {})

    def test_certificates_name_the_adapter(self, llm):
        params = dataclasses.replace(GREEDY, certificate=True)
        of = lambda name: llm.generate("abc", params, lora_request=name, use_tqdm=False)[0].outputs[0].certificate
        base, first, second = of(None), of("a0"), of("a1")
        assert first.parameters[0].startswith(base.parameters[0] + "+")
        assert len({each.parameters for each in (base, first, second)}) == 3

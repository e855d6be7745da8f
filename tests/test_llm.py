"""The offline API."""

import functools
import itertools
import json
import random
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

import jpaged
from jpaged import LLM, BeamSearchParams, ModelConfig, SamplingParams
from jpaged.core.params import InvalidParameter
from jpaged.tokenizer import backend
from tests.runtime.test_runner import Compilations
from tests.support import models
from tests.support.few_shapes import few_shapes
from tests.support.patience import PATIENCE_S
from tests.support.random_model import random_model

pytestmark = pytest.mark.slow

SMALL = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 32, "progress": False}


@pytest.fixture(scope="module")
def llm(tiny):
    """With a pool so small that `load` is preempted."""
    with few_shapes():
        return LLM(
            tiny, num_gpu_blocks_override=12, preemption_mode="swap", override_generation_config={"top_k": 3}, **SMALL
        )


HELLO = [104, 101, 108, 108, 111]
PROMPTS = {
    "a NumPy array": np.asarray(HELLO),
    "a JAX array": jnp.array(HELLO),
    "a tuple": tuple(HELLO),
    "JAX scalars": list(jnp.array(HELLO)),
    "NumPy scalars": list(np.array(HELLO, np.uint8)),
    "two in a JAX array": jnp.array([HELLO, HELLO]),
    "a list of arrays": [jnp.array(HELLO), np.array(HELLO)],
    "dicts": [{"prompt_token_ids": np.array(HELLO)}, {"prompt_token_ids": HELLO}],
}


@pytest.mark.parametrize("form", PROMPTS)
def test_generate_token_ids_in_any_form_give_the_same(llm, form):
    params = SamplingParams(temperature=0, max_tokens=6)
    (one,) = llm.generate(HELLO, params, use_tqdm=False)
    outputs = llm.generate(PROMPTS[form], sampling_params=params, use_tqdm=False)
    assert len(outputs) == 2 if form in ("two in a JAX array", "a list of arrays", "dicts") else 1
    for output in outputs:
        assert output.prompt is None and output.prompt_token_ids == HELLO
        assert all(type(token) is int for token in output.prompt_token_ids)
        assert output.outputs[0].token_ids == one.outputs[0].token_ids


def test_generate_text_gives_what_its_token_ids_give(llm):
    params = SamplingParams(temperature=0, max_tokens=6)
    ids = llm.get_tokenizer()("Hello").input_ids
    text, tokens, array = (
        llm.generate(prompt, params, use_tqdm=False)[0] for prompt in ("Hello", ids, np.array(["Hello"]))
    )
    assert text.prompt == array.prompt == "Hello" and text.prompt_token_ids == tokens.prompt_token_ids
    assert text.outputs[0].token_ids == tokens.outputs[0].token_ids == array.outputs[0].token_ids


def test_generate_empty_prompt_is_refused_also_where_the_tokenizer_adds_a_token(llm, monkeypatch):
    inner = backend(llm.tokenizer)
    before = inner.post_processor
    inner.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", models.EOS + 1)])
    try:
        assert llm.generate("a", use_tqdm=False)[0].prompt_token_ids[0] == models.EOS + 1
        for prompt in ("", ["a", ""], {"prompt": ""}, [[]]):
            with pytest.raises(InvalidParameter, match=r"^prompt: must hold at least one token"):
                llm.generate(prompt, use_tqdm=False)
    finally:
        inner.post_processor = before
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize(
    "prompts",
    [
        None, 5, 1.5, [1.5], [None], jnp.array([1.5]), {}, {"prompt": 5},
        b"Hi", bytearray(b"Hi"), memoryview(b"Hi"), [b"Hi"], ["Hi", memoryview(b"Hi")], {"prompt": b"Hi"},
        True, [True], [[5, False]], [np.array([True])], {"prompt_token_ids": [5, True]},
    ], ids=lambda prompts: repr(prompts).partition(" at 0x")[0],
)  # fmt: skip
def test_generate_other_prompts_are_refused(llm, prompts):
    with pytest.raises(InvalidParameter, match=r"^prompts: must be texts or token ids, not "):
        llm.generate(prompts, use_tqdm=False)


@pytest.mark.parametrize("prompts", ["a\ud83e", ["fine", "\udd8a"], {"prompt": "\udc80 of a path"}], ids=ascii)
def test_generate_text_with_half_a_surrogate_pair_is_refused(llm, prompts):
    with pytest.raises(InvalidParameter, match=r"^prompts: must not hold half a surrogate pair, as "):
        llm.generate(prompts, use_tqdm=False)
    assert not llm.engine.has_work


def test_generate_other_params_are_refused(llm):
    for params in ({"temperature": 0}, ["greedy"]):
        with pytest.raises(InvalidParameter, match=r"^sampling_params: "):
            llm.generate("a", params, use_tqdm=False)
    with pytest.raises(InvalidParameter, match=r"sampling_params: must be one or as many as prompts \(1\), not 0"):
        llm.generate("a", [], use_tqdm=False)


def test_generate_metrics_are_in_order(llm):
    prompts = ["a", "bb" * 30, "c"]
    params = [
        SamplingParams(max_tokens=5, ignore_eos=True),
        BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True),
        SamplingParams(max_tokens=3, best_of=2, ignore_eos=True),
    ]
    found = [output.metrics for output in llm.generate(prompts, params, use_tqdm=False)]
    for metrics in found:
        times = [metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts]
        assert 0 < times[0] <= times[1] < times[2] < times[3] <= metrics.finished_ts
        assert metrics.first_token_latency >= metrics.first_token_ts - metrics.queued_ts
        assert abs(metrics.arrival_time - time.time()) < 60
    assert [metrics.num_generation_tokens for metrics in found] == [5, 2 * 4, 2 * 3]


def test_results_come_in_the_order_of_the_prompts_each_with_its_params(llm):
    prompts = ["a", "bb", [5, 6, 7]]
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (9, 1, 4)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 4]
    assert [len(o.prompt_token_ids) for o in outputs] == [1, 2, 3]


def test_the_default_is_16_tokens(llm):
    (output,) = llm.generate("Hello", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16 and output.finished


def test_logprobs(llm):
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=5, logprobs=0, seed=1, ignore_eos=True), use_tqdm=False)
    (completion,) = output.outputs
    chosen = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids)]
    assert len(chosen) == 5 and completion.cumulative_logprob == pytest.approx(sum(chosen))


ONE = SamplingParams(max_tokens=1)
HI = [{"role": "user", "content": "Hi"}]


def rendered(llm, messages, **options) -> list[str]:
    """The prompts that `chat` makes."""
    outputs = llm.chat(messages, ONE, False, **options)
    return [llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) for output in outputs]


def test_chat_one_conversation_and_several(llm):
    assert rendered(llm, HI) == ["<|user|>Hi<|end|><|assistant|>"]
    several = [HI, [{"role": "assistant", "content": "Yes?"}]]
    assert rendered(llm, several) == ["<|user|>Hi<|end|><|assistant|>", "<|assistant|>Yes?<|end|><|assistant|>"]
    outputs = llm.chat(several, sampling_params=[ONE, SamplingParams(max_tokens=2, ignore_eos=True)], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
    assert llm.chat([]) == []


def test_chat_template_and_its_variables(llm):
    template = "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    options = {"chat_template": template, "chat_template_kwargs": {"mood": "Well. "}}
    assert rendered(llm, HI, **options) == ["Well. Hi>"]
    assert rendered(llm, HI, **options, add_generation_prompt=False) == ["Well. Hi"]
    open_end = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(llm, HI, chat_template=template + "!", **open_end) == ["Hi"]
    with pytest.raises(ValueError, match="continue_final_message"):
        rendered(llm, HI, continue_final_message=True)


def test_chat_tools_and_their_calls(llm):
    template = (
        "{{ tools[0].function.name }}{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }} {{ call.function.arguments.city }}{% endfor %}{{ m.content or '' }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    assert rendered(llm, messages, tools=tools, chat_template=template) == ["weatherHiweather Rome"]
    call["function"]["arguments"] = "{"
    cut_off = rendered(llm, messages, tools=tools, chat_template=template.replace(".city", ""))
    assert cut_off == ["weatherHiweather {"]


@pytest.mark.parametrize(
    "messages", ["Hi", ["Hi"], [[1]], [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]]
)
def test_chat_other_messages_are_refused(llm, messages):
    with pytest.raises(InvalidParameter, match=r"^messages: "):
        llm.chat(messages)


def test_chat_without_a_template_is_refused(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(InvalidParameter, match="chat_template: must be passed, because the model has none"):
        llm.chat(HI)


def test_generate_without_params_takes_the_default_ones(llm, monkeypatch):
    given, add = [], llm.engine.add

    def recorded(request_id, token_ids, params, **options):
        given.append(params)
        return add(request_id, token_ids, params, **options)

    monkeypatch.setattr(llm.engine, "add", recorded)
    llm.generate("a", use_tqdm=False)
    llm.generate("a", SamplingParams(), use_tqdm=False)
    assert given == [llm.get_default_sampling_params(), SamplingParams()]
    assert given[0] == SamplingParams(top_k=3)


def test_progress_is_shown(llm, capsys):
    llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    assert "Generating: 100%" in capsys.readouterr().err


def test_one_bad_prompt_refuses_all_and_leaves_nothing_behind(llm):
    with pytest.raises(ValueError, match="prompt: token id 999 is outside the vocabulary"):
        llm.generate(["fine", [999]], use_tqdm=False)
    with pytest.raises(ValueError, match=r"sampling_params: must be one or as many as prompts \(2\), not 1"):
        llm.generate(["a", "b"], sampling_params=[SamplingParams()], use_tqdm=False)
    assert not llm.engine.has_work


def load():
    """Prompts and parameters that make use of every executable: of forks, rows, copies, swaps and prompt logprobs."""
    greedy = {"temperature": 0, "ignore_eos": True}
    return {
        "A prompt that is shared by three branches": SamplingParams(n=3, seed=5, max_tokens=9, presence_penalty=0.5),
        "Beams": BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True),
        "One that takes a while until": SamplingParams(max_tokens=40, prompt_logprobs=1, **greedy),
        "Another one": SamplingParams(max_tokens=40, min_tokens=3, logit_bias={65: 1.0}, **greedy),
        "A prompt that is shared by three branches, or nearly so": SamplingParams(max_tokens=30, **greedy),
    }


def generate_load(llm):
    llm.reset_prefix_cache()
    outputs = llm.generate(list(load()), sampling_params=list(load().values()), use_tqdm=False)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(llm):
    """The outputs of the load without a failure."""
    return generate_load(llm)


def assert_usable(llm, expected):
    assert not llm.engine.has_work and llm.engine.scheduler.pool.num_used == 0
    llm.engine.scheduler.check_invariants()
    assert generate_load(llm) == expected


def inject(monkeypatch, owner, name, act, *, at, after):
    """Act before or after the n-th calls of a function, for each n in `at`. Returns a list that grows with each call
    of `act`."""
    original, numbers, acted = getattr(owner, name), itertools.count(1), []

    def function(*args, **kwargs):
        hit = next(numbers) in at
        if hit and not after:
            acted.append(name)
            act()
        result = original(*args, **kwargs)
        if hit and after:
            acted.append(name)
            act()
        return result

    monkeypatch.setattr(owner, name, function)
    return acted


def fail():
    raise MemoryError("injected")


def interrupt():
    """Ctrl-C, as the main thread meets it: also where it waits."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


SITES = {
    "forward": lambda llm: (llm.engine.runner.step, "forward"),
    "choose": lambda llm: (llm.engine.runner.step, "choose"),
    "score": lambda llm: (llm.engine.runner.step, "score"),
    "masks": lambda llm: (llm.engine._masks, "write"),
    "block copies": lambda llm: (llm.engine.runner.blocks, "_copy"),
    "row copies": lambda llm: (llm.engine.runner.rows, "_copy"),
    "row writes": lambda llm: (llm.engine.runner.rows, "_write"),
    "swap out": lambda llm: (llm.engine.runner.blocks.host, "_gather"),
    "swap in": lambda llm: (llm.engine.runner.blocks.host, "_scatter"),
}


# Each site in one of both ways, by turns; `forward`, which is given the pool, in both.
ONCE = {(site, bool(number % 2)) for number, site in enumerate(SITES)} | {("forward", True)}


@pytest.mark.parametrize(
    ("site", "after"),
    [
        pytest.param(site, after, id=f"{site}-{when}", marks=[] if (site, after) in ONCE else pytest.mark.deep)
        for site in SITES
        for after, when in enumerate(("before", "after"))
    ],
)
def test_generate_step_raises_once_at_any_point_changes_no_output(llm, expected, site, after, monkeypatch):
    with monkeypatch.context() as patched:
        acted = inject(patched, *SITES[site](llm), fail, at={1}, after=after)
        assert generate_load(llm) == expected and acted
    assert_usable(llm, expected)


@pytest.mark.parametrize("site", ["forward", pytest.param("choose", marks=pytest.mark.deep)])
def test_generate_every_step_raises_next_call_works(llm, expected, site, monkeypatch):
    with monkeypatch.context() as patched:
        inject(patched, *SITES[site](llm), fail, at=range(10**6), after=False)
        with pytest.raises(MemoryError, match="injected"):
            generate_load(llm)
    assert_usable(llm, expected)


def test_generate_pool_holds_a_failed_computation_next_call_works(llm, expected, monkeypatch):
    """Some failures of a device appear only when results are read, which are not deleted but can't be used."""
    slow = jax.jit(lambda x: (x @ x)[0, 0])
    scalar, forward = jax.ShapeDtypeStruct((), jnp.float32), llm.engine.runner.step.forward

    @functools.cache
    def broken(shape, dtype):
        call = lambda x: jax.pure_callback(lambda _: fail(), jax.ShapeDtypeStruct(shape, dtype), x)
        return jax.jit(call).lower(scalar).compile()

    def failing(*args):
        results = forward(*args)
        compiled = jax.tree.map(lambda array: broken(array.shape, array.dtype), results)
        pending = slow(jnp.ones((1500, 1500)))  # So the failure comes after the call that it belongs to has returned.
        return jax.tree.map(lambda function: function(pending), compiled)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner.step, "forward", failing)
        with pytest.raises(jax.errors.JaxRuntimeError, match="injected"):
            generate_load(llm)
    assert_usable(llm, expected)


def test_engine_steps_raise_requests_continue_to_the_same_tokens(llm, expected, monkeypatch):
    """Requests that are not aborted are recomputed; no failure of several loses any of them."""
    llm.reset_prefix_cache()
    injected = [
        inject(monkeypatch, *site(llm), fail, at={1, 3}, after=number % 2) for number, site in enumerate(SITES.values())
    ]
    engine = llm.engine
    requests = [engine.add(prompt, llm.tokenizer(prompt).input_ids, params) for prompt, params in load().items()]
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except MemoryError:
            failures += 1
            engine.scheduler.check_invariants()
    assert failures == sum(map(len, injected)) > 8
    assert [[sequence.output_token_ids for sequence in request.outputs] for request in requests] == expected


INTERRUPTED = {
    "after the KV pool was donated": lambda llm: (llm.engine.runner.step, "forward"),
    "after the sampling state was donated": lambda llm: (llm.engine.runner.step, "choose"),
    "while rows are taken": lambda llm: (llm.engine.scheduler.rows, "_take"),
    "while blocks are allocated": lambda llm: (llm.engine.scheduler.pool, "allocate"),
    "while requests are added": lambda llm: (llm.engine.scheduler.waiting, "add"),
}


@pytest.mark.parametrize("site", INTERRUPTED)
def test_generate_interrupted_at_an_unsafe_point_next_call_works(llm, expected, site, monkeypatch):
    with monkeypatch.context() as patched:
        acted = inject(patched, *INTERRUPTED[site](llm), interrupt, at={3}, after=True)
        with pytest.raises(KeyboardInterrupt):
            generate_load(llm)
        assert acted
    assert_usable(llm, expected)


def test_generate_interrupted_at_random_moments_next_call_works(llm, expected):
    rng, inside = random.Random(0), 0
    for _ in range(25):
        ended, timer = [], threading.Timer(rng.uniform(0, 0.1), interrupt)
        with pytest.raises(KeyboardInterrupt):
            try:
                timer.start()
                generate_load(llm)
                ended.append(True)
            finally:
                timer.join()
                time.sleep(0.01)  # The interrupt comes at the latest now.
        inside += not ended
        assert not llm.engine.has_work
    assert inside
    assert_usable(llm, expected)


def test_generate_from_several_threads_takes_turns(llm, expected):
    found = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: generate_load(llm)})) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), expected)


def test_reset_prefix_cache_waits_for_a_generation(llm, expected, monkeypatch):
    begun, release, found = threading.Event(), threading.Event(), []
    hold = lambda: (begun.set(), release.wait(PATIENCE_S))
    inject(monkeypatch, llm.engine.runner.step, "forward", hold, at={5}, after=False)
    generation = threading.Thread(target=lambda: found.append(generate_load(llm)))
    generation.start()
    assert begun.wait(PATIENCE_S)
    reset = threading.Thread(target=llm.reset_prefix_cache)
    reset.start()
    reset.join(0.05)
    assert reset.is_alive()
    release.set()
    for thread in (generation, reset):
        thread.join(PATIENCE_S)
    assert found == [expected] and not any(llm.engine.scheduler.pool.states())


def test_a_module_without_a_tokenizer(random_module):
    with few_shapes():
        llm = LLM(random_module, num_gpu_blocks_override=12, **SMALL)
    (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=3), use_tqdm=False)
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 3
    with pytest.raises(ValueError, match="no tokenizer, so prompts must be token ids"):
        llm.generate("text", use_tqdm=False)
    with pytest.raises(ValueError, match="messages: this engine has no tokenizer with chat templates"):
        llm.chat([{"role": "user", "content": "Hi"}], chat_template="Hi")
    assert llm.get_tokenizer() is None


def test_a_module_in_another_dtype_is_not_copied_if_that_is_forbidden():
    model = random_model(ModelConfig.from_hf(models.TINY), "bfloat16", 0)
    with pytest.raises(ValueError, match=r"^params: (\d+) of \1 arrays \(first: embed_tokens.embedding\) are copied"):
        LLM(model, dtype="float32", allow_copy=False, progress=False)


@pytest.mark.parametrize("model", [None, 5, object(), ModelConfig])
def test_a_model_of_another_type_is_refused(model):
    accepted = 'model: must be "demo", a directory, a hub id or a module such as jpaged.models.llama.Llama, not '
    with pytest.raises(TypeError, match=accepted + type(model).__name__):
        LLM(model)


BAD = [
    ({"tokenizer": "nowhere"}, "model: nowhere is not a directory"),
    ({"tokenizer": object()}, "tokenizer: object has no tokenizers.Tokenizer inside"),
    ({"kernels": "mosaic"}, "kernels 'mosaic': "),
    ({"max_model_len": 10**6}, r"max_model_len: 1000000 exceeds"),
    ({"max_num_seqs": 9, "num_gpu_blocks_override": 8}, r"max_num_seqs: 9 exceeds the 8 blocks"),
    ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, r"max_num_batched_tokens: must be at least max_num_seqs \(9\)"),
    ({"num_gpu_blocks_override": 10**12}, "num_gpu_blocks_override: "),
    ({"dtype": "int8"}, "dtype: must be one of"),
]


@pytest.mark.parametrize("in_hand", [False, True], ids=["path", "module"])
@pytest.mark.parametrize("wrong, told", BAD, ids=[next(iter(wrong)) for wrong, _ in BAD])
def test_what_is_wrong_is_refused_before_anything_compiles(tiny, random_module, in_hand, wrong, told):
    with Compilations() as compilations, pytest.raises((ValueError, NotImplementedError), match=told):
        LLM(random_module if in_hand else tiny, progress=False, **wrong)
    assert compilations.count <= in_hand, "a module is traced, for its dtypes"


@pytest.fixture(scope="module")
def random_module():
    return random_model(ModelConfig.from_hf(models.TINY), "float32", 0)


def test_a_module_in_hand_is_not_loaded(random_module):
    with pytest.raises(ValueError, match="load_format: must be auto for a module"):
        LLM(random_module, load_format="dummy", progress=False)


def test_dummy_weights_and_bfloat16(tmp_path):
    """Of one layer, without a file of weights."""
    (tmp_path / "config.json").write_text(json.dumps(models.TINY | {"num_hidden_layers": 1}))
    models.write_tokenizer(tmp_path)
    few = SMALL | {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    with few_shapes():
        llm = LLM(str(tmp_path), load_format="dummy", dtype="bfloat16", kernels="reference", **few)
    assert {str(x.dtype) for x in llm.engine.runner.params + llm.engine.runner.blocks.pool} == {"bfloat16"}
    assert len(llm.generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4


def test_the_package_names_what_it_has():
    assert all(getattr(jpaged, name).__name__ == name for name in jpaged.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jpaged.nothing

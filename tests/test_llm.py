"""The offline API."""

import numpy as np
import pytest

import jpaged
from jpaged import LLM, ModelConfig, SamplingParams
from jpaged.model.weights import dummy_llama
from tests import models

SMALL = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 32, "progress": False}


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(str(tiny), **SMALL)


def test_texts_and_token_ids_give_the_same(llm):
    params = SamplingParams(temperature=0, max_tokens=6)
    text, ids, array = (
        llm.generate(prompt, params, use_tqdm=False)[0]
        for prompt in ("Hello", llm.tokenizer("Hello").input_ids, np.asarray(llm.tokenizer("Hello").input_ids))
    )
    assert text.prompt == "Hello" and ids.prompt is None
    assert text.prompt_token_ids == ids.prompt_token_ids == array.prompt_token_ids
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids == array.outputs[0].token_ids
    assert all(type(token) is int for token in array.prompt_token_ids)


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


def test_chat(llm):
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=3), use_tqdm=False)
    prompt = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|user|>Hi<|end|><|assistant|>"


def test_progress_is_shown(llm, capsys):
    llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    assert "Generating: 100%" in capsys.readouterr().err


def test_one_bad_prompt_refuses_all_and_leaves_nothing_behind(llm):
    with pytest.raises(ValueError, match="prompt: token id 999 is outside the vocabulary"):
        llm.generate(["fine", [999]], use_tqdm=False)
    with pytest.raises(ValueError, match="params: 1 of them for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    assert not llm.engine.has_work


def test_an_interrupt_leaves_nothing_behind(llm, monkeypatch):
    step, calls = llm.engine.runner.step, []

    def interrupted(decision):
        calls.append(decision)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(decision)

    monkeypatch.setattr(llm.engine.runner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert not llm.engine.has_work and llm.engine.scheduler.pool.num_used == 0
    llm.engine.scheduler.check_invariants()
    monkeypatch.undo()
    assert llm.generate("a", use_tqdm=False)[0].finished


def test_a_module_without_a_tokenizer(tiny):
    model = dummy_llama(ModelConfig.from_hf(models.TINY), "float32", 0)
    llm = LLM(model, **SMALL | {"max_num_seqs": 2, "max_num_batched_tokens": 16})
    (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=3), use_tqdm=False)
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 3
    with pytest.raises(ValueError, match="no tokenizer, so prompts must be token ids"):
        llm.generate("text", use_tqdm=False)


def test_a_module_in_another_dtype_is_not_copied_but_refused():
    model = dummy_llama(ModelConfig.from_hf(models.TINY), "bfloat16", 0)
    with pytest.raises(
        ValueError, match="dtype: the model's parameters are bfloat16, and they are not copied to float32"
    ):
        LLM(model, dtype="float32", progress=False)


def test_a_module_in_hand_is_not_loaded():
    model = dummy_llama(ModelConfig.from_hf(models.TINY), "float32", 0)
    with pytest.raises(ValueError, match="load_format: nothing is loaded for a module in hand"):
        LLM(model, load_format="dummy", progress=False)


def test_dummy_weights_and_bfloat16(tiny):
    llm = LLM(str(tiny), load_format="dummy", dtype="bfloat16", **SMALL | {"max_num_seqs": 2})
    assert {str(x.dtype) for x in llm.engine.runner.params + llm.engine.runner.pool} == {"bfloat16"}
    assert len(llm.generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4


def test_the_package_names_what_it_has():
    assert all(getattr(jpaged, name).__name__ == name for name in jpaged.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jpaged.nothing

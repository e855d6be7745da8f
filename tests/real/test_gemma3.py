"""Gemma 3 270M, a base model, from a GGUF file in five formats, compared with transformers in float32."""

import pytest

from jpaged import LLM
from jpaged.core.params import InvalidParameter
from jpaged.tokenizer import backend
from tests.real.cases import CHATS, TEXTS
from tests.real.compare import check_greedy, perplexity
from tests.real.conftest import expected
from tests.support.few_shapes import few_shapes

pytestmark = [pytest.mark.real, pytest.mark.slow]

WANTED = expected("gemma3")
# Nats by which logprobs may differ: Q5_0 and Q6_K, for which there are no kernels, become groups of 8 bits.
NEAR = 0.05


@pytest.fixture(scope="module")
def llm(gemma3) -> LLM:
    with few_shapes():
        return LLM(
            str(gemma3), progress=False, dtype="float32", max_model_len=1024, max_num_seqs=8,
            max_num_batched_tokens=256,
        )  # fmt: skip


@pytest.mark.parametrize("at", range(len(TEXTS)), ids=lambda at: repr(TEXTS[at][:20]))
def test_text_has_the_ids_of_transformers(llm, at):
    assert backend(llm.tokenizer).encode(TEXTS[at]).ids == WANTED["texts"][at]


def test_greedy_tokens_are_those_of_transformers(llm):
    check_greedy(llm, WANTED["greedy"], NEAR)


def test_perplexity_is_that_of_transformers(llm):
    assert perplexity(llm, WANTED["windows"]) == pytest.approx(WANTED["perplexity"], rel=1e-3)


def test_chat_needs_a_template_which_the_file_lacks(llm):
    with pytest.raises(InvalidParameter, match="chat_template"):
        llm.chat(CHATS[0], use_tqdm=False)
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    (output,) = llm.chat(CHATS[0], use_tqdm=False, chat_template=template)
    assert output.outputs[0].token_ids

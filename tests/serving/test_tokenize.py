"""/tokenize and /detokenize."""

import json

import pytest
from jinja2 import Template

from jpaged.demo import DIRECTORY
from tests.serving.client import request
from tests.serving.scripted import TOKENIZER


@pytest.mark.parametrize(
    "text", ["Once upon a time", "wörld 🦊", "<|end|> and <|user|>", " \n\t", "a\x00b", "messages", '{"messages"']
)
async def test_tokenize_then_detokenize_gives_the_text(exchange, text):
    for special in (True, False, None):
        body = {"model": "demo", "prompt": text, "return_token_strs": True}
        body |= {} if special is None else {"add_special_tokens": special}
        found = (await exchange(request("POST", "/tokenize", body))).json
        expected = TOKENIZER.encode(text, add_special_tokens=special is not False)
        assert found["tokens"] == expected.ids and found["token_strs"] == expected.tokens
        assert (found["count"], found["max_model_len"]) == (len(expected.ids), 512)
        back = (await exchange(request("POST", "/detokenize", {"model": "demo", "tokens": found["tokens"]}))).json
        assert back == {"prompt": text if special is False else "<|begin|>" + text}


async def test_tokenize_of_a_chat_applies_the_template(exchange):
    template = Template(json.loads((DIRECTORY / "tokenizer_config.json").read_text())["chat_template"])
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello wörld"}]
    for prompting in (True, False):
        body = {"messages": messages, "add_generation_prompt": prompting}
        found = (await exchange(request("POST", "/tokenize", body))).json
        rendered = template.render(messages=messages, add_generation_prompt=prompting, bos_token="<|begin|>")
        assert found["tokens"] == TOKENIZER.encode(rendered, add_special_tokens=False).ids
        assert found["token_strs"] is None
        back = (await exchange(request("POST", "/detokenize", {"tokens": found["tokens"]}))).json
        assert back["prompt"] == rendered
    open_end = {"messages": messages, "continue_final_message": True}
    found = (await exchange(request("POST", "/tokenize", open_end))).json
    assert TOKENIZER.decode(found["tokens"], skip_special_tokens=False).endswith("<|assistant|>Hello wörld")


@pytest.mark.parametrize(
    "path, body, status, param, words",
    [
        ("/tokenize", {}, 400, "prompt", "is required"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt", "only one of prompt and messages"),
        ("/tokenize", {"text": '"messages"'}, 400, "prompt", "is required, or messages"),
        ("/tokenize", [], 400, None, "object"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt", "valid string"),
        ("/tokenize", {"prompt": "a", "model": "gpt-5"}, 404, "model", "'gpt-5' is not served here"),
        ("/tokenize", {"messages": []}, 400, "messages", "at least 1"),
        ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, 400, "messages", "role"),
        ("/detokenize", {"tokens": [1280]}, 400, "tokens", "1280 is outside the vocabulary [0, 1280)"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", "-1 is outside"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens", "valid array"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens", "outside the vocabulary"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens", "valid integer"),
    ],
)
async def test_invalid_request_is_rejected_by_its_field(exchange, path, body, status, param, words):
    answer = await exchange(request("POST", path, body))
    assert answer.status == status and answer.error["param"] == param and words in answer.error["message"]


async def test_detokenize_of_no_tokens_gives_an_empty_text(exchange):
    assert (await exchange(request("POST", "/detokenize", {"tokens": []}))).json == {"prompt": ""}

"""SmolLM2-135M-Instruct from a GGUF file of 4 bits, compared with transformers in float32."""

import json
import subprocess
import sys

import jsonschema
import openai
import pytest

from benchmarks.shared.server_process import ServerProcess
from jpaged import SamplingParams
from jpaged.tokenizer import backend
from tests.real.cases import CHATS, LONG, NUM_SCORED, PROMPTS, TEXTS
from tests.real.compare import NEAR, check_greedy, perplexity
from tests.real.conftest import expected
from tests.support.few_shapes import PROGRAM

pytestmark = [pytest.mark.real, pytest.mark.slow]

WANTED = expected("smollm2")
END = 2  # <|im_end|>
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 10**8},
    },
    "required": ["city", "population"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("at", range(len(TEXTS)), ids=lambda at: repr(TEXTS[at][:20]))
def test_text_has_the_ids_of_transformers_and_comes_back(smollm2_exact, at):
    tokenizer = backend(smollm2_exact.tokenizer)
    assert tokenizer.encode(TEXTS[at]).ids == WANTED["texts"][at]
    assert tokenizer.decode(WANTED["texts"][at], skip_special_tokens=False) == TEXTS[at]


def test_chats_are_rendered_by_the_template_of_the_file(smollm2_exact):
    tokenizer = backend(smollm2_exact.tokenizer)
    outputs = smollm2_exact.chat(CHATS, SamplingParams(max_tokens=1), use_tqdm=False)
    rendered = [tokenizer.encode(text, add_special_tokens=False).ids for text in WANTED["chats"]]
    assert [output.prompt_token_ids for output in outputs] == rendered
    assert rendered[: len(PROMPTS)] == [each["ids"] for each in WANTED["greedy"][len(PROMPTS) :]]


def test_greedy_tokens_are_those_of_transformers(smollm2_exact):
    check_greedy(smollm2_exact, WANTED["greedy"])


def test_perplexity_is_that_of_transformers(smollm2_exact):
    assert perplexity(smollm2_exact, WANTED["windows"]) == pytest.approx(WANTED["perplexity"], rel=1e-4)


def test_the_longest_context_has_the_logprobs_of_transformers(smollm2_exact):
    half = WANTED["long"]["ids"]
    assert 2 * len(half) == LONG
    at = LONG - NUM_SCORED
    (found,) = smollm2_exact.score([(half + half)[:at]], [(half + half)[at:-1]])
    assert found == pytest.approx(WANTED["long"]["logprobs"][:-1], abs=5 * NEAR)


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({"dtype": "bfloat16"}, 0.995, 1.005),
        ({"dtype": "float32", "kv_cache_dtype": "fp8"}, 0.99, 1.03),
    ],
    ids=["bfloat16", "fp8 KV"],
)
def test_perplexity_with_fewer_bits_of_activations_or_kv(make_llm, smollm2, options, least, most):
    ratio = perplexity(make_llm(smollm2, **options), WANTED["windows"]) / WANTED["perplexity"]
    assert least < ratio < most and abs(ratio - 1) > 1e-6, "it is computed otherwise"


@pytest.fixture(scope="module")
def converted(smollm2, tmp_path_factory):
    """The same weights as a float32 checkpoint in the form of Hugging Face, which is quantized while it is loaded."""
    folder = tmp_path_factory.mktemp("checkpoint") / "converted"
    command = [sys.executable, "-m", "jpaged.cli.main", "convert", str(smollm2), str(folder), "--to", "safetensors"]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [({}, 0.9999, 1.0001), ({"quantization": "int8"}, 0.99, 1.01), ({"quantization": "int4"}, 1.0, 1.1)],
    ids=["float32", "int8", "int4"],
)
def test_perplexity_of_the_converted_checkpoint_and_with_weights_quantized_at_load(
    make_llm, converted, options, least, most
):
    llm = make_llm(converted, dtype="float32", **options)
    ratio = perplexity(llm, WANTED["windows"]) / WANTED["perplexity"]
    assert least < ratio < most
    assert not options or abs(ratio - 1) > 1e-6, "the weights are quantized"


@pytest.fixture(scope="module")
def server(smollm2):
    flags = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "256",
             "--enable-auto-tool-choice", "--tool-call-parser", "hermes")  # fmt: skip
    with ServerProcess("--model", str(smollm2), *flags, program=(*PROGRAM, "serve"), start_within=1800) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0) as made:
        yield made


@pytest.fixture
def ask(client):
    name = client.models.list().data[0].id

    def ask(messages, **fields):
        return client.chat.completions.create(model=name, messages=messages, temperature=0, **fields)

    return ask


@pytest.mark.parametrize("at", range(len(PROMPTS)))
def test_chat_over_http_gives_the_text_of_transformers(smollm2_exact, ask, at):
    wanted = WANTED["greedy"][len(PROMPTS) + at]
    tokens = wanted["tokens"]
    assert min(wanted["margins"]) > NEAR, "the fixture compares texts, so no token may be a matter of rounding"
    ended = END in tokens
    tokens = tokens[: tokens.index(END)] if ended else tokens
    done = ask(CHATS[at], max_tokens=len(wanted["tokens"]))
    (choice,) = done.choices
    assert choice.message.content == backend(smollm2_exact.tokenizer).decode(tokens)
    assert choice.finish_reason == ("stop" if ended else "length")
    assert done.usage.prompt_tokens == len(wanted["ids"])


def test_a_second_turn_reuses_the_first(ask):
    first = ask(CHATS[0], max_tokens=16, extra_body={"cache_salt": "turns"})
    message = {"role": "assistant", "content": first.choices[0].message.content}
    turns = [*CHATS[0], message, {"role": "user", "content": "And of Italy?"}]
    second = ask(turns, max_tokens=4, extra_body={"cache_salt": "turns"})
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_json_follows_its_schema(ask):
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    done = ask([{"role": "user", "content": "Describe Paris as JSON."}], max_tokens=200, response_format=schema)
    (choice,) = done.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_tool_call_has_its_form(ask):
    question = [{"role": "user", "content": "How will the weather be in Rome for the next 3 days?"}]
    done = ask(question, max_tokens=200, tools=[WEATHER], tool_choice="required")
    (call, *_) = done.choices[0].message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])

"""The openai client as everybody installs it, sync and async, with servers in processes of their own: the demo model's,
and one that says what it is told, for texts that must be exact."""

import asyncio
import json
import re
import time
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer

from benchmarks.shared.server_process import SMALL, ServerProcess
from jpaged.demo import DIRECTORY
from tests.serving.scripted import FAIL, logprob, say

MODEL = "demo"
# The demo model's own, and tools and their answers as Hermes has them.
TEMPLATE = """
{{- bos_token }}
{%- if style %}{{ '<|system|>Answer in ' + style + '.<|end|>' }}{% endif %}
{%- if tools %}{{ '<|system|>Tools:' }}
  {%- for tool in tools %}{{ ' ' + (tool.function | tojson) }}{% endfor %}{{ '<|end|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {{- '<|user|><tool_response>' + message.content + '</tool_response>' }}
  {%- else %}
    {{- '<|' + message.role + '|>' + message.content }}
    {%- for call in message.tool_calls or () %}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
  {%- endif %}
  {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
TOKENIZER = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
END = TOKENIZER.token_to_id("<|end|>")
STEPS = ("--step-seconds", "0.001")  # so that a stream has more than one chunk
HASTE = {"logit_bias": {str(END): 100}}  # end as soon as the text may


def tool(name, strict=None, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    function = {"name": name, "parameters": parameters} | ({} if strict is None else {"strict": strict})
    return {"type": "function", "function": function}


WEATHER = tool("weather", city={"enum": ["Rome", "Oslo"]}, days={"enum": [1, 2, 3]})
CLOCK = tool("clock", zone={"enum": ["utc", "local"]})
TOOLS = [WEATHER, CLOCK]


class Mood(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["happy", "sad"]
    strength: Literal[1, 2, 3]


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    with ServerProcess(*SMALL, "--tool-call-parser", "hermes", "--chat-template", str(template)) as server:
        yield server


@pytest.fixture(scope="module")
def scripted():
    with ServerProcess(*STEPS, "--tool-call-parser", "hermes", module="tests.serving.scripted") as server:
        yield server


@pytest.fixture(scope="module")
def scripted_llama():
    with ServerProcess(*STEPS, "--tool-call-parser", "llama3_json", module="tests.serving.scripted") as server:
        yield server


class Api:
    """A client of either kind, behind calls that are awaited."""

    def __init__(self, client):
        self.client = client
        self.waits = isinstance(client, openai.OpenAI)

    async def __call__(self, method, *args, **fields):
        """Calls a method by its name, such as "chat.completions.create"; the model is "demo" unless it is told."""
        function = self.client
        for name in method.split("."):
            function = getattr(function, name)
        if not method.startswith("models."):
            fields = {"model": MODEL} | fields
        if self.waits:
            return await asyncio.to_thread(function, *args, **fields)
        return await function(*args, **fields)

    async def complete(self, prompt, **fields):
        return await self("completions.create", prompt=prompt, **{"temperature": 0, "max_tokens": 12} | fields)

    async def chat(self, content, **fields):
        """`content` is the user's message, or a list of messages."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return await self("chat.completions.create", messages=messages, **{"temperature": 0, "max_tokens": 40} | fields)

    async def all(self, stream):
        """Return all chunks of a stream."""
        if self.waits:
            return await asyncio.to_thread(list, stream)
        return [item async for item in stream]


def connect(kind, url, **options):
    return Api(kind(base_url=f"{url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60} | options))


async def close(api):
    if api.waits:
        api.client.close()
    else:
        await api.client.close()


@pytest.fixture(params=[openai.OpenAI, openai.AsyncOpenAI], ids=["sync", "async"])
def kind(request):
    return request.param


@pytest.fixture
async def api(kind, demo):
    api = connect(kind, demo.url)
    yield api
    await close(api)


@pytest.fixture
async def teller(kind, scripted):
    """A client of the server with scripted answers."""
    api = connect(kind, scripted.url)
    yield api
    await close(api)


@pytest.fixture
async def llama_teller(kind, scripted_llama):
    api = connect(kind, scripted_llama.url)
    yield api
    await close(api)


def text(token_ids):
    return TOKENIZER.decode(token_ids, skip_special_tokens=False)


def texts(completion):
    return [choice.text for choice in completion.choices]


# Models


async def test_models(api):
    (model,) = await api.all((await api("models.list")) if api.waits else api.client.models.list())
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "jpaged")
    assert await api("models.retrieve", MODEL) == model
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here; 'demo' is") as error:
        await api("models.retrieve", "gpt-5")
    assert (error.value.status_code, error.value.param, error.value.type) == (404, "model", "NotFoundError")


# Completions


async def test_the_four_forms_of_a_prompt(api):
    given = ["Once upon a time", "The little fox"]
    ids = [TOKENIZER.encode(prompt).ids for prompt in given]
    both = await api.complete(given)
    assert [choice.index for choice in both.choices] == [0, 1] and len({*texts(both)}) == 2
    assert both.usage.prompt_tokens == len(ids[0]) + len(ids[1])
    assert both.usage.completion_tokens == 24 and both.usage.total_tokens == 24 + both.usage.prompt_tokens
    assert texts(await api.complete(ids)) == texts(both)
    for prompt, token_ids, expected in zip(given, ids, texts(both)):
        assert texts(await api.complete(prompt)) == texts(await api.complete(token_ids)) == [expected]


async def test_choice_i_has_seed_plus_i_and_best_of_gives_the_likeliest(api):
    sampled = {"temperature": 1.0, "logprobs": 0}
    several = await api.complete("The little fox", n=3, seed=5, **sampled)
    alone = [await api.complete("The little fox", seed=5 + i, **sampled) for i in range(3)]
    assert texts(several) == [choice.choices[0].text for choice in alone] and len({*texts(several)}) == 3

    def mean_logprob(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    ranked = sorted(several.choices, key=mean_logprob, reverse=True)
    best = await api.complete("The little fox", n=2, best_of=3, seed=5, **sampled)
    assert texts(best) == [choice.text for choice in ranked[:2]]
    assert best.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in ranked[:2])


async def test_a_seed_repeats_in_a_stream_too(api):
    fields = {"prompt": "Once upon a time", "temperature": 1.0, "max_tokens": 12}
    first, again, other = [(await api("completions.create", **fields, seed=seed)) for seed in (11, 11, 12)]
    assert texts(first) == texts(again) != texts(other)
    chunks = await api.all(await api("completions.create", **fields, seed=11, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == first.choices[0].text


async def test_a_prompt_gets_the_tokenizers_special_tokens_unless_they_are_not_wanted(api):
    counted = []
    for extra_body in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        answer = await api.complete("A fox", max_tokens=1, extra_body=extra_body)
        counted.append(answer.usage.prompt_tokens)
    assert counted[0] == counted[1] == counted[2] + 1


async def test_echo_with_logprobs(api):
    (choice,) = (await api.complete("Once upon a time", echo=True, logprobs=3, max_tokens=6)).choices
    logprobs = choice.logprobs
    assert choice.text.startswith("Once upon a time") and logprobs.tokens[0] == "<|begin|>"
    assert "".join(logprobs.tokens[1:]) == choice.text
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    for token, value, top in zip(logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:]):
        assert 3 <= len(top) <= 4 and top[token] == value
    assert logprobs.token_logprobs[-1] == max(logprobs.top_logprobs[-1].values())  # it was greedy
    scored = await api.complete("Once upon a time", echo=True, logprobs=3, max_tokens=0)
    assert scored.choices[0].text == "Once upon a time" and scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.token_logprobs == pytest.approx(
        logprobs.token_logprobs[: len(scored.choices[0].logprobs.tokens)]
    )


async def test_stop(api):
    whole = (await api.complete("Once upon a time", max_tokens=30)).choices[0].text
    stop = whole[40:43]
    (choice,) = (await api.complete("Once upon a time", max_tokens=30, stop=[stop, "never in it"])).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (whole[: whole.index(stop)], "stop", stop)
    kept = await api.complete(
        "Once upon a time", max_tokens=30, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == choice.text + stop


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_usage_of_a_stream_comes_when_it_is_asked_for(api, chat):
    call, content = (api.chat, "Who are you?") if chat else (api.complete, "Once upon a time")
    plain = await call(content, max_tokens=8, n=2)
    for asked in (True, False):
        options = {"stream_options": {"include_usage": asked}}
        chunks = await api.all(await call(content, max_tokens=8, n=2, stream=True, **options))
        *before, last = chunks
        assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in before)
        assert {chunk.id for chunk in chunks} == {last.id}
        if asked:
            assert last.choices == []
            assert last.usage.model_dump(exclude={"prompt_tokens_details"}) == plain.usage.model_dump(
                exclude={"prompt_tokens_details"}
            )
        else:
            assert last.usage is None and last.choices[0].finish_reason


async def test_sampling_parameters_beyond_openais(api):
    async def sample(**extra_body):
        fields = {
            "temperature": 1.5,
            "seed": 3,
            "max_tokens": 30,
            "extra_body": extra_body | {"return_token_ids": True},
        }
        return (await api.complete("Once upon a time", **fields)).choices[0]

    greedy = (await api.complete("Once upon a time", max_tokens=30)).choices[0].text
    free = await sample()
    assert free.text != greedy
    assert (await sample(top_k=1)).text == (await sample(min_p=1.0)).text == greedy
    unlike = await sample(repetition_penalty=1e4, top_k=1)
    assert len({*unlike.token_ids}) == len(unlike.token_ids)
    stopped = await sample(stop_token_ids=[free.token_ids[7]])
    at = free.token_ids.index(free.token_ids[7])
    assert stopped.token_ids == free.token_ids[: at + 1] and stopped.stop_reason == free.token_ids[7]
    assert len((await sample(stop_token_ids=[free.token_ids[7]], min_tokens=at + 5)).token_ids) >= at + 5


async def test_min_tokens_and_ignore_eos(api):
    plain = await api.chat("Who are you?", max_tokens=60)
    length = plain.usage.completion_tokens
    assert plain.choices[0].finish_reason == "stop" and length < 60
    longer = await api.chat("Who are you?", max_tokens=60, extra_body={"min_tokens": length + 3})
    assert longer.usage.completion_tokens >= length + 3
    endless = await api.chat("Who are you?", max_tokens=60, extra_body={"ignore_eos": True})
    assert (endless.choices[0].finish_reason, endless.usage.completion_tokens) == ("length", 60)


async def test_prompt_logprobs_and_token_ids(api):
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    (choice,) = (await api.complete("Once upon a time", logprobs=0, extra_body=extra)).choices
    ids = TOKENIZER.encode("Once upon a time").ids
    assert choice.prompt_token_ids == ids and TOKENIZER.decode(choice.token_ids) == choice.text
    assert choice.prompt_logprobs[0] is None and len(choice.prompt_logprobs) == len(ids)
    for token, found in zip(ids[1:], choice.prompt_logprobs[1:]):
        assert found[str(token)]["decoded_token"] == text([token]) and found[str(token)]["logprob"] <= 0
        assert 1 in [entry["rank"] for entry in found.values()]
    stream = await api.complete("Once upon a time", stream=True, extra_body={"return_token_ids": True})
    parts = [chunk.choices[0] for chunk in await api.all(stream)]
    assert parts[0].prompt_token_ids == ids and {part.prompt_token_ids and 1 for part in parts[1:]} <= {None}
    assert [token for part in parts for token in part.token_ids] == choice.token_ids


GRAMMAR = 'start: greeting " " name\ngreeting: "hello" | "good day"\nname: "Ann" | "Bob"'
STRUCTURED = [
    ({"json": Mood.model_json_schema(), "disable_any_whitespace": True}, r'\{"mood":"(happy|sad)","strength":[123]\}'),
    ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
    ({"choice": ["a yes", "a no"]}, "a yes|a no"),
    ({"grammar": GRAMMAR}, "(hello|good day) (Ann|Bob)"),
]


@pytest.mark.parametrize("wanted, pattern", STRUCTURED, ids=["json", "regex", "choice", "grammar"])
async def test_structured_outputs(api, wanted, pattern):
    fields = {"max_tokens": 60, "temperature": 1.0, "n": 2, "seed": 4, "extra_body": {"structured_outputs": wanted}}
    completion = await api.complete("Once upon a time", **fields)
    chat = await api.chat("Who are you?", **fields)
    for choice, answer in zip(completion.choices, chat.choices):
        assert re.fullmatch(pattern, choice.text) and choice.finish_reason == "stop"
        assert re.fullmatch(pattern, answer.message.content) and answer.finish_reason == "stop"


async def test_a_cache_salt_keeps_prefixes_apart(api, kind):
    async def cached(salt):
        completion = await api.complete([7] * 64, max_tokens=1, extra_body={"cache_salt": f"{salt} {kind}"})
        return completion.usage.prompt_tokens_details.cached_tokens

    assert [await cached(salt) for salt in ("mine", "mine", "yours")] == [0, 63, 0]


async def test_truncated_prompts(api):
    ids = TOKENIZER.encode("Once upon a time there was a fox").ids
    cut = await api.complete(ids, extra_body={"truncate_prompt_tokens": 5})
    assert cut.usage.prompt_tokens == 5 and texts(cut) == texts(await api.complete(ids[-5:]))


async def test_beam_search(api):
    extra = {"use_beam_search": True, "best_of": 4}
    beams = await api.complete("The little fox", n=3, logprobs=0, extra_body=extra)
    assert len({*texts(beams)}) == 3

    def score(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens)

    scores = [score(choice) for choice in beams.choices]
    assert scores == sorted(scores, reverse=True)
    greedy = await api.complete("The little fox", logprobs=0)
    assert scores[0] >= score(greedy.choices[0])


async def test_many_at_once_give_what_each_gives_alone(demo):
    async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        api = Api(client)
        fields = [{"seed": i, "temperature": 1.0, "max_tokens": 8 + i} for i in range(24)]
        together = await asyncio.gather(*(api.complete("The little fox", **each) for each in fields))
        for i in (0, 11, 23):
            assert texts(await api.complete("The little fox", **fields[i])) == texts(together[i])


# Chat


async def test_a_chat_plain_and_streamed(api):
    fields = {"n": 2, "temperature": 1.0, "seed": 8, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 12}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    plain = await api("chat.completions.create", messages=messages, **fields)
    assert plain.object == "chat.completion" and plain.model == MODEL and len(plain.choices) == 2
    chunks = await api.all(await api("chat.completions.create", messages=messages, stream=True, **fields))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for choice in plain.choices:
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert parts[0].delta.role == "assistant" and all(part.delta.role is None for part in parts[1:])
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        streamed = [token for part in parts if part.logprobs for token in part.logprobs.content]
        assert [token.token for token in streamed] == [token.token for token in choice.logprobs.content]
        for token, same in zip(streamed, choice.logprobs.content):
            # Results from a cached prefix may differ in their last bits.
            assert token.logprob == pytest.approx(same.logprob, abs=1e-4)
            assert bytes(token.bytes).decode() == token.token and len(token.top_logprobs) == 2
            assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


async def test_max_completion_tokens(api):
    answer = await api("chat.completions.create", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3


async def test_response_formats(api):
    haste = {"logit_bias": {str(TOKENIZER.token_to_id("}")): 100}}
    answer = await api.chat("Who are you?", response_format={"type": "json_object"}, **haste)
    assert json.loads(answer.choices[0].message.content) == {} and answer.choices[0].finish_reason == "stop"
    schema = {"name": "mood", "strict": True, "schema": Mood.model_json_schema()}
    answer = await api.chat(
        "Who are you?", response_format={"type": "json_schema", "json_schema": schema}, max_tokens=90
    )
    Mood.model_validate_json(answer.choices[0].message.content)
    answer = await api.chat("Who are you?", response_format={"type": "text"})
    assert answer.choices[0].message.content.startswith("I am")


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own models, when they are sent back
async def test_parse_gives_a_pydantic_model_that_may_be_sent_back(api):
    messages = [{"role": "user", "content": "Who are you?"}]
    parsed = await api("chat.completions.parse", messages=messages, response_format=Mood, max_tokens=90)
    message = parsed.choices[0].message
    assert isinstance(message.parsed, Mood) and Mood.model_validate_json(message.content) == message.parsed
    extra = {"return_token_ids": True}
    after = await api.chat([*messages, message, messages[0]], max_tokens=3, extra_body=extra)
    assert f"<|assistant|>{message.content}<|end|>" in text(after.prompt_token_ids)


async def test_the_stream_helper(api):
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 90, "seed": 1}
    manager = api.client.chat.completions.stream(**fields, response_format=Mood)
    if api.waits:
        with manager as stream:
            events, final = list(stream), stream.get_final_completion()
    else:
        async with manager as stream:
            events, final = [event async for event in stream], await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Mood)
    (done,) = [event for event in events if event.type == "content.done"]
    assert done.parsed == final.choices[0].message.parsed
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(deltas) == done.content and len(deltas) > 3


async def test_a_final_message_is_gone_on_with(api):
    messages = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am the"}]
    extra = {"return_token_ids": True, "continue_final_message": True, "add_generation_prompt": False}
    answer = await api.chat(messages, max_tokens=4, extra_body=extra)
    assert text(answer.prompt_token_ids) == "<|begin|><|user|>Who are you?<|end|><|assistant|>I am the"
    assert answer.choices[0].message.content.startswith(" small")


async def test_template_variables_and_no_generation_prompt(api):
    extra = {"return_token_ids": True, "chat_template_kwargs": {"style": "verse"}, "add_generation_prompt": False}
    answer = await api.chat("Hi", max_tokens=1, extra_body=extra)
    assert text(answer.prompt_token_ids) == "<|begin|><|system|>Answer in verse.<|end|><|user|>Hi<|end|>"
    with pytest.raises(openai.BadRequestError, match="chat_template: this server takes none") as error:
        await api.chat("Hi", extra_body={"chat_template": "{{ messages }}"})
    assert error.value.param == "chat_template"


# Tools


def check_calls(calls, tools=TOOLS):
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    assert len({call.id for call in calls}) == len(calls) and all(call.id.startswith("call_") for call in calls)
    for call in calls:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


def assembled(chunks):
    """The calls of a streamed choice as [name, arguments]; their ids must come with their first deltas."""
    calls, ids = [], set()
    for chunk in chunks:
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.id is not None:
                assert delta.index == len(calls) and delta.id not in ids and delta.type == "function"
                ids.add(delta.id)
                calls.append([delta.function.name, ""])
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.function.arguments
    return calls


def as_lists(calls):
    return [[call.function.name, call.function.arguments] for call in calls]


async def test_required_calls_plain_and_streamed(api):
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 120} | HASTE
    (choice,) = (await api.chat("What is the weather?", **fields)).choices
    check_calls(choice.message.tool_calls)
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    chunks = await api.all(await api.chat("What is the weather?", stream=True, **fields))
    assert assembled(chunks) == as_lists(choice.message.tool_calls)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_parallel_calls_and_their_refusal(api):
    # Without the bias to the end the model calls until it has no tokens left, if it may.
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 150, "logit_bias": {str(END): -100}}
    several = (await api.chat("What is the weather?", **fields)).choices[0].message.tool_calls
    assert len(several) > 1
    check_calls(several[:-1])  # the last one may be cut off
    one = (await api.chat("What is the weather?", parallel_tool_calls=False, **fields)).choices[0]
    assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls"
    check_calls(one.message.tool_calls)


async def test_a_call_by_name(api):
    named = {"type": "function", "function": {"name": "clock"}}
    (choice,) = (await api.chat("What is the weather?", tools=TOOLS, tool_choice=named, max_tokens=90)).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["clock"] and choice.finish_reason == "stop"
    check_calls(choice.message.tool_calls)
    with pytest.raises(openai.BadRequestError, match="'cook' is none of the tools") as error:
        await api.chat("Hi", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "cook"}})
    assert error.value.param == "tool_choice"


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_a_model_that_does_not_call_answers(api, choice):
    answer = (await api.chat("Who are you?", tools=TOOLS, tool_choice=choice)).choices[0]
    assert answer.message.tool_calls is None and answer.message.content and answer.finish_reason != "tool_calls"


@pytest.mark.parametrize("how", ["create", "parse", "stream"])
async def test_the_answer_of_a_tool_goes_back_with_the_call(api, how):
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    messages = [{"role": "user", "content": "Is it warm?"}]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    if how == "stream":
        manager = api.client.chat.completions.stream(model=MODEL, messages=messages, **fields)
        if api.waits:
            with manager as stream:
                answer = stream.get_final_completion()
        else:
            async with manager as stream:
                answer = await stream.get_final_completion()
    else:
        answer = await api(f"chat.completions.{how}", messages=messages, **fields)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    city = Weather.model_validate_json(call.function.arguments).city
    if how != "create":
        assert call.function.parsed_arguments == Weather(city=city)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
    after = await api.chat(messages, tools=tools, max_tokens=5, extra_body={"return_token_ids": True})
    called = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    told = f"<|assistant|>{called}<|end|><|user|><tool_response>18 degrees</tool_response><|end|><|assistant|>"
    prompt = text(after.prompt_token_ids)
    assert prompt.endswith(told) and prompt.startswith("<|begin|><|system|>Tools: {") and '"name": "weather"' in prompt


# Tools, as a model that calls them would


ROME, NOON = '{"name": "weather", "%s": {"city": "Rome", "days": 1}}', '{"name": "clock", "%s": {"zone": "utc"}}'
ROME_CALL, NOON_CALL = ["weather", '{"city": "Rome", "days": 1}'], ["clock", '{"zone": "utc"}']


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{call % 'arguments'}\n</tool_call>" for call in calls)


def llama(*calls):
    return "; ".join(call % "parameters" for call in calls)


AUTO = {
    "a call": (hermes(ROME), llama(ROME), None, [ROME_CALL]),
    "two calls": (hermes(ROME, NOON), llama(ROME, NOON), None, [ROME_CALL, NOON_CALL]),
    "no call": ("Sunny.", "Sunny.", "Sunny.", []),
    "cut off before its name": ('<tool_call>\n{"nam', '{"nam', ..., []),
    "an unknown tool": (hermes(ROME).replace("weather", "cook"), llama(ROME).replace("weather", "cook"), ..., []),
    "no object": ('<tool_call>\n["weather"]\n</tool_call>', '["weather"]', ..., []),
    "arguments that are a list": ('<tool_call>\n{"name": "clock", "arguments": [1]}\n</tool_call>',
                                  '{"name": "clock", "parameters": [1]}', ..., []),
}  # fmt: skip


async def check_auto(api, told, content, calls, **fields):
    """The same message plain and streamed."""
    fields = {"tools": TOOLS, "max_tokens": 150} | fields
    (choice,) = (await api.chat(say(told), **fields)).choices
    assert (choice.message.content, as_lists(choice.message.tool_calls or ())) == (content, calls)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    if calls:
        check_calls(choice.message.tool_calls)
    chunks = await api.all(await api.chat(say(told), stream=True, **fields))
    assert assembled(chunks) == calls and chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (content or "")
    return chunks


@pytest.mark.parametrize("told, _, content, calls", AUTO.values(), ids=AUTO)
async def test_what_hermes_says_by_itself(teller, told, _, content, calls):
    await check_auto(teller, told, told if content is ... else content, calls)


@pytest.mark.parametrize("_, told, content, calls", AUTO.values(), ids=AUTO)
async def test_what_llama_says_by_itself(llama_teller, _, told, content, calls):
    await check_auto(llama_teller, told, told if content is ... else content, calls)


async def test_arguments_come_piece_by_piece_and_no_tag_is_ever_shown(teller):
    chunks = await check_auto(teller, f"Let me see: {hermes(ROME, NOON)}", "Let me see:", [ROME_CALL, NOON_CALL])
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    pieces = [delta.function.arguments for delta in deltas if delta.index == 0]
    assert len(pieces) > 1
    contents = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert len([*filter(None, contents)]) > 1 and not any("<" in content for content in contents)


async def test_only_the_first_call_where_calls_may_not_be_parallel(teller, llama_teller):
    await check_auto(teller, hermes(ROME, NOON), None, [ROME_CALL], parallel_tool_calls=False)
    await check_auto(llama_teller, llama(ROME, NOON), None, [ROME_CALL], parallel_tool_calls=False)


async def test_calls_of_several_choices(teller):
    told = say(hermes(ROME), "No.", hermes(NOON))
    choices = (await teller.chat(told, tools=TOOLS, n=3, max_tokens=100)).choices
    assert [as_lists(choice.message.tool_calls or ()) for choice in choices] == [[ROME_CALL], [], [NOON_CALL]]
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    chunks = await teller.all(await teller.chat(told, tools=TOOLS, n=3, max_tokens=100, stream=True))
    by_choice = [[chunk for chunk in chunks if chunk.choices[0].index == i] for i in range(3)]
    assert [assembled(each) for each in by_choice] == [[ROME_CALL], [], [NOON_CALL]]


async def test_a_call_that_max_tokens_cuts_off(teller):
    length = len(TOKENIZER.encode(hermes(ROME).partition("Rome")[0], add_special_tokens=False).ids)
    (choice,) = (await teller.chat(say(hermes(ROME)), tools=TOOLS, max_tokens=length)).choices
    assert as_lists(choice.message.tool_calls) == [["weather", '{"city": "']] and choice.finish_reason == "length"


async def test_strict_tools_get_what_their_schema_allows(teller, llama_teller):
    strict = [tool("weather", True, city={"type": "string"})]
    loose = [tool("weather", city={"type": "string"})]
    wrong = '{"name": "weather", "%s": {"city": 5}}'
    for api, told, content in ((teller, f"So: {hermes(wrong)}", "So:"), (llama_teller, llama(wrong), None)):
        for tools in (strict, loose):
            (choice,) = (await api.chat(say(told), tools=tools, max_tokens=150)).choices
            (call,) = choice.message.tool_calls
            assert (choice.message.content, choice.finish_reason) == (content, "tool_calls")
            if tools is strict:
                check_calls([call], strict)
            else:
                assert json.loads(call.function.arguments) == {"city": 5}
        assert (await api.chat(say("Just text."), tools=strict)).choices[0].message.content == "Just text."


async def test_a_tool_that_can_not_be_called_strictly_is_refused(teller):
    with pytest.raises(openai.BadRequestError, match='must have the type "object"') as error:
        wrong = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "string"}}}
        await teller.chat("Hi", tools=[wrong])
    assert error.value.param == "tools"


# Exact texts


async def test_characters_of_several_tokens_come_whole(teller):
    told = "wörld 🦊 日本語 é\u0301 \u2028\x85\r\n👩‍👩‍👧 end"
    chunks = await teller.all(await teller.complete(say(told), max_tokens=80, stream=True))
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == told and not any("\ufffd" in piece for piece in pieces)
    (choice,) = (await teller.complete(say(told), max_tokens=80)).choices
    assert choice.text == told


async def test_half_a_character_at_the_end_is_no_text(teller):
    length = len(TOKENIZER.encode("Hi 🦊", add_special_tokens=False).ids) - 1
    (choice,) = (await teller.complete(say("Hi 🦊"), max_tokens=length)).choices
    assert (choice.text, choice.finish_reason) == ("Hi ", "length")


STOPS = [
    ("one two three", "wo th", "one t"),
    ("one two three", "three", "one two "),
    ("one two three", ["three", "two"], "one "),
    ("a STO STOP b", "STOP", "a STO "),
    ("one two", "two three", "one two"),  # begun, not finished
    ("fox 🦊 and more", "🦊", "fox "),
    ("x", "x", ""),
]


@pytest.mark.parametrize("told, stop, expected", STOPS)
async def test_stop_strings_over_several_tokens(teller, told, stop, expected):
    for chat in (False, True):
        call = teller.chat if chat else teller.complete
        (choice,) = (await call(say(told), stop=stop)).choices
        assert (choice.message.content if chat else choice.text) == expected
        stopped = len(expected) < len(told)
        assert choice.finish_reason == "stop" and (choice.stop_reason is not None) == stopped
        chunks = await teller.all(await call(say(told), stop=stop, stream=True))
        choices = [chunk.choices[0] for chunk in chunks]
        pieces = [(each.delta.content if chat else each.text) or "" for each in choices]
        assert "".join(pieces) == expected and choices[-1].stop_reason == choice.stop_reason


async def test_logprobs_and_offsets(teller):
    ids = TOKENIZER.encode("the fox ran", add_special_tokens=False).ids
    told = [TOKENIZER.decode([token]) for token in ids] + ["<|end|>"]
    plain = (await teller.complete(say("the fox ran"), logprobs=2)).choices[0]
    assert plain.text == "the fox ran" and plain.logprobs.tokens == told
    assert plain.logprobs.token_logprobs == [logprob(token) for token in [*ids, END]]
    assert plain.logprobs.text_offset == [sum(map(len, told[:i])) for i in range(len(told))]
    assert all(max(top.values()) == value for top, value in zip(plain.logprobs.top_logprobs, map(logprob, [*ids, END])))
    chunks = await teller.all(await teller.complete(say("the fox ran"), logprobs=2, stream=True))
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        parts = [getattr(chunk.choices[0].logprobs, name) for chunk in chunks]
        assert [entry for part in parts for entry in part] == getattr(plain.logprobs, name)


async def test_logprobs_of_parts_of_a_character_have_their_own_bytes(teller):
    told = "w🦊r"
    answer = await teller.chat(say(told), logprobs=True, top_logprobs=1)
    content = answer.choices[0].logprobs.content
    assert len(content) > 3 and "\ufffd" in [entry.token for entry in content]
    assert b"".join(bytes(entry.bytes) for entry in content).decode().startswith(told)
    answer = await teller.complete(say(told), logprobs=0)
    offsets = answer.choices[0].logprobs.text_offset
    assert offsets[0] == 0 and offsets[1] == offsets[-3] == 1 and offsets[-2] == 2, offsets


async def test_offsets_go_on_behind_an_echo(teller):
    prompt = say("the fox")
    for fields in ({}, {"stream": True}):
        answer = await teller.complete(prompt, logprobs=0, echo=True, **fields)
        parts = [chunk.choices[0] for chunk in await teller.all(answer)] if fields else answer.choices
        whole = "".join(part.text for part in parts)
        tokens = [token for part in parts for token in part.logprobs.tokens]
        offsets = [offset for part in parts for offset in part.logprobs.text_offset]
        assert whole == prompt + "the fox" and tokens[0] == "<|begin|>" and tokens[-1] == "<|end|>"
        # The special token in front is no part of the text, but of the tokens.
        start = len("<|begin|>")
        assert all(("<|begin|>" + whole).startswith(token, at) for token, at in zip(tokens[:-1], offsets))
        assert offsets[0] == 0 and offsets[1] == start


# Around the requests


async def test_request_ids(api):
    with_headers = await api("chat.completions.with_raw_response.create", messages=[{"role": "user", "content": "Hi"}],
                             max_tokens=1, extra_headers={"X-Request-Id": "my-request"})  # fmt: skip
    assert with_headers.headers["x-request-id"] == with_headers.request_id == "my-request"
    answer = with_headers.parse()
    assert answer._request_id == "my-request" and answer.choices
    assert len((await api.chat("Hi", max_tokens=1))._request_id) == 32
    with pytest.raises(openai.BadRequestError) as error:
        await api.chat("Hi", max_tokens=0)
    assert re.fullmatch("[0-9a-f]{32}", error.value.request_id)


async def test_the_lines_of_a_streaming_response(api):
    stream = api.client.completions.with_streaming_response.create(
        model=MODEL, prompt="The little fox", max_tokens=3, stream=True
    )
    if api.waits:
        with stream as response:
            lines = list(response.iter_lines())
    else:
        async with stream as response:
            lines = [line async for line in response.iter_lines()]
    assert response.headers["content-type"] == "text/event-stream"
    events = [line for line in lines if line]
    assert 2 <= len(events) <= 4  # tokens that come together go together
    assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"


ERRORS = [
    ({"temperature": -1}, "temperature", "temperature: must be a number of at least 0, not -1"),
    ({"max_tokens": 1000}, "max_tokens", "maximum context length is"),
    ({"n": 17}, "n", "17 sequences exceed the 16 of a step"),
    ({"stop": ""}, "stop", "1 to 256 characters"),
    ({"extra_body": {"flavour": "mint"}}, "flavour", "is not a known field"),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs", "structured_outputs: "),
]


@pytest.mark.parametrize("fields, param, words", ERRORS, ids=[param for _, param, _ in ERRORS])
async def test_bad_requests(api, fields, param, words):
    for call in (api.complete, api.chat):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as error:
                await call("Hi", stream=stream, **fields)
            failure = error.value
            code = {"max_tokens": "context_length_exceeded", "flavour": "unknown_parameter"}.get(param, "invalid_value")
            assert (failure.status_code, failure.code, failure.type) == (400, code, "BadRequestError")
            assert failure.param == failure.body["param"] == param and words in failure.body["message"]


async def test_another_model_is_not_found(api):
    for call in (api.complete, api.chat):
        with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here") as error:
            await call("Hi", model="gpt-5")
        assert error.value.param == "model" and error.value.code == "model_not_found"


def idle(server):
    """Whether no request runs or waits and no block is in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(server.metric(f"vllm:{name}") for name in names)


async def until_idle(server):
    deadline = time.monotonic() + 30
    while not idle(server):
        assert time.monotonic() < deadline, "a request that nobody waits for goes on"
        await asyncio.sleep(0.01)


LONG = {"max_tokens": 480, "extra_body": {"ignore_eos": True}}  # seconds on a slow machine


@pytest.fixture(scope="module")
def slow():
    """Half a second for each ten tokens, one request at a time, and little room for more; and it asks for a key."""
    flags = ("--step-seconds", "0.05", "--max-num-seqs", "1", "--max-queue", "2", "--request-timeout", "2")
    with ServerProcess(*flags, "--api-key", "secret", "other", module="tests.serving.scripted") as server:
        yield server


@pytest.fixture
async def waiter(kind, slow):
    api = connect(kind, slow.url, api_key="secret")
    yield api
    await close(api)
    await until_idle(slow)


async def test_a_stream_that_is_closed_early_frees_its_blocks(waiter, slow):
    stream = await waiter.chat("Tell me.", stream=True, **LONG)
    if waiter.waits:
        await asyncio.to_thread(next, stream)
    else:
        await anext(stream)
    while slow.metric("vllm:num_requests_running") != 1:  # the first chunk comes before the first step
        await asyncio.sleep(0.01)
    assert slow.metric("vllm:kv_cache_usage_perc") > 0
    before = slow.metric("vllm:generation_tokens_total")
    await asyncio.to_thread(stream.close) if waiter.waits else await stream.close()
    await until_idle(slow)
    assert slow.metric("vllm:generation_tokens_total") - before < 20
    assert slow.metric("vllm:request_success_total") > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_clients_timeout_ends_the_request(waiter, slow, stream, kind):
    before = slow.metric("vllm:generation_tokens_total")
    # A prompt of eight steps: its tokens come too late even where the answer's head has come at once.
    extra = {"cache_salt": f"{kind}{stream}", "ignore_eos": True}
    with pytest.raises(openai.APITimeoutError):
        answer = await waiter.complete([7] * 500, stream=stream, timeout=0.2, extra_body=extra)
        await waiter.all(answer)
    await until_idle(slow)
    assert slow.metric("vllm:generation_tokens_total") - before < 10


async def test_the_servers_timeout(waiter):
    """Of one that runs, and of one that still waits for it: in an answer, and as the last event of a stream."""
    plain = asyncio.create_task(waiter.complete("Hi", **LONG))
    stream = await waiter.complete("Hi", stream=True, **LONG)
    with pytest.raises(openai.InternalServerError, match="the answer was not complete after 2 seconds") as error:
        await plain
    assert error.value.status_code == 504 and error.value.type == "TimeoutError"
    with pytest.raises(openai.APIError, match="the answer was not complete after 2 seconds") as error:
        await waiter.all(stream)
    assert error.value.code == "timeout"


async def test_a_full_queue(waiter, slow):
    """One runs, two wait, the next is refused; a client that may try again gets its answer in the end."""
    first = await waiter.complete("Hi", stream=True, **LONG | {"max_tokens": 20})
    while slow.metric("vllm:num_requests_running") < 1:
        await asyncio.sleep(0.01)
    others = asyncio.create_task(waiter.complete(["Hi", "Hi"], max_tokens=1))
    while slow.metric("vllm:num_requests_waiting") < 2:
        await asyncio.sleep(0.01)
    with pytest.raises(openai.InternalServerError, match=r"queue full \(2 requests waiting") as error:
        await waiter.complete("Hi", max_tokens=1)
    assert error.value.status_code == 503 and error.value.type == "ServiceUnavailableError"
    assert error.value.response.headers["retry-after"] == "1"
    patient = Api(waiter.client.with_options(max_retries=5))
    assert (await patient.complete(say("ok"), max_tokens=5)).choices[0].text == "ok"
    assert len(await waiter.all(first)) > 0 and len((await others).choices) == 2


async def test_keys(kind, slow):
    for key in ("secret", "other"):
        api = connect(kind, slow.url, api_key=key)
        assert (await api("models.retrieve", MODEL)).id == MODEL
        await close(api)
    api = connect(kind, slow.url, api_key="wrong")
    with pytest.raises(openai.AuthenticationError, match="a valid API key is needed") as error:
        await api.complete("Hi")
    assert (error.value.status_code, error.value.type) == (401, "AuthenticationError")
    with pytest.raises(openai.AuthenticationError):
        await api("models.retrieve", MODEL)
    await close(api)


async def test_a_failure_in_the_middle_of_a_stream(kind):
    with ServerProcess(module="tests.serving.scripted", clean=False) as server:
        api = connect(kind, server.url)
        stream = await api.chat(say(f"Once upon{FAIL}"), stream=True)
        seen = []

        def read():
            for chunk in stream:
                seen.append(chunk)

        with pytest.raises(openai.APIError, match="the engine has failed: the script fails here") as error:
            if api.waits:
                await asyncio.to_thread(read)
            else:
                async for chunk in stream:
                    seen.append(chunk)
        assert "".join(chunk.choices[0].delta.content for chunk in seen) == "Once upon"
        assert error.value.code == "service_unavailable" and error.value.type == "ServiceUnavailableError"
        with pytest.raises(openai.InternalServerError, match="the engine has failed"):
            await api.complete("Hi")
        await close(api)
        assert server.stop() == 0
        (traceback,) = server.tracebacks()
        assert "the script fails here" in traceback

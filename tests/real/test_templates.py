# ruff: noqa: RUF001 - DeepSeek's marks have full-width bars
"""Real chat templates: their forms are detected, and the messages that they write are read back."""

import json
from dataclasses import replace

import pytest
from llguidance import LLTokenizer

from jpaged.chat import Template, render
from jpaged.demo import DIRECTORY
from jpaged.serving.conversation import Function
from jpaged.serving.reasoning_parsers.forms import FORMS, reasoning_form
from jpaged.serving.tool_parsers.detect import detect
from jpaged.serving.tool_parsers.format import FORMATS
from jpaged.tokenizer import backend, load_tokenizer
from tests.real.templates import SPECIAL, TAIL, common_start, output, templates
from tests.serving.test_tool_grammars import accepts
from tests.serving.tool_texts import outcome

pytestmark = [pytest.mark.real]

# The forms of calls and of reasoning that each template has. None: a form that is not read, or none.
WANTED = {
    "Bielik-11B-v3.0-Instruct": ("hermes", "think"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "GLM-4.6": ("glm45", "think"),
    "GLM-4.7-Flash": ("glm47", "think"),
    "HuggingFaceTB-SmolLM3-3B": (None, "think"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2-Thinking": ("kimi_k2", "think"),
    "LFM2.5-8B-A1B": (None, "think"),
    "LFM2.5-Instruct": (None, "think"),
    "MiMo-VL": ("hermes", None),
    "MiniMax-M2": ("minimax_m2", "think"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "think"),
    "NVIDIA-Nemotron-Nano-v2": (None, "think"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "think"),
    "Reka-Edge": ("hermes", "think"),
    "Spark2.5": ("glm47", "think"),
    "StepFun3.5-Flash": ("qwen3_coder", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "think"),
    "deepseek-ai-DeepSeek-V3.2": (None, "think"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": (None, "think"),
    "deepseek-ai-DeepSeek-V4": (None, "think"),
    "fireworks-ai-llama-3-firefunction-v2": ("phi4_mini_json", None),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma4"),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "think"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "ibm-granite-granite-4.1": ("hermes", None),
    "inclusionai-ling-3.0-flash": ("glm45", "think"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "think"),
    "llama-cpp-rwkv-world": (None, "think"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "openbmb-MiniCPM5-1B": (None, "think"),
    "poolside-Laguna-S-2.1": ("glm45", "think"),
    "poolside-Laguna-XS-2.1": ("glm45", "think"),
    "poolside-Laguna-XS.2": ("glm45", "think"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
    "vllm-deepseekr1": ("deepseek_v3", "think"),
    "vllm-deepseekv3": ("deepseek_v3", None),
    "vllm-deepseekv31": ("deepseek_v31", "think"),
    "vllm-functiongemma": ("functiongemma", None),
    "vllm-gemma3_pythonic": ("pythonic", None),
    "vllm-gemma4": ("gemma4", "gemma4"),
    "vllm-glm4": ("glm45", None),
    "vllm-granite": ("granite", None),
    "vllm-hermes": ("hermes", None),
    "vllm-hunyuan_a13b": (None, "think"),
    "vllm-llama3.1_json": ("llama3_json", None),
    "vllm-llama3.2_json": ("llama3_json", None),
    "vllm-llama3.2_pythonic": ("pythonic", None),
    "vllm-llama4_json": ("llama3_json", None),
    "vllm-llama4_pythonic": ("llama4_pythonic", None),
    "vllm-mistral": ("mistral", None),
    "vllm-mistral3": ("mistral", None),
    "vllm-mistral_parallel": ("mistral", None),
    "vllm-phi4_mini": ("phi4_mini_json", None),
    "vllm-qwen3coder": ("qwen3_coder", None),
    "vllm-toolace": ("pythonic", None),
}
# Templates that refuse a conversation with tools, with transformers, too.
REFUSING = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "no attribute 'additionalProperties'",
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
    "google-gemma-2-2b-it": "roles must alternate",
    "llama-cpp-deepseek-r1": "not JSON serializable",
    "llama-cpp-rwkv-world": "leaves out the text of message 2",
    "microsoft-Phi-3.5-mini-instruct": "leaves out the text of message 2",
    "vllm-glm4": "leaves out the text of message 2",
}
UNUSABLE = {
    "Kimi-K2-Instruct", "Kimi-K2-Thinking",  # they change lists, which the sandbox of transformers forbids
    "fireworks-ai-llama-3-firefunction-v2",  # it needs a variable of its own
    "llama-cpp-deepseek-r1",  # it writes a list that is no list yet
    "vllm-deepseekv31", "vllm-mistral_parallel",  # they write the text before the message in another way when they ask
    "vllm-glm4",  # it asks for calls of GLM-4.5, and writes them as Hermes does
}  # fmt: skip
# Mistral's models whose tokenizers have the token [ARGS].
NAMED = {
    "Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Ministral-3-14B-Reasoning-2512",
    "unsloth-mistral-Devstral-Small-2507",
}  # fmt: skip
# Ends of messages that differ from those without calls.
TAILS = {
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "<｜end▁of▁sentence｜><｜Assistant｜><｜end▁of▁sentence｜>",
    "google-gemma-4-31B-it": "<|tool_response>",
    "openai-gpt-oss-120b": "<|call|>",
    "vllm-gemma4": "<|tool_response>",
}
# Templates of vLLM that write calls in another way than their models.
LOOSE = {
    "vllm-deepseekv3", "vllm-granite",  # white space of the template's own lines
    "vllm-functiongemma", "vllm-llama4_pythonic",  # all values as texts
    "vllm-mistral", "vllm-mistral3",  # a space in front of the list
    "vllm-phi4_mini",  # an object of Python inside one of JSON
}  # fmt: skip
UNQUOTED = {"vllm-llama3.2_pythonic", "vllm-toolace"}  # texts without quotation marks
UNDIVIDED = {"vllm-gemma3_pythonic"}  # no commas between arguments
UNESCAPED = {"vllm-llama4_pythonic"}  # quotation marks as they are
BARE = {"vllm-llama4_json", "vllm-llama4_pythonic"}  # calls without a mark are no calls behind a text
WITHOUT_CALLS = {"ibm-granite-granite-3.3-2B-Instruct"}  # its calls are a part of the text
WITHOUT_END = {"deepseek-ai-DeepSeek-R1-Distill-Llama-8B"}  # it forgets the mark behind the last of several calls
ASKED = {"role": "user", "content": "How is it?"}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Name."},
        "days": {"type": "integer", "description": "How many."},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "Words."},
        "dry": {"type": "boolean", "description": "No rain."},
        "more": {
            "type": "object",
            "properties": {"a": {"type": "number", "description": "A."}},
            "description": "More.",
        },
    },
    "required": ["city"],
}
EMPTY = {"type": "object", "properties": {}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Tell the {name}.", "parameters": schema}}
    for name, schema in (("weather", SCHEMA), ("clock", EMPTY))
]
FUNCTIONS = [Function(name="weather", parameters=SCHEMA), Function(name="clock", parameters=EMPTY)]
CALLS = [
    ("weather", {"city": 'Rome "x" <b>é', "days": 3, "tags": ["a", "b"], "dry": True, "more": {"a": 1.5}}),
    ("clock", {}),
]
FEW_ARGUMENTS = [("weather", {"days": 3}), ("clock", {})]
PLAIN_TEXTS = [("weather", {"city": "Rome", "days": 3, "tags": ["a", "b"], "dry": True, "more": {"a": 1.5}}), CALLS[1]]


def message(calls, content="", reasoning=None):
    made = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    said = {"role": "assistant", "content": content, "tool_calls": made}
    return said if reasoning is None else said | {"reasoning_content": reasoning}


def split(form, source, prompt, pieces):
    """Return the reasoning of an output in pieces, and the pieces of the rest."""
    reasoning = FORMS.get(form.form.reasoning) or reasoning_form("auto", [source])
    if reasoning is None:
        return "", list(pieces)
    parser = reasoning.new_parser(prompt, form.form.start_marks)()
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.feed("", is_last=True)
    thought = "".join(part.text for part in parts if part.is_reasoning)
    return thought, [part.text for part in parts if not part.is_reasoning]


def parsed(form, source, prompt, pieces):
    """Return reasoning, content and calls of an output in pieces."""
    thought, pieces = split(form, source, prompt, pieces)
    content, calls = outcome(form, pieces, functions=FUNCTIONS)
    return thought, TAIL.sub("", content).strip(), [(name, json.loads(given)) for _, name, given in calls]


@pytest.fixture(scope="module")
def sources():
    """The templates by name."""
    return templates()


@pytest.fixture(scope="module")
def tokens():
    """A tokenizer for grammars, to which all marks are plain text."""
    tokenizer = load_tokenizer(DIRECTORY)
    return LLTokenizer(backend(tokenizer).to_str(), eos_token=tokenizer.eos_token_id)


def test_forms_are_detected(sources):
    thinks = FORMS["deepseek_r1"]
    named = {id(form): name for name, form in FORMS.items() if form is not thinks} | {id(thinks): "think"}
    found = {}
    for name, source in sources.items():
        reasoning = reasoning_form("auto", [source])
        found[name] = (detect(source), reasoning and named[id(reasoning)])
    assert {name: forms for name, forms in found.items() if forms != (None, None)} == WANTED
    assert len(sources) == 97


@pytest.mark.parametrize("name", [name for name, (form, _) in WANTED.items() if form and name not in UNUSABLE])
def test_a_message_is_read_back(sources, name):
    source, form = sources[name], FORMATS[WANTED[name][0]]
    both = FEW_ARGUMENTS if name in UNQUOTED | UNDIVIDED else PLAIN_TEXTS if name in UNESCAPED else CALLS
    messages = [("", None, both[:1]), ("", None, both)]
    if name not in BARE:
        messages += [("Let me see.", None, both[:1]), ("Let me see.", "I think.", both)]
    for content, thought, calls in messages:
        written = output(source, [ASKED, message(calls, content, thought)], TOOLS)
        if name in WITHOUT_CALLS or written.is_several:
            continue
        wanted = (thought if thought and thought in written.text else "", content if content in written.text else "")
        for pieces in ([written.text], written.text, *cuts(written.text)):
            assert parsed(form, source, written.prompt, pieces) == (*wanted, calls), pieces


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (form, _) in WANTED.items()
        if form and name not in UNUSABLE | WITHOUT_CALLS | WITHOUT_END | LOOSE | UNQUOTED | UNDIVIDED
    ],
)
def test_the_grammar_allows_calls_as_the_template_writes_them(sources, tokens, name):
    source, form = sources[name], FORMATS[WANTED[name][0]]
    if name in NAMED:
        form = replace(form, form=form.form.variant[1])
    written = output(source, [ASKED, message([("weather", {"city": "Rome", "days": 3})])], TOOLS)
    plain = output(source, [ASKED, {"role": "assistant", "content": "Fine!"}], TOOLS)
    end = TAILS.get(name) or common_start(written.text[::-1], plain.text[::-1])[::-1]
    _, pieces = split(form, source, written.prompt, [written.text.removesuffix(end)])
    assert accepts(tokens, form.grammar(FUNCTIONS, parallel=True), "".join(pieces).strip())


def cuts(text):
    """Yield divisions into two parts."""
    return [(text[:at], text[at:]) for at in range(1, len(text))]


HISTORY = [
    ASKED, message(CALLS, "Let me see.", "I think."),
    {"role": "tool", "tool_call_id": "call00000", "content": "Sunny and warm"},
    {"role": "tool", "tool_call_id": "call00001", "content": "Half past nine"},
    {"role": "assistant", "content": "It is fine."}, {"role": "user", "content": "And tomorrow?"},
]  # fmt: skip
TEXTS = ("How is it?", "weather", "Rome", "clock", "Sunny and warm", "Half past nine", "It is fine.", "And tomorrow?")


def test_a_history_is_in_the_prompt(sources):
    for name, source in sources.items():
        template = Template(source, SPECIAL)
        if name in REFUSING:
            with pytest.raises(ValueError, match=REFUSING[name]):
                render(template, HISTORY, tools=TOOLS)
        else:
            prompt = render(template, HISTORY, tools=TOOLS)
            assert [text for text in TEXTS if text not in prompt] == [], name
            assert "zqx" not in prompt

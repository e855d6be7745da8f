# ruff: noqa: RUF001 - DeepSeek's marks have full-width bars
"""All forms of tool calls: they are parsed back from templates, from any pieces, and without loss."""

import itertools
import json
import random
import re

import pytest

from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers import parser as parser_module
from jpaged.serving.tool_parsers import pieces
from jpaged.serving.tool_parsers.format import FORMATS
from jpaged.serving.tool_parsers.ids import NAMED, RANDOM, SHORT
from jpaged.serving.tool_parsers.parser import ToolParser
from tests.serving.tool_templates import WITHOUT_CONTENT, rendered
from tests.serving.tool_texts import outcome

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "ratio": {"type": "number"},
    "dry": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "more": {"type": "object"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "unit": {"$ref": "#/$defs/Unit"},
}
WEATHER = {"type": "object", "properties": PROPERTIES, "$defs": {"Unit": {"enum": ["C", "F"]}}}
FUNCTIONS = [Function(name="weather", parameters=WEATHER), Function(name="time", parameters={"type": "object"})]
NAMES = tuple(sorted(FORMATS))
EACH = pytest.mark.parametrize("name", NAMES)
DEEP = pytest.param(50_000, marks=pytest.mark.deep)


def parsed(name, pieces, parallel=True):
    """Return the content and the calls as (name, arguments)."""
    content, calls = outcome(FORMATS[name], pieces, parallel, FUNCTIONS)
    return content, [call[1:] for call in calls]


def text(rng):
    return "".join(rng.choices(["a", "Rome ", "é", "'", '"', "\\", "\n", "{", "]", ",", "<b>", "東", "1", " = "], k=3))


def arguments(rng):
    """Return some arguments of `weather`."""
    values = {
        "city": text(rng),
        "days": rng.randrange(-5, 400),
        "ratio": rng.choice([0.5, -2.25, 1e30]),
        "dry": rng.random() < 0.5,
        "tags": [text(rng) for _ in range(rng.randrange(3))],
        "more": {"a": [None, {"b": text(rng)}], "c": False},
        "note": rng.choice([None, "so"]),
        "unit": rng.choice("CF"),
    }
    return {key: values[key] for key in rng.sample(sorted(values), rng.randrange(5))}


def calls(rng, most=3):
    return [("weather", arguments(rng)) if rng.random() < 0.7 else ("time", {}) for _ in range(rng.randint(1, most))]


@EACH
def test_rendered_calls_are_parsed_back(name):
    rng = random.Random(1)
    for _ in range(60):
        wanted, content = calls(rng), "" if name in WITHOUT_CONTENT else rng.choice(["", "Let me see.", "é <"])
        found, read = parsed(name, [rendered(name, wanted, content)])
        assert (found, [(called, json.loads(given)) for called, given in read]) == (content, wanted)
        assert parsed(name, [rendered(name, wanted, content)], parallel=False) == (content, read[:1])


# The assistant's part of prompts that mistral-common 1.13.1 wrote by its templates of versions 3, 11 and 13.
MISTRAL = [
    '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome", "days": 3}, "id": "abcdefghi"}, '
    '{"name": "time", "arguments": {}, "id": "abcdefghj"}]',
    '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Rome", "days": 3}[TOOL_CALLS]time[CALL_ID]abcdefghj[ARGS]{}',
    '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 3}[TOOL_CALLS]time[ARGS]{}',
]


@pytest.mark.parametrize("written", MISTRAL)
def test_prompts_of_mistral_common_are_parsed_back(written):
    wanted = [("weather", '{"city": "Rome", "days": 3}'), ("time", "{}")]
    assert parsed("mistral", [written]) == parsed("mistral", written) == ("", wanted)


ROME = [("weather", '{"city": "Rome"}')]
NOON = [("time", "{}")]
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
NESTED = '<tool_call>{"name": "time", "arguments": {"x": '
XML = "<function=weather><parameter=city>Rome</parameter>"


@pytest.mark.parametrize(
    "name, written, content, found",
    [
        ("qwen3_coder", f"<tool_call>{XML}</function></tool_call> so", " so", ROME),
        ("qwen3_coder", f"<tool_call>{XML}</tool_call>", "", ROME),  # without the end of the function
        ("qwen3_coder", f"<tool_call>\n{XML} and </function>", " and </function>", ROME),
        ("qwen3_coder", f"<tool_call>{XML}</fun", "", [("weather", '{"city": "Rome"')]),
        ("qwen3_coder", f"<tool_call>{XML[:-12]}", "", [("weather", '{"city": "Rome')]),
        ("qwen3_coder", f"<tool_call>{XML[:-3]}", "", [("weather", '{"city": "Rome</paramet')]),
        ("qwen3_coder", f"So {XML}</function></tool_call><tool_call>{XML}</function></tool_call>", "So", ROME * 2),
        ("qwen3_coder", "<function=<function=time></function>", "<function=", NOON),
        ("qwen3_coder", "<tool_call><function=cook></function>", "<tool_call><function=cook></function>", []),
        ("qwen3_coder", "<tool_call><function=time>\n</function>\n</tool_call>\n", "", NOON),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n<parameter=days>\n7\n</function>", "",
         [("weather", '{"city": "Rome", "days": 7}')]),  # without the ends of the values
        ("glm45", "<tool_call>time</tool_call>", "", NOON),
        ("glm45", "So<tool_call>time\n<arg_key> x </arg_key> <arg_value>\n7</arg_value></tool_call>", "So",
         [("time", '{"x": "\\n7"}')]),
        ("glm45", "<tool_call>time or so</tool_call>", "<tool_call>time or so</tool_call>", []),
        ("deepseek_v3", V3 + "time\n```json\n{}\n```", "", NOON),
        ("deepseek_v3", V3 + "time\n{}", V3 + "time\n{}", []),
        ("mistral", "[TOOL_CALLS]time {}", "", NOON),  # without a mark
        ("mistral", "[TOOL_CALLS]time now: {}", "[TOOL_CALLS]time now: {}", []),
        ("mistral", "[TOOL_CALLS]no[TOOL_CALLS]time[ARGS]{} [TOOL", "[TOOL_CALLS]no [TOOL", NOON),
        ("mistral", '[TOOL_CALLS] [TOOL_CALLS] {"name": "time"}', "", NOON),
        ("mistral", "[TOOL_CALLS] [TOOL_CALLS]no", "[TOOL_CALLS] [TOOL_CALLS]no", []),
        ("granite", '<tool_call>[{"name": "time"}]', "", NOON),
        ("granite", '<|tool_call|>[{"name": "time"}, x]', ", x]", NOON),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>time<|tool_call_argument_begin|>{}", "", NOON),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>weather<|tool_call_argument_begin|>{\"city\": [1"
         "<|tool_call_end|><|tool_call_begin|>time<|tool_call_argument_begin|>{}<|tool_call_end|>"
         "<|tool_calls_section_end|>", "", [("weather", '{"city": [1'), *NOON]),  # the first arguments break off
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": {}</tool_call><tool_call>{"name": "time"}', "",
         [("weather", '{"city": {}'), *NOON]),
        ("pythonic", "[time()] [time()]", "", NOON * 2),
        ("pythonic", "[time(7)]", "[time(7)]", []),
        ("pythonic", "[time(x=7, )", "", [("time", '{"x": 7}')]),
        ("pythonic", "[time(x=oops)]", "oops)]", [("time", '{"x": ')]),
        ("pythonic", "[time(x='it\\'s', y=\"\"\"a \"b\" \\n\"\"\", z='')]", "",
         [("time", '{"x": "it\'s", "y": "a \\"b\\" \\n", "z": ""}')]),
        ("pythonic", r"[time(x='\x41\u00e9\ud83d\ude00\d')]", "", [("time", '{"x": "Aé😀\\\\d"}')]),
        ("pythonic", "[time(x=(1, -2.50, 1_000), y={'a': None, \"b\": true})]", "",
         [("time", '{"x": [1, -2.5, 1000], "y": {"a": null, "b": true}}')]),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("llama4_pythonic", "<|python_start|>[time()]", "", NOON),
        ("functiongemma", "<start_function_call>call:time{a:<escape>x, y<escape>, b: word, c:[1,{d:null}]}", "",
         [("time", '{"a": "x, y", "b": "word", "c": [1, {"d": null}]}')]),
        ("gemma4", '<|tool_call>:weather{city:<|"|>Rome<|"|>}<tool_call|>', "", ROME),
        ("gemma4", "<|tool_call>cal:time{}<tool_call|>", "<|tool_call>cal:time{}<tool_call|>", []),
        ("olmo3", "So <function_calls>time()\nweather(city='Rome')</function_calls> and", "So and", NOON + ROME),
        ("olmo3", "<function_calls>\ntime()\ncook()\n</function_calls>", "\ncook()\n</function_calls>", NOON),
        ("openai", "<|channel|>commentary to=functions.time<|channel|>commentary json<|message|>{}", "", NOON),
        ("openai", "<|channel|>final<|message|>Hi", "<|channel|>final<|message|>Hi", []),
        ("minimax_m2", '<minimax:tool_call><invoke name="time"></invoke><invoke name="weather"><parameter name="city">'
         "Rome</parameter></invoke></minimax:tool_call>", "", NOON + ROME),
    ],
)  # fmt: skip
def test_unusual_text_gives_content_and_calls(name, written, content, found):
    assert parsed(name, [written]) == parsed(name, written) == (content, found)


@pytest.mark.parametrize(
    "name, head", [("pythonic", "[time(x="), ("gemma4", "<|tool_call>call:time{x:"), ("hermes", NESTED)]
)
def test_a_value_in_endless_lists_breaks_off(name, head):
    content, found = parsed(name, [head + "[" * 5000])
    arguments = found[0][1]
    assert len(found) == 1 and arguments.count("[") + content.count("[") == 5000


@pytest.mark.parametrize(
    "key, written, given",
    [
        ("city", "7", '"7"'), ("city", "null", '"null"'), ("city", "", '""'), ("unit", "C", '"C"'),
        ("days", "7", "7"), ("days", " 7\n", "7"), ("days", "7.0", "7"), ("days", "7.5", '"7.5"'),
        ("days", "many", '"many"'), ("days", '"7"', '"\\"7\\""'), ("ratio", "7", "7"), ("ratio", "1e3", "1000.0"),
        ("ratio", "NaN", '"NaN"'), ("dry", "true", "true"), ("dry", "False", "false"), ("dry", "1", '"1"'),
        ("tags", '["a"]', '["a"]'), ("tags", "a", '"a"'), ("more", '{"a": [1]}', '{"a": [1]}'),
        ("tags", "['a', \"b\"]", '["a", "b"]'), ("more", "{'a': (1, None)}", '{"a": [1, null]}'),
        ("tags", "['a'", '"[\'a\'"'), ("tags", "['a'] b", '"[\'a\'] b"'), ("tags", "[" * 3000, f'"{"[" * 3000}"'),
        ("note", "null", "null"), ("note", "None", "null"), ("note", "so", '"so"'), ("other", "7", '"7"'),
    ],
)  # fmt: skip
def test_value_in_tags_has_the_type_of_its_schema(key, written, given):
    text = f"<tool_call><function=weather><parameter={key}>\n{written}\n</parameter></function></tool_call>"
    assert parsed("qwen3_coder", [text]) == ("", [("weather", f'{{"{key}": {given}}}')])


@pytest.mark.parametrize(
    "key, written, given",
    [
        ("city", "7", '"7"'), ("note", "null", '"null"'), ("other", "7", '"7"'), ("days", "7", "7"),
        ("days", "many", '"many"'), ("dry", "True", "true"), ("ratio", "7", "7"), ("tags", "['a', 'b']", '["a", "b"]'),
    ],
)  # fmt: skip
def test_a_text_for_a_value_of_another_type_is_converted(key, written, given):
    for name, text in (
        ("functiongemma", f"<start_function_call>call:weather{{{key}:<escape>{written}<escape>}}<end_function_call>"),
        ("llama4_pythonic", f'[weather({key}="{written}")]'),
    ):
        for parts in ([text], text):
            assert parsed(name, parts) == ("", [("weather", f'{{"{key}": {given}}}')])
    assert parsed("pythonic", ["[weather(days='7"])[1][0][1] == '{"days": "7'  # it breaks off


FRAGMENTS = {
    "deepseek_v3": ["\n```json\n", "```"], "mistral": ["[ARGS]", "[", '{"name": "time"}'],
    "granite": ["[", '{"name": "time"}'], "hermes": ['{"name": "time", "arguments": ', "}"],
    "llama3_json": ['{"name": "time", "parameters": ', "}"], "llama4_json": ['{"name": "time", "parameters": '],
    "olmo3": ["time(", "x=", "'", ")"], "phi4_mini_json": ["[", '{"name": "time"}'],
    "pythonic": ["[", "time(", "x=", "'", ")", "]"], "llama4_pythonic": ["[time(", "x=", "'", ")", "]"],
    "kimi_k2": ["functions.time", ":0"], "functiongemma": ["time{", "x:", "}"], "gemma4": ["time{", "x:", "}"],
    "qwen3_coder": ["time>", ">"], "seed_oss": ["time>", ">"], "minimax_m2": ['time">', '">'],
}  # fmt: skip
COMMON = ["time", "weather", "{}", '{"a": "}"}', "{", "}", '"', " ", "\n", ", ", "\\", "é"]


def random_text(name, rng, words=0):
    """Return marks, parts of calls, and whole calls in random order, with some words between them."""
    form = FORMATS[name].form
    marks = [*filter(None, form.texts), form.start[: len(form.start) // 2 + 1], *FRAGMENTS.get(name, ())]
    parts = rng.choices([*marks * 2, *COMMON], k=rng.randrange(12))
    if rng.random() < 0.5:
        parts.insert(rng.randrange(len(parts) + 1), rendered(name, calls(rng, 2)))
    for word in range(words):
        parts.insert(rng.randrange(len(parts) + 1), f"w{word}w")
    return "".join(parts)


def cuts_of(text, rng):
    """Yield divisions: into two parts at any place, into characters, and some at random."""
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    for _ in range(3):
        places = [0, *sorted(rng.choices(range(len(text) + 1), k=4)), len(text)]
        yield [text[a:b] for a, b in itertools.pairwise(places)]


def check_pieces(name, num_texts, share=1.0):
    """Check that pieces of texts give the result of the whole; of a share of the divisions of each."""
    rng = random.Random(num_texts)
    for _ in range(num_texts):
        text, parallel = random_text(name, rng), rng.random() < 0.8
        whole = parsed(name, [text], parallel)
        for cut in cuts_of(text, rng):
            if rng.random() < share:
                assert parsed(name, cut, parallel) == whole, cut


@EACH
@pytest.mark.parametrize("share", [0.02, pytest.param(1.0, marks=pytest.mark.deep)])
def test_result_does_not_depend_on_pieces(name, share):
    check_pieces(name, 200, share)
    if share < 1:
        check_pieces(name, 3)


def lost_words(name, text):
    """Return the words of a text that neither the content nor exactly one call has."""
    content, found = parsed(name, [text])
    left = "\0".join([content, *(given for _, given in found)])
    words = [match[1] for match in re.finditer(r'(?<!")(w\d+w)', text)]  # a member of JSON may be ignored
    return [word for word in words if left.count(word) != 1]


def check_words(num_texts, names=NAMES):
    rng = random.Random(num_texts)
    for number in range(num_texts):
        name = names[number % len(names)]
        text = random_text(name, rng, words=4)
        assert not lost_words(name, text), (name, text)


@pytest.mark.parametrize("num_texts", [3_000, DEEP])
def test_random_texts_lose_no_word(num_texts):
    check_words(num_texts)


def test_checks_find_planted_faults(monkeypatch):
    with monkeypatch.context() as patch:  # an incomplete mark is taken for content
        patch.setattr(parser_module, "overlap", lambda text, mark: 0)
        for name in sorted(FORMATS):
            if FORMATS[name].form.starts:
                with pytest.raises(AssertionError):
                    check_pieces(name, 20)
    with monkeypatch.context() as patch:  # an incomplete mark is taken for a part of a value
        patch.setattr(pieces, "overlap", lambda text, mark: 0)
        for name in ("qwen3_coder", "glm45", "minimax_m2", "gemma4"):
            with pytest.raises(AssertionError):
                check_pieces(name, 60)
    run = ToolParser._run

    def drops_what_is_no_call(parser):
        found = yield from run(parser)
        if not found:
            parser.at = len(parser.text)
            parser.take()
        return found

    monkeypatch.setattr(ToolParser, "_run", drops_what_is_no_call)
    for name in sorted(FORMATS):
        with pytest.raises(AssertionError):
            check_words(200, (name,))


def test_ids_have_the_form_that_templates_demand():
    assert FORMATS["mistral"].form.ids is SHORT and FORMATS["kimi_k2"].form.ids is NAMED
    assert FORMATS["hermes"].form.ids is RANDOM
    assert re.fullmatch("[a-z0-9]{9}", SHORT.new("time", 0)) and SHORT.in_template("toolu_abcdefghi") == "abcdefghi"
    other = SHORT.in_template("call_0123456789")
    assert re.fullmatch("[a-z0-9]{9}", other) and other == SHORT.in_template("call_0123456789") != SHORT.in_template(
        "x"
    )
    assert NAMED.new("time", 2) == "functions.time:2" == NAMED.in_template("toolu_functions.time:2")

# ruff: noqa: RUF001 - DeepSeek's marks have full-width bars
"""Parsing of tool calls: content and calls are the same for any division of the text into pieces."""

import itertools
import json
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jpaged.serving.tool_parsers.detect import detect
from tests.serving.tool_texts import (
    FUNCTIONS,
    HERMES,
    LLAMA,
    NAMES,
    NOON,
    NOON_CALL,
    ROME,
    ROME_CALL,
    hermes,
    outcome,
    read,
)

TOKYO = '{"name": "weather", "parameters": {"city": "東京"}}'
TOKYO_CALL = ("weather", '{"city": "東京"}')


@pytest.mark.parametrize(
    "text, content, calls",
    [
        (hermes(ROME), "", [ROME_CALL]),
        (hermes(ROME, NOON), "", [ROME_CALL, NOON_CALL]),
        (f"Let me see.\n\n{hermes(ROME, NOON)} \n", "Let me see.", [ROME_CALL, NOON_CALL]),
        (f"One: {hermes(ROME)} and two: {hermes(NOON)} done \n", "One: and two: done", [ROME_CALL, NOON_CALL]),
        (f"<tool_call>{ROME}<tool_call>{NOON}", "", [ROME_CALL, NOON_CALL]),  # no closing tags
        (f"{hermes(ROME)[:-3]}", "", [ROME_CALL]),  # incomplete
        (f"{hermes(ROME)} 1 < 2 <tool", " 1 < 2 <tool", [ROME_CALL]),
        (
            '<tool_call>{"name": "weather", "arguments": {}</tool_call> so',
            " so",
            [("weather", "{}")],
        ),  # no last brace
        ("<tool_call><tool_call>" + NOON + "</tool_call>", "", [NOON_CALL]),
        (hermes(NOON.replace("time", "tim"), NOON), hermes(NOON.replace("time", "tim")), [NOON_CALL]),
        ("<tool_call>\nweather(Rome)\n</tool_call>\n", "<tool_call>\nweather(Rome)\n</tool_call>\n", []),
        (ROME, ROME, []),
    ],
)
def test_hermes_text_gives_content_and_calls(text, content, calls):
    assert read(HERMES, text) == (content, calls)


@pytest.mark.parametrize(
    "text, content, calls",
    [
        (TOKYO, "", [TOKYO_CALL]),
        (f"\n<|python_tag|> {TOKYO}\n", "", [TOKYO_CALL]),
        (f"{TOKYO}; {NOON}", "", [TOKYO_CALL, NOON_CALL]),
        (f"{TOKYO}\n{NOON};", "", [TOKYO_CALL, NOON_CALL]),
        (f"<|python_tag|>{TOKYO};<|python_tag|>{NOON}", "", [TOKYO_CALL, NOON_CALL]),
        ('{"type": "function", "name": "time", "parameters": {}}', "", [NOON_CALL]),
        (f"{TOKYO}\nDone. {NOON}\n", f"\nDone. {NOON}\n", [TOKYO_CALL]),
        (f'{TOKYO}; {{"name": "bob"}} {NOON}', f'; {{"name": "bob"}} {NOON}', [TOKYO_CALL]),
        (f"I call {TOKYO}", f"I call {TOKYO}", []),
        ('{"name": "Bob", "age": 3}\n', '{"name": "Bob", "age": 3}\n', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("<|python_", "<|python_", []),
        (" \n", " \n", []),
        ("", "", []),
    ],
)
def test_llama_text_gives_content_and_calls(text, content, calls):
    assert read(LLAMA, text) == (content, calls)


@pytest.mark.parametrize(
    "written, given",
    [
        ('{"a" : [1,2 ,{"b":null}] }', '{"a" : [1,2 ,{"b":null}] }'),  # as written
        (r'{"a": "}{][\"\\", "b\"}": "</tool_call>\\\""}', r'{"a": "}{][\"\\", "b\"}": "</tool_call>\\\""}'),
        ("null", "{}"),
        (r'"{\"a\": \"\\u00e9\"}"', '{"a": "\\u00e9"}'),
        ('"{}"', "{}"),
        ('"Rome"', None),
        ('"[1]"', None),
        ('""', None),
        (r'"{\"a\": \"\ud800\"}"', None),  # half a surrogate pair
        ('"' + "[" * 100_000 + '"', None),
        ("[1]", None),
        ("7", None),
        ("tru", None),
        ("", None),
    ],
)
@pytest.mark.parametrize(
    "form", ['{"name":"time","arguments":%s}', '{"parameters" : %s,"x":[{}],"name" : "ti\\u006de" }']
)
def test_arguments_in_any_json_are_kept_or_rejected(form, written, given):
    text = form % written
    assert read(LLAMA, text) == (("", [("time", given)]) if given is not None else (text, []))


@pytest.mark.parametrize(
    "call",
    [
        "{}",
        '{"arguments": {}}',
        '{"name": 7, "arguments": {}}',
        '{"name": ["time"], "arguments": {}}',
        '{"name": "ti\nme", "arguments": {}}',
        '{"name" "time"}',
        '{"name": "time" "arguments": {}}',
        '{"name": "time", {}}',
        '{"x": ], "name": "time"}',
        '{"name": "time"',
        '{"arguments": {}, "name": "time"',
        "[" + NOON + "]",
    ],
)
def test_malformed_call_is_content(call):
    assert read(LLAMA, call) == (call, [])
    assert read(HERMES, f"<tool_call> {call} </tool_call>\n") == (f"<tool_call> {call} </tool_call>\n", [])


def test_missing_arguments_give_an_empty_object():
    assert read(LLAMA, '{"name": "time"}') == ("", [NOON_CALL])


def test_incomplete_call_keeps_its_arguments_so_far():
    assert read(LLAMA, TOKYO[:-3]) == ("", [("weather", TOKYO_CALL[1][:-2])])
    assert read(HERMES, f"<tool_call>{ROME[:-1]}, 7: <tool_call>{NOON}") == (", 7:", [ROME_CALL, NOON_CALL])


@pytest.mark.parametrize("kind, text", [(HERMES, hermes(ROME, NOON, NOON)), (LLAMA, f"{ROME}; {NOON}; {NOON}")])
def test_only_first_call_is_kept_without_parallel_calls(kind, text):
    assert outcome(kind, [text], parallel=False) == ("", [("call-0", *ROME_CALL)])
    assert [call[0] for call in outcome(kind, [text])[1]] == ["call-0", "call-1", "call-2"]


def test_only_ambiguous_text_is_held_back():
    def steps(kind, pieces):
        parser = kind.parser(FUNCTIONS, lambda name, index: "id")
        return [(p.content, [(d.name, d.arguments) for d in p.calls]) for p in map(parser.feed, pieces)]

    text = [
        "a <",
        "b",
        " <tool_c",
        "all",
        " >",
        "\n",
        "<tool_call",
        ">",
        '{"name": "weath',
        'er", "arguments":',
        " ",
        '{"',
    ]
    assert steps(HERMES, text) == [
        ("a", []), (" <b", []), ("", []), ("", []), (" <tool_call >", []), ("", []), ("", []), ("", []), ("", []),
        ("", []), ("", []), ("", [("weather", '{"')]),
    ]  # fmt: skip
    given = ["{", '"a\\', '"', '": "', "x}", '"', " }"]
    assert steps(LLAMA, ['{"name": "time", "parameters": ', *given, "}", "; ", "and"]) == [
        ("", []), ("", [("time", "{")]), *[("", [(None, piece)]) for piece in given[1:]], ("", []), ("", []),
        ("; and", []),
    ]  # fmt: skip
    assert steps(LLAMA, ["{", '"name": "bob"', ", x", "y"]) == [
        ("", []),
        ('{"name": "bob"', []),
        (", x", []),
        ("y", []),
    ]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<tool", "<", '{"name": ', '"weather"', '"time"', '"bob"',
    ', "arguments": ', ', "parameters": ', "{", "}", "[", "]", '"', "\\", '\\"', ": ", ", ", ";", "\n", " ", "null",
    "7", '{"a": "}{\\""}', '"{}"', "é", "text", ROME, NOON, hermes(NOON), TOKYO,
]  # fmt: skip
KINDS = st.sampled_from([HERMES, LLAMA])


def pieces_of(text, cuts):
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=400)
@given(KINDS, st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.lists(st.integers(0, 1000)), st.booleans())
@example(HERMES, ["<tool_call>", "<tool_call>", NOON, "<", " ", hermes(NOON)], [12], True)
def test_result_does_not_depend_on_pieces(kind, fragments, cuts, parallel):
    text = "".join(fragments)
    whole = outcome(kind, [text], parallel)
    assert outcome(kind, text, parallel) == outcome(kind, pieces_of(text, cuts), parallel) == whole
    if not whole[1]:
        assert whole[0] == text
    if not parallel:
        everything = outcome(kind, [text])
        assert (everything[0], everything[1][:1]) == whole


WORDS = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=12)
ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[]<>;,:\n é\U0001f600', max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@given(
    KINDS,
    WORDS,
    st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS, st.booleans(), st.booleans()), min_size=1, max_size=3),
    st.lists(st.integers(0, 1000)),
)
def test_random_calls_are_parsed_to_their_names_and_arguments(kind, words, wanted, cuts):
    written, calls = [], []
    for name, arguments, name_first, escaped in wanted:
        arguments = json.dumps(arguments, ensure_ascii=escaped)
        members = [f'"name": "{name}"', f'"arguments": {arguments}']
        written.append("{" + ", ".join(members if name_first else reversed(members)) + "}")
        calls.append((name, arguments))
    text = f"{words} {hermes(*written)}" if kind is HERMES else "; ".join(written)
    content, read = outcome(kind, pieces_of(text, cuts))
    assert [call[1:] for call in read] == calls
    assert content == (words.rstrip() if kind is HERMES else "")


@pytest.mark.parametrize(
    "template, name",
    [
        ('{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' + (call.arguments | tojson) }}', "hermes"),
        ("{{ '<tool_call>\\n<function=' + call.name + '>' }}", "qwen3_coder"),
        ("{{ '<tool_call>' + call.name }}<arg_key>{{ key }}</arg_key>", "glm45"),
        ("{{ '<tool_call>' + call.name }}<arg_key>{{ key }}</arg_key><arg_value>", "glm47"),
        ("{{ '[TOOL_CALLS]' + call.name }}", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json\n", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek_v31"),
        ("<|channel|>commentary to=functions.{{ name }}", "openai"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<seed:tool_call>\n<function=", "seed_oss"),
        ("<start_function_call>call:", "functiongemma"),
        ("<|tool_call>call:", "gemma4"),
        ("<|tool_call|>[{", "granite"),
        ("<|header_start|> write [func_name1(params_name1=1)]", "llama4_pythonic"),
        ("write [func_name1(params_name1=1)]", "pythonic"),
        ("{{ '<|python_tag|>' + call.name }}", "llama3_json"),
        ("{{ '{\"name\": \"' + call.name + '\", ' }}\n{{ '\"parameters\": ' }}", "llama3_json"),
        ('{{ "{\\"name\\": \\"" + call.name + "\\", \\"parameters\\": " }}', "llama3_json"),
        (
            '{"name": "{{ tool.name }}", "description": "{{ tool.description }}", "parameters": {{ tool.parameters }}}',
            None,
        ),
        ("{{ message.content }}", None),
    ],
)
def test_format_is_detected_from_the_chat_template(template, name):
    assert detect(template) == name


@pytest.mark.parametrize(
    "text, content, calls",
    [
        (hermes(ROME, NOON), "", [ROME_CALL, NOON_CALL]),
        (f" \n{hermes(ROME)}", "", [ROME_CALL]),
        (json.dumps({"city": hermes(ROME)}), json.dumps({"city": hermes(ROME)}), []),
        (f"[1, {hermes(ROME)}", f"[1, {hermes(ROME)}", []),
        (f"<tool {hermes(ROME)}", f"<tool {hermes(ROME)}", []),
        ("<tool", "<tool", []),
        ("", "", []),
    ],
)
def test_text_with_an_answer_has_calls_only_at_its_beginning(text, content, calls):
    assert read(partial(HERMES.parser, with_answer=True), text) == (content, calls)

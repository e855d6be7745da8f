"""Tool calls: the same calls for any pieces of text; and grammars with only valid calls."""

import itertools
import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken

import jpaged.demo
from jpaged.serving.tools import FORMATS, Tool, detect
from jpaged.tokenizer import backend, load_tokenizer

MODEL = Path(jpaged.demo.__file__).parent / "model"
NAMES = ["weather", "time"]
HERMES, LLAMA = FORMATS["hermes"], FORMATS["llama3_json"]


def outcome(kind, pieces, parallel=True):
    """The content, the calls as (id, name, arguments), and whether any was made, of a text that comes in pieces."""
    ids = (f"call-{i}" for i in itertools.count())
    parser = kind.parser(NAMES, lambda: next(ids), parallel)
    content, calls = "", []
    for parsed in [*map(parser.feed, pieces), parser.finish()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.index == len(calls):
                assert delta.id and delta.name
                calls.append((delta.id, delta.name, delta.arguments))
            else:
                assert delta.index == len(calls) - 1 and delta.id is None and delta.name is None and delta.arguments
                calls[-1] = (*calls[-1][:2], calls[-1][2] + delta.arguments)
    assert parser.called == bool(calls)
    return content, calls


def read(kind, text, parallel=True):
    """As `outcome`, but without ids, for a text that comes at once and, with the same result, by characters."""
    content, calls = outcome(kind, [text], parallel)
    assert outcome(kind, text, parallel) == (content, calls)
    return content, [(name, arguments) for _, name, arguments in calls]


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
NOON = '{"name": "time", "arguments": {}}'
ROME_CALL, NOON_CALL = ("weather", '{"city": "Rome"}'), ("time", "{}")


@pytest.mark.parametrize(
    "text, content, calls",
    [
        (hermes(ROME), "", [ROME_CALL]),
        (hermes(ROME, NOON), "", [ROME_CALL, NOON_CALL]),
        (f"Let me see.\n\n{hermes(ROME, NOON)} \n", "Let me see.", [ROME_CALL, NOON_CALL]),
        (f"One: {hermes(ROME)} and two: {hermes(NOON)} done \n", "One: and two: done", [ROME_CALL, NOON_CALL]),
        (f"<tool_call>{ROME}<tool_call>{NOON}", "", [ROME_CALL, NOON_CALL]),  # no closing tags
        (f"{hermes(ROME)[:-3]}", "", [ROME_CALL]),  # cut off in one
        (f"{hermes(ROME)} 1 < 2 <tool", " 1 < 2 <tool", [ROME_CALL]),
        ('<tool_call>{"name": "weather", "arguments": {}</tool_call> so', " so", [("weather", "{}")]),  # lost a brace
        ("<tool_call><tool_call>" + NOON + "</tool_call>", "<tool_call>", [NOON_CALL]),
        (hermes(NOON.replace("time", "tim"), NOON), hermes(NOON.replace("time", "tim")), [NOON_CALL]),
        ("<tool_call>\nweather(Rome)\n</tool_call>\n", "<tool_call>\nweather(Rome)\n</tool_call>\n", []),
        (ROME, ROME, []),
    ],
)
def test_hermes(text, content, calls):
    assert read(HERMES, text) == (content, calls)


TOKYO = '{"name": "weather", "parameters": {"city": "東京"}}'
TOKYO_CALL = ("weather", '{"city": "東京"}')


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
def test_llama(text, content, calls):
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
def test_arguments(form, written, given):
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
def test_what_is_no_call_is_content(call):
    assert read(LLAMA, call) == (call, [])
    assert read(HERMES, f"<tool_call> {call} </tool_call>\n") == (f"<tool_call> {call} </tool_call>\n", [])


def test_missing_arguments_are_none():
    assert read(LLAMA, '{"name": "time"}') == ("", [NOON_CALL])


def test_a_call_that_breaks_off_stays_as_far_as_it_came():
    assert read(LLAMA, TOKYO[:-3]) == ("", [("weather", TOKYO_CALL[1][:-2])])
    assert read(HERMES, f"<tool_call>{ROME[:-1]}, 7: <tool_call>{NOON}") == ("7:", [ROME_CALL, NOON_CALL])


@pytest.mark.parametrize("kind, text", [(HERMES, hermes(ROME, NOON, NOON)), (LLAMA, f"{ROME}; {NOON}; {NOON}")])
def test_without_parallel_calls_the_first_one_counts(kind, text):
    assert outcome(kind, [text], parallel=False) == ("", [("call-0", *ROME_CALL)])
    assert [call[0] for call in outcome(kind, [text])[1]] == ["call-0", "call-1", "call-2"]


def test_what_is_not_certain_waits_and_nothing_else():
    def steps(kind, pieces):
        parser = kind.parser(NAMES, lambda: "id")
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


# However it is cut

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
def test_pieces_make_no_difference(kind, fragments, cuts, parallel):
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
def test_calls_are_read_as_they_were_written(kind, words, wanted, cuts):
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


# Grammars


@pytest.fixture(scope="module")
def tokens():
    tokenizer = load_tokenizer(MODEL)
    return LLTokenizer(backend(tokenizer).to_str(), eos_token=tokenizer.eos_token_id)


SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/City"},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 14}, "maxItems": 3},
            "note": {"type": "string", "maxLength": 4},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": {"enum": ["Rome", "東京", 'the "}" ::= city']}},
    },
    "time": {"properties": {"zone": {"type": ["string", "null"], "maxLength": 3}}, "additionalProperties": False},
}
TOOLS = [Tool(name, SCHEMAS[name]) for name in NAMES]
BOTH = pytest.mark.parametrize("kind", [HERMES, LLAMA], ids=lambda kind: kind.name)


def written(kind, *calls):
    if kind is HERMES:
        return hermes(*calls)
    return "; ".join(call.replace('"arguments"', '"parameters"') for call in calls)


class Walk:
    """A text that keeps to a grammar, token by token."""

    def __init__(self, tokens, grammar):
        self.tokens, self.matcher, self.ids = tokens, LLMatcher(tokens, grammar), []
        assert not self.matcher.is_error(), self.matcher.get_error()

    def takes(self, text):
        """Whether the text may come next."""
        ids = self.tokens.tokenize_str(text)
        self.ids += ids
        return self.matcher.try_consume_tokens(ids) == len(ids)

    @property
    def may_end(self):
        return self.matcher.is_accepting()

    def allowed(self):
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()

    def wander(self, generator, limit):
        """The text after random steps, or None if it did not end."""
        for _ in range(limit):
            token = generator.choice(self.allowed())
            if token == self.tokens.eos_token:
                return self.tokens.decode_str(self.ids)
            self.ids.append(token)
            assert self.matcher.consume_token(token), self.matcher.get_error()
        return None


def accepts(tokens, grammar, text):
    walk = Walk(tokens, grammar)
    return walk.takes(text) and walk.may_end


WRONG = [
    '{"name": "tim", "arguments": {}}',
    '{"name": "bob", "arguments": {}}',
    '{"name": "weather", "arguments": {}}',
    '{"name": "weather", "arguments": {"city": "Oslo"}}',
    '{"name": "weather", "arguments": {"city": "Rome", "days": [15]}}',
    '{"name": "time", "arguments": {"city": "Rome"}}',
    '{"name": "time", "arguments": null}',
    '{"name": "time"}',
    '{"name": "time", "arguments": {"zone":  null}}',
    '{"name": "time", "arguments": {\n}}',
]


@BOTH
@pytest.mark.parametrize("parallel", [True, False])
def test_only_calls_are_allowed(tokens, kind, parallel):
    grammar = kind.grammar(TOOLS, parallel)
    for call in [ROME, ROME.replace("Rome", "東京"), ROME.replace("}}", ',"days":[1, 14]}}'), NOON]:
        assert accepts(tokens, grammar, written(kind, call))
    for call in WRONG:
        assert not Walk(tokens, grammar).takes(written(kind, call))
    assert not Walk(tokens, grammar).takes("No")
    assert not Walk(tokens, grammar).may_end
    assert accepts(tokens, grammar, written(kind, ROME, NOON, ROME)) == parallel
    assert not Walk(tokens, grammar).takes(written(kind, ROME) + " and")


@BOTH
@pytest.mark.parametrize("parallel", [True, False])
def test_a_lazy_grammar_leaves_text_alone_but_not_calls(tokens, kind, parallel):
    grammar = kind.lazy_grammar(TOOLS, parallel)
    for text in ["", "No, 1 < 2.\n{", "<tool_cal", '{"nam', '{"a": 1}', written(kind, ROME), written(kind, NOON)]:
        assert accepts(tokens, grammar, text)
    for call in WRONG:
        assert not Walk(tokens, grammar).takes(written(kind, call))
    assert accepts(tokens, grammar, written(kind, ROME, NOON)) == parallel
    assert accepts(tokens, grammar, "Well. " + written(kind, ROME))
    begun = Walk(tokens, grammar)
    assert begun.takes({HERMES: "Well. <tool_call>", LLAMA: '{"name":'}[kind]) and not begun.may_end


class AddedTokensAreText:
    """A tokenizer for llguidance, which by itself takes every added token in angle brackets for a special one."""

    bos_token_id = None

    def __init__(self, tokenizer, eos):
        by_itself = LLTokenizer(tokenizer.to_str(), eos_token=eos)
        self.eos_token_id, self.tokenizer = eos, tokenizer
        self.tokens = [by_itself.decode_bytes([token]) for token in range(tokenizer.get_vocab_size())]
        self.special_token_ids = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]

    def __call__(self, text: str):
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("grammar", [HERMES.grammar(TOOLS, True), HERMES.lazy_grammar(TOOLS, True)])
def test_a_tag_may_be_a_token_of_its_own(tokens, grammar):
    tokenizer = backend(load_tokenizer(MODEL))
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    own = LLTokenizer(TokenizerWrapper(AddedTokensAreText(tokenizer, tokens.eos_token)))
    tag, walk = tokenizer.token_to_id("<tool_call>"), Walk(own, grammar)
    assert own.tokenize_str(hermes(ROME)).index(tag) == 0
    assert tag in walk.allowed() and walk.takes(hermes(ROME)) and walk.may_end
    assert not Walk(own, grammar).takes(hermes(WRONG[0]))


def test_hermes_may_go_on_behind_calls_if_they_may_be_parallel(tokens):
    text = f"{hermes(ROME)} and {hermes(NOON)} done"
    assert accepts(tokens, HERMES.lazy_grammar(TOOLS, True), text)
    assert not Walk(tokens, HERMES.lazy_grammar(TOOLS, True)).takes(f"{hermes(ROME)} and <tool_call>{{}}")
    assert not Walk(tokens, HERMES.lazy_grammar(TOOLS, False)).takes(f"{hermes(ROME)} and")


@pytest.mark.parametrize(
    "kind, parallel, lazy",
    [
        (HERMES, True, False),
        (HERMES, False, False),
        (HERMES, False, True),  # with parallel, it may go on with text, which random steps never end
        (LLAMA, True, False),
        (LLAMA, False, False),
        (LLAMA, True, True),
        (LLAMA, False, True),
    ],
)
def test_every_sentence_is_calls_with_valid_arguments(tokens, kind, parallel, lazy):
    generator, seen = random.Random(0), []
    for _ in range(40):
        walk = Walk(tokens, kind.lazy_grammar(TOOLS, parallel) if lazy else kind.grammar(TOOLS, parallel))
        if lazy:
            assert walk.takes({HERMES: "<tool_call>", LLAMA: '{"name":'}[kind])
        text = walk.wander(generator, 400)
        if text is None:
            continue
        content, calls = read(kind, text)
        assert content == "" and calls and (parallel or len(calls) == 1)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        seen.append(calls)
    assert len(seen) > 30
    assert {name for calls in seen for name, _ in calls} == set(NAMES)
    assert len({str(calls) for calls in seen}) > 10
    assert any(len(calls) > 1 for calls in seen) == parallel


@BOTH
def test_a_tool_without_parameters_takes_any_object(tokens, kind):
    grammar = kind.grammar([Tool('a "tool" \\ é')], False)
    name = json.dumps('a "tool" \\ é', ensure_ascii=False)
    for arguments, fits in [("{}", True), ('{"a": [1, {"b": null}]}', True), ("[]", False), ('"{}"', False)]:
        call = f'{{"name": {name}, "arguments": {arguments}}}'
        assert accepts(tokens, grammar, written(kind, call)) == fits


@BOTH
@pytest.mark.parametrize(
    "parameters, valid",
    [
        (SCHEMAS["weather"], True),
        ({"type": "object", "properties": 5}, False),
        ({"properties": {"a": {"type": "text"}}}, False),
        ({"$ref": "#/$defs/none"}, False),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, False),
    ],
)
def test_a_schema_that_is_wrong_is_found_out(kind, parameters, valid):
    tools = [*TOOLS, Tool("other", parameters)]
    for grammar in (kind.grammar(tools, True), kind.lazy_grammar(tools, False)):
        assert (LLMatcher.validate_grammar(grammar) == "") == valid


@BOTH
def test_parameters_must_be_an_object(kind):
    with pytest.raises(ValueError, match=r"tools: the parameters of 'other' .* \"object\", not 'string'"):
        kind.grammar([Tool("other", {"type": "string"})], True)


# Templates


@pytest.mark.parametrize(
    "template, name",
    [
        ('{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' + (call.arguments | tojson) }}', "hermes"),
        ("{{ '<tool_call>\\n<function=' + call.name + '>' }}", None),
        ("{{ '<tool_call>' + call.name }}<arg_key>{{ key }}</arg_key>", None),
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
def test_a_template_tells_its_format(template, name):
    assert detect(template) == name

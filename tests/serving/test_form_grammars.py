"""Grammars of all forms of tool calls, with marks as text and as special tokens."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from jpaged.core.certificate import _params_as_json, _params_from_json
from jpaged.core.params import SamplingParams, StructuredOutputsParams
from jpaged.demo import DIRECTORY
from jpaged.serving.conversation import Function
from jpaged.serving.reasoning_parsers.forms import FORMS as REASONING
from jpaged.serving.tool_parsers.format import FORMATS
from jpaged.serving.tool_parsers.harmony_grammar import BETWEEN, FINAL
from jpaged.structured.grammar import Compiler, GrammarVocabulary, native_grammar
from jpaged.tokenizer import CALL_TAGS
from tests.serving.tool_templates import WITHOUT_CONTENT, rendered
from tests.serving.tool_texts import outcome

CITY = {"enum": ["Rome", "東京", "St. John's"]}
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "note": {"type": "string", "maxLength": 4},
            "city": {"$ref": "#/$defs/City"},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 14}, "maxItems": 3},
            "dry": {"type": "boolean"},
            "code": {"type": "string", "pattern": "^[A-F]{2,3}$"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": CITY},
    },
    "time": {"properties": {"zone": {"type": ["string", "null"], "maxLength": 3}}, "additionalProperties": False},
    "now": {"properties": {}, "additionalProperties": False},
}
FUNCTIONS = [Function(name=name, parameters=schema) for name, schema in SCHEMAS.items()]
FULL = ("weather", {"note": "ab c", "city": "東京", "days": [1, 14], "dry": True, "code": "BAD"})
ROME, NOW = ("weather", {"city": "Rome"}), ("now", {})
WRONG = [
    ("tim", {}),
    ("weather", {}),
    ("weather", {"city": "Oslo"}),
    ("weather", {"city": "Rome", "days": [15]}),
    ("weather", {"city": "Rome", "days": "one"}),
    ("weather", {"city": "Rome", "code": "X"}),
    ("weather", {"note": "too long", "city": "Rome"}),
    ("weather", {"city": "Rome", "sky": "blue"}),
    ("now", {"city": "Rome"}),
]
MARK = re.compile(r"<[^<> =]+>|\[[A-Z_]+\]")
END = "<|return|>"  # of an output; the demo model's own end is a mark of harmony
ONE_CALL = {"openai"}  # a call ends the output
CASES = [(name, kind) for name in sorted(FORMATS) for kind in ("text", "special")]
EACH = pytest.mark.parametrize("name, kind", CASES)


class Model:
    """Tokenizer, and the formats for it."""

    def __init__(self, kind):
        self.tokenizer = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
        texts = [text for each in FORMATS.values() for text in each.form.texts]
        marks = sorted({mark for text in texts for mark in MARK.findall(text)} - {*CALL_TAGS})
        special = [END, *marks] if kind == "special" else [END]
        self.tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in special])
        self.eos = self.tokenizer.token_to_id(END)
        size = self.tokenizer.get_vocab_size()
        self.compiler = Compiler(self.tokenizer, size, [self.eos])
        self.bytes = GrammarVocabulary(self.tokenizer, size, [self.eos]).tokens
        self.compiled = {}
        self.formats = {name: each.for_tokenizer(self.tokenizer) for name, each in FORMATS.items()}

    def matcher(self, grammar):
        """Return the initial state of a grammar, which is compiled once."""
        if grammar not in self.compiled:
            self.compiled[grammar] = self.compiler.matcher(grammar)
        return self.compiled[grammar].deep_copy()

    def takes(self, grammar, text):
        """Return whether a grammar allows the tokens of a text, and whether the text may end there."""
        matcher, ids = self.matcher(grammar), self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids), matcher.is_accepting()

    def accepts(self, grammar, text):
        return self.takes(grammar, text) == (True, True)

    def wander(self, grammar, rng, limit=300):
        """Return a random text of a grammar, or None if it did not end."""
        matcher, ids = self.matcher(grammar), []
        for _ in range(limit):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            token = rng.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())
            if token == self.eos:
                return b"".join(map(self.bytes.__getitem__, ids)).decode()
            ids.append(token)
            assert matcher.consume_token(token), matcher.get_error()
        return None


@pytest.fixture(scope="module")
def models():
    return {kind: Model(kind) for kind in ("text", "special")}


def written(name, kind, calls, content=""):
    """Return calls as their template writes them, up to the token that ends the output."""
    template = "mistral named" if (name, kind) == ("mistral", "special") else name
    return rendered(template, calls, content).removesuffix("<|call|>")


@EACH
@pytest.mark.parametrize("parallel", [True, False])
def test_grammar_allows_only_valid_calls(models, name, kind, parallel):
    model, form = models[kind], models[kind].formats[name]
    grammar = form.grammar(FUNCTIONS, parallel)
    for call in (FULL, ROME, NOW, ("time", {"zone": "CET"})):
        assert model.accepts(grammar, written(name, kind, [call])), call
    for call in WRONG:
        assert not model.accepts(grammar, written(name, kind, [call])), call
    several = parallel and name not in ONE_CALL
    assert model.accepts(grammar, written(name, kind, [ROME, FULL, NOW])) == several
    for text in ("", "No", written(name, kind, [ROME])[:-1], "So " + written(name, kind, [ROME])):
        assert not model.accepts(grammar, text)
    assert not model.takes(grammar, written(name, kind, [ROME]) + " and")[0]


@EACH
def test_lazy_grammar_allows_text_and_only_valid_calls(models, name, kind):
    model, form = models[kind], models[kind].formats[name]
    grammar = form.lazy_grammar(FUNCTIONS, True)
    final = "<|channel|>final<|message|>" if name == "openai" else ""
    for text in ("No, 1 < 2.\n{", "[1]", "東京"):
        assert model.accepts(grammar, final + text)
    for call in (FULL, NOW):
        assert model.accepts(grammar, written(name, kind, [call]))
    for call in WRONG:
        is_text = name == "pythonic" and call[0] not in SCHEMAS  # a list in brackets, without any mark
        assert model.accepts(grammar, written(name, kind, [call])) == is_text
    if name not in WITHOUT_CONTENT | ONE_CALL:
        assert model.accepts(grammar, written(name, kind, [ROME], "Well.\n") + " Done.")
        assert not model.accepts(grammar, written(name, kind, [WRONG[0]], "Well.\n") + " Done.")
    if name not in ONE_CALL:
        assert model.accepts(grammar, written(name, kind, [ROME, NOW]))
        assert not model.accepts(form.lazy_grammar(FUNCTIONS, False), written(name, kind, [ROME, NOW]))


@EACH
def test_grammar_with_answer_allows_either(models, name, kind):
    model, form = models[kind], models[kind].formats[name]
    if not form.tells_json_from_calls:
        assert name in ("llama3_json", "llama4_json")
        return
    grammar = form.grammar_with_answer(FUNCTIONS, True, SCHEMAS["weather"])
    final = "<|channel|>final<|message|>" if name == "openai" else ""
    assert model.accepts(grammar, written(name, kind, [ROME]))
    assert model.accepts(grammar, final + '{"city": "Rome"}') and not model.accepts(grammar, final + '{"city": "Oslo"}')
    assert not model.accepts(grammar, written(name, kind, [WRONG[0]]))
    assert not model.accepts(grammar, final + "No")


@EACH
def test_random_sentences_are_calls_with_valid_arguments(models, name, kind):
    model, form, rng, seen = models[kind], models[kind].formats[name], random.Random(3), set()
    for _ in range(40):
        text = model.wander(form.grammar(FUNCTIONS, True), rng)
        if text is None:
            continue
        content, calls = outcome(form, [text], True, FUNCTIONS)
        assert content == "" and calls, text
        for _, called, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])
        seen |= {called for _, called, _ in calls}
        if seen == {*SCHEMAS}:
            return
    raise AssertionError(seen)


@pytest.mark.parametrize("kind", ["text", "special"])
@pytest.mark.parametrize("name", sorted(REASONING))
def test_constraint_begins_behind_the_reasoning(models, name, kind):
    model, form = models[kind], REASONING[name].for_tokenizer(models[kind].tokenizer)
    if name == "openai_gptoss":
        if kind == "text":
            return  # these marks are special tokens in every tokenizer that has them
        final, opening, closing, prompts = FINAL, "<|channel|>analysis<|message|>", BETWEEN + FINAL, [("x", True)]
    else:
        final, opening, closing = "", form.openings[0], f"{form.closings[-1]}\n\n"
        prompts = [("x", True), (f"x{opening}\n", False)]
    for prompt, may_answer in prompts:
        wanted = StructuredOutputsParams(json=CITY, prelude=form.prelude(prompt, None, with_calls=False))
        grammar = native_grammar(wanted)
        thought = f'{opening if may_answer else ""}Hm: "Oslo" <{closing}'
        assert model.accepts(grammar, thought + '"Rome"')
        assert model.accepts(grammar, final + '"Rome"') == may_answer
        for text in (thought + '"Oslo"', thought, thought.removesuffix(closing), final + '"Oslo"', ""):
            assert not model.accepts(grammar, text)
        free = StructuredOutputsParams(json=CITY)
        assert not model.accepts(native_grammar(free), thought + '"Rome"')


@pytest.mark.parametrize(
    "constraint, fits, fails",
    [
        ({"regex": r"\{[a-c]{2}\}"}, "{ab}", "{ad}"),
        ({"choice": ["}", "a b"]}, "}", "b"),
        ({"grammar": 'root ::= "a" [0-9]+ "}"'}, "a12}", "a}"),
        ({"grammar": 'start: "x" WORD\n%ignore / +/\nWORD: /[a-z]+/'}, "x abc", "y"),
        ({"grammar": 'start: foo\nfoo: "%lark" | /}/ bar\nbar: %json {"type": "integer"}'}, "}12", "}x"),
        ({"json_object": True}, '{"a": 1}', "[]"),
        ({"json": {"type": "object"}, "whitespace_pattern": " ?"}, '{"a": 1}', '{"a":   1}'),
    ],
    ids=lambda each: str(each)[:24],
)
def test_each_kind_of_constraint_begins_behind_the_reasoning(models, constraint, fits, fails):
    model, form = models["text"], REASONING["qwen3"].for_tokenizer(models["text"].tokenizer)
    for prompt, head in (("x <think>", "Hm.</think>\n"), ("x", "<think>Hm.</think>"), ("x", "")):
        grammar = native_grammar(StructuredOutputsParams(**constraint, prelude=form.prelude(prompt, None, False)))
        assert model.accepts(grammar, head + fits) and not model.accepts(grammar, head + fails)


def test_certificate_keeps_the_reasoning_in_front_of_a_constraint():
    wanted = StructuredOutputsParams(regex="a+", prelude=REASONING["qwen3"].prelude("x", None, with_calls=False))
    params = SamplingParams(structured_outputs=wanted)
    assert _params_from_json(json.loads(json.dumps(_params_as_json(params)))) == params


def test_mark_that_is_a_special_token_is_no_text(models):
    model = models["special"]
    grammar = model.formats["mistral"].grammar(FUNCTIONS, True)
    assert model.accepts(grammar, "[TOOL_CALLS]now[ARGS]{}")
    matcher = model.compiler.matcher(grammar)
    spelled = model.compiler.tokenizer.tokenize_str("[TOOL_CALLS]")
    assert len(spelled) > 1 and matcher.try_consume_tokens(spelled) == 0


def test_mistral_has_the_form_of_its_tokenizer(models):
    for kind, other in (("text", "special"), ("special", "text")):
        grammar = models[kind].formats["mistral"].grammar(FUNCTIONS, True)
        assert models[kind].accepts(grammar, written("mistral", kind, [NOW]))
        assert not models[kind].accepts(grammar, written("mistral", other, [NOW]))


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "functiongemma"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": 5},
        {"anyOf": [{"properties": {}}]},
        {"properties": {"a": {"type": "string", "pattern": 5}}},
        {"type": "string"},
    ],
)
def test_schema_that_a_form_cannot_write_is_rejected(models, name, parameters):
    form = models["text"].formats[name]
    if name == "pythonic" and "pattern" in str(parameters):
        return  # its texts are JSON
    with pytest.raises(ValueError, match=r"^tools: "):
        form.grammar([Function(name="f", parameters=parameters)], True)


@pytest.mark.parametrize("kind", ["text", "special"])
def test_every_mark_of_a_form_begins_a_valid_call(models, kind):
    model, form = models[kind], models[kind].formats["granite"]
    for mark in form.form.starts:
        for arguments, fits in (('{"city": "Rome"}', True), ('{"city": "Oslo"}', False)):
            text = f'So {mark}[{{"name": "weather", "arguments": {arguments}}}]'
            assert model.accepts(form.lazy_grammar(FUNCTIONS, True), text) == fits
    bare = written("qwen3_coder", kind, [ROME]).removeprefix("<tool_call>\n")
    grammar = models[kind].formats["qwen3_coder"].lazy_grammar(FUNCTIONS, True)
    assert model.accepts(grammar, f"So {bare}") and not model.accepts(grammar, "So " + bare.replace("Rome", "Oslo"))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_grammar_has_each_schema_once(models, name):
    """A grammar may have 128 KiB, and agents bring many tools."""
    parameters = {"type": "object", "properties": {"numbers": {"enum": list(range(1000, 3000))}}}
    grammar = models["text"].formats[name].grammar([Function(name="f", parameters=parameters)], True)
    assert grammar.count("1234") == 1

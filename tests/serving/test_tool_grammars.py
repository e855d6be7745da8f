"""Grammars of tool calls: they allow all valid calls, and no others."""

import json
import random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken

from jpaged.demo import DIRECTORY
from jpaged.serving.conversation import Function
from jpaged.tokenizer import backend, load_tokenizer
from tests.serving.tool_texts import HERMES, LLAMA, NAMES, NOON, ROME, hermes, read, written


@pytest.fixture(scope="module")
def tokens():
    tokenizer = load_tokenizer(DIRECTORY)
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
TOOLS = [Function(name=name, parameters=SCHEMAS[name]) for name in NAMES]
BOTH = pytest.mark.parametrize("kind", [HERMES, LLAMA], ids=lambda kind: kind.name)


class Walk:
    """A text that follows a grammar, token by token."""

    def __init__(self, tokens, grammar):
        self.tokens, self.matcher, self.ids = tokens, LLMatcher(tokens, grammar), []
        assert not self.matcher.is_error(), self.matcher.get_error()

    def takes(self, text):
        """Append a text; return whether the grammar allows it."""
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
        """Return the text after random steps, or None if it did not end."""
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
def test_grammar_allows_only_valid_calls(tokens, kind, parallel):
    grammar = kind.grammar(TOOLS, parallel)
    for call in [ROME, ROME.replace("Rome", "東京"), ROME.replace("}}", ',"days":[1, 14]}}'), NOON]:
        assert accepts(tokens, grammar, written(kind, call))
    for call in WRONG:
        assert not Walk(tokens, grammar).takes(written(kind, call))
    assert not Walk(tokens, grammar).takes("No")
    assert not Walk(tokens, grammar).may_end
    assert accepts(tokens, grammar, written(kind, ROME, NOON, ROME)) == parallel
    assert not Walk(tokens, grammar).takes(written(kind, ROME) + " and")


@pytest.mark.parametrize("parallel", [True, False])
def test_grammar_with_answer_allows_either_calls_or_the_answer(tokens, parallel):
    grammar = HERMES.grammar_with_answer(TOOLS, parallel, SCHEMAS["weather"])
    for text in (hermes(ROME), hermes(NOON), '{"city": "Rome"}', '{\n  "city": "東京",\n  "days": [1]\n}'):
        assert accepts(tokens, grammar, text)
    assert accepts(tokens, grammar, hermes(ROME, NOON)) == parallel
    for text in ("", "No", '{"city": "Oslo"}', '{"city": "Rome"} ' + hermes(ROME), f'{hermes(ROME)}{{"city": "Rome"}}'):
        assert not accepts(tokens, grammar, text)
    for call in WRONG:
        assert not Walk(tokens, grammar).takes(hermes(call))


@BOTH
@pytest.mark.parametrize("parallel", [True, False])
def test_lazy_grammar_allows_text_and_only_valid_calls(tokens, kind, parallel):
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
    """A tokenizer for llguidance, whose own tokenizer treats every added token in angle brackets as special."""

    bos_token_id = None

    def __init__(self, tokenizer, eos):
        by_itself = LLTokenizer(tokenizer.to_str(), eos_token=eos)
        self.eos_token_id, self.tokenizer = eos, tokenizer
        self.tokens = [by_itself.decode_bytes([token]) for token in range(tokenizer.get_vocab_size())]
        self.special_token_ids = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]

    def __call__(self, text: str):
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("grammar", [HERMES.grammar(TOOLS, True), HERMES.lazy_grammar(TOOLS, True)])
def test_grammar_accepts_a_tag_that_is_one_token(tokens, grammar):
    tokenizer = backend(load_tokenizer(DIRECTORY))
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    own = LLTokenizer(TokenizerWrapper(AddedTokensAreText(tokenizer, tokens.eos_token)))
    tag, walk = tokenizer.token_to_id("<tool_call>"), Walk(own, grammar)
    assert own.tokenize_str(hermes(ROME)).index(tag) == 0
    assert tag in walk.allowed() and walk.takes(hermes(ROME)) and walk.may_end
    assert not Walk(own, grammar).takes(hermes(WRONG[0]))


def test_hermes_allows_text_after_calls_only_with_parallel_calls(tokens):
    text = f"{hermes(ROME)} and {hermes(NOON)} done"
    assert accepts(tokens, HERMES.lazy_grammar(TOOLS, True), text)
    assert not Walk(tokens, HERMES.lazy_grammar(TOOLS, True)).takes(f"{hermes(ROME)} and <tool_call>{{}}")
    assert not Walk(tokens, HERMES.lazy_grammar(TOOLS, False)).takes(f"{hermes(ROME)} and")


@pytest.mark.parametrize(
    "kind, parallel, lazy",
    [
        (HERMES, True, False),
        (HERMES, False, False),
        (HERMES, False, True),  # with parallel calls text may follow, which random steps never end
        (LLAMA, True, False),
        (LLAMA, False, False),
        (LLAMA, True, True),
        (LLAMA, False, True),
    ],
)
def test_random_sentences_of_a_grammar_are_calls_with_valid_arguments(tokens, kind, parallel, lazy):
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
def test_tool_without_parameters_accepts_any_object(tokens, kind):
    grammar = kind.grammar([Function.model_construct(name='a "tool" \\ é', parameters=None)], False)
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
def test_invalid_schema_makes_the_grammar_invalid(kind, parameters, valid):
    tools = [*TOOLS, Function(name="other", parameters=parameters)]
    for grammar in (kind.grammar(tools, True), kind.lazy_grammar(tools, False)):
        assert (LLMatcher.validate_grammar(grammar) == "") == valid


@BOTH
def test_parameters_of_another_type_are_rejected(kind):
    with pytest.raises(ValueError, match=r"tools: the parameters of 'other' .* \"object\", not 'string'"):
        kind.grammar([Function(name="other", parameters={"type": "string"})], True)


def test_numbers_of_arguments_keep_to_their_bounds(tokens):
    parameters = {"type": "object", "properties": {"x": {"exclusiveMinimum": 0, "maximum": 0.5}}, "required": ["x"]}
    grammar = HERMES.grammar([Function(name="f", parameters=parameters)], False)
    calls = {x: hermes(f'{{"name": "f", "arguments": {{"x": {x}}}}}') for x in (0, 0.5, 0.25, 1)}
    given = {x: accepts(tokens, grammar, call) for x, call in calls.items()}
    assert given == {0: False, 0.5: True, 0.25: True, 1: False}

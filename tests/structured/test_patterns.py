"""Patterns of JSON schemas: accepted texts match, with every escape that JSON allows."""

import itertools
import json
import re

import pytest

from jpaged.core.params import StructuredOutputsParams
from jpaged.structured.grammar import Compiler, native_grammar
from jpaged.structured.sound import sound_schema, without_nul
from tests.support import tokenizer_kinds

PATTERNS = (
    '^[^"]$', r"^[^\\]+$", r'^[^"\\]{1,2}$', r"^[^\n]$", r"^[\x00-!#-\[\]-\x7f]$", r"^[\x00-\x1f]$",
    r"^[\x00-\x1fa]{2}$",
    '^([^"a]|b)$', r'^[^"\x22]*$', r"^[^]\\]$", r"^[a-f]$", r"^[!#-~]$", r"^\D$", "^.$", r'^[^[:alpha:]"]$', r"^[]\"]$",
)  # fmt: skip
PIECES = (r"\"", r"\\", r"\/", r"\n", r"\t", r"\u0001", r"\u001f", "a", "b", "!", "#", "[", "]", "/", "ä")


class Accepting:
    """Whether complete texts fit a schema, token by token of single characters."""

    tokenizer, eos = tokenizer_kinds.made("demo")
    compiler = Compiler(tokenizer, tokenizer.get_vocab_size(), [eos])

    def __init__(self, schema):
        self.start = self.compiler.matcher(native_grammar(StructuredOutputsParams(json=schema)))

    def __call__(self, text):
        matcher = self.start.deep_copy()
        tokens = [self.tokenizer.encode(c, add_special_tokens=False).ids for c in text]
        return all(map(matcher.consume_token, itertools.chain.from_iterable(tokens))) and matcher.is_accepting()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_accepted_strings_match_the_pattern(pattern):
    in_string = Accepting({"type": "string", "pattern": pattern})
    python = re.compile(pattern.replace("[:alpha:]", "a-zA-Z"))
    found = 0
    for pieces in itertools.chain(itertools.product(PIECES), itertools.product(PIECES, PIECES)):
        text = '"' + "".join(pieces) + '"'
        if in_string(text):
            assert python.search(json.loads(text)), text
            found += 1
    assert found


def test_names_of_properties_match_the_pattern():
    allowed = Accepting({"type": "object", "patternProperties": {'^[^"]$': {}}, "additionalProperties": False})
    assert allowed('{"a":1}') and not allowed('{"\\"":1}')


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("a[b]c", r"a[[b]&&[^\x00]]c"),
        ("[]a]", r"[[]a]&&[^\x00]]"),
        ("[^]a]x", r"[[^]a]&&[^\x00]]x"),
        (r"\[a[\]b]", r"\[a[[\]b]&&[^\x00]]"),
        ("[a[bc]d]e", r"[[a[bc]d]&&[^\x00]]e"),
        ("[abc", "[abc"),
        ("a\\", "a\\"),
        ("a]b", "a]b"),
    ],
)
def test_classes_are_found(pattern, expected):
    assert without_nul(pattern) == expected


@pytest.mark.parametrize("schema", ["{", "[" * 100_000, {"pattern": 5}, {"patternProperties": ["[a]"]}])
def test_what_is_no_schema_stays_for_llguidance_to_refuse(schema):
    assert sound_schema(schema) == schema

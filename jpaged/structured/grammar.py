"""Structured outputs: allowed next tokens, so that the whole text follows its constraint.

The constraint is a JSON schema, a regular expression, a list of choices or a grammar. llguidance does the parsing.
"""

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any, cast

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from
from tokenizers import Tokenizer

from jpaged.core.params import StructuredOutputsParams
from jpaged.structured.forcing import forces_little
from jpaged.structured.sound import WHITE_SPACE, sound_schema
from jpaged.structured.vocabulary import GrammarVocabulary

# Where a grammar allows only one text, llguidance's masks allow only the tokens that the tokenizer has for this text.
# Every step searches the whole text, and a long one would keep the engine busy. With this option, masks allow all
# tokens that fit the grammar.
UNFORCED = '%llguidance {"no_forcing": true}'


class Constraint:
    """State of one text in its grammar. Copies are independent."""

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher

    def __copy__(self) -> "Constraint":
        return Constraint(self.matcher.deep_copy())

    def take(self, token: int) -> None:
        """Advance by a token."""
        self.matcher.consume_token(token)

    @property
    def error(self) -> str | None:
        """Reason why the grammar can't be followed further, such as too much ambiguity; None if there is none."""
        return self.matcher.get_error().partition("\n")[0] if self.matcher.is_error() else None


class Compiler:
    """Compiler of grammars to matchers for one model.

    Args:
        vocab_size: size of the model's vocabulary.
        eos_token_ids: tokens that end a complete text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return the initial state of a grammar in llguidance's form.

        Raises:
            ValueError: the grammar can't be compiled.
        """
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar whose first mask fails should fail here
        if matcher.is_error():
            raise ValueError(" ".join(matcher.get_error().partition("\n<state>")[0].split())[:500])
        return matcher

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Tokens of the model. Preparing them takes a second for a large vocabulary."""
        if not self._eos_token_ids:
            raise ValueError("the model has no end-of-sequence token, so no text could be complete")
        try:
            vocabulary = TokenizerWrapper(GrammarVocabulary(self._source, self._vocab_size, self._eos_token_ids))
            return LLTokenizer(vocabulary, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except ValueError as error:
            raise ValueError(f"this model's tokenizer can't be constrained: {error}") from error


def native_grammar(wanted: StructuredOutputsParams) -> str:
    """Return structured outputs as a grammar in Lark's form, as llguidance extends it.

    Raises:
        ValueError: a value is invalid.
        TypeError: a value has an invalid type.
    """
    lark = _lark(wanted)
    return lark if forces_little(lark) else f"{lark}\n{UNFORCED}"


def _lark(wanted: StructuredOutputsParams) -> str:
    if wanted.regex is not None:
        lark: str = json.loads(grammar_from("regex", wanted.regex))["grammars"][0]["lark_grammar"]
        return lark
    if wanted.choice is not None:
        return grammar_from("choice", json.dumps(wanted.choice))
    if wanted.grammar is not None:
        return grammar_from("grammar", wanted.grammar)
    schema = sound_schema(wanted.json) if wanted.json is not None else {"type": "object"}
    options: dict[str, Any] = {"whitespace_pattern": wanted.whitespace_pattern or WHITE_SPACE}
    if wanted.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    text = schema if isinstance(schema, str) else json.dumps(schema)
    made = json.loads(LLMatcher.grammar_from_json_schema(text, overrides=cast(Any, options)))
    return f"start: %json {json.dumps(made['grammars'][0]['json_schema'])}"

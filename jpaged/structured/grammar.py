"""Structured outputs: allowed next tokens, so that the whole text follows its constraint.

The constraint is a JSON schema, a regular expression, a list of choices or a grammar. llguidance does the parsing.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Any, cast

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from
from tokenizers import Tokenizer

from jpaged.core.params import StructuredOutputsParams
from jpaged.structured.sound import WHITE_SPACE, sound_schema
from jpaged.tokenizer import Vocabulary, all_bytes

# Where a grammar allows only one text, llguidance's masks allow only the tokens that the tokenizer has for this text.
# Every step searches the whole text, and a long one would keep the engine busy. With this option, masks allow all
# tokens that fit the grammar.
UNFORCED = '%llguidance {"no_forcing": true}'
MAX_FORCED = 8192
REPETITION = re.compile(r'(?:[{~]\s*|"min(?:Items|Length|Properties|Contains)"\s*:\s*)(\d{1,18})')
RULE = re.compile(r"^[?!]?([A-Za-z_]\w*+)[^\n:]*+:", re.MULTILINE)
# A character in front of a text while it is encoded. A space that a tokenizer adds to the beginning of a text, or
# strips from it, then concerns this character only. No tokenizer merges it with others.
BEFORE = "\x02"


class Constraint:
    """State of one text in its grammar. Copies are independent."""

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher

    def __copy__(self) -> "Constraint":
        return Constraint(self.matcher.deep_copy())

    def take(self, token: int) -> None:
        """Advance by a token."""
        self.matcher.consume_token(token)

    def forced(self) -> list[int]:
        """Return the next tokens as far as the grammar allows no others."""
        return self.matcher.compute_ff_tokens()

    def allowed(self, tokens: list[int]) -> int:
        """Return how many of some tokens the grammar allows next, one after the other."""
        return self.matcher.validate_tokens(tokens)

    @property
    def error(self) -> str | None:
        """Reason why the grammar can't be followed further, such as too much ambiguity; None if there is none."""
        return self.matcher.get_error().partition("\n")[0] if self.matcher.is_error() else None


class Compiler:
    """Compiler of grammars to matchers for one model, with the arguments of `GrammarCompiler`."""

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


class GrammarVocabulary:
    """Tokenizer in the form of llguidance's `TokenizerWrapper`.

    The tokens of a text have exactly the text's bytes, even if the tokenizer's normalizer would change the text: they
    are the tokenizer's tokens if these have the bytes. llguidance's own wrapper would treat every added token like
    <this> as a special one, and never allow it in a text, not even the tags around a tool call. Tokens of the tokenizer
    beyond the model's `vocab_size` are left out.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]):
        vocabulary = Vocabulary(tokenizer)
        self.tokens = all_bytes(tokenizer, vocab_size)
        self.special_token_ids = [token for token in sorted(vocabulary.special) if token < vocab_size]
        self.bos_token_id, self.eos_token_id = None, eos_token_ids[0]
        self._ids = {text: token for token, text in enumerate(self.tokens) if text and token not in vocabulary.special}
        self._longest = max(map(len, self._ids))
        self._special = vocabulary.special
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True  # as plain text
        self._before = self._encode(BEFORE)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another one."""
        wanted, length = text.encode(), len(self._before)
        tokens = self._encode(BEFORE + text)
        own = tokens[length:]
        plain = all(token < len(self.tokens) and token not in self._special for token in own)
        if tokens[:length] == self._before and plain and wanted == b"".join(map(self.tokens.__getitem__, own)):
            return own
        # The longest token at each place, up to a byte that no token begins with.
        found: list[int] = []
        at = 0
        while at < len(wanted):
            ends = range(min(at + self._longest, len(wanted)), at, -1)
            end = next((end for end in ends if wanted[at:end] in self._ids), None)
            if end is None:
                break
            found.append(self._ids[wanted[at:end]])
            at = end
        return found

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def native_grammar(wanted: StructuredOutputsParams) -> str:
    """Return structured outputs as a grammar in Lark's form, as llguidance extends it.

    Raises:
        ValueError: a value is invalid.
        TypeError: a value has an invalid type.
    """
    if wanted.regex is not None:
        lark: str = json.loads(grammar_from("regex", wanted.regex))["grammars"][0]["lark_grammar"]
    elif wanted.choice is not None:
        lark = grammar_from("choice", json.dumps(wanted.choice))
    elif wanted.grammar is not None:
        lark = grammar_from("grammar", wanted.grammar)
    else:
        schema = sound_schema(wanted.json) if wanted.json is not None else {"type": "object"}
        options: dict[str, Any] = {"whitespace_pattern": wanted.whitespace_pattern or WHITE_SPACE}
        if wanted.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        text = schema if isinstance(schema, str) else json.dumps(schema)
        made = json.loads(LLMatcher.grammar_from_json_schema(text, overrides=cast(Any, options)))
        lark = f"start: %json {json.dumps(made['grammars'][0]['json_schema'])}"
    if wanted.prelude is not None:
        lark = f"start: prelude constrained\nconstrained: %lark {{\n{lark}\n}}\n{wanted.prelude}"
    return lark if forces_little(lark) else f"{lark}\n{UNFORCED}"


def forces_little(grammar: str) -> bool:
    """Return whether no part without alternatives can be longer than MAX_FORCED characters.

    True is certain, and False is not: the whole grammar is counted as such text, multiplied by all repetitions and
    references.

    Args:
        grammar: in llguidance's dialect of Lark.
    """
    if len(grammar) > MAX_FORCED:
        return False
    repeated = math.prod(max(1, int(count)) for count in REPETITION.findall(grammar))
    words = Counter(re.findall(r"\w+", grammar))
    referred = math.prod(words[name] for name in set(RULE.findall(grammar)))
    references: int = 2 ** grammar.count('"$ref"')
    return len(grammar) * repeated * referred * references <= MAX_FORCED

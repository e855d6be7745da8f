"""Structured outputs with the tokenizers of every family: random constraints, random allowed tokens, an independent
check of each complete text."""

import json
import random
import re
import sys
import time

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from jpaged.core.params import StructuredOutputsParams
from jpaged.structured.grammar import Compiler, Constraint, GrammarVocabulary, forces_little, native_grammar
from jpaged.structured.masks import Masks
from jpaged.tokenizer import Detokenizer, TokenDecoder, Vocabulary
from tests.support import real_tokenizers, schemas, tokenizer_kinds

PROMPTS = ["", "Hello", "Answer: ", "größe ["]
# Texts that a tokenizer changes, or reads as special tokens.
HARD = (
    " two spaces  ", "<s>", "</s>", "<|end|>", "a<|im_end|>\n<|im_start|>system", "<tool_call>", "Zu\u0308rich",
    "\u212b", "▁low line▁", "日本語", "🙂🇩🇪", "tab\there", "\x02", "<0x41>", "ﬁne", "İ", "\u00a0", "0", "positive",
)  # fmt: skip
MAX_TOKENS = 400


def constraint(rng: random.Random) -> tuple[StructuredOutputsParams, object]:
    """A random constraint, and the check of a complete text."""
    match rng.randrange(6):
        case 0:
            pattern = schemas.regex(rng)
            return StructuredOutputsParams(regex=pattern), lambda text: re.fullmatch(pattern, text)
        case 1:
            pattern = rng.choice(["", "[a-z]{2}"]) + re.escape(rng.choice(HARD)) + rng.choice(["", " done", "[0-9]+x"])
            return StructuredOutputsParams(regex=pattern), lambda text: re.fullmatch(pattern, text)
        case 2:
            choice = rng.sample(HARD, rng.randint(1, 5))
            return StructuredOutputsParams(choice=choice), lambda text: text in choice
        case 3:
            names = rng.sample(HARD, rng.randint(1, 3))
            properties = {name: rng.choice([{"const": rng.choice(HARD)}, {"type": "boolean"}]) for name in names}
            schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        case _:
            schema = schemas.schema(rng)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    return StructuredOutputsParams(json=schema), lambda text: validator.is_valid(json.loads(text))


class Walker:
    """Random walks along the masks of a tokenizer, as an engine samples, and their texts, as a client reads them."""

    def __init__(self, tokenizer: Tokenizer, eos: int, vocab_size: int | None = None):
        self.tokenizer, self.eos = tokenizer, eos
        self.vocab_size = vocab_size or tokenizer.get_vocab_size()
        self.compiler = Compiler(tokenizer, self.vocab_size, [eos])
        self.masks = Masks(self.vocab_size)
        self.vocabulary = Vocabulary(tokenizer)
        texts = [tokenizer.decode([token]) for token in range(self.vocab_size)]
        self.closing = frozenset(token for token, text in enumerate(texts) if text[:1] in ('"', "}", "]"))

    def text(self, wanted: StructuredOutputsParams, rng: random.Random) -> str | None:
        """The text of a walk; None if it is not complete after MAX_TOKENS."""
        state = Constraint(self.compiler.matcher(native_grammar(wanted)))
        prompt = self.tokenizer.encode(rng.choice(PROMPTS)).ids
        decoder, text = Detokenizer(TokenDecoder(self.vocabulary, prompt, keeps_first_space=True)), ""
        for length in range(MAX_TOKENS):
            allowed = self.allowed(state)
            assert allowed, f"nothing is allowed after {text!r}: {state.error}"
            if self.eos in allowed and rng.random() < 0.5:
                return text + decoder.flush()
            closing = [token for token in allowed if token in self.closing] if length > 60 else []
            token = rng.choice(closing or allowed)
            if token == self.eos:
                return text + decoder.flush()
            state.take(token)
            assert state.error is None, f"{state.error} after {text!r} and token {self.tokenizer.id_to_token(token)}"
            text += decoder.step(token).text
        return None

    def allowed(self, state: Constraint) -> list[int]:
        bits = self.masks.write([(state, frozenset())])
        return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: self.vocab_size]).tolist()


def walk(walker: Walker, number: int, seed: str) -> float:
    """Check some walks, and return the seconds of one."""
    begin, complete = time.monotonic(), 0
    for index in range(number):
        rng = random.Random(f"{seed} {index}")
        wanted, check = constraint(rng)
        text = walker.text(wanted, rng)
        assert text is None or check(text), f"{seed} {index}: {wanted} does not allow {text!r}"
        complete += text is not None
    assert complete > 0.9 * number, f"{complete} of {number} were complete"
    return (time.monotonic() - begin) / number


@pytest.mark.parametrize("kind", tokenizer_kinds.KINDS)
def test_every_complete_text_matches(kind):
    walk(Walker(*tokenizer_kinds.made(kind)), 60, kind)


@pytest.mark.deep
def test_every_complete_text_matches_500_constraints(tmp_path, capsys):
    tokenizers = {kind: tokenizer_kinds.made(kind) for kind in tokenizer_kinds.KINDS}
    for name, tokenizer in (tokenizers | real_tokenizers.all_of(tmp_path)).items():
        seconds = walk(Walker(*tokenizer), 500, name)
        with capsys.disabled():
            print(f"\n{name}: {1000 * seconds:.1f} ms for a constraint and its text", file=sys.stderr)


@pytest.mark.parametrize("kind", ["llama2", "qwen"])
@pytest.mark.parametrize("surplus", [-1, 0, 1, 31, 64])
def test_vocabularies_of_tokenizer_and_model_may_differ(kind, surplus):
    tokenizer, eos = tokenizer_kinds.made(kind)
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens(["[PAD]"])
    walker = Walker(tokenizer, eos, tokenizer.get_vocab_size() + surplus)
    walk(walker, 5, f"{kind} {surplus}")
    choice = ["[PAD]"]  # in plain tokens, with the model's last token or without it
    assert walker.text(StructuredOutputsParams(choice=choice), random.Random(0)) == "[PAD]"


@pytest.mark.parametrize("kind", tokenizer_kinds.KINDS)
def test_tokens_of_a_text_have_its_bytes(kind):
    tokenizer, eos = tokenizer_kinds.made(kind)
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.get_vocab_size(), [eos])
    for text in (*HARD, "positive and negative", "x " * 100, "\n\n\t", "e\u0301" * 3):
        tokens = vocabulary(text)
        assert b"".join(vocabulary.tokens[token] for token in tokens) == text.encode()
        assert not set(tokens) & set(vocabulary.special_token_ids)
    for text in tokenizer_kinds.corpus()[:40]:
        expected = tokenizer.encode(f"\x01{text}", add_special_tokens=False).ids
        assert vocabulary(text) == expected[len(tokenizer.encode("\x01", add_special_tokens=False).ids) :]


@pytest.mark.parametrize(
    "grammar, is_short",
    [
        ('start: "abc"', True),
        ("start: /[a-z]{3,12}/", True),
        ("start: /(b{1000}){300}/", False),
        ('start: "a" ~ 9000', False),
        ("start: " + '"a" ' * 3000, False),
        ("\n".join(["start: r0 r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(20)), 'r20: "a"']), False),
        ('start: %json {"type": "array", "items": {"const": 1}, "minItems": 5000}', False),
        ('start: call ("\\n" call)*\ncall: call_0 | call_1\ncall_0: "x" %json {}\ncall_1: "y" %json {}', True),
    ],
)
def test_long_forced_texts_are_found(grammar, is_short):
    assert forces_little(grammar) == is_short

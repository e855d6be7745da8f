"""Format in which a model writes calls: parsers, and grammars that allow nothing else."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer

from jpaged.chat import sources_of
from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.detect import detect
from jpaged.serving.tool_parsers.form import Form
from jpaged.serving.tool_parsers.formats import FORMS
from jpaged.serving.tool_parsers.grammar import CallGrammar
from jpaged.serving.tool_parsers.harmony_grammar import HarmonyGrammar
from jpaged.serving.tool_parsers.parser import ToolParser
from jpaged.tokenizer import CALL_TAGS


@dataclass(frozen=True, eq=False)
class ToolFormat:
    """Form of calls by its name, for one tokenizer. FORMATS has all of them, without a tokenizer.

    Attributes:
        tokens: ids of the marks that are special tokens of the tokenizer.
    """

    name: str
    form: Form
    tokens: Mapping[str, int] = field(default_factory=dict)

    def for_tokenizer(self, tokenizer: Tokenizer) -> "ToolFormat":
        """Return the format for a tokenizer."""
        form = self.form
        if form.variant is not None and tokenizer.token_to_id(form.variant[0]) is not None:
            form = form.variant[1]
        return replace(self, form=form, tokens=special_tokens(tokenizer, form.texts))

    @property
    def tells_json_from_calls(self) -> bool:
        """Whether a JSON text can't be taken for a call."""
        return not self.form.is_json

    def parser(
        self, functions: Collection[Function], new_id: Callable[[str, int], str], parallel: bool = True,
        with_answer: bool = False,
    ) -> ToolParser:  # fmt: skip
        """Return a parser for one choice: of any text, or of one that `grammar_with_answer` allows."""
        return ToolParser(self.form, functions, new_id, parallel, with_answer)

    def grammar(self, functions: Sequence[Function], parallel: bool) -> str:
        """Return a grammar of calls only, with arguments that fit the tools' schemas.

        It allows one call or, if `parallel`, one or more.

        Raises:
            ValueError: the form can't have arguments of such a schema.
        """
        return self._grammar(functions, parallel).only_calls()

    def grammar_with_answer(self, functions: Sequence[Function], parallel: bool, answer: Any) -> str:
        """Return a grammar of either calls, as `grammar` allows them, or a JSON text that fits the schema `answer`."""
        assert self.tells_json_from_calls, self.name
        return self._grammar(functions, parallel).with_answer(answer)

    def lazy_grammar(self, functions: Sequence[Function], parallel: bool, but: Sequence[str] = ()) -> str:
        """Return a grammar of any text; but once a call begins, it must be one that `grammar` allows.

        Args:
            but: beginnings that the text does not have.
        """
        return self._grammar(functions, parallel).lazy(but)

    def _grammar(self, functions: Sequence[Function], parallel: bool) -> CallGrammar:
        kind: type[CallGrammar] = HarmonyGrammar if self.name == "openai" else CallGrammar
        return kind(self.form, self.tokens, functions, parallel)


def special_tokens(tokenizer: Tokenizer, texts: Collection[str]) -> dict[str, int]:
    """Return the ids of the special tokens of a tokenizer that occur in some texts.

    The tags of CALL_TAGS are not special to this package.
    """
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: number for number, token in added.items() if token.special}
    return {
        mark: number
        for mark, number in special.items()
        if mark not in CALL_TAGS and any(mark in text for text in texts)
    }


FORMATS: Mapping[str, ToolFormat] = {name: ToolFormat(name, form) for name, form in FORMS.items()}


def tool_format(name: str, tokenizer: Any, chat_template: str | None = None) -> ToolFormat | None:
    """Return the format of a model's tool calls; None if it has none.

    Args:
        name: one of FORMATS, "none", or "auto": detected from the chat template.
        tokenizer: has the model's own template, unless another is given.
    """
    if name == "auto":
        sources = [chat_template] if chat_template else sources_of(tokenizer).values()
        name = next(filter(None, map(detect, sources)), "none")
    return FORMATS.get(name)

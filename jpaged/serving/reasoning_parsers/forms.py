"""Table of the forms of reasoning, by the names of vLLM's `--reasoning-parser`.

vLLM lists its parsers and their models at https://docs.vllm.ai/en/latest/features/reasoning_outputs/. Mistral publishes
its templates as the package `mistral-common`; IBM describes Granite's marks at
https://huggingface.co/ibm-granite/granite-3.2-8b-instruct.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from tokenizers import Tokenizer

from jpaged.serving.reasoning_parsers.harmony import HarmonyParser
from jpaged.serving.reasoning_parsers.marked import MarkedParser
from jpaged.serving.reasoning_parsers.parser import ReasoningParser
from jpaged.serving.tool_parsers.format import special_tokens
from jpaged.serving.tool_parsers.grammar import speller
from jpaged.serving.tool_parsers.harmony_grammar import BETWEEN, FINAL, earlier_messages
from jpaged.structured.sound import WHITE_SPACE

type NewParser = Callable[[], ReasoningParser]


class ReasoningForm(Protocol):
    """Form of reasoning for one tokenizer."""

    @property
    def tokens(self) -> Mapping[str, int]:
        """Ids of the marks that are special tokens of the tokenizer."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Texts that begin reasoning."""

    def for_tokenizer(self, tokenizer: Tokenizer) -> "ReasoningForm":
        """Return the form for a tokenizer."""

    def is_in(self, template: str) -> bool:
        """Return whether a chat template has the form."""

    def new_parser(self, prompt: str, calls: Sequence[str] = ()) -> NewParser:
        """Return the maker of parsers of outputs that follow the end of a prompt.

        Args:
            prompt: end of the prompt.
            calls: marks of tool calls, which end the reasoning.
        """

    def prelude(self, prompt: str, budget: int | None, with_calls: bool) -> str:
        """Return rules in Lark with a rule `prelude`: the output in front of the answer.

        Args:
            prompt: end of the prompt.
            budget: maximum tokens of reasoning.
            with_calls: the answer's grammar is that of tool calls.

        Raises:
            ValueError: there is a budget, but the mark at the end is not one token.
        """


def _budgeted(budget: int, closing: str, token: int | None) -> str:
    """Return the expression in Lark of some tokens up to the closing mark."""
    if token is None:
        raise ValueError(f"thinking_token_budget: the tokenizer has no token for {closing!r}, which ends the reasoning")
    thought = f"<[^{token}]>{{0,{budget}}} " if budget else ""
    return f"{thought}<[{token}]>"


@dataclass(frozen=True, eq=False)
class Marked:
    """Reasoning between marks.

    Attributes:
        openings, closings: marks, of which the first is the usual one.
        closing_token: id of the usual closing mark, if it is one token.
    """

    openings: tuple[str, ...] = ("<think>",)
    closings: tuple[str, ...] = ("</think>",)
    tokens: Mapping[str, int] = field(default_factory=dict)
    closing_token: int | None = None

    def for_tokenizer(self, tokenizer: Tokenizer) -> "Marked":
        """Return the form for a tokenizer."""
        tokens = special_tokens(tokenizer, (*self.openings, *self.closings))
        return replace(self, tokens=tokens, closing_token=tokenizer.token_to_id(self.closings[0]))

    def is_in(self, template: str) -> bool:
        """Return whether a chat template has the form."""
        return any(closing in template for closing in self.closings)

    def new_parser(self, prompt: str, calls: Sequence[str] = ()) -> NewParser:
        """Return the maker of parsers of outputs that follow the end of a prompt, which may have an opening mark."""
        return partial(MarkedParser, self.openings, self.closings, self._is_open(prompt), calls)

    def prelude(self, prompt: str, budget: int | None, with_calls: bool) -> str:
        """Return the rules of the reasoning, which may be missing unless the prompt has begun it."""
        spell = speller(self.tokens)
        closings = " | ".join(map(spell, self.closings))
        lazy = "" if all(closing in self.tokens for closing in self.closings) else "[lazy]"
        thought = f"thought{lazy}: THOUGHT ({closings})"
        if budget is not None:
            thought = f"thought: {_budgeted(budget, self.closings[0], self.closing_token)}"
        opening = f"GAP? ({' | '.join(map(spell, self.openings))}) thought GAP?"
        prelude = "thought GAP?" if self._is_open(prompt) else f"({opening})?"
        return f"prelude: {prelude}\n{thought}\nTHOUGHT: /(?s:.*)/\nGAP: /{WHITE_SPACE}/"

    def _is_open(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.openings)


@dataclass(frozen=True, eq=False)
class Harmony:
    """Reasoning in messages of their own."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    openings = ()

    def for_tokenizer(self, tokenizer: Tokenizer) -> "Harmony":
        """Return the form for a tokenizer."""
        return replace(self, tokens=special_tokens(tokenizer, (f"{FINAL}{BETWEEN}<|call|><|return|><|constrain|>",)))

    def is_in(self, template: str) -> bool:
        """Return whether a chat template has the form."""
        return "<|channel|>" in template and "analysis" in template

    def new_parser(self, prompt: str, calls: Sequence[str] = ()) -> NewParser:
        """Return the maker of parsers, which tell calls by their recipients."""
        return HarmonyParser

    def prelude(self, prompt: str, budget: int | None, with_calls: bool) -> str:
        """Return the rules of messages of reasoning and, before an answer without calls, of its header."""
        spell = speller(self.tokens)
        final = "" if with_calls else spell(FINAL)
        if budget is None:
            return f"prelude: earlier {final}\n{earlier_messages(self.tokens, ['analysis'])}"
        end = "<|end|>"
        thought = f"{spell('<|channel|>analysis<|message|>')} {_budgeted(budget, end, self.tokens.get(end))}"
        return f"prelude: ({thought} {spell(BETWEEN.removeprefix(end))})? {final}"


THINK = Marked()
FORMS: Mapping[str, ReasoningForm] = {
    "deepseek_r1": THINK,
    "deepseek_v3": THINK,
    "gemma4": Marked(("<|channel>thought", "<|channel>"), ("<channel|>",)),
    "glm45": THINK,
    "granite": Marked(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "kimi_k2": THINK,
    "minimax_m2": THINK,
    "mistral": Marked(("[THINK]",), ("[/THINK]",)),
    "olmo3": THINK,
    "openai_gptoss": Harmony(),
    "qwen3": THINK,
    "seed_oss": Marked(("<seed:think>",), ("</seed:think>",)),
    "smollm3": THINK,
}  # fmt: skip


def reasoning_form(name: str, templates: Iterable[str]) -> ReasoningForm | None:
    """Return the form of a model's reasoning; None if it is not told from the answer.

    Args:
        name: one of FORMS, "none", or "auto": the first that a chat template has.
        templates: chat templates of the model.
    """
    if name == "auto":
        texts = list(templates)
        forms = sorted(FORMS.values(), key=lambda form: form is THINK)  # other marks tell more
        return next((form for form in forms if any(map(form.is_in, texts))), None)
    return FORMS.get(name)

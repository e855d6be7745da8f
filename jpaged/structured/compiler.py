"""Compiler of structured outputs: one at a time, and each only once."""

import copy
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from jpaged.core.params import InvalidParameter, StructuredOutputsParams

if TYPE_CHECKING:
    from jpaged.structured.grammar import Compiler, Constraint
    from jpaged.structured.trial import Trial

MAX_GRAMMAR_BYTES = 128 * 2**10


class GrammarCompiler:
    """Compiler of constraints on a thread of its own.

    It takes one core for any number of callers, or two while a grammar is tried. llguidance is loaded by the first
    grammar.

    Args:
        vocab_size: size of the model's vocabulary.
        eos_token_ids: the tokens that end a complete text.
        max_cached: the number of compiled grammars that are kept.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int], *, max_cached: int = 64):
        self._model = tokenizer, vocab_size, sorted(eos_token_ids)
        self._max_cached = max_cached
        self._cache: OrderedDict[str, Constraint] = OrderedDict()  # touched by the thread alone

    def compile(self, wanted: StructuredOutputsParams) -> "Constraint":
        """Return a constraint in its initial state.

        Raises:
            InvalidParameter: the grammar can't be compiled.
        """
        return self.submit(wanted).result()

    def submit(self, wanted: StructuredOutputsParams) -> "Future[Constraint]":
        """Start `compile`, and return the future constraint."""
        return self._thread.submit(self._compile, wanted)

    def _compile(self, wanted: StructuredOutputsParams) -> "Constraint":
        from jpaged.structured.grammar import Constraint, native_grammar

        try:
            grammar = native_grammar(wanted)
            if (size := len(grammar.encode(errors="replace"))) > MAX_GRAMMAR_BYTES:
                raise ValueError(f"{size} bytes of grammar exceed {MAX_GRAMMAR_BYTES}")
            if grammar not in self._cache:
                if wrong := self._trial(grammar):
                    raise ValueError(wrong)
                self._cache[grammar] = Constraint(self._compiler.matcher(grammar))
        except (ValueError, TypeError) as error:
            raise InvalidParameter("structured_outputs", str(error)) from error
        self._cache.move_to_end(grammar)
        if len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return copy.copy(self._cache[grammar])

    @cached_property
    def _compiler(self) -> "Compiler":
        from jpaged.structured.grammar import Compiler

        return Compiler(*self._model)

    @cached_property
    def _trial(self) -> "Trial":
        from jpaged.structured.trial import Trial

        return Trial(*self._model)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        from jpaged.structured.grammar import deep_stack

        executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        with deep_stack():
            executor.submit(int).result()  # it starts its thread with the first task
        return executor

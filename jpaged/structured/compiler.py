"""Compiler of structured outputs, with a cache."""

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from jpaged.core.params import InvalidParameter, StructuredOutputsParams

if TYPE_CHECKING:
    from jpaged.structured.grammar import Compiler, Constraint
    from jpaged.structured.grammar_check import GrammarCheck

MAX_GRAMMAR_BYTES = 128 * 2**10
NUM_THREADS = 2  # one more than a slow grammar occupies
# llguidance recurses along chains of rules. A stack of this size takes the longest one that MAX_GRAMMAR_BYTES can hold;
# memory is used only as far as a grammar needs it.
STACK_BYTES = 512 * 2**20


class GrammarCompiler:
    """Compiler of constraints, on `threads`. The first grammar loads llguidance.

    Args:
        eos_token_ids: the tokens that end a complete text.
        max_cached: maximum number of cached results, which are constraints or faults of grammars.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int], *, max_cached: int = 64):
        self._model = tokenizer, vocab_size, sorted(eos_token_ids)
        self._max_cached = max_cached
        self._cache: OrderedDict[str, Constraint | str] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, wanted: StructuredOutputsParams) -> "Constraint":
        """Return a constraint in its initial state.

        Raises:
            InvalidParameter: the grammar can't be compiled.
        """
        return self.threads.submit(self.compile_here, wanted).result()

    def compile_here(self, wanted: StructuredOutputsParams) -> "Constraint":
        """Compile as `compile` does, on one of `threads`."""
        from jpaged.structured.grammar import Constraint, native_grammar

        try:
            grammar = native_grammar(wanted)
            if (size := len(grammar.encode(errors="replace"))) > MAX_GRAMMAR_BYTES:
                raise ValueError(f"{size} bytes of grammar exceed {MAX_GRAMMAR_BYTES}")
        except (ValueError, TypeError) as error:
            raise InvalidParameter("structured_outputs", str(error)) from error
        with self._lock:
            compiled = self._cache.get(grammar)
        if compiled is None:
            check, compiler = self._check_and_compiler
            try:
                compiled = check(grammar) or Constraint(compiler.matcher(grammar))
            except ValueError as error:
                compiled = str(error)
        with self._lock:
            self._cache[grammar] = compiled
            self._cache.move_to_end(grammar)
            if len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
        if isinstance(compiled, str):
            raise InvalidParameter("structured_outputs", compiled)
        return copy.copy(compiled)

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """NUM_THREADS threads with deep stacks."""
        executor, begun = ThreadPoolExecutor(NUM_THREADS, "grammars"), threading.Barrier(NUM_THREADS)
        with deep_stack():
            for future in [executor.submit(begun.wait) for _ in range(NUM_THREADS)]:
                future.result()
        return executor

    @cached_property
    def _check_and_compiler(self) -> "tuple[GrammarCheck, Compiler]":
        from jpaged.structured.grammar import Compiler
        from jpaged.structured.grammar_check import GrammarCheck

        return GrammarCheck(*self._model), Compiler(*self._model)


@contextmanager
def deep_stack() -> Iterator[None]:
    """Give a deep stack to the threads that start within the context."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)

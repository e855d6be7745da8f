"""Check of grammars: a child process compiles each before the server does.

llguidance is a native library. A grammar that crashes it, or keeps it busy for ever, must not affect other requests.
"""

import json
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer

from jpaged.child import ChildFailed, Children, confine, serve
from jpaged.structured.compiler import deep_stack
from jpaged.structured.grammar import Compiler

COMPILE_TIMEOUT_S = 10.0
MAX_MEMORY_BYTES = 4 * 2**30


class GrammarCheck:
    """Check of grammars in child processes of this one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        self._children = Children(
            "jpaged.structured.grammar_check", [tokenizer.to_str(), vocab_size, sorted(eos_token_ids)]
        )

    def __call__(self, grammar: str) -> str | None:
        """Return the fault of a grammar; None if it can be compiled in this process, too."""
        try:
            error: str | None = self._children.ask(json.dumps(grammar), COMPILE_TIMEOUT_S)
            return error
        except ChildFailed:
            return f"the grammar's compiler gave up, or was not done within {COMPILE_TIMEOUT_S:g} seconds"


def _setup(model: list[Any]) -> Callable[[str], str | None]:
    tokenizer, vocab_size, eos_token_ids = model
    compiler = Compiler(Tokenizer.from_str(tokenizer), vocab_size, eos_token_ids)
    with suppress(ValueError):  # the first grammar reports this error
        compiler.tokenizer  # noqa: B018  # made here, it does not count as the time of a grammar

    def fault(grammar: str) -> str | None:
        try:
            compiler.matcher(grammar)
        except ValueError as error:
            return str(error)
        return None

    return fault


def main() -> None:
    """Answer grammars on stdin."""
    confine(MAX_MEMORY_BYTES)
    with deep_stack():
        thread = threading.Thread(target=serve, args=(_setup,), daemon=True)
        thread.start()
    thread.join()


if __name__ == "__main__":
    main()

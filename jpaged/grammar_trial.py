"""Compiles grammars in a process of its own, before anybody does in the server's: llguidance is a native library, and a
grammar that crashes it, or keeps it busy for ever, must cost no more than that grammar.

`python -m jpaged.grammar_trial` takes lines of JSON on stdin: first the tokenizer, then grammars. Each gets a line
back: what is wrong with it, or null.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Tokenizer

from jpaged.grammar import Compiler, deep_stack

PATIENCE = 10.0  # seconds for one grammar, from when the process is ready
START = 60.0  # seconds until it is
MEMORY = 4 * 2**30  # bytes, address space included


class Trial:
    """The process, seen from outside. It starts with the first grammar, and again after one has ended it; it ends with
    this object."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self._sizes = [vocab_size, sorted(eos_token_ids)]
        self._process: subprocess.Popen | None = None
        self._end: Callable[[], object] = lambda: None

    def __call__(self, grammar: str) -> str | None:
        """What is wrong with a grammar; None if it can be compiled here, too."""
        if self._process is None:
            self._start()
        if (answer := self._ask(grammar, PATIENCE)) is not None:
            return answer[0]
        self._close()
        return f"the grammar's compiler gave up, or was not done within {PATIENCE:g} seconds"

    def _start(self) -> None:
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jpaged.grammar_trial"], env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process)
        if self._ask([self._tokenizer.to_str(), *self._sizes], START) is None:
            self._close()
            raise ValueError("the process that tries grammars does not start")

    def _close(self) -> None:
        self._process = None
        self._end()

    def _ask(self, question: object, seconds: float) -> list[str | None] | None:
        """The answer, in a list; None if there is none in time."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else b""
        return [json.loads(line)] if line else None


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to every process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with deep_stack():
        thread = threading.Thread(target=_answer, daemon=True)
        thread.start()
    thread.join()


def _answer() -> None:
    tokenizer, vocab_size, eos_token_ids = json.loads(sys.stdin.readline())
    compiler = Compiler(Tokenizer.from_str(tokenizer), vocab_size, eos_token_ids)
    print("null", flush=True)
    for line in sys.stdin:
        try:
            compiler.matcher(json.loads(line))
            print("null", flush=True)
        except ValueError as error:
            print(json.dumps(str(error)), flush=True)


if __name__ == "__main__":
    main()

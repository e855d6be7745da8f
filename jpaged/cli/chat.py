"""Talk to a model.

  jpaged chat                                    the demo model, in this process
  jpaged chat --model DIR --temperature 0.7      a model in a directory
  jpaged chat --url http://127.0.0.1:8000        the first model of a server
  echo "Who are you?" | jpaged chat              one message, one answer

In a terminal, Ctrl-C stops an answer, Ctrl-D exits, /reset starts a new conversation and /help lists the keys.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any

from jpaged.cli.model import Message, Model, open_model, sampling
from jpaged.cli.model import add_flags as add_model_flags
from jpaged.cli.parser import closest
from jpaged.flags import ENGINE

PEERS = ENGINE
COMMANDS = {"/reset": "forget the conversation", "/help": "list these commands"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged chat`."""
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_model_flags(parser)


def run(args: argparse.Namespace) -> None:
    """Run `jpaged chat`."""
    model = open_model(args)
    with asyncio.Runner() as runner:
        conversation = Conversation(model, args.system, sampling(args))
        try:
            if sys.stdin.isatty():
                talk(runner, conversation)
            elif message := sys.stdin.read().strip():
                runner.run(conversation.say(message))
            else:
                raise ValueError("the message on stdin is empty")
        finally:
            runner.run(model.close())


class Conversation:
    """Conversation with a model: the messages so far."""

    def __init__(self, model: Model, system: str | None, sampling: Mapping[str, Any]):
        self._model, self._sampling = model, sampling
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages = list(self._opening)

    async def say(self, message: str) -> None:
        """Print the answer to a message as it is generated.

        The conversation keeps the text of an interrupted answer, and drops a message without an answer.
        """
        self.messages.append({"role": "user", "content": message})
        answer = ""
        try:
            async with aclosing(self._model.chat(self.messages, self._sampling)) as pieces:
                async for _, text in pieces:
                    answer += text
                    print(text, end="", flush=True)
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
                print(flush=True)
            else:
                self.messages.pop()


def talk(runner: asyncio.Runner, conversation: Conversation) -> None:
    """Read messages from the terminal until it closes."""
    # The parent process may have left SIGINT ignored, as a shell does for its background jobs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(ImportError):  # not every Python is built with it
        import readline  # noqa: F401  from here on input() has a history, and keys to edit a line
    print("Ctrl-C stops an answer, Ctrl-D ends; /help lists the commands.")
    while True:
        try:
            message = input("> ").strip()
            if message == "/reset":
                conversation.reset()
                print("A new conversation.")
            elif message == "/help":
                print("\n".join(f"{name}  {about}" for name, about in COMMANDS.items()))
            elif message.startswith("/"):
                meant = closest(message, COMMANDS)
                print(f"unknown command {message}; {f'did you mean {meant}?' if meant else '/help lists them'}")
            elif message:
                runner.run(conversation.say(message))
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)

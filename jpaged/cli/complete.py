"""Complete texts with a model, and print the completions.

  jpaged complete "Once upon a time"             the demo model, in this process
  jpaged complete "One day" "At night" --n 2     two completions of each of two prompts
  jpaged complete --url http://127.0.0.1:8000 --max-tokens 200 < story.txt

A single completion is streamed; several completions are printed at the end, each under its prompt.
"""

import argparse
import asyncio
import sys
import textwrap
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from jpaged.cli.model import Model, open_model, sampling
from jpaged.cli.model import add_flags as add_model_flags
from jpaged.flags import ENGINE

PEERS = ENGINE


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged complete`."""
    parser.usage = "%(prog)s [PROMPT ...] [flags]"
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="text to complete (default: standard input)")
    parser.add_argument("--n", type=int, default=1, help="completions of each prompt")
    add_model_flags(parser, max_tokens=128)


def run(args: argparse.Namespace) -> None:
    """Run `jpaged complete`."""
    if not args.prompts and sys.stdin.isatty():
        raise ValueError('a prompt is missing: jpaged complete "Once upon a time", or a text on stdin')
    prompts = args.prompts or [sys.stdin.read().removesuffix("\n")]
    if not all(prompts):
        raise ValueError("a prompt is empty")
    model = open_model(args)
    with asyncio.Runner() as runner:
        try:
            runner.run(complete(model, prompts, args.n, sampling(args)))
        finally:
            runner.run(model.close())


async def complete(model: Model, prompts: list[str], n: int, sampling: Mapping[str, Any]) -> None:
    """Print `n` completions of each prompt; a single completion is streamed."""
    if n == len(prompts) == 1:
        async with aclosing(model.complete(prompts[0], sampling)) as pieces:
            async for _, text in pieces:
                print(text, end="", flush=True)
        print()
        return
    for prompt, texts in zip(prompts, await asyncio.gather(*(whole(model, prompt, n, sampling) for prompt in prompts))):
        for number, text in enumerate(texts, 1):
            print(f"== {textwrap.shorten(prompt, 60)}{f' ({number})' if n > 1 else ''}\n{text}")


async def whole(model: Model, prompt: str, n: int, sampling: Mapping[str, Any]) -> list[str]:
    """Return all completions of one prompt."""
    texts = [""] * n
    async with aclosing(model.complete(prompt, {**sampling, "n": n})) as pieces:
        async for index, text in pieces:
            texts[index] += text
    return texts

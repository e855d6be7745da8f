"""Models in this process or on a server, with one interface for both."""

import argparse
import itertools
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any

from jpaged.bench.client import Client
from jpaged.cli.loading import loading
from jpaged.cli.parser import existing_file
from jpaged.cli.setting_flags import add_settings, config_of
from jpaged.config import EngineConfig
from jpaged.start.find import find_local

API_KEYS = ("JPAGED_API_KEY", "OPENAI_API_KEY")
MAX_NUM_SEQS = 8  # enough for one user, and far less to compile than for a server
OF_BOTH = ("model", "seed")  # fields of EngineConfig that mean something to a server, too

Message = dict[str, str]
Fields = Mapping[str, Any]  # sampling parameters, by their names in SamplingParams and in requests
Pieces = AsyncGenerator[tuple[int, str]]  # of an answer: the index of a choice, and the text that it goes on with


type Model = RemoteModel | LocalModel


def add_flags(parser: argparse.ArgumentParser, *, max_tokens: int | None = None) -> None:
    """Add flags for the model and for sampling; `max_tokens` is the default of its flag."""
    add = parser.add_argument_group("connection").add_argument
    add("--url", help="address of a server with the OpenAI API (default: load the model in this process)")
    add("--api-key", metavar="KEY", help=f"key of the server (default: the environment's {' or '.join(API_KEYS)})")

    group = parser.add_argument_group("sampling", "Defaults come from the model's files.")
    add = group.add_argument
    add("--temperature", type=float, metavar="T", help="sampling temperature; 0: greedy")
    add("--top-p", type=float, metavar="P", help="sample from the most likely tokens with this total probability")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    add("--max-tokens", type=int, default=max_tokens, metavar="TOKENS", help="maximum output tokens")
    add("--stop", action="append", metavar="TEXT", help="stop before this text; can be repeated")
    add("--chat-template", metavar="FILE", type=existing_file, help="Jinja template instead of the model's own")
    add_settings(parser, EngineConfig)
    parser.set_defaults(model=None, seed=None)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that flags set; others are left out."""
    names = ("temperature", "top_p", "top_k", "max_tokens", "stop", "seed")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def open_model(args: argparse.Namespace) -> Model:
    """Return the model of the flags.

    Raises:
        ValueError: there is no such model, or flags contradict each other.
    """
    if not args.url:
        return LocalModel(args)
    defaults = EngineConfig()
    for name in ("chat_template", *(field.name for field in fields(EngineConfig) if field.name not in OF_BOTH)):
        if getattr(args, name, None) not in (None, getattr(defaults, name, None)):
            raise ValueError(f"--{name.replace('_', '-')} is for a model in this process, not for one on a server")
    return RemoteModel(args.url, api_key(args), args.model)


def api_key(args: argparse.Namespace) -> str | None:
    """Return the API key for a server: the flag's, else the environment's."""
    return args.api_key or next((os.environ[name] for name in API_KEYS if os.environ.get(name)), None)


class RemoteModel:
    """Model on a server; without a name, the first model that the server lists."""

    def __init__(self, url: str, api_key: str | None, name: str | None):
        self._client = Client(url, api_key)
        self._name = name

    def chat(self, messages: Sequence[Message], sampling: Fields) -> Pieces:
        """Yield pieces of the assistant's next message."""
        return self._stream("/v1/chat/completions", {"messages": list(messages), **sampling})

    def complete(self, prompt: str, sampling: Fields) -> Pieces:
        """Yield pieces of the completion of a text."""
        return self._stream("/v1/completions", {"prompt": prompt, **sampling})

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _stream(self, path: str, body: dict[str, Any]) -> Pieces:
        if self._name is None:
            self._name = (await self._client.models())[0]["id"]
        async with aclosing(self._client.stream(path, {"model": self._name, **body, "stream": True})) as events:
            async for _, event in events:
                for choice in event.get("choices") or ():
                    said = choice.get("delta", choice)
                    if text := said.get("content") or said.get("text"):
                        yield choice.get("index", 0), text


class LocalModel:
    """Model in this process."""

    def __init__(self, args: argparse.Namespace):
        config = config_of(args, EngineConfig)
        find_local(config.model, revision=config.revision)
        config = replace(config, max_num_seqs=config.num_seqs(MAX_NUM_SEQS))
        self._chat_template = args.chat_template.read_text() if args.chat_template else None
        with loading() as bars:
            # Loading jax takes seconds, which a user of a server need not wait.
            from jpaged.engine.async_engine import AsyncEngine
            from jpaged.start.load import start_engine
            from jpaged.start.setup import prepare

            setup = prepare(config, chat_template=self._chat_template)
            if setup.tokenizer is None:
                raise ValueError(f"tokenizer: {config.model} has none, and texts need one; name one with --tokenizer")
            self._engine = AsyncEngine(start_engine(setup, progress=bars))
        self._tokenizer, self._defaults = setup.tokenizer, setup.sampling_defaults
        self._engine.start()
        self._request_ids = itertools.count()

    def chat(self, messages: Sequence[Message], sampling: Fields) -> Pieces:
        """Yield pieces of the assistant's next message."""
        from jpaged.chat import prompt_of

        return self._generate(prompt_of(self._tokenizer, messages, self._chat_template), sampling)

    def complete(self, prompt: str, sampling: Fields) -> Pieces:
        """Yield pieces of the completion of a text."""
        from jpaged.tokenizer import encode

        return self._generate(encode(self._tokenizer, prompt), sampling)

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.stop()

    async def _generate(self, token_ids: list[int], sampling: Fields) -> Pieces:
        from jpaged.core.params import SamplingParams

        params = SamplingParams(**{"max_tokens": None, **self._defaults, **sampling})
        async with self._engine.generate(str(next(self._request_ids)), [token_ids], params) as parts:
            async for deltas in parts:
                for _, delta in deltas:
                    yield delta.index, delta.text

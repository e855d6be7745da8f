"""Number of tokens of a text, and of a prompt with the server's additions."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jpaged.bench.client import Client, ServerError
from jpaged.demo import DIRECTORY as DEMO

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def prompt_fields(endpoint: str, content: Any) -> dict[str, Any]:
    """Return the fields of a request's body for a prompt.

    Raises:
        ValueError: the endpoint does not accept such a prompt.
    """
    is_messages = isinstance(content, list) and isinstance(content[0], dict)
    if endpoint == "chat":
        if isinstance(content, list) and not is_messages:
            raise ValueError("endpoint: chat takes no token ids; completions does")
        return {"messages": content if is_messages else [{"role": "user", "content": content}]}
    if is_messages:
        raise ValueError("endpoint: completions takes no messages; chat does")
    return {"prompt": content}


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a directory, a hub id, or "demo".

    Raises:
        ValueError: there is no such tokenizer.
    """
    directory = DEMO if name == "demo" else Path(name).expanduser()
    try:
        if directory.is_dir():
            return Tokenizer.from_file(str(directory / "tokenizer.json"))
        return Tokenizer.from_pretrained(name)
    except Exception as error:  # both raise Exception itself
        raise ValueError(f"tokenizer: {name} has none that can be loaded: {error}") from error


class ServerTokens:
    """Token counter for a model at one endpoint.

    It uses the given tokenizer (an argument of `load_tokenizer`), else the server's /tokenize, else the usage of a
    request for a single token.
    """

    def __init__(self, client: Client, model: str, endpoint: str, tokenizer: str | None = None):
        self._client, self._model, self._endpoint = client, model, endpoint
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer else None
        self._has_tokenize = True

    async def ids(self, text: str) -> list[int] | None:
        """Return the text's token ids, without special tokens; None without a tokenizer and /tokenize."""
        if self._tokenizer:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._has_tokenize:
            body = {"model": self._model, "prompt": text, "add_special_tokens": False}
            try:
                return (await self._client.post("/tokenize", body)).get("tokens")
            except ServerError as error:
                if error.kind not in ("HTTP 404", "HTTP 405"):
                    raise
                self._has_tokenize = False
        return None

    async def count(self, text: str) -> int:
        """Return the number of tokens of `ids`, or of the text as a prompt if they are unknown."""
        ids = await self.ids(text)
        return await self.of_prompt(text) if ids is None else len(ids)

    async def of_prompt(self, content: Any) -> int:
        """Return the prompt tokens in the usage of a request for a single token.

        Raises:
            ServerError: the request failed, or its response has no usage.
        """
        body = {"model": self._model, **prompt_fields(self._endpoint, content), "max_tokens": 1}
        usage = (await self._client.post(PATHS[self._endpoint], body)).get("usage")
        if not usage:
            raise ServerError("no usage", f"{PATHS[self._endpoint]} does not say how many tokens a prompt has")
        return int(usage["prompt_tokens"])

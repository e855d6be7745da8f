"""Sets of tokens that outputs were drawn from, in responses: whole and streamed."""

from base64 import b64decode

import numpy as np

FIELDS = {
    "kept_tokens": True, "return_token_ids": True, "max_tokens": 5, "temperature": 1.0, "top_k": 4, "seed": 3,
    "ignore_eos": True,
}  # fmt: skip


def check(kept, token_ids) -> None:
    for bits, token in zip(kept, token_ids, strict=True):
        tokens = np.flatnonzero(np.unpackbits(np.frombuffer(b64decode(bits), np.uint8), bitorder="little"))
        assert len(tokens) == 4 and token in tokens


async def test_each_token_has_its_set(client):
    (completion,) = (await client.complete("Hello", **FIELDS))["choices"]
    check(completion["kept_tokens"], completion["token_ids"])
    (chat,) = (await client.chat("Hello", **FIELDS))["choices"]
    check(chat["kept_tokens"], chat["token_ids"])
    chunks = [chunk["choices"][0] for chunk in await client.stream("/v1/completions", {"prompt": "Hello"} | FIELDS)]
    for chunk in chunks:
        check(chunk["kept_tokens"], chunk["token_ids"])
    assert [bits for chunk in chunks for bits in chunk["kept_tokens"]] == completion["kept_tokens"]
    (without,) = (await client.complete("Hello", max_tokens=2))["choices"]
    assert "kept_tokens" not in without

"""Certificates in responses: whole and streamed, of completions and chats."""

import json

from jpaged.core.certificate import Certificate
from jpaged.replay import load

FIELDS = {"certificate": True, "return_token_ids": True, "max_tokens": 5, "temperature": 1.0, "n": 2}


def checked(certificate, prompt_token_ids, token_ids):
    """Return the certificate of a choice after a check of its hash."""
    found = Certificate.from_json(certificate)
    assert found.changed(prompt_token_ids, token_ids) == [] and found.versions in (((0, len(token_ids)),), ())
    return found


async def test_each_choice_has_its_certificate(client, tmp_path):
    body = await client.complete("Hello", **FIELDS)
    chat = await client.chat("Hello", **FIELDS, tool_choice="none")
    first, second = [checked(c["certificate"], c["prompt_token_ids"], c["token_ids"]) for c in body["choices"]]
    assert second.seed == (first.seed + 1) % 2**64 and first.params.max_tokens == 5
    for choice in chat["choices"]:
        checked(choice["certificate"], chat["prompt_token_ids"], choice["token_ids"])
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (body, chat)))
    outputs = [(request.prompt_token_ids, request.outputs[0]) for request in load(path)]
    assert len(outputs) == 4 and all(one.certificate.changed(ids, one.token_ids) == [] for ids, one in outputs)


async def test_the_last_chunk_of_a_stream_has_the_certificate(client):
    fields = {"prompt": "Hello", "seed": 4} | FIELDS | {"n": 1}
    chunks = [chunk["choices"][0] for chunk in await client.stream("/v1/completions", fields)]
    assert [("certificate" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    ids = [token for chunk in chunks for token in chunk["token_ids"]]
    found = checked(chunks[-1]["certificate"], chunks[0]["prompt_token_ids"], ids)
    (whole,) = (await client.complete(**fields))["choices"]
    assert found.as_json() == Certificate.from_json(whole["certificate"]).as_json() and found.seed == 4


async def test_best_of_and_beams_are_certified_as_returned(client):
    for more in ({"best_of": 3}, {"use_beam_search": True, "temperature": 0}):
        for choice in (await client.complete(**{"prompt": "Hello"} | FIELDS | more))["choices"]:
            checked(choice["certificate"], choice["prompt_token_ids"], choice["token_ids"])


async def test_choices_without_tokens_or_without_the_field_have_none(client):
    for fields in ({}, {"certificate": False}, {"certificate": True, "max_tokens": 0, "echo": True}):
        (choice,) = (await client.complete("Hello", **{"max_tokens": 3} | fields))["choices"]
        assert "certificate" not in choice
    error = (await client.complete("Hello", 400, certificate="yes"))["error"]
    assert error["param"] == "certificate"

"""Work on bodies that stand for chats or completions. These functions are as those of `prepare`."""

from dataclasses import replace
from functools import partial

from jpaged.core.params import SamplingParams
from jpaged.serving.codec import dumps
from jpaged.serving.embeddings import EmbeddingsRequest, ScoreRequest
from jpaged.serving.embeddings_answer import EmbeddingsAnswer, ScoresAnswer
from jpaged.serving.messages import CountTokensRequest, MessagesRequest
from jpaged.serving.messages_answer import MessagesAnswer
from jpaged.serving.prepare import Exchange, check_model, prepare_chat, prepare_completion, render, tokens_of
from jpaged.serving.responses import ResponsesRequest
from jpaged.serving.responses_answer import ResponsesAnswer
from jpaged.serving.service import Service


def prepare_responses(service: Service, body: ResponsesRequest) -> Exchange:
    """Return the request of a body."""
    service.notices.tell("/v1/responses", body.ignored)
    return prepare_chat(service, body.chat(), partial(ResponsesAnswer, body))


def prepare_messages(service: Service, body: MessagesRequest) -> Exchange:
    """Return the request of a body, with as many tokens at most as the context has room for."""
    service.notices.tell("/v1/messages", body.ignored)
    exchange = prepare_chat(service, body.chat(), partial(MessagesAnswer, body))
    (prompt,) = exchange.answer.prompts
    if body.max_tokens > service.max_model_len - len(prompt.token_ids):
        return exchange._replace(params=replace(exchange.params, max_tokens=None))
    return exchange


def prepare_embeddings(service: Service, body: EmbeddingsRequest) -> Exchange:
    """Return the request of a body."""
    exchange = prepare_completion(service, body.completion(), partial(EmbeddingsAnswer, body))
    assert isinstance(exchange.params, SamplingParams), "there are no beams"
    return exchange._replace(params=replace(exchange.params, pooling=body.pooling))


def prepare_scores(service: Service, body: ScoreRequest) -> Exchange:
    """Return the request of a body.

    A query and an item are tokenized by themselves, so that the prompts of a query have a common prefix. The first of
    them has the special tokens of a prompt.
    """
    items = [body.items] if isinstance(body.items, str) else body.items
    with_special = body.add_special_tokens is not False
    (query,) = tokens_of(service, [body.query], "query", add_special_tokens=with_special and not body.item_first)
    parts = tokens_of(service, items, "items", add_special_tokens=with_special and body.item_first)
    prompts = [part + query if body.item_first else query + part for part in parts]
    return prepare_completion(service, body.completion(prompts), partial(ScoresAnswer, body))


def count_tokens(service: Service, body: CountTokensRequest) -> bytes:
    """Return the response to a body of `/v1/messages/count_tokens`."""
    check_model(service, body.model)
    chat = body.chat()
    with chat.rename_error_fields():
        return dumps({"input_tokens": len(render(service, chat))})

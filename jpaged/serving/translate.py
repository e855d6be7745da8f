"""Work on the bodies of other APIs, which stand for chats. These functions are as those of `prepare`."""

from dataclasses import replace
from functools import partial

from jpaged.serving.codec import dumps
from jpaged.serving.messages import CountTokensRequest, MessagesRequest
from jpaged.serving.messages_answer import MessagesAnswer
from jpaged.serving.prepare import Exchange, check_model, prepare_chat, render
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


def count_tokens(service: Service, body: CountTokensRequest) -> bytes:
    """Return the response to a body of `/v1/messages/count_tokens`."""
    check_model(service, body.model)
    chat = body.chat()
    with chat.rename_error_fields():
        return dumps({"input_tokens": len(render(service, chat))})

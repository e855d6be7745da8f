"""Work on the bodies of other APIs, which stand for chats. These functions are as those of `prepare`."""

from functools import partial

from jpaged.serving.prepare import Exchange, prepare_chat
from jpaged.serving.responses import ResponsesRequest
from jpaged.serving.responses_answer import ResponsesAnswer
from jpaged.serving.service import Service


def prepare_responses(service: Service, body: ResponsesRequest) -> Exchange:
    """Return the request of a body."""
    service.notices.tell("/v1/responses", body.ignored)
    return prepare_chat(service, body.chat(), partial(ResponsesAnswer, body))

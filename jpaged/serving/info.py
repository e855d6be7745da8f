"""Facts about the model and the server, under SGLang's names, which routers ask for, and about the tokenizer."""

from importlib.metadata import version
from typing import Any

from jpaged.serving.protocol import ApiError
from jpaged.serving.service import Service

TOKENIZER_FILES = ("vocab_file", "merges_file", "tokenizer_file")


def model_info(service: Service) -> dict[str, Any]:
    """Return the facts about the model."""
    return {
        "model_path": service.model_name,
        "tokenizer_path": service.model_name,
        "served_model_name": service.model_name,
        "is_generation": True,
        "has_tokenizer": service.tokenizer is not None,
        "max_context_length": service.max_model_len,
        **service.model_facts,
    }


def server_info(service: Service) -> dict[str, Any]:
    """Return the facts about the model, and those about the server."""
    stats = service.engine.stats()
    return model_info(service) | {
        "version": version("jpaged"),
        "context_length": service.max_model_len,
        "page_size": stats.block_size,
        "max_total_num_tokens": stats.num_blocks * stats.block_size,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "status": "ready" if service.healthy else "unavailable",
    }


def tokenizer_config(service: Service) -> dict[str, Any]:
    """Return the tokenizer's configuration, as in tokenizer_config.json, with the chat template that is used.

    Raises:
        ApiError: 404 without a tokenizer.
    """
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise ApiError(404, "this server has no tokenizer")
    config = {name: value for name, value in tokenizer.init_kwargs.items() if name not in TOKENIZER_FILES}
    template = service.config.chat_template or tokenizer.chat_template
    return config | {"tokenizer_class": type(tokenizer).__name__, "chat_template": template}

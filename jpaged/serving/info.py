"""Facts about the model and the server, under the names of SGLang's servers, which routers ask for."""

from importlib.metadata import version
from typing import Any

from jpaged.serving.service import Service


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

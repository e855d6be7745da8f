"""Facts about the model, its tokenizer and the server, as OpenAI's and SGLang's servers return them."""

from importlib.metadata import version

from jpaged.serving.codec import JsonObject
from jpaged.serving.errors import ApiError
from jpaged.serving.prepare import check_model
from jpaged.serving.service import Service

TOKENIZER_FILES = ("vocab_file", "merges_file", "tokenizer_file")


def model_list(service: Service) -> JsonObject:
    """Return the list of models, with one entry for each name."""
    return {"object": "list", "data": [model_card(service, name) for name in service.model_names]}


def model_card(service: Service, name: str) -> JsonObject:
    """Return the description of a model in the form of the OpenAI API; ApiError 404, as `check_model`."""
    check_model(service, name)
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": service.created,
        "organization": "*",
        "group": None,
        **dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True),
        **dict.fromkeys(("is_blocking", "allow_create_engine", "allow_search_indices", "allow_fine_tuning"), False),
    }
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jpaged",
        "root": service.model_facts.get("model_path", service.model_name),
        "parent": None if service.adapter_of(name) is None else service.model_name,
        "quantization": service.model_facts.get("quantization"),
        "max_model_len": service.max_model_len,
        "permission": [permission],
    }


def model_info(service: Service) -> JsonObject:
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


def server_info(service: Service) -> JsonObject:
    """Return the facts about the model, and those about the server."""
    stats = service.engine.stats()
    return model_info(service) | {
        "version": version("jpaged"),
        "context_length": service.max_model_len,
        "page_size": stats.block_size,
        "max_total_num_tokens": stats.num_blocks * stats.block_size // stats.num_groups,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "status": "ready" if service.healthy else "unavailable",
    }


def tokenizer_config(service: Service) -> JsonObject:
    """Return tokenizer_config.json with the chat template that is used; ApiError 404 without a tokenizer."""
    if (tokenizer := service.tokenizer) is None:
        raise ApiError(404, "this server has no tokenizer")
    config = {name: value for name, value in tokenizer.init_kwargs.items() if name not in TOKENIZER_FILES}
    template = service.config.chat_template or tokenizer.chat_template
    return config | {"tokenizer_class": type(tokenizer).__name__, "chat_template": template}

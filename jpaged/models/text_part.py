"""Text part of a multimodal checkpoint: its config, and the names of its tensors."""

from jpaged.models import base
from jpaged.models.base import LeafPath, LeafSource, same_name
from jpaged.models.config import ModelConfig
from jpaged.models.variation import Hf

PREFIX = "language_model."  # of the tensors
WHOLE = ("eos_token_id", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")  # fields of all parts


def text_config(hf: Hf) -> Hf:
    """Return the content of `text_config` with fields of the whole model that it lacks. Raises ValueError."""
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise ValueError("config.json lacks text_config")
    return {name: hf[name] for name in WHOLE if name in hf} | text


def source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf of the text part."""
    (part,) = same_name(path, config).parts
    return LeafSource((part._replace(name=PREFIX + part.name),))


def rename(name: str) -> str:
    """Return the name of a tensor of the text part as in released checkpoints; transformers 5 may write others."""
    if name.startswith("model." + PREFIX):
        return f"{PREFIX}model.{name.removeprefix('model.' + PREFIX)}"
    return PREFIX + name if name == "lm_head.weight" else name


def is_derived(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is not used: it belongs to images or to further predictions, or follows from others."""
    parts = ("vision_tower.", "multi_modal_projector.", "visual.", "mtp.")
    return name.removeprefix("model.").startswith(parts) or base.is_derived(name.removeprefix(PREFIX), config)

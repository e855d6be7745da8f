"""Load models from files in GGUF."""

import logging
from pathlib import Path

from jpaged.gguf_file import open_gguf
from jpaged.models.base import Model
from jpaged.models.checkpoint import Form, load_tensors
from jpaged.models.config import ModelConfig
from jpaged.models.gguf_names import named_tensors

logger = logging.getLogger(__name__)


def load_gguf(path: Path, config: ModelConfig, form: Form, *, progress: bool = True) -> Model:
    """Load a model from a file in GGUF. Quantized weights stay as they are if the form keeps groups.

    Raises:
        ValueError: the file is broken, or a tensor is missing, unexpected or misshapen.
    """
    file = open_gguf(path)
    stay = "quantized weights stay as they are" if form.keeps_groups else f"quantized weights become {form.dtype}"
    logger.info("%s: %s; %s", path.name, file.summary, stay)
    return load_tensors(lambda expected: named_tensors(file, config, expected), path, config, form, progress=progress)

"""Models with random parameters of numpy: `dummy_model` compiles a function for each config."""

import jax
import ml_dtypes
import numpy as np

from jpaged.models.base import Model
from jpaged.models.checkpoint import Place, abstract_model, merged, on_one_device
from jpaged.models.config import ModelConfig


def random_model(config: ModelConfig, dtype: str = "float32", seed: int = 0, place: Place = on_one_device) -> Model:
    """Return a model whose matrices leave the scale of their inputs as it is, with small embeddings, norms near 1 and
    biases near 0."""
    graphdef, leaves = abstract_model(config, dtype)
    rng = np.random.default_rng(seed)
    for path, leaf in leaves.items():
        x = rng.standard_normal(leaf.shape, np.float32)
        if leaf.ndim > 1:
            x *= 0.02 if path[-1] == "embedding" else leaf.shape[-1] ** -0.5
        else:
            x = 0.1 * x + (path[-1] == "scale")
        leaves[path] = leaf.replace(jax.device_put(x.astype(ml_dtypes.finfo(leaf.dtype).dtype), place(leaf)))
    return merged(graphdef, leaves)

"""Quantized checkpoints of the hub: weights are computed in float32 from the stored numbers when they are read.

The quantization of activations and of the KV cache that a checkpoint may describe is not applied.
"""

from collections.abc import Collection
from pathlib import Path

from jpaged.checkpoint_files import read_json
from jpaged.models.config_file import CONFIG
from jpaged.models.quantized_formats import FORMATS, LayerTensors, Scheme
from jpaged.models.safetensors_files import StoredTensor, StoredTensors

# Tensors about activations and the KV cache, which are not quantized as a checkpoint describes.
UNUSED = (
    ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale",
    ".kv_scale", ".k_zero_point", ".v_zero_point",
)  # fmt: skip


def read_scheme(directory: Path) -> Scheme | None:
    """Return the quantization of a directory's checkpoint; None if it is not quantized.

    Raises:
        ValueError: the quantization is not supported; the message has the field of config.json.
    """
    hf = read_json(directory / CONFIG, missing_ok=True)
    described = hf.get("quantization_config") or hf.get("compression_config")
    if not described:
        return None
    try:
        return scheme_of(described)
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG}: quantization_config: {error}") from error


def scheme_of(described: object) -> Scheme:
    """Return the quantization that `quantization_config` describes. Raises ValueError if it is not supported."""
    if not isinstance(described, dict):
        raise ValueError(f"must be a JSON object, not {described!r:.100}")
    method = described.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise ValueError(f"quant_method {method!r:.100} is not supported; supported: {', '.join(FORMATS)}")
    return FORMATS[method](described)


def dequantized(tensors: StoredTensors, scheme: Scheme, expected: Collection[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a quantized checkpoint with a `QuantizedWeight` for each quantized weight.

    The tensors that belong to it are left out, and so are those about activations and the KV cache.

    Args:
        expected: names of the model's tensors. GPTQ writes zeros as biases of layers that have none.

    Raises:
        ValueError: a tensor is missing or misshapen.
    """
    weights: dict[str, StoredTensor] = {}
    used = {name for name in tensors if name.endswith(UNUSED)}
    for name in tensors:
        *_, leaf = name.rpartition(".")
        if leaf in scheme.marks:
            layer = LayerTensors(tensors, name.removesuffix(leaf), used)
            weights[layer.prefix + "weight"] = scheme.read(layer)
            bias = layer.prefix + "bias"
            if bias in tensors and bias not in expected and not tensors[bias][:].any():
                used.add(bias)
    return {name: tensor for name, tensor in tensors.items() if name not in used} | weights

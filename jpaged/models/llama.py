"""Llama: the shared decoder without variations."""

from jpaged.models.base import Architecture
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder


class Llama(Decoder):
    """Llama family: 1, 2, 3, 3.1, 3.2, TinyLlama and other models that its config describes."""


ARCHITECTURES = (
    Architecture(
        ModelConfig,
        Llama,
        examples=("meta-llama/Llama-3.2-1B-Instruct", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        features="biases, RoPE scaled by linear, llama3, yarn or longrope",
    ),
)

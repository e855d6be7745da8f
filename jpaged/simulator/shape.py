"""Sizes of models: the bytes and operations of a step follow from them."""

from dataclasses import dataclass

from jpaged.config import ModelConfig


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder.

    Attributes:
        mlp_matrices: weight matrices of an MLP: 3 with a gate, else 2.
        tied: whether the embedding is also the output matrix.
        context: maximum tokens of a sequence.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    mlp_matrices: int = 3
    tied: bool = False
    context: int = 2048

    @classmethod
    def of(cls, config: ModelConfig, name: str) -> "ModelShape":
        """Return the sizes of a model that jpaged serves.

        Raises:
            ValueError: it is a mixture of experts, whose steps read a part of the parameters.
        """
        if config.variation.experts is not None:
            raise ValueError(f"model: {name} is a mixture of experts, for which steps can't be predicted")
        return cls(
            name, config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
            config.num_key_value_heads, config.head_dim, config.vocab_size, config.mlp_matrices,
            tied=config.tie_word_embeddings, context=config.context_length,
        )  # fmt: skip

    @property
    def layer_params(self) -> int:
        """Parameters of the weight matrices of all layers."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + self.mlp_matrices * self.hidden_size * self.intermediate_size)

    @property
    def output_params(self) -> int:
        """Parameters of the output matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Number of parameters, without norms and biases."""
        return self.layer_params + self.output_params * (1 if self.tied else 2)

    def kv_bytes(self, dtype_bytes: int, num_gpus: int = 1) -> int:
        """Return the bytes of keys and values of one token on all GPUs; each GPU holds at least one KV head."""
        return 2 * self.num_layers * max(self.num_kv_heads, num_gpus) * self.head_dim * dtype_bytes


def _opt(name: str, layers: int, hidden: int) -> ModelShape:
    heads = hidden // 128
    return ModelShape(name, layers, hidden, 4 * hidden, heads, heads, 128, 50_272, mlp_matrices=2, tied=True)


# OPT: arXiv:2205.01068, table 1. Llama: the config.json of the checkpoints.
SHAPES = {
    "llama-3.2-1b": ModelShape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128_256, tied=True, context=131_072),
    "llama-3-8b": ModelShape("Llama-3-8B", 32, 4096, 14_336, 32, 8, 128, 128_256, context=8192),
    "llama-3-70b": ModelShape("Llama-3-70B", 80, 8192, 28_672, 64, 8, 128, 128_256, context=8192),
    "llama-13b": ModelShape("LLaMA-13B", 40, 5120, 13_824, 40, 40, 128, 32_000),
    "opt-13b": _opt("OPT-13B", 40, 5120),
    "opt-66b": _opt("OPT-66B", 64, 9216),
    "opt-175b": _opt("OPT-175B", 96, 12_288),
}

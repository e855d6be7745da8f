"""Sizes of models: the bytes and operations of a step follow from them."""

from dataclasses import dataclass

from jpaged.models.config import ModelConfig
from jpaged.models.variation import Recurrence


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        mlp_matrices: weight matrices of an MLP: 3 with a gate, else 2.
        tied: whether the embedding is also the output matrix.
        context: maximum tokens of a sequence.
        num_experts: experts of each layer with a mixture, 0 for a dense decoder.
        num_experts_per_tok: experts that compute a token.
        expert_size: MLP dim of an expert.
        shared_size: MLP dim of the expert of each mixture that computes all tokens; 0: there is none.
        num_dense_layers: layers with an MLP in a decoder with experts.
        windows: tokens that a query of each layer with attention sees; None: all tokens; (): all in every layer.
        recurrence: recurrent layers in the place of attention.
        gated: whether attention has a gate of the size of queries.
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
    num_experts: int = 0
    num_experts_per_tok: int = 0
    expert_size: int = 0
    shared_size: int = 0
    num_dense_layers: int = 0
    windows: tuple[int | None, ...] = ()
    recurrence: Recurrence | None = None
    gated: bool = False

    @classmethod
    def of(cls, config: ModelConfig, name: str) -> "ModelShape":
        """Return the sizes of a model that jpaged serves."""
        experts, mixture = config.variation.experts, {}
        if experts is not None:
            mixture = dict(
                num_experts=experts.num_experts, num_experts_per_tok=experts.num_experts_per_tok,
                expert_size=experts.intermediate_size, num_dense_layers=len(experts.dense_layers),
                shared_size=experts.shared_size,
            )  # fmt: skip
        return cls(
            name, config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
            config.num_key_value_heads, config.head_dim, config.vocab_size, config.mlp_matrices,
            tied=config.tie_word_embeddings, context=config.context_length,
            windows=config.variation.windows if any(config.variation.windows) else (),
            recurrence=config.variation.recurrence, gated=config.variation.gated, **mixture,
        )  # fmt: skip

    @property
    def linear_params(self) -> int:
        """Parameters of the linear layers, without experts and the output matrix."""
        heads = self.num_heads * (2 + self.gated) + 2 * self.num_kv_heads
        attention = self.num_attention_layers * self.hidden_size * self.head_dim * heads
        if (at := self.recurrence) is not None:
            projected = at.channels + 2 * at.num_value_heads * (at.value_dim + 1)
            attention += len(at.layers) * self.hidden_size * projected
        dense = self.num_dense_layers if self.num_experts else self.num_layers
        mlps = dense * self.mlp_matrices * self.hidden_size * self.intermediate_size
        shared = self.mlp_matrices * self.shared_size  # rows of a mixture besides those of its router
        return attention + mlps + (self.num_layers - dense) * (self.num_experts + shared) * self.hidden_size

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with keys and values."""
        return self.num_layers - (len(self.recurrence.layers) if self.recurrence else 0)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all recurrent layers, float32."""
        if (at := self.recurrence) is None:
            return 0
        return 4 * len(at.layers) * (at.num_value_heads * at.key_dim * at.value_dim + (at.taps - 1) * at.channels)

    @property
    def expert_params(self) -> int:
        """Parameters of all experts."""
        layers = self.num_layers - self.num_dense_layers
        return layers * self.num_experts * self.mlp_matrices * self.hidden_size * self.expert_size

    def layer_products(self, grouped: bool) -> int:
        """Return the multiplications of one token in the matrices of all layers.

        Without grouped products, XLA multiplies each of a token's `num_experts_per_tok` rows by the matrices of all
        experts (docs/models.md).
        """
        if not grouped:
            return self.linear_params + self.expert_params * self.num_experts_per_tok
        return self.linear_params + self.expert_params * self.num_experts_per_tok // max(1, self.num_experts)

    def experts_read(self, num_tokens: int, grouped: bool) -> float:
        """Return the expected number of distinct experts in a layer whose weights a step of some tokens reads.

        E (1 - (1 - k / E)^T): each token takes k of E experts, all alike and independently. Without grouped products
        they are all read.
        """
        if not grouped or not self.num_experts:
            return self.num_experts
        return self.num_experts * (1 - (1 - self.num_experts_per_tok / self.num_experts) ** num_tokens)

    @property
    def output_params(self) -> int:
        """Parameters of the output matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Number of parameters, without norms and biases."""
        return self.linear_params + self.expert_params + self.output_params * (1 if self.tied else 2)

    def param_bytes(self, weight_bits: float, embedding_bits: float = 16) -> float:
        """Return the bytes of all parameters: of linear layers and experts, and of embedding and output matrix."""
        in_layers = self.linear_params + self.expert_params
        return (in_layers * weight_bits + (self.num_params - in_layers) * embedding_bits) / 8

    def expanded_bytes(self, num_tokens: int, grouped: bool) -> int:
        """Return the bytes of a step's inputs of experts, which XLA repeats for each expert unless they are grouped."""
        return 0 if grouped else self.num_experts * self.num_experts_per_tok * num_tokens * self.hidden_size * 2

    def kv_bytes(self, dtype_bytes: int, num_gpus: int = 1) -> int:
        """Return the bytes of keys and values of one token on all GPUs; each GPU holds at least one KV head."""
        return 2 * self.num_attention_layers * max(self.num_kv_heads, num_gpus) * self.head_dim * dtype_bytes

    def share_seen(self, context: float) -> float:
        """Return the share of the keys of a context that its last token sees, on average over the layers."""
        windows = self.windows or (None,)
        return sum(1.0 if window is None else min(1.0, window / context) for window in windows) / len(windows)


def _opt(name: str, layers: int, hidden: int) -> ModelShape:
    heads = hidden // 128
    return ModelShape(name, layers, hidden, 4 * hidden, heads, heads, 128, 50_272, mlp_matrices=2, tied=True)


# OPT: arXiv:2205.01068, table 1. The others: the config.json of the checkpoints.
SHAPES = {
    "llama-3.2-1b": ModelShape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128_256, tied=True, context=131_072),
    "llama-3-8b": ModelShape("Llama-3-8B", 32, 4096, 14_336, 32, 8, 128, 128_256, context=8192),
    "llama-3-70b": ModelShape("Llama-3-70B", 80, 8192, 28_672, 64, 8, 128, 128_256, context=8192),
    "llama-3.1-8b": ModelShape("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128, 128_256, context=131_072),
    "llama-3.1-70b": ModelShape("Llama-3.1-70B", 80, 8192, 28_672, 64, 8, 128, 128_256, context=131_072),
    "gemma-3-27b": ModelShape(
        "Gemma-3-27B", 62, 5376, 21_504, 32, 16, 128, 262_208, tied=True, context=131_072,
        windows=tuple(None if layer % 6 == 5 else 1024 for layer in range(62)),
    ),
    "qwen3.5-9b": ModelShape(
        "Qwen3.5-9B", 32, 4096, 12_288, 16, 4, 256, 248_320, context=262_144, gated=True,
        recurrence=Recurrence(tuple(layer for layer in range(32) if layer % 4 < 3), 16, 32, 128, 128, 4),
    ),
    "mixtral-8x7b": ModelShape(
        "Mixtral-8x7B", 32, 4096, 14_336, 32, 8, 128, 32_000, context=32_768,
        num_experts=8, num_experts_per_tok=2, expert_size=14_336,
    ),
    "qwen3-30b-a3b": ModelShape(
        "Qwen3-30B-A3B", 48, 2048, 6144, 32, 4, 128, 151_936, context=40_960,
        num_experts=128, num_experts_per_tok=8, expert_size=768,
    ),
    "gpt-oss-20b": ModelShape(
        "gpt-oss-20b", 24, 2880, 2880, 64, 8, 64, 201_088, context=131_072,
        num_experts=32, num_experts_per_tok=4, expert_size=2880,
        windows=tuple(None if layer % 2 else 128 for layer in range(24)),
    ),
    "llama-13b": ModelShape("LLaMA-13B", 40, 5120, 13_824, 40, 40, 128, 32_000),
    "opt-13b": _opt("OPT-13B", 40, 5120),
    "opt-66b": _opt("OPT-66B", 64, 9216),
    "opt-175b": _opt("OPT-175B", 96, 12_288),
}  # fmt: skip

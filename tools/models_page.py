"""Write docs/models.md from the registry: `python -m tools.models_page`."""

from pathlib import Path

from jpaged.models.registry import architectures

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

HEAD = """# Models

`jpaged serve MODEL` takes a directory or a Hugging Face hub id whose `config.json` names one of these architectures,
with parameters in safetensors of float32, bfloat16 or float16, in Orbax (`jpaged convert`), or quantized
([quantization.md](quantization.md)); or a file in GGUF ([gguf.md](gguf.md)). This page is generated from the registry
(`python -m tools.models_page`).

| architecture | checkpoints, for example | supported in addition to a Llama's features |
|---|---|---|
"""

TAIL = """
Every architecture is compared with transformers in float32 on random checkpoints
(`tests/models/test_architectures.py`): logits of a whole prefill, of chunks and of decode steps, and 64 greedy tokens.

## Limits

- **Refused values.** A field of `config.json` that is known to change the computation, and that the architecture does
  not read, is an error with the field's name (`NEUTRAL` in `jpaged/models/config.py`).
- **RoPE** may be scaled by `linear`, `llama3`, `yarn` or `longrope`. `dynamic` is refused, because its frequencies
  change as a sequence grows. `linear` and `yarn` extend the context by their factor, to `max_position_embeddings` or
  `original_max_position_embeddings` times `factor`, as in vLLM; Gemma 3's `max_position_embeddings` includes it.
- **longrope** has factors for short and for long sequences. The cache holds rotated keys, which requests share, so the
  choice holds for the whole engine: the long factors if `--max-model-len` exceeds the original context, as in vLLM.
  Transformers chooses by the length of each sequence. The results are equal for sequences past the original context,
  and for all sequences if `--max-model-len` is at most the original context.
- **Windows.** Layers with a window hold the tokens that later tokens see, and free the others while the request runs
  ([sharing.md](sharing.md)).
- **Recurrent layers** (Qwen 3.5, 3.6) compute each token after the one before it, in prompts, too: the bits of a token
  do not depend on the steps. [kernels.md](kernels.md) has the cost. Their states take memory of their own
  ([sharing.md](sharing.md)). They run on one device, and `causal.logits` with a mask is refused. Vision and further
  predictions (MTP) of these checkpoints are not used.
- **Mixtures of experts** compute each token with its own experts and drop none. Routing is in float32. On one CPU and
  on one Hopper GPU, kernels multiply the rows of an expert by that expert's matrices, and read no others. Elsewhere XLA
  (jax 0.12) expands the grouped product (`ragged_dot`): it multiplies a token's row for each of its experts by the
  matrices of all experts and masks the results, so the operations and the temporary memory of a step grow with the
  number of experts. `jpaged plan` predicts that.
- **Multimodal checkpoints** are refused, except those of Gemma 3, Mistral 3 and Qwen 3.5, whose text part is served.
- **Llama 4** is refused: most of its layers see chunks of 8,192 tokens, and attention knows windows only.
- **PyTorch's files** (`.bin`) are refused with the command that converts them.
- **Tensor parallelism**: the number of devices must divide the heads and the MLP sizes, also those of experts.

[adding-a-model.md](adding-a-model.md) describes how to add an architecture.
"""


def page() -> str:
    """Return the content of docs/models.md."""
    rows = []
    for architecture in architectures():
        examples = "<br>".join(f"`{name}`" for name in architecture.examples)
        rows.append(f"| `{architecture.config.architecture}` | {examples} | {architecture.features} |\n")
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())

"""Generate from a Flax NNX module that a program holds, change its parameters, and generate again.

python examples/nnx_module.py
"""

import jax
from flax import nnx

from jpaged import LLM, Llama, ModelConfig, SamplingParams

CONFIG = ModelConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
)  # fmt: skip


def main() -> None:
    model = Llama(CONFIG, rngs=nnx.Rngs(0))
    llm = LLM(model, max_num_seqs=4)  # it uses the module's arrays without a copy
    params = SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate([1, 2, 3], params)[0].outputs[0].token_ids
    state = nnx.state(model)
    nnx.update(model, jax.tree.map(lambda leaf: 0.5 * leaf, state))  # stands for a training step
    llm.update_params(model)  # nothing is copied or compiled; the prefix cache is invalidated
    after = llm.generate([1, 2, 3], params)[0].outputs[0].token_ids
    print(f"before {before}\nafter  {after}")


if __name__ == "__main__":
    main()

"""The Llama of the benchmark of drafts copies its prompt."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.shared.copying_llama import write_copying_llama
from jpaged.models.checkpoint import Form, load_safetensors
from jpaged.models.registry import read_config
from jpaged.rl.sequences import causal_attention

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 640,
    "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def test_it_continues_a_text_as_equal_tokens_continued_before(tmp_path):
    write_copying_llama(tmp_path, CONFIG)
    model = load_safetensors(tmp_path, read_config(tmp_path), Form("bfloat16"), progress=False)
    text = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 80)
    text[30:35] = text[10:15]  # these continue in two ways; the token before them tells which
    tokens = np.concatenate([text, text[28:75]])
    graphdef, state = nnx.split(model)

    @jax.jit
    def greedy(state):
        model = nnx.merge(graphdef, state)
        x_td = model(jnp.asarray(tokens), jnp.arange(len(tokens)), causal_attention(model, 1, len(tokens)))
        return model.logits(x_td).argmax(-1)

    np.testing.assert_array_equal(greedy(state)[len(text) + 6 : -1], tokens[len(text) + 7 :])

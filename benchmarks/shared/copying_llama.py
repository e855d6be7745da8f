"""A Llama that copies: it continues a text as equal tokens continued before, with parameters that are set by hand.

The first layer adds the six tokens before each position to its hidden state. Every later layer attends to positions
whose six previous tokens are the last six of the text, and adds their tokens to the result (induction heads, arXiv
2209.11895). The MLPs multiply random matrices and add nothing. Sizes are those of the given config, so that a step
takes the time of any other Llama of these sizes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SIZE = 64  # of a head, and of the random vector of a token; a hidden state has parts of this size
BEFORE = 6  # tokens before a position that the first layer adds
RESULT, ONE = (BEFORE + 1) * SIZE, (BEFORE + 2) * SIZE  # places of the result and of a constant in a hidden state
ROPE_THETA = 1e12  # pairs of a head from `STEADY` on turn little over a context
STEADY, PAIRS = 10, SIZE // 2
NEAR, EQUAL, LOGIT = 40.0, 12.0, 12.0  # score of the right distance, score of an equal token, logit of a copy


def write_copying_llama(folder: Path, config: Mapping[str, Any], seed: int = 0) -> None:
    """Write the config and the parameters, float32, of a Llama that copies.

    Args:
        config: a Llama's config with heads of 64, three queries for each of at least two keys, and a hidden size of at
            least 576.
    """
    config = {**config, "rope_theta": ROPE_THETA}
    rng, hidden, vocabulary = np.random.default_rng(seed), config["hidden_size"], config["vocab_size"]
    tokens = rng.standard_normal((vocabulary, SIZE), np.float32)
    tokens /= np.linalg.norm(tokens, axis=1, keepdims=True)
    embeddings, head = (np.zeros((vocabulary, hidden), np.float32) for _ in range(2))
    embeddings[:, :SIZE], embeddings[:, ONE] = tokens, 1
    head[:, RESULT : RESULT + SIZE] = tokens * (LOGIT / _scale(hidden, BEFORE + 3))
    parameters = {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": head,
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(config["num_hidden_layers"]):
        attention = _copies(config, rng) if layer else _tokens_before(config)
        parts = {f"self_attn.{name}_proj": matrix for name, matrix in attention.items()}
        for name in ("gate", "up"):
            parts[f"mlp.{name}_proj"] = 0.02 * rng.standard_normal((config["intermediate_size"], hidden), np.float32)
        parts["mlp.down_proj"] = np.zeros((hidden, config["intermediate_size"]), np.float32)
        parts |= {f"{name}_layernorm": np.ones(hidden, np.float32) for name in ("input", "post_attention")}
        parameters |= {f"model.layers.{layer}.{name}.weight": matrix for name, matrix in parts.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(parameters, folder / "model.safetensors")


def _scale(hidden: int, parts: int) -> float:
    """Return the factor of an RMS norm for a hidden state of some parts of length 1."""
    return float(np.sqrt(hidden / parts))


def _zeros(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the matrices of a layer's attention, [heads, 64, hidden]; that of the outputs is transposed."""
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    counts = {"q": queries, "k": keys, "v": keys, "o": queries}
    return {name: np.zeros((count, SIZE, config["hidden_size"]), np.float32) for name, count in counts.items()}


def _stored(matrices: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the matrices of `_zeros` as checkpoints have them, [outputs, inputs]."""
    flat = {name: matrix.reshape(-1, matrix.shape[-1]) for name, matrix in matrices.items()}
    return flat | {"o": np.ascontiguousarray(flat["o"].T)}


def _tokens_before(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the matrices of a layer that adds the tokens before each position.

    Queries and keys are constants. Rotated by their positions, they agree best at one distance.
    """
    matrices, scale = _zeros(config), _scale(config["hidden_size"], 2)
    frequencies = ROPE_THETA ** (-np.arange(STEADY) / PAIRS)
    score = np.sqrt(NEAR * np.sqrt(SIZE)) / scale
    matrices["k"][:, :STEADY, ONE] = score
    matrices["v"][:, :, :SIZE] = np.eye(SIZE) / scale
    for query in range(BEFORE):  # three for each key
        turned, place = (query + 1) * frequencies, (query + 1) * SIZE
        matrices["q"][query, :STEADY, ONE] = score * np.cos(turned)
        matrices["q"][query, PAIRS : PAIRS + STEADY, ONE] = -score * np.sin(turned)
        matrices["o"][query, :, place : place + SIZE] = np.eye(SIZE)
    return _stored(matrices)


def _copies(config: Mapping[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the matrices of a layer that adds the tokens after equal ones.

    Queries and keys are random projections of the last tokens and of the tokens before each position.
    """
    matrices, scale = _zeros(config), _scale(config["hidden_size"], BEFORE + 2)
    steady = np.arange(SIZE).reshape(2, PAIRS)[:, STEADY:].ravel()
    length, keys = BEFORE * SIZE, config["num_key_value_heads"]
    for key in range(keys):
        projection = rng.standard_normal((len(steady), length), np.float32) / np.sqrt(len(steady))
        projection *= np.sqrt(EQUAL * np.sqrt(SIZE)) / scale
        query = key * config["num_attention_heads"] // keys
        matrices["q"][query, steady, :length] = projection
        matrices["k"][key, steady, SIZE : SIZE + length] = projection
        matrices["v"][key, :, :SIZE] = np.eye(SIZE) / scale
        matrices["o"][query, :, RESULT : RESULT + SIZE] = np.eye(SIZE) / (keys * (config["num_hidden_layers"] - 1))
    return _stored(matrices)

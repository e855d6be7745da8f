"""Trains the demo model, a Flax Llama that jpaged serves: makes its text, its tokenizer and its weights.

    python -m tools.demo_model.train [--steps N] [--output DIR] [--seed 0]
    python server.py --model DIR

It takes about 20 minutes on two CPU cores and needs the `dev` extra, no network and no data. The same seed gives the
same files, byte for byte, on the same machine with the same packages; elsewhere the weights may differ in the last
bits.
"""

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer
from tqdm import tqdm

from jpaged.demo import DIRECTORY
from jpaged.models.checkpoint import save_safetensors
from jpaged.models.config import ModelConfig
from jpaged.models.llama import Llama
from pallas_kernels import rotate
from tools.demo_model import corpus, tokenizer

DEFAULT_STEPS = 5000
HELD_OUT_SEED = 1_000_003
PADDING = 0


@dataclass(frozen=True)
class Recipe:
    """The settings of a training. Each batch holds `batch_tokens` positions, in rows of one of the `row_lengths`."""

    vocab_size: int = 1280
    hidden_size: int = 160
    intermediate_size: int = 448
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    row_lengths: tuple[int, ...] = (128, 256, 1024)
    batch_tokens: int = 2048
    tokenizer_examples: int = 20_000
    long_chat_share: float = 0.003
    peak_rate: float = 5e-3
    weight_decay: float = 0.1
    clip: float = 1.0

    def hf_config(self) -> dict[str, Any]:
        """The model's config.json."""
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{
                name: getattr(self, name)
                for name in (*names, "num_key_value_heads", "head_dim", "max_position_embeddings")
            },
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "bos_token_id": tokenizer.SPECIAL.index(tokenizer.BEGIN),
            "eos_token_id": tokenizer.SPECIAL.index(tokenizer.END),
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


@dataclass(frozen=True)
class Batch:
    """Rows of whole documents. A document is told by its number in the row; padding is document 0 and has no loss."""

    inputs_bt: np.ndarray
    targets_bt: np.ndarray
    documents_bt: np.ndarray
    positions_bt: np.ndarray

    def arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def encode(tokens: Tokenizer, example: corpus.Example) -> list[int]:
    """BEGIN, the text and END, or the chat as the chat template renders it."""
    text = f"{tokenizer.BEGIN}{example}{tokenizer.END}" if isinstance(example, str) else tokenizer.render(example)
    return tokens.encode(text, add_special_tokens=False).ids


def as_typed(tokens: Tokenizer, example: corpus.Example, rng: random.Random) -> list[int]:
    """Mostly `encode`. A few texts begin in lower case, or have the seam that a prompt leaves which ends in a space."""
    draw = rng.random()
    if not isinstance(example, str) or draw > 0.06:
        return encode(tokens, example)
    if draw > 0.03:
        return encode(tokens, example[0].lower() + example[1:])
    seam = rng.choice([index + 1 for index, letter in enumerate(example) if letter == " "] or [len(example)])
    parts = f"{tokenizer.BEGIN}{example[:seam]}", f"{example[seam:]}{tokenizer.END}"
    return [token for part in parts for token in tokens.encode(part, add_special_tokens=False).ids]


def training_examples(seed: int, long_chat_share: float) -> Iterator[corpus.Example]:
    long_chats, every = corpus.long_chats(seed), round(1 / long_chat_share)
    for index, example in enumerate(corpus.examples(seed)):
        if index % every == every - 1:
            yield next(long_chats)
        yield example


def documents(recipe: Recipe, tokens: Tokenizer, seed: int) -> Iterator[list[int]]:
    rng = random.Random(f"typed {seed}")
    for example in training_examples(seed, recipe.long_chat_share):
        yield as_typed(tokens, example, rng)[: recipe.row_lengths[-1] + 1]


def pack(rows: list[list[list[int]]], length: int) -> Batch:
    """Arrays [B, T] of rows of documents."""
    shape = (len(rows), length)
    inputs, targets, numbers, positions = (np.full(shape, PADDING, np.int32) for _ in range(4))
    for row, row_documents in enumerate(rows):
        start = 0
        for number, document in enumerate(row_documents, 1):
            end = start + len(document) - 1
            inputs[row, start:end], targets[row, start:end] = document[:-1], document[1:]
            numbers[row, start:end], positions[row, start:end] = number, np.arange(end - start)
            start = end
    return Batch(inputs, targets, numbers, positions)


class Packer:
    """Gathers documents of at most `length` + 1 tokens into batches of `rows` rows."""

    def __init__(self, length: int, rows: int):
        self.length, self.count = length, rows
        self.rows: list[list[list[int]]] = [[]]
        self.free = [length]

    def add(self, document: list[int]) -> Batch | None:
        """Takes a document into the first row with room, and gives the full rows once there are enough of them."""
        size = len(document) - 1
        row = next((index for index, free in enumerate(self.free) if free >= size), None)
        full = None
        if row is None and len(self.rows) == self.count:
            full = pack(self.rows, self.length)
            self.rows, self.free = [], []
        if row is None:
            self.rows.append([])
            self.free.append(self.length)
            row = -1
        self.rows[row].append(document)
        self.free[row] -= size
        return full


def batches(recipe: Recipe, tokens: Tokenizer, seed: int) -> Iterator[Batch]:
    packers = [Packer(length, max(1, recipe.batch_tokens // length)) for length in recipe.row_lengths]
    for document in documents(recipe, tokens, seed):
        packer = next(packer for packer in packers if len(document) - 1 <= packer.length)
        if (batch := packer.add(document)) is not None:
            yield batch


def attend(
    mask_btt: jax.Array,
    layer: int,
    q_tnh: jax.Array,
    k_tkh: jax.Array,
    v_tkh: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
) -> jax.Array:
    """Attention within the documents of each row; the rows come one after the other in one long one."""
    b, t, _ = mask_btt.shape
    groups = k_tkh.shape[1]
    q_tnh = rotate(q_tnh, cos, sin)
    q = q_tnh.reshape(b, t, groups, -1, q_tnh.shape[-1])
    k, v = (x.reshape(b, t, groups, -1) for x in (rotate(k_tkh, cos, sin), v_tkh))
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask_btt[:, None, None], scores, -1e9))
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q_tnh.shape)


def token_losses(
    model: Llama, inputs_bt: jax.Array, targets_bt: jax.Array, documents_bt: jax.Array, positions_bt: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The loss of each token [B * T], and 1 where it counts."""
    t = inputs_bt.shape[1]
    mask_btt = (documents_bt[:, :, None] == documents_bt[:, None, :]) & jnp.tril(jnp.ones((t, t), bool))
    hidden = model(inputs_bt.reshape(-1), positions_bt.reshape(-1), partial(attend, mask_btt))
    losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), targets_bt.reshape(-1))
    counts = (documents_bt.reshape(-1) > 0).astype(losses.dtype)
    return losses * counts, counts


def optimizer(recipe: Recipe, steps: int) -> optax.GradientTransformation:
    """AdamW with warmup and a cosine; norms are not decayed."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, recipe.peak_rate, max(1, min(150, steps // 10)), steps, recipe.peak_rate / 50
    )
    decayed = partial(jax.tree.map, lambda x: x.ndim > 1)
    adamw = optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=recipe.weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(recipe.clip), adamw)


def first_model(recipe: Recipe, seed: int) -> Llama:
    """A model whose layers do nothing yet: they learn faster when they don't drown the embedding in noise first."""
    model = Llama(ModelConfig.from_hf(recipe.hf_config()), dtype="float32", rngs=nnx.Rngs(seed))
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight[...] = jnp.zeros_like(linear.weight[...])
    return model


def train_model(recipe: Recipe, tokens: Tokenizer, steps: int, seed: int) -> tuple[Llama, list[float]]:
    """The model in float32, and the loss of each step."""
    graph, state = nnx.split(first_model(recipe, seed))
    transform = optimizer(recipe, steps)

    @jax.jit
    def step(state: nnx.State[Any, Any], moments: Any, arrays: Any) -> tuple[nnx.State[Any, Any], Any, jax.Array]:
        def loss(state: nnx.State[Any, Any]) -> jax.Array:
            losses, counts = token_losses(nnx.merge(graph, state), *arrays)
            return losses.sum() / counts.sum()

        value, gradients = jax.value_and_grad(loss)(state)
        updates, moments = transform.update(gradients, moments, state)
        return optax.apply_updates(state, updates), moments, value

    moments, history = transform.init(state), []
    progress = tqdm(zip(range(steps), batches(recipe, tokens, seed)), total=steps, desc="training")
    for index, batch in progress:
        state, moments, value = step(state, moments, batch.arrays())
        history.append(float(value))
        if index % 20 == 0:
            progress.set_postfix(loss=f"{np.mean(history[-50:]):.3f}")
    return nnx.merge(graph, state), history


def cast(model: Llama, dtype: str) -> Llama:
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(dtype), state))


def held_out_loss(recipe: Recipe, tokens: Tokenizer, model: Llama, seed: int = HELD_OUT_SEED, count: int = 12) -> float:
    """Mean loss per token, in nats, over `count` batches of texts from another seed."""
    graph, state = nnx.split(model)
    losses = jax.jit(lambda state, arrays: [part.sum() for part in token_losses(nnx.merge(graph, state), *arrays)])
    sums = [losses(state, batch.arrays()) for _, batch in zip(range(count), batches(recipe, tokens, seed))]
    return float(sum(loss for loss, _ in sums) / sum(counts for _, counts in sums))


def save(recipe: Recipe, tokens: Tokenizer, model: Llama, directory: Path) -> None:
    """A directory as `from_pretrained` and this engine read it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = recipe.hf_config()
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": [config["eos_token_id"]],
        "temperature": 0.6,  # at 1 so small a model loses the thread now and then
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(tokens, directory, recipe.max_position_embeddings)
    save_safetensors(model, directory)


def make_tokenizer(recipe: Recipe, seed: int) -> Tokenizer:
    """Learns from the answers, and from each question as it is, so that words are whole where the model writes them."""
    texts = (text for example in corpus.take(seed, recipe.tokenizer_examples) for text in _texts(example))
    return tokenizer.train(texts, recipe.vocab_size)


def _texts(example: corpus.Example) -> list[str]:
    return [example] if isinstance(example, str) else [message["content"] for message in example]


def train(recipe: Recipe, steps: int, seed: int, directory: Path) -> list[float]:
    """Trains everything, saves it, and gives the loss of each step."""
    tokens = make_tokenizer(recipe, seed)
    model, history = train_model(recipe, tokens, steps, seed)
    save(recipe, tokens, cast(model, "bfloat16"), directory)
    loss = held_out_loss(recipe, tokens, cast(cast(model, "bfloat16"), "float32"))
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"held-out loss {loss:.4f} nats per token, {size} bytes in {directory}")
    return history


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_model.train",
        description="Trains the demo model on text that it makes itself.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="steps of training")
    parser.add_argument("--output", type=Path, default=DIRECTORY, help="where the model is saved")
    parser.add_argument("--seed", type=int, default=0, help="of the text and of the first weights")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    train(Recipe(), arguments.steps, arguments.seed, arguments.output)


if __name__ == "__main__":
    main()

"""Loss of quantized weights: next-token distributions of a model beside those of the same model without quantization.

    python benchmarks/engine/quantization.py --out benchmarks/results/quantization        two minutes on a CPU

The demo model reads a text of the kind that it was trained on, with another seed; a model of random weights reads
random tokens. Activations are float32. Figures are means over all tokens: the Kullback-Leibler divergence KL(exact,
quantized) in nats, the share of tokens at which both have the same most likely token, and the cross entropy of the
text. Bytes are those of a model whose unquantized parameters have 16 bits.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.engine.cpu_serving import CONFIG
from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from jpaged import ModelConfig, quantize
from jpaged.config import QUANTIZATIONS
from jpaged.demo import DIRECTORY as DEMO
from jpaged.models.base import Model
from jpaged.models.checkpoint import Form, dummy_model, load_safetensors
from jpaged.models.layers import MINIMUM, SCALE
from jpaged.models.registry import read_config
from jpaged.rl.causal import logits
from jpaged.runtime.parameters import by_name
from jpaged.tokenizer import backend, load_tokenizer
from tools.demo_model.corpus import all_texts, take

TEXT_SEED, WIDTH, ROWS = 2_000_003, 256, 4  # tokens of a row, and rows of a call


def demo_tokens(num_rows: int) -> np.ndarray:
    """Return rows of tokens of a text for the demo model, [B, W] int32."""
    tokenizer, tokens = backend(load_tokenizer(DEMO)), []
    for example in take(TEXT_SEED, 100 * num_rows):
        for text in all_texts(example):
            tokens += tokenizer.encode(text, add_special_tokens=False).ids
        if len(tokens) >= num_rows * WIDTH:
            break
    return np.asarray(tokens[: num_rows * WIDTH], np.int32).reshape(num_rows, WIDTH)


def distributions(model: Model, tokens_bw: np.ndarray) -> list[np.ndarray]:
    """Return the log probabilities [B, W, V] after each token, in calls of `ROWS` rows."""
    graphdef, state = nnx.split(model)
    mask, positions = np.tril(np.ones((WIDTH, WIDTH), bool)), np.broadcast_to(np.arange(WIDTH), (ROWS, WIDTH))

    @jax.jit
    def run(state, tokens_bw):
        found = logits(nnx.merge(graphdef, state), tokens_bw, positions, jnp.broadcast_to(mask, (ROWS, WIDTH, WIDTH)))
        return jax.nn.log_softmax(found, axis=-1)

    return [np.asarray(run(state, tokens_bw[at : at + ROWS])) for at in range(0, len(tokens_bw), ROWS)]


def num_bytes(model: Model) -> int:
    """Return the bytes of a model whose parameters have 16 bits, unless they are quantized."""
    leaves = by_name(model)
    small = {name for name, leaf in leaves.items() if leaf.dtype.itemsize == 1 or name.endswith((SCALE, MINIMUM))}
    return sum(leaf.size * (leaf.dtype.itemsize if name in small else 2) for name, leaf in leaves.items())


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    parser = script_parser(__doc__, "quantization")
    parser.add_argument("--rows", type=int, default=64, help=f"rows of {WIDTH} tokens for the demo model")
    parser.add_argument("--tiny", action="store_true", help="few tokens and one small layer, to see that it works")
    args = parser.parse_args(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), args.tiny))
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip
    config = ModelConfig.from_hf(CONFIG | (small if args.tiny else {}))
    random_tokens = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, WIDTH)).astype(np.int32)
    demo = load_safetensors(DEMO, read_config(DEMO), Form("float32"), progress=False)
    cases = {
        "demo": (demo, demo_tokens(ROWS if args.tiny else args.rows)),
        "random": (dummy_model(config, "float32", 0), random_tokens),
    }
    for name, (model, tokens_bw) in cases.items():
        exact = distributions(model, tokens_bw)
        for mode in ("none", *QUANTIZATIONS):
            other = model if mode == "none" else quantize(model, mode)
            divergences, same, losses = [], [], []
            found = exact if mode == "none" else distributions(other, tokens_bw)
            for at, (p, q) in enumerate(zip(exact, found)):
                divergences.append((np.exp(p) * (p - q)).sum(-1).mean())
                same.append((p.argmax(-1) == q.argmax(-1)).mean())
                targets = tokens_bw[at * ROWS : (at + 1) * ROWS, 1:, None]
                losses.append(-np.take_along_axis(q[:, :-1], targets, 2).mean())
            report.add(
                experiment="quantization", model=name, quantization=mode, tokens=tokens_bw.size,
                kl_nats=float(np.mean(divergences)), same_top_1=float(np.mean(same)),
                cross_entropy=float(np.mean(losses)), mib=num_bytes(other) / 2**20,
                of_16_bits=num_bytes(other) / num_bytes(model), status="ok",
            )  # fmt: skip
    columns = ("model", "quantization", "tokens", "kl_nats", "same_top_1", "cross_entropy", "mib", "of_16_bits")
    report.publish("Loss of quantized weights", table(report.rows, columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes tests/fixtures/architectures.npz, logits and greedy tokens of transformers in float32 for every architecture,
and architectures.json, the config.json of each as transformers 5 writes it. With names of cases, only these are made.

Transformers reads the same checkpoints as jpaged: config.json and safetensors by their names on the hub. Needs torch:

    python3.11 -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch==2.13.0 transformers numpy
    /tmp/oracle/bin/python tests/oracle/make_architecture_fixtures.py [CASE ...]
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "fixtures" / "architectures.npz"
CONFIGS = FIXTURE.with_suffix(".json")
MIN_MARGIN = 5e-4  # between the best two tokens: greedy tokens then do not depend on rounding


def write(directory: Path, config: dict, tensor) -> None:
    """A checkpoint with the tensors that transformers writes for such a model."""
    import torch
    from safetensors import safe_open
    from safetensors.numpy import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    (directory / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    model.save_pretrained(directory / "names")
    with safe_open(directory / "names" / "model.safetensors", "numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    tensors = {name: tensor(name, shape, config) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def run(config: dict, tensor, prompt: list[int], new_tokens: int, rows: list[int]) -> dict[str, np.ndarray]:
    """Greedy tokens after the prompt, and logits [R, V] of some positions in one pass over all of them."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), config, tensor)
        options = dict(dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    tokens, margins = list(prompt), []
    with torch.no_grad():
        for _ in range(new_tokens):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
            best = logits[-1].topk(2).values
            margins.append(float(best[0] - best[1]))
            tokens.append(int(logits[-1].argmax()))
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    assert min(margins) > MIN_MARGIN, f"greedy tokens are nearly tied: {min(margins)}"
    return {"logits": logits[rows], "tokens": np.asarray(tokens, np.int32)}


def rewritten(config: dict) -> dict:
    """The content of config.json after transformers has read and written it."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        AutoConfig.from_pretrained(folder).save_pretrained(folder)
        return json.loads((Path(folder) / "config.json").read_text())


def main() -> None:
    sys.path.insert(0, str(ROOT / "support"))
    from architectures import CASES, NEW_TOKENS, ROWS, prompt, tensor

    names = sys.argv[1:]
    arrays = dict(np.load(FIXTURE)) if names else {}
    configs = json.loads(CONFIGS.read_text()) if names else {}
    for name in names or CASES:
        result = run(CASES[name], tensor, prompt(), NEW_TOKENS, ROWS)
        arrays |= {f"{name}/{key}": value for key, value in result.items()}
        configs[name] = rewritten(CASES[name])
        distinct = len(set(result["tokens"][-NEW_TOKENS:].tolist()))
        print(name, "std", result["logits"].std().round(3), "distinct tokens", distinct, flush=True)
    np.savez_compressed(FIXTURE, **arrays)
    CONFIGS.write_text(json.dumps(configs, indent=1, sort_keys=True) + "\n")
    print(FIXTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()

"""Writes tests/fixtures/llama.npz: logits and greedy tokens of transformers' LlamaForCausalLM in float32.

Needs torch, which the project itself never does:

    python3.11 -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch==2.13.0 transformers numpy
    /tmp/oracle/bin/python tests/oracle/make_fixtures.py
"""

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "fixtures" / "llama.npz"


def run(config: dict, parameters: dict[str, np.ndarray], prompt: list[int], new_tokens: int) -> dict[str, np.ndarray]:
    """Logits [T, V] of the prompt, and the greedy tokens after it with the logits they were taken from."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")).to(torch.float32).eval()
    state = {name: torch.from_numpy(array) for name, array in parameters.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(new_tokens):
            logits = model(torch.tensor([tokens])).logits[0]
            tokens.append(int(logits[-1].argmax()))
        logits = model(torch.tensor([tokens])).logits[0].numpy()
    return {"logits": logits, "tokens": np.asarray(tokens, np.int32)}


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from checkpoints import CASES, NEW_TOKENS, prompt, tensors

    arrays = {}
    for name, config in CASES.items():
        result = run(config, tensors(config), prompt(config), NEW_TOKENS)
        arrays |= {f"{name}/{key}": value for key, value in result.items()}
        print(name, result["logits"].shape, "std", result["logits"].std().round(3))
    FIXTURE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FIXTURE, **arrays)
    print(FIXTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()

"""Writes tests/fixtures/beam.json: hypotheses and scores of transformers' beam search on random Llamas in float32.

Needs torch, which the project itself never does:

    python3.11 -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch==2.13.0 transformers numpy
    /tmp/oracle/bin/python tests/oracle/make_beam_fixtures.py
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "fixtures" / "beam.json"
MODELS, SEEDS = ("llama2", "gqa-tied", "biases"), 3
SHARPNESS = 3.0
NOISE, MARGIN = 1e-5, 1e-4


def sharpen(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with larger logits: those of unit scale make almost flat distributions."""
    head = "lm_head.weight" if "lm_head.weight" in parameters else "model.embed_tokens.weight"
    return parameters | {head: parameters[head] * np.float32(SHARPNESS)}


def run(config: dict, parameters: dict[str, np.ndarray], prompt: list[int], options: dict) -> list:
    """[score, tokens] of every hypothesis, best first; `options` are those of transformers' `generate`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")).to(torch.float32).eval()
    state = {name: torch.from_numpy(array) for name, array in parameters.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    inputs = torch.tensor([prompt])
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, num_return_sequences=options["num_beams"],
        pad_token_id=0, output_scores=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    hypotheses = []
    for score, tokens in zip(out.sequences_scores.tolist(), out.sequences[:, len(prompt) :].tolist()):
        ends = [i + 1 for i, token in enumerate(tokens) if token in options.get("eos_token_id", ())]
        hypotheses.append([round(score, 6), tokens[: ends[0]] if ends else tokens])
    return hypotheses


def is_sturdy(config: dict, parameters: dict[str, np.ndarray], prompt: list[int], options: dict, result: list) -> bool:
    """Whether no choice on the way was so close that another implementation's rounding could turn it."""
    scores = [score for score, _ in result]
    if any(a - b < MARGIN for a, b in itertools.pairwise(scores)):
        return False
    for seed in range(3):
        rng = np.random.default_rng(seed)
        noisy = {k: (v * (1 + NOISE * rng.standard_normal(v.shape))).astype(v.dtype) for k, v in parameters.items()}
        if [tokens for _, tokens in run(config, noisy, prompt, options)] != [tokens for _, tokens in result]:
            return False
    return True


def draw(
    rng: np.random.Generator, config: dict, parameters: dict[str, np.ndarray], options: dict, processed: bool
) -> tuple[list[int], dict]:
    """A prompt, and options that matter to it: tokens that end it or are banned are ones that it would generate."""
    prompt = rng.integers(0, config["vocab_size"], rng.integers(5, 41)).tolist()
    options = options | {"max_new_tokens": int(rng.integers(4, 25))}
    hypotheses = run(config, parameters, prompt, options)
    counts = Counter(token for _, tokens in hypotheses for token in tokens)
    frequent = rng.permutation([token for token, _ in counts.most_common(9)]).tolist()
    num_ends = rng.choice([0, 1, 1, 1, 2, 3, 4])
    ends, others = frequent[:num_ends], frequent[num_ends:]
    if ends:
        options |= {"eos_token_id": ends}
    if processed:
        choices = {
            "min_new_tokens": int(rng.integers(2, 5)),
            "repetition_penalty": float(rng.choice([0.8, 1.2, 1.7])),
            "bad_words_ids": [[token] for token in others[:2]],
            "suppress_tokens": others[2:3],
        }
        some = rng.permutation([name for name, value in choices.items() if value])[: rng.integers(1, 4)]
        options |= {name: choices[name] for name in some.tolist()}
    return prompt, options


def cases(rng: np.random.Generator) -> Iterator[dict]:
    """{"model", "seed", "prompt", "options", "hypotheses"} one by one."""
    sys.path.insert(0, str(ROOT))
    from checkpoints import CASES, tensors

    penalties, stopping = (0.0, 0.5, 1.0, 2.0, -0.5), (True, False, "never")
    plan = [*itertools.product((2, 4, 8, 16), penalties, stopping, (False,))]
    plan += itertools.product((2, 4, 8), penalties, stopping, (True,))
    for width, penalty, early, processed in plan:
        name, seed = str(rng.choice(MODELS)), int(rng.integers(SEEDS))
        config, parameters = CASES[name], sharpen(tensors(CASES[name], seed))
        options = {"num_beams": width, "length_penalty": penalty, "early_stopping": early}
        while True:
            prompt, drawn = draw(rng, config, parameters, options, processed)
            result = run(config, parameters, prompt, drawn)
            if is_sturdy(config, parameters, prompt, drawn, result):
                break
        yield {"model": name, "seed": seed, "prompt": prompt, "options": drawn, "hypotheses": result}


def main() -> None:
    lines = [json.dumps(case, separators=(",", ":")) for case in cases(np.random.default_rng(0))]
    FIXTURE.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(len(lines), "cases,", FIXTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()

"""Transformers as a peer of `rollouts.py`, in a Python with torch: one line of JSON in, one out, until the input ends.

python benchmarks/engine/rollouts_peer.py MODEL

A line of input is {"way": "generate" or "continuous", "prompts": [[token ids]], "n": samples, "tokens": of an output}.
"""

import json
import sys
import time

import torch
import transformers


def generate(model, prompts: list[list[int]], n: int, tokens: int) -> int:
    """Return the number of generated tokens. All prompts have one length."""
    inputs = torch.tensor(prompts)
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=True, temperature=1.0, top_k=0,
        num_return_sequences=n, min_new_tokens=tokens, max_new_tokens=tokens,
    )  # fmt: skip
    return output.shape[0] * (output.shape[1] - inputs.shape[1])


def continuous(model, prompts: list[list[int]], n: int, tokens: int) -> int:
    """Return the number of generated tokens, by continuous batching on paged attention."""
    config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, num_return_sequences=n, max_new_tokens=tokens, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    outputs = model.generate_batch(prompts, generation_config=config, warmup=False)
    return sum(len(output.generated_tokens) for output in outputs.values())


def main(path: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        run = generate if task["way"] == "generate" else continuous
        start = time.perf_counter()
        with torch.inference_mode():
            count = run(model, task["prompts"], task["n"], task["tokens"])
        print(json.dumps({"seconds": time.perf_counter() - start, "count": count}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

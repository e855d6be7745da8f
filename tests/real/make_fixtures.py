"""Answers of transformers in float32, which the tests of real models compare with; writes tests/real/fixtures.

    python3.11 -m venv fixtures && fixtures/bin/pip install torch==2.13.0 transformers accelerate gguf tokenizers
    fixtures/bin/python tests/real/make_fixtures.py [--llama-server PATH]

transformers reads the same GGUF files, whose weights it dequantizes. With --llama-server, the ids of the texts are also
compared with those of llama.cpp.
"""

import argparse
import importlib.metadata
import json
import math
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real.cases import CHATS, FIXTURES, LONG, MAX_TOKENS, NUM_SCORED, NUM_WINDOWS, PROMPTS, TEXTS, WINDOW, text
from tests.real.packages import GEMMA3, SMOLLM2, Package

PORT = 18_765


def load(package: Package) -> tuple[Any, Any]:
    """Return the tokenizer and the model of a file."""
    file = package.file
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if package is SMOLLM2:
        # transformers ignores `tokenizer.ggml.pre`. SmolLM2's own tokenizer.json splits digits before words.
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return tokenizer, model.eval()


@torch.inference_mode()
def logprobs(model: Any, ids: list[int], keep: int) -> torch.Tensor:
    """Return the logprobs [keep, V] after each of the last tokens."""
    logits = model(torch.tensor([ids]), logits_to_keep=keep).logits[0]
    return torch.log_softmax(logits, -1)


@torch.inference_mode()
def greedy(model: Any, ids: list[int]) -> dict[str, Any]:
    """Return the greedy tokens after a prompt: each with its logprob, and how far the next likely one is behind."""
    prompt = torch.tensor([ids])
    # Without a mask, tokens that are equal to the padding token are not attended to.
    mask = torch.ones_like(prompt)
    whole = model.generate(prompt, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=-1)
    tokens = whole[0, len(ids) :].tolist()
    best, order = logprobs(model, ids + tokens[:-1], len(tokens)).topk(2)
    assert order[:, 0].tolist() == tokens, "the tokens are not the most likely ones of the whole text"
    return {
        "ids": ids, "tokens": tokens, "seconds": order[:, 1].tolist(),
        "logprobs": [round(value, 5) for value in best[:, 0].tolist()],
        "margins": [round(value, 5) for value in (best[:, 0] - best[:, 1]).tolist()],
    }  # fmt: skip


def windows(tokenizer: Any, ids: list[int]) -> list[list[int]]:
    """Return the windows of a text. If texts begin with a token of their own, so does each window."""
    cut = [ids[at : at + WINDOW] for at in range(0, NUM_WINDOWS * WINDOW, WINDOW)]
    bos = tokenizer("").input_ids
    return [[*bos, *each[len(bos) :]] for each in cut]


def loss(model: Any, ids: list[int]) -> float:
    """Return the mean of the negative logprobs of the second half of a window, without the half's first token."""
    half = len(ids) // 2
    scored = torch.tensor(ids[half + 1 :])
    return -logprobs(model, ids[:-1], len(scored)).gather(1, scored[:, None]).mean().item()


def make(package: Package) -> dict[str, Any]:
    tokenizer, model = load(package)
    encode = lambda value: tokenizer(value).input_ids
    rendered = []
    if tokenizer.chat_template:
        rendered = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in CHATS]
    prompts = [encode(prompt) for prompt in PROMPTS]
    prompts += [tokenizer(chat, add_special_tokens=False).input_ids for chat in rendered[: len(PROMPTS)]]
    ids = encode(text())
    losses = [loss(model, window) for window in windows(tokenizer, ids)]
    made = {
        "sha256": package.sha256,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf")},
        "texts": [encode(each) for each in TEXTS],
        "chats": rendered,
        "greedy": [greedy(model, prompt) for prompt in prompts],
        "windows": windows(tokenizer, ids),
        "losses": [round(each, 6) for each in losses],
        "perplexity": math.exp(sum(losses) / len(losses)),
    }
    if model.config.max_position_embeddings == LONG:
        made["long"] = long_context(model, ids)
    return made


def long_context(model: Any, ids: list[int]) -> dict[str, Any]:
    """Return the logprobs of the last tokens of a context that repeats its first half."""
    half = ids[: LONG // 2]
    scored = torch.tensor(half[-NUM_SCORED:])
    found = logprobs(model, (half + half)[:-1], NUM_SCORED).gather(1, scored[:, None])[:, 0]
    return {"ids": half, "logprobs": [round(value, 5) for value in found.tolist()]}


def ids_of_llama(program: str, file: Path) -> list[list[int]]:
    """Return the ids of the texts in llama.cpp."""
    url = f"http://127.0.0.1:{PORT}"
    server = subprocess.Popen(
        [program, "-m", str(file), "--port", str(PORT), "-c", "64"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.1)
        found = []
        for each in TEXTS:
            body = json.dumps({"content": each, "add_special": True, "parse_special": False}).encode()
            request = urllib.request.Request(f"{url}/tokenize", body, {"Content-Type": "application/json"})
            found.append(json.load(urllib.request.urlopen(request, timeout=30))["tokens"])
        return found
    finally:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", metavar="PATH", help="compares the ids of the texts with those of llama.cpp")
    args = parser.parse_args()
    for name, package in {"smollm2": SMOLLM2, "gemma3": GEMMA3}.items():
        made = make(package)
        margin = min(margin for each in made["greedy"] for margin in each["margins"])
        print(f"{name}: perplexity {made['perplexity']:.4f}, smallest margin {margin:.5f}", flush=True)
        if args.llama_server:
            for each, ours, theirs in zip(TEXTS, made["texts"], ids_of_llama(args.llama_server, package.file)):
                if ours != theirs:
                    print(f"{name}: {each!r} is {ours} in transformers and {theirs} in llama.cpp")
        (FIXTURES / f"{name}.json").write_text(json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

"""The demo model end to end: greedy tokens on the device are those of the CPU, except where two are as likely."""

import json
import urllib.request
from typing import Any

from benchmarks.shared.device import prepare_environment
from benchmarks.shared.results import Row
from benchmarks.suite.worker import Send

PROMPTS = ("Once upon a time", "The little dog was happy because", "One day a girl found a box.")
TOKENS = 24
NEAR_TIE = 0.1  # difference of two logprobs that rounding to bfloat16 can turn around
ENGINE = dict(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128, block_size=16, num_gpu_blocks_override=64)


def generate(options: dict[str, Any], send: Send) -> None:
    """Send each prompt's greedy tokens, how much likelier each was than the next one, and the text.

    Options: `kernels`, `dtype`.
    """
    prepare_environment()
    from jpaged.core.params import SamplingParams
    from jpaged.llm import LLM

    llm = LLM("demo", progress=False, kernels=options["kernels"], dtype=options["dtype"], swap_space=0, **ENGINE)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=2, ignore_eos=True)
    found = []
    for output in llm.generate(list(PROMPTS), params, use_tqdm=False):
        (out,) = output.outputs
        best = [sorted((each.logprob for each in top.values()), reverse=True) for top in out.logprobs or []]
        found.append({"tokens": out.token_ids, "margins": [x - y for x, y, *_ in best], "text": out.text})
    send("generated", {"kernels": llm.engine.runner.kernels.name, "outputs": found})


def serve(options: dict[str, Any], send: Send) -> None:
    """Send a server's answers to the same prompts. Options: as `generate`."""
    prepare_environment()
    from benchmarks.shared.server_process import ServerProcess

    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    flags += [f"--kernels={options['kernels']}", f"--dtype={options['dtype']}", "--swap-space=0"]
    found = []
    with ServerProcess("--model=demo", *flags, start_within=120) as server:
        for prompt in PROMPTS:
            body = dict(
                model="demo", prompt=prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True, return_token_ids=True
            )
            request = urllib.request.Request(
                f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as response:
                (choice,) = json.load(response)["choices"]
            found.append({"tokens": choice["token_ids"], "text": choice["text"]})
    send("generated", {"kernels": options["kernels"], "outputs": found})


def compare(expected: list[Row], found: list[Row]) -> Row:
    """Return the status of the device's outputs against the CPU's, which bring their margins."""
    equal, ties = 0, 0
    for ours, theirs in zip(found, expected, strict=True):
        pairs = zip(ours["tokens"], theirs["tokens"], strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        equal += len(ours["tokens"]) if first is None else first
        if first is not None and theirs["margins"][first] > NEAR_TIE:
            margin = theirs["margins"][first]
            reason = f"token {first} of {theirs['text']!r} differs, where the CPU's was likelier by {margin:.2g} nats"
            return dict(status="wrong", reason=reason, equal_tokens=equal)
        ties += first is not None
    return dict(status="ok", equal_tokens=equal, near_ties=ties)

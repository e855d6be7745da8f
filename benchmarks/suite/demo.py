"""The demo model end to end: greedy tokens on the device are those of the CPU, except where two are as likely."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.shared.device import Device
from benchmarks.shared.results import Row
from benchmarks.suite.worker import Send

PROMPTS = ("Once upon a time", "The little dog was happy because", "One day a girl found a box.")
TOKENS = 24
NEAR_TIE = 0.1  # difference of two logprobs that rounding to bfloat16 can turn around
ENGINE = dict(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128, block_size=16, num_gpu_blocks_override=64)


def generate(options: dict[str, Any], send: Send, device: Device) -> None:
    """Send each prompt's greedy tokens, and how much likelier each was than the next one. Options: kernels, dtype."""
    from jpaged import LLM, SamplingParams

    llm = LLM("demo", progress=False, kernels=options["kernels"], dtype=options["dtype"], swap_space=0, **ENGINE)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=2, ignore_eos=True)
    found = []
    for out in (output.outputs[0] for output in llm.generate(list(PROMPTS), params, use_tqdm=False)):
        best = [sorted((each.logprob for each in top.values()), reverse=True) for top in out.logprobs or []]
        found.append({"tokens": out.token_ids, "margins": [x - y for x, y, *_ in best], "text": out.text})
    _send(found, "on a CPU" if options.get("on_cpu") else "offline", llm.engine.runner.kernels.name, options, send)


def serve(options: dict[str, Any], send: Send, device: Device) -> None:
    """Send a server's answers to the same prompts. Options: kernels, dtype."""
    from benchmarks.shared.server_process import ServerProcess

    settings = ENGINE | dict(model="demo", kernels=options["kernels"], dtype=options["dtype"], swap_space=0)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    body = dict(model="demo", temperature=0, max_tokens=TOKENS, ignore_eos=True, return_token_ids=True)
    found = []
    with ServerProcess(*flags, start_within=180) as server:
        for prompt in PROMPTS:
            content, headers = json.dumps(body | dict(prompt=prompt)).encode(), {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{server.url}/v1/completions", content, headers)
            with urllib.request.urlopen(request, timeout=30) as response:
                found.append({"tokens": json.load(response)["choices"][0]["token_ids"]})
    _send(found, "over HTTP", options["kernels"], options, send)


def compare(expected: list[Row], found: list[Row]) -> Row:
    """Return the status of the device's outputs against the CPU's, which bring their margins."""
    equal, ties = 0, 0
    for ours, theirs in zip(found, expected, strict=True):
        pairs = zip(ours["tokens"], theirs["tokens"], strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        equal += len(ours["tokens"]) if first is None else first
        if first is not None and (margin := theirs["margins"][first]) > NEAR_TIE:
            reason = f"token {first} of {theirs['text']!r} differs, where the CPU's was likelier by {margin:.2g} nats"
            return dict(status="wrong", reason=reason, equal_tokens=equal)
        ties += first is not None
    return dict(status="ok", equal_tokens=equal, near_ties=ties)


def _send(found: list[Row], what: str, kernels: str, options: dict[str, Any], send: Send) -> None:
    """Send outputs with their comparison with the CPU's, which are among the rows so far."""
    rows = json.loads(Path(options["results"]).read_text())["rows"]
    cpu = [row["outputs"] for row in rows if row.get("what") == "on a CPU"] or [found] * (what == "on a CPU")
    end = compare(cpu[0], found) if cpu else dict(status="skipped", reason="the CPU's tokens are not known")
    send("row", dict(experiment="demo", what=what, kernels=kernels, outputs=found) | end)

"""Compares the outputs of mixed requests between two versions of the engine, to the bit.

    python benchmarks/engine/outputs.py --write before.json
    python benchmarks/engine/outputs.py --against before.json      exit 1 and the first difference, if there is one

The requests cover greedy and drawn tokens, filters, penalties, biases, logprobs of outputs and prompts, stop strings,
several branches, beam search and structured outputs, with shared prefixes, chunked prompts and preemption. The file
holds token ids, and logprobs as hexadecimal floats. Both runs need one machine and the same version of jax.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import prepare_environment

NUM_REQUESTS = 200
# Small limits: prompts run in chunks, requests wait for rows, and the pool is too small for all running sequences.
# The sizes of chunks and of the pool are set, because their defaults follow from measured times and free memory.
SETTINGS: dict[str, Any] = dict(
    max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64, num_gpu_blocks_override=28, block_size=16,
    preemption_mode="recompute",
)  # fmt: skip
TEXT = "the paged engine keeps blocks of keys and values in a pool and shares them between sequences"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}}
FEATURES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"logprobs": 5},
    {"temperature": 0.9, "logprobs": 3, "prompt_logprobs": 2},
    {"logit_bias": {7: 5.0, 11: -100.0}, "logprobs": 0},
    {"temperature": 0.9, "n": 3, "logprobs": 1},
    {"temperature": 0.9, "min_tokens": 8, "bad_words": ["the"]},
    {"stop": ["."], "logprobs": 1},
    {"allowed_token_ids": list(range(5, 200)), "temperature": 1.0},
]


def requests() -> Iterator[tuple[str, Any]]:
    """Yield prompts with their parameters; a third of the prompts begin alike."""
    from jpaged import BeamSearchParams, SamplingParams, StructuredOutputsParams

    draw, words = random.Random(40), TEXT.split()
    beginning = " ".join(draw.choices(words, k=24))
    for i in range(NUM_REQUESTS):
        prompt = " ".join([beginning] * (i % 3 == 0) + draw.choices(words, k=draw.randint(1, 40)))
        length = draw.randint(8, 80)
        if i % 20 == 7:
            yield prompt, BeamSearchParams(beam_width=draw.randint(2, 4), max_tokens=length)
            continue
        settings = dict(FEATURES[i % len(FEATURES)])
        if i % 20 == 13:
            settings = {"temperature": 0.8, "structured_outputs": StructuredOutputsParams(json=SCHEMA)}
        yield prompt, SamplingParams(max_tokens=length, seed=i, ignore_eos=i % 2 == 0, **settings)


def logprobs_of(lists: Any) -> Any:
    """Return lists of logprobs by token as plain values; the hexadecimal form keeps every bit."""
    return lists and [
        each and {str(token): [entry.logprob.hex(), entry.rank] for token, entry in each.items()} for each in lists
    ]


def outputs() -> list[Any]:
    """Generate for all requests at once, and return every token and logprob."""
    from jpaged import LLM

    prompts, params = zip(*requests())
    llm = LLM("demo", progress=False, **SETTINGS)
    results = llm.generate(prompts, params)
    print(f"{llm.engine.scheduler.num_preemptions} preemptions")
    return [
        {
            "prompt_logprobs": logprobs_of(result.prompt_logprobs),
            "outputs": [
                [list(each.token_ids), each.text, each.finish_reason, logprobs_of(each.logprobs)]
                for each in result.outputs
            ],
        }
        for result in results
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", type=Path, metavar="FILE", help="write the outputs to this file")
    group.add_argument("--against", type=Path, metavar="FILE", help="compare the outputs with those of this file")
    args = parser.parse_args()
    prepare_environment()
    computed = json.loads(json.dumps(outputs()))  # as a file holds them
    num_tokens = sum(len(tokens) for result in computed for tokens, *_ in result["outputs"])
    if args.write:
        args.write.write_text(json.dumps(computed))
        print(f"wrote {num_tokens} tokens of {len(computed)} requests")
        return 0
    before = json.loads(args.against.read_text())
    different = [i for i, (one, other) in enumerate(zip(before, computed, strict=True)) if one != other]
    if different:
        print(f"{len(different)} of {len(computed)} requests differ; request {different[0]} was")
        print(json.dumps(before[different[0]]), "and is", json.dumps(computed[different[0]]), sep="\n")
        return 1
    print(f"all {num_tokens} tokens of {len(computed)} requests and their logprobs are equal to the bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())

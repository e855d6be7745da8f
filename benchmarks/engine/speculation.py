"""Tokens per second with drafts and without, on the same requests, whose outputs are compared to the bit.

    python benchmarks/engine/speculation.py --model FILE.gguf --out results
    python benchmarks/engine/speculation.py --only edit --streams 1 --rounds 1     the demo model

Workloads: `edit` writes records of the prompt again, whose first one is changed, `json` fills a schema with long fixed
parts, `free` continues stories at a temperature, and `random` continues random tokens at a high temperature, so that no
draft is ever right.
Two engines take turns in each round; ratios are medians over the rounds.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, Row, script_parser, table

TOKENS, CONTEXT = 160, 2048
COLUMNS = (
    "workload", "streams", "plain_tokens_per_s", "drafts_tokens_per_s", "ratio", "low", "high", "drafts_per_token",
    "kept", "equal",
)  # fmt: skip
RECORDS = [
    {"id": number, "name": name, "city": city, "active": bool(number % 2), "tags": ["reader", "early bird"]}
    for number, (name, city) in enumerate([("Ada", "Riga"), ("Ben", "Lima"), ("Cleo", "Oslo"), ("Dan", "Rome")])
]
SCHEMA = {
    "type": "object",
    "properties": {
        "recommended_destination_city": {"type": "string", "maxLength": 12},
        "estimated_total_cost_in_euros": {"type": "integer", "minimum": 10, "maximum": 99},
        "suitable_for_small_children": {"type": "boolean"},
        "preferred_means_of_transport": {"enum": ["train", "ferry", "bicycle"]},
    },
    "required": [
        "recommended_destination_city", "estimated_total_cost_in_euros", "suitable_for_small_children",
        "preferred_means_of_transport",
    ],
    "additionalProperties": False,
}  # fmt: skip
STORIES = (
    "Once upon a time",
    "The little dog was happy because",
    "One day a girl found a box.",
    "It was a dark night.",
)


def requests_of(workload: str, seed: int, llm: Any) -> tuple[Any, Any]:
    """Return a prompt of a workload and its parameters."""
    from jpaged import SamplingParams, StructuredOutputsParams

    if workload == "edit":
        records = RECORDS[seed % 4 :] + RECORDS[: seed % 4]
        text, first = (json.dumps(each, indent=1) for each in (records, [records[0] | {"city": "Bern"}]))
        prompt = f"{text}\n\n{first[:-2]},"  # the beginning of the edited text
        return prompt, SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    if workload == "json":
        task = f"Plan a weekend trip number {seed}. Answer in JSON."
        wanted = StructuredOutputsParams(json=SCHEMA)
        return _chat(llm, task), SamplingParams(
            temperature=0.7, seed=seed, max_tokens=TOKENS, logprobs=0, structured_outputs=wanted
        )
    if workload == "free":
        prompt = f"{STORIES[seed % len(STORIES)]} "
        return prompt, SamplingParams(temperature=0.8, seed=seed, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    vocabulary = llm.engine.scheduler.vocab_size
    ids = np.random.default_rng(seed).integers(0, vocabulary, 100).tolist()
    return {"prompt_token_ids": ids}, SamplingParams(
        temperature=50.0, seed=seed, max_tokens=TOKENS, logprobs=0, ignore_eos=True
    )


def _chat(llm: Any, text: str) -> str:
    tokenizer = llm.get_tokenizer()
    if getattr(tokenizer, "chat_template", None) is None:
        return f"{text}\n\n"
    messages = [{"role": "user", "content": text}]
    prompt: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return prompt


def run(llm: Any, prompts: list[Any], params: list[Any]) -> tuple[float, list[Any]]:
    """Return the tokens per second of some requests, and their tokens and logprobs."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    found = [(o.token_ids, [next(iter(each.values())).logprob for each in o.logprobs]) for each in outputs
             for o in each.outputs]  # fmt: skip
    return sum(len(tokens) for tokens, _ in found) / seconds, found


def compare(engines: dict[str, Any], workload: str, streams: int, rounds: int, say: Callable[[str], None]) -> Row:
    """Return the row of a workload: the rates of both engines, in turn, after a round that is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    equal, before = True, engines["drafts"].engine.stats()
    num_tokens = 0
    for number in range(-1, rounds):
        made = [requests_of(workload, 100 * (number + 1) + i, engines["plain"]) for i in range(streams)]
        found = {}
        for name in list(engines)[:: 1 if number % 2 else -1]:
            rate, found[name] = run(engines[name], *map(list, zip(*made)))
            if number >= 0:
                rates[name].append(rate)
        equal &= found["plain"] == found["drafts"]
        num_tokens += sum(len(tokens) for tokens, _ in found["drafts"])
        say(f"{workload}, {streams} streams, round {number + 1}")
    after = engines["drafts"].engine.stats()
    drafts, kept = after.num_drafts - before.num_drafts, after.num_kept - before.num_kept
    ratios = [b / a for a, b in zip(rates["plain"], rates["drafts"])]
    return dict(
        workload=workload, streams=streams, plain_tokens_per_s=statistics.median(rates["plain"]),
        drafts_tokens_per_s=statistics.median(rates["drafts"]), ratio=statistics.median(ratios), low=min(ratios),
        high=max(ratios), drafts_per_token=drafts / num_tokens, kept=kept / drafts if drafts else None,
        equal="yes" if equal else "no",
    )  # fmt: skip


def main() -> int:
    parser = script_parser(__doc__, "speculation")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", nargs="+", choices=("edit", "json", "free", "random"))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--drafts", type=int, default=4, help="num_speculative_tokens (default 4)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    prepare_environment()
    report = Report(args.out / "results.json", environment(open_device(True), False))
    from jpaged import LLM

    settings = dict(model=args.model, dtype=args.dtype, max_model_len=CONTEXT, max_num_seqs=8, progress=False)
    config = {"method": "ngram", "num_speculative_tokens": args.drafts}
    engines = {
        "plain": LLM(**settings, warm_up=True),
        "drafts": LLM(**settings, warm_up=True, speculative_config=config),
    }
    for workload in args.only or ("edit", "json", "free", "random"):
        for streams in args.streams:
            report.add(model=Path(args.model).name, **compare(engines, workload, streams, args.rounds, report.say))
    report.publish("Drafts", table(report.rows, COLUMNS))
    return int(any(row["equal"] == "no" for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())

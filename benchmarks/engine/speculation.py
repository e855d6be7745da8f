"""Tokens per second with drafts and without, on the same requests, whose outputs are compared to the bit.

    python benchmarks/engine/speculation.py --model FILE.gguf --out results
    python benchmarks/engine/speculation.py --model llama --tokenizer NAME       a Llama of 110M parameters that copies
    python benchmarks/engine/speculation.py --model FILE.gguf --methods draft_model --draft-model OTHER.gguf
    python benchmarks/engine/speculation.py --only edit --streams 1 --rounds 1     the demo model

Workloads: `edit` writes records of the prompt again, whose first one is changed. `json` fills a schema with long fixed
parts. `agent` writes similar code for one document after another. `free` continues stories at a temperature. `random`
continues random tokens at a high temperature, so that no draft is ever right. A stream sends several requests, each
when the one before has ended. Prompts or, for stories, seeds differ from round to round.

Two engines without drafts and one for each method take turns in each round. An engine that is made later may be
slower, so that the rate without drafts is the mean of the first one and the last one; the ratio of the last one shows
the noise. Ratios are medians over the rounds.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.engine.cpu_serving import CONFIG
from benchmarks.shared.copying_llama import write_copying_llama
from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, Row, script_parser, table
from jpaged.config import DRAFT_METHODS, DRAFT_MODEL

MODEL_ITSELF = {"quantization": "int4"}
RANDOM_SEED = 10**6  # free text of a model that knows nothing has the tokens of random text with the same seed
TOKENS, CONTEXT, UNCOUNTED = 160, 2048, 2  # of an output, of an engine, and rounds
MAX_STREAMS, REQUESTS = 8, 3  # sequences of an engine, and requests of a stream
PLAIN, AGAIN = "plain", "plain again"  # engines without drafts, the first and the last one of all
COLUMNS = (
    "model", "workload", "streams", "method", "plain_tokens_per_s", "tokens_per_s", "ratio", "low", "high",
    "drafts_per_token", "kept", "equal",
)  # fmt: skip
WORKLOADS = ("edit", "json", "agent", "free", "random")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo", "Mia", "Ned", "Olga")
CITIES = ("Riga", "Lima", "Oslo", "Rome", "Bonn", "Cork", "Doha", "Graz", "Kiel", "Lyon", "Nara", "Pisa", "Turku")
JOBS = ("teacher", "baker", "nurse", "pilot", "farmer", "judge", "tailor", "painter")
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
QUESTION = "Write a Python class for such a person, with a constructor, a method that greets, and an example."


def records(seed: int) -> list[dict[str, Any]]:
    """Return four records that belong to a seed."""
    rng = random.Random(seed)
    people = zip(rng.sample(NAMES, 4), rng.sample(CITIES, 4))
    return [
        {
            "id": rng.randrange(1000),
            "name": name,
            "city": city,
            "active": rng.random() < 0.5,
            "tags": ["reader", "bird"],
        }
        for name, city in people
    ]


def document(seed: int) -> str:
    """Return a text about a person, of which only some words differ from seed to seed."""
    rng = random.Random(seed)
    name, city, job = rng.choice(NAMES), rng.choice(CITIES), rng.choice(JOBS)
    return f"{name} is {rng.randint(20, 70)} years old, lives in {city} and works as a {job}."


def requests_of(workload: str, seed: int, llm: Any) -> tuple[Any, Any]:
    """Return a prompt of a workload and its parameters."""
    from jpaged import SamplingParams, StructuredOutputsParams

    if workload == "edit":
        made = records(seed)
        text, first = (json.dumps(each, indent=1) for each in (made, [made[0] | {"city": "Bern"}]))
        prompt = f"{text}\n\n{first[:-2]},"  # the beginning of the edited text
        return prompt, SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    if workload == "json":
        task = f"Plan a weekend trip number {seed}. Answer in JSON."
        wanted = StructuredOutputsParams(json=SCHEMA)
        return _chat(llm, task), SamplingParams(
            temperature=0.7, seed=seed, max_tokens=TOKENS, logprobs=0, structured_outputs=wanted
        )
    if workload == "agent":
        return _chat(llm, f"{document(seed)} {QUESTION}"), SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0)
    if workload == "free":
        prompt = f"{STORIES[seed % len(STORIES)]} "
        return prompt, SamplingParams(temperature=0.8, seed=seed, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    vocabulary = llm.engine.scheduler.vocab_size
    ids = np.random.default_rng(seed).integers(0, vocabulary, 100).tolist()
    return {"prompt_token_ids": ids}, SamplingParams(
        temperature=50.0, seed=RANDOM_SEED + seed, max_tokens=TOKENS, logprobs=0, ignore_eos=True
    )


def _chat(llm: Any, text: str) -> str:
    tokenizer = llm.get_tokenizer()
    if getattr(tokenizer, "chat_template", None) is None:
        return f"{text}\n\n"
    messages = [{"role": "user", "content": text}]
    prompt: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return prompt


def run(llm: Any, prompts: list[Any], params: list[Any], streams: int) -> tuple[float, list[Any]]:
    """Return the tokens per second of the requests of some streams, and their tokens and logprobs.

    With as many streams as the engine has sequences, one starts when another ends. Fewer start together each time.
    """
    start, outputs = time.perf_counter(), []
    size = len(prompts) if streams == MAX_STREAMS else streams
    for first in range(0, len(prompts), size):
        part = slice(first, first + size)
        outputs += llm.generate(prompts[part], params[part], use_tqdm=False)
    seconds = time.perf_counter() - start
    found = [(o.token_ids, [next(iter(each.values())).logprob for each in o.logprobs]) for each in outputs
             for o in each.outputs]  # fmt: skip
    return sum(len(tokens) for tokens, _ in found) / seconds, found


def compare(engines: dict[str, Any], workload: str, streams: int, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Return a row of a workload for each method. All engines run in turn, after some rounds that are not counted."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    methods = [name for name in engines if name != PLAIN]
    equal, before = set(methods), {name: engines[name].engine.stats() for name in methods}
    num_tokens = 0
    for number in range(-UNCOUNTED, rounds):
        first = 100 * (number + UNCOUNTED) + 10_000 * streams  # no other round has these seeds
        made = [requests_of(workload, first + i, engines[PLAIN]) for i in range(streams * REQUESTS)]
        found = {}
        measured = {}
        for name in list(engines)[:: 1 if number % 2 else -1]:
            measured[name], found[name] = run(engines[name], *map(list, zip(*made)), streams)
        if number >= 0:
            for name, rate in measured.items():
                rates[name].append((rate + measured[AGAIN]) / 2 if name == PLAIN else rate)
        equal = {name for name in equal if found[name] == found[PLAIN]}
        num_tokens += sum(len(tokens) for tokens, _ in found[PLAIN])
        say(f"{workload}, {streams} streams, round {number}")
    rows = []
    for name in methods:
        after = engines[name].engine.stats()
        drafts, kept = after.num_drafts - before[name].num_drafts, after.num_kept - before[name].num_kept
        ratios = [b / a for a, b in zip(rates[PLAIN], rates[name])]
        rows.append(dict(
            workload=workload, streams=streams, method=name, plain_tokens_per_s=statistics.median(rates[PLAIN]),
            tokens_per_s=statistics.median(rates[name]), ratio=statistics.median(ratios), low=min(ratios),
            high=max(ratios), drafts_per_token=drafts / num_tokens, kept=kept / drafts if drafts else None,
            equal="yes" if name in equal else "no",
        ))  # fmt: skip
    return rows


def settings_of(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the settings of all engines. The files of a Llama that copies are written to a folder."""
    settings = dict(
        model=args.model, dtype=args.dtype, tokenizer=args.tokenizer, max_model_len=CONTEXT, max_num_seqs=MAX_STREAMS,
        progress=False, warm_up=True,
    )  # fmt: skip
    if args.model == "llama":
        write_copying_llama(folder, CONFIG | {"vocab_size": 49_152})
        settings["model"] = str(folder)
    return settings


def main() -> int:
    parser = script_parser(__doc__, "speculation")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokenizer", help="that of the model by default; llama needs one of at most 49,152 tokens")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS)
    parser.add_argument("--methods", nargs="+", choices=tuple(DRAFT_METHODS), default=["ngram", "suffix"])
    parser.add_argument("--draft-model", help="that of the method draft_model; without it the model itself in 4 bits")
    parser.add_argument("--streams", nargs="+", type=int, choices=range(1, MAX_STREAMS + 1), default=[1, MAX_STREAMS])
    parser.add_argument("--drafts", type=int, help="num_speculative_tokens (default: the method's)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    prepare_environment()
    report = Report(args.out / "results.json", environment(open_device(True), False))
    from jpaged import LLM

    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(args, Path(folder))
        engines = {PLAIN: LLM(**settings)}
        for method in args.methods:
            config = {"method": method, "num_speculative_tokens": args.drafts}
            if method == DRAFT_MODEL:
                config |= {"model": args.draft_model} if args.draft_model else MODEL_ITSELF | {"model": args.model}
            engines[method] = LLM(**settings, speculative_config=config)
        engines[AGAIN] = LLM(**settings)
        gc.collect()
        gc.freeze()  # as the server does
        for workload in args.only or WORKLOADS:
            for streams in args.streams:
                for row in compare(engines, workload, streams, args.rounds, report.say):
                    report.add(model=Path(args.model).name, **row)
    report.publish("Drafts", table(report.rows, COLUMNS))
    return int(any(row["equal"] == "no" for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())

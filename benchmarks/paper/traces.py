"""The workloads of the paper's evaluation, as traces.

    python benchmarks/paper/traces.py sharegpt --rate 2 --count 1000 --save trace.jsonl
    python benchmarks/paper/traces.py chatbot --rate 1 --count 1000 --save trace.jsonl
    python benchmarks/paper/traces.py file --file ShareGPT.json --tokenizer DIR --rate 2 --save trace.jsonl

Arrivals are a Poisson process. Lengths are log-normal with the paper's means (`jpaged.bench.workload`), and a request
has at most 2,048 tokens. The same arguments give the same trace. `jpaged.simulator.traffic.load_trace` reads it again.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jpaged.bench.tokens import load_tokenizer
from jpaged.bench.workload import DATASETS, Dataset, Lengths, arrivals, fit, read_jobs
from jpaged.simulator.traffic import Call, Segment, calls_of, save_trace

CONTEXT = 2048  # of OPT, in tokens
SHOTS = {1: 80, 5: 341}  # tokens of the paper's prefixes for translation, by the number of examples in them
# Sentences of WMT16, English to German: the paper does not give their lengths. 30 tokens are about 25 words.
SENTENCES = Dataset(30, 35, spread=0.6)
HISTORY = 1024  # tokens of a chatbot's prompt at most, and of its answer
MAX_ROUNDS = 10


def dataset(name: str, count: int, rate: float, *, seed: int = 0, scale: float = 1.0, width: int = 1,
            beam: bool = False) -> list[Call]:  # fmt: skip
    """Requests with the lengths of ShareGPT or Alpaca.

    Args:
        scale: of all lengths and of the longest request.
        width: outputs of each request, or beams.
    """
    means, longest = DATASETS[name], round(scale * CONTEXT)
    lengths = means._replace(prompt=scale * means.prompt, output=scale * means.output).lengths(
        count, most=(3 * longest // 4, 3 * longest // 4), seed=seed
    )
    return _calls(lengths, rate, longest, seed, width, beam)


def few_shot(shots: int, count: int, rate: float, *, seed: int = 0, scale: float = 1.0) -> list[Call]:
    """Translations of sentences after one prefix, which all requests share."""
    means = SENTENCES._replace(prompt=scale * SENTENCES.prompt, output=scale * SENTENCES.output)
    drawn = means.lengths(count, seed=seed)
    prefix = round(scale * SHOTS[shots])
    lengths = [Lengths(prompt, output, 0, prefix) for prompt, output in drawn]
    return calls_of(lengths, arrivals(count, rate, seed=seed))


def chatbot(count: int, rate: float, *, seed: int = 0, scale: float = 1.0) -> list[Call]:
    """Rounds of conversations: the prompt is the last 1,024 tokens of the history and the new question.

    A conversation has one to ten rounds with ShareGPT's lengths. As in the paper, rounds of all conversations arrive at
    random, and no KV is kept for the next round unless the policy has a prefix cache.
    """
    rng, due = random.Random(seed), arrivals(count, rate, seed=seed)
    most, means = round(scale * HISTORY), DATASETS["ShareGPT"]
    means = means._replace(prompt=scale * means.prompt, output=scale * means.output)
    pairs = iter(means.lengths(count, most=(most, most), seed=seed))
    calls: list[Call] = []
    text = 1
    while len(calls) < count:
        history: tuple[Segment, ...] = ()
        for _ in range(rng.randint(1, MAX_ROUNDS)):
            pair = next(pairs, None)
            if pair is None:
                break
            question, answer = (text, pair[0]), (text + 1, pair[1])
            text += 2
            prompt = (*history, question)
            if sum(tokens for _, tokens in prompt) > most:
                prompt = ((text, most),)  # cut at its beginning, it has no prefix in common with an earlier one
                text += 1
            calls.append(Call(0.0, prompt, pair[1], answer[0]))
            history = (*history, question, answer)
    rng.shuffle(calls)
    return [call._replace(arrival=at) for call, at in zip(calls, due)]


def of_file(path: Path, tokenizer: str, rate: float, *, seed: int = 0) -> list[Call]:
    """The first question and answer of each conversation in ShareGPT's JSON, counted by a tokenizer."""
    encode = load_tokenizer(tokenizer).encode
    lengths = [
        (len(encode(str(job.content)).ids), job.max_tokens or len(encode(job.answer or "").ids) or 1)
        for job in read_jobs(path)
    ]
    return _calls(lengths, rate, CONTEXT, seed, 1, False)


def _calls(
    lengths: Sequence[tuple[int, int]], rate: float, longest: int, seed: int, width: int, beam: bool
) -> list[Call]:
    fitted, _ = fit([Lengths(*pair) for pair in lengths], longest)
    return calls_of(fitted, arrivals(len(fitted), rate, seed=seed), width=width, beam=beam)


WORKLOADS: dict[str, Callable[..., list[Call]]] = {
    "sharegpt": lambda *args, **options: dataset("ShareGPT", *args, **options),
    "alpaca": lambda *args, **options: dataset("Alpaca", *args, **options),
    **{f"alpaca, {kind} {width}": (
        lambda *args, kind=kind, width=width, **options: dataset(
            "Alpaca", *args, width=width, beam=kind == "beam", **options)
    ) for kind in ("parallel", "beam") for width in (2, 4, 6)},
    **{f"{shots}-shot": (lambda *args, shots=shots, **options: few_shot(shots, *args, **options)) for shots in SHOTS},
    "chatbot": chatbot,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=[*WORKLOADS, "file"])
    parser.add_argument("--rate", type=float, required=True, help="requests per second")
    parser.add_argument("--count", type=int, default=1000, help="requests (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path, help="ShareGPT's JSON, for the workload file")
    parser.add_argument("--tokenizer", default="demo", help="directory or hub id, for the workload file")
    parser.add_argument("--save", type=Path, required=True, help="file of the trace, in JSON lines")
    args = parser.parse_args(argv)
    if (args.workload == "file") != (args.file is not None):
        parser.error("--file: the workload file needs one, and no other workload has one")
    if args.workload == "file":
        calls = of_file(args.file, args.tokenizer, args.rate, seed=args.seed)[: args.count]
    else:
        calls = WORKLOADS[args.workload](args.count, args.rate, seed=args.seed)
    save_trace(calls, args.save)
    prompt = sum(call.num_prompt_tokens for call in calls) / len(calls)
    output = sum(call.output for call in calls) / len(calls)
    print(f"{len(calls)} requests, {prompt:.0f} tokens in and {output:.0f} out on average: {args.save}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

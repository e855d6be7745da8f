"""Perplexity of a text under models, beside that of llama.cpp.

    python benchmarks/engine/perplexity.py --model DIR FILE.gguf --out results
    python benchmarks/engine/perplexity.py --model FILE.gguf --llama-perplexity PATH --max-windows 16

Perplexity is counted as in `llama-perplexity`: the text is cut into windows of N tokens, and the second half of each is
scored, without its first token. So each scored token stands behind at least N / 2 others. If the tokenizer begins texts
with a token, that token replaces the first one of each window. The logprobs are those of `LLM.score`. With
--llama-perplexity, the same text goes to llama.cpp with each model that is a GGUF file. Strings of special tokens are
removed from the text, because the two programs read them differently.
"""

import argparse
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, Row, script_parser, table
from jpaged.llm import LLM
from jpaged.tokenizer import backend

ROOT = Path(__file__).parents[2]
SETTINGS = ("dtype", "quantization", "activation_dtype", "kv_cache_dtype")  # of the engine


def read(files: Sequence[Path], special: Sequence[str]) -> str:
    """Return the texts of some files, one after the other, without the strings of special tokens."""
    text = "\n".join(file.read_text() for file in files)
    return re.sub("|".join(map(re.escape, special)), "", text) if special else text


def windows(ids: list[int], bos: list[int], size: int, most: int | None) -> list[list[int]]:
    """Return the whole windows of a text, at most as many as wanted.

    Args:
        bos: tokens with which every text begins; they replace the first ones of each window.
    """
    count = len(ids) // size
    return [[*bos, *ids[at + len(bos) : at + size]] for at in range(0, size * min(count, most or count), size)]


def perplexity(llm: LLM, cut: list[list[int]]) -> float:
    """Return the perplexity of the second halves of windows."""
    half = len(cut[0]) // 2 + 1
    scored = llm.score([window[:half] for window in cut], [window[half:] for window in cut])
    return math.exp(-sum(map(sum, scored)) / sum(map(len, scored)))


def of_llama(program: Path, model: Path, text: str, size: int, count: int, threads: int) -> float:
    """Return the perplexity in llama.cpp.

    Raises:
        RuntimeError: llama.cpp fails, or cuts the text into fewer windows.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        command = [program, "-m", model, "-f", file.name, "-c", size, "--chunks", count, "-t", threads]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    log = done.stdout + done.stderr
    found, cut = re.search(r"Final estimate: PPL = ([\d.]+)", log), re.search(r"perplexity over (\d+) chunks", log)
    if found is None or cut is None or int(cut[1]) != count:
        raise RuntimeError(f"llama.cpp gives no perplexity of {count} windows: {log[-2000:]}")
    return float(found[1])


def engine(model: Path, args: argparse.Namespace) -> LLM:
    """Return an engine that scores a few windows at a time."""
    return LLM(
        str(model), max_model_len=args.window + 1, max_num_seqs=8, max_num_batched_tokens=args.window,
        enable_prefix_caching=False, **chosen(args),
    )  # fmt: skip


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's settings that the command line names."""
    values = {name: getattr(args, name) for name in SETTINGS}
    return {name: value for name, value in values.items() if value is not None}


def run(report: Report, model: Path, args: argparse.Namespace) -> None:
    llm = engine(model, args)
    tokenizer = backend(llm.tokenizer)
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    text = read(args.text, special)
    cut = windows(tokenizer.encode(text).ids, tokenizer.encode("").ids, args.window, args.max_windows)
    if not cut:
        raise SystemExit(f"text: it is shorter than a window of {args.window} tokens")
    start = time.monotonic()
    ours = perplexity(llm, cut)
    row = {"model": model.name, "windows": len(cut), "jpaged": ours, "seconds": time.monotonic() - start}
    if args.llama_perplexity and model.suffix == ".gguf":
        start = time.monotonic()
        theirs = of_llama(args.llama_perplexity, model, text, args.window, len(cut), args.threads)
        row |= {"llama.cpp": theirs, "jpaged / llama.cpp": ours / theirs, "llama_seconds": time.monotonic() - start}
    report.add(experiment="perplexity", **row)


def exact(row: Row) -> Row:
    """Return a row with four decimals, where a table has three digits."""
    return row | {name: f"{row[name]:.4f}" for name in ("jpaged", "llama.cpp", "jpaged / llama.cpp") if name in row}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "perplexity")
    parser.add_argument("--model", type=Path, nargs="+", required=True, metavar="PATH", help="directories, GGUF files")
    parser.add_argument("--text", type=Path, nargs="+", default=sorted(ROOT.glob("docs/*.md")), metavar="FILE",
        help="by default this repository's documentation")  # fmt: skip
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens of a window")
    parser.add_argument("--max-windows", type=int, metavar="N", help="from the beginning of the text; default: all")
    parser.add_argument("--llama-perplexity", type=Path, metavar="PATH", help="the program")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of llama.cpp")
    for name in SETTINGS:
        parser.add_argument(f"--{name.replace('_', '-')}", help="as the engine's option")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    for model in args.model:
        run(report, model, args)
    settings = ", ".join(f"{name} {value}" for name, value in chosen(args).items() if value != "auto")
    report.publish(
        "Perplexity",
        f"Windows of {args.window} tokens of {', '.join(file.name for file in args.text)}, the second half of each "
        f"scored. Settings of the engine: {settings or 'the defaults'}.",
        table(map(exact, report.rows), ("model", "windows", "jpaged", "llama.cpp", "jpaged / llama.cpp", "seconds")),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

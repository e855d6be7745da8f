"""Loads hostile checkpoints: the demo model with one file changed, and the demo model in GGUF. A load must succeed, or
end in a ValueError that names the file or its directory, in bounded time and memory.

    python tests/attack/fuzz_checkpoints.py --out results         1,000 checkpoints, some minutes
    python tests/attack/fuzz_checkpoints.py --checkpoints 100 --seed 7
"""

import argparse
import json
import random
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Kind
from tqdm import tqdm

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, Row, script_parser, table
from jpaged.child import ChildFailed, Children
from jpaged.demo import DIRECTORY
from tests.attack.fuzz_fields import FLOATS, INTEGERS, anything
from tests.support import gguf_models

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG, WEIGHTS, INDEX = "tokenizer_config.json", "model.safetensors", "model.safetensors.index.json"
GGUF = "model.gguf"
FILES = (CONFIG, CONFIG, CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS, WEIGHTS, INDEX, GGUF, GGUF)
TIMEOUT_S = 120.0
MAX_MIB = 256.0  # beyond the start of a load; the demo model has 3
KEPT = 20

Change = Callable[[bytes, random.Random], bytes]


def _set(**values: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | values).encode()


def _header(data: bytes, **tensors: Any) -> bytes:
    """Safetensors with another header."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.dumps(json.loads(data[8 : 8 + length]) | tensors).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def _field(name: str, kind: int, form: str, *values: Any) -> Callable[[bytes], bytes]:
    """GGUF with one more field, before the others; the same name is there twice, unless the file has none."""

    def change(data: bytes) -> bytes:
        (count,) = struct.unpack_from("<Q", data, 16)
        key = name.encode()
        added = struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + struct.pack(form, *values)
        start = data.find(key)
        if start > 0:  # replace the old key by another one
            data = data[:start] + b"x" * len(key) + data[start + len(key) :]
        return data[:16] + struct.pack("<Q", count + 1) + added + data[24:]

    return change


def _number(at: int, value: int, form: str = "<Q") -> Callable[[bytes], bytes]:
    """GGUF with another number at a place."""
    return lambda data: data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


NORM = "model.norm.weight"
PADDING = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
           "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
# Crafted by hand: numbers that memory or time may be proportional to, and values of unexpected types.
CRAFTED: list[tuple[str, Callable[[bytes], bytes]]] = [
    *((CONFIG, _set(**{name: value}))
      for name in ("num_hidden_layers", "vocab_size", "hidden_size", "head_dim", "num_attention_heads",
                   "num_key_value_heads", "intermediate_size", "max_position_embeddings")
      for value in (10**9, 2**63, 10**400, 0, -1, "8", 8.0, 8.5, True, [], {}, None)),
    *((CONFIG, _set(**{name: value})) for name in ("rms_norm_eps", "rope_theta")
      for value in (float("nan"), float("inf"), -1, 0, "1e-5", None, [], 10**400)),
    *((CONFIG, _set(**{name: value})) for name in ("hidden_act", "architectures", "model_type", "dtype",
                                                   "tie_word_embeddings", "eos_token_id", "quantization_config")
      for value in (0, "", "no", [], {}, [[]], [{}], None, "x" * 10**6)),
    *((CONFIG, _set(rope_scaling=value)) for value in (
        0, "yarn", [], [["a", "b"]], {"type": []}, {"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 0},
        {"rope_type": "yarn", "factor": "4"}, {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0, "beta_slow": 0},
        {"rope_type": "linear", "factor": float("nan")}, {"rope_type": "linear", "factor": 0},
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1},
        {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": -5})),
    *((GENERATION, _set(**{name: value}))
      for name in ("eos_token_id", "temperature", "top_k", "top_p", "repetition_penalty")
      for value in ("no", [], [[]], {}, -5, 10**400, float("nan"), True)),
    *((WEIGHTS, lambda data, n=n: struct.pack("<Q", n) + data[8:])
      for n in (0, 1, 10**6, 10**8, 2**40, 2**63, 2**64 - 1)),
    *((WEIGHTS, lambda data, value=value: _header(data, **{NORM: value})) for value in (
        {}, None, [], {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**64 - 1]},
        {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F8_E4M3", "shape": [64], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]})),
    *((WEIGHTS, lambda data, kind=kind: data.replace(b'"dtype":"F32"', b'"dtype":"%b"' % kind))
      for kind in (b"I32", b"U32", b"X32")),
    *((WEIGHTS, lambda data, kind=kind: data.replace(b'"dtype":"BF16"', b'"dtype":"%b"' % kind))
      for kind in (b"I16", b"U16", b"F16")),
    *((INDEX, lambda _, value=value: json.dumps(value).encode()) for value in (
        {}, [], {"weight_map": []}, {"weight_map": {"a": 5}}, {"weight_map": {"a": None}}, {"weight_map": {"a": "."}},
        {"weight_map": {"a": "../../../../etc/passwd"}}, {"weight_map": {"a": "/dev/zero"}},
        {"weight_map": {"a": "\0"}}, {"weight_map": {"a": "x" * 10**5}},
        {"weight_map": {"a": WEIGHTS, "b": CONFIG}})),
    *((TOKENIZER, _set(**{name: value})) for name, value in (
        ("padding", PADDING),
        ("truncation", {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "a" * 10**6}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAAAAAA"}),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "((((a{1,99}){1,99}){1,99}){1,99})"},
                           "behavior": "Isolated", "invert": False}),
        ("added_tokens", [{"id": 2**32 - 1, "content": "x", "single_word": False, "lstrip": False, "rstrip": False,
                           "normalized": False, "special": True}]),
        ("post_processor", {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}),
        ("model", {}), ("model", {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}), ("model", {"type": "Unigram", "vocab": []}))),
    *((GGUF, _number(at, value)) for at in (8, 16, 24) for value in (0, 1, 40, 4096, 2**16, 2**32, 2**63, 2**64 - 1)),
    *((GGUF, _number(4, value, "<I")) for value in (0, 1, 2, 4, 3 << 24, 2**32 - 1)),
    *((GGUF, _field(f"llama.{name}", 4, "<I", value))
      for name in ("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
                   "attention.head_count", "attention.head_count_kv", "attention.key_length",
                   "attention.value_length", "rope.dimension_count", "attention.sliding_window", "expert_count",
                   "expert_used_count")
      for value in (0, 1, 3, 2**16, 2**31, 2**32 - 1)),
    *((GGUF, _field(f"llama.{name}", 6, "<f", value))
      for name in ("rope.freq_base", "rope.scaling.factor", "attention.layer_norm_rms_epsilon", "block_count",
                   "attention.head_count", "rope.scale_linear", "embedding_scale")
      for value in (0.0, -1.0, float("nan"), float("inf"), 1e38, 2.5)),
    *((GGUF, _field(name, 9, "<IQ", inner, count))
      for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type",
                   "llama.attention.head_count")
      for inner, count in ((4, 0), (8, 0), (4, 2**62), (8, 2**62), (8, 2**20), (9, 1), (99, 1), (0, 2**20))),
    *((GGUF, _field(name, 8, "<Q", 2**40)) for name in ("tokenizer.chat_template", "general.architecture")),
    *((GGUF, _field(name, 4, "<I", value)) for value in (0, 3, 2**31, 2**32 - 1)
      for name in ("general.alignment", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "split.count",
                   "tokenizer.ggml.eot_token_id", "tokenizer.ggml.add_bos_token")),
    *((name, lambda _, data=data: data)
      for name in (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS, INDEX, GGUF)
      for data in (b"", b"\0", b"{", b"[]", b"null", b"5", b"\xff\xfe", b"[" * 10**6, b'{"a":' * 10**6, b"9" * 10**6)),
]  # fmt: skip


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 4, 64))):
        changed[min(int(rng.expovariate(1e-3)), len(data) - 1)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _another_value(data: bytes, rng: random.Random) -> bytes:
    """JSON with one or more values replaced, or removed."""
    content = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 3))):
        place: Any = content
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys[:40])
            if isinstance(place[key], dict | list) and rng.random() < 0.8:
                place = place[key]
                continue
            if rng.random() < 0.15:
                del place[key]
            else:
                value = rng.choice((rng.choice(INTEGERS), rng.choice(FLOATS), anything(rng), float("nan")))
                place[key] = value
            break
    return json.dumps(content).encode()


def _another_header(data: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header = _another_value(data[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def _another_number(data: bytes, rng: random.Random) -> bytes:
    """GGUF with other numbers in the places of its tensors, which follow its metadata."""
    start, changed = data.rfind(b"output_norm.weight"), bytearray(data)
    for _ in range(rng.choice((1, 1, 2))):
        form = rng.choice(("<I", "<Q"))
        value = rng.choice((0, 1, 2**31, 2**32 - 1, rng.randrange(64))) if form == "<I" else rng.randrange(2**64)
        struct.pack_into(form, changed, start + rng.randrange(-1500, 60), value)
    return bytes(changed)


CHANGES: dict[str, tuple[Change, ...]] = {
    WEIGHTS: (_another_header, _another_header, _another_header, _flip, _cut),
    GGUF: (_another_number, _another_number, _flip, _flip, _cut),
}
JSON_CHANGES: tuple[Change, ...] = (_another_value, _another_value, _another_value, _another_value, _flip, _cut)


def cases(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield files with their hostile content: first the crafted ones, shuffled, then others at random."""
    original = {name: (DIRECTORY / name).read_bytes() for name in set(FILES) - {INDEX, GGUF}}
    with tempfile.TemporaryDirectory() as folder:
        original[GGUF] = gguf_models.write_demo(Path(folder) / GGUF, Kind.Q8_0).read_bytes()
    original[INDEX] = json.dumps({"metadata": {"total_size": 1}, "weight_map": {NORM: WEIGHTS, "a": WEIGHTS}}).encode()
    for name, change in random.Random(seed).sample(CRAFTED, min(count, len(CRAFTED))):
        yield name, change(original[name])
    for index in range(len(CRAFTED), count):
        rng = random.Random(f"{seed} {index}")
        name = rng.choice(FILES)
        yield name, rng.choice(CHANGES.get(name, JSON_CHANGES))(original[name], rng)


def fault(name: str, directory: Path, end: dict[str, Any]) -> str | None:
    """Return the fault of a load's end."""
    if end["error"] not in (None, "ValueError"):
        return f"{end['error']}, no ValueError: {end['message']}"
    if end["error"] and name not in end["message"] and str(directory) not in end["message"]:
        return f"an error that names no file: {end['message']}"
    if end["error"] and len(end["message"]) > 20_000:
        return f"an error of {len(end['message'])} characters"
    if end["mib"] > MAX_MIB:
        return f"{end['mib']:.0f} MiB of memory"
    return None


def load_all(count: int, seed: int, *, progress: bool = True) -> list[Row]:
    """Return a row of results for each kind of file."""
    rows: dict[str, Row] = {}
    child = Children("tests.attack.checkpoint_trial", None)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        for name, data in tqdm(cases(count, seed), total=count, unit="checkpoint", disable=not progress):
            if name == GGUF:
                directory.mkdir()
            else:
                shutil.copytree(DIRECTORY, directory)
            (directory / name).write_bytes(data)
            try:
                end = child.ask(json.dumps(str(directory)), TIMEOUT_S)
                found = fault(name, directory, end)
            except ChildFailed as error:
                end, found = {"error": "ChildFailed", "seconds": TIMEOUT_S, "mib": 0.0}, str(error)
            shutil.rmtree(directory)
            row = rows.setdefault(name, {
                "file": name, "checkpoints": 0, "outcomes": Counter(), "failures": 0, "slowest_s": 0.0, "most_mib": 0.0,
                "told": [],
            })  # fmt: skip
            row["checkpoints"] += 1
            row["outcomes"][end["error"] or "loaded"] += 1
            row["slowest_s"] = max(row["slowest_s"], end["seconds"])
            row["most_mib"] = max(row["most_mib"], end["mib"])
            if found:
                row["failures"] += 1
                row["told"] = [*row["told"], f"{found[:2000]}: {data[:200]!r}"][:KEPT]
    return [row | {"status": "failed" if row["failures"] else "ok"} for row in rows.values()]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "fuzz")
    parser.add_argument("--checkpoints", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of all changes (default 0)")
    args = parser.parse_args(argv)
    if args.checkpoints < 1:
        parser.error(f"--checkpoints must be at least 1, not {args.checkpoints}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "checkpoints.json", environment(open_device(tiny=True), tiny=False))
    report.environment |= {"seed": args.seed}
    rows = load_all(args.checkpoints, args.seed)
    for row in rows:
        report.add(**row)
    columns = ("file", "checkpoints", "outcomes", "failures", "slowest_s", "most_mib", "status")
    shown = [row | {"outcomes": ", ".join(f"{name} {n}" for name, n in row["outcomes"].items())} for row in rows]
    report.publish("Hostile checkpoints", table(shown, columns), name="checkpoints.md")
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

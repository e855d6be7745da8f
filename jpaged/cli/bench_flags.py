"""Flags of `vllm bench serve`: what each does in `jpaged bench serve`.

Source: vllm/benchmarks/serve.py and vllm/benchmarks/datasets/datasets.py of vLLM 0.33.
"""

from jpaged.flags import Flag, Table, applied, needless, unsupported

PATHS = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
DATASETS = {"random": "random", "sharegpt": "sharegpt", "custom": "file", "prefix_repetition": "shared-prefix"}
FIELDS = (
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "chat_template_kwargs",
)


def _field(name: str) -> Flag:
    """Return the flag of a field of requests."""
    return applied(f"--{name.replace('_', '-')}", "--extra-body", lambda value: {name: value})


BENCH = Table((
    applied("--base-url", "--url"),
    applied("--endpoint", "--endpoint", PATHS),
    applied("--dataset-name", "--workload", DATASETS, refusal=f"only {', '.join(DATASETS)} are supported"),
    applied("--dataset-path", "--file"),
    applied("--random-input-len --prefix-repetition-suffix-len", "--input-len"),
    applied("--random-output-len --prefix-repetition-output-len --custom-output-len", "--output-len"),
    applied("--random-range-ratio", "--range-ratio"),
    applied("--prefix-repetition-prefix-len", "--prefix-len"),
    applied("--prefix-repetition-num-prefixes", "--num-prefixes"),
    applied("--max-concurrency", "--concurrency"),
    *map(_field, FIELDS),
    applied("--use-beam-search", "--extra-body", lambda value: {"use_beam_search": value}, nargs=0),
    needless("--disable-tqdm", "not needed, progress is shown on a terminal only"),
    needless("--trust-remote-code", "not needed, no tokenizer brings code of its own"),
    needless("--skip-tokenizer-init", "not needed, the server counts tokens unless --tokenizer is given"),
    needless("--tokenizer-mode", "the default", ("auto", "hf", "fast"), "only fast tokenizers are supported", nargs=1),
    needless("--ready-check-timeout-sec", "not needed, the first requests are those of --num-warmups", nargs=1),
    needless("--no-oversample", "not needed, requests of a file are not repeated"),
    needless("--skip-chat-template", "not needed, prompts are sent as the file has them"),
    unsupported("--random-prefix-len", "use --workload shared-prefix and --prefix-len"),
    unsupported("--random-batch-size", "each request has one prompt", "1"),
    unsupported("--sharegpt-output-len", "outputs have the length of the file's answers: use --workload random"),
    unsupported("--disable-shuffle", "requests of a file are shuffled by --seed"),
    unsupported("--append-result", "each run has its own file"),
    unsupported("--logprobs", "use --extra-body"),
    unsupported("--header", "use --api-key"),
    unsupported("--insecure", "certificates are checked"),
    unsupported("--no-stream", "latencies need streams"),
    unsupported("--self-timed --timed-trace-* --ramp-up-* --probe-request-rate", "use several rates of --request-rate"),
    unsupported("--lora-modules --lora-assignment", "name the adapter with --model"),
    unsupported("--profile --plot-* --timeline-* --request-id-prefix", "use --out FILE with --per-request"),
    unsupported(
        "--hf-* --blazedit-* --asr-* --bfcl-* --spec-bench-* --speed-bench-* --random-mm-* --enable-multimodal-chat "
        "--no-reranker --custom-ensure-client-side-data",
        "this dataset is not supported: use --workload file",
    ),
))  # fmt: skip

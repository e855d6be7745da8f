# /// script
# requires-python = ">=3.12"
# dependencies = ["lm-eval[api]>=0.4.13,<1", "transformers>=5,<6"]
# ///
"""lm-evaluation-harness: `local-completions`, whose loglikelihoods echo prompts, and `local-chat-completions`."""

import json
import tempfile
from pathlib import Path

import lm_eval
from scenarios import MODEL, URL, run

TOKENIZER = str(Path(__file__).parents[3] / "jpaged/demo/model")
ROWS = [
    {"question": "A fox is an", "choices": ["animal", "number"], "answer": 0},
    {"question": "Two is a", "choices": ["colour of the sea", "number"], "answer": 1},
]


def evaluate(model, path, kind, *, batch_size=1, **args):
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "rows.jsonl")
        data.write_text("\n".join(json.dumps(row) for row in ROWS))
        task = {
            "task": "foxes", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test", "doc_to_text": "{{question}}",
        } | kind  # fmt: skip
        args = {"model": MODEL, "base_url": f"{URL}{path}", "max_retries": 1, "num_concurrent": 2} | args
        options = {"apply_chat_template": "chat" in model, "batch_size": batch_size, "bootstrap_iters": 0}
        result = lm_eval.simple_evaluate(model, model_args=args, tasks=[task], **options)
    return result["samples"]["foxes"]


CHOICES = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
TEXTS = {
    "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "temperature": 0.0},
}  # fmt: skip
ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}"}


def check_choices(samples):
    for sample in samples:
        for ((logprob, _),) in sample["resps"]:
            assert float(logprob) < 0


def loglikelihood():
    local = {"tokenizer": TOKENIZER, "tokenizer_backend": "huggingface"}
    check_choices(evaluate("local-completions", "/v1/completions", CHOICES, **local))
    check_choices(evaluate("local-completions", "/v1/completions", CHOICES, **local, batch_size=4))


def loglikelihood_with_remote_tokenizer():
    check_choices(evaluate("local-completions", "/v1/completions", CHOICES, tokenizer_backend="remote"))


def loglikelihood_rolling():
    local = {"tokenizer": TOKENIZER, "tokenizer_backend": "huggingface"}
    for sample in evaluate("local-completions", "/v1/completions", ROLLING, **local):
        assert float(sample["resps"][0][0]) < 0


def generate():
    for tokenized in (False, True):
        args = {"tokenizer": TOKENIZER, "tokenizer_backend": "huggingface", "tokenized_requests": tokenized}
        for sample in evaluate("local-completions", "/v1/completions", TEXTS, **args):
            assert sample["resps"][0][0]


def chat():
    for sample in evaluate("local-chat-completions", "/v1/chat/completions", TEXTS):
        assert sample["resps"][0][0]


run(loglikelihood, loglikelihood_with_remote_tokenizer, loglikelihood_rolling, generate, chat)

"""A server with scripted answers: `python -m tests.serving.scripted --port N`, with the flags of server.py.

It has the demo model's tokenizer and all parts of the server except the model. The prompt's last `<<say>>...<<done>>`
is the response: its tokens are generated one by one, then the end of the sequence. `<<or>>` separates the texts of
several choices. At `<<fail>>` the runner raises, as a device might. If a constraint or min_tokens forbids the next
token, the runner ends the text, closes a string or an object, or takes the first allowed token; then it continues.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from jpaged.cli.serve import add_flags, bound_sockets, server_config, tls_context
from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.plan import Admitted, Done, Sample, StepPlan, StepResult
from jpaged.core.scheduler import Scheduler
from jpaged.demo import DIRECTORY
from jpaged.engine.engine import Engine
from jpaged.models.config import ModelConfig
from jpaged.models.config_file import read_hf
from jpaged.serving.logs import logging_to
from jpaged.serving.serve import serve
from jpaged.serving.service import Service
from jpaged.serving.tool_parsers.format import FORMATS
from jpaged.tokenizer import backend

SAY, OR, DONE, FAIL = "<<say>>", "<<or>>", "<<done>>", "<<fail>>"
BLOCK_SIZE = 16
TOKENIZER = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
END = TOKENIZER.token_to_id("<|end|>")
LIMITS = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 512}


def say(*texts: str) -> str:
    """Return a prompt with which choice i answers texts[i]."""
    return SAY + OR.join(texts) + DONE


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    """Return a chat request with which choice i answers texts[i]."""
    return {"messages": [{"role": "user", "content": say(*texts)}], "n": len(texts)} | fields


def completion(*texts: str, **fields: Any) -> dict[str, Any]:
    """Return a completion request with which choice i answers texts[i]."""
    return {"prompt": say(*texts), "n": len(texts), "max_tokens": 100} | fields


def logprob(token: int) -> float:
    """Return the logprob of a token, which is the same at every position."""
    return -(token + 1) / 2048


@dataclass
class _Row:
    """A sequence as plans describe it."""

    admitted: Admitted
    output: list[int]
    branch: int = 0

    @property
    def prompt(self) -> list[int]:
        return list(self.admitted.token_ids[: self.admitted.num_prompt_tokens])


class ScriptedRunner:
    """A runner that computes nothing and samples scripted tokens.

    Args:
        eos: the token that ends an answer.
        step_seconds: how long a step takes.
    """

    def __init__(self, tokenizer: Tokenizer, eos: int, step_seconds: float):
        self._tokenizer, self._eos, self._step_seconds = tokenizer, eos, step_seconds
        self._ways_out = [eos, *(tokenizer.token_to_id(text) for text in '"}')]
        self._rows: dict[int, _Row] = {}

    def dispatch(self, plan: StepPlan, make_masks: Callable[[], np.ndarray] | None = None) -> Done:
        time.sleep(self._step_seconds)
        self._change_rows(plan)
        masks = make_masks() if make_masks is not None else ()
        allowed = {row: _tokens(mask) for (row, _), mask in zip(plan.masked, masks)}
        samples, prompt = [], {}
        for index, (number, start, count, num_samples) in enumerate(plan.rows):
            row = self._rows[number]
            if (known := row.admitted.num_scored) is not None:
                prompt[index] = [_sample(row.admitted, t) for t in row.prompt[1 + max(start, known) :][:count]]
            branches = range(row.branch, row.branch + num_samples)
            chosen = [self._next(row, branch, allowed.get(number)) for branch in branches]
            samples += [_sample(row.admitted, token) for token in chosen]
            if num_samples == 1:
                row.output += chosen
        return Done(StepResult(samples, prompt))

    def recover(self) -> None:
        """Do nothing, since no result can be lost."""

    def _change_rows(self, plan: StepPlan) -> None:
        before = dict(self._rows)
        for source, row in plan.row_copies:
            self._rows[row] = replace(before[source], output=list(before[source].output))
        for admitted in plan.admitted:
            self._rows[admitted.row] = _Row(admitted, list(admitted.token_ids[admitted.num_prompt_tokens :]))
        for number, token, seed in plan.chosen:
            row = self._rows[number]
            row.output.append(token)
            row.branch = (seed - row.admitted.seed) % 2**64

    def _next(self, row: _Row, branch: int, allowed: set[int] | None) -> int:
        script, fails = self._script(row.prompt, branch)
        said = 0
        for token in row.output:
            said += said < len(script) and token == script[said]  # A constraint forces other tokens.
        if said == len(script) and fails:
            raise RuntimeError("the script fails here")
        wanted = script[said] if said < len(script) else self._eos
        if allowed is None:
            return wanted
        return next(token for token in (wanted, *self._ways_out, *sorted(allowed)) if token in allowed)

    def _script(self, prompt_token_ids: list[int], branch: int) -> tuple[list[int], bool]:
        """Return the tokens of a choice, and whether the runner fails after them."""
        prompt = self._tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        told = re.findall(f"{SAY}(.*?){DONE}", prompt, re.DOTALL)
        texts = told[-1].split(OR) if told else [""]
        text, fails, _ = texts[branch % len(texts)].partition(FAIL)
        return self._tokenizer.encode(text, add_special_tokens=False).ids, bool(fails)


def _tokens(mask_w: np.ndarray) -> set[int]:
    """Return the tokens that a mask allows."""
    return set(np.flatnonzero(np.unpackbits(mask_w.view(np.uint8), bitorder="little")).tolist())


def _sample(admitted: Admitted, token: int) -> Sample:
    """Return the token as the most likely one, followed by constant others."""
    others = [other for other in range(5, 25) if other != token]
    logprobs = [logprob(token), *(logprob(token) - 1 - other for other in others)]
    count = max(admitted.num_top or 0, admitted.params.prompt_logprobs or 0)
    hidden = np.float32([1, token]).tobytes()
    return Sample(token, logprob(token), 1, [token, *others][:count], logprobs[:count], hidden=hidden)


def demo_tokenizer(marks: Sequence[str] = ()) -> SimpleNamespace:
    """Return the demo model's tokenizer as the server uses it, without transformers, whose import takes a second.

    Args:
        marks: further special tokens.
    """
    config = json.loads((DIRECTORY / "tokenizer_config.json").read_text())
    special = {name: config[name] for name in ("bos_token", "eos_token", "pad_token")}
    inner = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    inner.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return SimpleNamespace(
        backend_tokenizer=inner,
        chat_template=config["chat_template"], special_tokens_map=special, init_kwargs=config,
    )  # fmt: skip


def load(
    step_seconds: float = 0.0,
    *,
    enable_prefix_caching: bool = True,
    marks: Sequence[str] = (),
    end: str | None = None,
    **limits: int,
) -> tuple[Engine, Any]:
    """Return an engine with scripted answers, and its tokenizer.

    Args:
        marks: further special tokens.
        end: the one of them that ends an answer; None: the model's.
        limits: replace those of LIMITS.
    """
    limits = LIMITS | limits
    model, tokenizer = ModelConfig.from_hf(read_hf(DIRECTORY)), demo_tokenizer(marks)
    eos = model.eos_token_ids if end is None else (backend(tokenizer).token_to_id(end),)
    scheduler = Scheduler(
        BlockPool(limits["num_gpu_blocks_override"], BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching),
        Limits(limits["max_model_len"], limits["max_num_seqs"], limits["max_num_batched_tokens"], BLOCK_SIZE),
        vocab_size=model.vocab_size + len(marks), eos_token_ids=eos,
    )  # fmt: skip
    runner = ScriptedRunner(backend(tokenizer), eos[0], step_seconds)
    return Engine(scheduler, runner, backend(tokenizer)), tokenizer


def make(flags: list[str] | None = None) -> tuple[argparse.Namespace, Service]:
    """Return the flags, by default those of the process, and the service that they configure."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_flags(parser)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.set_defaults(**LIMITS)
    args = parser.parse_args(flags)
    limits = {name: getattr(args, name) for name in LIMITS}
    engine, tokenizer = load(args.step_seconds, enable_prefix_caching=args.enable_prefix_caching, **limits)
    tool_format = FORMATS.get(args.tool_call_parser)
    return args, Service([engine], tokenizer, args.model, server_config(args), tool_format=tool_format)


def main() -> None:
    args, service = make()
    with logging_to(sys.stderr, args.access_log, args.log_level), bound_sockets(args) as sockets:
        asyncio.run(serve(service, sockets, tls_context(args)))


if __name__ == "__main__":
    main()

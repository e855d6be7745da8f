"""A server that says what it is told: `python -m tests.serving.scripted --port N`, with the flags of server.py.

It has the demo model's tokenizer, and all of the server but the model. Its answer is what the prompt's last
`<<say>>...<<done>>` holds, token by token, then the end of the sequence. `<<or>>` divides it into one text for each
choice; at `<<fail>>` the runner fails, as a device might. Where a constraint or min_tokens forbids the next token, it
ends the text, closes a string or closes an object, or takes the first token that is allowed; then it goes on.
"""

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Collection

from tokenizers import Tokenizer

from jpaged.cli.serve import add_flags, bound_sockets, server_config, tls_context
from jpaged.config import Limits, ModelConfig
from jpaged.core.block_pool import BlockPool
from jpaged.core.request import Request, Sample, Sequence, SequenceResult
from jpaged.core.scheduler import ScheduleDecision, Scheduler
from jpaged.demo import DIRECTORY
from jpaged.engine import Engine
from jpaged.serving.logs import logging_to
from jpaged.serving.serve import serve
from jpaged.serving.service import Service, make_service
from jpaged.serving.tools import FORMATS
from jpaged.tokenizer import backend, load_tokenizer

SAY, OR, DONE, FAIL = "<<say>>", "<<or>>", "<<done>>", "<<fail>>"
LIMITS = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 512}


def say(*texts: str) -> str:
    """What to put into a prompt so that choice i answers texts[i]."""
    return SAY + OR.join(texts) + DONE


def logprob(token: int) -> float:
    """Of every token, wherever it stands."""
    return -(token + 1) / 2048


class ScriptedRunner:
    """Computes nothing.

    Args:
        eos: the token that ends an answer.
        step_seconds: how long a step takes.
    """

    def __init__(self, tokenizer: Tokenizer, eos: int, step_seconds: float):
        self._tokenizer, self._eos, self._step_seconds = tokenizer, eos, step_seconds
        self._ways_out = [eos, *(tokenizer.token_to_id(text) for text in '"}')]

    def step(self, decision: ScheduleDecision) -> list[SequenceResult]:
        time.sleep(self._step_seconds)
        return [
            self._result(sequence, count, decision.forbidden.get(sequence, ()))
            for sequence, count in decision.num_scheduled_tokens.items()
        ]

    def recover(self) -> None:
        """Nothing is computed, so nothing is lost."""

    def _result(self, sequence: Sequence, count: int, forbidden: Collection[int]) -> SequenceResult:
        request = sequence.request
        given: list[int] = []
        if request.params.prompt_logprobs is not None:
            first = 1 + len(request.prompt_samples)
            given = request.prompt_token_ids[first : 1 + sequence.num_computed_tokens + count]
        branches = range(sequence.index, sequence.index + sequence.num_samples(count))
        chosen = [self._next(sequence, branch, forbidden) for branch in branches]
        return SequenceResult([_sample(request, t) for t in chosen], [_sample(request, t) for t in given])

    def _next(self, sequence: Sequence, branch: int, forbidden: Collection[int]) -> int:
        script, fails = self._script(sequence.request, branch)
        said = 0
        for token in sequence.output_token_ids:
            said += said < len(script) and token == script[said]  # else it was forced
        if said == len(script) and fails:
            raise RuntimeError("the script fails here")
        wanted = script[said] if said < len(script) else self._eos
        allowed = self._allowed(sequence, forbidden)
        return next(token for token in (wanted, *self._ways_out, *sorted(allowed)) if token in allowed)

    def _allowed(self, sequence: Sequence, forbidden: Collection[int]) -> set[int]:
        allowed = set(range(self._tokenizer.get_vocab_size()))
        if sequence.constraint is not None:
            mask = sequence.constraint.matcher.compute_bitmask()
            allowed = {token for token in allowed if mask[token // 8] >> token % 8 & 1}
        return allowed.difference(forbidden) or allowed

    def _script(self, request: Request, branch: int) -> tuple[list[int], bool]:
        """What a choice is to say, and whether it then fails."""
        prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        told = re.findall(f"{SAY}(.*?){DONE}", prompt, re.DOTALL)
        texts = told[-1].split(OR) if told else [""]
        text, fails, _ = texts[branch % len(texts)].partition(FAIL)
        return self._tokenizer.encode(text, add_special_tokens=False).ids, bool(fails)


def _sample(request: Request, token: int) -> Sample:
    """The token as the most likely one, before others that never change."""
    others = [other for other in range(5, 25) if other != token]
    logprobs = [logprob(token), *(logprob(token) - 1 - other for other in others)]
    count = request.num_top or 0
    return Sample(token, logprob(token), 1, [token, *others][:count], logprobs[:count])


def make(flags: list[str] | None = None) -> tuple[argparse.Namespace, Service]:
    """The flags, by default the process's own, and the service they ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_flags(parser)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.set_defaults(**LIMITS)
    args = parser.parse_args(flags)
    model, tokenizer = ModelConfig.from_directory(DIRECTORY), load_tokenizer(DIRECTORY)
    scheduler = Scheduler(
        BlockPool(args.num_gpu_blocks_override, args.block_size, enable_prefix_caching=args.enable_prefix_caching),
        Limits(args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens),
        vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids,
    )  # fmt: skip
    runner = ScriptedRunner(backend(tokenizer), model.eos_token_ids[0], args.step_seconds)
    engine = Engine(scheduler, runner, backend(tokenizer))
    tool_format = FORMATS.get(args.tool_call_parser)
    return args, make_service(engine, tokenizer, args.model, server_config(args), tool_format=tool_format)


def main() -> None:
    args, service = make()
    with logging_to(sys.stderr, args.access_log, args.log_level), bound_sockets(args) as sockets:
        asyncio.run(serve(service, sockets, tls_context(args)))


if __name__ == "__main__":
    main()

"""Throughput of an engine without a server: all requests are submitted at once."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jpaged.bench.source import draw, open_file
from jpaged.bench.workload import Workload
from jpaged.chat import prompt_of
from jpaged.core.params import SamplingParams
from jpaged.llm import LLM
from jpaged.tokenizer import backend, encode


@dataclass(frozen=True)
class Throughput:
    """Measurement of a workload. `notes` are changes of the workload that the model required."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    duration: float  # seconds
    notes: Sequence[str] = ()


def measure(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], *, progress: bool = True
) -> Throughput:
    """Generate for all prompts after a short warm-up, and count the tokens."""
    llm.generate(prompts[0][:1], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=progress)
    duration = time.perf_counter() - start
    made = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return Throughput(len(prompts), sum(map(len, prompts)), made, duration)


class EngineTokens:
    """Token counter with the tokenizer of a loaded model."""

    def __init__(self, llm: LLM):
        self._llm = llm

    async def ids(self, text: str) -> list[int]:
        """Return the text's token ids, without special tokens."""
        return backend(self._llm.tokenizer).encode(text, add_special_tokens=False).ids

    async def count(self, text: str) -> int:
        """Return the number of tokens of `ids`."""
        return len(await self.ids(text))

    async def of_prompt(self, content: Any) -> int:
        """Return the number of tokens of a prompt."""
        return len(self.prompt(content))

    def prompt(self, content: Any) -> list[int]:
        """Return a prompt's token ids."""
        if isinstance(content, str):
            return encode(self._llm.tokenizer, content)
        return prompt_of(self._llm.tokenizer, content) if isinstance(content[0], dict) else content


def bench_engine(llm: LLM, workload: Workload, *, progress: bool = True) -> Throughput:
    """Measure greedy generation for a workload. If lengths are drawn, no output ends before its length."""
    tokens, room = EngineTokens(llm), llm.engine.limits.max_model_len
    source = asyncio.run(open_file(workload, tokens, room) if workload.file else draw(workload, tokens, room, True))
    jobs = source.jobs("run 0")
    prompts = [tokens.prompt(job.content) for job in jobs]
    ignore_eos = workload.file is None
    params = [SamplingParams(max_tokens=job.max_tokens, temperature=0, ignore_eos=ignore_eos) for job in jobs]
    return replace(measure(llm, prompts, params, progress=progress), notes=source.notes)

"""Load test of a server: find its model, create the requests of a workload, and send them once for each rate."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from jpaged.bench.client import Client, ServerError
from jpaged.bench.measure import LIMITED, Measurement, Record, measure
from jpaged.bench.source import draw, open_file
from jpaged.bench.tokens import PATHS, ServerTokens, prompt_fields
from jpaged.bench.workload import Job, Workload, arrivals


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        model: None: the first model that the server lists.
        rates: requests per second, one run for each; infinite: all at once.
        burstiness: see `workload.arrivals`.
        concurrency: maximum requests at a time; None: no limit.
        token_ids: send prompts as token ids, not as text.
        ignore_eos: generate up to the last requested token, by vLLM's field of that name; None: for drawn lengths only.
        tokenizer: tokenizer that counts tokens in place of the server.
        goodput: maximum latencies of a good request in milliseconds, by the names of `measure.LIMITED`.
        timeout: maximum seconds of a request.
        extra_body: further fields of each request.
    """

    workload: Workload
    model: str | None = None
    endpoint: str = "completions"
    rates: Sequence[float] = (math.inf,)
    burstiness: float = 1.0
    concurrency: int | None = None
    token_ids: bool = False
    ignore_eos: bool | None = None
    temperature: float = 0.0
    tokenizer: str | None = None
    num_warmups: int = 1
    goodput: Mapping[str, float] = field(default_factory=dict)
    timeout: float = 600.0
    extra_body: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.endpoint not in PATHS:
            raise ValueError(f"endpoint: must be one of {', '.join(PATHS)}, not {self.endpoint!r}")
        positive = {"request_rate": self.rates, "burstiness": [self.burstiness], "timeout": [self.timeout]}
        for name, values in positive.items():
            if not all(value > 0 for value in values):
                raise ValueError(f"{name}: must be above 0, not {min(values)}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency: must be at least 1, not {self.concurrency}")
        if self.num_warmups < 0:
            raise ValueError(f"num_warmups: must be at least 0, not {self.num_warmups}")
        if unknown := self.goodput.keys() - set(LIMITED):
            raise ValueError(f"goodput: {', '.join(sorted(unknown))} is none of {', '.join(LIMITED)}")
        if self.token_ids and self.workload.kind == "file":
            raise ValueError("token_ids: a file's prompts are sent as it has them")
        if self.token_ids and self.endpoint == "chat":
            raise ValueError("token_ids: the endpoint chat takes none; completions does")


@dataclass(frozen=True)
class Run:
    """Requests at one rate; `asked` is the number of requested output tokens."""

    rate: float
    asked: int
    records: list[Record]
    measurement: Measurement


@dataclass(frozen=True)
class Result:
    """Runs, and their common facts."""

    model: str
    max_model_len: int | None
    runs: list[Run]
    notes: list[str]


async def bench_server(client: Client, settings: Settings, *, progress: bool = True) -> Result:
    """Run the workload once for each rate. Failed requests are counted.

    Raises:
        ServerError: one of the first requests, which warm up the server, failed.
    """
    models = await client.models()
    model = settings.model or models[0]["id"]
    room = next((each.get("max_model_len") for each in models if each["id"] == model), None)
    tokens = ServerTokens(client, model, settings.endpoint, settings.tokenizer)
    path, workload = PATHS[settings.endpoint], settings.workload
    source = await (
        open_file(workload, tokens, room) if workload.file else draw(workload, tokens, room, settings.token_ids)
    )
    for body in bodies(model, settings, source.jobs("warm-up")[: settings.num_warmups]):
        record = await send(client, path, body, 0)
        if record.failure:
            raise ServerError(record.failure, f"the first request: {record.detail}")
    runs = []
    for index, rate in enumerate(settings.rates):
        jobs = source.jobs(f"run {index}")
        due = arrivals(len(jobs), rate, settings.burstiness, workload.seed)
        with tqdm(total=len(jobs), desc=f"{rate:g} requests/s", unit="request", disable=not progress) as bar:
            records = await drive(client, path, bodies(model, settings, jobs), due, settings.concurrency, bar.update)
        limits = {name: milliseconds / 1000 for name, milliseconds in settings.goodput.items()}
        asked = sum(job.max_tokens or 0 for job in jobs)
        runs.append(Run(rate, asked, records, measure(records, limits)))
    return Result(model, room, runs, source.notes)


def bodies(model: str, settings: Settings, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return the body of each job's request."""
    ignore_eos = settings.workload.kind != "file" if settings.ignore_eos is None else settings.ignore_eos
    common = {"model": model, "temperature": settings.temperature}
    common |= {"stream": True, "stream_options": {"include_usage": True}} | ({"ignore_eos": True} if ignore_eos else {})
    fields = ((prompt_fields(settings.endpoint, job.content), job.max_tokens) for job in jobs)
    return [common | prompt | {"max_tokens": most} | dict(settings.extra_body or {}) for prompt, most in fields]


async def drive(
    client: Client, path: str, bodies: Sequence[dict[str, Any]], due: Sequence[float], concurrency: int | None,
    ended: Callable[[], object],
) -> list[Record]:  # fmt: skip
    """Send each body at its due time and return a record for each, in order.

    While `concurrency` requests run, the next one waits until one of them ends. `ended` is called after each request.
    """
    room, start = asyncio.Semaphore(concurrency or len(bodies)), time.perf_counter()

    async def one(body: dict[str, Any], at: float) -> Record:
        async with room:
            record = await send(client, path, body, at)
        ended()
        return record

    async with asyncio.TaskGroup() as group:
        tasks = []
        for body, offset in zip(bodies, due):
            if (wait := start + offset - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(body, start + offset)))
    return [task.result() for task in tasks]


async def send(client: Client, path: str, body: dict[str, Any], due: float) -> Record:
    """Send a request now and read its response to the end. A failure is part of the record."""
    record = Record(due, sent=time.perf_counter())
    try:
        async with aclosing(client.stream(path, body)) as events:
            async for at, event in events:
                if _has_text(event):
                    record.chunks.append(at)
                if usage := event.get("usage"):
                    record.prompt_tokens = usage.get("prompt_tokens")
                    record.output_tokens = usage.get("completion_tokens")
    except ServerError as error:
        record.failure, record.detail = error.kind, error.detail
    record.ended = time.perf_counter()
    return record


def _has_text(event: dict[str, Any]) -> bool:
    """Return whether a chunk carries text of the model, and not only a role or a finish reason."""
    said = ("content", "reasoning_content", "reasoning", "tool_calls")
    return any(
        choice.get("text") if (delta := choice.get("delta")) is None else any(map(delta.get, said))
        for choice in event.get("choices") or ()
    )

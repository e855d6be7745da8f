"""The cost of a step of beam search beside a step of sampling: the same number of sequences and outputs, of the same
length, through the same engine.

    python benchmarks/paper/beam.py --out results
    python benchmarks/paper/beam.py --width 8 --requests 1 4
    python benchmarks/paper/beam.py --tiny                     one short case, to see that it works

A step of decoding is timed whole; `schedule`, `runner` (the device, and the way there and back) and `commit` are its
parts, text is the rest. Then the same through the HTTP API, whole requests over their number of steps, from clients in
the same process. Rounds of both alternate; the ratio is the median over rounds. It runs on any device, and
says which.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
from aiohttp import web

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.plots import plot
from benchmarks.shared.results import Report, script_parser, table
from benchmarks.shared.timing import Timing, ratio, summarize
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.plan import StepResult
from jpaged.engine.engine import Engine
from jpaged.llm import LLM
from jpaged.serving.serve import make_app
from jpaged.serving.service import ServerConfig, Service

LIMIT = 1.3  # times a step of sampling
PARTS = ("schedule", "runner", "commit")


class Stopwatch:
    """Adds up the seconds that some of an engine's calls take, while it is entered."""

    def __init__(self, engine: Engine):
        self.seconds = dict.fromkeys(PARTS, 0.0)
        scheduler, runner = engine.scheduler, engine.runner
        self._calls = [
            (scheduler, "schedule", "schedule"), (runner, "dispatch", "runner"), (scheduler, "commit", "commit"),
        ]  # fmt: skip

    def __enter__(self) -> "Stopwatch":
        for owner, method, part in self._calls:
            setattr(owner, method, self._timed(getattr(owner, method), part))
        dispatch = self._calls[1][0].dispatch
        self._calls[1][0].dispatch = lambda *args: _Timed(self._timed(dispatch(*args).result, "runner"))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, method, _ in self._calls:
            delattr(owner, method)  # the class's own shows again

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            self.seconds[part] += time.perf_counter() - start
            return result

        return timed


class _Timed(NamedTuple):
    """A step on its way, the wait for which is timed."""

    result: Callable[[], StepResult]


def decode(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | BeamSearchParams, steps: int
           ) -> tuple[list[float], dict[str, float]]:  # fmt: skip
    """Seconds of each of `steps` steps of decoding, and the seconds per step of their parts."""
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params)
    while any(not request.sequences[0].num_output_tokens for request in engine.scheduler.requests.values()):
        engine.step()
    engine.step()  # whose copies of the prompt's last block are no step's everyday work
    seconds = []
    with Stopwatch(engine) as watch:
        for _ in range(steps):
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
    assert len(engine.scheduler.requests) == len(prompts), "one has ended before all were timed"
    for i in range(len(prompts)):
        engine.abort(str(i))
    return seconds, {part: total / steps for part, total in watch.seconds.items()}


def compare(report: Report, llm: LLM, *, width: int, requests: int, prompt: int, steps: int, rounds: int) -> None:
    """Both kinds at one context and batch."""
    engine, vocab = llm.engine, llm.engine.scheduler.vocab_size
    common = dict(max_tokens=2 * steps, ignore_eos=True)  # more than is timed: the first ones start early
    kinds: dict[str, SamplingParams | BeamSearchParams] = {
        "sampling": SamplingParams(n=width, temperature=1.0, seed=0, **common),
        "beam": BeamSearchParams(beam_width=width, **common),
    }
    prompts = [[2 + (7 * i + 3 * j) % (vocab - 2) for j in range(prompt)] for i in range(requests)]
    samples: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    parts: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for warm in range(-1, rounds):
        for kind, params in kinds.items():
            engine.scheduler.pool.reset_prefix_cache()
            seconds, split = decode(engine, prompts, params, steps)
            if warm >= 0:
                samples[kind].append(seconds)
                parts[kind].append(split)
    timings: dict[str, Timing] = {kind: summarize(each) for kind, each in samples.items()}
    times = ratio(timings["beam"], timings["sampling"])
    row: dict[str, Any] = {}
    for kind, timing in timings.items():
        row |= {f"{kind}_ms": 1e3 * timing.median, f"{kind}_ms_low": 1e3 * timing.low,
                f"{kind}_ms_high": 1e3 * timing.high}  # fmt: skip
        row |= {f"{kind}_{part}_ms": 1e3 * statistics.median(each[part] for each in parts[kind]) for part in PARTS}
    report.add(
        experiment="beam", width=width, requests=requests, prompt=prompt, **row, ratio=times, limit=LIMIT,
        within=times <= LIMIT, steps=steps, rounds=rounds, kernels=engine.runner.kernels.name, status="ok",
    )  # fmt: skip


async def through_the_api(report: Report, llm: LLM, args: argparse.Namespace) -> None:
    """Both kinds as clients of the server have them, at the shortest context."""
    service = Service([llm.engine], llm.tokenizer, "served", ServerConfig())
    runner = web.AppRunner(make_app(service), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions"
    common = {"n": args.width, "max_tokens": args.steps, "ignore_eos": True}
    kinds = {"sampling": common | {"temperature": 1.0, "seed": 0}, "beam": common | {"use_beam_search": True}}
    async with aiohttp.ClientSession() as session:

        async def ms_per_step(prompt: list[int], body: dict[str, Any]) -> float:
            start = time.perf_counter()
            async with session.post(url, json=body | {"prompt": prompt}) as response:
                answer = await response.json()
            assert response.status == 200 and len(answer["choices"]) == args.width, answer
            return 1e3 * (time.perf_counter() - start) / args.steps

        for requests in args.requests:
            prompts = [[2 + i] * min(args.prompts) for i in range(requests)]
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for warm in range(-1, args.rounds):
                for kind, body in kinds.items():
                    found = await asyncio.gather(*(ms_per_step(prompt, body) for prompt in prompts))
                    times[kind] += [statistics.fmean(found)] if warm >= 0 else []
            over = statistics.median(b / s for b, s in zip(times["beam"], times["sampling"]))
            report.add(
                experiment="api", width=args.width, requests=requests, prompt=min(args.prompts), ratio=over,
                limit=LIMIT, within=over <= LIMIT, sampling_ms=statistics.median(times["sampling"]),
                beam_ms=statistics.median(times["beam"]), steps=args.steps, rounds=args.rounds, status="ok",
            )  # fmt: skip
    await runner.cleanup()


COLUMNS = (
    "experiment", "width", "requests", "prompt", "sampling_ms", "beam_ms", "ratio", "within",
    *(f"{kind}_{part}_ms" for part in PARTS for kind in ("sampling", "beam")),
)  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "beam")
    parser.add_argument("--tiny", action="store_true", help="one short case")
    parser.add_argument("--model", default="demo", help="a directory, a hub id, or demo (the default)")
    parser.add_argument("--load-format", default="auto", help="dummy: random parameters")
    parser.add_argument("--width", type=int, default=4, help="beams, and outputs of sampling (default 4)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8], help="at once")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512], help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64, help="of a round (default 64)")
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a step (default 512)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    args = parser.parse_args(argv)
    if args.tiny:
        args.requests, args.prompts, args.steps, args.rounds, args.chunk = [1], [16], 8, 1, 16
    return args


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    device = open_device(tiny=True)  # a CPU is enough: the results say so
    report = Report(args.out / "results.json", environment(device, args.tiny) | {"model": args.model})
    seqs, longest = args.width * max(args.requests), max(args.prompts) + 2 * args.steps
    blocks = -(-longest // 16) * seqs
    llm = LLM(
        args.model, load_format=args.load_format, progress=False, max_model_len=longest, max_num_seqs=seqs,
        max_num_batched_tokens=max(args.chunk, seqs), num_gpu_blocks_override=blocks, swap_space=0.0,
    )  # fmt: skip
    for prompt, requests in itertools.product(args.prompts, args.requests):
        compare(report, llm, width=args.width, requests=requests, prompt=prompt, steps=args.steps, rounds=args.rounds)
    asyncio.run(through_the_api(report, llm, args))
    report.publish("Beam search", table(report.rows, COLUMNS))
    for row in report.rows:
        if not row["within"]:
            case = f"{row['requests']} x {row['width']} after {row['prompt']} tokens"
            report.say(f"{row['experiment']}: {case}: {row['ratio']:.2f} is OVER {LIMIT}")
    plot(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

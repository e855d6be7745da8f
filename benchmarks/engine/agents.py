"""Serves sessions of agents with evicted prefixes on the host and with pinned ones: hits, first token, throughput.

    python benchmarks/engine/agents.py --out results      about 8 minutes
    python benchmarks/engine/agents.py --tiny             small sizes, to see that it works

Three experiments run for each policy of the prefix cache, in the simulator with Llama-3.1-8B on an H100, and on a CPU
with a Llama of 16 million random parameters in float32:

    trace            Sessions grow by turns, with pauses (`benchmarks/shared/sessions.py`). The pool holds some of them.
    turn 10          The first token of the tenth turn of one session, after other sessions have filled the pool.
    no repetition    Prompts that have nothing in common, so that moves to the host can only cost time.

In the simulator, texts have their full length, and a session's next turn arrives a pause after its last answer. On the
CPU texts are shorter, and turns follow each other without pauses: the trace gives their order, and a turn starts as
soon as fewer than `AT_ONCE` turns run; the tenth turn runs alone. So all policies see the same order. They take turns
in each round, on one runner with schedulers of their own. Figures of the CPU are medians over the rounds.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, Row, script_parser, table
from benchmarks.shared.sessions import (
    Agents,
    Session,
    SessionArrivals,
    Turn,
    ideal_hits,
    in_order,
    mean_prompt,
    separated,
)
from jpaged.config import EngineConfig
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import SamplingParams
from jpaged.core.scheduler import HEADROOM, Scheduler
from jpaged.engine.engine import Engine
from jpaged.models.checkpoint import dummy_model
from jpaged.models.config import ModelConfig
from jpaged.simulator.deployment import Deployment
from jpaged.simulator.engine import drive
from jpaged.simulator.gpu import GPUS
from jpaged.simulator.load import percentile
from jpaged.simulator.shape import SHAPES
from jpaged.start.load import load_engine

PIN_S = 300.0  # as of OpenAI's prompt_cache_key
HOST_SHARE = 4  # blocks of the host for each of the pool, as the engine takes at most
AT_ONCE = 2  # turns on the CPU
PROMPT = 12_035  # tokens of the tenth turn
FILE_BYTES = 2**32  # maximum of a folder
FILLED = 1.25  # tokens of other sessions before it, in pools
SEED, COST_SEED = 1, 2  # their few sessions have mean prompts near that of many
MAX_RATIO = 1.02  # of the time with a host to that without, if nothing repeats


class Policy(NamedTuple):
    """Policy of the prefix cache.

    Attributes:
        host: evicted blocks wait on the host, which has so many blocks for each of the pool.
        pins: each turn that another one follows pins its prefix.
        files: blocks on the host are also written to files.
    """

    name: str
    host: float = 0
    pins: bool = False
    files: bool = False

    @property
    def pin_s(self) -> float:
        """Seconds of pins."""
        return PIN_S if self.pins else 0.0


POOL, HOST = Policy("pool"), Policy("host", host=HOST_SHARE)
POLICIES = (POOL, Policy("pins", pins=True), HOST, Policy("host and pins", host=HOST_SHARE, pins=True))
CPU_POLICIES = (*POLICIES, Policy("small host", host=0.25), Policy("small host and files", host=0.25, files=True))


class Run(NamedTuple):
    """Run of some sessions.

    Attributes:
        first: seconds to the first token of each (session, turn).
        seconds: duration of the run.
        tokens: tokens of all outputs.
        scheduler: its scheduler, after the run.
    """

    first: Mapping[tuple[int, int], float]
    seconds: float
    tokens: int
    scheduler: Scheduler

    @property
    def figures(self) -> dict[str, float]:
        """Figures of a row."""
        first, tier = sorted(self.first.values()), self.scheduler.memory.tier
        return {
            "hits": self.scheduler.prefix_hits / max(1, self.scheduler.prefix_queries),
            "ttft_ms": 1e3 * statistics.fmean(first), "ttft_p99_ms": 1e3 * percentile(first, 0.99),
            "tokens_s": self.tokens / self.seconds, "seconds": self.seconds,
            "blocks_out": tier.num_out if tier else 0, "blocks_back": tier.num_back if tier else 0,
            "blocks_read": tier.disk.num_read if tier and tier.disk else 0,
        }  # fmt: skip


class Simulation:
    """Llama-3.1-8B on an H100, on a virtual clock."""

    policies = POLICIES

    def __init__(self, max_model_len: int):
        self.deployment = Deployment(
            GPUS["h100"], SHAPES["llama-3.1-8b"], max_model_len=max_model_len, max_num_seqs=256
        )
        self.pool_tokens = self.deployment.pool_tokens

    def run(self, sessions: Sequence[Session], policy: Policy) -> Run:
        """Run sessions with empty memory."""
        pool_bytes = self.deployment.kv_bytes(1) * self.deployment.num_blocks
        engine = replace(self.deployment, host_bytes=int(policy.host * pool_bytes)).engine(256)
        served = drive(engine, SessionArrivals(sessions, policy.pin_s))
        places = {
            session.answer(turn): (number, turn)
            for number, session in enumerate(sessions)
            for turn in range(len(session.turns))
        }
        first = {places[each.call.answer]: each.first - each.call.arrival for each in served}
        return Run(first, engine.now, sum(each.call.output for each in served), engine.scheduler)


class Machine:
    """A small Llama on this machine, with a pool that holds a part of the sessions."""

    policies = CPU_POLICIES

    def __init__(self, config: ModelConfig, num_blocks: int):
        settings = EngineConfig(
            model="random", skip_tokenizer_init=True, dtype="float32", max_model_len=config.max_position_embeddings,
            max_num_seqs=AT_ONCE, max_num_batched_tokens=512, num_gpu_blocks_override=num_blocks, warm_up=True,
        )  # fmt: skip
        loaded = load_engine(settings, model=dummy_model(config, "float32", 0), progress=False).engine
        self.runner, self._scheduler = loaded.runner, loaded.scheduler
        self.block_size = loaded.limits.block_size
        self.pool_tokens = num_blocks * self.block_size
        self.block_swap_cost = loaded.scheduler.memory.swap_costs[0]

    def engine(self, policy: Policy, folder: Path | None = None) -> Engine:
        """Return an engine with an empty cache on the common runner, with the files of a folder."""
        model = self._scheduler
        pool, host = BlockPool(model.pool.num_blocks, model.pool.block_size), None
        if policy.host:
            assert model.host_pool is not None, "swap_space is not 0"
            num_blocks = min(model.host_pool.num_blocks, int(policy.host * pool.num_blocks))
            host = BlockPool(num_blocks, pool.block_size, enable_prefix_caching=False, copies_of=pool)
        scheduler = Scheduler(
            pool, model.limits, vocab_size=model.vocab_size, host_pool=host, preemption="recompute",
            block_swap_cost=self.block_swap_cost, tokens_beside_decodes=model.tokens_beside_decodes,
            moves_overlap=False, step_overhead=model.step_overhead, headroom=HEADROOM,
            pinned_share=EngineConfig.pinned_share,
        )  # fmt: skip
        if scheduler.memory.tier and folder is not None:
            names, most = self.runner.open_files(folder, FILE_BYTES, exact=False)
            scheduler.memory.tier.open_files(names, most, token_s=0.0)
        return Engine(scheduler, self.runner, max_in_flight=2, files=folder and self.runner)

    def run(self, sessions: Sequence[Session], policy: Policy, at_once: int = AT_ONCE) -> Run:
        """Run sessions with empty memory and an empty folder, some turns at once."""
        with tempfile.TemporaryDirectory() as folder:
            engine = self.engine(policy, Path(folder) / "kv" if policy.files else None)
            run = play(engine, sessions, policy.pin_s, at_once)
            self.runner.close_files()
        return run


def play(engine: Engine, sessions: Sequence[Session], pin_s: float, at_once: int, seed: int = 0) -> Run:
    """Run all turns in the order of their arrivals, without pauses.

    Args:
        at_once: maximum number of turns that run. The next one waits for the end of its session's last turn, too.
        seed: of the tokens of all texts.
    """
    coming = deque(in_order(sessions))
    histories: dict[int, list[int]] = {}
    started: dict[int, tuple[int, float]] = {}  # the running turn of a session
    first, num_tokens, begin = dict[tuple[int, int], float](), 0, time.perf_counter()
    while coming or started:
        while coming and len(started) < at_once and coming[0][0] not in started:
            number, turn = coming.popleft()
            session, each = sessions[number], sessions[number].turns[turn]
            history = histories.setdefault(number, tokens_of(engine, seed, session.kind, session.system))
            history += tokens_of(engine, seed, session.text + 2 * turn, each.message)
            params = SamplingParams(max_tokens=each.output, ignore_eos=True, temperature=0.0)
            started[number] = turn, time.perf_counter()
            engine.add(str(number), history, params, pin_s=pin_s if session.continues(turn) else 0.0)
        for delta in engine.step().deltas:
            number = int(delta.request_id)
            turn, start = started[number]
            first.setdefault((number, turn), time.perf_counter() - start)
            histories[number] += delta.token_ids
            num_tokens += len(delta.token_ids)
            if delta.finish_reason:
                del started[number]
    return Run(first, time.perf_counter() - begin, num_tokens, engine.scheduler)


def tokens_of(engine: Engine, seed: int, text: int, count: int) -> list[int]:
    """Return the tokens of a text."""
    return np.random.default_rng((seed, text)).integers(engine.scheduler.vocab_size, size=count).tolist()


def long_session(prompt: int, pool_tokens: int) -> list[Session]:
    """Return a session whose tenth turn has a prompt of some tokens, and others that fill the pool before it."""
    output = max(1, prompt // 100)
    lengths = [(prompt - 9 * output) // 10] * 9
    turns = [Turn(each, output, 10.0 if number else 0.0) for number, each in enumerate(lengths)]
    turns.append(Turn(prompt - 9 * output - sum(lengths), output, 200.0))
    count = math.ceil(FILLED * pool_tokens / prompt)
    arrivals = [100 + 100 * i / count for i in range(count)]  # turn 9 is at 80 s and turn 10 at 280 s, within PIN_S
    others = [Session(at, 0, 0, 100 + 2 * i, (Turn(prompt, output, 0.0),)) for i, at in enumerate(arrivals)]
    return [Session(0.0, 0, 0, 0, tuple(turns)), *others]


def medians(runs: Sequence[Run]) -> dict[str, float]:
    """Return the medians of the figures of some runs."""
    return {name: statistics.median(run.figures[name] for run in runs) for name in runs[0].figures}


def add_trace(
    report: Report, where: str, source: Simulation | Machine, agents: Agents, count: int, rate: float | None,
    rounds: int,
) -> None:  # fmt: skip
    """Add the rows of a trace, one for each policy.

    Args:
        rate: new sessions per second; None: all arrive at once, and do not pause.
    """
    if rate is None:
        sessions = replace(agents, most_pause_s=0.0).draw(count, math.inf, SEED)
    else:
        sessions = agents.draw(count, rate, SEED)
    runs: dict[Policy, list[Run]] = {policy: [] for policy in source.policies}
    for _ in range(rounds):
        for policy, found in runs.items():
            found.append(source.run(sessions, policy))
    for policy, found in runs.items():
        report.add(
            experiment="trace", where=where, rate=rate or "all at once", policy=policy.name, sessions=count,
            turns=sum(len(session.turns) for session in sessions), mean_prompt=mean_prompt(sessions),
            ideal_hits=ideal_hits(sessions), rounds=rounds, **medians(found),
        )  # fmt: skip


def add_tenth_turn(
    report: Report, where: str, source: Simulation | Machine, prompt: int, rounds: int, **options: int
) -> None:  # fmt: skip
    """Add the rows of the tenth turn of a session: after others for each policy, and directly after its ninth turn.

    Args:
        options: of the runs.
    """
    sessions = long_session(prompt, source.pool_tokens)
    cases = {policy.name: (sessions, policy) for policy in source.policies} | {"never evicted": (sessions[:1], POOL)}
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name].append(1e3 * source.run(*case, **options).first[0, 9])
    for name, times in found.items():
        report.add(
            experiment="turn 10", where=where, policy=name, prompt=prompt, rounds=rounds,
            ttft_ms=statistics.median(times), least_ms=min(times), most_ms=max(times),
        )  # fmt: skip


def add_simulated_cost(report: Report, simulation: Simulation, sessions: Sequence[Session]) -> None:
    """Add the row of prompts without repetition in the simulator."""
    without, within = (simulation.run(separated(sessions), policy).figures for policy in (POOL, HOST))
    report.add(
        experiment="no repetition", where="simulated", rounds=1, ratio=within["seconds"] / without["seconds"],
        ttft_ratio=within["ttft_ms"] / without["ttft_ms"], blocks_out=within["blocks_out"],
    )  # fmt: skip


def add_measured_cost(report: Report, machine: Machine, sessions: Sequence[Session], rounds: int) -> None:
    """Add the row of prompts without repetition on the CPU.

    Engines with and without a host compute each prompt in turn. They keep their full caches, so that each new block
    evicts one. The first prompts, which fill the caches, do not count.
    """
    prompts = separated(sessions)
    engines = {policy: machine.engine(policy) for policy in (POOL, HOST)}
    found: dict[Policy, list[list[Run]]] = {policy: [] for policy in engines}
    fill = math.ceil(machine.pool_tokens / (mean_prompt(prompts) * len(prompts)))
    for number in range(fill + rounds):
        for runs in found.values():
            runs.append([])
        for place, prompt in enumerate(prompts):
            for policy in list(engines)[:: 1 if place % 2 else -1]:
                found[policy][-1].append(play(engines[policy], [prompt], 0.0, 1, seed=1 + number))
    without, within = (
        [[run.seconds for run in runs] for runs in zip(*found[policy][fill:], strict=True)] for policy in (POOL, HOST)
    )  # of each prompt, in each round
    pairs = [y / x for xs, ys in zip(without, within) for x, y in zip(xs, ys, strict=True)]
    report.add(
        experiment="no repetition", where="CPU", rounds=rounds, ratio=statistics.median(pairs),
        least_ratio=sum(map(min, within)) / sum(map(min, without)),
        blocks_out=found[HOST][-1][-1].figures["blocks_out"],
    )  # fmt: skip


def publish(report: Report) -> None:
    """Publish a table for each experiment."""
    of = lambda name: [row for row in report.rows if row["experiment"] == name]
    facts = report.environment
    measures = ("hits", "ttft_ms", "ttft_p99_ms", "tokens_s", "blocks_out", "blocks_back", "blocks_read")
    workloads = list({(row["where"], row["rate"]): row for row in of("trace")}.values())
    report.publish(
        "Sessions of agents",
        f"`pool`: the prefix cache on the device only. `pins`: turns that another one follows pin their prefixes for "
        f"{PIN_S:g} s, in at most half of the pool. `host`: evicted blocks wait on the host, which has room for "
        f"{HOST_SHARE} times the pool; a small one has room for a quarter of it. `files`: blocks on the host are also "
        f"written to a folder, which is empty at first. A pool of {facts['simulated_pool_tokens']:,} tokens is "
        f"simulated, and one of {facts['cpu_pool_tokens']:,} measured. To move a block to the host and back costs as "
        f"much as {facts['simulated_swap_cost']:.2g} tokens of {facts['simulated_block_size']}, and "
        f"{facts['cpu_swap_cost']:.2g} of {facts['cpu_block_size']}.",
        "## Workloads",
        table(workloads, ("where", "rate", "sessions", "turns", "mean_prompt", "ideal_hits")),
        "`rate` is the number of new sessions per second; on the CPU it gives the order of the turns only. Sessions "
        "that arrive all at once do not pause, so that their throughput is that of the engine. "
        "`ideal_hits` is the share of prompt tokens that a cache without limits would find.",
        "## Trace",
        table(of("trace"), ("where", "rate", "policy", *measures)),
        "`hits` is the share of prompt tokens from the cache; first tokens are means and 99th percentiles; output "
        "tokens per second; blocks that went to the host, that returned, and that were read from files.",
        "## First token of turn 10 of a session",
        table(of("turn 10"), ("where", "prompt", "policy", "ttft_ms", "least_ms", "most_ms")),
        "Before it, other sessions have computed 1.25 times the tokens of the pool, except in the last case. For "
        f"{PROMPT:,} tokens, the CPU has a pool of twice the size.",
        f"## Prompts without repetition: time with a host over time without (limit {MAX_RATIO:g})",
        table(of("no repetition"), ("where", "rounds", "blocks_out", "ratio", "least_ratio", "ttft_ratio")),
        "On the CPU, `ratio` is the median over all prompts, each computed with and without a host in turn, and "
        "`least_ratio` compares the sums of each prompt's fastest rounds. In the simulator, `ratio` compares whole "
        "runs, and `ttft_ratio` mean first tokens.",
    )


def above(rows: Sequence[Row]) -> list[str]:
    """Return the places where moves cost more than the limit, by the medians and by the fastest rounds."""
    costs = [row for row in rows if row["experiment"] == "no repetition"]
    return [row["where"] for row in costs if min(row["ratio"], row.get("least_ratio", row["ratio"])) > MAX_RATIO]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "agents")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each policy runs on the CPU")
    args = parser.parse_args(argv)
    args.sessions, args.rates, args.cpu_sessions, args.scale, args.cpu_prompt = (
        250,
        (3.0, None),
        20,
        1 / 16,
        PROMPT // 8,
    )
    args.num_blocks, args.cost_rounds = 128, 6
    args.model = ModelConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4608,
    )  # fmt: skip
    if args.tiny:
        args.sessions, args.rates, args.cpu_sessions, args.scale, args.cpu_prompt = 8, (3.0, None), 5, 1 / 256, 200
        args.num_blocks, args.cost_rounds, args.rounds = 32, 1, 1
        args.model = replace(
            args.model, vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=400,
        )  # fmt: skip
    return args


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=args.tiny))
    agents, small = Agents(), Agents().scaled(args.scale)
    simulation, machine = Simulation(80_000), Machine(args.model, args.num_blocks)
    report.environment |= {
        "simulated_pool_tokens": simulation.pool_tokens, "cpu_pool_tokens": machine.pool_tokens,
        "simulated_swap_cost": simulation.deployment.block_swap_cost, "cpu_swap_cost": machine.block_swap_cost,
        "simulated_block_size": simulation.deployment.block_size, "cpu_block_size": machine.block_size,
    }  # fmt: skip
    add_simulated_cost(report, simulation, agents.draw(args.sessions // 3, args.rates[0], SEED))
    add_tenth_turn(report, "simulated", simulation, PROMPT, 1)
    for rate in args.rates:
        add_trace(report, "simulated", simulation, agents, args.sessions, rate, 1)
    add_measured_cost(report, machine, small.draw(args.cpu_sessions // 5, 1.0, COST_SEED), args.cost_rounds)
    add_tenth_turn(report, "CPU", machine, args.cpu_prompt, args.rounds, at_once=1)
    if not args.tiny:
        long = Machine(replace(args.model, max_position_embeddings=PROMPT + 1_000), 2 * args.num_blocks)
        add_tenth_turn(report, "CPU", long, PROMPT, 1, at_once=1)
    add_trace(report, "CPU", machine, small, args.cpu_sessions, args.rates[0], args.rounds)
    publish(report)
    for where in above(report.rows):
        print(f"above the limit: {where}")
    return int(bool(above(report.rows)))


if __name__ == "__main__":
    sys.exit(main())

"""How much memory shared blocks save, and how full the blocks are: real scheduler, real allocator, synthetic requests.

    python benchmarks/paper/sharing.py --out results
    python benchmarks/paper/sharing.py --model demo        a real model's beams, on lengths that it has room for
    python benchmarks/paper/sharing.py --tiny              few requests, to see that it works

The blocks in use don't depend on the text of tokens, so no model runs by default and any machine will do. Beams
are the exception: they share more the sooner they descend from one of them again. Their candidates are drawn as peaked
as a language model's (`jpaged.simulator.engine.Candidates`); `--model demo` takes those of a model.

A saving is PagedAttention's (arXiv:2309.06180, Fig. 15): blocks that sharing saves over blocks without it, averaged
over steps. Lengths are log-normal with the paper's means and a standard deviation of `--spread` means. As in the paper,
all outputs of a request have one length. The pool is the paper's for a model of 13B on an A100: 15.7K tokens. All
requests wait from the start; only steps under load count: while others wait, and after a quarter of them has ended, for
the first ones are all of one age.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.plots import plot
from benchmarks.shared.results import Report, Row, script_parser, table
from jpaged.bench.workload import DATASETS, Dataset
from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.plan import Done, Sample, StepPlan, StepResult
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine, MakeMasks, Pending, Runner
from jpaged.simulator.engine import Candidates

POOL_TOKENS = 15_700
DEMO_POOL_TOKENS = 2048
LIMITS = Limits(max_model_len=2048, max_num_seqs=2048, max_num_batched_tokens=2048)
UTILIZATION = 0.963  # the paper's, ShareGPT
# By kind and dataset, of widths 2, 4 and 6; of ShareGPT the paper gives the range only.
PAPER: dict[tuple[str, str], Sequence[float]] = {
    ("parallel", "Alpaca"): (0.0609, 0.0853, 0.0979),
    ("beam", "Alpaca"): (0.3756, 0.5313, 0.5516),
    ("parallel", "ShareGPT"): (0.162, 0.305),
    ("beam", "ShareGPT"): (0.443, 0.663),
}
WIDTHS = (2, 4, 6)
SYSTEM_PROMPTS = {"1-shot": 80, "5-shot": 341}  # of the paper's translations, in tokens
VOCAB = 32_000
Request = tuple[list[int], SamplingParams | BeamSearchParams]


class Usage(NamedTuple):
    """The tokens and blocks of some sequences, each counted once; and the blocks without sharing."""

    tokens: int
    blocks: int
    unshared: int

    @property
    def saving(self) -> float:
        return 1 - self.blocks / self.unshared

    def utilization(self, block_size: int) -> float:
        return self.tokens / (self.blocks * block_size)


def usage(held: Iterable[tuple[Sequence[int], int]], block_size: int) -> Usage:
    """Of sequences, each with its block ids and how many tokens it has stored in them."""
    filled: dict[int, int] = {}
    unshared = 0
    for block_ids, tokens in held:
        unshared += len(block_ids)
        for index, block_id in enumerate(block_ids):
            filled[block_id] = max(filled.get(block_id, 0), min(block_size, tokens - index * block_size))
    return Usage(sum(filled.values()), len(filled), unshared)


class Watch:
    """A runner that records the blocks in use and the number of sequences of each step under load."""

    def __init__(self, scheduler: Scheduler, runner: Runner, calm: int):
        self.scheduler, self.runner, self.calm = scheduler, runner, calm
        self.usages: list[Usage] = []
        self.running: list[int] = []

    def dispatch(self, plan: StepPlan, make_masks: MakeMasks | None = None) -> Pending:
        scheduler = self.scheduler
        if scheduler.waiting and len(scheduler.requests) <= self.calm:
            branches = [branch for request in scheduler.running for branch in request.live]
            held = [(each.table.block_ids[0], each.num_computed_tokens) for each in branches]
            self.usages.append(usage(held, scheduler.pool.block_size))
            self.running.append(len(branches))
        return self.runner.dispatch(plan, make_masks)

    def recover(self) -> None:
        self.runner.recover()


class RandomRunner:
    """Gives random tokens, and to beams the simulator's candidates."""

    def __init__(self, seed: int = 0):
        self._rng, self._candidates = random.Random(seed), Candidates(seed)
        self._params: dict[int, SamplingParams | BeamSearchParams] = {}  # of each row

    def dispatch(self, plan: StepPlan, make_masks: MakeMasks | None = None) -> Done:
        self._params |= {row: self._params[source] for source, row in plan.row_copies}
        self._params |= {admitted.row: admitted.params for admitted in plan.admitted}
        rows = [row for row, _, _, num_samples in plan.rows for _ in range(num_samples)]
        return Done(StepResult([self._sample(self._params[row]) for row in rows]))

    def recover(self) -> None:
        """Nothing is computed, so nothing is lost."""

    def _sample(self, params: SamplingParams | BeamSearchParams) -> Sample:
        token = self._rng.randrange(VOCAB - max(WIDTHS))
        if isinstance(params, BeamSearchParams):
            return self._candidates.of(token, params.beam_width)
        return Sample(token, 0.0)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


class Lab:
    """Runs requests through engines of its own.

    Args:
        texts: a prompt of so many tokens, unlike any other.
        most: tokens of a prompt, and of an output.
    """

    def __init__(self, report: Report, args: argparse.Namespace, runner: Runner, vocab_size: int = VOCAB,
                 texts: Any = random_prompt, pool_tokens: int = POOL_TOKENS, most: tuple[int, int] = (1024, 1024),
                 limits: Limits = LIMITS):  # fmt: skip
        self.report, self.args, self.runner, self.vocab_size, self.texts = report, args, runner, vocab_size, texts
        self.pool_tokens, self.most, self.limits = pool_tokens, most, limits

    def requests(self, dataset: Dataset, kind: str, width: int, system: int = 0) -> list[Request]:
        """As many as fill the pool several times, each with a prompt of its own after a common one."""
        # Beams hold hardly more than one output does.
        per_request = dataset.prompt + (1 if kind == "beam" else width) * dataset.output / 2
        count = max(self.args.least, round(self.args.turnovers * self.pool_tokens / per_request))
        lengths = dataset._replace(spread=self.args.spread).lengths(count, most=self.most)
        rng = random.Random(1)
        common = self.texts(rng, system)

        def params(tokens: int) -> SamplingParams | BeamSearchParams:
            if kind == "beam":
                return BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
            return SamplingParams(n=width, max_tokens=tokens, ignore_eos=True, seed=rng.getrandbits(64))

        return [(common + self.texts(rng, prompt), params(output)) for prompt, output in lengths]

    def run(self, requests: Sequence[Request], block_size: int, *, prefixes: bool = False) -> tuple[Row, Scheduler]:
        """Return the average use over the steps under load. Requests share with each other only if `prefixes`."""
        pool = BlockPool(self.pool_tokens // block_size, block_size, enable_prefix_caching=prefixes)
        scheduler = Scheduler(pool, self.limits, vocab_size=self.vocab_size)
        watch = Watch(scheduler, self.runner, calm=len(requests) * 3 // 4)
        engine = Engine(scheduler, watch)
        for i, (prompt, params) in enumerate(requests):
            engine.add(str(i), prompt, params)
        while engine.has_work:
            engine.step()
        if not watch.usages:
            raise SystemExit(f"{len(requests)} requests never filled the pool: --turnovers must be larger")
        outputs = [params.max_tokens or 0 for _, params in requests]
        return dict(
            saving=statistics.fmean(each.saving for each in watch.usages),
            utilization=statistics.fmean(each.utilization(block_size) for each in watch.usages),
            running=statistics.fmean(watch.running), steps=len(watch.usages), requests=len(requests),
            prompt=statistics.fmean(len(prompt) for prompt, _ in requests), output=statistics.fmean(outputs),
            preemptions=scheduler.num_preemptions, status="ok",
        ), scheduler  # fmt: skip

    def sharing(self, names: Sequence[str], kinds: Sequence[str] = ("parallel", "beam")) -> None:
        """Outputs of one request share its prompt, beams their ancestors."""
        for kind in kinds:
            for name in names:
                paper = PAPER[kind, name]
                for i, width in enumerate(WIDTHS):
                    row, _ = self.run(self.requests(DATASETS[name], kind, width), 16)
                    known = {"paper": paper[i]} if len(paper) == len(WIDTHS) else {}
                    self.report.add(
                        experiment="sharing", kind=kind, dataset=name, width=width, **row, **known,
                        paper_low=min(paper), paper_high=max(paper),
                    )  # fmt: skip

    def prefix(self) -> None:
        """Requests of Alpaca's lengths, each after one system prompt. `found` is the share of all prompts' tokens that
        the prefix cache had."""
        for name, tokens in SYSTEM_PROMPTS.items():
            row, scheduler = self.run(self.requests(DATASETS["Alpaca"], "parallel", 1, tokens), 16, prefixes=True)
            found = scheduler.prefix_hits / scheduler.prefix_queries
            self.report.add(experiment="prefix", system_prompt=name, system_tokens=tokens, found=found, **row)

    def utilization(self, names: Sequence[str], block_sizes: Sequence[int]) -> None:
        """Tokens stored over tokens that there is room for in the blocks that are held: one output per request."""
        for name in names:
            for block_size in block_sizes:
                row, _ = self.run(self.requests(DATASETS[name], "parallel", 1), block_size)
                known = {"paper": UTILIZATION} if (name, block_size) == ("ShareGPT", 16) else {}
                self.report.add(experiment="utilization", dataset=name, block_size=block_size, **row, **known)
                if block_size == 16 and row["utilization"] < 0.96:
                    self.report.say(f"{name} at block size 16: {row['utilization']:.1%} is UNDER 96 %")


def demo_lab(report: Report, args: argparse.Namespace) -> Lab:
    """With the demo model, on texts of its world. It has room for short requests only, and a processor time for few;
    in so small a pool even random tokens save otherwise: `--pool-tokens` is for the comparison."""
    from jpaged.llm import LLM
    from jpaged.tokenizer import encode
    from tools.demo_model.corpus import told_story

    limits = Limits(512, 64, 256)
    llm = LLM(
        progress=False, max_model_len=limits.max_model_len, max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens, num_gpu_blocks_override=args.pool_tokens // 16,
    )  # fmt: skip

    def story(rng: random.Random, length: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += encode(llm.tokenizer, told_story(rng))
        return tokens[:length]

    runner = llm.engine.runner
    return Lab(report, args, runner, runner.vocab_size, story, args.pool_tokens, (200, 300), limits)


COLUMNS = {
    "sharing": ("kind", "dataset", "width", "saving", "paper", "paper_low", "paper_high", "utilization", "running",
                "requests", "steps", "prompt", "output", "preemptions"),
    "prefix": ("system_prompt", "system_tokens", "saving", "found", "utilization", "running", "requests", "steps"),
    "utilization": ("dataset", "block_size", "utilization", "paper", "running", "requests", "steps", "prompt",
                    "output", "preemptions"),
}  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "sharing")
    parser.add_argument("--tiny", action="store_true", help="few requests")
    parser.add_argument("--model", choices=("random", "demo"), default="random", help="source of the tokens")
    parser.add_argument("--pool-tokens", type=int, help=f"default {POOL_TOKENS}; of the demo model {DEMO_POOL_TOKENS}")
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of lengths, in means (default 1)")
    parser.add_argument("--turnovers", type=float, default=8.0, help="how often requests fill the pool (default 8)")
    parser.add_argument("--least", type=int, default=64, help="requests at least (default 64)")
    args = parser.parse_args(argv)
    args.pool_tokens = args.pool_tokens or (DEMO_POOL_TOKENS if args.model == "demo" else POOL_TOKENS)
    if args.tiny:
        args.turnovers, args.least, args.pool_tokens = 2.0, 8, 1600
    return args


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    # No figure here depends on the device.
    report = Report(args.out / "results.json", environment(open_device(tiny=True), args.tiny))
    report.environment |= {"model": args.model, "spread": args.spread, "pool_tokens": args.pool_tokens}
    if args.model == "demo":
        lab = demo_lab(report, args)
        lab.sharing(["Alpaca"])
    else:
        most = min(1024, args.pool_tokens // 8)  # six outputs of one request must fit
        lab = Lab(report, args, RandomRunner(), pool_tokens=args.pool_tokens, most=(most, most))
        lab.sharing(["Alpaca", "ShareGPT"])
        lab.prefix()
        lab.utilization(["ShareGPT", "Alpaca"], [16] if args.tiny else [8, 16, 32, 64, 128])
    of = lambda name: [row for row in report.rows if row["experiment"] == name]
    tables = [f"## {name}\n\n{table(of(name), columns)}" for name, columns in COLUMNS.items() if of(name)]
    report.publish("Sharing", *tables)
    plot(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

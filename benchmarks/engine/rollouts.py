"""Rollouts of a Llama of 110 million parameters on a CPU beside transformers: eight samples for each of 16 prompts.

    python benchmarks/engine/rollouts.py --out results                            jpaged alone
    python benchmarks/engine/rollouts.py --peer PYTHON --out results              beside transformers, some minutes

PYTHON is an interpreter with torch and transformers. The prompts share 128 of their 160 tokens. Parameters are random
and float32, and every output has 32 tokens. jpaged, transformers' `generate` and its continuous batching run in turn;
figures are medians over the rounds.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engine.cpu_serving import CONFIG
from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from jpaged import LLM, ModelConfig, SamplingParams
from jpaged.models.checkpoint import dummy_model, save_safetensors
from jpaged.rl import RolloutWorker

NUM_PROMPTS, GROUP, TOKENS, SHARED, OWN = 16, 8, 32, 128, 32
TINY = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip
Run = Callable[[list[list[int]]], float]


def prompts_of(number: int, vocab_size: int) -> list[list[int]]:
    """Prompts with a common beginning, which differs from round to round."""
    token = lambda i: 10 + (number * 7919 + i * i * 104_729) % (vocab_size - 10)
    return [[token(i) for i in range(SHARED)] + [token(1000 * (p + 1) + i) for i in range(OWN)]
            for p in range(NUM_PROMPTS)]  # fmt: skip


class Peer:
    """Process of `rollouts_peer.py`."""

    def __init__(self, python: str, model: Path):
        script = Path(__file__).with_name("rollouts_peer.py")
        self.process = subprocess.Popen(
            [python, str(script), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.versions = self._answer()

    def run(self, way: str) -> Run:
        def seconds(prompts: list[list[int]]) -> float:
            task = {"way": way, "prompts": prompts, "n": GROUP, "tokens": TOKENS}
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
            answer = self._answer()
            assert answer["count"] == NUM_PROMPTS * GROUP * TOKENS, answer
            return float(answer["seconds"])

        return seconds

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the peer ended with status {self.process.wait()}")


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    parser = script_parser(__doc__, "rollouts")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter with torch and transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="one small layer, to see that it works")
    args = parser.parse_args(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), args.tiny))
    hf = CONFIG | (TINY if args.tiny else {})
    model = dummy_model(ModelConfig.from_hf(hf), "float32", seed=0)
    sampling = SamplingParams(n=GROUP, temperature=1.0, max_tokens=TOKENS, ignore_eos=True)
    worker = RolloutWorker(
        LLM(model, progress=False, max_num_seqs=NUM_PROMPTS * GROUP, max_model_len=256, swap_space=0)
    )

    def own(prompts: list[list[int]]) -> float:
        start = time.perf_counter()
        found = worker.generate(prompts, sampling)
        assert found.is_output.sum() == NUM_PROMPTS * GROUP * TOKENS
        return time.perf_counter() - start

    runs: dict[str, Run] = {"jpaged": own}
    with tempfile.TemporaryDirectory() as folder:
        if args.peer:
            (Path(folder) / "config.json").write_text(json.dumps(hf))
            save_safetensors(model, Path(folder))
            peer = Peer(args.peer, Path(folder))
            report.environment["peer"] = peer.versions
            runs |= {"transformers, generate": peer.run("generate"), "continuous batching": peer.run("continuous")}
        seconds: dict[str, list[float]] = defaultdict(list)
        for number in range(-1, args.rounds):
            for name, run in runs.items():
                took = run(prompts_of(number + 1, hf["vocab_size"]))
                report.say(f"round {number + 1} of {args.rounds}, {name}: {took:.1f} s")
                if number >= 0:
                    seconds[name].append(took)
    for name, times in seconds.items():
        ratios = [other / own for other, own in zip(times, seconds["jpaged"])]
        report.add(experiment="rollouts", engine=name, seconds=statistics.median(times), times=times,
                   tokens_per_s=NUM_PROMPTS * GROUP * TOKENS / statistics.median(times),
                   over_jpaged=statistics.median(ratios), status="ok")  # fmt: skip
    report.publish("Rollouts", table(report.rows, ("engine", "seconds", "tokens_per_s", "over_jpaged")))
    return 0


if __name__ == "__main__":
    sys.exit(main())

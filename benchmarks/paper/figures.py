"""The paper's figures, and lookups in the results of the evaluation."""

from collections.abc import Sequence
from typing import Any

from benchmarks.paper.policies import POLICIES

Row = dict[str, Any]

# arXiv:2309.06180: Fig. 2, shares of tokens, reserved, internal, external. Of vLLM it gives the first only.
MEMORY = {
    "orca-max": (0.204, 0.133, 0.573, 0.089),
    "orca-pow2": (0.268, 0.179, 0.136, 0.416),
    "orca-oracle": (0.382, 0.252, 0.0, 0.366),
    "paged": (0.963, 0.0, 0.0, 0.0),
}
# Fig. 13: mean numbers of requests in a batch, OPT-13B.
BATCHED = {
    "sharegpt": {"orca-max": 7.00, "orca-pow2": 9.81, "orca-oracle": 13.62, "paged": 30.42},
    "alpaca": {"orca-max": 7.00, "orca-pow2": 43.24, "orca-oracle": 72.75, "paged": 132.44},
}
WIDTHS = {"alpaca": 1.3, "alpaca, beam 6": 2.3}  # Fig. 14: times Orca (Oracle)'s rate
PREFIXES = {"1-shot": 1.67, "5-shot": 3.58}  # Fig. 16: times Orca (Oracle)'s rate
CHATBOT = 2.0  # Fig. 17: times the rate of each Orca
ORDER = ("static", "static-paged", "orca-max", "orca-pow2", "orca-oracle", "unshared", "paged", "prefix", "radix")
ABLATION = {
    ("static", "contiguous"): "static", ("static", "paged"): "static-paged",
    ("continuous", "contiguous"): "orca-max", ("continuous", "paged"): "paged",
}  # fmt: skip


class Figures:
    """The rows of an evaluation."""

    def __init__(self, content: dict[str, Any]):
        self.environment, self.rows = content["environment"], content["rows"]

    @property
    def date(self) -> str:
        return self.environment["date"][:10]

    def measured(self, experiment: str) -> list[Row]:
        return [row for row in self.rows if row["experiment"] == experiment]

    def points(self, model: str, workload: str, block_size: int = 16) -> list[Row]:
        """Simulated points of all policies."""
        return [
            row for row in self.measured("simulated")
            if (row["model"], row["workload"]) == (model, workload)
            and row["block_size"] == (POLICIES[row["policy"]].block_size or block_size)
        ]  # fmt: skip

    def sustained(self, model: str, workload: str, policy: str, block_size: int = 16) -> float:
        """Simulated requests per second at the latency limit."""
        size = POLICIES[policy].block_size or block_size
        key = model, workload, policy, size
        return next(
            row["rate"] for row in self.measured("sustained")
            if (row["model"], row["workload"], row["policy"], row["block_size"]) == key
        )  # fmt: skip

    def ratio(self, model: str, workload: str, over: str, policy: str = "paged") -> float:
        """Sustained rate of a policy over that of another one."""
        return self.sustained(model, workload, policy) / self.sustained(model, workload, over)

    def loaded(self, model: str, workload: str, policy: str) -> Row:
        """The simulated point of the highest rate: requests wait for memory in most of its steps."""
        return max(
            (row for row in self.points(model, workload) if row["policy"] == policy), key=lambda row: row["rate"]
        )

    def overloaded(self, policy: str, workload: str = "sharegpt") -> Row:
        """The measured point of the highest rate."""
        rows = [r for r in self.measured("measured") if (r["policy"], r["workload"]) == (policy, workload)]
        return max(rows, key=lambda row: row["rate"])

    def memory_simulated(self) -> dict[str, dict[str, float]]:
        return {name: self.loaded("opt-13b", "sharegpt", name)["memory"] for name in MEMORY}

    def memory_measured(self) -> dict[str, dict[str, float]]:
        nothing = dict(tokens=0.0, reserved=0.0, internal=0.0, external=0.0)
        return {name: self.overloaded(name)["memory"] or nothing for name in MEMORY}

    def ablation_simulated(self) -> dict[tuple[str, str], float]:
        return {kind: self.sustained("opt-13b", "sharegpt", policy) for kind, policy in ABLATION.items()}

    def ablation_measured(self) -> dict[tuple[str, str], float]:
        of = {row["policy"]: row["requests_per_s"] for row in self.measured("ablation")}
        return {kind: of[policy] for kind, policy in ABLATION.items()}

    def sizes_simulated(self, workload: str) -> dict[int, float]:
        rows = [
            r
            for r in self.measured("sustained")
            if (r["model"], r["workload"], r["policy"]) == ("opt-13b", workload, "paged")
        ]
        return dict(sorted((row["block_size"], row["rate"]) for row in rows))

    def sizes_measured(self, workload: str) -> dict[int, float]:
        rows = [row for row in self.measured("block size") if row["workload"] == workload]
        return dict(sorted((row["block_size"], row["normalised"]) for row in rows))

    def share_of(self, experiment: str, **wanted: Any) -> Row:
        """The first row of an experiment with some values."""
        return next(r for r in self.measured(experiment) if all(r.get(k) == v for k, v in wanted.items()))


def span(values: Sequence[float], form: str = "{:.1f}") -> str:
    """The range of some values."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}-{high}"

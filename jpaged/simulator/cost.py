"""Cost models of a step: the roofline of a GPU, or a table of measured steps."""

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from jpaged.core.plan import StepPlan
from jpaged.simulator.gpu import Gpu
from jpaged.simulator.shape import ModelShape

# Shares of the data sheets that good kernels reach: in decode steps 0.69 to 0.78 of the bandwidth (gpt-fast on an A100,
# Hazy Research's megakernel on an H100), in prompts 0.55 to 0.75 of the operations (FlashAttention-3 on an H100).
BANDWIDTH_SHARE, FLOPS_SHARE = 0.75, 0.6
ALL_REDUCE_S = 15e-6  # latency of an all-reduce within a host; there are two in each layer


class StepLoad(NamedTuple):
    """Work of a step.

    Attributes:
        rows: scheduled sequences.
        tokens: computed tokens.
        samples: sampled tokens.
        context: tokens whose KV attention reads, of all rows.
        pairs: pairs of a query and a key, of all rows.
    """

    rows: int
    tokens: int
    samples: int
    context: int
    pairs: float

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        """Return the work of a plan."""
        if not plan.rows:
            return cls(0, 0, 0, 0, 0.0)
        _, starts, counts, drawn = zip(*plan.rows)
        tokens = sum(counts)
        context = sum(starts) + tokens
        pairs: float = context
        if tokens > len(counts):
            pairs = sum(count * (start + 0.5 * (count + 1)) for start, count in zip(starts, counts))
        return cls(len(counts), tokens, sum(drawn), context, pairs)


class StepCost(Protocol):
    """Cost model of a step."""

    def seconds(self, load: StepLoad) -> float:
        """Return the duration of a step."""


@dataclass(frozen=True)
class Roofline:
    """Costs of a model on one or several GPUs, from their bandwidth and operations per second.

    A step has two parts, the weight matrices and attention. Each takes the larger one of its times for bytes and for
    operations. Both are divided among the GPUs as in tensor parallelism, with two all-reduces in each layer and one of
    the embeddings.

    Attributes:
        weight_bits: bits of a weight of the linear layers and experts, with its share of scales. Products of all kinds
            run at the rate of 16-bit operations, because weights are converted and activations are not quantized.
        embedding_bits: the same of the embedding and the output matrix.
    """

    gpu: Gpu
    shape: ModelShape
    num_gpus: int = 1
    weight_bits: float = 16
    kv_dtype_bytes: int = 2
    bandwidth_share: float = BANDWIDTH_SHARE
    flops_share: float = FLOPS_SHARE
    launch_s: float = 0.0005  # of a step outside the GPU's work
    embedding_bits: float = 16

    @property
    def source(self) -> str:
        """Origin of the costs, for the heading of a table."""
        gpus = self.gpu.name if self.num_gpus == 1 else f"{self.num_gpus} x {self.gpu.name}"
        return (
            f"roofline of {gpus}: {self.bandwidth_share:.0%} of {self.gpu.bandwidth / 1e12:g} TB/s and "
            f"{self.flops_share:.0%} of {self.gpu.flops / 1e12:g} TFLOP/s, {1e3 * self.launch_s:g} ms per step"
        )

    def seconds(self, load: StepLoad) -> float:
        """Return the duration of a step."""
        shape, gpus = self.shape, self.num_gpus
        bandwidth, flops = self.gpu.bandwidth * self.bandwidth_share * gpus, self.gpu.flops * self.flops_share * gpus
        grouped = self.gpu.multiplies(gpus)
        experts = shape.expert_params * shape.experts_read(load.tokens, grouped) / max(1, shape.num_experts)
        read = (shape.linear_params + experts) * self.weight_bits + shape.output_params * self.embedding_bits
        products = shape.layer_products(grouped) * load.tokens + shape.output_params * load.samples
        matrices = max(read / 8 / bandwidth, 2 * products / flops)
        seen = shape.share_seen(max(1.0, load.context / max(1, load.rows)))
        attention = seen * max(
            shape.kv_bytes(self.kv_dtype_bytes, gpus) * load.context / bandwidth,
            4 * shape.num_attention_layers * shape.num_heads * shape.head_dim * load.pairs / flops,
        )
        attention += 2 * shape.state_bytes * load.rows / bandwidth  # states are read and written once in a step
        reduces = 0.0
        if gpus > 1:  # all-reduces of the activations, of which each GPU sends and receives about two copies
            sent = 2 * (gpus - 1) / gpus * load.tokens * shape.hidden_size * 2
            reduces = (2 * shape.num_layers + 1) * (ALL_REDUCE_S + sent / self.gpu.link_bandwidth)
        return self.launch_s + matrices + attention + reduces


class MeasuredStep(NamedTuple):
    """Duration of steps of one padded shape: `base` + `per_token` for each token of context, in seconds."""

    num_tokens: int
    num_seqs: int
    decode: bool
    base: float
    per_token: float


class CostTable:
    """Costs of steps as a device took for them, by padded shape.

    Args:
        steps: shapes of decode steps (one token per sequence) and of steps with prompts.
        source: device, model and date of the measurement.

    Raises:
        ValueError: there is no shape of one of both kinds, or a number is none or too small.
    """

    def __init__(self, steps: Sequence[MeasuredStep], source: str):
        for step in steps:
            _check(step)
        self.steps, self.source = tuple(sorted(steps)), source
        self._kinds = {kind: [step for step in self.steps if step.decode == kind] for kind in (True, False)}
        if not all(self._kinds.values()):
            raise ValueError("costs: a table needs steps of both kinds, decode steps and steps with prompts")
        self._sizes = {kind: [step.num_tokens for step in steps] for kind, steps in self._kinds.items()}

    def seconds(self, load: StepLoad) -> float:
        """Return the duration of a step: of the smallest shape that holds it, or in proportion to the largest."""
        decode, num_seqs = load.tokens == load.rows == load.samples, max(load.rows, load.samples)
        steps = self._kinds[decode]
        for step in steps[bisect_left(self._sizes[decode], load.tokens) :]:
            if step.num_seqs >= num_seqs:
                return step.base + step.per_token * load.context
        largest = steps[-1]
        times = max(load.tokens / largest.num_tokens, num_seqs / largest.num_seqs)
        return times * largest.base + largest.per_token * load.context

    def save(self, path: Path) -> None:
        """Write the table as JSON."""
        content = {"source": self.source, "steps": [step._asdict() for step in self.steps]}
        path.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the table of a file.

        Raises:
            ValueError: the file holds no table; the message has its path.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls([MeasuredStep(**step) for step in content["steps"]], str(content["source"]))
        except KeyError as error:
            raise ValueError(f"costs: {path} holds no table of steps: {error} is missing") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"costs: {path} holds no table of steps: {error}") from error


def _check(step: MeasuredStep) -> None:
    for name, value in step._asdict().items():
        whole, least = name.startswith("num_"), 1 if name.startswith("num_") else 0
        if name == "decode":
            if type(value) is not bool:
                raise ValueError(f"decode: must be true or false, not {value!r}")
        elif type(value) not in ((int,) if whole else (int, float)) or not least <= value < math.inf:
            raise ValueError(f"{name}: must be at least {least}, not {value!r}")
    if not step.base:
        raise ValueError("base: must be above 0")

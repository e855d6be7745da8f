"""Smoke cells: one kernel on one small input, compared with numpy, in a process of its own."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HEAD_DIMS = (128, 64)
# Splits are 512 tokens for contexts up to 16,384, and longer for longer contexts.
OPS: dict[str, dict[str, Any]] = {
    "decode, 1 split": dict(contexts=(1, 16, 17, 0, 64, 65, 500, 512)),
    "decode, 2 to 4 splits": dict(contexts=(513, 1000, 1024, 1025, 2048)),
    "decode, more splits": dict(contexts=(2049, 5000, 17000)),
    "ragged, prompts": dict(contexts=(1, 63, 0, 64, 200, 1000), q_lens=(1, 63, 0, 64, 200, 130)),
    "ragged, mixed": dict(contexts=(1, 513, 1000, 2100, 600), q_lens=(1, 1, 1, 1, 100)),
    "write": {},
    "write, rope, 3 KV heads": dict(num_heads=3, num_kv_heads=3),
    "copy": {},
}
TINY: dict[str, dict[str, Any]] = {
    "decode, 1 split": dict(contexts=(1, 17, 0)),
    "decode, 2 to 4 splits": dict(contexts=(513,)),
    "decode, more splits": dict(contexts=(2049,)),
    "ragged, prompts": dict(contexts=(1, 20), q_lens=(1, 7)),
    "ragged, mixed": dict(contexts=(30, 20), q_lens=(1, 7)),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One check of one implementation.

    Attributes:
        op: a key of `OPS`.
        contexts, q_lens: of the sequences of an attention op; `q_lens` None is decode.
        tiles: fields of the kernel's configuration that differ from those in use.
    """

    op: str
    implementation: str
    head_dim: int
    block_size: int = 16
    num_heads: int = 8
    num_kv_heads: int = 2
    contexts: Sequence[int] = ()
    q_lens: Sequence[int] | None = None
    tiles: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.implementation}, {self.op}, head dim {self.head_dim}"

    @property
    def row(self) -> dict[str, Any]:
        return dict(experiment="smoke", implementation=self.implementation, op=self.op, head_dim=self.head_dim)


def cells(tiny: bool) -> Iterator[Cell]:
    """Return all cells, the head dim and the implementation of most models first."""
    for head_dim in HEAD_DIMS[1:] if tiny else HEAD_DIMS:
        for implementation in ("reference",) if tiny else ("mosaic", "triton"):
            for op, fields in OPS.items():
                yield Cell(op, implementation, head_dim, **fields | (TINY.get(op, {}) if tiny else {}))


def run(options: dict[str, Any], send: Any) -> None:
    """Check a cell and send its row."""
    from benchmarks.kernels.expected import WrongOutput
    from benchmarks.kernels.implementations import Unsuitable
    from benchmarks.shared.device import open_device, prepare_environment

    cell, row = Cell(**options["cell"]), dict(options["row"])
    prepare_environment()
    send("beat", "jax imported")
    device = open_device(options["tiny"])
    send("beat", "device opened")
    start = time.monotonic()
    try:
        row |= dict(error=_check(cell, device), status="ok")
    except Unsuitable as error:
        row |= dict(status="skipped", reason=str(error))
    except WrongOutput as error:
        row |= dict(status="wrong", reason=str(error))
    except Exception as error:
        row |= dict(status="failed", reason=f"{type(error).__name__}: {error}"[:600])
    send("row", row | dict(seconds=time.monotonic() - start))


def _check(cell: Cell, device: Any) -> float:
    """Return the largest relative error. Raises WrongOutput and Unsuitable."""
    from benchmarks.kernels import correctness
    from benchmarks.kernels.implementations import choose, retiled
    from benchmarks.kernels.workloads import Shape

    shape = Shape(cell.head_dim, cell.block_size, cell.num_heads, cell.num_kv_heads, "bfloat16")
    kernels = choose(cell.implementation, device, shape)
    if cell.tiles:
        kernels = retiled(kernels, cell.tiles)
    if cell.op == "copy":
        return correctness.check_copy(kernels, shape)
    if cell.op.startswith("write"):
        return correctness.check_write(kernels, shape, None, rope="rope" in cell.op)
    return correctness.check_attention(kernels, correctness.Case(shape, cell.contexts, cell.q_lens))

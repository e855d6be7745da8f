"""The parts of each call of the suite, their shares of its time, and the times that the plan rests on.

A part may take its share of the budget and all the time that the parts before it left over; then its processes are
killed. `expected_s` is the time of a part in which nothing goes wrong.

`COMPILE_S` was measured by compiling for an H200 on two CPU cores, with jax 0.11.2 and no GPU, by
`python -m tests.benchmarks.compile_times`: the slower of two runs. `START_S` was measured on the same cores.
`DEVICE_S`, `PEERS_S` and `MEASURE_S` need a GPU: they are allowances, not measurements.
"""

from benchmarks.suite.cells import Cell, cells
from benchmarks.suite.jobs import HEARTBEAT_S, KILL_S

BUDGET_S = 540.0
CLOSING_S = 10.0  # for plots and the last report
AT_ONCE = 4  # smoke cells

COMPILE_S = {
    "mosaic decode": 2.3, "mosaic ragged": 5.5, "mosaic write": 0.8, "mosaic copy": 0.4,
    "triton decode": 1.5, "triton ragged": 1.6, "triton write": 0.2, "triton copy": 0.4,
    "mosaic decode, 128 calls": 4.6, "mosaic ragged, 8 calls": 6.5,
    "triton decode, 128 calls": 1.4, "triton ragged, 8 calls": 1.4,
    "Llama-3.1-8B, 32 layers, 64 sequences": 76.5, "Llama-3.1-8B, the same with Triton": 13.1, "its sampler": 9.1,
    "demo model, all steps": 82.2,
}  # fmt: skip
START_S = 2.5  # a process until jax and the benchmarks are imported
DEVICE_S = 5.0  # until jax has opened the device
MEASURE_S = 3.6  # one case of Mosaic and of everything beside it: running, comparing with numpy, timing
PEERS_S = 10.0  # compilation of the other implementations of one case

# Shares in seconds, in the order in which the parts run.
CALLS: dict[int, dict[str, float]] = {
    1: {
        "smoke": 230, "demo": 25, "ladder": 60, "ceilings": 15, "attention": 110, "step": 40, "profile": 30,
        "check": 20,
    },
    2: {"check": 530},
    3: {"ceilings": 15, "sweep": 335, "paging": 180},
    4: {"tune": 380, "throughput": 150},
}  # fmt: skip


def cell_s(cell: Cell) -> float:
    """Return the time of a green cell."""
    kind = cell.op.partition(",")[0]
    return START_S + DEVICE_S + COMPILE_S[f"{cell.implementation} {kind}"] + 1.0


def smoke_s(hanging: tuple[str, ...] = ()) -> float:
    """Return the time of all cells if every cell of some implementations hangs."""
    bad = HEARTBEAT_S + KILL_S
    return sum(bad if cell.implementation in hanging else cell_s(cell) for cell in cells(tiny=False)) / AT_ONCE


def expected_s() -> dict[str, float]:
    """Return the time of each part of the first call in which nothing goes wrong.

    The step and the demo model compile beside the smoke cells; only the rest of it is counted here. The processes of
    `attention` compile side by side and measure in turn: the longest one's compilation and all measurements are added.
    """
    start, smoke = START_S + DEVICE_S, smoke_s()
    step = start + 10.0 + COMPILE_S["Llama-3.1-8B, 32 layers, 64 sequences"] + COMPILE_S["its sampler"]
    decode = 5 * max(COMPILE_S["mosaic decode"] + COMPILE_S["mosaic decode, 128 calls"], PEERS_S)
    prefill = 2 * max(COMPILE_S["mosaic ragged"] + COMPILE_S["mosaic ragged, 8 calls"], PEERS_S)
    attention = start + max(decode, prefill) + 14 * MEASURE_S
    return {
        "smoke": smoke,
        "demo": max(0.0, start + COMPILE_S["demo model, all steps"] - smoke),
        "ladder": 0.0,
        "ceilings": start + 5.0,
        "attention": attention,
        "step": max(0.0, step - smoke - attention) + 5.0,
        "profile": start + 2 * COMPILE_S["mosaic ragged"] + 10.0,
    }

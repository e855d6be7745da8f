"""Plots of the report. Measured and simulated figures are in panels of their own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.figures import MEMORY, ORDER, Figures
from benchmarks.paper.policies import POLICIES
from benchmarks.shared.plots import COLORS, MARKERS

STYLES = {
    name: dict(color=COLORS[i % len(COLORS)], marker=MARKERS[i % len(MARKERS)], markersize=4, linewidth=1.4)
    for i, name in enumerate(POLICIES)
}
KINDS = {"tokens": "tokens", "reserved": "reserved, used later", "internal": "reserved, never used",
         "external": "free, or lost between reservations"}  # fmt: skip


def _figure(columns: int, lines: int, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False)


def _legend(figure: Any, columns: int = 3) -> None:
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )


def _curves(axes: Any, rows: Sequence[dict[str, Any]], scale: float) -> None:
    for name in ORDER:
        own = sorted((row for row in rows if row["policy"] == name), key=lambda row: row["rate"])
        if own:
            x, y = [row["rate"] for row in own], [scale * row["normalised"] for row in own]
            axes.plot(x, y, label=POLICIES[name].title, **STYLES[name])
    axes.set_xlabel("requests per second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)


def latency_simulated(found: Figures) -> Any:
    models, workloads = ("opt-13b", "opt-66b", "opt-175b"), ("sharegpt", "alpaca")
    figure, axes = _figure(3, 2, 4.2, 3.1)
    figure.suptitle("Simulated: normalised latency against request rate, GPUs of the paper", fontsize=11)
    for line, workload in enumerate(workloads):
        for column, model in enumerate(models):
            panel = axes[line][column]
            _curves(panel, found.points(model, workload), 1.0)
            panel.set_ylim(0, 0.5)
            panel.set_title(f"{model}, {workload}", fontsize=9)
            panel.set_ylabel("s per output token")
    _legend(figure)
    return figure


def latency_measured(found: Figures) -> Any:
    figure, axes = _figure(2, 1, 5, 3.6)
    figure.suptitle(f"Measured on a CPU: demo model, lengths and memory / 4 ({found.date})", fontsize=11)
    for panel, workload in zip(axes[0], ("sharegpt", "alpaca")):
        rows = [row for row in found.measured("measured") if row["workload"] == workload]
        _curves(panel, rows, 1e3)
        panel.set_title(workload, fontsize=9)
        panel.set_ylabel("ms per output token")
        low = sorted(1e3 * row["normalised"] for row in rows if row["policy"] == "paged")
        panel.set_ylim(0, 3 * low[-1])
    _legend(figure)
    return figure


def ablation(found: Figures) -> Any:
    figure, axes = _figure(2, 1, 5, 3.3)
    figure.suptitle("Paging or scheduling? Requests per second, ShareGPT's lengths", fontsize=11)
    sources = (
        ("simulated, OPT-13B on an A100: at 0.2 s per token", found.ablation_simulated()),
        (f"measured, demo model on a CPU: all requests wait ({found.date})", found.ablation_measured()),
    )
    for panel, (title, values) in zip(axes[0], sources):
        bars = panel.bar(range(4), [values[key] for key in values], color=COLORS[:4])
        panel.bar_label(bars, fmt="%.3g", fontsize=9, padding=1)
        panel.set_xticks(range(4), labels=[" +\n".join(key) for key in values], fontsize=8)
        panel.set_title(title, fontsize=9)
        panel.set_ylabel("requests/s")
        panel.set_ylim(0, 1.15 * max(values.values()))
    return figure


def memory(found: Figures) -> Any:
    figure, axes = _figure(3, 1, 4, 3.6)
    figure.suptitle("KV memory by kind under load, ShareGPT's lengths", fontsize=11)
    sources = (
        ("the paper, OPT-13B", {name: dict(zip(KINDS, shares)) for name, shares in MEMORY.items()}),
        ("simulated, OPT-13B", found.memory_simulated()),
        (f"measured, CPU ({found.date})", found.memory_measured()),
    )
    for panel, (title, shares) in zip(axes[0], sources):
        bottoms = [0.0] * len(MEMORY)
        for (kind, label), color in zip(KINDS.items(), (COLORS[0], "#9bc53d", COLORS[3], "#c9ced6")):
            heights = [100 * shares[name][kind] for name in MEMORY]
            panel.bar(range(len(MEMORY)), heights, bottom=bottoms, color=color, label=label)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
        for x, name in enumerate(MEMORY):
            panel.text(
                x, 100 * shares[name]["tokens"] / 2, f"{100 * shares[name]['tokens']:.1f}", ha="center", fontsize=8
            )
        panel.set_xticks(range(len(MEMORY)), labels=[name.removeprefix("orca-") for name in MEMORY], fontsize=8)
        panel.set_title(title, fontsize=9)
        panel.set_ylabel("% of the KV memory")
    _legend(figure, 4)
    return figure


def sizes(found: Figures) -> Any:
    figure, axes = _figure(2, 1, 5, 3.4)
    figure.suptitle("Block size", fontsize=11)
    for workload, color in (("sharegpt", COLORS[0]), ("alpaca", COLORS[1])):
        simulated, measured = found.sizes_simulated(workload), found.sizes_measured(workload)
        rates = [rate / max(simulated.values()) for rate in simulated.values()]
        axes[0][0].plot(list(simulated), rates, "o-", color=color, label=workload)
        axes[0][1].plot(list(measured), [1e3 * y for y in measured.values()], "o-", color=color, label=workload)
    for panel, title, label in zip(
        axes[0],
        ("simulated, OPT-13B: memory only, steps cost the same", f"measured, CPU, at 0.9 of saturation ({found.date})"),
        ("request rate over the best", "ms per output token"),
    ):
        panel.set_xscale("log", base=2)
        ticks = [1, 4, 8, 16, 32, 64, 128, 256]
        panel.set_xticks(ticks, labels=list(map(str, ticks)))
        panel.xaxis.minorticks_off()
        panel.grid(alpha=0.25)
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("block size (tokens)")
        panel.set_ylabel(label)
    axes[0][0].set_ylim(0, 1.05)
    axes[0][1].set_yscale("log")
    axes[0][1].yaxis.set_major_formatter("{x:g}")
    _legend(figure)
    return figure


def validation(found: Figures) -> Any:
    figure, axes = _figure(1, 1, 6, 3.4)
    panel = axes[0][0]
    rows = found.measured("validation")
    labels = [f"{row['workload']}\n{row['rate']:.0f}/s" for row in rows]
    xs = range(len(rows))
    panel.bar([x - 0.2 for x in xs], [1e3 * row["measured"] for row in rows], 0.38, color=COLORS[0], label="measured")
    panel.bar([x + 0.2 for x in xs], [1e3 * row["predicted"] for row in rows], 0.38, color=COLORS[1], label="predicted")
    for x, row in zip(xs, rows):
        top = 1e3 * max(row["measured"], row["predicted"])
        panel.text(x, top, f"{100 * row['error']:+.0f} %", ha="center", va="bottom", fontsize=8)
    panel.set_xticks(list(xs), labels=labels, fontsize=8)
    panel.set_ylabel("ms per output token")
    panel.set_ylim(0, 1.15e3 * max(max(row["measured"], row["predicted"]) for row in rows))
    panel.set_title(f"The simulator against the engine on a CPU ({found.date})", fontsize=10)
    panel.legend(fontsize=8, frameon=False)
    return figure


DRAWINGS: dict[str, Callable[[Figures], Any]] = {
    "latency-simulated": latency_simulated, "latency-measured": latency_measured, "ablation": ablation,
    "memory": memory, "block-size": sizes, "validation": validation,
}  # fmt: skip


def draw(found: Figures, folder: Path) -> list[Path]:
    """Write all plots."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, drawing in DRAWINGS.items():
        paths.append(folder / f"{name}.png")
        drawing(found).savefig(paths[-1], dpi=110)
    return paths

"""Pictures of results, for people.

python benchmarks/shared/plots.py results.json        draws them again, beside the file
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.results import Report, Row, ceiling_of

COLORS = ("#0b6e4f", "#c8553d", "#3d5a80", "#b8860b", "#7b4b94", "#5f6b6d", "#d1495b", "#2a9d8f", "#8d6e63", "#111111")
MARKERS = "os^Dv<>PX*"
OURS = ("mosaic", "triton", "reference")


def plot(report: Report) -> list[Path]:
    """Write the pictures that the rows suffice for, or say why not: the rows are worth more than their pictures."""
    try:
        paths = plot_all(report.content, report.path.parent)
    except Exception as error:  # most likely, matplotlib is not installed
        report.say(f"no plots: {type(error).__name__}: {error}")
        return []
    report.say(f"plots: {', '.join(path.name for path in paths) or 'none'}")
    return paths


def plot_all(content: dict[str, Any], folder: Path) -> list[Path]:
    """A picture for each of `DRAWINGS` that there are rows for."""
    paths = []
    for name, draw in DRAWINGS.items():
        rows = [row for row in content["rows"] if row.get("experiment") == name and row.get("status") == "ok"]
        figure = draw(rows, content) if rows else None
        if figure is not None:
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=130)
    return paths


def _panels(
    count: int, title: str, content: dict[str, Any], width: float = 4.6, height: float = 3.7
) -> tuple[Any, list]:
    """A figure with `count` panels, and a line that says where its figures come from."""
    from matplotlib.figure import Figure

    columns = 2 if count == 4 else min(count, 3)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(max(7.5, width * columns), height * lines + 1.3), layout="constrained")
    where = content["environment"]
    note = f"{where['device_kind']}, jax {where['versions'].get('jax')}, {where['date'][:10]}"
    if where["tiny"]:
        note = f"SMOKE RUN OF TINY SHAPES ON {where['platform'].upper()}: times mean nothing. " + note
    elif where["platform"] != "gpu":
        note = "NOT A GPU. " + note
    figure.suptitle(f"{title}\n{note}", fontsize=11)
    axes = figure.subplots(lines, columns, squeeze=False)
    for empty in axes.flat[count:]:
        empty.set_visible(False)
    return figure, list(axes.flat[:count])


def _grouped(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple, list[Row]]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return dict(sorted(groups.items()))


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Ours first."""
    return {
        name: dict(color=COLORS[i % len(COLORS)], marker=MARKERS[i % len(MARKERS)], markersize=5, linewidth=1.6)
        for i, name in enumerate(sorted(set(names), key=lambda name: (name not in OURS, name)))
    }


def _log_ticks(axes: Any, values: Iterable[int]) -> None:
    """A base-2 scale labelled with the values that were measured."""
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=[f"{v // 1024}k" if v >= 1024 and v % 1024 == 0 else str(v) for v in ticks])
    axes.xaxis.minorticks_off()


def _legend(figure: Any, axes: list) -> None:
    """One for all panels, below them."""
    handles: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    columns = 2 if max(map(len, handles), default=0) > 22 else 4
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, fontsize=9, frameon=False
    )


def _curves(
    axes: Any,
    rows: list[Row],
    x: str,
    y: Callable[[Row], float],
    styles: dict[str, dict[str, Any]],
    spread: bool = True,
) -> None:
    """A line per variant, with bars from quartile to quartile."""
    for (name,), own in _grouped(rows, ["variant"]).items():
        own = sorted(own, key=lambda row: row[x])
        ys = [y(row) for row in own]
        bars = None
        if spread:
            scaled = [(y(row) * row["us"] / row["us_high"], y(row) * row["us"] / row["us_low"]) for row in own]
            bars = [[v - low for v, (low, _) in zip(ys, scaled)], [high - v for v, (_, high) in zip(ys, scaled)]]
        axes.errorbar([row[x] for row in own], ys, yerr=bars, label=name, capsize=2, **styles[name])
    axes.grid(alpha=0.25)
    axes.set_ylim(bottom=0)


def _decode(rows: list[Row], content: dict[str, Any]) -> Any:
    groups = _grouped(rows, ["head_dim", "block_size", "lengths", "context"])
    figure, panels = _panels(
        len(groups), "Decode attention: bytes of keys, values, queries and outputs over time", content
    )
    styles = _styles(row["variant"] for row in rows)
    ceiling = ceiling_of(content["rows"], "read", "gb_per_s")
    for axes, ((head_dim, block, lengths, context), own) in zip(panels, groups.items()):
        _curves(axes, own, "batch", lambda row: row["gb_per_s"] / 1e3, styles)
        if ceiling:
            axes.axhline(
                ceiling / 1e3, color="#888888", linestyle="--", linewidth=1, label="read-only stream, same run"
            )
        axes.set_title(f"head dim {head_dim}, block {block}, {lengths} lengths, context {context}", fontsize=9)
        axes.set_xlabel("batch (sequences)")
        axes.set_ylabel("TB/s")
        _log_ticks(axes, (row["batch"] for row in own))
    _legend(figure, panels)
    return figure


def _prefill(rows: list[Row], content: dict[str, Any]) -> Any:
    groups = _grouped(rows, ["head_dim", "block_size", "batch"])
    figure, panels = _panels(len(groups), "Prefill attention: operations under the causal mask over time", content)
    styles = _styles(row["variant"] for row in rows)
    ceiling = ceiling_of(content["rows"], "matmul", "tflop_per_s")
    for axes, ((head_dim, block, batch), own) in zip(panels, groups.items()):
        _curves(axes, own, "context", lambda row: row["tflop_per_s"], styles)
        if ceiling:
            axes.set_ylim(0, 1.06 * max(ceiling, *(row["tflop_per_s"] for row in own)))
            axes.axhline(ceiling, color="#888888", linestyle="--", linewidth=1, label="bfloat16 matmul, same run")
        axes.set_title(f"head dim {head_dim}, block {block}, {batch} prompt{'s' * (batch > 1)}", fontsize=9)
        axes.set_xlabel("tokens of a prompt")
        axes.set_ylabel("TFLOP/s")
        _log_ticks(axes, (row["context"] for row in own))
    _legend(figure, panels)
    return figure


def _paging(rows: list[Row], content: dict[str, Any]) -> Any:
    """Bars of time, each relative to the same kernel through an identity table, whose blocks lie in order."""
    for row in rows:
        row["implementation"], _, row["wiring"] = row["variant"].partition(" ")
    groups = _grouped(rows, ["implementation", "kind", "head_dim"])
    figure, panels = _panels(
        len(groups), "What paging costs: one kernel, the same tokens, other places in memory", content
    )
    order = ("identity", "permutation", "churned")
    colors = dict(zip(order, ("#3d5a80", "#c8553d", "#0b6e4f")))
    for axes, ((implementation, kind, head_dim), own) in zip(panels, groups.items()):
        cases = _grouped(own, ["block_size", "batch", "context"])
        wirings = [wiring for wiring in order if any(row["wiring"] == wiring for row in own)]
        for i, wiring in enumerate(wirings):
            for x, each in enumerate(cases.values()):
                for row in each:
                    if row["wiring"] == wiring and row.get("over_identity"):
                        y = 100 * row["over_identity"]
                        place = x + (i - (len(wirings) - 1) / 2) * 0.2
                        axes.bar(place, y, 0.18, color=colors[wiring], label=wiring)
                        axes.text(place, y + 1, f"{y:.1f}", ha="center", va="bottom", fontsize=7, rotation=90)
        axes.axhline(100, color="#888888", linewidth=0.8)
        axes.set_ylim(0, 1.25 * max(100 * (row.get("over_identity") or 1) for row in own))
        labels = [f"block {block}\n{batch} x {context}" for block, batch, context in cases]
        axes.set_xticks(range(len(cases)), labels=labels, fontsize=8)
        axes.set_title(f"{implementation}, {kind}, head dim {head_dim}", fontsize=9)
        axes.set_xlabel("block size; sequences x tokens")
        axes.set_ylabel("time, % of the identity table's")
    _legend(figure, panels)
    return figure


def _step(rows: list[Row], content: dict[str, Any]) -> Any:
    groups = _grouped(rows, ["model", "context"])
    figure, panels = _panels(len(groups), "One decode step of the engine, random parameters", content)
    for axes, ((model, context), own) in zip(panels, groups.items()):
        own = sorted(own, key=lambda row: row["batch"])
        x = [row["batch"] for row in own]
        styles = _styles(("a", "b", "c"))
        axes.plot(x, [row["step_ms"] for row in own], label="step, host included", **styles["a"])
        axes.plot(x, [row["device_ms"] for row in own], label="steps enqueued back to back", **styles["b"])
        if all(row.get("floor_ms") for row in own):
            floor = [row["floor_ms"] for row in own]
            axes.plot(x, floor, label="reading parameters and KV at the read ceiling", color="#888888", linestyle="--")
        axes.set_title(f"{model}, context {context}", fontsize=9)
        axes.set_xlabel("batch (sequences)")
        axes.set_ylabel("ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        _log_ticks(axes, x)
    _legend(figure, panels)
    return figure


def _sharing(rows: list[Row], content: dict[str, Any]) -> Any:
    """Bars beside the paper's, or, where it gives a range over all widths, over a band."""
    groups = _grouped(rows, ["dataset", "kind"])
    title = "KV blocks saved by sharing, % of the blocks without it (block size 16)"
    figure, panels = _panels(len(groups), title, content)
    tokens = {"random": "random tokens", "demo": "tokens of the demo model"}[content["environment"]["model"]]
    ours = f"jpaged, synthetic lengths, {tokens}"
    paper = "PagedAttention paper (OPT-13B), real traces"
    for axes, ((dataset, kind), own) in zip(panels, groups.items()):
        own = sorted(own, key=lambda row: row["width"])
        known = all("paper" in row for row in own)
        bars = [(-0.2 if known else 0.0, "saving", ours, COLORS[0])]
        bars += [(0.2, "paper", paper, "#9aa5b1")] if known else []
        for shift, column, label, color in bars:
            drawn = axes.bar(
                [x + shift for x in range(len(own))], [100 * row[column] for row in own], 0.38, label=label, color=color
            )
            axes.bar_label(drawn, fmt="%.1f", fontsize=8, padding=1)
        if not known:
            band = [100 * own[0]["paper_low"], 100 * own[0]["paper_high"]]
            axes.axhspan(*band, color="#9aa5b1", alpha=0.35, label=f"{paper}: its range over widths")
        axes.set_ylim(0, 1.15 * max(100 * max(row["saving"], row["paper_high"]) for row in own))
        axes.set_title(f"{dataset}, {'beam search' if kind == 'beam' else 'parallel sampling'}", fontsize=9)
        axes.set_xticks(range(len(own)), labels=[str(row["width"]) for row in own])
        axes.set_xlabel("beam width" if kind == "beam" else "outputs per request")
        axes.set_ylabel("%")
    _legend(figure, panels)
    return figure


def _utilization(rows: list[Row], content: dict[str, Any]) -> Any:
    figure, (axes,) = _panels(1, "Slots of held KV blocks that hold a token, pool full", content, height=4.2)
    groups = _grouped(rows, ["dataset"])
    for ((dataset,), own), style in zip(groups.items(), _styles(name for (name,) in groups).values()):
        own = sorted(own, key=lambda row: row["block_size"])
        ys = [100 * row["utilization"] for row in own]
        axes.plot([row["block_size"] for row in own], ys, label=f"jpaged, {dataset}'s mean lengths", **style)
        offset = 0, -15 if dataset == min(groups)[0] else 7
        for row, y in zip(own, ys):
            axes.annotate(f"{y:.1f}", (row["block_size"], y), offset, textcoords="offset points", ha="center", size=8)
    for row in rows:
        if "paper" in row:
            axes.plot(row["block_size"], 100 * row["paper"], "k*", ms=11, label="PagedAttention paper, ShareGPT")
    _log_ticks(axes, (row["block_size"] for row in rows))
    axes.set_xlabel("block size (tokens)")
    axes.set_ylabel("%")
    axes.set_ylim(0, 108)
    axes.grid(alpha=0.25)
    _legend(figure, [axes])
    return figure


def _preemption(rows: list[Row], content: dict[str, Any]) -> Any:
    """The paper's Fig. 19: one request's blocks alone, then whole runs."""
    runs = [row for row in content["rows"] if row["experiment"] == "normalised latency"]
    model = content["environment"]["model"]
    figure, panels = _panels(2, f"Recomputing or swapping preempted requests, model {model}", content, width=5.5)
    titles = f"one request of {rows[0]['tokens']} tokens", f"{runs[0]['clients']} clients in a pool too small for them"
    for axes, own, key, y, title, label in (
        (panels[0], rows, "operation", "ms", titles[0], "ms"),
        (panels[1], runs, "mode", "ms_per_token", titles[1], "latency / tokens of output (ms)"),
    ):
        styles = dict(zip(("recompute", "swap", "swap_in", "swap_out", "auto"), _styles("abcde").values()))
        for (name,), each in _grouped(own, [key]).items():
            each = sorted(each, key=lambda row: row["block_size"])
            bounds = [[row[y] - row[f"{y}_low"] for row in each], [row[f"{y}_high"] - row[y] for row in each]]
            shown = {"swap": "swap out and in", "swap_in": "swap in", "swap_out": "swap out"}.get(name, name)
            axes.errorbar(
                [row["block_size"] for row in each], [row[y] for row in each], yerr=bounds, label=shown, capsize=2,
                **styles[name],
            )  # fmt: skip
        _log_ticks(axes, (row["block_size"] for row in own))
        if own is rows:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("block size (tokens)")
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
    _legend(figure, panels)
    return figure


def _beam(rows: list[Row], content: dict[str, Any]) -> Any:
    """Pairs of bars, cut into the parts of a step."""
    groups = _grouped(rows, ["prompt"])
    width, model = rows[0]["width"], content["environment"]["model"]
    title = f"A step of decoding, {width} beams or {width} sampled outputs per request, model {model}"
    figure, panels = _panels(len(groups), title, content)
    for axes, ((prompt,), own) in zip(panels, groups.items()):
        own = sorted(own, key=lambda row: row["requests"])
        for kind, shift in (("sampling", -0.2), ("beam", 0.2)):
            xs, bottoms = [x + shift for x in range(len(own))], [0.0] * len(own)
            for part, color in zip(("runner", "schedule", "commit", "text"), COLORS[2:]):
                rest = [max(0.0, row[f"{kind}_ms"] - bottom) for row, bottom in zip(own, bottoms)]
                parts = rest if part == "text" else [row[f"{kind}_{part}_ms"] for row in own]
                axes.bar(xs, parts, 0.36, bottom=bottoms, color=color, label=part, hatch="//" * (kind == "beam"))
                bottoms = [b + height for b, height in zip(bottoms, parts)]
            for x, row, top in zip(xs, own, bottoms):
                text = f"{row['ratio']:.2f}x" if kind == "beam" else f"{row['sampling_ms']:.1f}"
                axes.text(x, top, text, ha="center", va="bottom", fontsize=8)
        axes.set_title(f"prompts of {prompt} tokens", fontsize=9)
        axes.set_xticks(range(len(own)), labels=[str(row["requests"]) for row in own])
        axes.set_xlabel("requests (left bar: sampling; right, hatched: beam search)")
        axes.set_ylabel("ms")
        axes.set_ylim(0, 1.12 * max(max(row["beam_ms"], row["sampling_ms"]) for row in own))
    _legend(figure, panels)
    return figure


def _soak(rows: list[Row], content: dict[str, Any]) -> Any:
    """Memory, threads and files, and latency, over the minutes of a run."""
    figure, panels = _panels(3, f"A mixed load, model {content['environment']['model']}", content)
    drawn = (
        ("MiB", ("memory_mib",)), ("number", ("threads", "files", "children")),
        ("ms", ("first_token_ms", "inter_token_ms", "probe_cpu_ms")),
    )  # fmt: skip
    styles = _styles(name for _, names in drawn for name in names)
    for axes, (label, names) in zip(panels, drawn):
        for name in names:
            axes.plot([row["minute"] for row in rows], [row[name] for row in rows], label=name, **styles[name])
        axes.set_xlabel("minutes")
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.1 * max(row[name] for row in rows for name in names))
        axes.grid(alpha=0.25)
    _legend(figure, panels)
    return figure


DRAWINGS: dict[str, Callable[[list[Row], dict[str, Any]], Any]] = {
    "decode": _decode, "paging": _paging, "prefill": _prefill, "step": _step, "sharing": _sharing,
    "utilization": _utilization, "preemption": _preemption, "beam": _beam,
    "soak": _soak,
}  # fmt: skip


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        print(*plot_all(json.loads(file.read_text()), file.parent), sep="\n")

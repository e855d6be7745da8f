"""The text of docs/benchmarks.md: the paper's evaluation row by row."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper.figures import ABLATION, BATCHED, CHATBOT, MEMORY, PREFIXES, Figures, span
from benchmarks.paper.policies import POLICIES
from benchmarks.paper.simulated import SETUPS

MODELS = ("opt-13b", "opt-66b", "opt-175b")
ORCA = ("orca-max", "orca-pow2", "orca-oracle")
NONE = "-"

INTRODUCTION = """\
# Benchmarks: the evaluation of the PagedAttention paper

The paper (Kwon et al., SOSP 2023, arXiv:2309.06180) compares vLLM with FasterTransformer and with Orca under three ways
of reserving memory. Here every system is a policy of memory and batching on the same scheduler, model, step and kernels
(`benchmarks/paper/policies.py`).

Two kinds of figures stand in columns of their own:

- **Measured** figures are times of jpaged's engine on a CPU with the demo model: {machine}.
  Lengths and memory are those of OPT-13B on an A100 divided by four.
- **Simulated** figures come from jpaged's scheduler and allocator on a virtual clock ([planning.md](planning.md)) with
  the paper's models, GPUs and memory. The duration of a step is a roofline:
  {source}.

No figure on this page was measured on a GPU. `make bench` runs the evaluation and writes the page. Its results:
[measured and simulated](../benchmarks/results/evaluation/results.json),
[sharing](../benchmarks/results/sharing/report.md) (`benchmarks/paper/sharing.py`),
[preemption](../benchmarks/results/preemption/report.md). The time of the scheduler itself has
[a report of its own](../benchmarks/results/scheduler/report.md).

On a CPU, `benchmarks/engine/cpu_step.py` divides the time of a step into parts, `cpu_bytes.py` measures the share of
the read bandwidth that a decode step of one row reaches for each kind of weights, `cpu_products.py` times all products
of a step by the number of rows, and `experts.py` compares the grouped products of a mixture of experts with XLA's.

`benchmarks/engine/agents.py` serves sessions of agents with evicted prefixes on the host and with pinned ones, on a CPU
and in the simulator ([report](../benchmarks/results/agents/report.md))."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def times(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}x" if value < 10 else f"{value:.0f}x"


def measured_ratio(found: Figures, workload: str, over: str) -> float:
    """Requests per second of "paged" over those of another policy, under overload."""
    return found.overloaded("paged", workload)["requests_per_s"] / found.overloaded(over, workload)["requests_per_s"]


def summary(found: Figures, sharing: Figures, preemption: Figures) -> str:
    """The table of all rows."""
    rows = [*_memory_rows(found), *_rate_rows(found), *_sharing_rows(sharing), *_prefix_rows(found)]
    rows += [
        ("Chatbot, OPT-13B: rate over Orca (Max), (Pow2), (Oracle)", times(CHATBOT), NONE,
         ", ".join(times(found.ratio("opt-13b", "chatbot", name)) for name in ORCA),
         "Same direction. In the paper the three Orcas do alike, because nearly all of its prompts have 1,024 tokens."),
        ("Attention kernel against FasterTransformer's", "20-26 % slower", NONE, NONE,
         "Not measured: it needs a GPU. `benchmarks/gpu_suite.py --parts sweep` contains the experiment."),
        ("Good block sizes, ShareGPT; Alpaca", "16-128; 16, 32", *best_sizes(found),
         "Measured: latency within 50 % of the best, which is also the noise. Simulated: rate within 5 %; only memory "
         "counts there. On a GPU small blocks slow the kernel down."),
        ("Recompute over swap, normalised latency, by block size", "at most 1.2", recompute_over_swap(preemption), NONE,
         "On a CPU, swapping is a copy within one memory, so that it is cheap at every block size."),
    ]  # fmt: skip
    return table(("row", "paper", "measured, CPU", "simulated", "difference"), rows)


def _memory_rows(found: Figures) -> list[Sequence[str]]:
    tokens = lambda shares: ", ".join(f"{100 * each['tokens']:.1f}" for each in shares.values()) + " %"
    rows = [(
        "KV memory that holds tokens, ShareGPT: Orca (Max), (Pow2), (Oracle), paged", "20.4, 26.8, 38.2, 96.3 %",
        tokens(found.memory_measured()), tokens(found.memory_simulated()),
        "Reproduced. On the CPU, blocks are larger in relation to sequences: 8 tokens for a quarter of the lengths.",
    )]  # fmt: skip
    for workload, paper in BATCHED.items():
        rows.append((
            f"Requests in a batch, OPT-13B, {workload}: the same systems", ", ".join(f"{n:g}" for n in paper.values()),
            ", ".join(number(found.overloaded(name, workload)["batched"]) for name in paper),
            ", ".join(number(found.loaded("opt-13b", workload, name)["batched"]) for name in paper),
            "Reproduced." if workload == "sharegpt" else
            "Same order. Simulated batches are those of saturated systems, the paper's those of one rate (30/s).",
        ))  # fmt: skip
    return rows


def _rate_rows(found: Figures) -> list[Sequence[str]]:
    over = lambda policy: span([found.ratio(model, "sharegpt", policy) for model in MODELS]) + "x"
    rows = [
        ("Request rate over Orca (Oracle), ShareGPT, three sizes of OPT", "1.7-2.7x",
         times(measured_ratio(found, "sharegpt", "orca-oracle")), over("orca-oracle"),
         "Reproduced. On a CPU a step's time grows with its sequences, and a larger batch gains little."),
        ("Request rate over Orca (Max), ShareGPT", "2.7-8x", times(measured_ratio(found, "sharegpt", "orca-max")),
         over("orca-max"),
         "As above. The lowest is OPT-175B, whose pool of 60,100 tokens holds many requests under any policy."),
        ("Request rate over FasterTransformer, ShareGPT", "up to 22x",
         times(measured_ratio(found, "sharegpt", "static")), over("static"),
         "Same direction. Our baseline has the same chunked prefill, and does not compute sequences that have ended."),
        ("Request rate over Orca (Oracle), Alpaca, OPT-13B", "1.3x",
         times(measured_ratio(found, "alpaca", "orca-oracle")), times(found.ratio("opt-13b", "alpaca", "orca-oracle")),
         "Short requests: the memory holds many of them under either policy."),
    ]  # fmt: skip
    for kind in ("parallel", "beam"):
        rates = [found.ratio("opt-13b", f"alpaca, {kind} {width}", "orca-oracle") for width in (2, 4, 6)]
        rows.append((
            f"The same with {'2, 4, 6 outputs' if kind == 'parallel' else '2, 4, 6 beams'}",
            "2.3x with 6 beams" if kind == "beam" else NONE, NONE, ", ".join(map(times, rates)),
            "The gain grows with the width, but less than in the paper: Orca's copies of KV between beams cost nothing."
            if kind == "beam" else "As many requests of one output under Orca; each computes the prompt.",
        ))  # fmt: skip
    return rows


def _sharing_rows(sharing: Figures) -> list[Sequence[str]]:
    def saved(kind: str, dataset: str) -> list[float]:
        rows = sharing.measured("sharing")
        return [100 * row["saving"] for row in rows if (row["kind"], row["dataset"]) == (kind, dataset)]

    listed = lambda values: ", ".join(f"{value:.1f}" for value in values) + " %"
    return [
        ("Memory saved by sharing, Alpaca: 2, 4, 6 outputs", "6.09, 8.53, 9.79 %", NONE,
         listed(saved("parallel", "Alpaca")), "Reproduced."),
        ("Memory saved by sharing, Alpaca: 2, 4, 6 beams", "37.6, 53.1, 55.2 %", NONE,
         listed(saved("beam", "Alpaca")), "Reproduced. Candidates of beams are drawn at random (`sharing.py`)."),
        ("Memory saved by sharing, ShareGPT: outputs; beams", "16.2-30.5 %; 44.3-66.3 %", NONE,
         "; ".join(span(saved(kind, "ShareGPT")) + " %" for kind in ("parallel", "beam")),
         "Reproduced at two of each; random candidates make wide searches share more in long outputs."),
    ]  # fmt: skip


def _prefix_rows(found: Figures) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for name, paper in PREFIXES.items():
        rate = lambda policy, name=name: times(found.ratio("llama-13b", name, "orca-oracle", policy))
        rows.append((
            f"Shared prefix, LLaMA-13B, {name}: rate over Orca (Oracle)", times(paper), NONE, rate("prefix"),
            f"Same direction. Without the prefix cache {rate('paged')}, with RadixAttention's token-level "
            f"tree {rate('radix')}. The lengths of sentences are assumed (30 in, 35 out).",
        ))  # fmt: skip
    for name in PREFIXES:
        latency = {row["policy"]: row["normalised"] for row in found.measured("prefixes") if row["workload"] == name}
        gain = lambda policy, latency=latency: times(latency["orca-oracle"] / latency[policy])
        rows.append((
            f"Shared prefix, {name}: normalised latency of Orca (Oracle) over ours", NONE, gain("prefix"), NONE,
            f"At 0.9 of saturation. Without the prefix cache {gain('paged')}, with RadixAttention's "
            f"token-level tree {gain('radix')}. "
            + ("A prefix of 20 tokens costs a CPU little, and single runs at this rate vary." if name == "1-shot" else
               "The cache saves most of each prompt's computation."),
        ))  # fmt: skip
    return rows


def number(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"


def recompute_over_swap(preemption: Figures) -> str:
    rows = preemption.measured("normalised latency")
    latency = {(row["block_size"], row["mode"]): row["ms_per_token"] for row in rows}
    sizes = sorted({size for size, _ in latency})
    return ", ".join(f"{size}: {latency[size, 'recompute'] / latency[size, 'swap']:.2f}" for size in sizes)


def best_sizes(found: Figures) -> tuple[str, str]:
    """Block sizes near the best by measured latency and by simulated rate, ShareGPT; Alpaca."""
    measured, simulated = [], []
    for workload in ("sharegpt", "alpaca"):
        latencies, rates = found.sizes_measured(workload), found.sizes_simulated(workload)
        low, high = min(latencies.values()), max(rates.values())
        measured.append(sizes_in([size for size, y in latencies.items() if y <= 1.5 * low]))
        simulated.append(sizes_in([size for size, y in rates.items() if y >= 0.95 * high]))
    return "; ".join(measured), "; ".join(simulated)


def sizes_in(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def ablation(found: Figures) -> str:
    """The 2 x 2 table."""
    simulated, measured = found.ablation_simulated(), found.ablation_measured()
    rows = [(*kind, f"{measured[kind]:.1f}", f"{simulated[kind]:.2f}") for kind in ABLATION]
    head = (
        "batching",
        "memory",
        "measured, CPU: all wait (requests/s)",
        "simulated, OPT-13B: at 0.2 s/token (requests/s)",
    )
    return table(head, rows)


def answer(found: Figures) -> str:
    """Three sentences."""
    static, static_paged, contiguous, paged = found.ablation_simulated().values()
    oracle = found.sustained("opt-13b", "sharegpt", "orca-oracle")
    return (
        "In the simulation of OPT-13B on an A100, iteration-level scheduling alone raises the request rate at equal "
        f"latency {contiguous / static:.1f} times over static batches, and paging alone {static_paged / static:.1f} "
        f"times. Paging on top of iteration-level scheduling gives another factor of {paged / contiguous:.1f}, both "
        f"together {paged / static:.0f}. Perfect knowledge of the output lengths without paging would give "
        f"{oracle / contiguous:.1f} instead of {paged / contiguous:.1f}."
    )


def sustained_table(found: Figures, models: Sequence[str], workloads: Sequence[str]) -> str:
    policies = ("static", *ORCA, "paged")
    rows = [
        (model, workload, *(f"{found.sustained(model, workload, name):.3g}" for name in policies))
        for model in models
        for workload in workloads
    ]
    return table(("model", "workload", *(POLICIES[name].title for name in policies)), rows)


def memory_table(found: Figures) -> str:
    listed = lambda shares: " / ".join(f"{100 * share:.1f}" for share in shares)
    measured, simulated = found.memory_measured(), found.memory_simulated()
    rows = [
        (POLICIES[name].title, listed(paper[:1] if name == "paged" else paper), listed(measured[name].values()),
         listed(simulated[name].values()))
        for name, paper in MEMORY.items()
    ]  # fmt: skip
    return table(("policy", "paper (%)", "measured, CPU (%)", "simulated (%)"), rows)


def user_table(found: Figures) -> str:
    rows = []
    for scenario in ("conversation", "system prompt"):
        own = {row["policy"]: row for row in found.measured("one user") if row["scenario"] == scenario}
        cells = [scenario]
        for column, form in (("ttft", "{:.1f}"), ("total_s", "{:.0f}")):
            off, on = own["paged"][column], own["prefix"][column]
            cells += [form.format(1e3 * off), form.format(1e3 * on), f"{off / on:.2f}x"]
        rows.append(cells)
    head = [
        f"{name}{part}" for name in ("first token", "total") for part in (", cache off (ms)", ", on (ms)", ", ratio")
    ]
    return table(("eight rounds", *head), rows)


def validation_table(found: Figures) -> str:
    rows = [
        (row["workload"], f"{row['rate']:.0f}", f"{1e3 * row['measured']:.2f}", f"{1e3 * row['predicted']:.2f}",
         f"{100 * row['error']:+.1f} %", f"{row['speed']:.0f}x")
        for row in found.measured("validation")
    ]  # fmt: skip
    head = "workload", "requests/s", "measured (ms/token)", "predicted (ms/token)", "error", "speed of the simulation"
    return table(head, rows)


def rounds(found: Figures) -> str:
    errors = [row["errors"] for row in found.measured("validation")]
    largest = max(abs(error) for each in errors for error in each)
    return f"{len(errors[0])} rounds; the largest error of a round is {100 * largest:.0f} %. "


def speed_table(found: Figures) -> str:
    rows = []
    for model in (*SETUPS, None):
        points = [row for row in found.measured("simulated") if model in (row["model"], None)]
        virtual, taken = (sum(row[name] for row in points) for name in ("virtual_s", "process_s"))
        rows.append((model or "all", str(len(points)), f"{virtual / 3600:.1f}", f"{taken / 60:.1f}",
                     f"{virtual / taken:.0f}x", span([row["speed"] for row in points], "{:.0f}x")))  # fmt: skip
    head = ("model", "simulations", "simulated hours", "minutes of one core", "speed", "speed of one simulation")
    return table(head, rows)


def speed(million: Figures) -> str:
    (row,) = million.measured("simulated")
    return (
        "A simulation takes one to three microseconds for each sequence of a step, so that its speed depends on the "
        "number of sequences and on the duration of the steps: those of the demo model take one to four milliseconds, "
        "and those of Llama-3-8B on an H100 have up to a thousand sequences."
        f" A million requests of Alpaca's lengths at {row['rate']:.0f} per second, {row['virtual_s'] / 3600:.1f} hours "
        f"and {row['steps']:,} steps, took {row['process_s'] / 60:.1f} minutes on {million.date}."
    )


def page(found: Figures, sharing: Figures, preemption: Figures, million: Figures) -> str:
    """The whole page."""
    where = found.environment
    machine = f"{where.get('cores')} cores, jax {where['versions'].get('jax')}, Python {where['python']}, {found.date}"
    source = found.measured("sustained")[0]["source"].partition(": ")[2]
    sections = {
        "Row by row": [summary(found, sharing, preemption)],
        "Is the gain from paging or from the scheduling?": [
            answer(found), "![Ablation](benchmarks/ablation.png)", ablation(found),
        ],
        "Latency against request rate": [
            "![Simulated](benchmarks/latency-simulated.png)",
            "Requests per second at a normalised latency of 0.2 s per token, simulated:",
            sustained_table(found, MODELS, ("sharegpt", "alpaca")),
            "The same for Llama-3 on H100s, 8B on one and 70B on four:",
            sustained_table(found, ("llama-3-8b", "llama-3-70b"), ("sharegpt",)),
            "![Measured](benchmarks/latency-measured.png)",
        ],
        "Memory by kind": [
            "Slots with tokens / reserved and used later / reserved and never used / free or lost between reservations."
            " Requests wait for memory in all of these steps.",
            "![Memory](benchmarks/memory.png)", memory_table(found),
        ],
        "Block size": ["![Block size](benchmarks/block-size.png)"],
        "One user": [
            "One stream of greedy answers of 30 tokens from the demo model on the CPU. A conversation grows by each "
            "question and answer. The system prompt has 380 tokens before each new question. The time to first token "
            "is the mean of the rounds from the second on. Figures are medians of five repetitions. The paper has no "
            "such figure.",
            user_table(found),
        ],
        "Validation of the simulator": [
            "The same traces ran on the engine and in the simulator. Costs of steps come from a second engine with "
            "other traces of the same rates. The engines take turns, one step each, so that the drift of the machine's "
            "speed is the same for both; a pause of the machine falls into the steps of one engine only. Figures are "
            "those of the round with the median error, of " + rounds(found) + "The rates are 0.2, 0.4 and 0.6 of the "
            "rate at saturation: nearer to it, a small error of the costs becomes a large one of the latency.",
            "![Validation](benchmarks/validation.png)", validation_table(found),
            "The speed of the simulations of this page, over real time:", speed_table(found), speed(million),
        ],
    }  # fmt: skip
    parts = [INTRODUCTION.format(machine=machine, source=source)]
    parts += ["\n\n".join([f"## {title}", *content]) for title, content in sections.items()]
    return "\n\n".join(parts) + "\n"


def of_contents(contents: Mapping[str, dict[str, Any]]) -> str:
    """The page of the results' contents, by the name of their folder."""
    return page(*(Figures(contents[name]) for name in ("evaluation", "sharing", "preemption", "million")))

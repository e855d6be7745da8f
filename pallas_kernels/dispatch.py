"""Choice of the implementation of each op for a device, with the reason."""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import checks, ops, reference, rows, toolchain, tuning
from pallas_kernels.ops import Ops
from pallas_kernels.selftest import FAILED, TESTS, UNTESTED, Result, SelfTest, Subject
from pallas_kernels.weights import Format

logger = logging.getLogger(__name__)

NAMES = ("auto", "reference", "mosaic", "triton", "cpu")
REFERENCE = "pallas_kernels.reference"

MODEL = ("dtype", "pool_dtype", "head_dim", "num_heads", "num_kv_heads", "block_size")  # see `Subject`
Model = dict[str, Any]  # values by the names of MODEL


@dataclass(frozen=True)
class Program:
    """Implementation for some devices.

    Attributes:
        low, high: the compute capabilities that it needs of a GPU: from `low` to below `high`.
    """

    label: str
    module: str
    needs: str
    low: float = 0.0
    high: float = float("inf")
    platforms: tuple[str, ...] = ("gpu", "cuda")


# The fastest first.
PROGRAMS = {
    "mosaic": Program("Mosaic GPU", "pallas_kernels.mosaic", "a Hopper GPU (compute capability 9.x)", low=9, high=10),
    "triton": Program("Pallas-Triton", "pallas_kernels.triton", "an NVIDIA GPU from Ampere on (8.0)", low=8),
    "cpu": Program("CPU", "pallas_kernels.cpu", "a CPU", platforms=("cpu",)),
}

# Ops that are chosen together. A request's attention has the same bits in decode steps and in mixed steps, which holds
# within one implementation only. Pools have the same layout in all of them.
GROUPS = {
    "attention": ("paged_decode_attention", "ragged_paged_attention"),
    "KV writes": ("write_kv",),
    "block copies": ("copy_blocks",),
    "products": ("product",),
    "matrices of low rank": ("low_rank",),
    "norms": ("rms_norm",),
    "recurrent layers": ("delta_rule", "causal_conv"),
    "sampling": ("argmax_and_lse", "gumbel_argmax", "gumbel", "ranks", "top"),
}
ATTENTION_COST = {"triton": "expect lower throughput", "reference": "expect much lower throughput"}


class DeviceFacts(NamedTuple):
    """DeviceFacts as jax describes it; `capability` is None if it is unknown."""

    platform: str
    kind: str
    capability: float | None


@dataclass(frozen=True)
class Choice:
    """Implementation of one op, and the reason for it."""

    op: str
    implementation: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Kernels(Ops):
    """Ops chosen for a device and a model.

    Attributes:
        name: implementation of the attention ops: "reference", "mosaic", "triton" or "cpu".
        reason: the reason for it.
        head_dim: head dim of the pools that the ops take, the model's or more.
        account: one choice for each op.
        tests: results of all self-tests behind these choices.
        make_work: a function that makes the lists of work of a batch for the attention ops' argument `work`, on the
            host: (context_lens_s, cu_q_lens_s1, decode_s, num_rows=, table_tokens=, window=, xp=numpy) -> lists, those
            of a decode step if `cu_q_lens_s1` is None. None: the ops take none.
        zeros: a function of a shape and a dtype that returns zeros on one device, which take no memory before they are
            used. None: there is no such function.
    """

    name: str
    reason: str
    head_dim: int
    account: tuple[Choice, ...] = ()
    tests: tuple[Result, ...] = ()
    make_work: Callable[..., Any] | None = None
    zeros: Callable[[tuple[int, ...], str], jax.Array] | None = None

    @property
    def multiplies(self) -> bool:
        """Whether products are kernels, not XLA's."""
        return self.implementation.product is not reference.product

    @property
    def skips_rows(self) -> bool:
        """Whether products cost nothing for the rows that `wanted_t` leaves out."""
        return self.implementation.skips_rows


def select(
    name: str = "auto",
    *,
    platform: str,
    device_kind: str,
    compute_capability: float | None,
    dtype: str,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    pool_dtype: str | None = None,
    sinks: bool = False,
    mxfp4: bool = False,
    debug: bool = False,
    int8_rows: bool = False,
    self_test: SelfTest | None = None,
) -> Kernels:
    """Choose the implementation `name` ("auto", "reference", "mosaic", "triton" or "cpu") for a device and a model.

    "auto" takes the first of Mosaic (Hopper) and Triton (from Ampere on) that can serve the model on an NVIDIA GPU, and
    for each op that passes its self-test; on a CPU the compiled kernels if llvmlite is installed, else the reference.

    Args:
        platform, device_kind, compute_capability: as a jax device gives them; capability None if unknown.
        dtype, pool_dtype: of q, k and v, and of the pools (None: `dtype`; "float8_e4m3fn" for fp8 pools).
        sinks, mxfp4: whether the model has attention sinks, and experts like gpt-oss's, with biases, the activation
            swiglu_oai and maybe weights in MXFP4. The self-test then has them, too.
        debug: the ops also check the values of tables, lengths and slots; see `Ops`.
        int8_rows: products round rows to int8; see `Ops`. Only kernels of CPUs and the reference do.
        self_test: tests the ops on the device first. None tests nothing, for callers without the device.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: `name` can't run or failed its self-test; the message has the reason.
    """
    if name not in NAMES:
        raise ValueError(f"kernels must be one of {', '.join(NAMES)}, not {name!r}")
    if int8_rows and platform != "cpu":
        raise NotImplementedError(f"int8_rows: is for CPUs, not for {platform}")
    programs = [key for key, it in PROGRAMS.items() if key == name or (name == "auto" and platform in it.platforms)]
    reason = "asked for" if name == "reference" else f"the device is a {device_kind} ({platform})"
    kernels = _kernels({}, dict.fromkeys(GROUPS, reason), head_dim)
    if programs:
        model = dict(zip(MODEL, (dtype, pool_dtype or dtype, head_dim, num_heads, num_kv_heads, block_size)))
        device = DeviceFacts(platform, device_kind, compute_capability)
        kernels = _choose(programs, name == "auto", device, model, self_test, dict(sinks=sinks, mxfp4=mxfp4))
    if platform == "cpu" and not kernels.skips_rows:
        by_rows = kernels.implementation._replace(product=rows.product, skips_rows=True)
        kernels = replace(kernels, implementation=by_rows)
    return replace(kernels, debug=debug, int8_rows=int8_rows)


def select_for(
    device: jax.Device,
    model: Any,
    *,
    name: str = "auto",
    dtype: Any = None,
    block_size: int = 16,
    pool_dtype: str | None = None,
    debug: bool = False,
    int8_rows: bool = False,
    self_test: SelfTest | None = None,
) -> Kernels:
    """Choose the implementation for a device and the config of a model; see `select`.

    Args:
        model: an object or a mapping with the names of Hugging Face's `config.json`: `num_attention_heads`,
            `num_key_value_heads` (default: `num_attention_heads`), `head_dim` (default: `hidden_size` divided by
            `num_attention_heads`) and `dtype` or `torch_dtype`.
        dtype: dtype of q, k and v. None: that of the config.

    Raises:
        ValueError: the config lacks a field, or `name` is unknown.
        NotImplementedError: `name` can't run or failed its self-test; the message has the reason.
    """
    read = partial(_read, model)
    num_heads = read("num_attention_heads")
    dtype = read("dtype", "torch_dtype") if dtype is None else dtype
    if str(dtype).startswith("torch."):
        dtype = str(dtype).removeprefix("torch.")
    return select(
        name, platform=device.platform, device_kind=device.device_kind, compute_capability=compute_capability(device),
        dtype=jnp.dtype(dtype).name, head_dim=read("head_dim", default=0) or read("hidden_size") // num_heads,
        num_heads=num_heads, num_kv_heads=read("num_key_value_heads", default=num_heads), block_size=block_size,
        pool_dtype=pool_dtype, debug=debug, int8_rows=int8_rows, self_test=self_test,
    )  # fmt: skip


def has_products(name: str, platform: str, capability: float | None, dtype: str) -> bool:
    """Return whether a GPU's products of rows in a dtype are kernels if they pass their self-test; see `select`."""
    program = PROGRAMS["mosaic"]
    fits = platform in program.platforms and program.low <= (capability or 0) < program.high
    return fits and name in ("auto", "mosaic") and dtype in ("bfloat16", "float16")


def takes_weight(form: Format, shape: tuple[int, ...], dtype: str) -> bool:
    """Return whether the products of `has_products` take rows in a dtype and a weight [O, I] or [E, O, I] in a form."""
    product = importlib.import_module("pallas_kernels.mosaic.product")  # it brings jax's GPU lowering with it
    return product.unsupported_weight(form, shape[-2:], dtype) is None


def _read(model: Any, *names: str, default: Any = None) -> Any:
    """Return the first of some fields of a model's config that it has."""
    values = (model.get(name) if isinstance(model, Mapping) else getattr(model, name, None) for name in names)
    value = next((value for value in values if value is not None), default)
    if value is None:
        raise ValueError(f"model: has no {' or '.join(names)}")
    return value


def compute_capability(device: jax.Device) -> float | None:
    """Return a GPU's compute capability, such as 9.0; None for other devices."""
    try:
        return float(getattr(device, "compute_capability", None))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _choose(
    programs: Sequence[str], auto: bool, device: DeviceFacts, model: Model, self_test: SelfTest | None,
    features: Mapping[str, Any],
) -> Kernels:  # fmt: skip
    """Choose for each group of ops the first program that can serve the model and that passes its self-test."""
    subjects: dict[str, Subject] = {}
    chosen: dict[str, str] = {}  # group -> program
    refused: dict[str, list[str]] = {group: [] for group in GROUPS}  # the reasons against earlier programs
    tests: list[Result] = []
    for program in programs:
        if unsupported := _unsupported(program, device, model):
            failures = dict.fromkeys(GROUPS, unsupported)
        else:
            subjects[program] = replace(_subject(program, device.kind, model), **features)
            results = self_test.run(subjects[program]) if self_test else ()
            tests += results
            failures = _failures(program, results)
        if failures and not auto:
            raise NotImplementedError(f"kernels {program!r}: {next(iter(failures.values()))}")
        for group in [group for group in GROUPS if group not in chosen]:
            if group in failures:
                refused[group].append(f"not {program}: {failures[group]}")
            else:
                chosen[group] = program
        if len(chosen) == len(GROUPS):
            break
    because = f"the device is a {device.kind}" + " (cpu)" * (device.platform == "cpu") if auto else "asked for"
    reasons = {group: "; ".join([because, *refused[group]]) for group in GROUPS}
    of_pools = [subjects[chosen[group]] for group in ("attention", "KV writes") if group in chosen]
    head_dim = of_pools[0].pool_head_dim if of_pools else model["head_dim"]
    kernels = _kernels({group: subjects[program] for group, program in chosen.items()}, reasons, head_dim, tests)
    used = {choice.op: choice.implementation for choice in kernels.account}
    for group, names in GROUPS.items():
        # Without llvmlite a CPU has no other implementation, and the reference is no surprise.
        program = chosen.get(group, "reference")
        if program != next(iter(subjects), program if device.platform == "cpu" else None):
            label = PROGRAMS[used[names[0]]].label if used[names[0]] in PROGRAMS else "the jnp reference"
            cost = ATTENTION_COST[program] if group == "attention" else "expect slower steps"
            logger.warning("%s: running on %s, %s (%s)", group, label, cost, "; ".join(refused[group]))
    return kernels


def _failures(program: str, results: Sequence[Result]) -> dict[str, str]:
    """Return the groups of ops whose self-test failed, with the reason, and warn if a test could not run."""
    failures: dict[str, str] = {}
    for group, names in GROUPS.items():
        for result in results:
            if TESTS[result.test] in names and result.status == FAILED:
                when = f" on {result.tested_at[:10]}" if result.remembered else ""
                failures.setdefault(group, f"{result.test} failed its self-test{when}: {result.reason}")
    if untested := [result for result in results if result.status == UNTESTED]:
        logger.warning(
            "%s kernels: used without a self-test of %s, which could not run: %s",
            PROGRAMS[program].label, ", ".join(result.test for result in untested), untested[0].reason,
        )  # fmt: skip
    return failures


def _kernels(
    subjects: Mapping[str, Subject], reasons: Mapping[str, str], head_dim: int, tests: Sequence[Result] = ()
) -> Kernels:
    """Return the ops of each group's subject, or the reference's if there is none."""
    implementation, account, attention = ops.load(REFERENCE), [], subjects.get("attention")
    for group, names in GROUPS.items():
        if subject := subjects.get(group):
            loaded = ops.load(subject.module, subject.tiles)
            named = (*names, "skips_rows", "least_rows") if group == "products" else names
            implementation = implementation._replace(**{op: getattr(loaded, op) for op in named})
        for op in names:
            has_op = subject and hasattr(importlib.import_module(subject.module), op)
            program = subject.program if subject and has_op else "reference"
            account.append(Choice(op, program, reasons[group]))
    module = importlib.import_module(attention.module) if attention else None
    make_work = getattr(module, "make_work", None)
    if attention and make_work:
        make_work = partial(
            make_work, num_heads=attention.num_heads, num_kv_heads=attention.num_kv_heads,
            head_dim=attention.pool_head_dim, pool_dtype=attention.pool_dtype, tiles=attention.tiles,
        )  # fmt: skip
    return Kernels(
        implementation,
        name=account[0].implementation,
        reason=account[0].reason,
        head_dim=head_dim,
        account=tuple(account),
        tests=tuple(tests),
        make_work=make_work,
        zeros=getattr(module, "zeros", None),
    )


def _subject(program: str, device_kind: str, model: Model) -> Subject:
    tiles: dict[str, tuning.Tiles] = {}
    if program == "cpu":
        pool_head_dim = -(-model["head_dim"] // checks.CPU_HEAD_DIM) * checks.CPU_HEAD_DIM
    else:
        pool_head_dim = next(h for h in checks.HEAD_DIMS if h >= model["head_dim"])
        for op in ("decode", "ragged"):
            tiles[op] = tuning.find(f"{program}.{op}", device_kind, pool_head_dim, model["pool_dtype"])
    return Subject(program, PROGRAMS[program].module, device_kind, pool_head_dim=pool_head_dim, tiles=tiles, **model)


def _unsupported(name: str, device: DeviceFacts, model: Model) -> str | None:
    """Return the reason why a program can't serve a model on a device; None if it can."""
    program = PROGRAMS[name]
    if device.platform not in program.platforms or not program.low <= (device.capability or 0) < program.high:
        detail = device.capability or device.platform
        return f"{program.label} kernels need {program.needs}, this is a {device.kind} ({detail})"
    if name == "mosaic" and (miscompiled := toolchain.miscompilation(toolchain.cuda_version())):
        return miscompiled
    # Loaded only where it is used: it brings jax's GPU lowering or llvmlite with it.
    reason: str | None = importlib.import_module(program.module).unsupported(**model)
    return reason

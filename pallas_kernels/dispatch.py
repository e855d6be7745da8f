"""Which implementation of the ops runs on a device, and why."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from pallas_kernels import checks, reference, tuning

NAMES = ("auto", "reference", "mosaic", "triton")
PROGRAMS = {"mosaic": "Mosaic GPU", "triton": "Pallas-Triton"}


@dataclass(frozen=True)
class Kernels:
    """One implementation of the ops, as `reference` defines them.

    Attributes:
        name: "reference", "mosaic" or "triton".
        reason: why this one was chosen.
        head_dim: of the pools that it takes, the model's or more.
    """

    name: str
    reason: str
    head_dim: int
    write_kv: Callable
    copy_blocks: Callable
    paged_decode_attention: Callable
    ragged_paged_attention: Callable


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
    debug: bool = False,
) -> Kernels:
    """The implementation `name` for a device and the shapes of a model.

    "auto" takes, on an NVIDIA GPU, the first that can serve the model of Mosaic (Hopper) and Triton (Ampere and later),
    else the reference.

    Args:
        name: "auto", "reference", "mosaic" or "triton".
        platform, device_kind, compute_capability: as a jax device gives them; capability None where unknown.
        dtype: of q, k and v.
        pool_dtype: of the pools, `dtype` where None; "float8_e4m3fn" where they are to hold fp8.
        debug: the ops also check the values of tables, lengths and slots, by `jax.experimental.checkify`: a wrong one
            is a ValueError that names it. Inside a jit that needs `checkify.checkify` around the function.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: `name` was asked for and can't run; the message says why.
    """
    if name not in NAMES:
        raise ValueError(f"kernels must be one of {', '.join(NAMES)}, not {name!r}")
    model = dict(
        dtype=dtype, pool_dtype=pool_dtype or dtype, head_dim=head_dim,
        num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size,
    )  # fmt: skip
    kernels = _choose(name, platform, device_kind, compute_capability, model)
    return _checked(kernels) if debug else kernels


def _choose(name: str, platform: str, device_kind: str, capability: float | None, model: dict[str, Any]) -> Kernels:
    if name == "reference":
        return _kernels(reference, name, "asked for", model["head_dim"], {})
    why = {}
    for program in ("mosaic", "triton") if name == "auto" else (name,):
        why[program] = _unsupported(program, platform, device_kind, capability, model)
        if why[program] is None:
            others = "; ".join(f"not {other}: {reason}" for other, reason in why.items() if reason)
            reason = "asked for" if name == program else f"the device is a {device_kind}" + (others and f"; {others}")
            pool_head_dim = next(h for h in checks.HEAD_DIMS if h >= model["head_dim"])
            tiles = {
                op: tuning.find(f"{program}.{op}", device_kind, pool_head_dim, model["pool_dtype"])
                for op in ("decode", "ragged")
            }
            module = importlib.import_module(f"pallas_kernels.{program}")
            return _kernels(module, program, reason, pool_head_dim, tiles)
    if name != "auto":
        raise NotImplementedError(f"kernels {name!r}: {why[name]}")
    if platform not in ("gpu", "cuda"):
        return _kernels(reference, "reference", f"the device is a {device_kind} ({platform})", model["head_dim"], {})
    reason = "; ".join(f"not {program}: {said}" for program, said in why.items())
    return _kernels(reference, "reference", reason, model["head_dim"], {})


def _unsupported(
    program: str, platform: str, device_kind: str, capability: float | None, model: dict[str, Any]
) -> str | None:
    """Why a program can't serve a model on a device, in words; None when it can."""
    needs = {"mosaic": "a Hopper GPU (compute capability 9.x)", "triton": "an NVIDIA GPU from Ampere on (8.0)"}[program]
    low, high = {"mosaic": (9.0, 10.0), "triton": (8.0, float("inf"))}[program]
    if platform not in ("gpu", "cuda") or capability is None or not low <= capability < high:
        return f"{PROGRAMS[program]} kernels need {needs}, this is a {device_kind} ({capability or platform})"
    # Loaded only where it is used: it brings jax's GPU lowering with it.
    return importlib.import_module(f"pallas_kernels.{program}").unsupported(**model)


def _kernels(module: ModuleType, name: str, reason: str, head_dim: int, tiles: dict[str, tuning.Tiles]) -> Kernels:
    def cut(op: Callable, key: str) -> Callable:
        return functools.partial(op, tiles=tiles[key]) if key in tiles else op

    return Kernels(
        name,
        reason,
        head_dim,
        write_kv=module.write_kv,
        copy_blocks=module.copy_blocks,
        paged_decode_attention=cut(module.paged_decode_attention, "decode"),
        ragged_paged_attention=cut(module.ragged_paged_attention, "ragged"),
    )


def _checked(kernels: Kernels) -> Kernels:
    """The same ops, that look at the values of what they are given before they run."""

    def write_kv(k_pool, v_pool, k_tkh, v_tkh, slot_mapping_t, **options):
        checks.check_slots(slot_mapping_t, k_pool.shape[0], k_pool.shape[2])
        return kernels.write_kv(k_pool, v_pool, k_tkh, v_tkh, slot_mapping_t, **options)

    def copy_blocks(pool, sources_c, destinations_c):
        checks.check_copies(sources_c, destinations_c, pool.shape[0])
        return kernels.copy_blocks(pool, sources_c, destinations_c)

    def attention(op):
        def checked(q, k_pool, v_pool, block_tables_sw, context_lens_s, cu_q_lens_s1=None, **options):
            checks.check_batch(
                block_tables_sw, context_lens_s, cu_q_lens_s1,
                num_rows=q.shape[0], num_blocks=k_pool.shape[0], block_size=k_pool.shape[2],
            )  # fmt: skip
            lens = (context_lens_s,) if cu_q_lens_s1 is None else (context_lens_s, cu_q_lens_s1)
            return op(q, k_pool, v_pool, block_tables_sw, *lens, **options)

        return checked

    return replace(
        kernels,
        write_kv=write_kv,
        copy_blocks=copy_blocks,
        paged_decode_attention=attention(kernels.paged_decode_attention),
        ragged_paged_attention=attention(kernels.ragged_paged_attention),
    )

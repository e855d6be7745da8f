"""Which implementation of the ops runs on a device, and why."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from pallas_kernels import reference


@dataclass(frozen=True)
class Kernels:
    """One implementation of the ops; `reference` holds their definitions, `reason` says why this one was chosen."""

    name: str
    reason: str
    write_kv: Callable
    paged_decode_attention: Callable
    ragged_paged_attention: Callable
    copy_blocks: Callable


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
) -> Kernels:
    """The implementation `name` ("auto", "reference" or "mosaic") for a device and the shapes of a model.

    "auto" takes the Mosaic kernels on NVIDIA GPUs from Hopper on where they can take the model, else the reference.

    Args:
        platform, device_kind, compute_capability: as a jax device gives them; capability None where unknown.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: `name` was asked for and can't run; the message says why.
    """
    if name not in ("auto", "reference", "mosaic"):
        raise ValueError(f"kernels must be auto, reference or mosaic, not {name!r}")
    if name == "reference":
        return _kernels(reference, "reference", "asked for")
    if name == "auto" and platform not in ("gpu", "cuda"):
        return _kernels(reference, "reference", f"the device is a {device_kind} ({platform})")
    if compute_capability is None or not 9.0 <= compute_capability < 10.0:
        why = (
            f"Mosaic kernels need a Hopper GPU (compute capability 9.x), this is a {device_kind} ({compute_capability})"
        )
    else:
        mosaic = importlib.import_module("pallas_kernels.mosaic")  # only where it is used: it loads jax's GPU lowering
        shapes = dict(head_dim=head_dim, block_size=block_size, num_heads=num_heads, num_kv_heads=num_kv_heads)
        why = mosaic.unsupported(dtype=dtype, **shapes)
        if why is None:
            return _kernels(mosaic, "mosaic", f"the device is a {device_kind}")
    if name == "mosaic":
        raise NotImplementedError(f"kernels 'mosaic': {why}")
    return _kernels(reference, "reference", why)


def _kernels(module, name: str, reason: str) -> Kernels:
    return Kernels(
        name,
        reason,
        write_kv=module.write_kv,
        paged_decode_attention=module.paged_decode_attention,
        ragged_paged_attention=module.ragged_paged_attention,
        copy_blocks=reference.copy_blocks,  # XLA's own gather and scatter are a copy already
    )

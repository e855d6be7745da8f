"""Running the Pallas-Triton kernels on a CPU, in Pallas's interpreter."""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import jax
from jax import lax

from pallas_kernels.triton import attention, launch


def interpreted(op):
    """Return `op` of `pallas_kernels.triton` as the interpreter runs it."""

    def run(*args, **kwargs):
        with interpreting():
            return jax.jit(lambda *args: op(*args, **kwargs))(*args)

    return run


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Let the interpreter run every kernel that is traced inside."""
    with (
        mock.patch.object(launch, "pallas_call", functools.partial(launch.pallas_call, interpret=True)),
        mock.patch.object(attention, "F32_PRODUCT", lax.DotAlgorithmPreset.F32_F32_F32),  # a CPU has no TF32
    ):
        yield

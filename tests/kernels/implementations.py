"""Every implementation of the ops in a form that runs on a CPU."""

import functools

import jax

from pallas_kernels import Kernels, mosaic, reference, triton
from tests.kernels import mosaic_interpreter, triton_interpreter


def jitted(op):
    return lambda *args, **kwargs: jax.jit(functools.partial(op, **kwargs))(*args)


def kernels_of(module, run=lambda op: op) -> Kernels:
    """Return the ops of a module, each in the form that `run` makes of it."""
    return Kernels(
        name=module.__name__.rpartition(".")[2],
        reason="to be tested",
        head_dim=0,
        write_kv=run(module.write_kv),
        copy_blocks=run(module.copy_blocks),
        paged_decode_attention=run(module.paged_decode_attention),
        ragged_paged_attention=run(module.ragged_paged_attention),
    )


REFERENCE = kernels_of(reference, jitted)
TRITON = kernels_of(triton, triton_interpreter.interpreted)
# Two multiprocessors, so that a thread block of decode has more than one split to walk.
MOSAIC = kernels_of(mosaic, functools.partial(mosaic_interpreter.interpreted, num_sms=2))
ALL = (REFERENCE, TRITON, MOSAIC)

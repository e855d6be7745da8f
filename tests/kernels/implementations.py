"""Every implementation of the ops in a form that runs on a CPU."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax

from pallas_kernels import Kernels, Ops, cpu, load, mosaic, reference, triton
from tests.kernels import mosaic_interpreter, triton_interpreter


def jitted(op):
    return lambda *args, **kwargs: jax.jit(functools.partial(op, **kwargs))(*args)


def ops_of(module, **tiles) -> Ops:
    """Return the ops of a module, for a compiler or an interpreter; tiles by "decode" and "ragged"."""
    return Ops(load(module.__name__, tiles))


def kernels_of(module, **replaced) -> Kernels:
    """Return the ops of a module as an engine takes them, some of its functions replaced."""
    implementation = load(module.__name__)._replace(**replaced)
    return Kernels(implementation, name=module.__name__.rpartition(".")[2], reason="to be tested", head_dim=0)


class Wrapped(NamedTuple):
    """The ops of a module, each in a form that runs on a CPU."""

    name: str
    write_kv: Callable
    copy_blocks: Callable
    paged_decode_attention: Callable
    ragged_paged_attention: Callable
    product: Callable
    delta_rule: Callable


def wrapped(module, run) -> Wrapped:
    """Apply `run` to each op of a module."""
    ops = ops_of(module)
    return Wrapped(module.__name__.rpartition(".")[2], *(run(getattr(ops, op)) for op in Wrapped._fields[1:]))


REFERENCE = wrapped(reference, jitted)
TRITON = wrapped(triton, triton_interpreter.interpreted)
# Two multiprocessors, so that a thread block of decode has more than one split to walk.
MOSAIC = wrapped(mosaic, functools.partial(mosaic_interpreter.interpreted, num_sms=2))
CPU = wrapped(cpu, jitted)
ALL = (REFERENCE, CPU, TRITON, MOSAIC)

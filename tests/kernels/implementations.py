"""Every implementation of the ops in a form that runs on a CPU.

The Mosaic kernels run in Pallas's GPU interpreter, which has TMA copies, barriers, wgmma and warpgroups, gives
uninitialised memory NaN, and tells of races.
"""

import contextlib
import functools
import io
import warnings

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import Kernels, mosaic, reference
from tests.deviceless import abstract_h200


def interpreted(op):
    """`op` as the interpreter runs it; a race is an AssertionError."""

    def run(*args, **kwargs):
        params = plgpu.InterpretGPUParams(detect_races=True)
        printed = io.StringIO()  # races are printed; the flag that jax keeps tells of an op's last kernel alone
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # numpy's products in the interpreter meet the NaN that unused slots hold
            warnings.filterwarnings("ignore", "invalid value encountered in matmul", RuntimeWarning)
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.enter_context(abstract_h200())
            stack.enter_context(plgpu.force_gpu_interpret_mode(params))
            out = jax.block_until_ready(jax.jit(lambda *args: op(*args, **kwargs))(*args))
        assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()
        return out

    return run


def jitted(op):
    return lambda *args, **kwargs: jax.jit(functools.partial(op, **kwargs))(*args)


def _with(module, run) -> Kernels:
    return Kernels(
        name=module.__name__,
        reason="to be tested",
        write_kv=run(module.write_kv),
        paged_decode_attention=run(module.paged_decode_attention),
        ragged_paged_attention=run(module.ragged_paged_attention),
        copy_blocks=reference.copy_blocks,
    )


REFERENCE = _with(reference, jitted)
MOSAIC = _with(mosaic, interpreted)

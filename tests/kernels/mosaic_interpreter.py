"""The Mosaic GPU kernels on a CPU: Pallas's GPU interpreter, and the three operations of ours that it lacks.

It has TMA copies, barriers, wgmma and warpgroups, gives uninitialised memory NaN, and tells of races. Missing, up to
jax 0.12, are a wgmma whose left operand is in registers, a store into an accumulator, and our code on registers that
unpacks numbers; they are added here. A wgmma adds products in the order of the hardware's instructions, so that the
bits of a sum tell of the order of its tiles.
"""

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.mosaic.numbers import unpack_registers
from pallas_kernels.weights import unpack

_interpret = jaxpr_interpret.JaxprInterpreter.interpret
_interpret_wgmma = jaxpr_interpret.JaxprInterpreter._interpret_wgmma_ref_p
_interpret_inline = jaxpr_interpret.JaxprInterpreter._interpret_inline_mgpu_p
DEPTH_BYTES = 32  # of each row that one instruction takes


def interpreted(op, *, num_sms: int = 132):
    """Return `op` as the interpreter runs it on a GPU of `num_sms` multiprocessors; a race is an AssertionError."""

    def run(*args, **kwargs):
        with interpreting(num_sms=num_sms):
            return jax.block_until_ready(jax.jit(lambda *args: op(*args, **kwargs))(*args))

    return run


@contextlib.contextmanager
def interpreting(*, num_sms: int = 132) -> Iterator[None]:
    """Let the interpreter run every kernel that is compiled and called inside; a race is an AssertionError."""
    params = plgpu.InterpretGPUParams(detect_races=True)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=num_sms, platform="gpu")
    printed = io.StringIO()  # races are printed; the flag that jax keeps tells of an op's last kernel alone
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # numpy's products in the interpreter meet the NaN that unused slots hold
        warnings.filterwarnings("ignore", "invalid value encountered in matmul", RuntimeWarning)
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(use_abstract_mesh(AbstractMesh((), (), abstract_device=device)))
        stack.enter_context(_extended())
        stack.enter_context(plgpu.force_gpu_interpret_mode(params))
        yield
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()


@contextlib.contextmanager
def _extended() -> Iterator[None]:
    interpreter = jaxpr_interpret.JaxprInterpreter
    interpreter.interpret, interpreter._interpret_wgmma_ref_p = _with_stores, _wgmma
    interpreter._interpret_inline_mgpu_p = _unpack
    try:
        yield
    finally:
        interpreter.interpret, interpreter._interpret_wgmma_ref_p = _interpret, _interpret_wgmma
        interpreter._interpret_inline_mgpu_p = _interpret_inline


def _with_stores(self, jaxpr, token, *args):
    """The interpreter's one loop over primitives takes no additions, so a store goes to `_wgmma` in disguise."""

    def disguised(eqn):
        if eqn.primitive is not gpu_primitives.wgmma_accumulator_store_p:
            return eqn
        return eqn.replace(primitive=gpu_primitives.wgmma_ref_p, outvars=[], params=dict(store=True))

    return _interpret(self, jaxpr.replace(eqns=[disguised(eqn) for eqn in jaxpr.eqns]), token, *args)


def _unpack(self, eqn, token, get_invals):
    """What `unpack_registers` does; a test reads that function's operations."""
    function = eqn.params["mgpu_fn"]
    assert function.func is unpack_registers, function
    [numbers], [result] = get_invals(), eqn.params["flat_ret_ty"]
    bits = unpack(lax.bitcast_convert_type(numbers, jnp.uint8)).astype(jnp.uint16) | function.keywords["pattern"]
    return token, [lax.bitcast_convert_type(bits.astype(jnp.uint16), result.dtype)]


def _wgmma(self, eqn, token, get_invals):
    arrays = dict(token=token, mesh_location=self.mesh_location, thread=self.thread)
    if "store" in eqn.params:
        acc, value = get_invals()
        operation, arrays = _store, arrays | dict(acc=acc, value=value)
    else:
        acc, a, b, *leaves = get_invals()
        assert eqn.params["acc_transforms_tree"] is None
        trees = [eqn.params[f"{name}_transforms_tree"] or jax.tree.structure(()) for name in "ab"]
        a_transforms, b_transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
        in_registers = not isinstance(eqn.invars[1].aval, state_types.AbstractRef)
        if not in_registers:
            a, a_transforms = jaxpr_interpret.resolve_ref(eqn.invars[1].aval, a, a_transforms)
        b, b_transforms = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, b, b_transforms)
        operation = functools.partial(_multiply, in_registers=in_registers)
        arrays |= dict(acc=acc, a=a, a_transforms=a_transforms, b=b, b_transforms=b_transforms)
    operation = functools.partial(operation, source_info=eqn.source_info)
    return callback.io_callback(operation, gpu_callbacks.TOKEN_SHAPE_DTYPE, **arrays), []


@gpu_callbacks.fail_on_exception
def _store(*, token, mesh_location, thread, acc, value, source_info):
    """acc = value"""
    shared_memory = gpu_callbacks._get_shared_memory()
    acc = gpu_callbacks.HostAllocationKey.from_array(acc)
    info = memory.GPULoggingInfo(mesh_location, thread, source_info)
    access = shared_memory.access(acc, ())
    shared_memory.store_buffer_content(acc, access, np.asarray(value), thread, logging_info=info)
    return token


@gpu_callbacks.fail_on_exception
def _multiply(
    *, token, mesh_location, thread, acc, a, a_transforms, b, b_transforms, in_registers, source_info
):  # fmt: skip
    """acc += a @ b"""
    shared_memory = gpu_callbacks._get_shared_memory()
    info = dict(logging_info=memory.GPULoggingInfo(mesh_location, thread, source_info))

    def content(key, transforms):
        key = gpu_callbacks.HostAllocationKey.from_array(key)
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        return shared_memory.get_buffer_content(key, shared_memory.access(key, transforms), thread, **info)[0]

    a_value = np.asarray(a) if in_registers else content(a, a_transforms)
    result = _sum(content(acc, ()), a_value, content(b, b_transforms))
    acc = gpu_callbacks.HostAllocationKey.from_array(acc)
    shared_memory.store_buffer_content(acc, shared_memory.access(acc, ()), result, thread, **info)
    return token


def _sum(acc, a, b):
    """Return acc + a @ b, rounded after each instruction, whose products are added exactly."""
    depth = DEPTH_BYTES // a.dtype.itemsize
    a, b = a.astype(np.float64), b.astype(np.float64)
    for at in range(0, a.shape[1], depth):
        acc = (acc + a[:, at : at + depth] @ b[at : at + depth]).astype(acc.dtype)
    return acc

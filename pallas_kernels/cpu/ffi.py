"""Compiled functions as targets of XLA's foreign function interface, which run on the threads of XLA's pool.

The layouts are from `xla/ffi/api/c_api.h`, a header of jaxlib. In version 0.x of the interface, fields are only added
at the end of structures.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import jax
from llvmlite import binding, ir

from pallas_kernels.cpu.code import I8, I32, I64, POINTER, VOID, Code, Number, Value, Variable
from pallas_kernels.cpu.objects import engine_of

# Offsets in bytes.
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGUMENTS, FRAME_RESULTS = 8, 16, 24, 72, 112
BUFFER_DATA, BUFFER_DIMS = 24, 40
EXTENSION_KIND, EXTENSION_METADATA, METADATA_MAJOR, METADATA_MINOR = 8, 24, 24, 28
METADATA_KIND = 1
API_DESTROY_ERROR, API_SCHEDULE, API_NUM_THREADS = 64, 136, 144

# A call's job: the next unit, the finished units, the threads that may still look at it, and the call.
NEXT, DONE, USERS, UNITS, FRAME, JOB_SIZE = 0, 1, 2, 3, 4, 5

_lock = threading.Lock()
_engines: dict[str, Any] = {}  # target -> its code, which lives as long as the process


class CallFrame:
    """The arguments and results of a call, as its function sees them."""

    def __init__(self, code: Code, frame: Value):
        self.code, self.frame = code, frame

    def _buffer(self, offset: int, index: Number) -> Value:
        return self.code.load(field(self.frame, offset, POINTER), index, POINTER)

    def argument(self, index: Number) -> Value:
        """Return the address of an argument's numbers."""
        return field(self._buffer(FRAME_ARGUMENTS, index), BUFFER_DATA, POINTER)

    def result(self, index: Number) -> Value:
        """Return the address of a result's numbers."""
        return field(self._buffer(FRAME_RESULTS, index), BUFFER_DATA, POINTER)

    def size(self, index: Number, axis: int) -> Value:
        """Return the size of an argument's axis."""
        return self.code.load(field(self._buffer(FRAME_ARGUMENTS, index), BUFFER_DIMS, POINTER), axis, I64)


def field(structure: Value, offset: int, kind: Any) -> Value:
    """Return a field of a structure."""
    return structure.code.load(structure.code.at(structure, offset, I8), 0, kind)


def register(name: str, units: Callable[[CallFrame], Value], work: Callable[[CallFrame, Value], None]) -> str:
    """Make the target `name`, unless it exists, and return its name.

    Args:
        units: writes the code that counts the units of a call's work.
        work: writes the code of one unit, given its number. Units run at the same time.
    """
    with _lock:
        if name in _engines:
            return name
        engine = engine_of(str(_module(name, units, work)))
        handler = ctypes.c_void_p(engine.get_function_address("handler"))
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
        _engines[name] = engine
    return name


def _module(name: str, units: Callable[[CallFrame], Value], work: Callable[[CallFrame, Value], None]) -> ir.Module:
    """Return the module of a target: a handler that divides its work among threads."""
    module = ir.Module(name)
    module.triple = binding.get_default_triple()
    unit = Code(module, "unit", VOID, [POINTER, I64])
    unit.function.linkage = "internal"
    work(CallFrame(unit, unit.arguments[0]), unit.arguments[1])
    unit.builder.ret_void()

    # The function of a thread works on units as long as there are any, and leaves the job.
    take = Code(module, "take", VOID, [POINTER])
    (job,) = take.arguments
    number = Variable(take.value(0, I64))

    def next_unit() -> Value:
        number.set(_add(take, job, NEXT, 1))
        return number.get().compare("<", take.load(job, UNITS, I64))

    with take.as_long_as(next_unit):
        take.builder.call(unit.function, [take.load(job, FRAME, POINTER).llvm, number.get().llvm])
        _add(take, job, DONE, 1)
    _leave(take, job)
    take.builder.ret_void()
    _handler(module, take, units)
    return module


def _handler(module: ir.Module, take: Code, units: Callable[[CallFrame], Value]) -> None:
    code = Code(module, "handler", POINTER, [POINTER])
    (frame,) = code.arguments
    null = ir.Constant(POINTER, None)
    # At registration XLA asks for the version of the interface.
    extension = field(frame, FRAME_EXTENSION, POINTER)
    with (
        code.when(_is_set(extension)),
        code.when(field(extension, EXTENSION_KIND, I32).compare("==", METADATA_KIND)),
    ):
        metadata = field(extension, EXTENSION_METADATA, POINTER)
        for offset, number in ((METADATA_MAJOR, 0), (METADATA_MINOR, 1)):
            code.store(code.value(number, I32), code.at(metadata, offset, I8), 0)
        code.builder.ret(null)
    api, context = field(frame, FRAME_API, POINTER), field(frame, FRAME_CONTEXT, POINTER)
    threads = code.scratch(1, I64)
    code.store(code.value(1, I64), threads, 0)
    _call_api(code, api, API_NUM_THREADS, context, threads)
    total = units(CallFrame(code, frame))
    # The calling thread works too.
    helpers = code.maximum(code.value(0, I64), code.minimum(code.load(threads, 0, I64), total) - 1)
    job = code.intrinsic("malloc", code.value(8 * JOB_SIZE, I64), result=POINTER)
    for index, value in ((NEXT, 0), (DONE, 0), (USERS, helpers + 2), (UNITS, total), (FRAME, frame)):
        code.store(code.value(value, I64), job, index)
    with code.loop(0, helpers), code.when(_call_api(code, api, API_SCHEDULE, context, Value(code, take.function), job)):
        _add(code, job, USERS, -1)
    code.builder.call(take.function, [job.llvm])
    # Other threads may be in their last units. Threads that have not begun find none, and the caller does not wait.
    done = code.at(job, DONE, I64).llvm

    with code.as_long_as(
        lambda: Value(code, code.builder.load_atomic(done, "acquire", 8, typ=I64)).compare("<", total)
    ):
        code.intrinsic("sched_yield", result=I32)
    _leave(code, job)
    code.builder.ret(null)


def _leave(code: Code, job: Value) -> None:
    """Write a thread's last look at a job, which the last thread frees."""
    with code.when(_add(code, job, USERS, -1).compare("==", 1)):
        code.intrinsic("free", job, result=VOID)


def _call_api(code: Code, api: Value, function: int, *fields: Value) -> Value:
    """Call a function of the interface with the structure of its arguments, and return whether it failed."""

    def call(function: int, *fields: Value) -> Value:
        structure = code.scratch(2 + len(fields), I64)
        values: tuple[Number, ...] = (8 * (2 + len(fields)), 0, *fields)
        for index, value in enumerate(values):
            code.store(code.value(value, I64), structure, index)
        return code.call(field(api, function, POINTER), ir.FunctionType(POINTER, [POINTER]), structure)

    error = call(function, *fields)
    failed = _is_set(error)
    with code.when(failed):
        call(API_DESTROY_ERROR, error)
    return failed


def _is_set(pointer: Value) -> Value:
    """Return whether a pointer is not null."""
    return Value(pointer.code, pointer.code.builder.icmp_unsigned("!=", pointer.llvm, ir.Constant(POINTER, None)))


def _add(code: Code, job: Value, index: int, number: int) -> Value:
    """Add to a counter that threads share, and return its value before."""
    address = code.at(job, index, I64).llvm
    return Value(code, code.builder.atomic_rmw("add", address, ir.Constant(I64, number), "acq_rel"))

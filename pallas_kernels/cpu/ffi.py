"""Compiled functions as targets of XLA's foreign function interface, whose work is shared by the threads of a team.

The layouts are from `xla/ffi/api/c_api.h`, a header of jaxlib. In version 0.x of the interface, fields are only added
at the end of structures.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import jax
from llvmlite import binding, ir

from pallas_kernels.cpu import team
from pallas_kernels.cpu.code import I8, I32, I64, POINTER, VOID, Code, Number, Value, Variable
from pallas_kernels.cpu.objects import engine_of

# Offsets in bytes.
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGUMENTS, FRAME_RESULTS = 8, 16, 24, 72, 112
BUFFER_DATA, BUFFER_DIMS = 24, 40
EXTENSION_KIND, EXTENSION_METADATA, METADATA_MAJOR, METADATA_MINOR = 8, 24, 24, 28
METADATA_KIND = 1

# A call's job: the next unit, the finished units, the threads that may still look at it, their number of units, the
# call, and the function that works on it.
NEXT, DONE, USERS, UNITS, FRAME, TAKE, JOB_SIZE = range(7)

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
        team.start(engine_of, _join)
        engine = engine_of(_module(name, units, work))
        handler = ctypes.c_void_p(engine.get_function_address("handler"))
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
        _engines[name] = engine
    return name


def _join(code: Code, job: Value) -> None:
    """Write the work of another thread on a job."""
    code.add(job, USERS, 1)
    team.taken(code)
    code.call(code.load(job, TAKE, POINTER), ir.FunctionType(VOID, [POINTER]), job)


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
        number.set(take.add(job, NEXT, 1))
        return number.get().compare("<", take.load(job, UNITS, I64))

    with take.as_long_as(next_unit):
        take.builder.call(unit.function, [take.load(job, FRAME, POINTER).llvm, number.get().llvm])
        take.add(job, DONE, 1)
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
    total = units(CallFrame(code, frame))
    job = code.intrinsic("malloc", code.value(8 * JOB_SIZE, I64), result=POINTER)
    for index, value in ((NEXT, 0), (DONE, 0), (USERS, 2), (UNITS, total), (FRAME, frame)):
        code.store(code.value(value, I64), job, index)
    code.store(Value(code, take.function), job, TAKE)
    work = lambda: code.builder.call(take.function, [job.llvm])
    with code.when(total.compare("<=", 1)):
        work()
    with code.when(total.compare(">", 1)):
        team.offer(code, job, work)
    # Other threads may be in their last units. Threads that have not begun find none, and the caller does not wait.
    with code.as_long_as(lambda: code.load_atomic(job, DONE).compare("<", total)):
        code.intrinsic("sched_yield", result=I32)
    _leave(code, job)
    code.builder.ret(null)


def _leave(code: Code, job: Value) -> None:
    """Write a thread's last look at a job, which the last thread frees."""
    with code.when(code.add(job, USERS, -1).compare("==", 1)):
        code.intrinsic("free", job, result=VOID)


def _is_set(pointer: Value) -> Value:
    """Return whether a pointer is not null."""
    return Value(pointer.code, pointer.code.builder.icmp_unsigned("!=", pointer.llvm, ir.Constant(POINTER, None)))

"""Compiled functions as targets of XLA's foreign function interface, whose work the threads of a team share.

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

# A call's job: the next unit, the finished units, the threads that may still look at it, the units, the call, the
# memory that the units share, whether the calling thread sleeps until the last unit is finished, and the function of a
# thread that works on it.
NEXT, DONE, USERS, UNITS, FRAME, SCRATCH, SLEEPS, TAKE, JOB_SIZE = range(9)

SPINS = 5000  # looks at the number of finished units before the calling thread sleeps: about 50 microseconds
WORTH_A_THREAD_NS = 5000  # work for which a thread is asked to help

_lock = threading.Lock()
_engines: dict[str, Any] = {}  # target -> its code, which lives as long as the process

Writer = Callable[["CallFrame"], Value]


class CallFrame:
    """The arguments and results of a call, as its function sees them."""

    def __init__(self, code: Code, job: Value):
        self.code, self._job, self.frame = code, job, code.load(job, FRAME, POINTER)

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

    def result_size(self, index: Number, axis: int) -> Value:
        """Return the size of a result's axis."""
        return self.code.load(field(self._buffer(FRAME_RESULTS, index), BUFFER_DIMS, POINTER), axis, I64)

    def allocate(self, num_bytes: Value) -> Value:
        """Return the address of memory for the units of the call, which `scratch` returns in them."""
        memory = self.code.intrinsic("malloc", num_bytes, result=POINTER)
        self.code.store(memory, self._job, SCRATCH)
        return memory

    @property
    def scratch(self) -> Value:
        """The address of the memory that the counting of the units has allocated."""
        return self.code.load(self._job, SCRATCH, POINTER)


def field(structure: Value, offset: int, kind: Any) -> Value:
    """Return a field of a structure."""
    return structure.code.load(structure.code.at(structure, offset, I8), 0, kind)


def register(
    name: str,
    units: Writer,
    work: Callable[[CallFrame, Value], None],
    *,
    nanoseconds: Writer | None = None,
    finish: Callable[[CallFrame], None] | None = None,
) -> str:
    """Make the target `name`, unless it exists, and return its name.

    Args:
        name: tells the target from all others: its code may have been written in another process.
        units: writes the code that counts the units of a call's work.
        work: writes the code of one unit, given its number. Units run at the same time.
        nanoseconds: writes the code that estimates the time of all units on one thread, after `units`. Little work
            stays on the calling thread. None: there is much.
        finish: writes code that runs once, after all units.
    """
    with _lock:
        if name in _engines:
            return name

        def write() -> ir.Module:
            module = ir.Module(name)
            module.triple = binding.get_default_triple()
            unit = Code(module, "unit", VOID, [POINTER, I64])
            unit.function.linkage = "internal"
            work(CallFrame(unit, unit.arguments[0]), unit.arguments[1])
            unit.builder.ret_void()
            _handler(module, _take(module, unit), units, nanoseconds, finish)
            return module

        team.start(engine_of, _join)
        engine = engine_of(name, write)
        handler = ctypes.c_void_p(engine.get_function_address("handler"))
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
        _engines[name] = engine
    return name


def _join(code: Code, job: Value) -> None:
    """Write the work of another thread of the team on a job."""
    code.add(job, USERS, 1)
    team.taken(code)
    code.call(code.load(job, TAKE, POINTER), ir.FunctionType(VOID, [POINTER]), job)


def _take(module: ir.Module, unit: Code) -> Code:
    """Write the function of a thread, which works on units as long as there are any, and leaves the job."""
    code = Code(module, "take", VOID, [POINTER])
    (job,) = code.arguments
    number = Variable(code.value(0, I64))

    def next_unit() -> Value:
        number.set(code.add(job, NEXT, 1))
        return number.get().compare("<", code.load(job, UNITS, I64))

    with code.as_long_as(next_unit):
        code.builder.call(unit.function, [job.llvm, number.get().llvm])
        done = code.add(job, DONE, 1) + 1
        if team.FUTEX:
            with (
                code.when(done.compare("==", code.load(job, UNITS, I64))),
                code.when(code.load_atomic(job, SLEEPS).compare("!=", 0)),
            ):
                team.futex(code, job, DONE, team.FUTEX_WAKE, code.value(1, I64))
    _leave(code, job)
    code.builder.ret_void()
    return code


def _handler(
    module: ir.Module, take: Code, units: Writer, nanoseconds: Writer | None,
    finish: Callable[[CallFrame], None] | None,
) -> None:  # fmt: skip
    """Write the handler of a target, which divides its work among threads."""
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
    job = code.intrinsic("malloc", code.value(8 * JOB_SIZE, I64), result=POINTER)
    for index, value in ((NEXT, 0), (DONE, 0), (FRAME, frame), (SCRATCH, 0), (SLEEPS, 0)):
        code.store(code.value(value, I64), job, index)
    call = CallFrame(code, job)
    total = units(call)
    code.store(total, job, UNITS)
    code.store(code.value(2, I64), job, USERS)
    code.store(Value(code, take.function), job, TAKE)

    def work() -> None:
        code.builder.call(take.function, [job.llvm])

    is_shared = total.compare(">", 1)
    if nanoseconds:
        is_shared = code.both(is_shared, nanoseconds(call).compare(">=", WORTH_A_THREAD_NS))
    with code.when(is_shared):
        team.offer(code, job, work)
    with code.when(code.invert(is_shared)):
        work()
    # Other threads may be in their last units. Threads that have not begun find none, and the caller does not wait.
    _wait(code, job, total)
    if finish:
        finish(call)
    _leave(code, job)
    code.builder.ret(null)


def _wait(code: Code, job: Value, total: Value) -> None:
    """Write the calling thread's wait for the last units.

    After a while it sleeps: another thread may have lost its core to another process, and takes this one then.
    """
    spins = Variable(code.value(0, I64))

    with code.as_long_as(lambda: code.load_atomic(job, DONE).compare("<", total)):
        spins.set(spins.get() + 1)
        team.pause(code)
        with code.when(spins.get().compare(">=", SPINS)):
            if team.FUTEX:
                code.add(job, SLEEPS, 1)
                seen = code.load_atomic(job, DONE)
                with code.when(seen.compare("<", total)):
                    team.futex(code, job, DONE, team.FUTEX_WAIT, seen)
            else:
                code.intrinsic("sched_yield", result=I32)


def _leave(code: Code, job: Value) -> None:
    """Write a thread's last look at a job, which the last thread frees."""
    with code.when(code.add(job, USERS, -1).compare("==", 1)):
        for memory in (code.load(job, SCRATCH, POINTER), job):
            code.intrinsic("free", memory, result=VOID)


def _is_set(pointer: Value) -> Value:
    """Return whether a pointer is not null."""
    return Value(pointer.code, pointer.code.builder.icmp_unsigned("!=", pointer.llvm, ir.Constant(POINTER, None)))

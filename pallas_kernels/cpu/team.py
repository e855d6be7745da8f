"""Threads of the process that share the work of a call, beside the thread that makes it.

A call lasts for microseconds, in which a sleeping thread would not even wake up. Therefore the threads look for the
next call for a while, and sleep only if there is none. A call that comes while another one has the threads runs alone.
"""

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir

from pallas_kernels.cpu.code import I32, I64, POINTER, VOID, Code, Value, Variable

# The state that all threads share, each number in a cache line of its own: whether a call has the threads, the job that
# it offers or 0, the threads that are about to take it, the number of offers, and the sleeping threads.
IN_USE, OFFERED, TAKING, OFFERS, SLEEPING = range(0, 40, 8)
STATE, STATE_BYTES = "jpaged_team", 5 * 64  # a symbol: compiled code is kept, and its address is another one next time
SPINS = 1000  # looks for an offer before a thread sleeps: about 25 microseconds, more than XLA needs between two calls
PAUSE = "llvm.x86.sse2.pause" if platform.machine() in ("x86_64", "AMD64") else None  # leaves the core to others
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None  # a system call
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # within one process
NAP_US = 100  # microseconds of sleep between two looks, where there is no futex

_state = ctypes.create_string_buffer(STATE_BYTES + 64)
_started = threading.Lock()
_engines: list[Any] = []  # the code of the threads, which lives as long as the process


def num_threads() -> int:
    """Return the number of processors that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start(compile: Callable[[str, Callable[[], ir.Module]], Any], join: Callable[[Code, Value], None]) -> None:
    """Start the threads, unless they run.

    Args:
        compile: return the engine of a module with a name, in which code can be called; it may write the module.
        join: write the code of a thread that works on an offered job.
    """
    with _started:
        if _engines:
            return
        binding.add_symbol(STATE, (ctypes.addressof(_state) + 63) // 64 * 64)
        _engines.append(compile("team", lambda: _thread(join)))
        for kept in (_engines[0], _state):  # the threads still run when the interpreter ends
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        thread, create = ctypes.c_size_t(), ctypes.CDLL(None).pthread_create
        address = ctypes.c_void_p(_engines[0].get_function_address("thread"))
        for _ in range(num_threads() - 1):
            create(ctypes.byref(thread), None, address, None)


def offer(code: Code, job: Value, work: Callable[[], None]) -> None:
    """Write the code that offers a job to the threads, does its own part, and takes the offer back.

    Args:
        work: write the calling thread's part.
    """
    state = _state_of(code)
    is_ours = code.exchange(state, IN_USE, code.value(1, I64)).compare("==", 0)
    with code.when(is_ours):
        code.exchange(state, OFFERED, code.cast("ptrtoint", job, I64))
        code.add(state, OFFERS, 1)
        if FUTEX:
            with code.when(code.load_atomic(state, SLEEPING).compare(">", 0)):
                futex(code, state, OFFERS, FUTEX_WAKE, code.value(2**30, I64))
    work()
    with code.when(is_ours):
        code.exchange(state, OFFERED, code.value(0, I64))
        with code.as_long_as(lambda: code.load_atomic(state, TAKING).compare(">", 0)):  # for some nanoseconds
            pause(code)
        code.exchange(state, IN_USE, code.value(0, I64))


def _thread(join: Callable[[Code, Value], None]) -> ir.Module:
    """Return a module with the endless function of a thread."""
    module = ir.Module("team")
    module.triple = binding.get_default_triple()
    code = Code(module, "thread", POINTER, [POINTER])
    state = _state_of(code)
    seen, spins = Variable(code.value(0, I64)), Variable(code.value(0, I64))
    with code.as_long_as(lambda: code.value(0, I64).compare("==", 0)):
        spins.set(code.value(0, I64))
        with code.as_long_as(
            lambda: code.both(
                spins.get().compare("<", SPINS), code.load_atomic(state, OFFERS).compare("==", seen.get())
            )
        ):
            spins.set(spins.get() + 1)
            pause(code)
        with code.when(spins.get().compare(">=", SPINS)):
            if FUTEX:
                code.add(state, SLEEPING, 1)
                futex(code, state, OFFERS, FUTEX_WAIT, seen.get())
                code.add(state, SLEEPING, -1)
            else:
                code.intrinsic("usleep", code.value(NAP_US, I32), result=I32)
        seen.set(code.load_atomic(state, OFFERS))
        code.add(state, TAKING, 1)
        job = code.load_atomic(state, OFFERED)
        with code.when(job.compare("!=", 0)):
            join(code, code.cast("inttoptr", job, POINTER))
        with code.when(job.compare("==", 0)):
            code.add(state, TAKING, -1)
    code.builder.ret(ir.Constant(POINTER, None))
    return module


def taken(code: Code) -> None:
    """Write the end of taking a job: from here on the job's own count of its users keeps it alive."""
    code.add(_state_of(code), TAKING, -1)


def _state_of(code: Code) -> Value:
    kind = ir.ArrayType(I64, STATE_BYTES // 8)
    state = code.module.globals.get(STATE) or ir.GlobalVariable(code.module, kind, STATE)
    return Value(code, state.bitcast(POINTER))


def pause(code: Code) -> None:
    """Write a pause between two looks at a number, which leaves the core to its other thread."""
    if PAUSE:
        code.intrinsic(PAUSE, result=VOID)


def futex(code: Code, counters: Value, index: int, operation: int, value: Value) -> None:
    """Write a system call: sleep while a number that threads share is `value`, or wake `value` sleeping threads."""
    kind = ir.FunctionType(I64, [I64], var_arg=True)
    function = code.module.globals.get("syscall") or ir.Function(code.module, kind, "syscall")
    numbers = [code.value(number, I64).llvm for number in (operation, value, 0, 0, 0)]
    assert FUTEX
    code.builder.call(function, [code.value(FUTEX, I64).llvm, code.at(counters, index, I64).llvm, *numbers])

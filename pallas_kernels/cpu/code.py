"""A small language over LLVM's: values with operators, variables, loops, and vectors of the machine's width.

Vector operations are explicit. LLVM turns them into AVX-512, AVX2, NEON or any other instructions that the machine has.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from llvmlite import binding, ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER, VOID = ir.PointerType(), ir.VoidType()


class _BFloatType(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


BF16 = _BFloatType()

# Arguments of the system call `arch_prctl` of x86-64.
ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18

type Number = Value | int | float


class Machine(NamedTuple):
    """The processor that code is made for.

    Attributes:
        lanes: float32 numbers in a vector register.
        registers: number of vector registers.
        has_bf16_dot: whether an instruction adds products of pairs of bfloat16 numbers (AVX-512 BF16).
        has_bf16_tiles: whether there are instructions for tiles of bfloat16 numbers (AMX), which the process may use.
        has_int8_tiles: whether there are such instructions for bytes, too.
        has_byte_dot: whether an instruction adds products of four bytes to each lane of a vector (AVX-512 or AVX VNNI).
    """

    cpu: str
    features: str
    lanes: int
    registers: int
    has_bf16_dot: bool = False
    has_bf16_tiles: bool = False
    has_int8_tiles: bool = False
    has_byte_dot: bool = False

    @classmethod
    @functools.cache
    def host(cls) -> "Machine":
        """Return this machine."""
        has = binding.get_host_cpu_features()
        wide = bool(has.get("avx512f") and has.get("avx512vl"))
        lanes = 16 if wide else 8 if has.get("avx2") else 4
        registers = 16 if has.get("sse2") and not wide else 32
        dots = bool(wide and has.get("avx512bf16"))
        tiles = bool(dots and has.get("amx-bf16")) and _may_use_tiles()
        of_int8 = bool(tiles and has.get("amx-int8"))
        bytes_ = bool(has.get("avx512vnni") if wide else has.get("avxvnni"))
        return cls(binding.get_host_cpu_name(), has.flatten(), lanes, registers, dots, tiles, of_int8, bytes_)


def _may_use_tiles() -> bool:
    """Ask the kernel for the registers of AMX for all threads of the process, and return whether it allows them."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_STATE, TILE_DATA) == 0)


def _operator(integer: str, real: str, *, swap: bool = False) -> Callable[["Value", Number], "Value"]:
    """Return the method of an operator, by LLVM's instructions for whole and for real numbers."""

    def method(self: "Value", other: Number) -> "Value":
        kind = self.llvm.type
        a, b = self.llvm, self.code.value(other, kind).llvm
        name = integer if isinstance(getattr(kind, "element", kind), ir.IntType) else real
        flags = {"flags": ("contract",)} if name.startswith("f") else {}
        return Value(self.code, getattr(self.code.builder, name)(*((b, a) if swap else (a, b)), **flags))

    return method


class Value:
    """A value of the function that `code` writes."""

    def __init__(self, code: "Code", llvm: Any):
        self.code, self.llvm = code, llvm

    __add__ = __radd__ = _operator("add", "fadd")
    __sub__, __rsub__ = _operator("sub", "fsub"), _operator("sub", "fsub", swap=True)
    __mul__ = __rmul__ = _operator("mul", "fmul")
    __truediv__ = __floordiv__ = _operator("sdiv", "fdiv")
    __rtruediv__ = _operator("sdiv", "fdiv", swap=True)
    __mod__ = _operator("srem", "frem")
    __rshift__ = _operator("lshr", "lshr")
    __lshift__, __and__, __or__ = _operator("shl", "shl"), _operator("and_", "and_"), _operator("or_", "or_")
    __xor__ = _operator("xor", "xor")

    def compare(self, operator: str, other: Number) -> "Value":
        """Return the result of a signed or ordered comparison."""
        kind, build = self.llvm.type, self.code.builder
        whole = isinstance(getattr(kind, "element", kind), ir.IntType)
        compare = build.icmp_signed if whole else build.fcmp_ordered
        return Value(self.code, compare(operator, self.llvm, self.code.value(other, kind).llvm))


class Variable:
    """A value that changes."""

    def __init__(self, value: Value):
        self._code, self._kind = value.code, value.llvm.type
        with value.code.builder.goto_entry_block():
            self._place = value.code.builder.alloca(self._kind)
            self._place.type = POINTER
        self.set(value)

    def get(self) -> Value:
        """Return the present value."""
        return Value(self._code, self._code.builder.load(self._place, typ=self._kind))

    def set(self, value: Value) -> None:
        """Change the value."""
        self._code.builder.store(value.llvm, self._place)


class Code:
    """The body of a function, as it is written.

    Attributes:
        arguments: the function's arguments.
    """

    def __init__(self, module: ir.Module, name: str, result: Any, kinds: Sequence[Any]):
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(result, kinds), name)
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        self.arguments = [Value(self, argument) for argument in self.function.args]

    def value(self, number: Number, kind: Any) -> Value:
        """Return a number as a value; a scalar is repeated in each lane of a vector."""
        vector = isinstance(kind, ir.VectorType)
        if not isinstance(number, Value):
            return Value(self, ir.Constant(kind, [number] * kind.count if vector else number))
        return self.splat(number, kind.count) if vector and not isinstance(number.llvm.type, ir.VectorType) else number

    def splat(self, x: Value, lanes: int) -> Value:
        """Return a vector of one number."""
        undefined = ir.Constant(ir.VectorType(x.llvm.type, lanes), ir.Undefined)
        one = self.builder.insert_element(undefined, x.llvm, ir.Constant(I32, 0))
        return self.shuffle(Value(self, one), Value(self, undefined), [0] * lanes)

    def vector(self, numbers: Sequence[float]) -> Value:
        """Return a vector of float32 numbers."""
        return Value(self, ir.Constant(ir.VectorType(F32, len(numbers)), [float(number) for number in numbers]))

    def counted(self, first: Value, lanes: int) -> Value:
        """Return a vector of the int32 numbers from `first` on."""
        return self.splat(first, lanes) + Value(self, ir.Constant(ir.VectorType(I32, lanes), list(range(lanes))))

    def look_up(self, table: Value, index: Value) -> Value:
        """Return elements of a vector of 16 float32 numbers, by the lowest 4 bits of an index. It needs AVX-512."""
        return self.intrinsic("llvm.x86.avx512.permvar.sf.512", table, index)

    def look_up_bytes(self, table: Sequence[int], index: Value) -> Value:
        """Return bytes of a table of 16, by an index below 16. It needs AVX2."""
        count = index.llvm.type.count
        several = ir.Constant(index.llvm.type, [*table] * (count // len(table)))
        name = "llvm.x86.avx512.pshuf.b.512" if count == 64 else "llvm.x86.avx2.pshuf.b"
        return self.intrinsic(name, Value(self, several), index)

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Return some lanes of two vectors. Lanes of `b` are counted on from the last lane of `a`."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(a.llvm, b.llvm, mask))

    @contextmanager
    def loop(self, start: Number, stop: Number, step: Number = 1) -> Iterator[Value]:
        """Repeat the block for the int64 numbers from `start` to below `stop`."""
        stop, step = self.value(stop, I64), self.value(step, I64)
        at = Variable(self.value(start, I64))
        with self.as_long_as(lambda: at.get().compare("<", stop)):
            yield at.get()
            at.set(at.get() + step)

    @contextmanager
    def as_long_as(self, condition: Callable[[], Value]) -> Iterator[None]:
        """Repeat the block as long as a condition holds; `condition` writes its code, which runs before each turn."""
        head, body, end = (self.function.append_basic_block() for _ in range(3))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch(condition().llvm, body, end)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(head)
        self.builder.position_at_end(end)

    def when(self, condition: Value) -> AbstractContextManager[Any]:
        """Run the block if a condition holds."""
        block: AbstractContextManager[Any] = self.builder.if_then(condition.llvm)
        return block

    def at(self, pointer: Value, index: Number, kind: Any) -> Value:
        """Return the address of an element of an array."""
        return Value(self, self.builder.gep(pointer.llvm, [self.value(index, I64).llvm], source_etype=kind))

    def load(self, pointer: Value, index: Number, kind: Any) -> Value:
        """Return an element of an array."""
        return Value(self, self.builder.load(self.at(pointer, index, kind).llvm, typ=kind))

    def store(self, value: Value, pointer: Value, index: Number) -> None:
        """Change an element of an array."""
        self.builder.store(value.llvm, self.at(pointer, index, value.llvm.type).llvm)

    def load_vector(self, pointer: Value, index: Number, element: Any, lanes: int) -> Value:
        """Return the elements of an array from `index` on; they lie at any address."""
        kind = ir.VectorType(element, lanes)
        return Value(self, self.builder.load(self.at(pointer, index, element).llvm, align=_size(element), typ=kind))

    def store_vector(self, value: Value, pointer: Value, index: Number) -> None:
        """Change the elements of an array from `index` on; they lie at any address."""
        element = value.llvm.type.element
        self.builder.store(value.llvm, self.at(pointer, index, element).llvm, align=_size(element))

    def load_part(self, pointer: Value, index: Number, element: Any, lanes: int, count: Value) -> Value:
        """Return the first `count` elements of an array from `index` on, and zeros after them."""
        place = self.scratch(lanes, element)
        zero = ir.Constant(ir.VectorType(element, lanes), None)
        self.builder.store(zero, place.llvm)
        with self.loop(0, count) as i:
            self.store(self.load(pointer, index + i, element), place, i)
        return self.load_vector(place, 0, element, lanes)

    def load_first(self, pointer: Value, index: Number, element: Any, lanes: int, count: Value) -> Value:
        """Return the elements of `load_part` by one instruction, for elements of 32 bits."""
        kind, index_of = ir.VectorType(element, lanes), self.counted(self.value(0, I32), lanes)
        wanted = index_of.compare("<", self.splat(self.cast("trunc", count, I32), lanes))
        zero = Value(self, ir.Constant(kind, None))
        at, align = self.at(pointer, index, element), self.value(_size(element), I32)
        return self.intrinsic(f"llvm.masked.load.v{lanes}i32.p0", at, align, wanted, zero, result=kind)

    def scratch(self, size: int, element: Any) -> Value:
        """Return an array on the stack of the function."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(ir.ArrayType(element, size))
            place.align, place.type = 64, POINTER
        return Value(self, place)

    def intrinsic(self, name: str, *arguments: Value, result: Any = None) -> Value:
        """Call a function of LLVM or of the process, declared by its arguments."""
        kind = ir.FunctionType(result or arguments[0].llvm.type, [argument.llvm.type for argument in arguments])
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return Value(self, self.builder.call(function, [argument.llvm for argument in arguments]))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return a b + c of float32 vectors, rounded once where the machine can."""
        return self.intrinsic(f"llvm.fmuladd.v{a.llvm.type.count}f32", a, b, c)

    def dot_bf16(self, a: Value, b: Value, c: Value) -> Value:
        """Return a b + c, summed over pairs of bfloat16 numbers, for int32 vectors a and b whose lanes hold pairs.

        For machines with `has_bf16_dot`. Subnormal numbers count as 0.
        """
        lanes = c.llvm.type.count
        pairs = (Value(self, self.builder.bitcast(x.llvm, ir.VectorType(BF16, 2 * lanes))) for x in (a, b))
        return self.intrinsic(f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}", c, *pairs)

    def dot_bytes(self, a: Value, b: Value, c: Value) -> Value:
        """Return a b + c, summed over four unsigned bytes of a and signed ones of b in each lane of int32 vectors.

        For machines with `has_byte_dot`.
        """
        lanes = c.llvm.type.count
        return self.intrinsic(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", c, a, b)

    def bf16_vector(self, a: Value, b: Value) -> Value:
        """Return the bits of the nearest bfloat16 numbers of two float32 vectors, one behind the other.

        For machines with `has_bf16_dot`. Subnormal numbers become 0.
        """
        lanes = a.llvm.type.count
        kind = ir.VectorType(BF16, 2 * lanes)
        both = self.intrinsic(f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * lanes}", b, a, result=kind)
        return Value(self, self.builder.bitcast(both.llvm, ir.VectorType(I16, 2 * lanes)))

    def bf16_pairs(self, a: Value, b: Value) -> Value:
        """Return the numbers of `bf16_vector` as pairs of both vectors in the lanes of int32."""
        lanes, numbers = a.llvm.type.count, self.bf16_vector(a, b)
        mixed = self.shuffle(numbers, numbers, [i // 2 + i % 2 * lanes for i in range(2 * lanes)])
        return Value(self, self.builder.bitcast(mixed.llvm, ir.VectorType(I32, lanes)))

    def maximum(self, a: Value, b: Value) -> Value:
        """Return the greater one, elementwise."""
        return self.select(a.compare(">", b), a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        """Return the lesser one, elementwise."""
        return self.select(a.compare("<", b), a, b)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """Return one of two values."""
        return Value(self, self.builder.select(condition.llvm, a.llvm, b.llvm))

    def cast(self, name: str, x: Value, kind: Any) -> Value:
        """Return the result of an LLVM conversion, such as "zext". It converts all elements of a vector."""
        if isinstance(x.llvm.type, ir.VectorType):
            kind = ir.VectorType(kind, x.llvm.type.count)
        return Value(self, getattr(self.builder, name)(x.llvm, kind))

    def sums(self, vectors: Sequence[Value]) -> Value:
        """Return the sum of the lanes of each vector, as one vector with at least one lane for each of them.

        The order of a sum does not depend on the vector's place in the list.
        """
        lanes, step = vectors[0].llvm.type.count, 1
        sums = [*vectors, *[vectors[-1]] * (lanes - len(vectors))]
        while step < lanes:
            of_b = [i // step % 2 for i in range(lanes)]
            low = [lanes + i - step if b else i for i, b in enumerate(of_b)]
            high = [lanes + i if b else i + step for i, b in enumerate(of_b)]
            sums = [self.shuffle(a, b, low) + self.shuffle(a, b, high) for a, b in zip(sums[::2], sums[1::2])]
            step *= 2
        return sums[0]

    def transposed(self, vectors: Sequence[Value]) -> list[Value]:
        """Return the columns of a square matrix of vectors, by exchanging ever smaller halves."""
        rows, lanes = list(vectors), len(vectors)
        step = lanes // 2
        while step:
            low = [i if i // step % 2 == 0 else lanes + i - step for i in range(lanes)]
            high = [i + step if i // step % 2 == 0 else lanes + i for i in range(lanes)]
            for i in (i for i in range(lanes) if i // step % 2 == 0):
                a, b = rows[i], rows[i + step]
                rows[i], rows[i + step] = self.shuffle(a, b, low), self.shuffle(a, b, high)
            step //= 2
        return rows

    def highest(self, vector: Value) -> Value:
        """Return the highest lane of a vector; any lane if one is NaN."""
        lanes = vector.llvm.type.count
        while lanes > 1:
            lanes //= 2
            a, b = (self.shuffle(vector, vector, range(first, first + lanes)) for first in (0, lanes))
            vector = self.maximum(a, b)
        return self.element(vector, 0)

    def as_vector(self, x: Value, element: Any, lanes: int) -> Value:
        """Return the bits of a vector as other elements."""
        return Value(self, self.builder.bitcast(x.llvm, ir.VectorType(element, lanes)))

    def joined(self, vectors: Sequence[Value]) -> Value:
        """Return vectors of one size as one, one behind the other; their number is a power of two."""
        parts, lanes = list(vectors), vectors[0].llvm.type.count
        while len(parts) > 1:
            parts, lanes = [self.shuffle(a, b, range(2 * lanes)) for a, b in zip(parts[::2], parts[1::2])], 2 * lanes
        return parts[0]

    def element(self, vector: Value, lane: int) -> Value:
        """Return a lane of a vector."""
        return Value(self, self.builder.extract_element(vector.llvm, ir.Constant(I64, lane)))

    def both(self, a: Value, b: Value) -> Value:
        """Return whether two conditions hold."""
        return Value(self, self.builder.and_(a.llvm, b.llvm))

    def invert(self, condition: Value) -> Value:
        """Return whether a condition does not hold."""
        return Value(self, self.builder.not_(condition.llvm))

    def add(self, counters: Value, index: int, number: int) -> Value:
        """Add to an int64 that threads share, and return its value before."""
        address = self.at(counters, index, I64).llvm
        return Value(self, self.builder.atomic_rmw("add", address, ir.Constant(I64, number), "seq_cst"))

    def exchange(self, counters: Value, index: int, value: Value) -> Value:
        """Change an int64 that threads share, and return its value before."""
        address = self.at(counters, index, I64).llvm
        return Value(self, self.builder.atomic_rmw("xchg", address, value.llvm, "seq_cst"))

    def load_atomic(self, counters: Value, index: int) -> Value:
        """Return an int64 that threads share."""
        return Value(self, self.builder.load_atomic(self.at(counters, index, I64).llvm, "seq_cst", 8, typ=I64))

    def call(self, function: Value, kind: ir.FunctionType, *arguments: Value) -> Value:
        """Call a function by its address."""
        typed = self.builder.bitcast(function.llvm, POINTER)
        typed.type = ir.PointerType()
        typed.type.pointee = kind  # for llvmlite: LLVM's own pointers have no further type
        return Value(self, self.builder.call(typed, [argument.llvm for argument in arguments]))


def _size(element: Any) -> int:
    """Return the bytes of an element."""
    return 4 if element == F32 else element.width // 8 if isinstance(element, ir.IntType) else 2

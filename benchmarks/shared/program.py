"""A compiled GPU program as XLA describes it: its HLO and its thunks, the launches and waits of the host.

The thunks are read from XLA's dump: the HLO does not say which of its instructions run inside a command buffer (a CUDA
graph), nor where the host waits for a predicate.
"""

import functools
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT = 256  # bytes: Mosaic's runtime refuses buffers that start elsewhere
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}
CONTAINERS = {"kCommandBuffer", "kSequential", "kConditional", "kWhile", "kDynamicSliceFusion", "kAsyncStart"}
NO_LAUNCH = {*CONTAINERS, "kAsyncDone"}
WAITS = {"kConditional", "kWhile"}  # outside a command buffer, the host waits for the predicate
PRODUCTS = ("__cublas", "__triton")  # targets of custom calls
VIEWS = {"bitcast", "get-tuple-element", "reshape"}
READS_PART = {"slice", "dynamic-slice", "gather"}
WORK = {"fusion", "copy", "copy-start", "concatenate", "transpose", "convert", "slice", "sort", "dot", "custom-call"}


class Array(NamedTuple):
    """Shape and dtype of an array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES.get(self.dtype, 1 if self.dtype.startswith("f8") else 4)

    @property
    def nbytes(self) -> int:
        return self.size * self.item_bytes


class Instruction(NamedTuple):
    """One instruction of the HLO."""

    name: str
    arrays: tuple[Array, ...]  # of its result
    opcode: str
    operands: tuple[str, ...]
    line: str

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def target(self) -> str:
        """The target of a custom call."""
        found = re.search(r'custom_call_target="([^"]+)"', self.line)
        return found[1] if found else ""

    @property
    def called(self) -> str | None:
        """The computation of a fusion."""
        found = re.search(r" calls=%?([\w.-]+)", self.line)
        return found[1] if found else None


class Thunk(NamedTuple):
    """One entry of the thunk sequence."""

    kind: str
    name: str
    inside: tuple[str, ...]  # kinds of the thunks around it


@dataclass(frozen=True)
class Program:
    """One compiled program.

    Attributes:
        hlo: the optimized HLO.
        thunk_text: XLA's dump of the thunk sequence after all passes.
        temp_bytes, aliased_bytes: of XLA's memory analysis.
    """

    hlo: str
    thunk_text: str
    temp_bytes: int
    aliased_bytes: int

    @functools.cached_property
    def computations(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of each computation, by name."""
        found: dict[str, dict[str, Instruction]] = {}
        for head, body in re.findall(r"^(?:ENTRY )?%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", self.hlo, re.M | re.S):
            instructions = (_parse(line) for line in body.splitlines())
            found[head] = {each.name: each for each in instructions if each is not None}
        return found

    @functools.cached_property
    def entry(self) -> dict[str, Instruction]:
        """The instructions of the entry computation."""
        [name] = re.findall(r"^ENTRY %?([\w.-]+) ", self.hlo, re.M)
        return self.computations[name]

    @functools.cached_property
    def thunks(self) -> list[Thunk]:
        """All thunks, in order."""
        found, around = [], list[tuple[int, str]]()
        for indent, kind, rest in re.findall(r"^( *)\d+: (k\w+) *(?:\[.*?\])?[ \t]*(.*)$", self.thunk_text, re.M):
            while around and around[-1][0] >= len(indent):
                around.pop()
            name = rest.split()[0] if rest.split() else kind
            found.append(Thunk(kind, name, tuple(each for _, each in around)))
            if kind in CONTAINERS:
                around.append((len(indent), kind))
        return found

    @property
    def launches(self) -> list[Thunk]:
        """The thunks that start a kernel, a copy or a library's call."""
        return [thunk for thunk in self.thunks if thunk.kind not in NO_LAUNCH]

    @property
    def host_waits(self) -> list[Thunk]:
        """The conditionals and loops whose predicate the host waits for."""
        return [thunk for thunk in self.thunks if thunk.kind in WAITS and "kCommandBuffer" not in thunk.inside]

    @property
    def command_buffers(self) -> int:
        """The number of command buffers, each one launch of the host."""
        return sum(thunk.kind == "kCommandBuffer" and "kCommandBuffer" not in thunk.inside for thunk in self.thunks)

    @property
    def misaligned_operands(self) -> list[str]:
        """The operands of Mosaic's calls that do not start at a multiple of 256 bytes, in words.

        XLA may hand a call a pointer into another array, in a fusion with the slice.
        """
        found = []
        for name, body in self.computations.items():
            for call in body.values():
                if "mosaic_gpu" not in call.target:
                    continue
                for index, operand in enumerate(call.operands):
                    start = _start(body, operand)
                    if start is None or start % ALIGNMENT:
                        where = "at an offset that is not constant" if start is None else f"{start} bytes"
                        found.append(f"{name}: operand {index} of {call.name} starts {where} into its buffer")
        return found

    @functools.cached_property
    def _params(self) -> dict[str, Array]:
        """The parameters of the model that are matrices, by the names of their instructions."""
        return {
            each.name: each.arrays[0]
            for each in self.entry.values()
            if each.opcode == "parameter" and 'op_name="params[' in each.line and len(each.arrays[0].shape) >= 2
        }

    def _taken(self, each: Instruction) -> dict[str, Array]:
        """Return the parameters that an instruction reads whole, not slices or rows of them."""
        sources = {index: self._source(operand) for index, operand in enumerate(each.operands)}
        return {
            source: self._params[source]
            for index, source in sources.items()
            if source in self._params and self._bytes_read(each, index) >= self._params[source].nbytes
        }

    @property
    def copied_params(self) -> list[tuple[str, int]]:
        """The instructions that write whole parameters again, converted, concatenated, transposed or copied, with the
        bytes that they write."""
        found = []
        for each in self._working:
            if self._multiplies(each) or self._is_mosaic(each):
                continue
            taken = self._taken(each).values()
            written = sum(array.nbytes for array in each.arrays if any(array.size >= p.size for p in taken))
            if written:
                found.append((each.name, written))
        return found

    @property
    def product_bytes(self) -> int:
        """The bytes of the parameters that products read, or of the copies that were made of them."""
        copies = {name for name, _ in self.copied_params}
        return sum(
            self.entry[source].nbytes
            for each in self._products
            for source in {*self._taken(each), *copies & {self._source(operand) for operand in each.operands}}
        )

    @property
    def copied_bytes(self) -> int:
        """The bytes that copies of parameters read and write."""
        copies = {name for name, _ in self.copied_params}
        return sum(self._moved(each) for each in self._working if each.name in copies)

    @property
    def small_bytes(self) -> int:
        """The bytes that all other launches read and write: neither products, Mosaic's kernels nor copies."""
        others = {each.name for each in self._products} | {name for name, _ in self.copied_params}
        return sum(self._moved(each) for each in self._working if each.name not in others and not self._is_mosaic(each))

    def _moved(self, each: Instruction) -> int:
        return each.nbytes + sum(self._bytes_read(each, index) for index in range(len(each.operands)))

    def copies_of(self, array: Array) -> int:
        """Return the number of copies of arrays of a shape and dtype, in fusions too."""
        return sum(
            each.opcode in ("copy", "copy-start") and array in each.arrays
            for body in self.computations.values()
            for each in body.values()
        )

    @property
    def _working(self) -> list[Instruction]:
        """The instructions that compute or copy something."""
        return [each for each in self.entry.values() if each.opcode in WORK]

    @property
    def _products(self) -> list[Instruction]:
        """The products; those of a single row are reductions to XLA."""
        copying = {name for name, _ in self.copied_params}
        return [
            each for each in self._working if self._multiplies(each) or (each.name not in copying and self._taken(each))
        ]

    def _multiplies(self, each: Instruction) -> bool:
        body = self.computations.get(each.called or "", {})
        return any(inner.opcode == "dot" or inner.target.startswith(PRODUCTS) for inner in (each, *body.values()))

    def _bytes_read(self, each: Instruction, index: int) -> int:
        """Return the bytes of an operand that an instruction reads."""
        whole = self.entry[each.operands[index]].nbytes
        body = self.computations.get(each.called or "", {})
        inner = next(
            (p.name for p in body.values() if p.opcode == "parameter" and f"parameter({index})" in p.line), None
        )
        users = [user for user in body.values() if inner in user.operands]
        if users and all(user.opcode in READS_PART and user.operands[0] == inner for user in users):
            return min(whole, sum(user.nbytes for user in users))
        return whole

    def _is_mosaic(self, each: Instruction) -> bool:
        body = self.computations.get(each.called or "", {})
        return any("mosaic_gpu" in inner.target for inner in (each, *body.values()))

    def _source(self, name: str) -> str:
        """Return the instruction whose bytes a name stands for."""
        while self.entry[name].opcode in VIEWS and self.entry[name].operands:
            name = self.entry[name].operands[0]
        return name


def _start(body: dict[str, Instruction], name: str) -> int | None:
    """Return the bytes from the start of its buffer to an operand; None if only the device knows them."""
    each = body[name]
    if each.opcode in VIEWS and each.operands and each.opcode != "get-tuple-element":
        return _start(body, each.operands[0])
    if each.opcode == "dynamic-slice":
        return None
    if each.opcode != "slice":
        return 0
    before = _start(body, each.operands[0])
    source = body[each.operands[0]].arrays[0]
    [limits] = re.findall(r"slice=\{(.*?)\}", each.line)
    starts = [int(start) for start in re.findall(r"\[(\d+):", limits)]
    strides = [math.prod(source.shape[axis + 1 :]) for axis in range(len(source.shape))]
    offset = sum(start * stride for start, stride in zip(starts, strides, strict=True)) * source.item_bytes
    return None if before is None else before + offset


def _parse(line: str) -> Instruction | None:
    """Return the instruction of a line of HLO."""
    head = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([\w-]+)\(", line)
    if head is None:
        return None
    name, kind, opcode = head.groups()
    arrays = tuple(
        Array(dtype, tuple(int(n) for n in shape.split(",") if n))
        for dtype, shape in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", kind)
    )
    operands = re.findall(r"%([\w.-]+)", _to_closing(line[head.end() :]))
    return Instruction(name, arrays, opcode, tuple(operands), line)


def _to_closing(text: str) -> str:
    """Return a text up to the parenthesis that closes one opened before it."""
    depth = 1
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[:at]
    return text

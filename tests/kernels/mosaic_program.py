"""Checks on a lowered Mosaic GPU kernel that neither the interpreter nor ptxas makes.

A `Program` is read from the text that jax dumps after layout inference (MOSAIC_GPU_DUMP_TO). `faults` returns a
sentence for each violation of a rule of the hardware:

- the shared memory side of a TMA copy starts at a multiple of 128 bytes, that of a wgmma operand at a multiple of its
  swizzle's period;
- a TMA box has at most 5 dimensions of at most 256 elements, an inner dimension of a multiple of 16 bytes and at most
  the swizzle, and strides in global memory that are multiples of 16 bytes;
- the grid and the shared memory are within the device's limits;
- registers written to shared memory pass a proxy fence before a wgmma, a TMA copy or another thread reads them;
- what a TMA copy brings is read after a wait for a barrier of such a copy;
- a tile is handed back to its producer only after the wgmma that reads it has been waited for, and after all warps that
  read it into registers have met.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f8E4M3FN": 1, "i32": 4, "i8": 1, "i64": 8}
MAX_GRID = (2**31 - 1, 65_535, 65_535)  # x, y, z (CUDA C++ Programming Guide, table of technical specifications)
ALIGNMENT = 128  # bytes, of cp.async.bulk.tensor's address in shared memory
MAX_BOX, MAX_RANK = 256, 5


@dataclasses.dataclass(frozen=True)
class View:
    """A part of a buffer in shared memory: the buffer's offset in bytes, and a number that divides the address.

    `index` is the value that selects the part, a stage of a ring for one.
    """

    root: int
    alignment: int
    index: str = ""


@dataclasses.dataclass(frozen=True)
class Event:
    """An access to shared memory or a synchronisation, in the order of the program; `what` names the operation."""

    what: str
    views: tuple[View, ...] = ()
    barrier: int | None = None  # offset of the barriers
    index: str = ""  # of the barrier
    turn: int = 0  # of the loops around it: no two iterations have the same
    count: int = 0
    line: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    name: str
    grid: tuple[int, ...]
    threads: int
    shared_memory: int  # bytes that the launch asks for
    events: tuple[Event, ...]  # loop bodies come twice, so that what one iteration leaves meets the next

    def faults(self, *, shared_memory: int) -> list[str]:
        """Return a sentence for each violated rule; `shared_memory` is the device's limit of a thread block."""
        found = [
            f"{size} thread blocks along {axis}, at most {limit}"
            for axis, size, limit in zip("xyz", self.grid, MAX_GRID)
            if size > limit
        ]
        if self.shared_memory > shared_memory:
            found.append(f"{self.shared_memory} bytes of shared memory, at most {shared_memory}")
        checks = (_alignment, _boxes, _fences, _arrivals, _releases)
        return list(dict.fromkeys(found + [fault for check in checks for fault in check(self.events)]))


def parse(name: str, text: str) -> Program:
    """Read a dump."""
    launch = re.search(
        r"gpu\.launch .*?blocks\(.*?\) in \((.*?)\) threads\(.*?\) in \((.*?)\) dynamic_shared_memory_size %c(\d+)_i32",
        text,
    )
    assert launch, f"{name}: no launch operation"
    grid, threads = (tuple(int(n) for n in re.findall(r"= %c(\d+)", launch[i])) for i in (1, 2))
    return Program(name, grid, math.prod(threads), int(launch[3]), tuple(_Reader().events(text.splitlines())))


class _Reader:
    """Follows values from their uses to the buffers that they are parts of. Names are looked up as of the last line."""

    def __init__(self):
        self.views: dict[str, View] = {}
        self.types: dict[str, tuple[list[int], str]] = {}  # shape and dtype
        self.barriers: dict[str, int] = {}
        self.indices: dict[str, str] = {}  # of barriers, and the values that integers were converted from
        self.divisors: dict[str, int] = {}
        self.turns = 0

    def events(self, lines: list[str]) -> Iterator[Event]:
        turn = self.turns
        i = 0
        while i < len(lines):
            line = lines[i]
            if re.search(r"scf\.(for|while)\b.*\{$", line):
                indent = len(line) - len(line.lstrip())
                end = next(j for j in range(i + 1, len(lines)) if re.match(rf" {{{indent}}}\}}", lines[j]))
                for _ in range(2):
                    self.turns += 1
                    yield from self.events(lines[i + 1 : end])
                i = end
            else:
                self._define(line)
                yield from self._event(line, turn)
            i += 1

    def _define(self, line: str) -> None:
        match = re.match(r"\s*(%[\w#:]+) = (.*)", line)
        if not match:
            return
        name, rest = match[1].split(":")[0], match[2]
        for table in (self.views, self.types, self.barriers, self.divisors, self.indices):
            table.pop(name, None)
        operands = re.findall(r"%[\w#]+", rest)
        self._define_divisor(name, rest, operands)
        if memory := re.search(r"slice_smem\"\(\).*?offset = (\d+).*-> memref<((?:\d+x)*)(\S+?)[,>]", rest):
            offset = int(memory[1])
            if "barrier" in memory[3]:
                self.barriers[name] = offset
            else:
                self.views[name] = View(offset, math.gcd(offset, 1024) or 1024)
                self.types[name] = [int(n) for n in memory[2].split("x")[:-1]], memory[3]
            return
        if not operands:
            return
        source = operands[0]
        if source in self.barriers:
            self.barriers[name] = self.barriers[source]
            self.indices[name] = self._index(operands[-1])
        if rest.startswith("arith.index_cast"):
            self.indices[name] = self._index(source)
        if source in self.views and rest.startswith(("memref.", "builtin.", "mosaic_gpu.")):
            self.views[name] = self._part(rest, source)
            self.types[name] = _memref(rest.rpartition(" to ")[2] if " to " in rest else rest)

    def _define_divisor(self, name: str, rest: str, operands: list[str]) -> None:
        divisors = [self._divisor(operand) for operand in operands[:2]]
        match rest.split()[0]:
            case "arith.muli":
                self.divisors[name] = math.prod(divisors)
            case "arith.addi" | "arith.subi" | "arith.remsi" | "arith.remui":
                self.divisors[name] = math.gcd(*divisors)
            case "arith.index_cast" | "arith.index_castui" | "arith.extui" | "arith.extsi":
                self.divisors[name] = divisors[0]
            case "mosaic_gpu.assume_multiple":
                self.divisors[name] = math.lcm(divisors[0], int(re.findall(r", (\d+)", rest)[0])) or 1

    def _divisor(self, name: str) -> int:
        """Return a number that divides an integer value; 0 stands for the value 0."""
        constant = re.fullmatch(r"%c(-?\d+)(_i32|_i64)?(_\d+)?", name)
        return abs(int(constant[1])) if constant else self.divisors.get(name, 1)

    def _index(self, name: str) -> str:
        return self.indices.get(name, name)

    def _part(self, rest: str, source: str) -> View:
        view = self.views[source]
        subview = re.match(r"memref\.subview \S+\[([^\]]*)\] \[([^\]]*)\]", rest)
        if not subview:
            return view
        shape, dtype = self.types[source]
        tile = _transforms(rest)[0]
        alignment = view.alignment
        for dim, offset in enumerate(x.strip() for x in subview[1].split(",")):
            stride = math.prod(shape[dim + 1 :]) * BYTES[dtype]
            tiled = dim - (len(shape) - len(tile))
            if tile and tiled >= 0:
                # A step of one tile: over all tiles of the dimensions after it, and over the whole tile.
                rows = tile[tiled]
                step = math.prod(shape[dim + 1 :]) * rows if tiled == 0 else math.prod(tile)
                stride = step * BYTES[dtype]
                by = int(offset) if offset.isdigit() else self._divisor(offset)
                alignment = math.gcd(alignment, by // rows * stride) if by % rows == 0 else 1
            else:
                by = int(offset) if offset.isdigit() else self._divisor(offset)
                alignment = math.gcd(alignment, by * stride)
        first = subview[1].split(",")[0].strip()
        return View(view.root, alignment, view.index or self._index(first))

    def _event(self, line: str, turn: int) -> Iterator[Event]:
        operands = re.findall(r"%[\w#]+", line.partition("= ")[2] if re.match(r"\s*%", line) else line)
        views = tuple(self.views[x] for x in operands if x in self.views)
        name = next((x for x in operands if x in self.barriers), "")
        barrier, index = self.barriers.get(name), self.indices.get(name, "")
        for what, pattern in (
            ("load", r'"mosaic_gpu\.async_load"'),
            ("store", r'"mosaic_gpu\.async_store"'),
            ("write", r'"mosaic_gpu\.vector_store"'),
            ("read", r'"mosaic_gpu\.vector_load"'),
            ("wgmma", r"mosaic_gpu\.wgmma "),
            ("fence", r"nvvm\.fence\.proxy <async\.shared>"),
            ("wait", r"mbarrier\.try_wait\.parity"),
            ("arrive", r'"mosaic_gpu\.arrive"'),
            ("wgmma commit", r"wgmma\.commit_group"),
            ("wgmma wait", r"wgmma\.wait_group\.sync\.aligned (\d+)"),
        ):
            if match := re.search(pattern, line):
                if what in ("load", "store", "write", "wgmma") and not views:
                    assert what in ("write", "wgmma"), line  # registers to global memory; operands in registers
                count = int(match[1]) if match.re.groups else 0
                yield Event(what, views, barrier, index, turn, count, line.strip())


def _memref(text: str) -> tuple[list[int], str]:
    match = re.search(r"memref<((?:\d+x)*)([A-Za-z]\w*)", text)
    return ([int(n) for n in match[1].split("x")[:-1]], match[2]) if match else ([], "i8")


def _transforms(line: str) -> tuple[list[int], int]:
    """Return the tile and the swizzle in bytes of the first operand in shared memory; [] and 0 for none."""
    text = re.search(r"in_transforms = \[\[(.*?)\]\]", line) or re.search(r"in_transforms = \[(.*?\]>)", line)
    tile = re.search(r"tile<\[([\d, ]+)\]>", text[1]) if text else None
    swizzle = re.search(r"swizzle<(\d+)", text[1]) if text else None
    return [int(n) for n in tile[1].split(",")] if tile else [], int(swizzle[1]) if swizzle else 0


def _alignment(events: tuple[Event, ...]) -> Iterator[str]:
    for event in events:
        if event.what in ("load", "store") and event.views[0].alignment % ALIGNMENT:
            [view] = event.views
            yield (
                f"TMA {event.what} at an address of shared memory that is a multiple of {view.alignment} bytes, "
                f"not of {ALIGNMENT} (buffer at {view.root})"
            )
        if event.what == "wgmma":
            for view in event.views:
                if view.alignment % 1024:
                    yield f"wgmma operand at a multiple of {view.alignment} bytes, not of 1024 (buffer at {view.root})"


def _boxes(events: tuple[Event, ...]) -> Iterator[str]:
    for event in events:
        if event.what not in ("load", "store"):
            continue
        types = [part for part in event.line.rpartition(" : (")[2].split("memref<")[1:] if "barrier" not in part]
        smem, gmem = (
            next(_memref(f"memref<{part}") for part in types if ("workgroup" in part) == inside)
            for inside in (True, False)
        )
        shape, itemsize = gmem[0], BYTES[gmem[1]]
        lengths = re.search(r"slice_lengths = array<i64: ([-\d, ]+)>", event.line)
        assert lengths, event.line
        box = [int(n) for n in lengths[1].split(",") if int(n) > 0]
        tile, swizzle = _transforms(event.line)
        if tile:
            outer = box[: -len(tile)] + [n // t for n, t in zip(box[-len(tile) :], tile)]
            if any(n % t for n, t in zip(box[-len(tile) :], tile)):
                yield f"box {box} is no multiple of the tile {tile}"
            box = outer + tile
        if max(box) > MAX_BOX or len(box) > MAX_RANK:
            yield f"box {box} has more than {MAX_RANK} dimensions or more than {MAX_BOX} elements in one"
        inner = box[-1] * itemsize
        if inner % 16 or (swizzle and inner > swizzle):
            yield f"box {box} has an inner dimension of {inner} bytes, swizzle {swizzle}"
        if math.prod(box) * itemsize != math.prod(smem[0]) * BYTES[smem[1]]:
            yield f"box {box} of {gmem[1]} is not the size of its buffer {smem}"
        strides = [math.prod(shape[i + 1 :]) * itemsize for i in range(len(shape) - 1)]
        if any(stride % 16 for stride in strides):
            yield f"global array {shape} of {gmem[1]} has strides of {strides} bytes, no multiples of 16"


def _fences(events: tuple[Event, ...]) -> Iterator[str]:
    written: set[int] = set()
    operands = {view.root for event in events if event.what == "wgmma" for view in event.views}
    for event in events:
        roots = {view.root for view in event.views}
        if event.what == "write":
            written |= roots
        elif event.what == "fence":
            written.clear()
        elif event.what in ("wgmma", "store") and roots & written:
            yield f"{event.what} reads the buffer at {min(roots & written)}, written without a proxy fence since"
        elif event.what == "arrive" and written & operands:
            yield f"the buffer at {min(written & operands)} is handed on without a proxy fence"


def _arrivals(events: tuple[Event, ...]) -> Iterator[str]:
    barriers: dict[int, set[int | None]] = {}  # of the copies into each buffer
    for event in events:
        if event.what == "load":
            barriers.setdefault(event.views[0].root, set()).add(event.barrier)
    waited: set[int | None] = set()
    for event in events:
        if event.what == "wait":
            waited.add(event.barrier)
        elif event.what in ("wgmma", "read"):
            for root in {view.root for view in event.views}:
                if root in barriers and not barriers[root] & waited:
                    yield f"{event.what} reads the buffer at {root} before a wait for its copy"


def _releases(events: tuple[Event, ...]) -> Iterator[str]:
    guarded: dict[int, set[int]] = {}  # barrier -> buffers that are overwritten after it
    last = None
    for event in events:
        if event.what == "wait":
            last = event.barrier
        elif event.what in ("load", "write") and last is not None:
            guarded.setdefault(last, set()).update(view.root for view in event.views)
    groups: list[set[tuple[int, str, int]]] = [set()]  # what wgmmas in flight read, and when; the last group is open
    loaded: set[int] = set()  # buffers that were read into registers
    for event in events:
        if event.what == "wgmma":
            groups[-1] |= {(view.root, view.index, event.turn) for view in event.views}
        elif event.what == "wgmma commit":
            groups.append(set())
        elif event.what == "wgmma wait":
            groups = groups[len(groups) - 1 - min(event.count, len(groups) - 1) :]
        elif event.what == "read":
            loaded |= {view.root for view in event.views}
        elif event.what == "fence":  # and a barrier of the warpgroup
            loaded.clear()
        elif event.what == "arrive" and event.barrier is not None:
            # Another index in the same iteration is that of another stage; in another iteration it may be the same one.
            read = {
                root for root, index, turn in set().union(*groups)
                if turn != event.turn or index == event.index or "" in (index, event.index)
            }  # fmt: skip
            for root in guarded.get(event.barrier, set()) & read:
                yield f"the buffer at {root} is handed back while a wgmma reads it"
            for root in guarded.get(event.barrier, set()) & loaded:
                yield f"the buffer at {root} is handed back while other warps may read it"

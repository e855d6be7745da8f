"""Reading machine code: the loops of a kernel, and the order of waits, products and exponentials in them."""

import re
from collections.abc import Sequence

Loop = Sequence[str]  # the instructions of one iteration


def count(code: Sequence[str], operation: str) -> int:
    """Return the number of instructions with such an operation, like "BAR.SYNC"."""
    return sum(operation in line for line in code)


def loops(code: Sequence[str]) -> list[range]:
    """Return the lines from a label to a branch back to it, the shortest loops first."""
    labels = {line.rstrip(":"): at for at, line in enumerate(code) if line.endswith(":")}
    found = []
    for at, line in enumerate(code):
        target = re.search(r"BRA\S* .*`\((\.L_x_\d+)\)", line)
        if target and labels.get(target[1], at) < at:
            found.append(range(labels[target[1]], at + 1))
    return sorted(found, key=len)


def products(code: Sequence[str]) -> int:
    """Return the number of wgmma groups: the last instruction of one names its scoreboard."""
    return sum("HGMMA" in line and "gsb0" in line for line in code)


def main_loops(code: Sequence[str]) -> list[Loop]:
    """Return the loops over KV tiles: those with two products, without the loops around them."""
    kept: list[range] = []
    for lines in loops(code):
        apart = all(lines.stop <= each.start or each.stop <= lines.start for each in kept)
        if apart and products(code[lines.start : lines.stop]) == 2:
            kept.append(lines)
    return [code[lines.start : lines.stop] for lines in kept]


def exposed(loop: Loop, operation: str = "MUFU.EX2") -> int:
    """Return how often the operation stands between the wait for all products and the next product of the loop."""
    lines = [*loop, *loop]
    waiting, found = False, 0
    for line in lines[: len(loop) + next(i for i, each in enumerate(loop) if "HGMMA" in each)]:
        if "HGMMA" in line:
            waiting = False
        elif re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0", line):
            waiting = True
        elif waiting and operation in line:
            found += 1
    return found

"""Groups of layers, each with layers that see equally many tokens. All groups share one pool of blocks."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

Windows = Sequence[int | None]  # numbers of tokens that a query sees, including the query's token; None: all tokens
MOST_GROUPS = 8  # of a model: each has a block table of every row


class Groups(NamedTuple):
    """Groups of a model's layers. A block holds the keys and values of one group.

    Attributes:
        size: layers of a group. The last group of a window may have fewer, and leaves memory of its blocks unused.
        windows: the window of each group.
        places: for each layer, its group and its place there.
    """

    size: int
    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]


def group_layers(windows: Windows, max_model_len: int) -> Groups:
    """Return the groups of some layers with the least unused memory for a sequence of `max_model_len` tokens.

    Of equally good sizes the largest is taken, which gives the fewest groups.

    Args:
        windows: the window of each layer.
    """
    seen = [None if window is not None and window >= max_model_len else window for window in windows]
    counts = Counter(seen)

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in counts.values())

    def unused(size: int) -> int:
        return sum(-count % size * min(window or max_model_len, max_model_len) for window, count in counts.items())

    sizes = [size for size in range(len(seen), 0, -1) if num_groups(size) <= max(MOST_GROUPS, len(counts))]
    size = min(sizes, key=unused)
    of_groups = [window for window, count in counts.items() for _ in range(-(-count // size))]
    first, places = {window: of_groups.index(window) for window in counts}, list[tuple[int, int]]()
    so_far: Counter[int | None] = Counter()
    for window in seen:
        group, place = divmod(so_far[window], size)
        places.append((first[window] + group, place))
        so_far[window] += 1
    return Groups(size, tuple(of_groups), tuple(places))


def held_windows(windows: Windows, block_size: int) -> tuple[int | None, ...]:
    """Return how far back a sequence holds tokens: the window, and at least the block before that of the query.

    All tokens of that block are written. Kernels read blocks in tiles, and put its rows in the place of earlier ones.
    """
    return tuple(window and max(window, block_size + 1) for window in windows)


def most_held(windows: Windows, block_size: int, reach: int) -> tuple[int | None, ...]:
    """Return the maximum blocks of each group that a sequence of any length holds at once; None: no limit.

    Blocks that no later token sees are freed when a step is committed.

    Args:
        windows: the window of each group.
        reach: maximum tokens of a sequence in the steps in flight.
    """
    held = held_windows(windows, block_size)
    return tuple(window and -(-(window - 1 + reach) // block_size) + 1 for window in held)

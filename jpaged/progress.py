"""Progress of long work: a bar on a terminal, lines in the log elsewhere."""

import logging
import time
from collections.abc import Iterable, Iterator

from tqdm import tqdm

logger = logging.getLogger(__name__)

FIRST_LINE_S = 1.0
NEXT_LINE_S = 10.0


def track[T](items: Iterable[T], total: int | None, done: str, unit: str, *, bar: bool) -> Iterator[T]:
    """Yield items, and show the number of finished ones.

    Args:
        total: number of items; None if it is unknown.
        done: the work as a participle, such as "compiled".
        bar: show a bar on stderr. Otherwise log lines are written, at most one in ten seconds.
    """
    if bar:
        yield from tqdm(items, desc=done.capitalize(), total=total, unit=unit)
        return
    start = time.monotonic()
    next_line = start + FIRST_LINE_S
    for count, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if total is not None and count < total and now >= next_line:
            left = (now - start) / count * (total - count)
            logger.info("%s %d of %d %ss, about %.0f s left", done, count, total, unit, left)
            next_line = now + NEXT_LINE_S

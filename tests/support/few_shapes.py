"""Two shapes of steps instead of a dozen, and one of transfers, so that an engine is soon compiled. As a program:
`jpaged` with them.

python -m tests.support.few_shapes worker --nnodes 2 ...
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PROGRAM = (sys.executable, "-m", "tests.support.few_shapes")


@contextmanager
def few_shapes() -> Iterator[None]:
    """Let runners have one shape of decode steps, one of steps with prompts, and one of transfers to the host.

    Tests of the shapes themselves (`tests/runtime`) and of start-up use all of them.
    """
    from jpaged.runtime import runner, swap
    from jpaged.runtime.batch import Buckets

    class FewBuckets(Buckets):
        def __init__(self, limits, **options):
            super().__init__(limits, **options)
            self.decode, self.mixed = self.decode[-1:], self.mixed[-1:]
            self.all = self.decode + self.mixed

    transfers = swap.TRANSFERS
    runner.Buckets, swap.TRANSFERS = FewBuckets, transfers[:1]
    try:
        yield
    finally:
        runner.Buckets, swap.TRANSFERS = Buckets, transfers


def limiting(resolve: Callable[..., Any], **limits: int) -> Callable[..., Any]:
    """Return a `resolve` with other limits than those of the config."""

    def resolve_less(*args: Any, **options: Any) -> Any:
        resolved = resolve(*args, **options)
        return dataclasses.replace(resolved, limits=dataclasses.replace(resolved.limits, **limits))

    return resolve_less


if __name__ == "__main__":
    from jpaged.cli.main import main

    with few_shapes():
        main()

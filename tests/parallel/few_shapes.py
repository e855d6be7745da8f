"""Few shapes, so that a process is soon compiled. As a program: `jpaged` with them.

python -m tests.parallel.few_shapes worker --nnodes 2 ...
"""

from collections.abc import Iterator
from contextlib import contextmanager

from jpaged.cli.main import main


@contextmanager
def few_shapes() -> Iterator[None]:
    """Let runners have one shape of decode steps."""
    from jpaged.runtime import runner
    from jpaged.runtime.batch import Buckets

    class FewBuckets(Buckets):
        def __init__(self, limits):
            super().__init__(limits)
            self.decode = self.decode[-1:]
            self.all = self.decode + self.mixed

    runner.Buckets = FewBuckets
    try:
        yield
    finally:
        runner.Buckets = Buckets


if __name__ == "__main__":
    with few_shapes():
        main()

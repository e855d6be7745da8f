"""All tests of this folder are slow: `make test-fast` leaves them out. Kernels are optimized, as those of users are."""

import pytest

from tests.support.kernel_code import optimized


def pytest_itemcollected(item):
    item.add_marker("slow")


@pytest.fixture(scope="package", autouse=True)
def optimized_code():
    with optimized():
        yield

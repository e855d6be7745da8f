"""All tests of this folder are slow: `make test-fast` leaves them out.

Kernels are optimized, as those of users are, in the deep tier and in tests that ask for it.
"""

import pytest

from tests.support.kernel_code import optimized


def pytest_itemcollected(item):
    item.add_marker("slow")


@pytest.fixture
def optimized_code():
    with optimized():
        yield


@pytest.fixture(autouse=True)
def code_of_the_tier(request):
    if request.node.get_closest_marker("deep"):
        request.getfixturevalue("optimized_code")

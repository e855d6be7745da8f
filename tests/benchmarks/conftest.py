"""All tests of this folder are slow: `make test-fast` leaves them out."""


def pytest_itemcollected(item):
    item.add_marker("slow")

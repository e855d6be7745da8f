"""One engine with the tiny model for every test of the server."""

import pytest

from tests.serving.client import Client, build


@pytest.fixture(scope="session")
def loaded(tiny):
    return build(tiny)


@pytest.fixture
async def client(loaded):
    async with Client(*loaded) as client:
        yield client
        await client.idle()

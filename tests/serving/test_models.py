"""The list of models, names of the served model, and unknown models."""

import openai
import pytest

from tests.serving.client import MAX_LEN, Client


async def test_models_lists_and_retrieves_the_served_model(api):
    (model,) = [model async for model in api.client.models.list()]
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "jpaged")
    assert await api.client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here; 'demo' is") as error:
        await api.client.models.retrieve("gpt-5")
    assert (error.value.status_code, error.value.param, error.value.type) == (404, "model", "NotFoundError")


async def test_models_has_the_maximum_length(client):
    async with client.session.get("/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == MAX_LEN
    assert model["root"] == "tiny" and model["parent"] is None
    assert model["permission"][0]["object"] == "model_permission" and model["permission"][0]["allow_sampling"]


async def test_unknown_model_is_an_error_404(api):
    for call in (api.complete, api.chat):
        with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here") as error:
            await call("Hi", model="gpt-5")
        assert error.value.param == "model" and error.value.code == "model_not_found"


@pytest.fixture
async def named(loaded):
    async with Client(*loaded, aliases=("b", "org/c")) as client:
        yield client
        await client.idle()


async def test_aliases_are_listed_and_accepted_and_responses_have_the_first_name(named):
    async with named.session.get("/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["tiny", "b", "org/c"]
    for name in ("tiny", "b", "org/c"):
        assert (await named.complete("a", model=name, max_tokens=1))["model"] == "tiny"
        async with named.session.get(f"/v1/models/{name}") as response:
            assert (await response.json())["id"] == name
    assert "'d' is not served here" in (await named.complete("a", 404, model="d"))["error"]["message"]

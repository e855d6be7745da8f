"""The examples run as they stand."""

import asyncio
import json
import runpy
from pathlib import Path

import pytest

import jpaged
from jpaged.start import setup
from tests.serving.client import Client
from tests.support.few_shapes import few_shapes, limiting

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def lines_of(name: str, capsys, *args: str) -> list[str]:
    """Return the output of an example's `main`."""
    runpy.run_path(str(EXAMPLES / name))["main"](*args)
    return capsys.readouterr().out.splitlines()


def test_offline_batch(demo, capsys, monkeypatch):
    monkeypatch.setattr(jpaged, "LLM", lambda *_: demo, raising=False)  # compiled already
    lines = lines_of("offline_batch.py", capsys)
    assert [line.split(" -> ")[0] for line in lines[:3]] == [
        "'Once upon a time'", "'The little fox'", "'One day, a girl named'",
    ]  # fmt: skip
    first, second = (line.partition(": ")[2] for line in lines[3:])
    assert first != second and len(lines) == 5


@pytest.mark.deep  # the README has the same module
def test_nnx_module(capsys, monkeypatch):
    few = limiting(setup.resolve, max_num_batched_tokens=32)
    monkeypatch.setattr(setup, "resolve", few)  # fewer shapes to compile
    with few_shapes():
        before, after = lines_of("nnx_module.py", capsys)
    assert before.split(" ", 1)[1] != after.split("  ", 1)[1]


def test_kernels_alone(capsys):
    kernels, result = lines_of("kernels_alone.py", capsys)
    assert kernels.startswith("cpu: ") and result.startswith("o (1, 8, 64) bfloat16")


async def test_client(demo, capsys):
    async with Client(demo.engine, demo.tokenizer, model_name="demo") as client:
        lines = await asyncio.to_thread(lines_of, "client.py", capsys, client.url)
    story, brace, person = "\n".join(lines).partition("{")
    assert story.strip() and json.loads(brace + person).keys() == {"name", "age"}


@pytest.mark.deep
def test_grpo(tmp_path):
    with few_shapes():
        history = runpy.run_path(str(EXAMPLES / "grpo.py"))["main"]("2", str(tmp_path / "grpo.png"))
    assert len(history) == 2 and all(0 <= reward <= 1 and mismatch == 0 for reward, mismatch, *_ in history)
    assert (tmp_path / "grpo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.deep
def test_grpo_raises_the_reward_and_the_logprobs_agree():
    with few_shapes():
        history = runpy.run_path(str(EXAMPLES / "grpo.py"))["main"]("40")
    rewards, mismatches, *_ = zip(*history)
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-3:]) / 3 > 0.9
    assert set(mismatches) == {0}, "the trainer has the engine's bits"


@pytest.mark.deep
@pytest.mark.parametrize("base", ["bfloat16", "int8"])
def test_grpo_lora(base):
    with few_shapes():
        history = runpy.run_path(str(EXAMPLES / "grpo_lora.py"))["main"]("40", base)
    rewards, mismatches = zip(*history)
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-3:]) / 3 > 0.9
    assert set(mismatches) == {0}, "the trainer has the engine's bits"


def test_best_of_n(demo, capsys, monkeypatch):
    monkeypatch.setattr(jpaged, "LLM", lambda *_, **__: demo, raising=False)
    lines = lines_of("best_of_n.py", capsys)
    scores = [float(line.split()[1].rstrip(":")) for line in lines if line.startswith("  ")]
    assert len(lines) == 6 and scores[0] > scores[1] and scores[2] > scores[3]


# Tunix and its libraries use functions that jax deprecates.
tunix_warns = pytest.mark.filterwarnings("default")


@tunix_warns
def test_grpo_tunix():
    pytest.importorskip("tunix", reason="tunix is not installed: make test-tunix")
    rewards = runpy.run_path(str(EXAMPLES / "grpo_tunix.py"))["main"]("2")
    assert len(rewards) == 2 and all(0 <= reward <= 1 for reward in rewards)


@tunix_warns
@pytest.mark.deep
def test_grpo_tunix_raises_the_reward():
    pytest.importorskip("tunix", reason="tunix is not installed: make test-tunix")
    rewards = runpy.run_path(str(EXAMPLES / "grpo_tunix.py"))["main"]("40")
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-3:]) / 3 > 0.9


def test_every_example_is_run():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")

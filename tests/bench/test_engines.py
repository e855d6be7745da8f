"""The tiny model, behind jpaged's own server and without it."""

from pathlib import Path

import pytest

from jpaged.bench.client import Client as BenchClient
from jpaged.bench.serve import Settings, bench_server
from jpaged.bench.throughput import bench_engine
from jpaged.bench.workload import Workload
from jpaged.llm import LLM
from tests.serving.client import MAX_LEN, Client
from tests.support.few_shapes import few_shapes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "endpoint, token_ids",
    [("completions", False), pytest.param("completions", True, marks=pytest.mark.deep), ("chat", False)],
)
async def test_a_run_against_the_server(loaded, endpoint, token_ids):
    workload = Workload("alpaca", num_prompts=6)
    settings = Settings(workload, endpoint=endpoint, token_ids=token_ids, concurrency=4)
    async with Client(*loaded) as client:
        url = str(client.server.make_url("/"))
        async with BenchClient(url) as bench_client:
            result = await bench_server(bench_client, settings, progress=False)
        await client.idle()
    found = result.runs[0].measurement
    assert result.model == "tiny" and result.max_model_len == MAX_LEN
    assert found.completed == found.counted == 6 and found.output_tokens == result.runs[0].asked
    asked = sum(each.prompt for each in workload.lengths())
    # A word has at least two of this model's tokens; a prompt at least three, and in a conversation six.
    assert asked - 6 <= found.prompt_tokens <= asked + 6 * 5 if not token_ids else found.prompt_tokens == asked
    assert all(found.latencies.values())


def test_a_run_without_a_server(tiny, tmp_path):
    with few_shapes():
        llm = LLM(
            str(tiny), progress=False, max_model_len=MAX_LEN, block_size=8, max_num_seqs=16, max_num_batched_tokens=64
        )
    workload = Workload("sharegpt", num_prompts=4)
    found = bench_engine(llm, workload, progress=False)
    outputs = [min(each.output, MAX_LEN - 1) for each in workload.lengths()]
    assert found.requests == 4 and found.output_tokens == sum(outputs) and found.duration > 0
    assert found.prompt_tokens == sum(min(e.prompt, MAX_LEN - o) for e, o in zip(workload.lengths(), outputs))
    assert found.notes == ["3 of 4 requests were shortened to the model's 256 tokens"]
    path: Path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "Hello", "max_tokens": 3}\n{"messages": [{"role": "user", "content": "a"}]}')
    found = bench_engine(llm, Workload("file", file=path, output_len=2), progress=False)
    assert found.requests == 2 and 2 <= found.output_tokens <= 5 and found.prompt_tokens == 5 + 4

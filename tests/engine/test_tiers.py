"""Cached prefixes on the host and on disk: whole engines give the same bits from each tier, and after a restart."""

import asyncio
import os

import msgspec
import pytest
import zmq

from jpaged import LLM, SamplingParams
from jpaged.engine.async_engine import AsyncEngine
from tests.support.few_shapes import few_shapes

PROMPTS = [[(7 * i + j * j) % 250 for j in range(70)] for i in range(5)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.7, seed=1, logprobs=1)
SETTINGS = {"num_gpu_blocks_override": 12, "block_size": 16, "max_num_seqs": 2, "max_num_batched_tokens": 32}


def start(characters, folder, **settings) -> LLM:
    with few_shapes():
        llm = LLM(str(characters), kv_cache_dir=folder and str(folder), **SETTINGS | {"swap_space": 0.001} | settings)
    if tier := llm.engine.scheduler.memory.tier:
        tier.keeps_all = True  # a token of this model takes little more time than the move of its keys and values
    if folder:
        llm.engine.scheduler.disk.token_s = 0.0  # and less time than a file
    return llm


def bits(llm: LLM, prompts=PROMPTS) -> tuple[list, list[int]]:
    """Return the tokens and logprobs of each output, and the numbers of cached tokens."""
    outputs = [llm.generate(prompt, PARAMS, use_tqdm=False)[0] for prompt in prompts]
    results = [
        [(token, output.outputs[0].logprobs[i][token].logprob) for i, token in enumerate(output.outputs[0].token_ids)]
        for output in outputs
    ]
    return results, [output.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def expected(characters) -> list:
    """Return the results without a cache."""
    return bits(start(characters, None, enable_prefix_caching=False, swap_space=0.0))[0]


def test_prefixes_return_from_the_host_with_their_bits(characters, expected):
    reader = zmq.Context.instance().socket(zmq.SUB)
    reader.connect("inproc://tiers")
    reader.subscribe("")
    events = {"enable_kv_cache_events": True, "endpoint": "inproc://tiers"}
    llm = start(characters, None, swap_space=1.0, kv_events_config=events)
    tier = llm.engine.scheduler.memory.tier
    assert tier.is_worthwhile
    first, cached = bits(llm)
    assert first == expected and cached == [0] * 5 and tier.num_out > 0
    again, cached = bits(llm)
    assert again == expected and cached == [64] * 5 and tier.num_back > 0
    stats = llm.engine.stats()
    assert (stats.num_evicted, stats.num_returned) == (tier.num_out, tier.num_back) and stats.num_host_blocks > 0
    llm.close()
    assert texts_by_events(reader) == {
        "GPU": {node.tokens for node in tier.device.tree.nodes.values() if len(node.tokens) == 16 and node.blocks[0]},
        "CPU": {node.tokens for node in tier.device.tree.nodes.values() if node.copies[0]},
    }


def texts_by_events(reader) -> dict[str, set[tuple[int, ...]]]:
    """Return the tokens of all blocks in each memory, as the events of an engine that was closed tell them."""
    texts, held = {}, {"GPU": set(), "CPU": set()}
    while reader.poll(200):
        for message in msgspec.msgpack.decode(reader.recv_multipart()[2])[1]:
            hashes, memory = message["block_hashes"], held[message["medium"]]
            if message["type"] == "BlockStored":
                size = message["block_size"]
                blocks = [tuple(message["token_ids"][i : i + size]) for i in range(0, size * len(hashes), size)]
                texts |= dict(zip(hashes, blocks, strict=True))
                memory |= {*hashes}
            else:
                memory -= {*hashes}
    reader.close()
    return {medium: {texts[each] for each in hashes} for medium, hashes in held.items()}


def test_prefixes_outlive_an_engine_with_their_bits(characters, expected, tmp_path, caplog):
    folder = tmp_path / "kv"
    llm = start(characters, folder)
    assert bits(llm)[0] == expected
    llm.close()
    (inner,) = folder.iterdir()
    assert len(list(inner.iterdir())) == 5 * 4
    llm = start(characters, folder)
    again, cached = bits(llm)
    assert again == expected and cached == [64] * 5 and llm.engine.scheduler.disk.num_read == 5 * 4
    for path in inner.iterdir():  # each file is broken in one bit
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    llm.engine.restart()
    again, cached = bits(llm)
    assert again == expected and cached == [0] * 5 and "is broken, and is deleted" in caplog.text
    llm.reset_prefix_cache()
    assert not list(inner.iterdir())
    assert bits(llm)[0] == expected

    async def stop() -> None:
        served = AsyncEngine(llm.engine)
        served.start()
        await served.stop()

    asyncio.run(stop())
    assert len(list(inner.iterdir())) == 5 * 4, "a server writes what is cached when it stops"


def test_other_parameters_find_no_files(characters, expected, tmp_path, caplog):
    llm = start(characters, tmp_path / "kv")
    assert bits(llm, PROMPTS[:2])[0] == expected[:2]
    llm.update_params(params_of(llm))
    assert llm.engine.scheduler.disk is None and "not used after an update of the parameters" in caplog.text
    assert bits(llm, PROMPTS[:2])[0] == expected[:2]
    llm.close()
    other = start(characters, tmp_path / "kv", kv_cache_dtype="bfloat16")
    assert bits(other)[1] == [0] * 5 and len(list((tmp_path / "kv").iterdir())) == 2


def params_of(llm: LLM) -> dict:
    """Return the arrays of an engine as nested dicts."""
    runner, nested = llm.engine.runner, {}
    for name, array in zip(runner.tree.expected, runner.params, strict=True):
        *parts, last = name.split(".")
        inner = nested
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = array
    return nested


def test_a_folder_that_others_may_read_is_refused(characters, tmp_path):
    os.chmod(tmp_path, 0o755)
    with pytest.raises(ValueError, match=r"^kv_cache_dir: .* must belong to this user, with mode 700"):
        start(characters, tmp_path)


@pytest.mark.parametrize("settings", [{"swap_space": 0}, {"enable_prefix_caching": False}])
def test_files_need_the_prefix_cache_and_the_host(characters, tmp_path, settings):
    with pytest.raises(ValueError, match=r"^kv_cache_dir: needs enable_prefix_caching and swap_space"):
        start(characters, tmp_path / "kv", **settings)

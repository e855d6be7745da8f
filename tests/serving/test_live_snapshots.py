"""The recorder of the engine's events and the snapshots of its pool."""

import base64
import itertools
import json
import random
import zlib

import pytest

from jpaged.core.params import SamplingParams
from jpaged.engine.engine import Engine
from jpaged.serving.live.feed import MapFrame
from jpaged.serving.live.recorder import MAX_EVENTS, MAX_KNOWN, MAX_NUMBER, Recorder
from jpaged.serving.live.snapshot import MAX_LISTED, MAX_REQUESTS, MAX_TABLE, Snapshot, snapshot
from tests.core import traffic
from tests.serving.live import expected, make
from tests.support.fake_runner import VOCAB
from tests.support.models import byte_tokenizer


def step(engine, recorder):
    """Take a step and notify the recorder, as AsyncEngine does."""
    output = engine.step()
    recorder.stepped(engine.scheduler, output)
    for request in output.ended:
        recorder.ended(request)


def recorded(recorder, kind):
    """Return the events of a kind."""
    return [{k: v for k, v in e.items() if k not in ("serial", "kind")} for e in recorder.events if e["kind"] == kind]


def test_snapshot_keeps_the_owner_of_blocks_that_a_step_in_flight_writes():
    scheduler, runner = traffic.make(cache=False)
    engine, recorder = Engine(scheduler, runner, byte_tokenizer(), max_in_flight=2), Recorder()
    request = engine.add("0", [1, 2, 3, 4, 5], SamplingParams(max_tokens=9))
    recorder.added(request)
    step(engine, recorder)
    engine.abort("0")
    recorder.ended(request)
    blocks = snapshot(engine.scheduler, recorder).blocks[: scheduler.pool.num_blocks]
    assert [i for i, number in enumerate(blocks) if number == 1] == request.sequences[0].table.held != []
    step(engine, recorder)
    assert not any(snapshot(engine.scheduler, recorder).blocks)


@pytest.mark.parametrize("seed", range(6))
def test_snapshot_equals_the_pool_block_by_block(seed):
    """Cover every kind of request, both kinds of preemption, and aborts."""
    rng = random.Random(seed)
    engine, recorder = make(blocks=9, host=6, preemption=rng.choice(["swap", "recompute"])), Recorder()
    scheduler, number, shared = engine.scheduler, 0, 0
    for _ in range(150):
        if rng.random() < 0.3:
            prompt, params, options = traffic.draw(rng, scheduler)
            recorder.added(engine.add(str(number), prompt, params, **options))
            number += 1
        if scheduler.requests and rng.random() < 0.05:
            recorder.ended(engine.abort(rng.choice(list(scheduler.requests))))
        if engine.has_work:
            step(engine, recorder)
        seen = snapshot(engine.scheduler, recorder)
        assert seen.blocks == expected(engine, recorder)
        assert seen.facts["used"] == scheduler.pool.num_used
        assert seen.facts["held"] == sum(len(s.table.held) for r in scheduler.running for s in r.live)
        assert [r["number"] for r in seen.facts["requests"]] == [recorder.number(r) for r in scheduler.running]
        assert [r["number"] for r in seen.facts["queue"]] == [recorder.number(r) for r in scheduler.waiting]
        shared += seen.facts["held"] > seen.facts["used"]
        json.dumps(seen.facts)
    assert scheduler.num_preemptions and shared
    while engine.has_work:
        step(engine, recorder)
    assert not recorder._numbers and not recorder._expected


def test_recorder_of_requests_with_a_shared_prefix_has_hits_forks_and_copies():
    engine, recorder = make(blocks=32, size=4), Recorder()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    for request_id in "ab":
        recorder.added(engine.add(request_id, prompt, SamplingParams(n=2, max_tokens=4, ignore_eos=True)))
        while engine.has_work:
            step(engine, recorder)
    # The second request finds two whole blocks. Its branches begin in the third, which one of them copies.
    assert recorded(recorder, "hit") == [{"number": 2, "tokens": 8, "prompt": 10}]
    assert recorded(recorder, "fork") == [{"number": 1, "branches": 2}, {"number": 2, "branches": 2}]
    assert recorded(recorder, "end") == [{"number": n, "tokens": 8, "reason": "length"} for n in (1, 2)]
    copies = recorded(recorder, "copy")
    assert len(copies) == recorder.copies == 2 and all(copy["shared"] for copy in copies)
    assert [event["serial"] for event in recorder.events] == list(range(1, 1 + len(recorder.events)))


def test_recorder_of_a_copy_that_keeps_a_cached_block_has_it_unshared():
    engine, recorder = make(blocks=32, size=4), Recorder()
    for request_id, last in ("a", 9), ("b", 30):
        recorder.added(engine.add(request_id, [1, 2, 3, last, last], SamplingParams(max_tokens=1)))
        while engine.has_work:
            step(engine, recorder)
    (copy,) = recorded(recorder, "copy")
    assert not copy["shared"] and copy["source"] != copy["destination"]


@pytest.mark.parametrize("way, swapped", [("swap", True), ("recompute", False)])
def test_recorder_of_a_preemption_has_its_kind(way, swapped):
    engine, recorder = make(blocks=6, size=4, host=6, preemption=way, cache=False), Recorder()
    for i in range(2):
        recorder.added(engine.add(str(i), [i] * 8, SamplingParams(max_tokens=10, ignore_eos=True)))
    while engine.has_work:
        step(engine, recorder)
    assert recorded(recorder, "preempt") == [{"number": 2, "swapped": swapped}]
    assert recorded(recorder, "resume") == [{"number": 2, "swapped": swapped}]
    assert recorded(recorder, "hit") == []


def test_recorder_measures_latencies():
    """Use a clock that advances by one second before each arrival and each step."""
    seconds = itertools.count(1)
    now = next(seconds)
    engine, recorder = make(tokens=8, clock=lambda: now), Recorder(lambda: now)
    for i in range(2):
        recorder.added(engine.add(str(i), [i] * 7, SamplingParams(max_tokens=3, ignore_eos=True)))
        now = next(seconds)
    while engine.has_work:
        now = next(seconds)
        step(engine, recorder)
    # Arrivals at 1 and 2, steps at 4, 5, ...: each of the first two ends a prompt.
    assert (recorder.first_tokens, recorder.first_token_seconds) == (2, (4 - 1) + (5 - 2))
    assert (recorder.tokens, recorder.timed_tokens, recorder.token_seconds) == (6, 5, 5.0)
    recorder.added(engine.add("2", [3], SamplingParams(max_tokens=1)))
    step(engine, recorder)
    assert (recorder.tokens, recorder.timed_tokens) == (7, 5), "time without work counts as time per token"


def test_recorder_ignores_unknown_requests():
    engine, recorder = make(), Recorder()
    seen, unseen = (engine.add(name, [1], SamplingParams()) for name in ("seen", "unseen"))
    recorder.added(seen)
    for request in (seen, unseen):
        engine.abort(request.request_id)
        recorder.ended(request)
    assert recorded(recorder, "end") == [{"number": 1, "tokens": 0, "reason": "abort"}]
    late = engine.add("late", [1], SamplingParams(max_tokens=2))
    step(engine, recorder)
    assert (
        [r["number"] for r in snapshot(engine.scheduler, recorder).facts["requests"]] == [recorder.number(late)] == [2]
    )


def test_recorder_bounds_its_events_and_requests():
    engine, recorder = make(blocks=64), Recorder()
    for i in range(MAX_KNOWN + 100):
        recorder.added(engine.add(str(i), [1, 2, 3], SamplingParams(max_tokens=1)))
        step(engine, recorder)
    assert not recorder._numbers and not recorder._expected
    assert len(recorder.events) == MAX_EVENTS and len(recorder._known) == MAX_KNOWN
    assert recorder.known("99") is None and recorder.known("100") == 101
    recorder._arrivals = iter([MAX_NUMBER - 1, MAX_NUMBER])
    for number in (MAX_NUMBER, 1):
        request = engine.add("n", [1], SamplingParams(max_tokens=1))
        recorder.added(request)
        assert recorder.number(request) == number
        engine.abort("n")


def test_snapshot_truncates_long_tables_and_many_requests():
    engine, recorder = make(blocks=4000, size=1, seqs=40, tokens=4000, length=200), Recorder()
    for i in range(60):
        recorder.added(engine.add(str(i), [i % VOCAB] * 150, SamplingParams()))
    step(engine, recorder)
    facts = snapshot(engine.scheduler, recorder).facts
    assert facts["running"] == len(engine.scheduler.running) > len(facts["requests"]) == MAX_REQUESTS
    assert len(facts["queue"]) == MAX_REQUESTS
    tables = [branch["table"] for request in facts["requests"] for branch in request["branches"]]
    assert len(tables[0]) == MAX_TABLE and facts["requests"][0]["branches"][0]["blocks"] == 150
    assert sum(map(len, tables)) == MAX_LISTED


def test_whole_frame_of_100_000_blocks_is_small():
    """Give neighbouring blocks to different requests, the case that compresses worst."""
    rng, blocks = random.Random(0), 100_000
    numbers = [rng.randrange(1, 257) for _ in range(blocks)]
    states = bytes(rng.choices([1, 129, 130], [5, 90, 5], k=blocks))
    planes = bytes(n & 255 for n in numbers) + bytes(n >> 8 for n in numbers) + states
    seen = Snapshot(planes, {}, [], 0.0, 0.0)
    frame = MapFrame(1, seen, seen)
    assert len(frame.whole) < 200_000 and len(frame.change) < 5_000
    assert zlib.decompress(base64.b64decode(json.loads(frame.whole[6:])["map"])) == planes

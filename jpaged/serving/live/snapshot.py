"""KV pool and its requests at one moment, without any text."""

import itertools
import sys
import time
from array import array
from dataclasses import dataclass, field

from jpaged.core.request import Request
from jpaged.core.scheduler import Scheduler
from jpaged.serving.codec import JsonObject
from jpaged.serving.live.recorder import Recorder

MAX_REQUESTS = 24  # listed requests, of the running and of the waiting ones each
MAX_BRANCHES = 8  # listed sequences of a request
MAX_TABLE = 128  # listed blocks of a sequence
MAX_LISTED = 2048  # listed blocks in all
RECORDED = ("tokens", "timed_tokens", "token_seconds", "first_tokens", "first_token_seconds", "copies")


@dataclass(frozen=True)
class Snapshot:
    """State of the engine at one moment, between two steps.

    Attributes:
        blocks: three bytes for each block, as three planes, each in the order of the blocks: the number of the first
            request that holds it (0 for none), its low and its high byte; then `BlockPool.states`.
        facts: everything else, ready for JSON.
        events: the latest events, oldest first.
        cost: seconds of the engine's thread that the snapshot took.
    """

    blocks: bytes
    facts: JsonObject
    events: list[JsonObject]
    time: float = field(compare=False)
    cost: float = field(compare=False)


def snapshot(scheduler: Scheduler, recorder: Recorder) -> Snapshot:
    """Return the pool, the requests and the totals. Call it on the thread that changes them."""
    began = time.thread_time()
    pool, running = scheduler.pool, list(scheduler.running)
    live = [sequence for request in running for sequence in request.live]
    numbers = _owners(scheduler, recorder)
    facts = {
        "num_blocks": pool.num_blocks,
        "block_size": pool.block_size,
        "caching": pool.enable_prefix_caching,
        "max_blocks": -(-scheduler.limits.max_model_len // pool.block_size),
        "used": pool.num_used,
        "held": sum(len(sequence.table.held) for sequence in live),  # a shared block counts for each table
        "branches": len(live),
        "pinned": scheduler.memory.pins.count,
        "on_host": pool.tree.num_copies,
        "running": len(running),
        "waiting": len(scheduler.waiting),
        "requests": _listed(running, recorder),
        "queue": [
            {"number": recorder.number(request), "tokens": request.sequences[0].num_tokens}
            for request in itertools.islice(scheduler.waiting, MAX_REQUESTS)
        ],
        "totals": {name: getattr(recorder, name) for name in RECORDED}
        | {
            "preemptions": scheduler.num_preemptions,
            "swapped_blocks": scheduler.num_swapped_blocks,
            "prefix_queries": scheduler.prefix_queries,
            "prefix_hits": scheduler.prefix_hits,
        },
    }
    blocks = numbers[::2] + numbers[1::2] + pool.states()
    return Snapshot(blocks, facts, list(recorder.events), time.monotonic(), time.thread_time() - began)


def _owners(scheduler: Scheduler, recorder: Recorder) -> bytes:
    """Return the number of the first request that holds each block, in two bytes, the low one first; 0 for none."""
    owners = array("H", bytes(2 * scheduler.pool.num_blocks))
    for sequence in scheduler.memory.leaving:
        for block_id in sequence.table.held:
            owners[block_id] = recorder.known(sequence.request.request_id) or 0
    for request in reversed(list(scheduler.running)):  # the first one writes last
        number = recorder.number(request)
        for sequence in request.live:
            for block_id in sequence.table.held:
                owners[block_id] = number
    if sys.byteorder == "big":
        owners.byteswap()
    return owners.tobytes()


def _listed(running: list[Request], recorder: Recorder) -> list[JsonObject]:
    """Return the first running requests, with the beginnings of their block tables."""
    room, listed = MAX_LISTED, []
    for request in running[:MAX_REQUESTS]:
        branches = []
        for sequence in request.live[:MAX_BRANCHES]:
            table = sequence.table.held[: min(MAX_TABLE, room)]
            room -= len(table)
            branches.append(
                {
                    "tokens": sequence.num_tokens,
                    "computed": sequence.num_computed_tokens,
                    "blocks": len(sequence.table.held),
                    "table": table,
                }
            )
        listed.append(
            {
                "number": recorder.number(request),
                "prompt": len(request.prompt_token_ids),
                "cached": request.sequences[0].num_cached_tokens,
                "num_branches": len(request.live),
                "branches": branches,
            }
        )
    return listed

"""Follower of a replica: it dispatches the plans of the leader, and needs neither scheduler nor tokenizer."""

import functools
import logging
import queue
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import jax
import numpy as np

from jpaged.config import Limits
from jpaged.core.plan import Done
from jpaged.parallel.channel import Channel
from jpaged.parallel.ending import FAILED, LOST, MALFORMED, end_process, told, wait_for_cause
from jpaged.parallel.frame import Frame, FrameError, Kind
from jpaged.parallel.hello import Facts, deadline, encode_facts
from jpaged.parallel.mask_frame import decode_masks
from jpaged.parallel.nodes import Nodes
from jpaged.parallel.plan_frame import Sizes, decode_plan
from jpaged.runtime.pending import PendingStep
from jpaged.runtime.runner import ModelRunner

logger = logging.getLogger(__name__)

CONNECT_INTERVAL_S, CONNECT_TIMEOUT_S = 0.2, 5.0
MAX_PENDING = 2  # steps whose result has not been checked for errors


class Leader:
    """Connection to the leader, read by a thread. Its loss ends this process, until the leader has sent END."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="leader", daemon=True).start()

    def send_facts(self, facts: Facts) -> None:
        """Send the decisions of this process, which must be those of the leader."""
        self._channel.send(Kind.FACTS, encode_facts(facts))

    def receive(self) -> Frame:
        """Wait for the next frame and return it."""
        return self._frames.get()

    def fail(self, reason: str, status: int) -> NoReturn:
        """Tell the leader why this process ends, and end it."""
        self.report(reason)
        end_process(reason, status)

    def report(self, reason: str) -> None:
        """Send the reason why this process ends."""
        try:
            self._channel.send(Kind.FAULT, reason.encode())
        except OSError:
            logger.debug("the leader has already gone")

    def _read(self) -> None:
        while True:
            try:
                frame = self._channel.receive()
            except FrameError as error:
                self.fail(f"malformed frame from the leader: {error}", MALFORMED)
            except OSError as error:
                end_process(f"the leader ({self._channel.peer}) is lost: {error}", LOST)
            if frame.kind == Kind.FAULT:
                end_process(f"the leader has ended: {frame.payload.decode(errors='replace')}", LOST)
            self._frames.put(frame)
            if frame.kind == Kind.END:
                return


class _Dropped(Exception):
    """End of a step that the leader has dropped."""


def connect(nodes: Nodes, end: float | None = None) -> Channel:
    """Connect to the leader, which may start later.

    Args:
        end: the time at which it must have accepted; None: the `deadline` from now.

    Raises:
        OSError: it does not accept a connection in time.
    """
    address, end = nodes.channel_address, end or deadline()
    where = f"{address[0]}:{address[1]}"
    logger.info("connecting to the leader at %s", where)
    while True:
        try:
            return Channel(socket.create_connection(address, timeout=CONNECT_TIMEOUT_S), where)
        except OSError as error:
            if time.monotonic() > end:
                raise OSError(f"dist_init_addr: the leader at {where} does not answer: {error}") from error
        time.sleep(CONNECT_INTERVAL_S)


def sizes_of(runner: ModelRunner, limits: Limits) -> Sizes:
    """Return the sizes that bound the numbers of a runner's plans."""
    blocks, table_width = runner.blocks, runner.rows.table.block_tables.shape[1]
    return Sizes(
        limits.max_num_seqs, limits.max_model_len, limits.max_num_batched_tokens, table_width,
        runner.vocab_size, blocks.num_blocks, blocks.num_host_blocks,
    )  # fmt: skip


def follow(runner: ModelRunner, limits: Limits, leader: Leader) -> None:
    """Dispatch the leader's plans until it ends the replica.

    Any error ends the process: the other processes wait for its part of the step.
    """
    try:
        replay(runner, sizes_of(runner, limits), leader.receive)
    except FrameError as error:
        leader.fail(f"malformed frame from the leader: {error}", MALFORMED)
    except Exception as error:
        wait_for_cause(error)
        traceback.print_exception(error)
        leader.fail(f"a computation has failed: {told(error)}", FAILED)


def replay(runner: ModelRunner, sizes: Sizes, receive: Callable[[], Frame]) -> None:
    """Dispatch the plans of received frames up to the frame END.

    Raises:
        FrameError: a frame is malformed or unexpected; the runner has dispatched only the plans before it.
    """
    pending: deque[PendingStep | Done] = deque()

    def masks(num_masks: int) -> np.ndarray:
        kind, payload = receive()
        if kind == Kind.RECOVER:
            raise _Dropped
        if kind != Kind.MASKS:
            raise FrameError(f"kind: must be {Kind.MASKS!r} after a plan with masks, not {kind!r}")
        return decode_masks(payload, num_masks, sizes.vocab_size)

    def recover() -> None:
        pending.clear()
        runner.recover()

    while (frame := receive()).kind != Kind.END:
        if frame.kind == Kind.RECOVER:
            recover()
            continue
        if frame.kind != Kind.PLAN:
            raise FrameError(f"kind: must be {Kind.PLAN!r}, {Kind.RECOVER!r} or {Kind.END!r}, not {frame.kind!r}")
        plan = decode_plan(frame.payload, sizes)
        try:
            make_masks = functools.partial(masks, len(plan.masked)) if plan.masked else None
            pending.append(runner.dispatch(plan, make_masks))
        except _Dropped:
            recover()
        if len(pending) > MAX_PENDING:
            pending.popleft().result()  # raises the error of a failed step
    jax.block_until_ready((runner.blocks.pool, runner.rows.state))

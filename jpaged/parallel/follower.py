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
from jpaged.parallel.ending import FAILED, LOST, MALFORMED, end_process, wait_for_cause, words_of
from jpaged.parallel.frame import FrameError, Sizes, plan_of, unexpected
from jpaged.parallel.hello import Values, deadline
from jpaged.parallel.messages import End, Facts, Fault, Masks, Message, Plan, Recover
from jpaged.parallel.nodes import Nodes
from jpaged.runtime.pending import PendingStep
from jpaged.runtime.runner import ModelRunner

logger = logging.getLogger(__name__)

CONNECT_INTERVAL_S, CONNECT_TIMEOUT_S = 0.2, 5.0
MAX_PENDING = 2  # steps whose result has not been checked for errors


class Leader:
    """Connection to the leader, read by a thread. Its loss ends this process, until the leader has sent `End`."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="leader", daemon=True).start()

    def send_facts(self, facts: Values) -> None:
        """Send the decisions of this process, which must be those of the leader."""
        self._channel.send(Facts(dict(facts)))

    def receive(self) -> Message:
        """Wait for the next message and return it."""
        return self._messages.get()

    def fail(self, reason: str, status: int) -> NoReturn:
        """Tell the leader why this process ends, and end it."""
        self.report(reason)
        end_process(reason, status)

    def report(self, reason: str) -> None:
        """Send the reason why this process ends."""
        self._channel.send_last(Fault(reason))

    def _read(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except FrameError as error:
                self.fail(f"malformed frame from the leader: {error}", MALFORMED)
            except OSError as error:
                end_process(f"the leader ({self._channel.peer}) is lost: {error}", LOST)
            if isinstance(message, Fault):
                end_process(f"the leader has ended: {message.reason}", LOST)
            self._messages.put(message)
            if isinstance(message, End):
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


def follow(runner: ModelRunner, limits: Limits, leader: Leader) -> None:
    """Dispatch the leader's plans until it ends the replica.

    Any error ends the process: the other processes wait for its part of the step.
    """
    blocks = runner.blocks
    num_groups = len(blocks.cache.groups.windows)
    sizes = Sizes(limits, runner.vocab_size, blocks.num_blocks, blocks.num_host_blocks, num_groups)
    try:
        replay(runner, sizes, leader.receive)
    except FrameError as error:
        leader.fail(f"malformed frame from the leader: {error}", MALFORMED)
    except Exception as error:
        wait_for_cause(error)
        traceback.print_exception(error)
        leader.fail(f"a computation has failed: {words_of(error)}", FAILED)


def replay(runner: ModelRunner, sizes: Sizes, receive: Callable[[], Message]) -> None:
    """Dispatch the plans of received messages up to the message `End`.

    Raises:
        FrameError: a message is malformed or unexpected; the runner has dispatched only the plans before it.
    """
    pending: deque[PendingStep | Done] = deque()
    while not isinstance(message := receive(), End):
        try:
            if isinstance(message, Recover):
                raise _Dropped
            if not isinstance(message, Plan):
                raise unexpected(message, Plan, Recover, End)
            plan = plan_of(message, sizes)
            masks = functools.partial(_masks, receive, (len(plan.masked), -(-sizes.vocab_size // 32)))
            pending.append(runner.dispatch(plan, masks if plan.masked else None))
        except _Dropped:
            pending.clear()
            runner.recover()
        if len(pending) > MAX_PENDING:
            pending.popleft().result()  # raises the error of a failed step
    jax.block_until_ready((runner.blocks.pool, runner.rows.state))


def _masks(receive: Callable[[], Message], shape: tuple[int, int]) -> np.ndarray:
    """Receive the masks of a plan, [M, ceil(V / 32)] uint32."""
    message = receive()
    if isinstance(message, Recover):
        raise _Dropped
    if not isinstance(message, Masks):
        raise unexpected(message, Masks)
    if len(message.words) != (num_bytes := 4 * shape[0] * shape[1]):
        raise FrameError(f"masks: must have {num_bytes} bytes, not {len(message.words)}")
    return np.frombuffer(message.words, "<u4").reshape(shape)

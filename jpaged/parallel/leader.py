"""Leader of a replica: it sends each plan to the other processes before it dispatches the plan itself."""

import contextlib
import dataclasses
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.core.commands import Command, Sleep, UpdateParams
from jpaged.core.params import InvalidParameter
from jpaged.core.plan import Done, StepPlan, StepResult
from jpaged.parallel.channel import Channel
from jpaged.parallel.ending import CAUSE_TIMEOUT_S, LOST, MALFORMED, end_after_failure, end_process
from jpaged.parallel.frame import MAX_HELLO_BYTES, FrameError, encode_frame, message_of, unexpected
from jpaged.parallel.hello import HELLO_TIMEOUT_S, START_TIMEOUT_S, Values, check_hello, deadline, difference
from jpaged.parallel.messages import End, Facts, Fault, Masks, Message, Recover, Refusal, Welcome
from jpaged.parallel.nodes import Nodes
from jpaged.runtime.pending import PendingStep
from jpaged.runtime.runner import ModelRunner

logger = logging.getLogger(__name__)

FIXED_PARAMS = "parameters can't be exchanged while several hosts share the model; restart all of them"


class Followers:
    """Other processes of a replica, each with a connection that a thread reads.

    The loss of any of them ends this process, until `end`.
    """

    def __init__(self, channels: dict[int, Channel]):
        self.channels = channels
        self._facts: queue.SimpleQueue[tuple[int, Values]] = queue.SimpleQueue()
        self._ended = threading.Event()
        for rank, channel in channels.items():
            threading.Thread(target=self._read, args=(rank, channel), name=f"node {rank}", daemon=True).start()

    @classmethod
    def accept(cls, nodes: Nodes, config: EngineConfig) -> Self:
        """Wait for all followers to join.

        A process with other settings is refused, and may try again.

        Raises:
            ValueError: some have not joined in time.
            OSError: the address is invalid or in use.
        """
        channels: dict[int, Channel] = {}
        settings, end = dataclasses.asdict(config), deadline()
        _bound(nodes.coordinator_address).close()  # jax would crash at an address in use
        with _bound(nodes.channel_address) as server:
            logger.info("waiting for %d more nodes at %s:%d", nodes.nnodes - 1, *nodes.channel_address)
            while len(channels) < nodes.nnodes - 1:
                try:
                    if (left := end - time.monotonic()) <= 0:
                        raise TimeoutError
                    server.settimeout(left)
                    connected, address = server.accept()
                except TimeoutError as error:
                    missing = [str(rank) for rank in range(1, nodes.nnodes) if rank not in channels]
                    raise ValueError(
                        f"nnodes: nodes {', '.join(missing)} have not joined within {START_TIMEOUT_S:g} seconds"
                    ) from error
                channel = Channel(connected, f"{address[0]}:{address[1]}")
                channels |= _welcome(channel, nodes, channels, settings, end - time.monotonic())
        return cls(channels)

    def check_facts(self, facts: Values) -> None:
        """Compare the decisions of all processes before they load the parameters.

        Raises:
            ValueError: a follower has other facts, or did not send them in time; the message has the first difference.
        """
        end, missing = deadline(), set(self.channels)
        while missing:
            try:
                rank, theirs = self._facts.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                names = ", ".join(map(str, sorted(missing)))
                raise ValueError(
                    f"nnodes: nodes {names} have not checked their settings within {START_TIMEOUT_S:g} seconds"
                ) from None
            missing.discard(rank)
            if problem := difference(theirs, facts):
                raise ValueError(f"node {rank}: {problem}")

    def send(self, message: Message) -> None:
        """Send a message to each follower."""
        frame = encode_frame(message)
        for rank, channel in self.channels.items():
            try:
                channel.send_frame(frame)
            except OSError as error:
                time.sleep(CAUSE_TIMEOUT_S)  # the last message of the follower, if there is one, has the reason
                end_process(f"node {rank} ({channel.peer}) is lost: {error}", LOST)

    def end(self, fault: str | None = None) -> None:
        """End the followers, without an error or with the reason why this process ends."""
        self._ended.set()
        for channel in self.channels.values():
            channel.send_last(End() if fault is None else Fault(fault))

    def refuse_params(self, directory: Path) -> NoReturn:
        """Raise a ValueError, as `LeaderRunner.check` does, before parameters of a directory are loaded."""
        raise ValueError(FIXED_PARAMS)

    def lead(self, runner: ModelRunner) -> "LeaderRunner":
        """Return a runner that drives the runner of this process and those of the followers."""
        return LeaderRunner(runner, self)

    def _read(self, rank: int, channel: Channel) -> None:
        """Receive messages until the end of the replica."""
        with contextlib.closing(channel):
            while True:
                try:
                    match message := channel.receive(MAX_HELLO_BYTES):
                        case Facts(facts):
                            self._facts.put((rank, facts))
                        case Fault(reason):
                            end_process(f"node {rank} ({channel.peer}): {reason}", LOST)
                        case _:
                            raise unexpected(message, Facts, Fault)
                except FrameError as error:
                    end_process(f"malformed frame from node {rank} ({channel.peer}): {error}", MALFORMED)
                except OSError as error:
                    if self._ended.is_set():
                        return
                    end_process(f"node {rank} ({channel.peer}) is lost: {error}", LOST)


class LeaderRunner:
    """Runner of the leader: all processes of the replica run the same plans.

    A computation that fails in one process leaves the others waiting for its part, so it ends the replica.

    Args:
        runner: the runner of this process.
    """

    def __init__(self, runner: ModelRunner, followers: Followers):
        self._runner, self._followers = runner, followers

    def dispatch(self, plan: StepPlan, make_masks: Callable[[], np.ndarray] | None = None) -> "LeaderStep":
        """Send a plan, and start its step as `ModelRunner.dispatch` does. A message with the masks follows the plan."""

        def masks() -> np.ndarray:
            assert make_masks is not None
            made = make_masks()
            self._followers.send(Masks(made.astype("<u4", copy=False).tobytes()))
            return made

        self._followers.send(message_of(plan))
        try:
            return LeaderStep(self._runner.dispatch(plan, None if make_masks is None else masks))
        except jax.errors.JaxRuntimeError as error:
            end_after_failure(error)

    def check(self, command: Command) -> None:
        """Raise a ValueError: this process does not hold all arrays of the model."""
        if isinstance(command, Sleep):
            raise ValueError("sleep: not possible while several hosts share the model")
        if isinstance(command, UpdateParams):
            raise ValueError(f"params: {FIXED_PARAMS}")

    @property
    def numerics(self) -> dict[str, str | int]:
        """Settings that bits depend on, as of the runner of this process."""
        return self._runner.numerics

    def fingerprint(self, adapter: int | None = None) -> NoReturn:
        """Raise an InvalidParameter: this process does not hold all arrays of the model."""
        raise InvalidParameter("certificate", "not possible while several hosts share the model")

    control = check  # `WakeUp` has no effect, because the runner never sleeps

    def recover(self) -> None:
        """Make all runners usable after an error of this host in a step."""
        self._followers.send(Recover())
        self._runner.recover()


class LeaderStep:
    """Dispatched step of all processes."""

    def __init__(self, inner: PendingStep | Done):
        self._inner = inner

    def wait(self) -> None:
        """Wait until the next step should be dispatched."""
        self._inner.wait()

    def result(self) -> StepResult:
        """Wait for the step's tokens and return its result."""
        try:
            return self._inner.result()
        except jax.errors.JaxRuntimeError as error:
            end_after_failure(error)


def _bound(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"dist_init_addr: can't listen on {host}:{port}: {error}") from error


def _welcome(
    channel: Channel, nodes: Nodes, joined: Mapping[int, Channel], settings: dict[str, Any], timeout_s: float
) -> dict[int, Channel]:
    """Return the connection by rank, or nothing if its process can't join."""
    try:
        hello = channel.receive(MAX_HELLO_BYTES, min(HELLO_TIMEOUT_S, timeout_s))
        rank = check_hello(hello, nodes.nnodes, joined, settings)
        channel.send(Welcome(settings))
    except (ValueError, OSError) as error:
        logger.warning("refused %s: %s", channel.peer, error)
        channel.send_last(Refusal(str(error)))
        channel.close()
        return {}
    logger.info("node %d has joined from %s", rank, channel.peer)
    return {rank: channel}

"""First messages of a connection: a follower joins, and takes over the leader's settings."""

import time
from collections.abc import Collection, Mapping
from typing import Any

from jpaged.config import EngineConfig
from jpaged.parallel.channel import Channel
from jpaged.parallel.frame import MAX_HELLO_BYTES, FrameError, unexpected
from jpaged.parallel.messages import Hello, Message, Refusal, Welcome
from jpaged.runtime.identity import versions

HELLO_TIMEOUT_S = 10.0
START_TIMEOUT_S = 300.0  # for all processes to join
LOCAL = ("model", "revision", "tokenizer", "skip_tokenizer_init")  # settings that may differ between processes

Values = Mapping[str, Any]  # settings, or decisions, by name


def difference(theirs: Values, ours: Values) -> str | None:
    """Return the first of their values that differs from ours, in words; None if there is none."""
    for name, value in theirs.items():
        if name not in ours or value != ours[name]:
            return f"{name}: must be {ours.get(name)!r} as on the leader, not {value!r}"
    return None


def join(channel: Channel, rank: int, nnodes: int, given: Values, end: float | None = None) -> EngineConfig:
    """Join a leader, and return its settings combined with those of this process.

    Args:
        given: settings that were given to this process. They must be those of the leader, except for `LOCAL`.
        end: the time at which it must have joined; None: the `deadline` from now.

    Raises:
        ValueError: the leader has refused; the message has the field.
        OSError: the connection is lost, or the time is up.
    """
    common = {name: value for name, value in given.items() if name not in LOCAL}
    channel.send(Hello(rank, nnodes, versions(), common))
    try:
        answer = channel.receive(MAX_HELLO_BYTES, (end or deadline()) - time.monotonic())
    except TimeoutError as error:
        raise OSError(f"dist_init_addr: the leader at {channel.peer} does not answer: {error}") from error
    if isinstance(answer, Refusal):
        raise ValueError(answer.reason)
    if not isinstance(answer, Welcome):
        raise unexpected(answer, Welcome, Refusal)
    revision = {"revision": None} if "model" in given else {}  # the leader's revision is one of its model
    without_texts = {"tokenizer": None, "skip_tokenizer_init": True}  # only the leader holds texts
    try:
        return EngineConfig(**{**answer.settings, **revision, **given, **without_texts})
    except TypeError as error:
        raise FrameError(f"settings: {error}") from error


def check_hello(hello: Message, nnodes: int, joined: Collection[int], settings: Values) -> int:
    """Return the rank of a process that wants to join.

    Args:
        joined: the ranks of the processes that have joined.
        settings: the settings of the leader.

    Raises:
        ValueError: it can't join; the message has the field.
    """
    if not isinstance(hello, Hello):
        raise unexpected(hello, Hello)
    if hello.nnodes != nnodes:
        raise ValueError(f"nnodes: must be {nnodes} as on the leader, not {hello.nnodes}")
    if not 0 < hello.node_rank < nnodes:
        raise ValueError(f"node_rank: must be between 1 and {nnodes - 1}, not {hello.node_rank}")
    if hello.node_rank in joined:
        raise ValueError(f"node_rank: a process with {hello.node_rank} has already joined")
    for name, value in versions().items():
        if hello.versions.get(name) != value:
            raise ValueError(f"version of {name}: must be {value} as on the leader, not {hello.versions.get(name)!r}")
    if problem := difference(hello.settings, settings):
        raise ValueError(problem)
    return hello.node_rank


def deadline() -> float:
    """Return the time, of `time.monotonic`, at which all processes must have joined."""
    return time.monotonic() + START_TIMEOUT_S

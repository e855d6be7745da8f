"""Contexts of the leader and the followers of a model that several hosts share."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jpaged.config import EngineConfig
from jpaged.parallel.ending import end_after_error, wait_for_cause, words_of
from jpaged.parallel.nodes import Nodes, cluster

if TYPE_CHECKING:
    from jpaged.parallel.follower import Leader
    from jpaged.parallel.leader import Followers
    from jpaged.start.setup import Setup


@contextlib.contextmanager
def leading(nodes: Nodes, config: EngineConfig) -> Iterator["Followers | None"]:
    """Enter a context with the followers of this process, which end with it; None if there are none."""
    if nodes.nnodes == 1:
        yield None
        return
    from jpaged.parallel.leader import Followers

    followers = Followers.accept(nodes, config)
    try:
        with cluster(nodes):
            yield followers
            followers.end()
    except BaseException as error:
        wait_for_cause(error)
        followers.end(words_of(error))
        end_after_error(error)


@contextlib.contextmanager
def following(nodes: Nodes, given: Mapping[str, Any]) -> Iterator[tuple["Leader", EngineConfig]]:
    """Enter a context with the leader of this process and its settings.

    Args:
        given: settings of this process, by field of EngineConfig.

    Raises:
        ValueError: the leader has other settings.
        OSError: the leader does not answer.
    """
    from jpaged.parallel.follower import Leader, connect
    from jpaged.parallel.hello import deadline, join

    end = deadline()
    channel = connect(nodes, end)
    config = join(channel, nodes.node_rank, nodes.nnodes, given, end)
    leader = Leader(channel)
    try:
        with cluster(nodes):
            yield leader, config
    except BaseException as error:
        wait_for_cause(error)
        leader.report(words_of(error))
        end_after_error(error)


def facts_of(setup: "Setup") -> dict[str, Any]:
    """Return the decisions of a process that must be the same in all processes of a replica, as JSON values."""
    resolved = setup.resolved
    facts = {f"model.{name}": value for name, value in dataclasses.asdict(resolved.model).items()}
    facts |= dataclasses.asdict(resolved.limits) | {"dtype": resolved.dtype}
    facts |= {"kernels": setup.kernels and setup.kernels.name}
    found: dict[str, Any] = json.loads(json.dumps(facts))
    return found

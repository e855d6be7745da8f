"""First frames of a connection: a follower joins, and takes over the leader's settings."""

import importlib.metadata
import json
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jpaged.config import EngineConfig
from jpaged.parallel.channel import Channel
from jpaged.parallel.frame import MAX_HELLO_BYTES, Frame, FrameError, Kind

HELLO_TIMEOUT_S = 10.0
START_TIMEOUT_S = 300.0  # for all processes to join
OWN = ("model", "revision", "tokenizer", "skip_tokenizer_init")  # settings that may differ between processes

Facts = Mapping[str, Any]


def versions() -> dict[str, str]:
    """Return the versions that must be the same in all processes."""
    found = {}
    for name in ("jpaged", "jax", "jaxlib"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def encode_facts(facts: Facts) -> bytes:
    """Return facts as JSON."""
    return json.dumps(facts, sort_keys=True).encode()


def decode_facts(name: str, payload: bytes) -> dict[str, Any]:
    """Return the facts in a payload.

    Raises:
        FrameError: it is not a JSON object.
    """
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{name}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise FrameError(f"{name}: must be a JSON object, not {type(found).__name__}")
    return found


def difference(theirs: Facts, ours: Facts) -> str | None:
    """Return the first of their facts that differs from ours, in words; None if there is none."""
    for name, value in theirs.items():
        if name not in ours or value != ours[name]:
            return f"{name}: must be {ours.get(name)!r} as on the leader, not {value!r}"
    return None


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """Return the settings of a config as JSON values."""
    return {each.name: getattr(config, each.name) for each in fields(config)}


def join(channel: Channel, rank: int, nnodes: int, given: Facts, end: float | None = None) -> EngineConfig:
    """Join a leader, and return its settings with the process's own ones.

    Args:
        given: settings that were given to this process. They must be those of the leader, except for `OWN`.
        end: the time at which it must have joined; None: the `deadline` from now.

    Raises:
        ValueError: the leader has refused; the message has the field.
        OSError: the connection is lost, or the time is up.
    """
    common = {name: value for name, value in given.items() if name not in OWN}
    hello = {"node_rank": rank, "nnodes": nnodes, "versions": versions(), "settings": common}
    channel.send(Kind.HELLO, encode_facts(hello))
    try:
        kind, payload = channel.receive(MAX_HELLO_BYTES, (end or deadline()) - time.monotonic())
    except TimeoutError as error:
        raise OSError(f"dist_init_addr: the leader at {channel.peer} does not answer: {error}") from error
    if kind == Kind.REFUSAL:
        raise ValueError(payload.decode(errors="replace"))
    if kind != Kind.WELCOME:
        raise FrameError(f"kind: must be {Kind.WELCOME!r}, not {kind!r}")
    settings = decode_facts("settings", payload)
    if "model" in given:
        settings["revision"] = None
    # The leader alone has texts.
    own = {**given, "tokenizer": None, "skip_tokenizer_init": True}
    try:
        return EngineConfig(**(settings | own))
    except TypeError as error:
        raise FrameError(f"settings: {error}") from error


def check_hello(frame: Frame, nnodes: int, joined: Mapping[int, Any], settings: Facts) -> int:
    """Return the rank of a process that wants to join.

    Args:
        joined: the processes that have joined, by rank.
        settings: the settings of the leader.

    Raises:
        ValueError: it can't join; the message has the field.
    """
    if frame.kind != Kind.HELLO:
        raise FrameError(f"kind: must be {Kind.HELLO!r}, not {frame.kind!r}")
    hello = decode_facts("hello", frame.payload)
    rank, given = hello.get("node_rank"), hello.get("settings")
    if hello.get("nnodes") != nnodes:
        raise ValueError(f"nnodes: must be {nnodes} as on the leader, not {hello.get('nnodes')!r}")
    if type(rank) is not int or not 0 < rank < nnodes:
        raise ValueError(f"node_rank: must be between 1 and {nnodes - 1}, not {rank!r}")
    if rank in joined:
        raise ValueError(f"node_rank: a process with {rank} has already joined")
    theirs = hello.get("versions")
    if not isinstance(theirs, dict) or not isinstance(given, dict):
        raise FrameError("hello: versions and settings must be JSON objects")
    for name, value in versions().items():
        if theirs.get(name) != value:
            raise ValueError(f"version of {name}: must be {value} as on the leader, not {theirs.get(name)!r}")
    if problem := difference(given, settings):
        raise ValueError(problem)
    return rank


def deadline() -> float:
    """Return the time, of `time.monotonic`, at which all processes must have joined."""
    return time.monotonic() + START_TIMEOUT_S

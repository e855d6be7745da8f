"""Messages between the processes of a replica, as typed values. The decoder builds only these types."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from jpaged.core.plan import Admitted, StepPlan


class ParamsText(NamedTuple):
    """Parameters of a request: the name of their class, and the fields that differ from their defaults, as JSON."""

    kind: str
    fields: bytes


@dataclass(frozen=True, slots=True)
class SentAdmitted(Admitted):
    """Admitted sequence with its parameters as text."""

    params: ParamsText  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class SentPlan(StepPlan):
    """Plan with the parameters of its sequences as text."""

    admitted: tuple[SentAdmitted, ...] = ()


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Message of a process to another one."""


class Hello(Message, frozen=True):
    """Request of a process to join, with its versions and the settings that it was given."""

    node_rank: int
    nnodes: int
    versions: dict[str, str]
    settings: dict[str, Any]


class Welcome(Message, frozen=True):
    """Settings of the leader, for a process that has joined."""

    settings: dict[str, Any]


class Refusal(Message, frozen=True):
    """Reason why a process can't join."""

    reason: str


class Facts(Message, frozen=True):
    """Decisions of a follower before it loads the parameters."""

    facts: dict[str, Any]


class Plan(Message, frozen=True):
    """Plan to dispatch."""

    plan: SentPlan


class Masks(Message, frozen=True):
    """Masks of the plan before this message: words of 32 bits, [M, ceil(V / 32)], the lowest byte of each first."""

    words: bytes


class Recover(Message, frozen=True):
    """Command to drop a step that has failed on the leader's host."""


class End(Message, frozen=True):
    """End of the replica without an error."""


class Fault(Message, frozen=True):
    """Error that ends the process which sends this message."""

    reason: str


ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(Hello | Welcome | Refusal | Facts | Plan | Masks | Recover | End | Fault)

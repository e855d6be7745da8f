"""Ids of calls. Some chat templates print them, and accept only their own form.

Mistral's templates demand nine letters or digits. Kimi's print the id in place of the name: "functions.NAME:INDEX"
(https://github.com/MoonshotAI/Kimi-K2/blob/main/docs/tool_call_guidance.md).
"""

import hashlib
import re
import uuid
from collections.abc import Callable
from typing import NamedTuple

ANTHROPIC = "toolu_"  # in front of ids in Anthropic's API


class Ids(NamedTuple):
    """Form of ids.

    Attributes:
        new: return the id of a call from its name and its index in the conversation.
        in_template: return an id of a client, which may be another server's, as the template accepts it.
    """

    new: Callable[[str, int], str]
    in_template: Callable[[str], str]


def _short(call_id: str) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", inner := call_id.removeprefix(ANTHROPIC)):
        return inner
    return hashlib.blake2b(call_id.encode(errors="replace")).hexdigest()[:9]


RANDOM = Ids(lambda name, index: f"call_{uuid.uuid4().hex}", lambda call_id: call_id)
SHORT = Ids(lambda name, index: uuid.uuid4().hex[:9], _short)
NAMED = Ids(lambda name, index: f"functions.{name}:{index}", lambda call_id: call_id.removeprefix(ANTHROPIC))

"""Flags of vLLM without a use in jpaged.

A value without effect is accepted with a notice, and any other is rejected. Nothing is silently ignored.
"""

import argparse
import logging
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class Foreign(NamedTuple):
    """Flag of vLLM.

    Attributes:
        names: the flag and its aliases.
        reason: why it has no effect.
        allowed: values without effect; None: all values; (): no value; a flag without a value has `SWITCH`.
        refusal: the error for other values.
    """

    names: tuple[str, ...]
    reason: str
    allowed: tuple[str, ...] | None = None
    refusal: str = "not supported yet"


SWITCH = ("",)
ONE = ("1",)
NEVER: tuple[str, ...] = ()
ALWAYS_ON = "not needed, always on"
NO_GRAPHS = "not needed, every shape is compiled before the server is ready"

FLAGS = (
    Foreign(("--enable-chunked-prefill",), ALWAYS_ON, SWITCH),
    Foreign(("--no-enable-chunked-prefill",), "", NEVER, "long prompts are always computed in chunks"),
    Foreign(("--enable-auto-tool-choice",), ALWAYS_ON, SWITCH),
    Foreign(("--enable-prompt-tokens-details",), ALWAYS_ON, SWITCH),
    Foreign(("--trust-remote-code",), "not needed, no model brings code of its own", SWITCH),
    Foreign(("--enforce-eager",), NO_GRAPHS, SWITCH),
    Foreign(("--max-seq-len-to-capture",), NO_GRAPHS),
    Foreign(("--cudagraph-capture-sizes", "--cuda-graph-sizes"), NO_GRAPHS),
    Foreign(("--compilation-config", "-O"), NO_GRAPHS),
    Foreign(("--disable-log-requests", "--no-enable-log-requests"), "not needed, prompts are never logged", SWITCH),
    Foreign(("--enable-log-requests",), "", NEVER, "prompts are never logged; see --access-log"),
    Foreign(("--disable-log-stats",), "not needed, statistics are at /metrics and in no log", SWITCH),
    Foreign(("--uvicorn-log-level",), "not needed, see --log-level and --access-log"),
    Foreign(("--disable-frontend-multiprocessing",), "not needed, the server is one process", SWITCH),
    Foreign(("--api-server-count",), "not needed, the server is one process", ONE),
    Foreign(("--distributed-executor-backend",), "not needed, the model runs in one process", ("mp", "uni")),
    Foreign(("--pipeline-parallel-size", "-pp"), "the default", ONE),
    Foreign(("--enable-expert-parallel",), "", NEVER),
    Foreign(("--guided-decoding-backend",), "not needed, llguidance compiles all structured outputs"),
    Foreign(("--enable-lora",), "", NEVER),
    Foreign(("--speculative-config",), "", NEVER),
    Foreign(("--reasoning-parser",), "", NEVER),
    Foreign(("--cpu-offload-gb",), "the default", ("0",)),
    Foreign(("--tokenizer-mode",), "the default", ("auto", "hf", "fast")),
    Foreign(("--config-format",), "the default", ("auto", "hf")),
    Foreign(("--runner", "--task"), "the default", ("auto", "generate")),
    Foreign(("--device",), "the default", ("auto",), "jax chooses the device; set JAX_PLATFORMS in the environment"),
    Foreign(("--response-role",), "the default", ("assistant",)),
    Foreign(("--download-dir",), "", NEVER, "set HF_HUB_CACHE in the environment instead"),
    Foreign(("--hf-token",), "", NEVER, "set HF_TOKEN in the environment instead"),
)  # fmt: skip


class _Accept(argparse.Action):
    """Action that records a notice of a flag without effect, and rejects a value that would have an effect."""

    def __init__(self, option_strings: list[str], dest: str, flag: Foreign, **options: Any):
        super().__init__(option_strings, dest, **options)
        self._flag = flag

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = values if isinstance(values, str) else ""
        if self._flag.allowed is not None and given not in self._flag.allowed:
            parser.error(f"{option_string}{given and f' {given}'}: {self._flag.refusal}")
        namespace.notices = [*namespace.notices, f"{option_string}: {self._flag.reason}"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags, hidden from the list of flags, but named at its end."""
    for flag in FLAGS:
        nargs = 0 if flag.allowed == SWITCH else "?" if flag.allowed == NEVER else None
        parser.add_argument(
            *flag.names, action=_Accept, flag=flag, nargs=nargs, dest="notices", default=[], help=argparse.SUPPRESS
        )
    names = sorted(name for flag in FLAGS if flag.allowed != NEVER for name in flag.names)
    refused = sorted(name for flag in FLAGS if flag.allowed == NEVER for name in flag.names)
    parser.epilog = (
        f"vLLM flags without an effect here, accepted with a notice: {', '.join(names)}. vLLM flags that are rejected "
        f"with a reason: {', '.join(refused)}."
    )


def log_notices(args: argparse.Namespace) -> None:
    """Log the notices of flags without effect."""
    for notice in args.notices:
        logger.info(notice)

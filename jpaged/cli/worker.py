"""Follow `jpaged serve` on another host, which shares its model with this one.

  jpaged worker --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:29500
  jpaged worker DIR --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:29500   the model is in another directory here

The leader runs `jpaged serve` with the same --nnodes and --dist-init-addr, and sends its settings. Flags of the model
serve to check them, except for MODEL. The leader's port and the next one must be reachable from trusted hosts only.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
from dataclasses import fields
from types import FrameType

from jpaged.cli.loading import loading
from jpaged.cli.nodes import facts_of, following
from jpaged.cli.setting_flags import add_settings, config_of
from jpaged.config import EngineConfig
from jpaged.flags import ENGINE
from jpaged.parallel.nodes import Nodes
from jpaged.serving.logs import LEVELS, logging_to

PEERS = ENGINE

logger = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged worker`."""
    parser.usage = "%(prog)s [MODEL] --nnodes NODES --node-rank RANK --dist-init-addr HOST:PORT [flags]"
    add_settings(parser, Nodes)
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="lowest severity of the log")
    add_settings(parser, EngineConfig, positional="model", defaults=False)


def run(args: argparse.Namespace) -> None:
    """Run `jpaged worker`."""
    nodes = config_of(args, Nodes)
    if nodes.nnodes == 1:
        raise ValueError("nnodes: must be at least 2 for jpaged worker, not 1")
    if nodes.node_rank == 0:
        raise ValueError(f"node_rank: must be between 1 and nnodes - 1 ({nodes.nnodes - 1}); jpaged serve is node 0")

    def on_signal(number: int, frame: FrameType | None) -> None:
        # The first signal is ignored, because the leader still needs this process for its running requests.
        logger.info("waiting for the end of the leader; a second signal ends this process at once")
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)

    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # as in `jpaged serve`
    given = {each.name: getattr(args, each.name) for each in fields(EngineConfig) if hasattr(args, each.name)}
    with logging_to(sys.stderr, "none", args.log_level):
        with contextlib.ExitStack() as stack:
            with loading() as bars:
                leader, config = stack.enter_context(following(nodes, given))
                from jpaged.parallel.follower import follow
                from jpaged.start.load import start_follower
                from jpaged.start.setup import prepare

                setup = prepare(config, nnodes=nodes.nnodes)
                leader.send_facts(facts_of(setup))
                runner = start_follower(setup, progress=bars)
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, on_signal)
            logger.info("ready: node %d of %d", nodes.node_rank, nodes.nnodes)
            follow(runner, setup.resolved.limits, leader)
        logger.info("stopped: the leader has ended")

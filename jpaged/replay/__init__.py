"""Replay of certified outputs: their comparison with a second computation, and files of them."""

from jpaged.replay.comparison import Replay
from jpaged.replay.file import load, save

__all__ = ["Replay", "load", "save"]

"""Rollouts for trainers: the engine reads the trainer's arrays, and returns its outputs as arrays.

`jpaged.rl.tunix` is the rollout engine for Tunix (the extra `tunix`).
"""

from jpaged.rl.importance import sequence_weights, token_weights
from jpaged.rl.rollout import Rollouts, RolloutWorker, group_advantages, mask_stale, staleness

__all__ = [
    "RolloutWorker",
    "Rollouts",
    "group_advantages",
    "mask_stale",
    "sequence_weights",
    "staleness",
    "token_weights",
]

"""Rollouts for trainers: generation from the trainer's own arrays, as arrays.

`jpaged.rl.tunix` has the same for Tunix (the extra `tunix`).
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

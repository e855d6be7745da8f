"""Rollouts for trainers: generation from the trainer's own arrays, as arrays.

`jpaged.rl.tunix` has the same for Tunix (the extra `tunix`).
"""

from jpaged.rl.rollout import Rollouts, RolloutWorker, group_advantages

__all__ = ["RolloutWorker", "Rollouts", "group_advantages"]

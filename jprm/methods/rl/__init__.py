"""Reinforcement learning of a policy with outcomes and process rewards: sampled tokens, credit, a resumable loop."""

RESULT = "rl.json"
"""The verdict and the figures of every evaluation, in a run's folder."""

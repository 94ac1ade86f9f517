"""Reinforcement learning with outcomes and process rewards: sampled tokens, credit, a resumable loop."""

RESULT = "rl.json"
"""The verdict and every evaluation's figures, in a run's folder."""

"""Reinforcement learning of a policy with outcomes and process rewards: sampled tokens, credit, a resumable loop."""

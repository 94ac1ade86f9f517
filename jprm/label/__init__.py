"""Step labels that need no human: Monte Carlo values, OmegaPRM, and the consensus of two sources."""

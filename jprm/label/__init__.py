"""Step labels that need no human: Monte Carlo values, OmegaPRM, formal checks, a teacher, the consensus of two sources."""

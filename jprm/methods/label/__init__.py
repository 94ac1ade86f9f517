"""Step labels that need no human: Monte Carlo, OmegaPRM, formal checks, a teacher, the consensus of two sources."""

"""Step labels without human work: Monte Carlo, OmegaPRM, formal checks, a teacher, the consensus of two sources."""

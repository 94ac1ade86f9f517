"""Generative verifiers: a policy writes critiques of steps, and their verdicts are scores."""

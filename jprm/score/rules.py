"""Names of the rules that turn step scores into a chain score (`jprm.score.aggregate`); needs no array library."""

from typing import Literal, get_args

Rule = Literal["min", "soft_min", "prod", "mean", "last", "max", "sum_log_odds", "mean_log"]
RULES: tuple[str, ...] = get_args(Rule)
PROBABILITY_RULES = ("prod", "sum_log_odds", "mean_log")
"""Rules that multiply probabilities; the others take any scores."""

OF_CHAINS = ("value", "implicit")
"""Semantics of `jprm.tree.SEMANTICS` whose scores are of the whole chain up to a step; the others are of the step."""

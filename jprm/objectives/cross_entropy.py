"""Cross-entropy of the probability p that a step is correct: -t log p - (1 - t) log(1 - p), t in [0, 1]."""

from jprm.model.heads import PROBABILITY
from jprm.objectives.pointwise import Pointwise, likelihood

cross_entropy = Pointwise(likelihood, PROBABILITY)

"""Cross-entropy of three classes: -log p[class], classes 0, 1, 2 being negative, neutral, positive."""

from jprm.model.heads import CLASS
from jprm.objectives.pointwise import Pointwise, likelihood

ternary_cross_entropy = Pointwise(likelihood, CLASS)

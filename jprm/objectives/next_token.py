"""Language modelling: -log p[token], targets being the ids of tokens."""

from jprm.model.heads import TOKEN
from jprm.objectives.pointwise import Pointwise, likelihood

next_token = Pointwise(likelihood, TOKEN)

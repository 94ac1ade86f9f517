"""Final answers: how they are found in the text of chains and compared. Outcomes and votes use these functions."""

from jprm.methods.answers.equivalence import LIMIT_S, equivalent
from jprm.methods.answers.extraction import RULES, Extracted, Rule, end_of_thoughts, extract, extract_answer
from jprm.methods.answers.forms import Number, canonical_answer, number_of

__all__ = [
    "LIMIT_S",
    "RULES",
    "Extracted",
    "Number",
    "Rule",
    "canonical_answer",
    "end_of_thoughts",
    "equivalent",
    "extract",
    "extract_answer",
    "number_of",
]

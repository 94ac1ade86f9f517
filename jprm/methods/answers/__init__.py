"""Extracts final answers from model text and compares them, for outcomes and votes."""

from jprm.methods.answers.equivalence import equivalent
from jprm.methods.answers.extraction import RULES, Rule, end_of_thoughts, extract, extract_answer
from jprm.methods.answers.forms import canonical_answer, number_of

__all__ = [
    "RULES",
    "Rule",
    "canonical_answer",
    "end_of_thoughts",
    "equivalent",
    "extract",
    "extract_answer",
    "number_of",
]

"""Formal labels: steps checked by computation, without a human or a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from jprm.methods.verify import coq, python_steps, sandbox
from jprm.methods.verify.arithmetic import check_arithmetic
from jprm.methods.verify.verdict import Verdict
from jprm.tree import ReasoningTree, with_labels

Kind = Literal["arithmetic", "python", "coq"]
ORIGIN = "formal"


def checker(kind: Kind, *, in_sandbox: bool = True) -> Callable[[ReasoningTree], list[Verdict]]:
    """Returns a function from a tree to a verdict per node.

    Raises:
      OSError: coqtop is not installed, or there is no sandbox and `in_sandbox` is True.
    """
    if kind == "arithmetic":
        return lambda tree: [check_arithmetic(node.text) for node in tree.nodes]
    if kind not in ("python", "coq"):
        raise ValueError(f"kind is {kind!r}: use 'arithmetic', 'python' or 'coq'")
    if kind == "coq" and (reason := coq.refusal()):
        raise OSError(f"tactics cannot be checked: {reason}")
    if in_sandbox:
        sandbox.require()
    check = {"python": python_steps.check_python, "coq": coq.check_coq}[kind]
    return lambda tree: check(tree, sandbox=in_sandbox)


def labelled(tree: ReasoningTree, verdicts: list[Verdict]) -> ReasoningTree:
    """Returns the tree with its verdicts as labels of `correctness`; `false` tells what does not hold in a step."""
    notes = [{"checked": each.checked} | ({"false": each.false} if each.false else {}) for each in verdicts]
    return with_labels(tree, [each.label for each in verdicts], "correctness", ORIGIN, notes)

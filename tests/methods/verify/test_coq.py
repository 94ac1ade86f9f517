"""Ten short proofs, tactic by tactic."""

import re

import pytest
from growth import check_at_once
from hostile import tactics
from refusing import refused

from jprm.methods.verify import sandbox, verifiers
from jprm.methods.verify.sandbox import Limits
from jprm.methods.verify.verifiers import check_coq, check_tactics
from jprm.tree import tree_of

missing = verifiers.coq_refusal() or sandbox.refusal()
pytestmark = pytest.mark.skipif(missing is not None, reason=f"needs Coq in a sandbox: {missing}")

ADD = "Theorem t : forall n : nat, n + 0 = n."
PROOFS = [  # right (1) and wrong (0) steps; None behind a wrong one
    (ADD, ["Proof.", "intros n.", "induction n.", "- reflexivity.", "- simpl. rewrite IHn. reflexivity.", "Qed."],
     [1, 1, 1, 1, 1, 1]),
    (ADD, ["intros n.", "reflexivity.", "Qed."], [1, 0, None]),
    ("Theorem t : forall a b : nat, a + b = b + a.", ["intros a b.", "apply Nat.add_comm."], [1, 0]),
    ("Require Import Arith.\nTheorem t : forall a b : nat, a + b = b + a.",
     ["intros a b.", "apply Nat.add_comm.", "Qed."], [1, 1, 1]),
    ("Theorem t : forall A B : Prop, A /\\ B -> B /\\ A.", ["intros A B [a b].", "split.", "- exact b.", "- exact a.",
     "Qed."], [1, 1, 1, 1, 1]),
    ("Theorem t : forall A B : Prop, A /\\ B -> B /\\ A.", ["intros A B [a b].", "split.", "- exact a.", "- exact b."],
     [1, 1, 0, None]),
    ("Theorem t : forall P : Prop, P -> ~ ~ P.", ["intros P p np.", "apply np.", "exact p.", "Qed."], [1, 1, 1, 1]),
    ("Theorem t : forall P : Prop, ~ ~ P -> P.", ["intros P nnp.", "apply nnp.", "Qed."], [1, 0, None]),
    ("Theorem t : 2 + 2 = 5.", ["simpl.", "reflexivity."], [1, 0]),
    ("Require Import Lia.\nTheorem t : forall n m : nat, n < m -> n + 1 <= m.",
     ["intros n m H.", "lia.", "Qed."], [1, 1, 1]),
]  # fmt: skip


def labels(theorem, steps, **keys):
    return [verdict.label for verdict in check_tactics(theorem, steps, **keys)]


def test_ten_short_proofs():
    verdicts = [labels(theorem, steps, limits=Limits(60, 4 << 30)) for theorem, steps, _ in PROOFS]
    assert verdicts == [expected for _, _, expected in PROOFS]


@pytest.mark.parametrize(
    "step",
    [
        "Axiom magic : False.",
        "#[local] Axiom magic : False.",
        "Admitted.",
        "admit.",
        'Redirect "/tmp/x" Show.',
        "simpl",  # goes on in the next step
        "(* simpl.",
        "Drop.",
    ],
)
def test_what_is_no_tactic_is_open(step, monkeypatch):
    ran = []
    done = sandbox.CommandResult(0, "")
    monkeypatch.setattr(verifiers, "run_command", lambda command, text, *_, **__: ran.append(text) or done)
    assert labels(ADD, [step, "reflexivity."]) == [None, None]
    assert step not in ran[0] and "reflexivity" not in ran[0]


def test_a_theorem_that_coq_rejects_opens_all():
    assert labels("Theorem t : forall n : natural, n = n.", ["intros n.", "reflexivity."]) == [None, None]


@pytest.mark.breadth
def test_a_tactic_that_hangs_is_open_and_ends():
    steps = ["intros n.", "do 1000000000 pose n.", "reflexivity."]
    for seconds in (8, 64):
        verdicts = labels(ADD, steps, limits=Limits(seconds, 4 << 30))
        if verdicts[0] == 1:
            break  # else a busy machine was too slow for the first tactic
    assert verdicts == [1, None, None]


def test_a_tree_of_tactics():
    texts = [(-1, "intros n."), (0, "induction n."), (0, "reflexivity."), (1, "- reflexivity.")]
    nodes = [{"parent": parent, "text": text} for parent, text in texts]
    verdicts = check_coq(tree_of({"problem": ADD, "nodes": nodes}))
    assert [verdict.label for verdict in verdicts] == [1, 1, 0, 1]


def test_without_coq_it_is_refused(monkeypatch):
    monkeypatch.setattr(verifiers, "coq_refusal", lambda: "coqtop is not installed (Debian's package coq)")
    refused(OSError, "installed", verifiers.checker, "coq")


@pytest.mark.parametrize("steps", tactics.FORGED.values(), ids=tactics.FORGED)
def test_a_false_theorem_is_never_proven(steps):
    verdicts = check_tactics(tactics.FALSE, steps)
    assert verdicts[-1].label != 1 and (verdicts[-1].label == 0 or not verdicts[-1].checked)


def test_a_fixpoint_with_a_guard_holds():
    steps = ["fix IH 1.", "intros n. destruct n.", "- reflexivity.", "- simpl. f_equal. apply IH.", "Qed."]
    assert labels(ADD, steps) == [None, 1, 1, 1, 1]


def test_what_the_kernel_finds_at_the_end_makes_the_last_step_incorrect():
    assert labels(ADD, ["intros n.", "induction n.", "- reflexivity."]) == [1, 1, 1]  # open goals are no error
    assert labels(tactics.FALSE, ["fix f 1.", "exact f."]) == [None, 0]


@pytest.mark.parametrize("message", ["Error: Stack overflow.", "Error: Out of memory.", "Error: Anomaly: uncaught"])
def test_a_limit_of_the_sandbox_is_no_label(message, monkeypatch):
    def run(command, text, *_, **__):
        locate = "No object of basename " + re.search(r"Locate (mark\w+)", text)[1]
        lines = ["1 goal", locate, "1 goal", locate, locate, message, locate, locate, locate, ""]
        return sandbox.CommandResult(0, "\n".join(lines))

    monkeypatch.setattr(verifiers, "run_command", run)
    assert labels(ADD, ["intros n.", "reflexivity."]) == [1, None]


def test_an_unknown_compiler_is_no_label():
    assert labels("Theorem t : 2 + 2 = 4.", ["native_compute.", "reflexivity."]) == [None, None]


@pytest.mark.parametrize("step", tactics.SLOW.values(), ids=tactics.SLOW)
def test_a_long_step_is_read_in_linear_time(step):
    check_at_once(verifiers._tactics, step)  # 5 ms

"""Steps that make Coq accept a false theorem until its kernel looks, or that exhaust it."""

FALSE = "Theorem t : forall n : nat, n = n + 1."
FORGED = {
    "exact_no_check": ["intros n. exact_no_check (eq_refl n)."],
    "vm_cast_no_check": ["intros n. vm_cast_no_check (eq_refl n)."],
    "native_cast_no_check": ["intros n. native_cast_no_check (eq_refl n)."],
    "change_no_check": ["intros n. change_no_check (n = n). reflexivity."],
    "convert": ["intros n. convert_concl_no_check (n = n). reflexivity."],
    "shelve": ["intros n.", "shelve."],
    "shelve in all": ["all: shelve."],
    "shelve after another": ["intros n; shelve."],
    "unshelve": ["unshelve eapply eq_trans."],
    "admit": ["intros n. admit."],
    "give_up": ["give_up."],
    "fix": ["fix f 1. exact f."],
    "fix in steps": ["fix f 1.", "exact f."],
    "fix and apply": ["fix f 1.", "intros n.", "apply f."],
    "refine": ["refine (fix f (n : nat) : n = n + 1 := f n)."],
    "comment": ['(* " (* " *) exact_no_check I. (* *)'],
}
SLOW = {  # of 60,000 characters: read in time linear in their length
    "dots": "a." * 30_000,
    "dots without an end": ". " * 30_000 + "x",
    "comments": "(*" * 30_000,
    "closed comments": "(*" * 15_000 + "*)" * 15_000,
    "bullets": "- " * 30_000,
    "digits": "1" * 60_000,
    "selectors": "1 : " * 15_000,
    "letters": "a" * 60_000,
}

"""Checkers that are commands: those of docs/checkers.md on right, wrong, unsound and endless proofs; refused files."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys

import pytest
from families import breadth
from pages import text
from refusing import refused

from jprm.apps import cli
from jprm.io.jsonl import RecordError, write_records
from jprm.methods.verify import commands, sandbox, verifiers
from jprm.methods.verify.commands import CommandChecker, judge_chain, load_checker
from jprm.methods.verify.verifiers import UNDECIDED
from jprm.options import from_json
from jprm.tree import read_records, tree_of

needs_sandbox = pytest.mark.skipif(sandbox.refusal() is not None, reason=f"needs a sandbox: {sandbox.refusal()}")
FILES = dict(re.findall(r"^`(\w+)\.json`:\n\n```json\n(.*?)^```$", text("docs/checkers.md"), re.DOTALL | re.MULTILINE))

AGDA = """data Nat : Set where
  zero : Nat
  suc : Nat → Nat
data _≡_ {A : Set} (x : A) : A → Set where
  refl : x ≡ x
_+_ : Nat → Nat → Nat
zero + m = m
suc n + m = suc (n + m)
cong : (f : Nat → Nat) {x y : Nat} → x ≡ y → f x ≡ f y
cong f refl = refl
right : (n : Nat) → (n + zero) ≡ n"""
RECORDS = {
    "agda": {"problem": "n + 0 = n", "theorem": AGDA},
    "coq": {"problem": "n + 0 = n", "theorem": "Theorem t : forall n : nat, n + 0 = n."},
    "z3": {
        "problem": "(declare-const x Int)\n(declare-const y Int)\n(assert (= x 5))\n(assert (= y (+ x 2)))",
    },
    "pyright": {"problem": "change", "prelude": "def price(apples: int) -> float:\n    return apples * 0.5"},
}
CUBES = "(> a 1) (> b 1) (> c 1) (= (+ (* a a a) (* b b b)) (* c c c))"
SKIPPED = "Proof. intros n. induction n. reflexivity. simpl. rewrite IHn. reflexivity."
CASES = [  # steps; whether they are proved, None if undecided; labels of steps
    ("agda", ["right zero = refl", "right (suc n) = cong suc (right n)"], True, [1, 1]),
    ("agda", ["right zero = refl", "right (suc n) = refl"], False, [1, 0]),
    ("agda", ["right zero = refl"], False, [None]),  # a case is missing: the fault of no clause
    ("agda", ["right n = right n"], False, [None]),  # does not end
    ("agda", ["right zero = refl", "postulate more : Nat"], False, [None, 0]),
    ("coq", ["intros n.", "induction n.", "- reflexivity.", "- simpl. rewrite IHn. auto.", "Qed."], True, [1] * 5),
    ("coq", ["Proof. intros n.", "reflexivity.", "Qed."], False, [1, 0, None]),
    ("coq", [SKIPPED], False, [None]),  # without its end
    ("coq", ["intros n.", "admit.", "Qed."], False, [None, 0, None]),
    ("coq", ["Admitted."], False, [0]),
    ("coq", ["intros n.", "Abort. Axiom t : forall n : nat, n + 0 = n."], False, [None, 0]),
    ("coq", ["intros n.", "exact_no_check I.", "Qed."], False, [None, 0, None]),
    ("z3", ["(= y 7)", "(> y x)"], True, [1, 1]),
    ("z3", ["(= y 7)", "(= y 8)", "(= x 5)"], False, [1, 0, None]),
    ("z3", ["(= y 7)", "(= z 8)"], False, [1, 0]),  # an unknown constant
    ("z3", ["(= y 7", "(= y 7)"], False, [None, None]),  # a bracket is missing
    ("z3", ["(= y 7)", "true)) (assert false) (echo (= 1 1"], False, [None, 0]),
    ("pyright", ["total: float = price(3)", "change: float = 10 - total"], True, [1, 1]),
]  # fmt: skip
MORE = [
    ("pyright", ["total: float = price(3)", "name: str = total"], False, [1, 0]),
    ("coq", ["do 1000000000 pose 1."], None, [None]),
    ("z3", [f"(not (exists ((a Int) (b Int) (c Int)) (and {CUBES})))"], None, [None]),
    ("pyright", ["total: str = price(3)  # type: ignore"], False, [0]),
    ("pyright", ["total: float = price(3)", "raise ValueError", "name: str = total"], False, [1, 1, 0]),  # unreachable
    ("pyright", ["name: str = eval('3')"], False, [0]),
    ("pyright", ["def same(x):\n    y: str = x", "same(3)"], False, [0, None]),
]  # fmt: skip


def described(name, **changes):
    return dataclasses.replace(from_json(CommandChecker, json.loads(FILES[name])), **changes)


@pytest.fixture
def beside_python(monkeypatch):
    """Programs of this environment, e.g. basedpyright, are on the PATH."""
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")


@needs_sandbox
@pytest.mark.usefixtures("beside_python")
@pytest.mark.parametrize(
    ("name", "steps", "proved", "labels"),
    [*CASES, *breadth(MORE)],
    ids=[f"{case[0]}{i}" for i, case in enumerate([*CASES, *MORE])],
)
def test_documented_checkers(name, steps, proved, labels):
    if not shutil.which(json.loads(FILES[name])["command"][0]):
        pytest.skip(f"{json.loads(FILES[name])['command'][0]} is not installed (docs/checkers.md)")
    checker = described(name, seconds=1.5 if proved is None else 120.0)  # on a busy machine
    judgement = judge_chain(checker, RECORDS[name], steps)
    assert (judgement.proved, bool(judgement.reason)) == (proved, not proved), judgement
    tree = tree_of({**RECORDS[name], "steps": steps})
    assert [verdict.label for verdict in verifiers.check_by_command(tree, checker)] == labels, judgement


@needs_sandbox
@pytest.mark.skipif(not shutil.which("z3"), reason="z3 is not installed (docs/checkers.md)")
def test_a_step_behind_an_unknown_one_is_not_refuted_by_z3():
    cubes = "(not (= (+ (* a a a) (* b b b)) (* c c c)))"
    problem = "(declare-const y Int)\n(assert (= y 7))\n"
    problem += "".join(f"(declare-const {name} Int)\n(assert (> {name} 1))\n" for name in "abc")
    for steps, milliseconds, expected in (
        ((cubes, "(= y 8)"), 300, (None, None)),  # unknown, however long
        (("(= y 8)", cubes), 60_000, (False, 0)),  # known at once, on a busy machine later
    ):
        limited = {"problem": f"(set-option :timeout {milliseconds})\n{problem}"}
        found = judge_chain(described("z3", seconds=120.0), limited, steps)
        assert (found.proved, found.step) == expected, found


def test_files_that_were_not_tried_are_read():
    assert set(FILES) == {*RECORDS, "lean", "isabelle"}
    for name in FILES:
        described(name)


# ---- The file's fields, by commands that every machine has.

SAME = {"command": ["cmp", "-s", "{file}", "/usr/bin/env"], "suffix": ".txt", "source": "{steps}"}


def checker(**changes):
    return from_json(CommandChecker, SAME | changes)


def judged(steps, record=None, **changes):
    return judge_chain(checker(**changes), {"problem": "p"} | (record or {}), steps)


GREP = {"command": ["grep", "-n", "wrong", "{file}"], "proved": 1, "error": r"^(?P<line>\d+):"}


@needs_sandbox
def test_lines_lead_to_steps():
    source = "a {{brace}}\n{problem}\n{steps}\n{end}"
    ends = {"problem": "1\n2", "end": "fine"}
    for steps, record, expected in [
        (["ok", "ok\nok", "wrong"], ends, (False, 2)),
        (["ok", "ok\nwrong", "wrong"], ends, (False, 1)),
        (["ok", "ok {problem} {file}"], ends, (True, None)),
        (["ok"], ends | {"end": "wrong"}, (False, None)),
        (["wrong"], ends | {"problem": "wrong"}, (None, None)),
    ]:
        found = judged(steps, record, **GREP, source=source)
        assert (found.proved, found.step) == expected, found
    listed = judged(["x"], ends, command=["cat", "{file}"], proved=r"\Aa \{brace\}\n1\n2\nx\nfine\Z", source=source)
    assert listed.proved


@pytest.mark.parametrize(("place", "step"), [("2", 1), ("\u00b2", None), ("9" * 5000, None), ("\u0662", None)])
def test_a_place_that_is_no_small_number_is_unknown(place, step):
    checker = CommandChecker(("x", "{file}"), ".x", "{steps}", error=r"at (?P<line>\S+)")
    assert commands._read(checker, 1, f"at {place}", [1, 2, 3]) == commands.ChainVerdict(
        False, f"at {place}"[:200], step
    )


@needs_sandbox
def test_a_checker_without_a_verdict_is_undecided():
    assert "longer than 0.5" in judged(["x"], command=["tail", "-f", "{file}"], seconds=0.5).reason
    assert judged(["x"], command=["ls", "/absent", "{file}"], error="wrong").proved is None
    assert judged(["x"], command=["ls", "/absent", "{file}"]).proved is False  # no `error`: not proved is wrong
    kill = judged(["x"], command=["sh", "-c", "kill -9 $$; cat {file}"])
    assert kill.proved is None and "signal 9" in kill.reason


@needs_sandbox
@pytest.mark.parametrize("proved", [0, 1, "y"])
@pytest.mark.parametrize("signal", ["", "trap '' XFSZ; "], ids=["killed", "ignored"])
def test_an_output_that_is_cut_is_no_verdict(proved, signal):
    command = ["sh", "-c", f"{signal}exec head -c 100000000 /dev/zero # {{file}}"]
    found = judged(["x"], command=command, proved=proved)
    assert found.proved is None and "4 MiB" in found.reason


@needs_sandbox
def test_bytes_that_are_no_text_are_read():
    found = judged(["x"], command=["sh", "-c", r"printf 'wrong \377'; exit 1 # {file}"], error="wrong .")
    assert (found.proved, found.reason) == (False, "wrong \ufffd")
    assert judged(["\ud800 \x00"], command=["cat", "{file}"]).proved  # a lone surrogate and NUL


@needs_sandbox
def test_an_unsound_output_proves_nothing():
    found = judged(["x"], command=["cat", "{file}"], source="uses sorry {steps}", unsound="sorry")
    assert found.proved is False and "sorry" in found.reason
    across = judged(["so", "rry"], command=["cat", "{file}"], unsound="so\\s*rry")
    assert (across.proved, across.step) == (False, 1)


@needs_sandbox
def test_the_sandbox_shows_named_folders_and_starts_named_processes(tmp_path):
    (tmp_path / "truth.txt").write_text("42")
    command = ["cmp", "{file}", str(tmp_path / "truth.txt")]
    assert judged(["42"], command=command, folders=[str(tmp_path)]).proved
    assert not judged(["42"], command=command).proved
    assert not judged(["42"], {"folders": [str(tmp_path)]}, command=command).proved  # a record's key shows nothing
    write = ["cp", "{file}", str(tmp_path / "other.txt")]
    assert not judged(["42"], command=write, folders=[str(tmp_path)]).proved and os.listdir(tmp_path) == ["truth.txt"]
    forks = ["sh", "-c", "cat {file} > x; cat x | grep -q 42"]
    assert judged(["42"], command=forks, processes=True).proved
    assert not judged(["42"], command=forks).proved


@needs_sandbox
def test_a_checker_that_the_sandbox_does_not_show_is_named(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/check").write_text("#!/absent/interpreter\n")
    (tmp_path / "bin/check").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    refused(
        OSError, r"\Acheck does not start in the sandbox: [^\n]*folders`\Z", judged, ["x"], command=["check", "{file}"]
    )


BAD = {
    "no JSON": ("{", "JSON"),
    "a list": ("[]", "checker: is no JSON object"),
    "no command": ({"command": None}, "command"),
    "an empty command": ({"command": []}, "command.*{file}"),
    "no file in it": ({"command": ["cat"]}, "command.*{file}"),
    "text as command": ({"command": "cat {file}"}, "command"),
    "an unknown field": ({"timeout": 3}, "timeout: is no known field"),
    "no steps": ({"source": "{problem}"}, "source.*{steps}"),
    "steps as a literal": ({"source": "{{steps}}"}, "source.*{steps}"),
    "a step without itself": ({"step": "x"}, "step.*{step}"),
    "a step with a key": ({"step": "{step} {problem}"}, "step.*{number}"),
    "a suffix with a folder": ({"suffix": "/../x.v"}, "suffix"),
    "no suffix": ({"suffix": ""}, "suffix"),
    "no pattern": ({"error": "("}, "error: is no pattern"),
    "no pattern for unsound": ({"unsound": "["}, "unsound: is no pattern"),
    "two places": ({"error": "(?P<line>.)(?P<step>.)"}, "error.*both"),
    "a status as truth": ({"proved": True}, "proved"),
    "no time": ({"seconds": 0}, "seconds"),
    "no memory": ({"memory": 5}, "memory"),
    "a relative folder": ({"folders": ["lib"]}, "folders.*absolute"),
    "an absent folder": ({"folders": ["/absent/lib"]}, "folders"),
    "the home": ({"folders": ["~"]}, "folders.*home"),
    "the root": ({"folders": ["/"]}, "folders.*home"),
    "an absent program": ({"command": ["absent-prover", "{file}"]}, "command: absent-prover is not installed"),
    "a relative program": ({"command": ["./prover", "{file}"]}, "absolute"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_one_line(case, tmp_path, capsys):
    changes, named = BAD[case]
    content = (
        changes
        if isinstance(changes, str)
        else json.dumps({k: v for k, v in (SAME | changes).items() if v is not None})
    )
    (tmp_path / "bad.json").write_text(content)
    write_records(tmp_path / "in.jsonl", [{"problem": "p", "steps": ["x"]}])
    for command in (["outcomes", "--verifier"], ["verify", "--kind"]):
        line = ["label", *command, str(tmp_path / "bad.json"), "--input", str(tmp_path / "in.jsonl")]
        assert cli.main([*line, "--output", str(tmp_path / "out.jsonl")]) == 2
        error = capsys.readouterr().err.strip()
        assert "\n" not in error and "bad.json" in error and re.search(named, error), error
    assert sorted(os.listdir(tmp_path)) == ["bad.json", "in.jsonl"]


def test_an_absent_file_and_an_unknown_kind_are_refused(tmp_path):
    refused(FileNotFoundError, "absent.json: no such file", load_checker, tmp_path / "absent.json")
    refused(ValueError, "arithmetic, python, coq.*FILE.json", verifiers.checker, "agda")


@needs_sandbox
def test_from_file_to_file(tmp_path, capsys):
    (tmp_path / "grep.json").write_text(json.dumps(SAME | GREP | {"source": "{theorem}\n{steps}"}))
    samples = [{"steps": ["fine", "wrong", "fine"]}, {"steps": ["fine", "good"]}]
    records = [
        {"problem": "p", "theorem": "t", "samples": samples},
        {"problem": "q", "theorem": "wrong", "steps": ["x"]},
    ]
    write_records(tmp_path / "in.jsonl", records)
    options = ["--input", str(tmp_path / "in.jsonl"), "--output"]
    outcomes = ["label", "outcomes", "--verifier", str(tmp_path / "grep.json"), *options, str(tmp_path / "out.jsonl")]
    assert cli.main(outcomes) == 0
    assert "undecided" in (printed := capsys.readouterr()).out + printed.err
    pool, chain = read_records(tmp_path / "out.jsonl")
    leaves = [node for node in pool["nodes"] if "correct" in node] if "nodes" in pool else pool["samples"]
    assert [leaf["correct"] for leaf in leaves] == [False, True] and "wrong" in leaves[0]["unproved"]
    assert "before the first step" in json.dumps(chain) and UNDECIDED in json.dumps(chain)
    again = ["label", "outcomes", "--verifier", str(tmp_path / "all.json"), "--input", str(tmp_path / "out.jsonl")]
    (tmp_path / "all.json").write_text(json.dumps(SAME | {"command": ["cat", "{file}"]}))
    assert cli.main([*again, "--output", str(tmp_path / "again.jsonl")]) == 0
    assert not {UNDECIDED, "unproved"} & set(re.findall(r"\w+", (tmp_path / "again.jsonl").read_text()))
    verify = ["label", "verify", "--kind", str(tmp_path / "grep.json"), *options, str(tmp_path / "checked.jsonl")]
    assert cli.main(verify) == 0
    pool, chain = read_records(tmp_path / "checked.jsonl")
    labels = [(node["text"], node.get("label")) for node in pool["nodes"]]
    assert labels == [("fine", 1), ("wrong", 0), ("fine", None), ("fine", 1), ("good", 1)]
    assert "label" not in chain["nodes"][0]

    write_records(tmp_path / "in.jsonl", [{"problem": "p", "steps": ["x"]}])
    refused(RecordError, "theorem: is absent", verifiers.find(str(tmp_path / "grep.json")).check, {"problem": "p"}, "r")

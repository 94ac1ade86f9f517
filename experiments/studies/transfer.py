"""Does a PRM of another domain judge steps as well as a PRM of the target domain? Heads on the same frozen states.

    python -m experiments.studies.transfer --shared ../shared/data --out runs/transfer

A PRM is a logistic regression on states of SmolLM2-135M (LAYERS layers, frozen) at the ends of steps. For each
test domain one PRM is fitted to each other domain, and one to the domain itself (five folds by problem). All are tested
on the same steps: AUROC, and its paired difference from the PRM of the target domain, with problems redrawn.

Domains: physics and chemistry of MR-Ben, one solution a question; maths, chains of PRM800K (0 counts as correct); and
failed agents' runs of Who&When and AgentRx, cut as in `agents`.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tyro
from jaxtyping import Float, Int

from experiments.objectives import heads, states
from experiments.studies import agents
from experiments.studies.claims import cell, in_percent
from jprm.io.jsonl import write_records
from jprm.methods.evaluate.multiple import discoveries, p_value
from jprm.methods.evidence.fit import bucket
from jprm.methods.layers.head_init import Steps, fitted_head
from jprm.statistics import Draws, auroc, draws, interval
from jprm.tree import ReasoningTree

LAYERS = 10
"""Of 30: a probe finds ratings of steps best in layers 9 to 15."""
BUDGET = 3000
"""Characters of an agent's run that the model reads, about."""
MOST = 10**6


class Domain(NamedTuple):
    """States at the ends of steps, classes (1 correct, 0 not, -1 unlabelled) and problems, by chain."""

    rows: list[Float[np.ndarray, "S D"]]
    classes: list[Int[np.ndarray, " S"]]
    problems: list[str]


def domain(trees: list[ReasoningTree], chunks: list[states.Chunk]) -> Domain:
    first = np.cumsum([0, *(len(tree.nodes) for tree in trees)])
    state_ND = np.concatenate([chunk["state_ND"] for chunk in chunks]).astype(np.float32)
    rows = [state_ND[at + np.array(tree.steps)] for at, tree in zip(first, trees, strict=False)]
    labels = [[tree.nodes[i].label for i in tree.steps] for tree in trees]
    classes = [np.array([-1 if label is None else int(label >= 0.5) for label in chain]) for chain in labels]
    return Domain(rows, classes, [str(tree.problem) for tree in trees])


def chains(shared: pathlib.Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields each domain's chains in the order of a hash: the first n are a random sample of the questions."""
    for subject in ("physics", "chemistry"):
        records = list(agents.read("mr_ben", shared / "mrben" / f"{subject}.json"))
        yield subject, one_a_problem(records)
    rated = (json.loads(line) for line in (shared / "prm800k/phase2_sample.jsonl").read_text().splitlines())
    maths = [
        {"problem": record["problem"], "steps": record["steps"], "labels": [int(x >= 0) for x in record["ratings"]]}
        for record in rated
    ]
    yield "maths", one_a_problem(maths)


def one_a_problem(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one chain per problem, by hash."""
    ordered = sorted(records, key=lambda r: (bucket(r["problem"], MOST), bucket("".join(r["steps"]), MOST)))
    return list({r["problem"]: r for r in reversed(ordered)}.values())[::-1]


def domains(shared: pathlib.Path, out: pathlib.Path, limit: int) -> Iterator[tuple[str, Domain]]:
    load = functools.partial(heads._load, False, LAYERS)

    def read(name: str, records: list[dict[str, Any]], most: int | None) -> Domain:
        file = out / f"{name}.jsonl"
        write_records(file, records)
        return domain(*states.known(file, out / "states" / name, most, load))

    yield from ((name, read(name, records, limit)) for name, records in chains(shared))
    runs = agents.records_of(shared)
    who_and_when, agentrx = (
        read(name, [agents.cut(record, BUDGET) for record in runs[name]], None) for name in ("who_and_when", "agentrx")
    )
    yield "Who&When", who_and_when
    for part, wanted in (("tau-bench", True), ("Magentic-One", False)):
        tau_K = ["task_id" in record for record in runs["agentrx"]]
        of_part = [chain for chain, tau in zip(zip(*agentrx, strict=True), tau_K, strict=True) if tau == wanted]
        yield part, Domain(*map(list, zip(*of_part, strict=True)))


def scored(train: Domain, test: Domain) -> list[np.ndarray]:
    """Returns the scores of the test domain's steps by a head that is fitted to the other domain."""
    x_ND, class_N = np.concatenate(train.rows), np.concatenate(train.classes)
    known_N = class_N >= 0
    target_N = class_N[known_N].astype(np.float32)
    params, _ = fitted_head("scalar", Steps(x_ND[known_N], target_N, np.ones_like(target_N)))
    return [(x_SD @ params["kernel"] + params["bias"])[:, 0] for x_SD in test.rows]


def area(test: Domain, scores: list[np.ndarray]) -> Draws:
    class_N, score_N = np.concatenate(test.classes), np.concatenate(scores)
    known_N = class_N >= 0
    problem_N = np.repeat(test.problems, [len(of_chain) for of_chain in test.classes])
    return draws(lambda w: auroc(score_N[known_N], class_N[known_N] == 1, w), problem_N[known_N], seed=0)


def rows_of(found: dict[str, Domain]) -> list[dict[str, Any]]:
    """Returns a row per test domain: its own PRM, the earliest steps, and each other PRM less its own."""
    rows, gains = [], []
    for name, test in found.items():
        fold_K = np.array([bucket(problem, agents.FOLDS) for problem in test.problems])
        class_N = np.concatenate(test.classes)
        own = area(test, agents.cross_fitted(test.rows, test.classes, fold_K))
        early = area(test, [-np.arange(len(of_chain), dtype=float) for of_chain in test.classes])
        rows.append({
            "row": name, "chains": len(test.rows), "steps": int((class_N >= 0).sum()),
            "wrong": int((class_N == 0).sum()), "early steps": in_percent(interval(early)._asdict()),
            "own": in_percent(interval(own)._asdict()),
        })  # fmt: skip
        for other, train in found.items():
            if other != name:
                of_other = area(test, scored(train, test))
                less = Draws(of_other.value - own.value, of_other.drawn_R - own.drawn_R, own.groups)
                rows[-1][f"{other} less own"] = in_percent(interval(less, fraction=False)._asdict())
                gains.append((name, other, p_value(less)))
    kept = discoveries([p for *_, p in gains])
    print("reported at a false discovery rate of 5 %:", [(t, o) for (t, o, _), k in zip(gains, kept, strict=True) if k])
    return rows


def main(
    shared: pathlib.Path = pathlib.Path("../shared/data"), out: pathlib.Path = pathlib.Path("runs/transfer"),
    limit: int = 192,
) -> None:  # fmt: skip
    """Print the table. A stopped call continues.

    Args:
        shared: The folder of the data.
        out: The folder for records and states.
        limit: Chains of physics, chemistry and maths; a multiple of `states.CHUNK`.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows = rows_of(dict(domains(shared, out, limit)))
    columns = ["chains", "steps", "wrong", "early steps", "own", *(f"{row['row']} less own" for row in rows)]
    lines = [f"| {' | '.join([row['row'], *(cell(row.get(column)) for column in columns)])} |" for row in rows]
    print("\n".join([f"| | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}", *lines]))


if __name__ == "__main__":
    tyro.cli(main)

"""What published verifiers are worth on real pools, from their published scores: no model is run.

    python -m experiments.studies.published --shared ../shared/data      # minutes; writes the figures of published.md

Three sets of published data (README.md of the data says where they are from):

    pools/qwen_*_n32.jsonl.gz       32 samples of a Qwen policy, with the step scores of seven verifiers
    published_choices/              what five PRMs choose among 5 samples on 12 tasks
    published_scores/mr_math_*      solutions with a right answer by wrong working; redundant steps

Answers of the pools are judged again from the samples' whole text, against GSM8K's and MATH-500's own files:
`published_correct` goes by the last number on GSM8K, and by the last number of the truth on MATH-500.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tyro
from jaxtyping import Float, Int

from jprm.io.jsonl import parse
from jprm.io.outputs import Bar
from jprm.methods.answers import equivalent, extract_answer
from jprm.methods.data.overlap import normalise
from jprm.methods.evaluate.calibration import brier, ece_interval
from jprm.methods.evaluate.multiple import discoveries, p_value, smallest_shown
from jprm.methods.evaluate.votes import answer_classes, best_of_n, vote_accuracy
from jprm.methods.evidence import sources as evidence
from jprm.methods.evidence.baselines import ranked_by_text
from jprm.methods.evidence.fit import PolicyPools, bucket, candidates, choose_verifier, choose_vote, policy_of, right_of
from jprm.score.aggregate import chain_scores
from jprm.score.scale import PROBABILITY, RULES
from jprm.statistics import Draws, auroc, difference, draws, interval, mean_draws, weighted_mean
from jprm.tree import tree_of

HERE = pathlib.Path(__file__).parent
N, SIZES, ORDERS = 32, (1, 2, 4, 8, 16, 32), 64
"""Samples of a problem; the sizes that are shown; random orders of each pool, of whose beginnings smaller votes are."""
BEST = "Qwen2.5-Math-PRM-7B"
OUTCOME = ("internlm2-7b-reward", "internlm2-1_8b-reward")
FOLDS = 4
MARK = "<!-- figures: written by the command, do not edit below -->"
MATHS = ("gsm8k", "math", "aqua", "aime", "orca_math")


@dataclasses.dataclass(frozen=True)
class Pool:
    """P problems of N samples of one file."""

    name: str
    records: list[dict[str, Any]]
    correct_PN: Float[np.ndarray, "P N"]
    class_PN: Int[np.ndarray, "P N"]
    published_PN: Float[np.ndarray, "P N"]  # the labels that came with the samples
    scores: dict[str, list[list[list[float]]]]  # verifier -> problem -> sample -> step

    @property
    def problems(self) -> list[str]:
        return [record["problem"] for record in self.records]


def lines(path: pathlib.Path) -> Iterator[Any]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for number, line in enumerate(text.splitlines(), start=1):
        yield parse(line, f"{path}:{number}")


def truths(shared: pathlib.Path) -> dict[str, str]:
    """Returns the answers of GSM8K's and MATH-500's test problems, by normalised text."""
    gsm8k = {
        normalise(r["question"]): r["answer"].rpartition("####")[2].strip() for r in lines(shared / "gsm8k/test.jsonl")
    }
    return gsm8k | {normalise(r["problem"]): r["answer"] for r in lines(shared / "math500/test.jsonl")}


def read_pool(path: pathlib.Path, truth_of: Mapping[str, str]) -> Pool:
    """Returns a file's samples with answers judged from their whole text."""
    records, correct, published, scores = [], [], [], {}
    for record in lines(path):
        truth = truth_of.get(normalise(record["problem"]), record["answer"])

        @functools.cache
        def right(answer: str | None, truth: str = truth) -> bool:
            return answer is not None and equivalent(truth, answer)

        samples = []
        for sample in record["samples"]:
            answer = extract_answer(sample["response"])
            samples.append({"steps": sample["steps"], "answer": answer, "correct": right(answer)})
        correct.append([sample["correct"] for sample in samples])
        published.append([sample["published_correct"] for sample in record["samples"]])
        for verifier in record["samples"][0]["published_scores"]:
            of_samples = [sample["published_scores"][verifier] for sample in record["samples"]]
            scores.setdefault(verifier, []).append(of_samples)
        records.append({"problem": record["problem"], "answer": truth, "samples": samples})
    classes = np.array([answer_classes([s["answer"] for s in record["samples"]]) for record in records])
    name = path.name.split("_")[1]
    return Pool(name, records, np.array(correct, float), classes, np.array(published, float), scores)


# ------------------------------------------------------------------------------------------- choosing among 32 samples


Way = tuple[str, str, str]
"""A verifier, a rule, and "best" or "vote"."""


def keys_of(pool: Pool, verifier: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns what orders the samples by a rule, and their weights in a vote: (P, N) each."""
    paths = [path for of_problem in pool.scores[verifier] for path in of_problem]
    value_M, key_M = chain_scores(paths, rule)
    return key_M.reshape(-1, N), value_M.reshape(-1, N)


def curves(pool: Pool) -> dict[Way, Float[np.ndarray, "P n"]]:
    """Returns how correct each way is on each problem, for n = 1 .. N; the trivial ones beside."""
    P = len(pool.records)
    size_P, valid_PN = np.full(P, N), np.ones((P, N), bool)
    best = functools.partial(best_of_n, correct_PN=pool.correct_PN, valid_PN=pool.class_PN >= 0, size_P=size_P, n_max=N)
    result: dict[Way, np.ndarray] = {}
    log_weights: dict[Way, np.ndarray] = {("majority", "", "vote"): np.zeros((P, N))}
    for verifier in pool.scores:
        for rule in RULES:
            key_PN, _ = keys_of(pool, verifier, rule)
            result[verifier, rule, "best"] = best(key_PN)
            log_weights[verifier, rule, "vote"] = PROBABILITY.log_votes(key_PN, rule)
    trees = [tree_of(record) for record in pool.records]
    text = ranked_by_text(trees)
    if text is not None:
        result["text features", "", "best"] = best(np.array([chosen.key_K for chosen in text]))
        log_weights["text features", "", "vote"] = PROBABILITY.log_weights([chosen.weight_K for chosen in text])
    length_PN = np.array([[sum(map(len, s["steps"])) for s in record["samples"]] for record in pool.records])
    result["shortest", "", "best"] = best(-length_PN.astype(float))
    result["one sample", "", "best"] = best_of_n(0.0 * length_PN, pool.correct_PN, valid_PN, size_P, N)
    result["any", "", "best"] = best(pool.correct_PN)
    log_weight_PNK = np.stack(list(log_weights.values()), axis=-1)
    for k, value_Pn in enumerate(np.moveaxis(voted(pool, log_weight_PNK), -1, 0)):
        result[list(log_weights)[k]] = value_Pn
    return result


def voted(pool: Pool, log_weight_PNK: Float[np.ndarray, "P N K"]) -> Float[np.ndarray, "P n K"]:
    """Returns how correct weighted votes of n samples are; exact for n = N."""
    votes = vote_accuracy(
        pool.class_PN, pool.correct_PN, log_weight_PNK, np.full(len(log_weight_PNK), N), N, trials=ORDERS, seed=0
    )
    return votes.value_PnK


def gain(value_P: np.ndarray, base_P: np.ndarray) -> Draws:
    return mean_draws(100 * (value_P - base_P), np.arange(len(value_P)), seed=0)


def text_of(points: Draws, sign: bool = True) -> str:
    """Returns a difference in points with its interval."""
    of_fractions = difference(Draws(points.value / 100, points.drawn_R / 100, points.groups))
    value, low, high = (100 * float(x) for x in of_fractions[:3])
    return f"{value:+.1f} [{low:.1f}, {high:.1f}]" if sign else f"{value:.1f} [{low:.1f}, {high:.1f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows), ""]


def choosing(pool: Pool, of_ways: Mapping[Way, np.ndarray]) -> Iterator[str]:
    """Yields the page's part about one file."""
    majority_P = of_ways["majority", "", "vote"][:, -1]
    differs = int((pool.correct_PN != pool.published_PN).sum())
    yield f"## {pool.name}: {len(pool.records)} problems, 32 samples each\n"
    yield (
        f"One sample is right in {100 * pool.correct_PN.mean():.1f} %, the majority of 32 in"
        f" {100 * majority_P.mean():.1f} %,"
        f" any of 32 in {100 * of_ways['any', '', 'best'][:, -1].mean():.1f} %. Judged again, {differs:,} of"
        f" {pool.correct_PN.size:,} samples have another label than the published one (by those, one sample"
        f" {100 * pool.published_PN.mean():.1f} %).\n"
    )
    verifiers = list(pool.scores)
    gains = {way: gain(value_Pn[:, -1], majority_P) for way, value_Pn in of_ways.items() if way[0] in verifiers}
    found = dict(zip(gains, discoveries([p_value(drawn) for drawn in gains.values()]), strict=True))
    smallest = np.median([smallest_shown(drawn) for drawn in gains.values()])
    for kind, title in (("best", "Best of 32"), ("vote", "Weighted vote of 32")):
        yield f"{title}, less the majority, in points:\n"
        rows = []
        for verifier in verifiers:
            marks = [
                f"**{gains[verifier, rule, kind].value:+.1f}**" if found[verifier, rule, kind]
                else f"{gains[verifier, rule, kind].value:+.1f}"
                for rule in RULES
            ]  # fmt: skip
            rows.append([verifier, *marks])
        yield from table(["", *(f"`{rule}`" for rule in RULES)], rows)
    yield (
        f"Bold: of these {len(gains)} comparisons, those that are reported at a false discovery rate of 5 %. A"
        f" difference of {smallest:.1f} points (median) would have been shown four times of five. With intervals:\n"
    )
    rows = []
    for verifier in verifiers:
        rows.append([verifier, *(text_of(gains[verifier, rule, "best"]) for rule in ("prod", "min", "last"))])
        rows[-1].append(text_of(gains[verifier, "prod", "vote"]))
    for name, kind in (("text features", "best"), ("text features", "vote"), ("shortest", "best")):
        if (name, "", kind) in of_ways:
            rows.append([f"{name}, {kind}", text_of(gain(of_ways[name, "", kind][:, -1], majority_P)), "", "", ""])
    yield from table(["less the majority", "best by `prod`", "by `min`", "by `last`", "vote by `prod`"], rows)
    yield "Right answers in % by the number of samples n:\n"
    shown = [("majority", "", "vote"), *((v, "last" if v in OUTCOME else "prod", "best") for v in verifiers)]
    shown += [(BEST, "prod", "vote"), ("text features", "", "vote"), ("shortest", "", "best"), ("any", "", "best")]
    rows = [
        [" ".join(filter(None, way)), *(f"{100 * of_ways[way][:, n - 1].mean():.1f}" for n in SIZES)]
        for way in shown if way in of_ways
    ]  # fmt: skip
    yield from table(["", *map(str, SIZES)], rows)


def rule_to_take(pool: Pool, of_ways: Mapping[Way, np.ndarray]) -> Iterator[str]:
    """Yields a table of rules chosen on one half of the problems and tested on the other, both ways round."""
    half_P = np.array([bucket(f"half {problem}", 2) for problem in pool.problems])
    majority_P = of_ways["majority", "", "vote"][:, -1]
    rows = []
    for verifier in pool.scores:
        ways = [way for way in of_ways if way[0] == verifier]
        value_P, names = np.zeros(len(half_P)), []
        for half in (0, 1):
            way = max(ways, key=lambda way, half=half: of_ways[way][half_P != half, -1].mean())
            value_P[half_P == half] = of_ways[way][half_P == half, -1]
            names.append(f"{way[2]} by `{way[1]}`")
        fixed = of_ways[verifier, "last" if verifier in OUTCOME else "prod", "best"][:, -1]
        rows.append([verifier, ", ".join(names), text_of(gain(value_P, majority_P)), text_of(gain(fixed, majority_P))])
    yield from table(
        ["", "chosen on the other half", "less the majority", "fixed: `prod`, of outcome models `last`"], rows
    )


def calibration(pool: Pool) -> Iterator[str]:
    problem_M = np.repeat(np.arange(len(pool.records)), N)
    right_M = pool.correct_PN.ravel() > 0.5
    rows = []
    for verifier in pool.scores:
        row = [verifier]
        for rule in ("prod", "min", "last"):
            score_M = keys_of(pool, verifier, rule)[1].ravel()
            error = ece_interval(score_M, right_M, problem_M, seed=0)
            row.append(f"{100 * error.value:.1f} [{100 * error.low:.1f}, {100 * error.high:.1f}]")
            row.append(f"{float(brier(score_M, right_M).brier):.3f}")
        row.append(f"{100 * float(auroc(keys_of(pool, verifier, 'last')[1].ravel(), right_M)):.1f}")
        rows.append(row)
    head = [
        "",
        *(f"`{rule}`: {what}" for rule in ("prod", "min", "last") for what in ("ECE, %", "Brier")),
        "AUROC by `last`",
    ]
    yield from table(head, rows)


# ------------------------------------------------------------------------------------------------- the fused verifier


def fused(pools: Sequence[Pool], of_ways: Sequence[Mapping[Way, np.ndarray]]) -> Iterator[str]:
    """Yields the fused verifier's accuracy, fitted to both files' problems of the other folds."""
    sources = [evidence.find(name) for name in (*evidence.DEFAULT, "stored")]
    names, policies = evidence.names(sources), []
    for pool in pools:
        trees = []
        for record, scores in zip(pool.records, pool.scores[BEST], strict=True):
            samples = [sample | {"scores": s} for sample, s in zip(record["samples"], scores, strict=True)]
            trees.append(tree_of(record | {"samples": samples}))
        policies.append(policy_of(pool.name, trees, sources))
    right = {pool.name: np.zeros((2, len(pool.records))) for pool in pools}
    taken = []
    for fold in range(FOLDS):
        part = [_problems(policy, lambda problem, fold=fold: _fold(problem) != fold) for policy in policies]
        vote, _ = choose_vote(part, 0)
        name, _ = choose_verifier(part, vote, names)
        verifier = candidates(part, vote, names)[name]
        taken.append(name)
        for pool, policy in zip(pools, policies, strict=True):
            held_P = np.array([_fold(problem) == fold for problem in policy.problems])
            chains = policy.chains.where(held_P[policy.chains.problem_M])
            right[pool.name][:, held_P] = right_of(verifier, chains)
    rows = []
    for pool, ways in zip(pools, of_ways, strict=True):
        majority_P, alone = ways["majority", "", "vote"][:, -1], [way for way in ways if way[0] == BEST]
        best = max(alone, key=lambda way: ways[way][:, -1].mean())
        best_P, fused_P = ways[best][:, -1], right[pool.name][0]
        product_P = ways[BEST, "prod", "best"][:, -1]
        rows.append([
            pool.name, f"{100 * fused_P.mean():.1f}", text_of(gain(fused_P, majority_P)),
            f"{100 * product_P.mean():.1f}", text_of(gain(fused_P, product_P)),
            f"{100 * best_P.mean():.1f} ({best[2]} by `{best[1]}`)", text_of(gain(fused_P, best_P)),
        ])  # fmt: skip
    yield (
        f"Fitted to three quarters of both files' problems, tested on the rest, four times (taken: {', '.join(taken)})."
        " Best of 32; the vote of a fused one chooses the same answers.\n"
    )
    head = ["", "fused, %", "less the majority", "7B by `prod`, %", "fused less it"]
    head += ["7B, the best of its 16 ways on these problems, %", "fused less it"]
    yield from table(head, rows)


def _fold(problem: str) -> int:
    return bucket(f"fold {problem}", FOLDS)


def _problems(policy: PolicyPools, keep: Callable[[str], bool]) -> PolicyPools:
    kept_P = np.array([keep(problem) for problem in policy.problems])
    problems = [problem for problem, kept in zip(policy.problems, kept_P, strict=True) if kept]
    return PolicyPools(policy.name, problems, policy.chains.where(kept_P[policy.chains.problem_M]), {})


# ---------------------------------------------------------------------------------------- what PRMs choose on 12 tasks


def choices(path: pathlib.Path) -> Iterator[str]:
    """Yields what each verifier gains over the majority of 5, by task and averaged over tasks."""
    by_key: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for row in lines(path):
        chooser = row["model"] or row["chosen_by"]
        by_key.setdefault((row["policy"], row["task"]), {})[chooser] = np.array(row["correct"], float)
    averages: dict[tuple[str, str, str], Draws] = {}
    cells: dict[tuple[str, str], dict[str, Draws]] = {}
    for (policy, task), of_task in by_key.items():
        for chooser, right_P in of_task.items():
            if chooser != "majority of 5" and "majority of 5" in of_task:
                seed = bucket(f"{policy} {task}", 1 << 30)
                drawn = mean_draws(100 * (right_P - of_task["majority of 5"]), np.arange(len(right_P)), seed=seed)
                cells.setdefault((policy, chooser), {})[task] = drawn
    for key, by_task in cells.items():
        parts = {"all": list(by_task), "maths": [t for t in by_task if t in MATHS]}
        parts["other"] = [t for t in by_task if t not in MATHS]
        for part, tasks in parts.items():
            several = [by_task[task] for task in tasks]
            averages[*key, part] = Draws(
                np.mean([d.value for d in several]), np.mean([d.drawn_R for d in several], axis=0),
                sum(d.groups for d in several),
            )  # fmt: skip
    compared = [key for key in averages if key[1] not in ("any of 5", "first sample")]
    found = dict(zip(compared, discoveries([p_value(averages[key]) for key in compared]), strict=True))
    rows = []
    for policy, chooser in cells:
        texts = [text_of(averages[policy, chooser, part]) for part in ("all", "maths", "other")]
        marked = [
            f"**{text}**" if found.get((policy, chooser, part)) else text
            for text, part in zip(texts, ("all", "maths", "other"), strict=True)
        ]
        tasks = len(cells[policy, chooser])
        rows.append([policy, chooser, str(tasks), *marked])
    yield from table(["policy", "chosen by", "tasks", "all tasks", "maths", "other tasks"], sorted(rows))
    smallest = np.median([smallest_shown(averages[key]) for key in compared])
    yield (
        f"Bold: reported at a false discovery rate of 5 % among {len(compared)} comparisons of verifiers."
        f" {smallest:.1f} points (median) would have been shown four times of five. By task, verifiers only:\n"
    )
    tasks = sorted({task for _, task in by_key}, key=lambda task: (task not in MATHS, task))
    rows = [
        [policy, chooser, *(f"{by_task[t].value:+.1f}" if t in by_task else "" for t in tasks)]
        for (policy, chooser), by_task in sorted(cells.items()) if chooser not in ("any of 5", "first sample")
    ]  # fmt: skip
    yield from table(["policy", "chosen by", *tasks], rows)


# ------------------------------------------------------------------------------------ right answers by wrong working


def mr_math(shared: pathlib.Path) -> Iterator[str]:
    """Yields how verifiers tell right working from wrong behind right answers, and find redundant steps."""
    records = list(lines(shared / "published_scores/mr_math_invalid.jsonl"))
    wrong_S = np.array([not record["solution_correct"] for record in records])
    scorers: dict[str, list[np.ndarray]] = {}
    for verifier in records[0]["scores"]:
        scorers[verifier] = [_by_step(record["scores"][verifier], record["pieces"]) for record in records]
    scorers["number of steps"] = [-np.arange(1.0, len(record["pieces"]) + 1) for record in records]
    rows = []
    for name, by_solution in scorers.items():
        least_S = np.array([score_K.min() for score_K in by_solution])
        area = draws(lambda w, x=least_S: auroc(x, ~wrong_S, w), np.arange(len(records)), seed=0)
        pairs = zip(by_solution, records, strict=True)
        found_S = np.array([int(score_K.argmin()) + 1 == record["first_error"] for score_K, record in pairs])[wrong_S]
        first = draws(lambda w, x=found_S: weighted_mean(x, w), np.arange(len(found_S)), seed=0)
        rows.append([name, *(_percent(drawn) for drawn in (area, first))])
    for judge in records[0]["verdicts"]:
        said = [[re.sub(r"\W|step", "", str(word).lower()) for word in record["verdicts"][judge]] for record in records]
        right_S = np.array([(word != "correct") == wrong for (word, _), wrong in zip(said, wrong_S, strict=True)])
        first_S = np.array(
            [step == str(record["first_error"]) for (_, step), record in zip(said, records, strict=True)]
        )
        whole, first = (
            draws(lambda w, x=hit_S: weighted_mean(x, w), np.arange(len(hit_S)), seed=0)
            for hit_S in (right_S, first_S[wrong_S])
        )
        rows.append([f"{judge}, verdicts right in {_percent(whole)} %", "", _percent(first)])
    yield from table(["", "AUROC of solutions by the least step, %", "its least step is the first error, %"], rows)
    yield "Redundant steps (300 solutions, AUROC of steps without need among valid ones, %):\n"
    records = list(lines(shared / "published_scores/mr_math_redundant.jsonl"))
    rating_N = np.concatenate([record["rating"] for record in records])
    group_N = np.repeat(np.arange(len(records)), [len(record["rating"]) for record in records])
    kept_N = rating_N >= 0
    rows = []
    for verifier in records[0]["scores"]:
        score_N = [
            step[1] if isinstance(step, list) else -step for record in records for step in record["scores"][verifier]
        ]
        redundant_N = (rating_N == 0)[kept_N]
        score_N = np.array(score_N)[kept_N]
        area = draws(lambda w, x=score_N, y=redundant_N: auroc(x, y, w), group_N[kept_N], 300, seed=0)
        what = "P(neutral)" if isinstance(records[0]["scores"][verifier][0], list) else "1 - score"
        rows.append([verifier, what, _percent(area)])
    place_N = np.concatenate([np.arange(len(record["rating"])) for record in records])[kept_N].astype(float)
    area = draws(lambda w: auroc(place_N, (rating_N == 0)[kept_N], w), group_N[kept_N], 300, seed=0)
    yield from table(["", "by", "AUROC"], [*rows, ["place of the step", "later", _percent(area)]])


def _by_step(pieces: Sequence[Any], counts: Sequence[int]) -> np.ndarray:
    """Returns the least score of each step's pieces; of three classes the probability that a piece is not negative."""
    score_N = np.array([piece[1] + piece[2] if isinstance(piece, list) else piece for piece in pieces])
    return np.array([part.min() for part in np.split(score_N, np.cumsum(counts)[:-1])])


def _percent(drawn: Draws) -> str:
    value, low, high = (100 * float(x) for x in interval(drawn))
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


# ------------------------------------------------------------------------------------------------------------- the page


def page(shared: pathlib.Path) -> Iterator[str]:
    truth_of = truths(shared)
    pools = [read_pool(shared / f"pools/qwen_{name}_n32.jsonl.gz", truth_of) for name in ("gsm8k", "math500")]
    of_ways = [curves(pool) for pool in pools]
    log = ["git", "log", "-1", "--format=%h", "--", "jprm/methods/answers"]
    commit = subprocess.run(log, capture_output=True, text=True, check=False).stdout.strip()
    yield f"By `python -m experiments.studies.published`; answers are judged by `jprm.methods.answers` of {commit}.\n"
    for pool, ways in zip(pools, of_ways, strict=True):
        yield from choosing(pool, ways)
        yield "Which rule? Of a verifier's 16 ways the best on one half of the problems, tested on the other half:\n"
        yield from rule_to_take(pool, ways)
        yield "Calibration of a sample's score as the probability that its answer is right (ECE debiased):\n"
        yield from calibration(pool)
    yield "## The fused verifier beside its best source\n"
    yield from fused(pools, of_ways)
    yield "## Best of 5 on 12 tasks, three policies\n"
    yield "Verifiers choose by their least step score. Points over the majority of 5, paired; tasks weigh the same.\n"
    yield from choices(shared / "published_choices/best_of_5.jsonl")
    yield "## Right answers by wrong working\n"
    yield "159 solutions with a right answer, 83 of them by wrong working (MR-MATH).\n"
    yield from mr_math(shared)


def main(shared: pathlib.Path, out: pathlib.Path = HERE / "published.md") -> None:
    """Compute every figure of the page from published scores, and write it.

    Args:
        shared: The folder with `pools/`, `published_choices/` and `published_scores/`.
        out: The page.
    """
    try:
        with Bar("parts of the page", 1) as bar:
            text = "\n".join(page(shared))
            bar.add(1)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    written = out.read_text().partition(MARK)[0] if out.is_file() else ""
    out.write_text(written + MARK + "\n\n" + text.rstrip("\n") + "\n")
    print(f"{out}: written")


if __name__ == "__main__":
    tyro.cli(main)

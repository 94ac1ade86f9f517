"""A reinforcement learning run's state: folder, position, guards and verdict."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy  # its parts are loaded when they are first used

from jprm import multihost
from jprm.checkpoints import store
from jprm.experiment import from_json, to_json
from jprm.io.jsonl import parse
from jprm.io.outputs import digest, write_json
from jprm.io.storage import Place, path_of
from jprm.methods.evaluate.blocks import decided, percent, points
from jprm.methods.rl.config import GuardConfig, RLExperiment
from jprm.methods.rl.sampling import Ahead
from jprm.methods.verify import verifiers
from jprm.methods.worlds import environment
from jprm.statistics import TIE, mean_differences

CONFIG = "rl_experiment.json"
FREE = ("policy", "updates", "mesh", "engine", "sampling_hosts", "checkpoint_every", "keep", "stall_seconds",
        "trackers")  # fmt: skip
"""Fields that may change when a run continues. If `updates` changes, the schedule is recomputed."""


def claim_rl(workdir: Place, config: RLExperiment) -> None:
    """Writes the experiment to `workdir`/rl_experiment.json, and digests of files and judges to digests.json.

    Every process of the group must call it, and waits; the first one writes. Also imports the user's verifier, check of
    the working or environment.

    Raises ValueError if the folder has a checkpoint and its experiment (except `FREE` fields), data or judges differ.
    Without a checkpoint they are overwritten. Absent files of problems have no digest. Also raises as `verifiers.find`,
    e.g. FileNotFoundError for a checker's file, `verifiers.find_working` and `environment.find`.
    """
    files = {file: path_of(file) for file in (*config.problems, *config.held_out)}
    multihost.first(_record, workdir, config, store.data_digests(files))


def _record(workdir: Place, config: RLExperiment, digests: dict[str, str]) -> None:
    path = workdir / CONFIG
    if path.exists() and store.saved(workdir):
        recorded = from_json(RLExperiment, parse(path.read_bytes(), str(path)))
        store.check_experiment(path, to_json(recorded), to_json(config), FREE)
    judges: dict[str, Any] = {"working": verifiers.find_working(config.working)}
    if config.environment:
        judges["environment"] = environment.find(config.environment.name)
    else:
        judges["verifier"] = verifiers.find(config.verifier)
    store.keep_digests(workdir, {name: digest(judge) for name, judge in judges.items()} | digests)
    write_json(path, to_json(config))


# ---- The position.


@dataclasses.dataclass
class Progress:
    """A run's `Position`: everything in a checkpoint besides the trainer's state."""

    update: int = 0
    tokens: int = 0  # sampled, or of demonstrations, in all updates
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ended: str = ""  # the guard that ended the run, in words
    fresh: dict[str, Any] | None = None  # at the end of the run, the best policy's evaluation on fresh samples
    prm: str = ""  # the adopted refresh, a folder in that of the run; empty: the experiment's PRM
    refreshes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ahead: list[Ahead] = dataclasses.field(default_factory=list)
    lengths: dict[str, float] = dataclasses.field(default_factory=dict)  # mean tokens of a problem's last samples

    def get_state(self) -> dict[str, Any]:
        ahead = [batch.json() for batch in self.ahead]
        return copy.deepcopy({name: value for name, value in vars(self).items() if name != "ahead"}) | {"ahead": ahead}

    def set_state(self, state: dict[str, Any]) -> None:
        known = {field.name for field in dataclasses.fields(self)}
        vars(self).update({name: value for name, value in state.items() if name in known})
        self.ahead = [Ahead.of_json(batch) for batch in state.get("ahead", [])]


# ---- Guards: whether an evaluation ends the run, and the run's verdict in words. Pure functions of the evaluations.
#
# The gaming guard looks at every evaluation, and the best of many evaluations is lucky: compared with it at 95 %, most
# long runs whose accuracy never changes look worse at some time. So a comparison raises no more than a suspicion. Then
# both policies draw fresh samples, and one test on these decides.

Evaluation = Mapping[str, Any]
"""Figures of `rollout.evaluation`, with `update`, and `kl` and `check` as in `Loop.evaluate`."""

FALSE_ALARMS = 0.05
"""The gaming guard ends at most this fraction of runs that lose no accuracy, at any length."""

SUSPICION = 0.025
"""The p-value below which an evaluation looks worse than the best one."""


def best_of(evaluations: Sequence[Evaluation]) -> int:
    """Returns the index, from 0, of the evaluation with the highest `gold`, the first if tied."""
    return int(np.argmax([evaluation["gold"] for evaluation in evaluations]))


def suspected(evaluations: Sequence[Evaluation], config: GuardConfig) -> bool:
    """Returns whether the last evaluation looks like gaming.

    Its PRM score is then higher than the best evaluation's, and fewer answers are correct, with a p-value (`p_worse`)
    below `SUSPICION`. `False` without a PRM, or if `config.gaming` is off.
    """
    now, best = evaluations[-1], evaluations[best_of(evaluations)]
    if not config.gaming or "proxy" not in now or not now["proxy"] > best["proxy"]:
        return False
    return p_worse(best, now) < SUSPICION


def fresh_test(best: Evaluation, now: Evaluation, earlier: int, seed: int) -> dict[str, Any]:
    """Tests a suspicion on fresh samples; it is confirmed if the result's `p` is below its `level`.

    Returns floats: `p` (see `p_worse`), `level`, both accuracies (`best`, `now`), and from `gold_change`, beside them,
    `value`, `low`, `high`, below 0 if `now` is worse.

    A run's k-th level is FALSE_ALARMS / (k (k + 1)); over all k they sum to FALSE_ALARMS, which bounds a run's false
    alarms, as fresh samples are independent of the suspicion.

    Args:
        best: the best policy's evaluation, with samples not used for any choice.
        now: the present policy's, on the same problems.
        earlier: how many tests the run has had.
        seed: resamples the problems for the interval.
    """
    level = FALSE_ALARMS / ((earlier + 1) * (earlier + 2))
    change = {key: x for key, x in gold_change(best, now, seed).items() if key != "better"}
    return {"best": best["gold"], "now": now["gold"], **change, "p": p_worse(best, now), "level": level}


def p_worse(before: Evaluation, after: Evaluation) -> float:
    """Returns the one-sided p-value for a fall in accuracy, by a t-test on `gold_P`, paired by position.

    1 if accuracy did not fall or there is one problem. If all problems fell by the same amount, the sign test is used.
    """
    change_P = np.array(after["gold_P"]) - np.array(before["gold_P"])
    if len(change_P) < 2 or change_P.mean() >= 0:
        return 1.0
    error = change_P.std(ddof=1) / math.sqrt(len(change_P))
    if error < TIE:
        return 0.5 ** len(change_P)
    return float(scipy.special.stdtr(len(change_P) - 1, change_P.mean() / error))


def fired(evaluations: Sequence[Evaluation], config: GuardConfig) -> str:
    """Returns the guard that the last evaluation triggers, in words; empty without one.

    The evaluation has the key `check` if `fresh_test` tested a suspicion. The text begins with "gaming:", "KL budget:"
    or "disagreement:", the first that applies in this order. With `config.disagreement`, raises KeyError if the
    evaluation has no key `disagreement`, i.e. without a second PRM.
    """
    now, best = evaluations[-1], evaluations[best_of(evaluations)]
    if (test := now.get("check")) and test["p"] < test["level"]:
        return (
            f"gaming: the PRM's score rose from {best['proxy']:.3f} to {now['proxy']:.3f} since update {best['update']}"
            f" while correct answers changed by {points(test)} on fresh samples"
        )
    if config.kl_budget and (now.get("kl") or 0.0) > config.kl_budget:
        return f"KL budget: {now['kl']:.4f} nats a token from the start, more than {config.kl_budget:g}"
    if config.disagreement and now["disagreement"] is not None and now["disagreement"] > config.disagreement:
        return (
            f"disagreement: the two PRMs' scores of a step lie {now['disagreement']:.3f} apart, more than"
            f" {config.disagreement:g}"
        )
    return ""


def gold_change(before: Evaluation, after: Evaluation, seed: int) -> dict[str, Any]:
    """Returns `value`, `low`, `high`, `better` for the fraction of correct answers, `after` less `before`.

    Both evaluations must have the same problems in one order, since they are paired by position. `low` and `high` are
    the 95 % interval; `better` is the fraction of draws of problems with `after` ahead, ties half. `seed` draws them.
    Each value is a float, from -1 to 1 for the first three.
    """
    difference_P1 = np.array(after["gold_P"])[:, None] - np.array(before["gold_P"])[:, None]
    problems = [str(i) for i in range(len(difference_P1))]
    interval = mean_differences(difference_P1, problems, seed).json()
    return {key: value[0] for key, value in interval.items()}


def verdict(evaluations: Sequence[Evaluation], ended: str, seed: int, fresh: Evaluation | None = None) -> list[str]:
    """Returns the conclusions from a run, a sentence each. `evaluations`, in order, must not be empty.

    `ended` is the reason of the guard that ended it, or "", `seed` resamples the problems, and `fresh` is the best
    policy's evaluation on fresh samples, at the end of a run. (The samples by which it was chosen flatter it.)
    """
    first, last, best = evaluations[0], evaluations[-1], evaluations[best_of(evaluations)]
    shown = (fresh or best) if ended else last
    change, where = gold_change(first, shown, seed), ", on fresh samples," if ended and fresh else ""
    if shown is first or (ended and best is first):
        sentences = [f"Correct answers: {percent(first['gold'])} % at the start. No later evaluation was better."]
    else:
        sentences = [
            f"Correct answers went from {percent(first['gold'])} % to {percent(shown['gold'])} %{where} at update"
            f" {shown['update']}: {points(change)} on the same problems, {decided(change)}."
        ]
    if ended:
        sentences.append(f"A guard ended the run at update {last['update']}, {ended}.")
        sentences.append(f"The parameters are those of the best evaluation, at update {best['update']}.")
    elif fresh and best is not last and gold_change(fresh, last, seed)["high"] < 0:
        sentences.append(
            f"Update {best['update']}, which best/ holds, was better than the last: {percent(fresh['gold'])} % on fresh"
            " samples."
        )
    tests = [evaluation["check"] for evaluation in evaluations if "check" in evaluation]
    if unconfirmed := sum(test["p"] >= test["level"] for test in tests):
        sentences.append(
            f"At {unconfirmed} of {len(evaluations)} evaluations the run looked like gaming, and fresh samples did"
            " not confirm it."
        )
    if "proxy" in first:
        moved = "rose" if last["proxy"] > first["proxy"] else "fell"
        sentences.append(
            f"The PRM's mean lowest score {moved} from {first['proxy']:.3f} to {last['proxy']:.3f} by update"
            f" {last['update']}."
        )
    sentences.append(
        f"Right working: {percent(first['working'])} % of chains at the start, {percent(shown['working'])} % at update"
        f" {shown['update']}. Tokens a chain: {first['tokens']:.1f} and {shown['tokens']:.1f}."
    )
    return sentences

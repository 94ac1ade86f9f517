"""Baselines from text alone (see `jprm.methods.evaluate.baselines`): the equation checker, and fitted rankers.

The rankers are fitted during the evaluation, to the outcomes of the evaluated file itself; each problem is ranked by a
ranker fitted to other folds. So they have seen the policy, unlike most models.

A `Chosen` has ranks and vote weights of one tree's chains, in the order of `chains_of`; results have one per tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import scipy  # its parts are loaded when they are first used
from jaxtyping import Float, Int

from jprm.methods.evaluate.baselines import Chosen, doubted
from jprm.methods.evidence import sources as evidence
from jprm.methods.evidence.fit import bucket, policy_of
from jprm.methods.evidence.ranker import STRENGTHS, Ranker, calibrated, fit_ranker, mixed_problems
from jprm.methods.evidence.verifier import Vote
from jprm.tree import ReasoningTree, chains_of

FOLDS = 5
FEWEST = 50
"""Minimum for a fitted baseline: problems with chains, and chains or steps per class."""
MOST = 400
"""Maximum training problems: a ranker with 20 numbers gains little from more."""


def _leaves(name: str, number: str, sign: float, trees: Sequence[ReasoningTree]) -> list[Chosen]:
    """Orders each tree's chains by one number of one source."""
    source = evidence.find(name)
    column, chosen = source.numbers.index(number), []
    for tree in trees:
        (x_NF,) = evidence.read([source], [tree])
        leaves = [chain[-1] for chain in chains_of(tree)]
        chosen.append(doubted(sign * x_NF[leaves, column] if leaves else np.zeros(0)))
    return chosen


def no_false_equation(trees: Sequence[ReasoningTree]) -> list[Chosen]:
    """Ranks each tree's chains: one with a false equation (`jprm.methods.verify.arithmetic`) is -1, others 0.

    Returns one `Chosen` per tree, with an entry per chain, or empty without chains. Chains below the pool's mean
    have the vote weight `DOUBTED`, others 1.
    """
    return _leaves("arithmetic", "any_false", -1.0, trees)


def most_numbers_used(trees: Sequence[ReasoningTree]) -> list[Chosen]:
    """Ranks each tree's chains by the share, in [0, 1], of the problem's numbers that they use (1 if it has no number).

    Returns one `Chosen` per tree, with an entry per chain, or empty without chains. Chains below the pool's mean
    have the vote weight `DOUBTED`, others 1.
    """
    return _leaves("numbers", "used", 1.0, trees)


def ranked_by_text(trees: Sequence[ReasoningTree]) -> list[Chosen] | None:
    """Ranks chains by the text-only sources of `jprm fuse fit`, fitted to the other folds' outcomes.

    One of the other folds chooses the regularisation and calibrates. Votes use the weights of `Vote()`. Returns `None`
    if fewer than `FEWEST` trees have steps, or too few problems have both a correct and an incorrect chain. Raises
    ScoreError if a chain's outcome is unknown.
    """
    with_steps = [tree for tree in trees if tree.nodes]
    if len(with_steps) < FEWEST:
        return None
    chains = policy_of("pools", with_steps, [evidence.find(name) for name in evidence.DEFAULT]).chains
    fold_M = np.array([bucket(tree.problem, FOLDS) for tree in with_steps])[chains.problem_M]
    key_M, weight_M = np.zeros((2, len(fold_M)))
    for fold in range(FOLDS):
        held_M, valid_M = fold_M == fold, fold_M == (fold + 1) % FOLDS
        train_M = ~held_M & ~valid_M
        train_M &= chains.problem_M <= np.unique(chains.problem_M[train_M])[:MOST].max(initial=0)
        train, valid, held = (chains.where(some_M) for some_M in (train_M, valid_M, held_M))
        if mixed_problems(train) < FEWEST / 2 or not mixed_problems(valid):
            return None
        ranker = calibrated(fit_ranker(train, valid), valid)
        if len(held.problem_M):
            key_M[held_M] = ranker.log_odds(held.x_MF)
            weight_M[held_M] = Vote().weights(ranker, held)
    chosen, start = [], 0
    for tree in trees:
        end = start + len(chains_of(tree))
        chosen.append(Chosen(key_M[start:end], weight_M[start:end], of_pool=True))
        start = end
    return chosen


def steps_without_false_equation(trees: Sequence[ReasoningTree]) -> list[Float[np.ndarray, " N"]]:
    """Scores steps 1.0 before the chain's first false equation and 0.0 from there on; (N,) per tree of N nodes."""
    source = evidence.find("arithmetic")
    column = source.numbers.index("any_false")
    return [1 - x_NF[:, column] for x_NF in evidence.read([source], trees)]


STEP_SOURCES = ("arithmetic", "numbers", "form")


def rows_of_steps(trees: Sequence[ReasoningTree]) -> list[Float[np.ndarray, "N F"]]:
    """Returns text features (N, F) per tree: the sources' numbers, their change at this step, log(1 + characters).

    The sources are `STEP_SOURCES`; NaN is no evidence. A first step's change is from 0.
    """
    rows = []
    for tree, x_NF in zip(trees, evidence.read([evidence.find(name) for name in STEP_SOURCES], trees), strict=True):
        length_N1 = np.log1p([len(node.text) for node in tree.nodes])[:, None]
        parent_N = np.array([node.parent for node in tree.nodes], int)
        before_NF = np.where(parent_N[:, None] >= 0, x_NF[parent_N], 0.0)
        rows.append(np.concatenate([x_NF, x_NF - before_NF, length_N1], axis=1))
    return rows


def steps_by_text(trees: Sequence[ReasoningTree]) -> list[Float[np.ndarray, " N"]] | None:
    """Scores the steps of chains with a known `first_error` (a step from 0, -1 if all are correct) by `cross_fitted`.

    Every tree must be one chain with `first_error` in its `extra`, else raises KeyError. Steps before the first error
    count as correct, the first error as incorrect; later steps are scored, but not fitted to. Returns `None` if fewer
    than `FEWEST` chains are correct, or incorrect, or as `cross_fitted`.
    """
    error_K = np.array([tree.extra["first_error"] for tree in trees])
    if min((error_K >= 0).sum(), (error_K < 0).sum()) < FEWEST:
        return None
    classes = []
    for tree, error in zip(trees, error_K, strict=True):
        class_N = np.ones(len(tree.nodes), int)
        if error >= 0:
            class_N[error], class_N[error + 1 :] = 0, -1
        classes.append(class_N)
    return cross_fitted(rows_of_steps(trees), classes, [tree.problem for tree in trees])


def labelled_by_place(
    trees: Sequence[ReasoningTree], classes: Sequence[Int[np.ndarray, " N"]]
) -> list[Float[np.ndarray, " N"]] | None:
    """Scores each node by a logistic regression on depth and characters, fitted to the labels `classes`.

    Scores, `classes` (1 right, 0 wrong, -1 unlabelled, per node) and `None` are as in `cross_fitted`.
    """
    return cross_fitted(list(map(rows_of_place, trees)), classes, [tree.problem for tree in trees])


def labelled_by_text(
    trees: Sequence[ReasoningTree], classes: Sequence[Int[np.ndarray, " N"]]
) -> list[Float[np.ndarray, " N"]] | None:
    """Like `labelled_by_place`, with the text features of `rows_of_steps` as well.

    Returns `None` also if any tree is of messages.
    """
    if any(tree.of_messages for tree in trees):
        return None
    rows = [
        np.column_stack([of_steps, rows_of_place(tree)])
        for tree, of_steps in zip(trees, rows_of_steps(trees), strict=True)
    ]
    return cross_fitted(rows, classes, [tree.problem for tree in trees])


def rows_of_place(tree: ReasoningTree) -> Float[np.ndarray, "N F"]:
    """Returns each node's features (`of_place`), (N, 5), from its depth (0 for a first step) and characters."""
    depth, before, rows = [], [], []
    for node in tree.nodes:
        depth.append(depth[node.parent] + 1 if node.parent >= 0 else 0)
        before.append((before[node.parent] if node.parent >= 0 else 0) + len(node.text))
        rows.append(of_place(depth[-1], len(node.text), before[-1]))
    return np.array(rows, float).reshape(len(rows), len(of_place(0, 0, 0)))


def of_place(depth: int, characters: int, so_far: int) -> tuple[float, ...]:
    """Returns the features (depth, log(1 + depth), characters, log(1 + characters), log(1 + so_far)) of a step's place.

    `depth` counts from 0; `so_far` are the characters from the first step to the end of this one.
    """
    return depth, np.log1p(depth), characters, np.log1p(characters), np.log1p(so_far)


def cross_fitted(
    rows: Sequence[Float[np.ndarray, "N F"]], classes: Sequence[Int[np.ndarray, " N"]], problems: Sequence[str]
) -> list[Float[np.ndarray, " N"]] | None:
    """Returns out-of-fold step scores, probabilities of a right step, for K records: (N,) for each record of N rows.

    They are from logistic regressions on other problems; `problems` has each record's text. Each record has `rows` of
    features and `classes`: 1 for a right step, 0 for a wrong one, -1 without a label. One of the other folds chooses
    the regularisation. NaN features count as the training mean; unlabelled steps are scored too. Returns `None` if the
    training or validation steps of a fold lack a class, or either class has fewer than `FEWEST` (50) steps.
    """
    of_M = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    fold_M = np.array([bucket(problem, FOLDS) for problem in problems], int)[of_M]
    x_MF, class_M, score_M = np.concatenate(rows), np.concatenate(classes), np.zeros(len(of_M))
    if min((class_M == 1).sum(), (class_M == 0).sum()) < FEWEST:
        return None
    for fold in range(FOLDS):
        valid_M = (class_M >= 0) & (fold_M == (fold + 1) % FOLDS)
        train_M = (class_M >= 0) & ~valid_M & (fold_M != fold)
        if min(len(np.unique(class_M[some_M])) for some_M in (train_M, valid_M)) < 2:
            return None
        right_M = class_M.astype(float)
        score = logistic(x_MF[train_M], right_M[train_M], x_MF[valid_M], right_M[valid_M])
        score_M[fold_M == fold] = score(x_MF[fold_M == fold])
    return np.split(score_M, np.cumsum([len(row) for row in rows])[:-1])


def logistic(
    x_MF: Float[np.ndarray, "M F"], right_M: Float[np.ndarray, " M"],
    valid_x_KF: Float[np.ndarray, "K F"], valid_right_K: Float[np.ndarray, " K"],
) -> Callable[[Float[np.ndarray, "N F"]], Float[np.ndarray, " N"]]:  # fmt: skip
    """Returns a function from rows to probabilities of a right step (1), from a logistic regression.

    The validation rows choose the regularisation. Features are standardised here; NaN counts as the mean. Both parts
    must have both classes, which is not checked.
    """
    standard = Ranker.standardising(x_MF).standard
    x_MF, valid_x_KF = (np.column_stack([standard(x), np.ones(len(x))]) for x in (x_MF, valid_x_KF))

    def loss(w_F: np.ndarray, x_MF: np.ndarray, right_M: np.ndarray, strength: float) -> tuple[float, np.ndarray]:
        z_M = x_MF @ w_F
        free_F = np.append(w_F[:-1], 0.0)  # the intercept is not shrunk
        value = np.mean(np.logaddexp(0, z_M) - right_M * z_M) + strength / 2 * float(free_F @ free_F)
        return float(value), x_MF.T @ (scipy.special.expit(z_M) - right_M) / len(z_M) + strength * free_F

    least, w_F = np.inf, np.zeros(x_MF.shape[1])
    best_F = w_F
    for strength in sorted(STRENGTHS, reverse=True):
        w_F = scipy.optimize.minimize(loss, w_F, (x_MF, right_M, strength), method="L-BFGS-B", jac=True).x
        if (now := loss(w_F, valid_x_KF, valid_right_K, 0.0)[0]) < least:
            best_F, least = w_F, now
    return lambda x_NF: scipy.special.expit(np.column_stack([standard(x_NF), np.ones(len(x_NF))]) @ best_F)

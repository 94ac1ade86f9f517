"""Sample groups: problems by number, rewards and scores, their token trees, and their figures.

Evaluations on held-out problems use the same random numbers every time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from jprm import multihost
from jprm.experiment import DataConfig
from jprm.io.jsonl import parse
from jprm.methods.evaluate.blocks import shown_n
from jprm.methods.messages.records import read_trajectory, tree_of_trajectories
from jprm.methods.policy.protocol import read_problems
from jprm.methods.rl import credit
from jprm.methods.rl.config import METHODS, RLExperiment
from jprm.methods.rl.credit import sampled_weights, token_advantages
from jprm.methods.rl.policy_gradient import PolicyGradient, log_probabilities
from jprm.methods.rl.samples import EXTRAS, Rollout, group_tree, of_chains, of_steps, preference_trees
from jprm.methods.verify.verifiers import Verifier, Working, right_working
from jprm.model.attention import chain_rows
from jprm.model.mesh import gathered, put_rows
from jprm.pack import PackReport, pack
from jprm.rows import Rows, empty_rows, padded_size
from jprm.score.scorer import PRM
from jprm.statistics import auroc, bootstrap, weighted_mean
from jprm.token_tree import TokenTree
from jprm.tokenizer import Layout
from jprm.train import Trainer
from jprm.train.batches import micro_batches, unstacked
from jprm.tree import Node, ReasoningTree, RecordError, chains_of, tree_of

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Group:
    """One problem's samples.

    reward_G: the verifier's rewards, in [0, 1]; the floor (`guards.floor`) for blank and cut-off chains.
    scores: the PRM's step scores, by sample; `None` without a PRM. `second`: the second PRM's, for held-out samples.
    fused: whether the PRM is a fused verifier, whose score for a chain is its last step's, not its lowest.
    lost: number of samples that the environment lost. Only held-out groups keep them in `samples`.
    """

    record: Record
    samples: list[Rollout]
    reward_G: Float[np.ndarray, " G"]
    scores: list[Float[np.ndarray, " P"]] | None
    fused: bool = False
    lost: int = 0
    second: list[Float[np.ndarray, " P"]] | None = None

    def json(self) -> dict[str, Any]:
        """Returns the fields as JSON; float32 is preserved.

        Keys: `problem` (its text, in place of the record), `samples` (`Rollout.json`), `rewards`, `scores`, `fused`,
        `lost`, `second`. `scores` and `second` are `None` without the PRM.
        """
        return {
            "problem": self.record["problem"], "samples": [sample.json() for sample in self.samples],
            "rewards": self.reward_G.tolist(), "scores": _listed(self.scores), "fused": self.fused, "lost": self.lost,
            "second": _listed(self.second),
        }  # fmt: skip

    @staticmethod
    def of_json(value: Mapping[str, Any], records: Mapping[str, Record]) -> Group:
        """Inverts `json`, given the records by problem. Raises KeyError if the problem or a field is absent."""
        samples = [Rollout.of_json(sample) for sample in value["samples"]]
        scores, second = (_arrays(value[name]) for name in ("scores", "second"))
        reward_G = np.array(value["rewards"])
        return Group(records[value["problem"]], samples, reward_G, scores, value["fused"], value["lost"], second)

    @property
    def chain_scores(self) -> Float[np.ndarray, " G"]:
        return chain_scores(self.scores or (), self.fused)

    @property
    def correct_G(self) -> Float[np.ndarray, " G"]:
        """The verifier's reward in [0, 1]; 0 for blank or cut-off chains. 1 is correct."""
        return np.maximum(self.reward_G, 0.0)


def _listed(scores: Sequence[np.ndarray] | None) -> list[list[float]] | None:
    return None if scores is None else [score_P.tolist() for score_P in scores]


def _arrays(scores: Sequence[Sequence[float]] | None) -> list[Float[np.ndarray, " P"]] | None:
    return None if scores is None else [np.array(score_P, np.float32) for score_P in scores]


def read_records(files: Sequence[str], verifier: Verifier, *, solved: bool = False) -> list[dict[str, Any]]:
    """Returns the problems' records in order: `problem`, `answer` (`None` if absent), and all other keys.

    With `solved` also `steps`, the texts of the solution's steps. Every process must call it, and waits.

    Raises RecordError if a record is bad, lacks what the verifier or `solved` needs, or repeats a problem; ValueError
    if there is no problem, or the processes have different ones; FileNotFoundError if a file is absent.
    """
    records: dict[str, dict[str, Any]] = {}
    for file in files:
        for number, (line, problem) in enumerate(read_problems(file), start=1):
            where = f"{file}:{number}"
            record = {**problem.extra, "problem": problem.text, "answer": problem.answer}
            verifier.check(record, where)
            if problem.text in records:
                raise RecordError(where, "problem", "occurs twice", "Remove one: its samples would be the same.")
            records[problem.text] = record
            if solved:
                record["steps"] = [node.text for node in tree_of(parse(line, where), where).nodes]
    if not records:
        raise ValueError(f"{', '.join(files)}: no problem")
    if len(set(multihost.shared(digest(list(records.values()))))) > 1:
        raise ValueError(f"{', '.join(files)}: the hosts do not have the same problems there")
    return list(records.values())


def digest(records: Sequence[Record]) -> str:
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def chosen(records: Sequence[Record], count: int, seed: int, update: int) -> list[Record]:
    """Returns the problems of `update`, from 0: the next `count` (or all) in a sequence reshuffled in each epoch.

    A problem occurs at most once per epoch; those left over at its end are skipped. `seed` shuffles.
    """
    count = min(count, len(records))
    epochs = len(records) // count
    epoch, part = divmod(update, epochs)
    order = np.random.default_rng([seed % 2**63, epoch]).permutation(len(records))
    return [records[i] for i in order[part * count : (part + 1) * count]]


def judged(
    records: Sequence[Record], drawn: Sequence[Sequence[Rollout]], verifier: Verifier, floor: float, prm: PRM | None,
    *, keep_lost: bool = False,
) -> list[Group]:  # fmt: skip
    """Returns a group per record: the rollouts `drawn`, the verifier's rewards and the PRM's step scores, if there is a
    PRM.

    A rollout that did not end, or is empty, gets the reward `floor`. Every process must call it: each judges a part of
    the problems, and returns all groups. Raises like `Verifier.rewards` and `PRM.score_trees`.

    Episodes have the environment's rewards. Lost and blank ones are left out, and then groups with fewer than two; with
    `keep_lost` they stay, and those that did not end get the floor. Raises ValueError for a reward outside [0, 1],
    OSError if no group is left.
    """
    if drawn and drawn[0] and drawn[0][0].episode is not None:
        return _judged_by_world(records, drawn, floor, prm, keep_lost)

    def rewards(pairs: Sequence[tuple[Record, Sequence[Rollout]]]) -> list[list[float]]:
        whole = [
            (record, sample.steps) for record, samples in pairs for sample in samples if sample.ended and sample.steps
        ]
        reward = iter(verifier.rewards(whole))
        return [
            [next(reward) if sample.ended and sample.steps else floor for sample in samples] for _, samples in pairs
        ]

    scores = scored(prm, records, drawn) if prm else [None] * len(records)
    reward_PG = multihost.spread(rewards, list(zip(records, drawn, strict=True)))
    of_group = zip(records, drawn, reward_PG, scores, strict=True)
    fused = getattr(prm, "of_pool", False)
    return [
        Group(record, list(rollouts), np.array(reward_G), scores_G, fused)
        for record, rollouts, reward_G, scores_G in of_group
    ]


def _judged_by_world(
    records: Sequence[Record], drawn: Sequence[Sequence[Rollout]], floor: float, prm: PRM | None, keep_lost: bool
) -> list[Group]:
    """Returns the groups of episodes; groups with fewer than two remaining episodes are dropped.

    Raises ValueError for a reward outside [0, 1], and OSError if no group is left.
    """
    groups = []
    for record, samples in zip(records, drawn, strict=True):
        kept = [sample for sample in samples if keep_lost or (sample.ids and not sample.lost)]
        for rollout in kept:
            if not 0 <= (reward := rollout.reward) <= 1:
                raise ValueError(f"{record['problem'][:60]!r}: the environment's reward {reward} is not in [0, 1]")
        if keep_lost or len(kept) > 1:
            reward_G = np.array([rollout.reward if rollout.ended else floor for rollout in kept])
            groups.append(Group(record, kept, reward_G, None, lost=sum(sample.lost for sample in samples)))
    if not groups:
        errors = [sample.episode["error"] for samples in drawn for sample in samples if sample.episode and sample.lost]
        raise OSError(
            f"the environment lost the episodes of an update: {errors[0] if errors else 'all turns are blank'}"
        )
    if prm is None:
        return groups
    scores = scored(prm, [group.record for group in groups], [group.samples for group in groups])
    fused = getattr(prm, "of_pool", False)
    return [dataclasses.replace(group, scores=x, fused=fused) for group, x in zip(groups, scores, strict=True)]


def scored(
    prm: PRM, records: Sequence[Record], drawn: Sequence[Sequence[Rollout]]
) -> list[list[Float[np.ndarray, " P"]]]:
    """Returns the PRM's float32 step scores, by record and sample, for the samples `drawn` for each record.

    A sample without steps has (0,). Each process scores a part, as in `judged`. Raises like `PRM.score_trees`.
    """
    of_groups = multihost.spread(lambda part: _scored(prm, part), list(zip(records, drawn, strict=True)))
    return [[np.array(score_P, np.float32) for score_P in scores_G] for scores_G in of_groups]


def _scored(prm: PRM, drawn: Sequence[tuple[Record, Sequence[Rollout]]]) -> list[list[list[float]]]:
    if drawn and drawn[0][1][0].episode is not None:
        return _scored_turns(prm, [samples for _, samples in drawn])
    trees = []
    for record, samples in drawn:
        nodes: list[Node] = []
        for sample in samples:
            first = len(nodes)
            nodes += [Node(i - 1 if i > first else -1, text) for i, text in enumerate(sample.steps, first)]
        trees.append(ReasoningTree(record["problem"], tuple(nodes), kind="pool"))
    scores = []
    for (_, samples), score_N in zip(drawn, prm.score_trees(trees), strict=True):
        bounds = np.cumsum([len(sample.steps) for sample in samples])[:-1]
        scores.append([score_P.tolist() for score_P in np.split(score_N, bounds)])
    return scores


def _scored_turns(prm: PRM, groups: Sequence[Sequence[Rollout]]) -> list[list[list[float]]]:
    """Returns the episodes' turn scores, by task; shared prefixes within a task are computed once."""
    trees = [
        tree_of_trajectories([read_trajectory({"messages": sample.messages()}) for sample in samples if sample.steps])
        for samples in groups
        if any(sample.steps for sample in samples)
    ]
    scored_trees, scores = iter(zip(trees, prm.score_trees(trees), strict=True)), []
    for samples in groups:
        of_group: list[list[float]] = [[] for _ in samples]
        acted = [i for i, sample in enumerate(samples) if sample.steps]
        if acted:
            tree, score_N = next(scored_trees)
            for i, path in zip(acted, chains_of(tree), strict=True):  # a leaf for each, in order
                of_group[i] = [float(score_N[n]) for n in path if tree.nodes[n].is_step]
        scores.append(of_group)
    return scores


def trees_of(groups: Sequence[Group], layout: Layout, config: RLExperiment) -> list[TokenTree]:
    """Returns an update's training trees, by `config.method`; maybe several or none for a group.

    Policy gradients have a tree per prompt and sampling policies. `rejection` has one per prompt of samples with reward
    1, the pairs methods those of `preference_trees`; a group with equal rewards may give none. Raises ValueError as
    `group_tree` and `token_advantages`.
    """
    return [tree for group in groups for tree in _trees(group, layout, config)]


def _trees(group: Group, layout: Layout, config: RLExperiment) -> Iterator[TokenTree]:
    name, samples = group.record["problem"][:60], group.samples
    prompts = by_prompt(group, layout)
    if config.method == "policy_gradient":
        needs = credit.find(config.credit.name).prm
        scores = group.scores if needs and group.scores else [np.zeros(len(sample.steps)) for sample in samples]
        advantage = token_advantages(samples, group.reward_G, scores, config.credit)
        weight = sampled_weights(samples, config.credit)
        for prompt, of_prompt in prompts.items():
            for drawn_by in dict.fromkeys(samples[i].drawn_by for i in of_prompt):
                indices = [
                    i for i in of_prompt if samples[i].drawn_by == drawn_by
                ]  # a shared token has one probability
                parts = [advantage[i] for i in indices], [weight[i] for i in indices]
                yield group_tree(name, prompt, [samples[i] for i in indices], *parts)
    elif METHODS[config.method].pairs:
        alternatives = of_chains if config.method == "dpo" else of_steps
        for prompt, indices in prompts.items():
            for pair in alternatives(prompt, [samples[i] for i in indices], group.reward_G[indices]):
                yield from preference_trees(name, pair, config.tokens)
    else:
        for prompt, indices in prompts.items():
            if kept := [samples[i] for i in indices if group.reward_G[i] >= 1]:
                yield neutral_tree(name, prompt, kept, sampled_weights(kept, config.credit))


def by_prompt(group: Group, layout: Layout) -> dict[tuple[int, ...], list[int]]:
    """Returns the indices of a group's samples by prompt ids: episodes of one task may begin in several ways."""
    usual = next((sample.prompt for sample in group.samples if sample.prompt), ()) or layout.problem(
        group.record["problem"]
    )
    indices_of: dict[tuple[int, ...], list[int]] = {}
    for i, sample in enumerate(group.samples):
        indices_of.setdefault(tuple(sample.prompt or usual), []).append(i)
    return indices_of


def neutral_tree(
    name: str, prompt: Sequence[int], samples: Sequence[Rollout], weight: Sequence[np.ndarray] | None = None
) -> TokenTree:
    """Returns the tree of a prompt's samples with all advantages 0; `weight` has a weight per token of each sample.

    Without it a token weighs 1, and 0 if the environment wrote it. Raises as `group_tree`.
    """
    return group_tree(name, prompt, samples, [np.zeros(len(sample.ids)) for sample in samples], weight)


def demonstrations(records: Sequence[Record], layout: Layout, config: RLExperiment) -> list[TokenTree]:
    """Returns a tree of each record's solution, `steps`, with the end of text; advantages are 0.

    `read_records` gives such records with `solved`. Tokens are weighted by `config.credit.norm`.
    """
    trees = []
    for record in records:
        ids = [token for number, text in enumerate(record["steps"]) for token in layout.step(text, number)]
        ids = (*ids, *([] if layout.tokenizer.eos is None else [layout.tokenizer.eos]))
        gold = Rollout(ids, np.zeros(len(ids), np.float32), (len(ids),), ("\n".join(record["steps"]),), True)
        prompt = layout.problem(record["problem"])
        trees.append(neutral_tree(record["problem"][:60], prompt, [gold], sampled_weights([gold], config.credit)))
    return trees


def packed(trees: Sequence[TokenTree], data: DataConfig, chains: bool) -> tuple[Rows, PackReport]:
    """Returns rows (A, B, ...) of `data.micro_rows` each and packing counts; A is padded to a power of two.

    So few shapes are compiled, for any sample lengths. Without trees there is one batch of empty rows. `chains` puts
    one chain in each row (`jprm.pack.pack`). Raises ValueError as `pack`, e.g. for a chain longer than a row.
    """
    filled = pack(trees, data.tokens, data.slots, too_long=data.too_long, chains=chains)
    batches = max(1, -(-len(filled.rows.tokens) // data.micro_rows))
    size = data.micro_rows * padded_size(batches)
    extras = () if data.supervise == "outcome" else EXTRAS
    filler = empty_rows(size - len(filled.rows.tokens), data.tokens, data.slots, extras)
    rows = jax.tree.map(lambda a, b: np.concatenate([a, b]), filled.rows, filler) if trees else filler
    return micro_batches(rows, data.micro_rows), filled.report


def with_proximal(rows: Rows, trainer: Trainer, temperature: float) -> Rows:
    """Returns rows (A, B, ...) with `extras["proximal"]`: their tokens' log-probabilities under the trainer's policy.

    They are at `temperature`. It must be called before the update. Every process must call it.

    The objective's ratios and importance weights are relative to this policy (Hilton et al. 2022). It is the current
    one only in the first optimizer step of an update.
    """
    params, model, mesh = trainer.params, trainer.experiment.model, trainer.mesh
    with jax.set_mesh(mesh):
        near = [gathered(_near(params, model, put_rows(micro, mesh), temperature)) for micro in unstacked(rows)]
    return dataclasses.replace(rows, extras={**rows.extras, "proximal": np.stack(near)})


_near = jax.jit(log_probabilities, static_argnums=(1, 3))


def minibatches(groups: Sequence[Any], count: int) -> Iterator[Sequence[Any]]:
    """Yields `count` parts of equal size, in order; the last ones may be smaller or empty. Groups must not be empty."""
    size = -(-len(groups) // count)
    for first in range(0, count * size, size):
        yield groups[first : first + size]


# ---- Figures of an update's groups, and of held-out ones.

STREAM = -1
"""The stream of evaluations, where updates have their number: never an update's, and always the same."""


def fresh(update: int, *, report: bool = False) -> int:
    """Returns a stream, below `STREAM`, that no other evaluation shares: for a guard's test after this update, or for
    the final report.

    A policy that was chosen, or a run that was ended, by some samples must be measured on others.
    """
    return STREAM - 1 - 2 * update - report


EXAMPLES = 3

Scores = Sequence[Sequence[Float[np.ndarray, " P"]]]
"""A PRM's step scores, by problem and sample."""


def evaluation(groups: Sequence[Group], working: Working, seed: int) -> dict[str, Any]:
    """Returns the figures of held-out groups, as JSON.

    Groups must have equally many samples. `seed` resamples the problems.

    gold: mean of `Group.correct_G`, with `gold_low` and `gold_high`, its 95 % interval over problems; `gold_P`, a list
        by problem. `pass`: by k as text, the probability that one of k samples is correct (`pass_at`).
    proxy: mean over chains of the PRM's lowest step score, or a fused verifier's last one. `proxy_wrong`: the same over
        incorrect chains only, `None` if there are none. Both are absent without a PRM.
    working: fraction of chains with right working (`right_working`); `right_with_wrong_working`: fraction of correct
        chains with wrong working, `None` if no chain is correct.
    disagreement: mean distance between the two PRMs' scores of a step, `None` without steps; `second`: the second one's
        `proxy`. Both are absent without a second PRM.
    tokens, steps: means per chain. blank, truncated: fractions of chains. `examples`: the list by `examples`.
    """
    correct_PN = np.array([group.correct_G for group in groups])
    problems = np.arange(len(groups))
    interval = bootstrap(functools.partial(weighted_mean, correct_PN.mean(1)), problems, seed=seed).json()
    chains = [sample for group in groups for sample in group.samples]
    verdicts = [[right_working(working(g.record, sample.steps)) for sample in g.samples] for g in groups]
    working_PN = np.array(verdicts, bool)
    figures: dict[str, Any] = {
        "gold": interval["value"], "gold_low": interval["low"], "gold_high": interval["high"],
        "gold_P": correct_PN.mean(1).tolist(),
        "pass": pass_at(correct_PN >= 1),
        "working": working_PN.mean(),
        "right_with_wrong_working": _mean(~working_PN[correct_PN >= 1]),
        "tokens": np.mean([len(chain.ids) for chain in chains]),
        "steps": np.mean([len(chain.steps) for chain in chains]),
        "blank": np.mean([not chain.steps for chain in chains]),
        "truncated": np.mean([not chain.ended for chain in chains]),
    }  # fmt: skip
    figures |= _proxies(groups) | {"examples": examples(groups, verdicts)}
    return {key: float(x) if isinstance(x, np.floating) else x for key, x in figures.items()}


def drift(trainer: Trainer, layout: Layout, groups: Sequence[Group], config: RLExperiment) -> float | None:
    """Returns KL(policy, reference) in nats per token, averaged over the tokens of held-out samples.

    `trainer` must have a reference. Every process must call it; parameters stay unchanged. The mean is `None` if no
    sample has tokens.

    Each token's KL is a sum over the vocabulary at the sampling temperature, given the earlier tokens.
    """
    data = dataclasses.replace(trainer.experiment.data, supervise="token", slots=config.tokens)
    trees = [
        neutral_tree(group.record["problem"][:60], prompt, samples)
        for group in groups
        for prompt, indices in by_prompt(group, layout).items()
        if (samples := [group.samples[i] for i in indices if group.samples[i].ids])
    ]
    rows, _ = packed(trees, data, chain_rows(trainer.experiment.model))
    return trainer.measure(rows, PolicyGradient(temperature=config.temperature, estimator="exact"))["kl"]


def pass_at(correct_PN: Bool[np.ndarray, "P N"]) -> dict[str, float]:
    """Returns the unbiased pass@k, 1 - C(N - c, k) / C(N, k), averaged over P problems with N samples, c correct.

    Keys are k as text: powers of two up to N, and N, e.g. {"1": 0.25, "2": 0.5, "3": 0.75}.
    """
    n = correct_PN.shape[1]
    wrong_P1 = n - correct_PN.sum(1, keepdims=True)
    estimates = {}
    for k in shown_n(n):
        failed_P = np.prod(np.maximum(wrong_P1 - np.arange(k), 0) / (n - np.arange(k)), axis=1)
        estimates[str(k)] = float(np.mean(1 - failed_P))
    return estimates


def chain_scores(scores: Sequence[Float[np.ndarray, " P"]], fused: bool = False) -> Float[np.ndarray, " G"]:
    """Returns every chain's lowest step score, or a fused verifier's last one; 0 for a chain without steps."""
    return np.array([(score_P[-1] if fused else score_P.min()) if len(score_P) else 0.0 for score_P in scores])


def _proxies(groups: Sequence[Group]) -> dict[str, Any]:
    if not groups or groups[0].scores is None:
        return {}
    first = [scores for group in groups for scores in group.scores or []]
    wrong_N = np.concatenate([group.correct_G < 1 for group in groups])
    score_N = np.concatenate([group.chain_scores for group in groups])
    figures = {"proxy": score_N.mean(), "proxy_wrong": _mean(score_N[wrong_N])}
    if groups[0].second is not None:
        other = [scores for group in groups for scores in group.second or []]
        apart = np.abs(np.concatenate(first) - np.concatenate(other))
        figures |= {"second": chain_scores(other).mean(), "disagreement": _mean(apart)}
    return figures


def examples(groups: Sequence[Group], verdicts: Sequence[Sequence[bool]]) -> list[dict[str, Any]]:
    """Returns the 3 incorrect chains that the PRM rates highest (without one, the first), or fewer.

    Keys: `problem` and `answer` (the record's true one), `steps`, `scores` (by step, 4 digits; `None` without a PRM),
    `right_working` (from `verdicts`, by group and sample) and `ended` (else cut off).
    """
    rows = []
    for group, right in zip(groups, verdicts, strict=True):
        for i, sample in enumerate(group.samples):
            if group.correct_G[i] < 1:
                scores = group.scores[i] if group.scores else None
                top = float(group.chain_scores[i]) if scores is not None else 0.0
                rows.append((-top, len(rows), {
                    "problem": group.record["problem"], "answer": group.record["answer"], "steps": list(sample.steps),
                    "scores": None if scores is None else [round(float(x), 4) for x in scores],
                    "right_working": bool(right[i]), "ended": sample.ended,
                }))  # fmt: skip
    return [row for *_, row in sorted(rows, key=lambda row: row[:2])[:EXAMPLES]]


def step_auroc(groups: Sequence[Group], scores: Scores, working: Working) -> float | None:
    """Returns the AUROC of step scores against the check of the working; `None` unless it finds right and wrong steps.

    Steps with the verdict `None` are left out. Raises ValueError if counts of scores and steps differ.
    """
    pairs = [
        (score, right)
        for group, scores_G in zip(groups, scores, strict=True)
        for sample, score_P in zip(group.samples, scores_G, strict=True)
        for score, right in zip(score_P, working(group.record, sample.steps), strict=True)
        if right is not None
    ]
    if len({right for _, right in pairs}) < 2:
        return None
    score_N, right_N = map(np.array, zip(*pairs, strict=True))
    return float(auroc(score_N, right_N))


def train_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Returns an update's figures; there must be a group.

    Means over chains: `chain_tokens`, `chain_steps`, and the fractions `blank` and `truncated`. Means over groups:
    `reward` (`Group.correct_G`), the fraction `same_reward` with equal rewards, and with a PRM `proxy`, the chain
    scores. For episodes also the fraction `lost`, and `observed`, the environment's tokens per episode. All are floats
    in one flat dictionary.
    """
    chains = [sample for group in groups for sample in group.samples]
    figures = {
        "reward": np.mean([group.correct_G.mean() for group in groups]),
        "same_reward": np.mean([np.ptp(group.reward_G) == 0 for group in groups]),
        "chain_tokens": np.mean([len(chain.ids) for chain in chains]),
        "chain_steps": np.mean([len(chain.steps) for chain in chains]),
        "blank": np.mean([not chain.steps for chain in chains]),
        "truncated": np.mean([not chain.ended for chain in chains]),
    }
    if groups[0].samples[0].episode is not None:
        lost = sum(group.lost for group in groups)
        figures |= {"lost": lost / (lost + len(chains)), "observed": np.mean([(~x.sampled_T).sum() for x in chains])}
    if groups and groups[0].scores is not None:
        figures["proxy"] = np.mean([group.chain_scores.mean() for group in groups])
    return {name: float(value) for name, value in figures.items()}


def _mean(value_N: np.ndarray) -> float | None:
    return float(np.mean(value_N)) if len(value_N) else None

"""`Judge`: a critique-writing policy with a PRM's interface. `Rubric`: one judge per criterion.

judge = load_judge("judge.json")
judge.score(problem, steps)          # one score per step, NaN if no critique could be read
judge.score_many(records)            # records of any kind, with their scores and critiques
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import numpy as np
from jaxtyping import Float

from jprm.methods.judge.critiques import COUNTS, KEY, Critique, JudgePrompt, ask, cost, read, report
from jprm.methods.judge.window import Window
from jprm.methods.policy.protocol import Policy
from jprm.score.scale import PROBABILITY, Scale
from jprm.score.scorer import CHUNK
from jprm.tree import (
    NONE,
    ReasoningTree,
    above_of,
    as_written,
    chain_tree,
    chains_of,
    in_order_of,
    path_to,
    record_of,
    tree_of,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """Scores, in [0, 1], and `jprm.methods.judge.critiques.report` on a tree with N nodes."""

    score_N: Float[np.ndarray, " N"]  # float32; NaN where no critique could be read
    report: dict[str, Any]  # counts, generated tokens, and `critiques`; JSON values


class Asked(NamedTuple):
    """A question, the paths it covers (as node indices of a tree), and its critiques."""

    question: str
    paths: list[Sequence[int]]
    critiques: list[Critique]


class ByCritiques:
    """Base class of scorers by critiques: `Judge`, `Rubric` and `Comparison`.

    Every scoring method waits for the policy, raises PolicyError if every critique failed, and asks anew at each call;
    the policy may keep its samples (`KeptPolicy`). A prompt that runs code raises OSError without a sandbox. Scores are
    float32 in [0, 1], NaN if no critique could be read.
    """

    policy: Policy  # who writes the critiques
    samples: int  # critiques of each question
    seed: int  # number of the first one
    semantics = "correctness"
    scale: Scale = PROBABILITY

    @property
    def name(self) -> str:
        """Identifies the policy and its questions, e.g. `POLICY/plain#1a2b3c4d`."""
        raise NotImplementedError

    @property
    def identity(self) -> dict[str, Any]:
        """`{"judge": name, "samples": ..., "seed": ...}`: all that scores depend on, for a scored file's request."""
        return {"judge": self.name, "samples": self.samples, "seed": self.seed}

    def about(self, records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Describes the scorer in results: `name`, `folder` (the policy's name), `step` (0) and `judge` (`cost`).

        Reads all records, which must be scored: raises KeyError if one has no `judge`.
        """
        return {"name": self.name, "folder": self.policy.name, "step": 0, "judge": cost(records)}

    def reported(
        self, trees: Sequence[ReasoningTree], missing: Sequence[Container[int]] | None = None
    ) -> list[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Returns (outputs by name, (N,) each, and the `report` on all critiques) for each tree of N nodes.

        If `missing` is given, asks only about these nodes of each tree (for prompts about whole chains: about paths
        with such a node), and the other outputs are NaN. Context nodes are NaN.

        Raises PolicyError if every critique failed (for a rubric: every critique by one criterion), OSError if the
        prompt runs code and there is no sandbox.
        """
        raise NotImplementedError

    def renumbered(self, attempts: int) -> Self:
        """Returns a copy whose critiques have later numbers: from `seed` + `samples` * `attempts` on."""
        return dataclasses.replace(cast(Any, self), seed=self.seed + self.samples * attempts)

    def outputs_of(self, trees: Sequence[ReasoningTree]) -> list[dict[str, Float[np.ndarray, " N"]]]:
        """Returns {"score" and further `output_names`: (N,) float32} per tree; NaN if no critique could be read."""
        return [outputs for outputs, _ in self.reported(trees)]

    def score_trees(self, trees: Sequence[ReasoningTree]) -> list[Float[np.ndarray, " N"]]:
        """Returns (N,) float32 for each tree of N nodes; NaN if no critique could be read."""
        return [outputs["score"] for outputs in self.outputs_of(trees)]

    def score_many(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the records in order with their scores, and the critiques with their cost under `judge`.

        Outputs other than the score go under `outputs`. If any step of a chain or sample lacks an output, it gets no
        scores at all; a node without output gets no `score`. A run with turns without a score is incomplete: see
        `completed`.

        Raises:
          RecordError: an invalid record.
          PolicyError: every critique of a batch of 64 records (`CHUNK`) failed.
          OSError: the prompt runs code, and there is no sandbox.
        """
        records = iter(records)
        while chunk := list(itertools.islice(records, CHUNK)):
            trees = [tree_of(record) for record in chunk]
            for record, tree, (outputs, about) in zip(chunk, trees, self.reported(trees), strict=True):
                yield judged_record(record, with_outputs(tree, outputs), {"name": self.name, **about})

    def completed(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the scored records in order; asks again about turns without a score in incomplete ones.

        The critiques have new numbers, and their counts are added to the record's `judge`, whose `attempts` counts the
        calls, from 2 on (absent after `score_many`). `incomplete` there lists the turns that are still without a score.
        Complete records are unchanged, and chains and pools even if they lack scores. Raises like `score_many`.
        """
        records = iter(records)
        while chunk := list(itertools.islice(records, CHUNK)):
            by_attempts: dict[int, list[int]] = {}
            for i in filter(lambda i: missing_of(chunk[i]), range(len(chunk))):
                by_attempts.setdefault(chunk[i][KEY].get("attempts", 1), []).append(i)
            for attempts, places in by_attempts.items():
                trees = [tree_of(chunk[i]) for i in places]
                asked = self.renumbered(attempts).reported(trees, [missing_of(chunk[i]) for i in places])
                for i, tree, (outputs, about) in zip(places, trees, asked, strict=True):
                    nodes = with_outputs(tree, outputs).nodes
                    pairs = zip(tree.nodes, nodes, strict=True)
                    nodes = tuple(new if old.score is None else old for old, new in pairs)
                    before = {key: value for key, value in chunk[i][KEY].items() if key != INCOMPLETE}
                    sums = {key: before.get(key, 0) + value for key, value in about.items() if key in COUNTS}
                    critiques = [*before["critiques"], *about["critiques"]]
                    about = {**before, **sums, "critiques": critiques, "attempts": attempts + 1}
                    chunk[i] = judged_record(chunk[i], dataclasses.replace(tree, nodes=nodes), about)
            yield from chunk


INCOMPLETE = "incomplete"
"""Key of a run's report: the nodes of turns without a score."""


def judged_record(record: Mapping[str, Any], tree: ReasoningTree, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of a tree with a judge's scores, and the report `about` under `judge`, keys ordered as before.

    A run (tree of messages) lists the nodes of turns without a score there, under `incomplete`; absent if complete.
    """
    missing = [i for i in tree.steps if tree.nodes[i].score is None] if tree.of_messages else []
    about = {**about, INCOMPLETE: missing} if missing else about
    return in_order_of(record, record_of(tree) | {KEY: about})


def missing_of(record: Mapping[str, Any]) -> Sequence[int]:
    """Returns the node indices of turns that a judge left without a score, `record["judge"]["incomplete"]`.

    Empty if the record is complete, or not judged.
    """
    about = record.get(KEY)
    return about.get(INCOMPLETE, ()) if isinstance(about, Mapping) else ()


@dataclasses.dataclass(frozen=True)
class Judge(ByCritiques):
    """A generative verifier, ready to score.

    A critique scores a step by the probability of its verdict's token if the policy reports log-probabilities
    (`logprobs`), else 1 or 0; on a scale, as in `JudgePrompt.scale`. The step's score is the mean over readable
    critiques. Truncated, unreadable and failed critiques are only counted. For prompts about whole chains, steps after
    the first incorrect one get its score: they are not judged, and the rule `min` ignores them.

    Raises ValueError if `samples` is below 1, or a window comes with a prompt that `converses`.
    """

    policy: Policy
    prompt: JudgePrompt  # what the policy is asked
    samples: int = 1
    seed: int = 0
    window: Window | None = None  # bounds on a question; None: a question shows all earlier steps

    output_names = ("score",)

    def __post_init__(self):
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}: it must be 1 or more")
        if self.window and self.prompt.converses:
            raise ValueError(f"a window bounds a question, and {self.prompt.name!r} repeats all earlier critiques")

    @property
    def name(self) -> str:
        """Identifies the policy, the prompt and the window, e.g. `POLICY/plain#1a2b3c4d`."""
        fields = dataclasses.asdict(self.prompt)
        fields = {key: value for key, value in fields.items() if key != "scale" or value}  # a later field's default
        fields |= {"window": dataclasses.asdict(self.window)} if self.window else {}
        return f"{self.policy.name}/{self.prompt.name}#{digest_of(fields)}"

    @property
    def rule(self) -> str:
        """The rule from step scores to a chain score: `prod` if the prompt asks about a step, else `min`."""
        return "prod" if self.prompt.asks == "step" else "min"

    def score(self, problem: str, steps: Sequence[str]) -> Float[np.ndarray, " P"]:
        """Returns one score per step, (P,) float32; NaN if no critique could be read.

        Raises:
          TypeError, ValueError: as `jprm.score.scorer.PRM.score`.
          PolicyError: every critique failed.
          OSError: the prompt runs code, and there is no sandbox.
        """
        return self.judgements([chain_tree(problem, steps)])[0].score_N

    def reported(
        self, trees: Sequence[ReasoningTree], missing: Sequence[Container[int]] | None = None
    ) -> list[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Returns (`{"score": (N,)}`, report) for each tree, from `judgements`; `missing` and errors as there."""
        return [({"score": judgement.score_N}, judgement.report) for judgement in self.judgements(trees, missing)]

    def judgements(
        self, trees: Sequence[ReasoningTree], missing: Sequence[Container[int]] | None = None
    ) -> list[Judgement]:
        """Judges each tree, or only its `missing` nodes (indices per tree): other scores are NaN.

        A prompt about whole chains judges all steps on a path with a missing node. Context nodes have NaN. Raises
        PolicyError if every critique failed, OSError if the prompt runs code and there is no sandbox.
        """
        paths = [self.paths(tree) for tree in trees]
        if missing is not None:
            paths = [
                [path for path in of_tree if any(node in wanted for node in self._asked(path))]
                for of_tree, wanted in zip(paths, missing, strict=True)
            ]
        asked = self.critiques(trees, paths)
        return [judgement_of(self.prompt, tree, answers) for tree, answers in zip(trees, asked, strict=True)]

    def paths(self, tree: ReasoningTree) -> list[list[int]]:
        """Returns the paths covered by questions about a tree, as the node indices of their steps, in order.

        With a window, a prompt about whole chains has a path for each part that is asked about at once.
        """
        if self.prompt.asks != "step":
            chains = chains_of(tree)
            if self.window is None:
                return chains
            texts = [[step_text(tree, i) for i in chain] for chain in chains]
            return [
                [chain[place] for place in group]
                for chain, of_chain in zip(chains, texts, strict=True)
                for group in self.window.groups(of_chain)
            ]
        above, paths = above_of(tree), {-1: []}
        for i in tree.steps:
            paths[i] = [*paths[above[i]], i]
        return [paths[i] for i in tree.steps]

    def _asked(self, path: Sequence[int]) -> Sequence[int]:
        """Returns the nodes on a path that its question is about."""
        return path[-1:] if self.prompt.asks == "step" else path

    def critiques(self, trees: Sequence[ReasoningTree], paths: Sequence[Sequence[Sequence[int]]]) -> list[list[Asked]]:
        """Returns the asked questions and critiques for the given `paths` in each tree: a list per tree, in order.

        Equal questions about a tree are asked once, and name all their paths.

        A conversation needs earlier steps' critiques, so it always covers all paths.

        Raises PolicyError if every critique failed, OSError if the prompt runs code and there is no sandbox.
        """
        answers: list[list[Asked]] = [[] for _ in trees]
        if self.prompt.converses:
            paths = [self.paths(tree) for tree in trees]
            depths = range(1, 1 + max((len(path) for of_tree in paths for path in of_tree), default=0))
            rounds = [[[path for path in of_tree if len(path) == depth] for of_tree in paths] for depth in depths]
        else:
            rounds = [paths]
        for at_depth in rounds:
            critique_of = [{path[-1]: a.critiques[0].text for a in of_tree for path in a.paths} for of_tree in answers]
            asked = [self._questions(*question) for question in zip(trees, at_depth, critique_of, strict=True)]
            written = iter(self.ask([question for questions in asked for question in questions]))
            for answer, questions in zip(answers, asked, strict=True):
                answer += [Asked(question, about, next(written)) for question, about in questions.items()]
        return answers

    def ask(self, questions: Sequence[str]) -> list[list[Critique]]:
        """Returns `samples` critiques per question, in order; waits for the policy.

        Raises PolicyError if every critique failed, OSError if the prompt runs code and there is no sandbox.
        """
        return ask(self.policy, self.prompt, questions, self.samples, self.seed)

    def _questions(
        self, tree: ReasoningTree, paths: Sequence[Sequence[int]], critique_of: Mapping[int, str]
    ) -> dict[str, list[Sequence[int]]]:
        """Returns the paths covered by each question."""
        questions: dict[str, list[Sequence[int]]] = {}
        if not paths:
            return questions
        texts = {i: step_text(tree, i) for i in tree.steps}
        if self.window is not None:
            above = above_of(tree)
            count = len(self.paths(tree))
            spare = self.window.spare([*texts.values()], characters(tree), count)
            for path in paths:
                asked = self._asked(path)
                earlier = [texts[i] for i in path_to(above[asked[0]], above)]
                of_asked = [texts[i] for i in asked]
                question = self.window.question(self.prompt, tree.plain_problem, earlier, of_asked, spare)
                questions.setdefault(question, []).append(path)
            return questions
        for path in paths:
            steps, critiques = [texts[i] for i in path], [critique_of.get(i, "") for i in path[:-1]]
            questions.setdefault(self.prompt.filled(tree.plain_problem, steps, critiques), []).append(path)
        return questions


def step_text(tree: ReasoningTree, node: int) -> str:
    """Returns the step at a node index as the judge sees it: in a chain, its text.

    In a tree of messages: the messages since the last turn (except one equal to the problem), then the turn, each as
    `[role] text`; a tool call is a line `call NAME(JSON)`.
    """
    if not tree.of_messages:
        return tree.nodes[node].text
    parts, at = [], node
    while at >= 0 and (at == node or not tree.nodes[at].is_step):
        message = tree.nodes[at]
        calls = [call.get("function", call) for call in message.extra.get("tool_calls") or ()]
        written = [f"call {call['name']}({json.dumps(call.get('arguments'))})" for call in calls]
        if at == node or message.text != tree.problem:  # the question states the problem already
            parts.append(f"[{message.role}] " + "\n".join(filter(None, [message.text, *written])))
        at = message.parent
    return "\n".join(parts[::-1])


def characters(tree: ReasoningTree) -> int:
    """Counts the characters of a record's text: the problem once, steps, context, and the calls' arguments as JSON."""
    calls = [call.get("function", call) for node in tree.nodes for call in node.extra.get("tool_calls") or ()]
    written = sum(len(json.dumps(call.get("arguments"), ensure_ascii=False)) for call in calls)
    return written + sum(len(node.text) for node in tree.nodes) + (0 if tree.of_messages else len(tree.problem))


def judgement_of(prompt: JudgePrompt, tree: ReasoningTree, answers: Sequence[Asked]) -> Judgement:
    """Returns the mean score per node over readable critiques (NaN if there are none), and the report on all."""
    scores: list[list[float]] = [[] for _ in tree.nodes]
    judged, sent = [], 0
    for question, paths, critiques in answers:
        sent += len(question) * len(critiques)
        for critique in critiques:
            reading = read(prompt, critique, len(paths[0]))
            judged.append(([path[-1] for path in paths], critique, reading))
            for path in paths if reading.scores else ():
                for node, value in zip(path[-len(reading.scores) :], reading.scores, strict=True):
                    scores[node].append(value)
    score_N = np.array([np.mean(values) if values else np.nan for values in scores], np.float32)
    return Judgement(score_N, report(judged, sent))


def with_outputs(tree: ReasoningTree, outputs: Mapping[str, Float[np.ndarray, " N"]]) -> ReasoningTree:
    """Returns the tree with a judge's outputs, replacing scores; for a chain, sample or turn, at all steps or at none.

    `outputs` has (N,) values by name: `score` becomes the nodes' score, others their `outputs`. A step with NaN in
    any output gets no output at all.
    """
    known_N = ~np.isnan(np.sum(list(outputs.values()), axis=0))
    unit_of: list[int] = []  # of each node: the first one of its chain, sample or turn
    for i, node in enumerate(tree.nodes):
        joined = node.parent >= 0 and (node.continues if tree.of_messages else tree.kind != "tree")
        unit_of.append(unit_of[node.parent] if joined else i)
    unknown = {unit_of[i] for i in tree.steps if not known_N[i]}
    known_N = np.array([unit not in unknown for unit in unit_of])
    nodes = []
    for i, node in enumerate(tree.nodes):
        if node.is_step:
            values = {name: as_written(value_N[i]) for name, value_N in outputs.items()} if known_N[i] else {}
            node = dataclasses.replace(node, score=values.pop("score", None), outputs=values or NONE)
        nodes.append(node)
    return dataclasses.replace(tree, nodes=tuple(nodes))


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


# ---- Several criteria, each a question and an output of its own; the score is their weighted mean.
#
#     "judge": {"prompt": "rubric", "criteria": {
#         "arithmetic": {"weight": 2, "text": "Every number in the step is computed correctly."},
#         "relevance": {"weight": 1, "text": "The step helps to solve the problem."}}}
#
# A user's prompt, in the section or a criterion, must contain {criterion}, which becomes the criterion's text.


@dataclasses.dataclass(frozen=True)
class Criterion:
    """A criterion: its text, its weight in the score, and its prompt if it differs from the section's."""

    text: str
    weight: float = 1.0
    prompt: str = ""

    def __post_init__(self):
        if not self.text.strip():
            raise ValueError("text is blank: write what the step must fulfil")
        if self.prompt and "{criterion}" not in self.prompt:
            raise ValueError("prompt lacks {criterion}, which the criterion's text replaces")
        if not (self.weight >= 0 and np.isfinite(self.weight)):
            raise ValueError(f"weight is {self.weight}: it must be 0 or more")


@dataclasses.dataclass(frozen=True)
class Rubric(ByCritiques):
    """Judges with a shared policy, one per criterion, ready to score.

    A step's score is the weighted mean over criteria; NaN if any criterion could not be read. A criterion with weight 0
    is an output but does not count. A name in `criteria` is also an output's name.

    Raises ValueError if the weights sum to 0, or a criterion is called `score`.
    """

    policy: Policy
    judges: Mapping[str, Judge]
    criteria: Mapping[str, Criterion]
    samples: int = 1
    seed: int = 0

    def __post_init__(self):
        if not sum(criterion.weight for criterion in self.criteria.values()) > 0:
            raise ValueError("the criteria's weights sum to 0: give one a weight above 0")
        if "score" in self.criteria:
            raise ValueError("a criterion is called score, which is the name of their mean: rename it")

    @property
    def name(self) -> str:
        """Identifies the policy, the prompt and the criteria, e.g. `POLICY/rubric#1a2b3c4d`."""
        about = [[judge.name, self.criteria[name].weight] for name, judge in self.judges.items()]
        return f"{self.policy.name}/rubric#{digest_of(about)}"

    @property
    def rule(self) -> str:
        return next(iter(self.judges.values())).rule

    @property
    def output_names(self) -> tuple[str, ...]:
        return ("score", *self.judges)

    def renumbered(self, attempts: int) -> Self:
        judges = {name: judge.renumbered(attempts) for name, judge in self.judges.items()}
        return dataclasses.replace(super().renumbered(attempts), judges=judges)

    def reported(
        self, trees: Sequence[ReasoningTree], missing: Sequence[Container[int]] | None = None
    ) -> list[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Returns ({"score" and each criterion's name: (N,)}, report) per tree, or of its `missing` nodes (else NaN).

        In the report, counts are sums over criteria, and each critique names its `criterion`. Raises PolicyError if
        every critique by one criterion failed, OSError if a criterion's prompt runs code and there is no sandbox.
        """
        judged = {name: judge.judgements(trees, missing) for name, judge in self.judges.items()}
        return [self.joined({name: judgements[i] for name, judgements in judged.items()}) for i in range(len(trees))]

    def joined(self, judgements: Mapping[str, Judgement]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Returns a tree's outputs and report, as `reported`, from {criterion's name: its judgement}."""
        weights = {name: criterion.weight for name, criterion in self.criteria.items() if criterion.weight}
        total = sum(judgements[name].score_N.astype(np.float64) * weight for name, weight in weights.items())
        score_N = np.asarray(total / sum(weights.values()), np.float32)
        reports = {name: judgement.report for name, judgement in judgements.items()}
        report: dict[str, Any] = {key: sum(critiqued[key] for critiqued in reports.values()) for key in COUNTS}
        report["critiques"] = [
            {"criterion": name} | entry for name, critiqued in reports.items() for entry in critiqued["critiques"]
        ]
        return {"score": score_N} | {name: judgement.score_N for name, judgement in judgements.items()}, report

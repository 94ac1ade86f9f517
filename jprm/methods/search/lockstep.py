"""Searches many problems at once: all methods ask, the policy samples, the scorer scores, and the methods continue.

A method is a generator over one problem's tree, written as if its problem were alone. A round over all problems is one
policy call per requested sample count (one if all are equal) and one scorer call per step depth in the samples
(one if a sample is a step).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from jaxtyping import Float

from jprm.methods.judge.critiques import Critique, Reading, read
from jprm.methods.judge.judge import Judge, Rubric
from jprm.methods.policy.protocol import Policy, Problem, Sample
from jprm.methods.policy.sample_cache import PolicyError
from jprm.methods.search.growing_tree import CHOICES, Ask, Choice, Draw, GrowingTree, Steps
from jprm.score.scale import PROBABILITY, RULES
from jprm.token_tree import token_tree
from jprm.tree import Node, ReasoningTree, path_to


class Method(Protocol):
    """A frozen config with the running method, e.g. `jprm.methods.search.beam.Beam`.

    `kind` is the record kind to write. `steps` returns a new generator (`Steps`) for one problem's tree; `rule`, e.g.
    `min`, makes a chain score from step scores.
    """

    kind: ClassVar[Literal["pool", "tree"]]

    def steps(self, tree: GrowingTree, rule: str) -> Steps: ...


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Search settings. Raises ValueError if one is out of range, or `decided` comes without `choose="majority"`.

    Attributes:
      method: a config, e.g. `BestOfN(16)` or `Beam(4, 4)`.
      rule: one of `jprm.score.scale.RULES`, from step scores to a chain score.
      choose: `best` returns the finished chain with the highest score; `majority` the most frequent answer, `weighted`
          the answer with the largest score sum, each with its best chain.
      budget: generated tokens per problem, at most; by default without limit. Samples that will not fit, by the mean
          length so far, are not requested. One that turns out too long, and all after it, are marked `over_budget`.
      seed: number of a prefix's first sample; later ones count up from it.
      at_once: problems to advance together.
    """

    method: Method
    rule: str
    choose: Choice = "best"
    budget: int | None = None
    seed: int = 0
    at_once: int = 32

    def __post_init__(self):
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r}: use one of {', '.join(RULES)}")
        if self.choose not in CHOICES:
            raise ValueError(f"choose is {self.choose!r}: use one of {', '.join(CHOICES)}")
        if getattr(self.method, "decided", 0) and self.choose != "majority":
            raise ValueError(f"decided stops a majority vote, but choose is {self.choose!r}")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget is {self.budget} tokens: give at least the tokens of one step")
        if self.at_once < 1:
            raise ValueError(f"at_once is {self.at_once}: it must be at least 1")


@dataclasses.dataclass
class _Running:
    index: int
    tree: GrowingTree
    steps: Steps
    asks: list[Ask]
    last: bool = False  # the budget ends with this round


def search(
    problems: Iterable[Problem], policy: Policy, scorer: LiveScorer, config: SearchConfig
) -> Iterator[tuple[int, GrowingTree]]:
    """Yields (index from 0, finished search) for every problem, in order of completion.

    Lazy: `config.at_once` problems are read and searched at a time; each round waits for the policy and the scorer. All
    handles of a yielded tree are released. `tree.ended` is the reason for its end: `done`, `budget`, or the method's
    limit (`max_steps`, `simulations`, `rounds`). A failed sample is counted in `tree.failed`, and the search continues.

    Raises PolicyError if every sample in a round failed, so the policy seems down. But if it has answered before,
    and at most half the problems that started together (or one) are left, the failures count as theirs: a prefix may
    have grown too long. Other errors of the policy and the scorer pass.
    """
    numbered = enumerate(problems)
    answered = [False]  # whether the policy ever answered
    means = getattr(scorer, "scale", PROBABILITY), getattr(scorer, "semantics", "correctness")
    finish = getattr(scorer, "finished", None)
    while chunk := list(itertools.islice(numbered, config.at_once)):
        roots = scorer.open([problem.text for _, problem in chunk])
        running = []
        for (index, problem), root in zip(chunk, roots, strict=True):
            tree = GrowingTree(problem, root, config.budget, *means, finish)
            running.append(_Running(index, tree, config.method.steps(tree, config.rule), []))
        ended = _advance(running, lambda run: next(run.steps))
        while True:
            for run in ended:
                _release(scorer, run.tree, all_nodes=True)
                yield run.index, run.tree
            running = [run for run in running if not run.tree.ended]
            if not running:
                break
            drawn = _draw(running, policy, config.seed, answered, few=max(1, len(chunk) // 2))
            _score([run.tree for run in running], scorer)
            ended = _advance(running, lambda run, drawn=drawn: run.steps.send(drawn[run.index]))
            for run in running:
                _release(scorer, run.tree)


def _advance(running: list[_Running], resume: Callable[[_Running], list[Ask]]) -> list[_Running]:
    """Collects every method's next requests. Returns the finished searches, with `tree.ended` set."""
    for run in running:
        try:
            run.asks = resume(run)
        except StopIteration as stop:
            run.tree.ended = "budget" if run.last else stop.value or "done"
            continue
        if not run.last:
            run.asks, run.last = _within_budget(run.tree, run.asks)
            if any(ask.n for ask in run.asks):
                continue
        run.tree.ended = "budget"
        run.steps.close()
    return [run for run in running if run.tree.ended]


def _within_budget(tree: GrowingTree, asks: list[Ask]) -> tuple[list[Ask], bool]:
    """Drops samples beyond the budget; returns the requests, and whether any were dropped."""
    share, kept = 1.0, []
    for ask in asks:
        all_of_it = tree.affordable(ask.until)
        room = all_of_it if all_of_it == math.inf else share * all_of_it
        n = ask.n if room >= ask.n else math.floor(room + 1e-9)
        share -= n / all_of_it if n else 0.0
        kept.append(dataclasses.replace(ask, n=n))
        if n < ask.n:
            kept += [dataclasses.replace(rest, n=0) for rest in asks[len(kept) :]]
            return kept, True
    return kept, False


def _draw(
    running: list[_Running], policy: Policy, seed: int, answered: list[bool], few: int
) -> dict[int, list[list[Draw]]]:
    """Samples for all requests and adds them to the trees. Returns each method's usable draws, by problem."""
    calls = collections.defaultdict(list)  # requests with equal n and first sample number share a call
    for run in running:
        for place, ask in enumerate(run.asks):
            if ask.n:
                first = seed + run.tree.asked[ask.node]
                run.tree.asked[ask.node] += ask.n
                calls[ask.until, first, ask.n].append((run, place, ask))
    samples: dict[tuple[int, int], list[Sample]] = {}
    for (until, first, n), members in calls.items():
        drawn = policy.sample([run.tree.prefix(ask.node) for run, _, ask in members], n, until=until, seed=first)
        samples |= {(run.index, place): batch for (run, place, _), batch in zip(members, drawn, strict=True)}
    failed = [sample.error for batch in samples.values() for sample in batch if sample.finish_reason == "error"]
    down = len(failed) == sum(map(len, samples.values()))
    if down and (len(running) > few or not answered[0]):
        way_on = "Then run the same command: earlier samples are kept"
        raise PolicyError(
            f"policy {policy.name} failed at all {len(failed)} samples of a round: {failed[-1]}. {way_on}"
        )
    answered[0] |= not down
    by_problem = {}
    for run in running:
        draws = [
            [run.tree.add(ask.node, sample, ask.until) for sample in samples.get((run.index, place), ())]
            for place, ask in enumerate(run.asks)
        ]
        by_problem[run.index] = [[draw for draw in row if draw and not draw.over_budget] for row in draws]
        run.last |= run.tree.overspent > 0
    return by_problem


def _score(trees: list[GrowingTree], scorer: LiveScorer) -> None:
    """Scores all new nodes, parents before children."""
    new = [(tree, node) for tree in trees for node in tree.new]
    for tree in trees:
        tree.new.clear()
    while new:
        parents = [tree.root_handle if (i := tree.parent[node]) < 0 else tree.handle[i] for tree, node in new]
        ready = [(*item, parent) for item, parent in zip(new, parents, strict=True) if parent is not None]
        new = [item for item, parent in zip(new, parents, strict=True) if parent is None]
        assert ready, "a method requested samples after a node that it had released"
        handles, score_P = scorer.extend([p for _, _, p in ready], [tree.text[node] for tree, node, _ in ready])
        for (tree, node, _), handle, score in zip(ready, handles, score_P, strict=True):
            tree.handle[node], tree.score[node] = handle, float(score)
            if isinstance(scorer, LiveJudge):
                tree.judged[node] = scorer.take(handle)


def _release(scorer: LiveScorer, tree: GrowingTree, all_nodes: bool = False) -> None:
    """Releases the handles of released nodes, or of all nodes."""
    nodes = range(len(tree.handle)) if all_nodes else tree.released
    gone = [handle for node in nodes if (handle := tree.handle[node]) is not None]
    for node in nodes:
        tree.handle[node] = None
    if all_nodes:
        gone.append(tree.root_handle)
    tree.released.clear()
    if gone:
        scorer.release(gone)


# --------------------------------------------------------------------------- scorers of trees that grow during a search


class LiveScorer(Protocol):
    """Scores trees while they grow. A handle, an int, is a prefix: a problem, or a step after another handle.

    `tokens` counts the tokens computed so far, without padding. Methods wait for the model.
    """

    tokens: int

    def open(self, problems: Sequence[str]) -> list[int]:
        """Returns a handle for every problem."""
        ...

    def extend(self, parents: Sequence[int], steps: Sequence[str]) -> tuple[list[int], Float[np.ndarray, " P"]]:
        """Appends steps[i] after parents[i]; returns the new handles and their float32 scores, NaN if unknown.

        Parents must be handles that are not released; they may be in several trees, and may repeat.
        """
        ...

    def release(self, handles: Sequence[int]) -> None:
        """Frees handles that are never extended again, unless a live descendant needs them; ignores unknown ones."""
        ...


def live_scorer(prm: Any) -> LiveScorer:
    """Returns the fastest scorer that fits `prm`, a model, judge, rubric, fused verifier or `Unscored`.

    `LiveTrees` computes every token once. Models that it refuses, rubrics and fused verifiers (by their sources for
    prefixes) get a `Rescorer`, judges a `LiveJudge`; `Unscored` is returned unchanged. Raises ValueError for a judge
    with a window, or a `Comparison`, which scores only whole pools.
    """
    from jprm.methods.decoding.cache import LiveTrees

    if isinstance(prm, Unscored):
        return prm
    if isinstance(prm, Judge):
        return LiveJudge(prm)
    if getattr(prm, "of_pool", False):
        return Rescorer(prm.of_prefixes())
    if isinstance(prm, Rubric):
        return Rescorer(prm)
    try:
        return LiveTrees(prm)
    except NotImplementedError:
        return Rescorer(prm)


class Unscored:
    """A `LiveScorer` without a model, for whole chains and their majority. Every score is NaN, every handle 0."""

    name, rule, tokens, identity = "none", "last", 0, {}

    def open(self, problems: Sequence[str]) -> list[int]:
        return [0] * len(problems)

    def extend(self, parents: Sequence[int], steps: Sequence[str]) -> tuple[list[int], Float[np.ndarray, " P"]]:
        return [0] * len(steps), np.full(len(steps), np.nan, np.float32)

    def release(self, handles: Sequence[int]) -> None:
        """No-op: handles need no memory."""


class Rescorer:
    """A `LiveScorer` over anything with `score_trees`, e.g. `jprm.PRM`: recomputes the path to every new step.

    `tokens` stays 0 if `prm` has no `layout`. Errors of `score_trees` pass, and the steps then get no handles. The
    texts of all handles stay in memory. `jprm.methods.decoding.cache` computes every token once.
    """

    def __init__(self, prm: Any):
        self.prm, self.tokens = prm, 0
        self.scale = getattr(prm, "scale", PROBABILITY)
        self.semantics = getattr(prm, "semantics", "correctness")
        self._parent: list[int] = []  # by handle; -1 for a problem
        self._text: list[str] = []

    def open(self, problems: Sequence[str]) -> list[int]:
        return [self._new(-1, problem) for problem in problems]

    def extend(self, parents: Sequence[int], steps: Sequence[str]) -> tuple[list[int], Float[np.ndarray, " P"]]:
        paths = [path_to(parent, self._parent) for parent in parents]
        nodes: dict[int, list[Node]] = collections.defaultdict(list)  # by the problem's handle
        index: dict[int, int] = {}  # of a handle in its tree
        place = []
        for (root, *path), step in zip(paths, steps, strict=True):
            at, tree = -1, nodes[root]
            for handle in path:
                if handle not in index:
                    index[handle] = len(tree)
                    tree.append(Node(at, self._text[handle]))
                at = index[handle]
            place.append((root, len(tree)))
            tree.append(Node(at, step))
        trees = {root: ReasoningTree(self._text[root], tuple(tree)) for root, tree in nodes.items()}
        scores = dict(zip(trees, self._score(list(trees.values())), strict=True))
        handles = [self._new(parent, step) for parent, step in zip(parents, steps, strict=True)]
        return handles, np.array([scores[root][i] for root, i in place], np.float32)

    def release(self, handles: Sequence[int]) -> None:
        """No-op: there is only text."""

    def _score(self, trees: list[ReasoningTree]) -> list[np.ndarray]:
        if (layout := getattr(self.prm, "layout", None)) is not None:
            self.tokens += sum(len(token_tree(tree, layout).tokens_N) for tree in trees)
        return self.prm.score_trees(trees)

    def _new(self, parent: int, text: str) -> int:
        self._parent.append(parent)
        self._text.append(text)
        return len(self._text) - 1


class LiveJudge(Rescorer):
    """A `LiveScorer` over a `Judge`: asks about every new step once, whatever the verdicts on earlier steps.

    `tokens` counts generated tokens. `take` returns a step's critiques.

    The constructor raises ValueError for a judge with a window, `extend` PolicyError if all critiques of the new steps
    failed. A score is NaN if no critique could be read.
    """

    def __init__(self, judge: Judge):
        if judge.window is not None:
            raise ValueError(
                f"{judge.name}: a window is for whole runs, and a search asks about new steps. Leave it out"
            )
        super().__init__(judge)
        self._judged: dict[int, list[tuple[Critique, Reading]]] = {}
        self._said: dict[int, str] = {}  # by handle, the first critique, which a conversation repeats

    def extend(self, parents: Sequence[int], steps: Sequence[str]) -> tuple[list[int], Float[np.ndarray, " P"]]:
        judge: Judge = self.prm
        paths, questions = [path_to(parent, self._parent) for parent in parents], []
        for (root, *path), step in zip(paths, steps, strict=True):
            texts, earlier = [*(self._text[i] for i in path), step], [self._said[i] for i in path]
            questions.append(judge.prompt.filled(self._text[root], texts, earlier))
        distinct = list(dict.fromkeys(questions))
        written = dict(zip(distinct, judge.ask(distinct), strict=True))
        self.tokens += sum(critique.tokens for critiques in written.values() for critique in critiques)
        handles = [self._new(parent, step) for parent, step in zip(parents, steps, strict=True)]
        score_P = np.full(len(handles), np.nan, np.float32)
        for i, (handle, path, question) in enumerate(zip(handles, paths, questions, strict=True)):
            critiques = written[question]
            readings = [read(judge.prompt, critique, len(path)) for critique in critiques]
            if values := [reading.scores[-1] for reading in readings if reading.scores]:
                score_P[i] = np.mean(values)
            self._judged[handle] = list(zip(critiques, readings, strict=True))
            self._said[handle] = critiques[0].text
        return handles, score_P

    def take(self, handle: int) -> list[tuple[Critique, Reading]]:
        """Returns the critiques of the step with this handle and their readings, and forgets them.

        Raises KeyError at a second call, or for a problem's handle.
        """
        return self._judged.pop(handle)

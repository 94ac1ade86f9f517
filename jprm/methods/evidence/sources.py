"""Sources of evidence: named numbers about every step and chain of a tree.

A source maps each tree (`jprm.tree`) to an array (N, F). Row n describes the chain up to step n, so the last row
describes the whole chain. A row must not depend on later steps of its chain. NaN means no evidence. Sources are named
as in `jprm fuse fit --sources`, e.g. `arithmetic`, `prm=out/run`:

    arithmetic numbers form pool          text only
    stored logprob                        stored step scores; the policy's log-probability
    prm=DIR judge=P.json                  a model's step scores, by several rules
    verdicts=python|coq|tests             a checker's step verdicts, or whether the record's `tests` pass
    module:NAME FILE.py:NAME              a `Source` of your own
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from jprm.io.outputs import digest
from jprm.io.storage import Given, sha256_of
from jprm.methods.answers import canonical_answer, equivalent, number_of
from jprm.methods.evaluate.votes import answer_classes
from jprm.methods.jobs.score import identity
from jprm.methods.verify import verifiers
from jprm.methods.verify.arithmetic import label_of
from jprm.options import find_part
from jprm.score.scale import PROBABILITY, Scale
from jprm.token_tree import token_tree
from jprm.tree import ReasoningTree, chains_of

Read = Callable[[Sequence[ReasoningTree]], Sequence[Float[np.ndarray, "N F"]]]
Rows = Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Source:
    """Computes named numbers about chains, e.g. `arithmetic` with its share of false equations."""

    name: str  # as in `--sources`
    numbers: tuple[str, ...]  # the names of its F numbers
    read: Read  # trees to one array (N, F) for each, N its nodes
    # What it reads beside a chain's text: the chains of its pool, keys of the record, a model. What a search scores
    # while it grows has no pool and no record
    needs: Literal["nothing", "pool", "record", "model"] = "nothing"
    version: int = 1  # raised when a number changes its meaning; fitted verifiers of another version are refused
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the identity of a model that it depends on
    tokens: Callable[[], int] = lambda: 0  # that a model has computed, or a judge generated, for it so far


def of_chains(rows: Callable[[str, Sequence[str]], Rows]) -> Read:
    """Builds a `read` from a function of (problem, steps), which must return one row of numbers per step.

    It gets the steps as a tuple of texts. A row must not depend on later steps; NaN is no evidence.
    Chains that repeat within a call are computed once.
    """

    def read(trees: Sequence[ReasoningTree]) -> list[Float[np.ndarray, "N F"]]:
        cached = functools.lru_cache(maxsize=256)(rows)  # samples of a pool repeat each other
        return [by_node(tree, [cached(tree.problem, steps) for steps in texts(tree)]) for tree in trees]

    return read


def texts(tree: ReasoningTree) -> list[tuple[str, ...]]:
    """Returns the steps of every chain, as texts: a tuple per chain, in the order of `chains_of`."""
    return [tuple(tree.nodes[i].text for i in chain) for chain in chains_of(tree)]


def by_node(tree: ReasoningTree, rows: Sequence[Rows]) -> Float[np.ndarray, "N F"]:
    """Scatters rows, one per step of each chain, into (N, F) by node; the last chain counts at a shared node.

    `rows` has one entry per chain, in the order of `chains_of`, else raises ValueError. (N, 0) if there are no chains;
    NaN at nodes outside all chains.
    """
    chains = chains_of(tree)
    out_NF = np.full((len(tree.nodes), len(rows[0][0]) if rows else 0), np.nan)
    for chain, row in zip(chains, rows, strict=True):
        out_NF[chain] = row
    return out_NF


def _arithmetic(problem: str, steps: Sequence[str]) -> Rows:
    del problem
    labels = labels_of(steps)
    return _counts(labels, [label is None and "=" in step for label, step in zip(labels, steps, strict=True)])


def labels_of(steps: Sequence[str]) -> list[int | None]:
    """Returns each step's arithmetic label (1 true, 0 false, `None` undecided), also checked against earlier values.

    `None` also without an equation; 0 if either check fails. Instruct models write `x = 165 / 1.1` on one line and
    `x = 150` on the next; the second is checked against the first. This is too strict for step labels, since a name may
    change its meaning.
    """
    labels, known = [], {}
    for step in steps:
        of_step = [label_of(step)]
        if named := _quantity(step):
            name, value = named
            if known.get(name, value) != value:
                of_step.append(label_of(f"{known[name]} = {value}"))
            known[name] = value
        labels.append(min((label for label in of_step if label is not None), default=None))
    return labels


_MARKUP = re.compile(r"\\(?:text|mathrm|left|right)\b|[\\{}$*`\[\]()]")
_ITEM = re.compile(r"^\s*(?:\d+[.)]|[-•])\s*")


@functools.lru_cache(maxsize=1 << 16)
def _quantity(step: str) -> tuple[str, str] | None:
    """Splits `Total cost = 3 * 4` into the name before the first equals sign and the value after the last."""
    before, equals, after = step.partition("=")
    if not equals or "==" in step:
        return None
    name = " ".join(_ITEM.sub("", _MARKUP.sub(" ", before.lower())).split())
    name = re.split(r"[.:;,] ", name)[-1].strip(" -:.,")
    value = re.sub(r"\\[\[\]()]|#.*$", "", after.rpartition("=")[2] or after).strip().rstrip(".,")
    named = len(name) <= 80 and any(c.isalpha() for c in name)
    return (name, value) if named and any(c.isdigit() for c in value) else None


def _counts(labels: Sequence[float | None], undecided: Sequence[bool]) -> Rows:
    """Returns per step: whether any step so far is false, and the shares of false, true and undecided steps so far."""
    rows, false, true, left = [], 0, 0, 0
    for k, (label, is_open) in enumerate(zip(labels, undecided, strict=True), start=1):
        false, true, left = false + (label == 0), true + (label == 1), left + is_open
        rows.append((float(false > 0), false / k, true / k, left / k))
    return rows


_CONSTANTS = frozenset((0.0, 1.0, 2.0, 100.0))
_CONTENT = re.compile(r"[a-z]{3,}")
_COMMON = frozenset(
    "the and for how many much does did that this with have has had are was were will would can his her its their"
    " there them they she what when which who all each every than from into your you not".split()
)


@functools.lru_cache(maxsize=1 << 12)
def _asked(problem: str) -> frozenset[str]:
    """Returns the content words of a problem's last question."""
    sentences = [part for part in re.split(r"(?<=[.?!])\s+", problem.strip()) if part]
    question = next((part for part in reversed(sentences) if "?" in part), sentences[-1] if sentences else "")
    return frozenset(_CONTENT.findall(question.lower())) - _COMMON


def _numbers(problem: str, steps: Sequence[str]) -> Rows:
    stated, asked = of_problem(problem), _asked(problem)
    rows, used, known, nowhere, linked = [], set(), set(stated) | _CONSTANTS, 0, 0
    before: set[float] = set()  # results of earlier steps
    for k, step in enumerate(steps, start=1):
        stated_here, computed = numbers(step), set(results(step))
        used |= stated.intersection(stated_here)
        nowhere += len({x for x in stated_here if x not in known and x not in computed})
        linked += bool(before.intersection(stated_here))
        known.update(stated_here)
        before |= computed
        value = value_of_step(step)
        words = asked.intersection(_CONTENT.findall(step.lower()))
        rows.append(
            (
                len(used) / len(stated) if stated else 1.0,
                math.log1p(nowhere),
                float(value is not None and value in stated),
                len(words) / len(asked) if asked else math.nan,
                linked / k,
            )
        )
    return rows


def _form(problem: str, steps: Sequence[str]) -> Rows:
    rows, seen, repeated, characters = [], set(), 0, 0
    for k, step in enumerate(steps, start=1):
        plain = re.sub(r"^\s*(?:step\s*)?[A-Za-z]?\d+\s*[:.)]\s*", "", step.lower())
        repeated += plain in seen
        seen.add(plain)
        characters += len(step)
        value = value_of_step(step)
        size = math.log10(1 + min(abs(value), 1e12)) if value is not None else math.nan
        whole = float(value is not None and value == int(value)) if value is None or abs(value) < 1e15 else 1.0
        negative = float(bool(_NEGATIVE.search(step)))
        rows.append((math.log(k), math.log(characters / k), repeated / k, whole, float(value is None), size, negative))
    del problem
    return rows


def answers_of(tree: ReasoningTree) -> list[Any]:
    """Returns each chain's answer: the last node's `extra["answer"]`, also if null, else its `value_of_step`.

    `None` if there is no answer; in the order of `chains_of`.
    """
    answers = []
    for chain in chains_of(tree):
        leaf = tree.nodes[chain[-1]]
        answers.append(leaf.extra["answer"] if "answer" in leaf.extra else value_of_step(leaf.text))
    return answers


def _pool(tree: ReasoningTree) -> Float[np.ndarray, "N F"]:
    """Compares each step with the pool's other samples. NaN for a lone chain, and for trees, since their branches are
    not independent samples.
    """
    chains, steps = chains_of(tree), texts(tree)
    others = len(chains) - 1
    if others < 1 or tree.kind != "pool":
        return np.full((len(tree.nodes), len(POOL)), np.nan)
    stated = of_problem(tree.problem)
    values = [[set(results(step)) - stated for step in chain] for chain in steps]  # computed, and not stated
    answers = [x.strip() if isinstance(x, str) else canonical_answer(x) for x in answers_of(tree)]
    class_M = answer_classes(answers).tolist()  # -1 without an answer
    class_of = dict(zip(answers, class_M, strict=True))
    sized = [(n[2:], answer) for answer, c in class_of.items() if c >= 0 and (n := number_of(answer))]
    numeric = [answer for _, answer in sorted(sized, key=lambda x: x[0])]  # plain numbers before % and units
    counts = collections.Counter(c for c in class_M if c >= 0)
    holds = collections.Counter(value for chain in values for value in set().union(*chain))
    mean_steps = np.mean([len(chain) for chain in steps])
    cache: dict[Any, Rows] = {}

    @functools.cache
    def class_of_value(value: float | None) -> int:
        return next((class_of[answer] for answer in numeric if equivalent(answer, value)), -1)

    def rows(i: int) -> Rows:
        total, count, lowest, seen, out = 0.0, 0, 1.0, set(), []
        for k, step in enumerate(steps[i]):
            for value in values[i][k] - seen:
                share = (holds[value] - 1) / others
                total, count, lowest = total + share, count + 1, min(lowest, share)
            seen |= values[i][k]
            last = k == len(steps[i]) - 1
            answer = class_M[i] if last else class_of_value(value_of_step(step))
            rest = counts.copy()
            if class_M[i] >= 0:
                rest[class_M[i]] -= 1  # the chain itself is no witness
            share = rest[answer] / others
            rival = max((n for other, n in rest.items() if other != answer), default=0) / others
            mean = total / count if count else math.nan
            low = lowest if count else math.nan
            out.append((share, share - rival, mean, low, math.log((k + 1) / mean_steps)))
        return out

    signals = []
    for i in range(len(chains)):
        key = (steps[i], class_M[i])
        if key not in cache:
            cache[key] = rows(i)
        signals.append(cache[key])
    return by_node(tree, signals)


POOL = ("answer_share", "answer_lead", "values_share", "least_value_share", "relative_length")
LOGS = ("sum_log", "lowest_log_odds", "last_log_odds", "mean_log_odds")
SCORES = ("lowest", "mean", "last", "place_of_lowest", *LOGS)
CLIP = 1e-5
"""Scores are clipped to [1e-5, 1 - 1e-5] before the log: files often round them to four decimals, e.g. 1."""


def score_rows(score_P: Sequence[float], odds_P: Sequence[float] | np.ndarray | None = None) -> Rows:
    """Summarises step scores as the numbers `SCORES`: one tuple of 8 per step, over the steps so far.

    A row has the lowest, mean and last weight in [0, 1], the relative place of the lowest (0 first, 1 last), the sum of
    logs (rule `prod`), and the lowest, last and mean log odds, which separate scores near 1. NaN marks a step left open
    by a judge: both `last` numbers are NaN there; the others skip it, and are NaN until a step is scored. `score_P` are
    weights in [0, 1]; `odds_P` has the scores as log odds, e.g. log ratios, whose weights would all be 0 or 1; by
    default the `log_odds` of the weights.
    """
    rows, low, least, place, total, count, sum_log, sum_odds = [], math.nan, math.nan, math.nan, 0.0, 0, 0.0, 0.0
    for k, (score, odds) in enumerate(zip(score_P, log_odds(score_P) if odds_P is None else odds_P, strict=True)):
        if not math.isnan(score):
            total, count = total + score, count + 1
            sum_log, sum_odds = sum_log - float(np.logaddexp(0, -odds)), sum_odds + odds
            if math.isnan(low) or odds < least:
                low, least, place = score, odds, float(k)
        mean, mean_odds = (total / count, sum_odds / count) if count else (math.nan, math.nan)
        logs = sum_log if count else math.nan, least, odds, mean_odds
        rows.append((low, mean, score, place / k if k else place, *logs))
    return rows


def log_odds(score_P: Sequence[float]) -> list[float]:
    """Returns natural log(p / (1 - p)) per score p, with p clipped to [1e-5, 1 - 1e-5]; NaN stays NaN."""
    inside_P = np.clip(np.asarray(score_P, float), CLIP, 1 - CLIP)
    return np.log(inside_P / (1 - inside_P)).tolist()


def _of_scores(scores: Callable[[Sequence[ReasoningTree]], Sequence[Any]], scale: Scale) -> Read:
    """Builds a `read` from a step scorer."""

    def read(trees: Sequence[ReasoningTree]) -> list[Float[np.ndarray, "N F"]]:
        arrays = []
        for tree, score_N in zip(trees, scores(trees), strict=True):
            weight_N = scale.weights(score_N := np.asarray(score_N, float))
            odds_N = score_N if scale.weight == "sigmoid" else np.asarray(log_odds(weight_N))
            arrays.append(by_node(tree, [score_rows(weight_N[chain], odds_N[chain]) for chain in chains_of(tree)]))
        return arrays

    return read


def _recorded(trees: Sequence[ReasoningTree]) -> list[list[float]]:
    return [[math.nan if node.score is None else node.score for node in tree.nodes] for tree in trees]


def _logprob(tree: ReasoningTree) -> Float[np.ndarray, "N F"]:
    out_NF = np.full((len(tree.nodes), 2), np.nan)
    for chain in chains_of(tree):
        leaf = tree.nodes[chain[-1]]
        logprob = leaf.extra.get("logprob")
        if isinstance(logprob, int | float) and math.isfinite(logprob):
            characters = sum(len(tree.nodes[i].text) for i in chain)
            out_NF[chain[-1]] = logprob / len(chain), logprob / max(characters, 1)
    return out_NF


def _verdicts(kind: Any) -> Read:
    """Builds a `read` from a step checker, with the same numbers as `arithmetic`."""
    check = verifiers.checker(kind)

    def read(tree: ReasoningTree) -> Float[np.ndarray, "N F"]:
        labels = [verdict.label for verdict in check(tree)]
        paths = ([labels[i] for i in chain] for chain in chains_of(tree))
        return by_node(tree, [_counts(path, [label is None for label in path]) for path in paths])

    return _each(read)


def _tests(trees: Sequence[ReasoningTree]) -> list[Float[np.ndarray, "N F"]]:
    """Returns 1 at the end of chains whose program passes the record's tests, 0 if it fails, NaN elsewhere.

    Raises RecordError if a record has no tests.
    """
    rows = [np.full((len(tree.nodes), 1), np.nan) for tree in trees]
    places, programs = [], []
    for tree, x_N1 in zip(trees, rows, strict=True):
        record = verifiers.record_of_problem(tree)
        verifiers.needs_tests(record, tree.problem[:60])
        for chain in chains_of(tree):
            places.append((x_N1, chain[-1]))
            programs.append((record, [tree.nodes[i].text for i in chain]))
    for (x_N1, leaf), outcome in zip(places, verifiers.judge_programs(programs), strict=True):
        x_N1[leaf] = outcome.reward
    return rows


def _each(read: Callable[[ReasoningTree], Float[np.ndarray, "N F"]]) -> Read:
    return lambda trees: [read(tree) for tree in trees]


VERDICT_NUMBERS = ("any_false", "false_steps", "true_steps", "undecided_steps")

SOURCES: dict[str, Source] = {
    "arithmetic": Source("arithmetic", VERDICT_NUMBERS, of_chains(_arithmetic), version=2),
    "numbers": Source("numbers", ("used", "nowhere", "copied", "asked", "linked"), of_chains(_numbers)),
    "form": Source(
        "form",
        ("log_steps", "log_step_length", "repeated", "whole", "no_value", "magnitude", "negative"),
        of_chains(_form),
        version=2,
    ),
    "pool": Source("pool", POOL, _each(_pool), needs="pool", version=3),
    "stored": Source("stored", SCORES, _of_scores(_recorded, PROBABILITY), needs="record", version=2),
    "logprob": Source("logprob", ("by_step", "by_character"), _each(_logprob), needs="record"),
}
"""Sources that need no model. `stored` reads scores as probabilities."""

VERDICTS: dict[str, Callable[[], Source]] = {
    "python": lambda: Source("verdicts=python", VERDICT_NUMBERS, _verdicts("python"), needs="record"),
    "coq": lambda: Source("verdicts=coq", VERDICT_NUMBERS, _verdicts("coq")),
    "tests": lambda: Source("verdicts=tests", ("passes",), _tests, needs="record"),
}
"""Sources that run a chain's content. The tests in `tests` must not decide the outcome."""

DEFAULT = ("arithmetic", "numbers", "form", "pool")


def find(name: str) -> Source:
    """Finds a source by name, e.g. `arithmetic` or `prm=out/run`; loads its model or judge.

    Executes the user's FILE.py or module. Raises ValueError, listing the known names, if the name is unknown, or if the
    object is no `Source`; MissingPart if a module, file or object does not exist; OSError if `verdicts=` has no
    sandbox; and the errors of `jprm.load` and `load_judge` for `prm=` and `judge=`.
    """
    kind, equals, path = name.partition("=")
    if equals and kind == "prm" and path:
        return of_model(path)
    if equals and kind == "judge" and path:
        return of_judge(path)
    if kind == "verdicts" and path in VERDICTS:
        verifiers.sandbox.require()
        return VERDICTS[path]()
    if equals or name not in SOURCES and ":" not in name:
        known = (*SOURCES, "prm=DIR", "judge=P.json", *(f"verdicts={kind}" for kind in VERDICTS))
        raise ValueError(f"source {name!r} is none of {', '.join(known)}, module:NAME or FILE.py:NAME")
    source = find_part(name, SOURCES, "source", Source, files=True)
    if name in SOURCES:
        return source
    request = {**source.request, "code": digest(source.read)}
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        name, request["sha256"] = f"{os.path.abspath(place)}:{attribute}", sha256_of(place)
    return dataclasses.replace(source, name=name, request=request)


def of_model(path: Given) -> Source:
    """Returns the source `prm=PATH`: a model's step scores (`SCORES`). A relative path becomes absolute in its name.

    Loads the model at once. Raises FileNotFoundError if it is absent, ValueError if it is damaged or not supported.
    """
    from jprm.loading import load

    path = os.fspath(path)
    path = os.path.abspath(path) if "://" not in path else path
    scorer, spent = load(path), [0]
    layout = getattr(scorer, "layout", None)  # a fused verifier has none

    def scores(trees: Sequence[ReasoningTree]) -> list[Any]:
        if layout is not None:
            spent[0] += sum(len(token_tree(tree, layout).tokens_N) for tree in trees)
        return scorer.score_trees(trees)

    return _of_scorer(f"prm={path}", scorer, scores, spent)


def of_judge(path: Given) -> Source:
    """Returns the source `judge=FILE`: a judge's step scores (`SCORES`). A relative path becomes absolute in its name.

    Reading it asks the judge anew each time. Raises ValueError for a rubric or a comparison, and the errors of
    `load_judge`, e.g. FileNotFoundError, RecordError.
    """
    from jprm.methods.judge.judge import Judge
    from jprm.methods.judge.load import load_judge

    path = os.fspath(path)
    path = os.path.abspath(path) if "://" not in path else path
    scorer, spent = load_judge(path), [0]
    if not isinstance(scorer, Judge):
        raise ValueError(f"judge={path}: has criteria, or compares samples. Give a judge of one question")

    def scores(trees: Sequence[ReasoningTree]) -> list[Any]:
        judged = scorer.reported(trees)
        spent[0] += sum(report["tokens"] for _, report in judged)
        return [outputs["score"] for outputs, _ in judged]

    return _of_scorer(f"judge={path}", scorer, scores, spent)


def _of_scorer(name: str, scorer: Any, scores: Callable[[Sequence[ReasoningTree]], Any], spent: list[int]) -> Source:
    read, request = _of_scores(scores, scorer.scale), identity(scorer)
    return Source(name, SCORES, read, needs="model", version=2, request=request, tokens=lambda: spent[0])


def read(sources: Sequence[Source], trees: Sequence[ReasoningTree]) -> list[Float[np.ndarray, "N F"]]:
    """Returns the numbers of all sources side by side: for each tree (N, F), also with N = 0.

    Columns are in the order of `names(sources)`, float64; NaN is no evidence. Waits for the sources' models. [] if
    there is no source or no tree. Raises ValueError if a user's source returns the wrong shape or an infinite number;
    other errors of the sources pass.
    """
    columns = []
    for source in sources:
        arrays = [np.asarray(array, float) for array in source.read(trees)]
        if len(arrays) != len(trees):
            raise ValueError(f"source {source.name!r}: returned {len(arrays)} arrays for {len(trees)} trees")
        for tree, array_NF in zip(trees, arrays, strict=True):
            shape = (len(tree.nodes), len(source.numbers))
            if array_NF.shape != shape and tree.nodes:
                wanted = f"{shape}, a row for each step and a column for each number that it names"
                raise ValueError(f"source {source.name!r}: returned {array_NF.shape}, not {wanted}")
            if np.isinf(array_NF).any():
                raise ValueError(f"source {source.name!r}: a number is infinite; NaN says that there is none")
        columns.append([a.reshape(len(tree.nodes), len(source.numbers)) for a, tree in zip(arrays, trees, strict=True)])
    return [np.concatenate(parts, axis=1) for parts in zip(*columns, strict=True)]


def names(sources: Sequence[Source]) -> list[str]:
    """Returns the numbers' full names in the order of columns, e.g. `arithmetic.any_false`."""
    return [f"{source.name}.{number}" for source in sources for number in source.numbers]


# ---- Numbers in text: what a step computes, what a problem states.

_NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?=\D|$)")
_RESULT = re.compile(r"=\s*[-$€£~\s]*((?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?)(?![\d.]*\s*[-+*/x×÷=]\s*[$\d(])")
_NEGATIVE = re.compile(r"(?:=|boxed\{)\s*\\?[$€£]?\s*-\s*\\?[$€£]?\d")
_LABEL = re.compile(r"^\s*(?:step\s*)?[A-Za-z]?\d+\s*[:.)]\s", re.IGNORECASE)
_MARK = re.compile(r"<<[^<>]*>>")
_DIGITS = "zero one two three four five six seven eight nine ten eleven twelve".split()
_WORDS = {word: value for value, word in enumerate(_DIGITS)}
_WORDS |= {"half": 2, "twice": 2, "double": 2, "thrice": 3, "triple": 3, "quarter": 4, "dozen": 12, "third": 3}
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})s?\b", re.IGNORECASE)


def value_of(text: str) -> float:
    """Returns the number in a text that may have thousands separators, e.g. `-1,200`, rounded to 6 decimals.

    Every comma is dropped, so `1,5` is 15. Raises ValueError if the text is no number.
    """
    return round(float(text.replace(",", "")), 6)


@functools.lru_cache(maxsize=1 << 16)
def numbers(text: str) -> tuple[float, ...]:
    """Returns a text's numbers in order, without signs, step labels (`A1:`, `Step 2.`) and calculator marks.

    () if there are none. Only digits count, not words; `3/4` gives (3.0, 4.0).
    """
    plain = _MARK.sub("", _LABEL.sub("", text))
    return tuple(value_of(match) for match in _NUMBER.findall(plain) if match)


@functools.lru_cache(maxsize=1 << 16)
def results(text: str) -> tuple[float, ...]:
    """Returns a step's results in order: numbers, without signs, after an equals sign with no operation after them.

    E.g. (12.0,) for `3 * 4 = 12`; () if there are none.
    """
    plain = _MARK.sub("", _LABEL.sub("", text))
    return tuple(value_of(match) for match in _RESULT.findall(plain) if match)


def value_of_step(text: str) -> float | None:
    """Returns a step's last result (`results`), else its last number, without sign; `None` if it has no number."""
    values = results(text) or numbers(text)
    return values[-1] if values else None


@functools.lru_cache(maxsize=1 << 12)
def of_problem(text: str) -> frozenset[float]:
    """Returns the numbers in a problem, in digits or words up to twelve; also e.g. `half` and `twice` as 2.0."""
    return frozenset(numbers(text)) | {float(_WORDS[word.lower()]) for word in _WORD.findall(text)}

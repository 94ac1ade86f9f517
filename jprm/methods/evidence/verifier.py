"""`FusedVerifier`, a ranker over evidence sources with the interface of a PRM, and its folder.

The folder has one file, `verifier.json`, with the sources' names and versions, the coefficients and the vote settings.
Models are stored by path and identity, and checked on loading.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import scipy  # its parts are loaded when they are first used
from jaxtyping import Float

from jprm.io.jsonl import list_of, number_of, parse
from jprm.io.outputs import atomic_write, differing
from jprm.io.storage import Found, Place, mark_own, path_of, sha256_of
from jprm.loading import VERIFIER
from jprm.methods.evaluate.votes import answer_classes
from jprm.methods.evidence import sources as evidence
from jprm.methods.evidence.ranker import Chains, Ranker, answer_shares, relative_in_pools
from jprm.methods.evidence.sources import Source, answers_of
from jprm.options import ForeignCode, check_foreign, place_of
from jprm.score.scale import PROBABILITY, Scale
from jprm.score.scorer import CHUNK
from jprm.tree import ReasoningTree, RecordError, chain_tree, chains_of, scored, tree_of

FILE = VERIFIER
FORMAT = 1
MARGIN = 8.0
"""Cap on a chain's log odds in a vote: above it, chains weigh the same."""


@dataclasses.dataclass(frozen=True)
class Vote:
    """How far a vote trusts the evidence: a chain's weight is its odds to the power of `powers`.

    power (1 - s)^agreement / max(1, d)^distance, with s the share of the pool's commonest answer, and d its
    standardised evidence's root mean square (1 on the training chains). Neither needs labels. If the policy agrees with
    itself, or writes unlike the training policies, the vote moves toward the majority vote.
    """

    power: float = 0.5
    agreement: float = 1.0
    distance: float = 2.0

    def powers(self, share_P: Float[np.ndarray, " P"], distance_P: Float[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
        """Returns the exponent of the odds in each pool's vote: power (1 - share_P)^agreement / distance_P^distance.

        `share_P` is the majority's share, `distance_P` (raised to 1) how unlike the training policies the pool is.
        """
        return self.power * (1 - share_P) ** self.agreement / np.maximum(1, distance_P) ** self.distance

    def weights(self, ranker: Ranker, chains: Chains) -> Float[np.ndarray, " M"]:
        """Returns each chain's weight in [0, 1] in its pool's vote (`vote_weights`); 0 if it has no answer."""
        power_P = self.powers(*pool_signals(ranker, chains))
        return vote_weights(ranker.log_odds(chains.x_MF), power_P[chains.problem_M], chains)


def pool_signals(ranker: Ranker, chains: Chains) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
    """Returns (top answer's share, distance from the training chains) per pool, the arguments of `Vote.powers`.

    The share is of all chains of the pool, 0 if there are no answers. The distance is the root mean square of the
    standardised evidence, with missing numbers as 0.
    """
    size_P = np.bincount(chains.problem_M)
    answered_M = chains.class_M >= 0
    stride = int(chains.class_M.max(initial=0)) + 1
    key_G, count_G = np.unique(chains.problem_M[answered_M] * stride + chains.class_M[answered_M], return_counts=True)
    top_P = np.zeros(len(size_P))
    np.maximum.at(top_P, key_G // stride, count_G)
    square_M = np.mean(ranker.standard(chains.x_MF) ** 2, axis=1)
    return top_P / size_P, np.sqrt(np.bincount(chains.problem_M, square_M) / size_P)


def vote_weights(
    log_odds_M: Float[np.ndarray, " M"], power_M: Float[np.ndarray, " M"], chains: Chains
) -> Float[np.ndarray, " M"]:
    """Returns weights in [0, 1]: odds to the power `power_M`, divided by the pool's largest result.

    `power_M` has each chain's exponent, at least 0. Log odds are capped at `MARGIN`. A chain without an answer weighs
    0, and its odds do not count as the largest.
    """
    log_M = np.where(chains.class_M >= 0, power_M * np.minimum(log_odds_M, MARGIN), -np.inf)
    return relative_in_pools(log_M, chains.problem_M)[0]


@dataclasses.dataclass(frozen=True)
class FusedVerifier:
    """Weighs evidence from several sources; implements `jprm.methods.jobs.score.Scorer`.

    A step's score is the probability that the chain would be correct if it ended there (semantics `value`), so a
    chain's score is its last step's. The output `vote` is the chain's weight in its pool's vote.

    If `chooses` is "answers", a pool chain's last step scores its answer's share of these weights, so best of n and the
    vote choose the same answer.

    `name` is the folder, `request` the result of `request_of`. All scoring waits for the sources' models. Besides the
    errors named, the sources' own errors pass, e.g. RecordError if a record lacks the `tests` of `verdicts=tests`, and
    PolicyError if a judge fails.
    """

    sources: tuple[Source, ...]
    ranker: Ranker
    vote: Vote
    name: str  # the folder
    request: Mapping[str, Any]  # what the scores depend on
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    chooses: str = "chains"  # or "answers"

    semantics = "value"
    rule = "last"
    step = 0  # of training: it has none
    of_pool = True  # a chain's score depends on the other samples of its problem
    scale: Scale = dataclasses.field(default=PROBABILITY, init=False)
    output_names = ("score", "vote")

    @property
    def read_as(self) -> str:
        """Describes the verifier in one line: its folder, sources, semantics and rule."""
        names = ", ".join(source.name for source in self.sources)
        meaning = f"scores are of {self.semantics}, a chain's rule is {self.rule}"
        return f"{self.name}: a fused verifier of {names}; {meaning}"

    @property
    def identity(self) -> dict[str, Any]:
        """`{"verifier": name}` and the keys of `request_of`: all that the scores depend on, for a file's request."""
        return {"verifier": self.name, **self.request}

    def about(self, records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the verifier's entry in result files: `name`, `folder` and `step` (0). `records` are not read.

        `folder` is the whole address, `name` its last part.
        """
        return {"name": path_of(self.name).name, "folder": self.name, "step": 0}

    def by(self, output: str) -> FusedVerifier:
        """Returns itself if `output` is `score`. Raises ValueError for another output."""
        if output != "score":
            raise ValueError(f"{self.name}: a fused verifier orders chains only by its score, not by {output!r}")
        return self

    def of_prefixes(self) -> FusedVerifier:
        """Returns a verifier for growing chains, e.g. in a search.

        A prefix has no pool and no record, so the sources that need them count as missing and add 0.
        """

        def alone(source: Source) -> Source:
            if source.needs not in ("pool", "record"):
                return source
            F = len(source.numbers)
            return dataclasses.replace(source, read=lambda trees: [np.full((len(t.nodes), F), np.nan) for t in trees])

        return dataclasses.replace(self, sources=tuple(map(alone, self.sources)))

    def score(self, problem: str, steps: Sequence[str]) -> Float[np.ndarray, " P"]:
        """Returns one float32 score in [0, 1] per step, (P,).

        Raises TypeError if `steps` is one string or `problem` a list, RecordError for no step or a text that is blank.
        """
        return self.score_trees([chain_tree(problem, steps)])[0]

    def score_many(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the records in order with scores, and with vote weights under `outputs`.

        Raises RecordError for an invalid record, and the sources' own errors.
        """
        records = iter(records)
        while chunk := list(itertools.islice(records, CHUNK)):
            trees = [tree_of(record) for record in chunk]
            for record, tree, outputs in zip(chunk, trees, self.outputs_of(trees), strict=True):
                yield scored(record, tree, outputs)

    def score_trees(self, trees: Sequence[ReasoningTree]) -> list[Float[np.ndarray, " N"]]:
        """Returns float32 scores (N,) in [0, 1] for each tree with N nodes."""
        return [outputs["score"] for outputs in self.outputs_of(trees)]

    def outputs_of(self, trees: Sequence[ReasoningTree]) -> list[dict[str, Float[np.ndarray, " N"]]]:
        """Returns `{"score": (N,), "vote": (N,)}` for each tree, in float32.

        `vote` is 1 at the last step of the tree's heaviest chain, 0 without an answer and before last steps.
        """
        outputs = []
        for tree, x_NF in zip(trees, evidence.read(self.sources, trees), strict=True):
            if not tree.nodes:
                outputs.append({name: np.zeros(0, np.float32) for name in self.output_names})
                continue
            leaves = [chain[-1] for chain in chains_of(tree)]
            class_M, one_M = answer_classes(answers_of(tree)), np.zeros(len(leaves), int)
            vote_N = np.zeros(len(x_NF))  # only whole chains vote
            vote_N[leaves] = self.vote.weights(self.ranker, Chains(x_NF[leaves], one_M, one_M, one_M, class_M))
            named = {"score": scipy.special.expit(self.ranker.log_odds(x_NF)), "vote": vote_N}
            if self.chooses == "answers" and tree.kind == "pool" and len(leaves) > 1:
                named["score"][leaves] = answer_shares(vote_N[leaves], class_M)
            outputs.append({name: value_N.astype(np.float32) for name, value_N in named.items()})
        return outputs

    def save(self, folder: str | os.PathLike) -> None:
        """Writes `verifier.json`, atomically, and creates the folder; an earlier one is replaced.

        Marks the file as the user's own, so that loading trusts it. The loaded verifier gives the same scores. Raises
        OSError if the folder cannot be written.
        """
        place = path_of(folder)
        place.mkdir(parents=True, exist_ok=True)
        columns = {"mean": self.ranker.mean_F, "scale": self.ranker.scale_F, "weight": self.ranker.weight_F}
        coefficients = {
            name: {column: float(value_F[i]) for column, value_F in columns.items()}
            for i, name in enumerate(evidence.names(self.sources))
        }
        text = {
            "format": FORMAT,
            "sources": [_recorded(source) for source in self.sources],
            "coefficients": coefficients,
            "calibration": {"slope": self.ranker.slope, "intercept": self.ranker.intercept},
            "strength": self.ranker.strength,
            "vote": dataclasses.asdict(self.vote),
            "chooses": self.chooses,
            "measured": dict(self.measured),
        }
        atomic_write(place / FILE, json.dumps(text, indent=2) + "\n")
        mark_own(place / FILE)


def _recorded(source: Source) -> dict[str, Any]:
    known = {name: getattr(source, name) for name in ("name", "version", "numbers")}
    return known | {"request": dict(source.request)}


def request_of(sources: Sequence[Source], ranker: Ranker, vote: Vote, chooses: str = "chains") -> dict[str, Any]:
    """Returns all that the scores depend on: `sources`, `coefficients`, `calibration` and `vote`, as JSON values.

    `chooses` ("chains" or "answers") is a key only if it is not "chains". `sources` maps names to `version` and
    request; `coefficients` lists all weights, then means, then scales; `calibration` is [slope, intercept].
    """
    of_answers = {"chooses": chooses} if chooses != "chains" else {}
    return of_answers | {
        "sources": {source.name: {"version": source.version, **source.request} for source in sources},
        "coefficients": [*ranker.weight_F.tolist(), *ranker.mean_F.tolist(), *ranker.scale_F.tolist()],
        "calibration": [ranker.slope, ranker.intercept],
        "vote": dataclasses.asdict(vote),
    }


def load_verifier(folder: str | os.PathLike) -> FusedVerifier:
    """Loads a verifier that `jprm fuse fit` wrote, and the models of its sources.

    Raises:
        FileNotFoundError: the folder has no `verifier.json`, or a source's model is absent.
        RecordError: `verifier.json` is not JSON or of another format, or a field is absent or wrong.
        ValueError: a source has another version, a model has changed, or a file not written here names a judge.
        ForeignCode: a file not written here names a source that is code.
        OSError: a source `verdicts=` has no sandbox.
    """
    place = path_of(folder)
    where = os.fspath(place / FILE)
    data = parse((place / FILE).read_bytes(), where)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RecordError(where, "format", f"is not {FORMAT}", "Fit the verifier again with this jprm.")
    entries = list_of(data.get("sources"), where, "sources")
    try:
        sources = tuple(_source(entry, place, where, i) for i, entry in enumerate(entries))
    except RecursionError:
        raise RecordError(where, "sources", "lead back to this verifier", "Fit the verifier again.") from None
    names = evidence.names(sources)
    coefficients = _object(data, "coefficients", where)
    if sorted(coefficients) != sorted(names):
        raise RecordError(where, "coefficients", "are not those of the sources' numbers", "Fit the verifier again.")
    columns = {
        column: np.array([_number(coefficients[name], column, where, f"coefficients.{name}") for name in names])
        for column in ("mean", "scale", "weight")
    }
    if (columns["scale"] <= 0).any():
        raise RecordError(where, "coefficients", "have a scale that is not above 0", "Fit the verifier again.")
    calibration, vote = _object(data, "calibration", where), _object(data, "vote", where)
    ranker = Ranker(
        columns["mean"], columns["scale"], columns["weight"],
        _number(calibration, "slope", where, "calibration"), _number(calibration, "intercept", where, "calibration"),
        _number(data, "strength", where, ""),
    )  # fmt: skip
    settings = Vote(**{field.name: _number(vote, field.name, where, "vote") for field in dataclasses.fields(Vote)})
    if (chooses := data.get("chooses", "chains")) not in ("chains", "answers"):
        raise RecordError(where, "chooses", "is neither chains nor answers", "Fit the verifier again.")
    name, request = str(place.resolve()), request_of(sources, ranker, settings, chooses)
    return FusedVerifier(sources, ranker, settings, name, request, data.get("measured") or {}, chooses)


def _object(data: Mapping[str, Any], field: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value := data.get(field), dict):
        raise RecordError(where, field, "is absent or no object", "Fit the verifier again.")
    return value


def _number(data: Any, field: str, where: str, parent: str) -> float:
    if not isinstance(data, dict):
        raise RecordError(where, parent, "is no object", "Fit the verifier again.")
    return float(number_of(data.get(field), where, f"{parent}.{field}".lstrip(".")))


def _source(entry: Any, folder: Place, where: str, i: int) -> Source:
    """Loads a source in the version that the verifier was fitted with, or raises.

    The user's own file may name a judge, code in a file and a model anywhere; a stranger's file only models on this
    machine.
    """
    field = f"sources[{i}]"
    if not isinstance(entry, dict) or not isinstance(name := entry.get("name"), str):
        raise RecordError(where, field, "has no name", "Fit the verifier again.")
    if not isinstance(request := entry.get("request") or {}, dict):
        raise RecordError(where, f"{field}.request", "is no object", "Fit the verifier again.")
    reference, (file, colon, _) = Found(folder / FILE, field, name), name.rpartition(":")
    kind, equals, path = name.partition("=")
    if equals and kind == "prm":
        source = dataclasses.replace(evidence.of_model(place_of(dataclasses.replace(reference, text=path))), name=name)
    elif equals and kind == "judge":
        source = evidence.find(reference.trusted("asked"))
    elif colon and file.endswith(".py"):
        if not reference.written_here:
            raise ForeignCode(
                f"{where}: {field}: {name!r}: code that comes with a verifier is never run. If you wrote it, fit the"
                " verifier again here"
            )
        if not os.path.isfile(file) or sha256_of(file) != request.get("sha256"):
            raise ValueError(f"{where}: {field}: {file} is absent or has changed. Fit the verifier again")
        source = evidence.find(reference.trusted("run"))
    else:
        check_foreign(name, folder, "source")
        source = evidence.find(name)
    if source.version != entry.get("version") or list(source.numbers) != entry.get("numbers"):
        differ = f"is version {source.version} here, and was version {entry.get('version')}"
        raise ValueError(f"{where}: {field}: {name} {differ}. Fit the verifier again")
    now = json.loads(json.dumps(dict(source.request)))
    if changed := differing(request, now):
        raise ValueError(f"{where}: {field}: {name} has changed ({', '.join(changed)}). Fit the verifier again")
    return source

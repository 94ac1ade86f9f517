"""A study: trees to label, annotators, quality-control tasks, and the event file.

The labelled items are trees, from any record that jprm reads. A chain is a tree without alternatives. In trajectories,
turns are labelled (`rated_tree`); the study keeps their messages. An event is appended to the file and synced to disk
before it is acknowledged; the file is intact after any kill.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jprm.apps.annotate import SelectConfig, StudyConfig
from jprm.io.folders import whole_folder
from jprm.io.jsonl import DAMAGED, RecordError, dump, parse, write_records
from jprm.io.outputs import check_output, write_json
from jprm.io.storage import path_of
from jprm.methods.data.overlap import normalise, problems_in
from jprm.methods.jobs.score import stored_scale
from jprm.score.scale import PROBABILITY, Scale, check_scale
from jprm.tree import (
    SEMANTICS,
    Node,
    ReasoningTree,
    as_tree,
    chains_of,
    read_trees,
    record_of,
    steps_only,
    tree_of,
)

POOLS = ("work", "gold", "screening")
EVENTS = "events.jsonl"


class Study(NamedTuple):
    """A study's folder, configuration and trees by pool, e.g. `gold`. `salt` hides contents in task names."""

    folder: pathlib.Path
    config: StudyConfig
    trees: dict[str, list[ReasoningTree]]
    guidelines: str
    salt: str

    @property
    def events(self) -> pathlib.Path:
        return self.folder / EVENTS


def create(
    folder: str | os.PathLike,
    work: str | os.PathLike,
    config: StudyConfig,
    *,
    gold: str | os.PathLike | None = None,
    screening: str | os.PathLike | None = None,
    guidelines: str | os.PathLike | None = None,
) -> None:
    """Writes a study's folder atomically: `study.json`, `guidelines.txt`, and a file per pool, e.g. `gold.jsonl`.

    `work`, `gold` and `screening` are files of records (`items_in`, `known_items_in`); `guidelines` is a text file, by
    default the packaged one.

    Raises ValueError if the folder exists, no annotator is named, or an anchoring study has scores other than
    probabilities; RecordError for a bad record, for one in `gold` or `screening` without labels, and, in an anchoring
    study, for one without scores or with alternatives; FileNotFoundError for a missing file.
    """
    if os.path.lexists(folder):
        raise ValueError(f"{os.fspath(folder)}: is there already. Leave --input out to continue it, or name another")
    if not config.annotators:
        raise ValueError("annotators: name one or several")
    text = pathlib.Path(guidelines or pathlib.Path(__file__).with_name("guidelines.txt")).read_text("utf-8")
    trees = {"work": list(items_in(work))}
    for pool, path in {"gold": gold, "screening": screening}.items():
        trees[pool] = list(known_items_in(path)) if path else []
        for number, tree in enumerate(trees[pool], start=1):
            if not known_wrong(rated_tree(tree)):
                raise RecordError(f"{path}, task {number}", "labels", "are absent", "Tasks that measure have labels.")
    if config.anchored_fraction:
        check_scale(stored_scale(work), ("score",), os.fspath(work), "a page that shows scores")
        for number, tree in enumerate(map(rated_tree, trees["work"]), start=1):
            if not is_chain(tree):
                remedy = "Anchoring is measured on chains: `jprm annotate select` without --alternatives writes them."
                raise RecordError(f"{work}, task {number}", "nodes", "have alternatives", remedy)
            if any(node.score is None for node in tree.nodes):
                raise RecordError(f"{work}, task {number}", "scores", "are absent", "Anchored chains show them.")
            PROBABILITY.fractions(scores_of(tree), f"{work}, task {number}")
    with whole_folder(folder) as new:
        for pool, of_pool in trees.items():
            write_records(new / f"{pool}.jsonl", map(record_of, of_pool))
        (new / "guidelines.txt").write_text(text, "utf-8")
        write_json(new / "study.json", {"version": 1, "salt": secrets.token_hex(16), **dataclasses.asdict(config)})


def read(folder: str | os.PathLike, annotators: Sequence[str] = ()) -> Study:
    """Reads the study in a folder, with all its trees; adds new `annotators` to its `study.json`.

    Raises ValueError, naming the file, if it is not a study, is of a newer jprm, or a new name is invalid; RecordError
    for a bad record; FileNotFoundError if a file other than `study.json` is missing.
    """
    folder = pathlib.Path(folder)
    file = folder / "study.json"
    try:
        fields: dict[str, Any] = json.loads(file.read_text("utf-8"))
        version, salt = fields.pop("version"), fields.pop("salt")
        fields["annotators"] = tuple(fields["annotators"])
        config = StudyConfig(**fields)
        if not config.annotators:
            raise ValueError("annotators: there are none")
    except FileNotFoundError:
        raise ValueError(f"{folder}: holds no study.json. `jprm annotate serve --input` makes a study") from None
    except DAMAGED as error:
        raise ValueError(f"{file}: is no study: {error}") from None
    if version != 1:
        raise ValueError(f"{file}: has version {version!r}, but this jprm reads 1: upgrade jprm")
    if new := tuple(name for name in dict.fromkeys(annotators) if name not in config.annotators):
        config = dataclasses.replace(config, annotators=config.annotators + new)
        write_json(file, {"version": version, "salt": salt, **dataclasses.asdict(config)})
    trees = {pool: list(items_in(path)) if (path := folder / f"{pool}.jsonl").stat().st_size else [] for pool in POOLS}
    return Study(folder, config, trees, (folder / "guidelines.txt").read_text("utf-8"), salt)


def chance(seed: int, *parts: Any) -> float:
    """Returns a number in [0, 1) that depends only on the seed and the parts, which must be JSON values."""
    digest = hashlib.sha256(json.dumps([seed, *parts]).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


Alternatives = Sequence[Sequence[int]]
"""Nodes from which a path may continue: at 0 after the problem, at i + 1 after node i."""


def alternatives_of(tree: ReasoningTree) -> list[list[int]]:
    """Returns the node indices of the alternatives after the problem (first), then after every node.

    So result[0] has the first steps, and result[i + 1] the children of node i, in rising order; [] for a leaf.
    """
    after: list[list[int]] = [[] for _ in range(len(tree.nodes) + 1)]
    for i, node in enumerate(tree.nodes):
        after[node.parent + 1].append(i)
    return after


def is_chain(tree: ReasoningTree) -> bool:
    """Whether no step has an alternative; true for a tree without nodes."""
    return all(node.parent == i - 1 for i, node in enumerate(tree.nodes))


def rated_tree(tree: ReasoningTree) -> ReasoningTree:
    """Returns the rated part of a tree: for a tree of messages, a tree of its steps (with their role).

    Else the tree itself. Step i is the node `tree.steps[i]` in the message tree.
    """
    only = steps_only(tree)
    if only is tree:
        return tree
    return dataclasses.replace(only, nodes=tuple(dataclasses.replace(node, role="assistant") for node in only.nodes))


def ends_at_error(tree: ReasoningTree) -> bool:
    """Whether a tree is rated only to its first error: `True` for a chain, `False` for trajectories and trees.

    An agent may recover from a wrong turn.
    """
    return is_chain(tree) and not tree.of_messages


def items_in(path: str | os.PathLike) -> Iterator[ReasoningTree]:
    """Yields a file's trees and trajectories, and every chain of its chains and pools as a tree of kind `chain`.

    Equal alternatives of a tree are merged (`merged`). Reads lazily.

    Raises RecordError for a bad record, FileNotFoundError or ValueError if the file is missing or no JSON Lines.
    """
    for tree in read_trees(path):
        yield from _items(tree)


def known_items_in(path: str | os.PathLike) -> Iterator[ReasoningTree]:
    """Like `items_in`, but also reads released benchmarks with step labels: ProcessBench, PRMBench, PRM800K.

    The first record's keys decide the format. Raises ValueError also if the file is empty.
    """
    from jprm.methods.evaluate.run import format_of, source

    reader = source(format_of(path))
    for tree in read_trees(path) if reader.name == "jsonl" else map(tree_of, reader.records(path)):
        yield from _items(tree)


def _items(tree: ReasoningTree) -> Iterator[ReasoningTree]:
    if tree.of_messages:
        yield tree
    else:
        yield from [merged(tree)] if tree.kind == "tree" else _chains(tree)


def chains_in(path: str | os.PathLike) -> Iterator[ReasoningTree]:
    """Yields each chain of a file's chains, pools and trees, and its trajectories, lazily.

    A chain record keeps its other keys; a path of a pool or tree keeps only the problem's answer. Trajectories, and
    trees of them, are yielded whole.

    Raises RecordError for a bad record, FileNotFoundError or ValueError if the file is missing or no JSON Lines.
    """
    for tree in read_trees(path):
        yield from [tree] if tree.of_messages else _chains(tree)


def trees_in(path: str | os.PathLike, most: int) -> Iterator[ReasoningTree]:
    """Yields a file's chains, pools and trees as trees with at most `most` alternatives per step.

    They are `merged`, then `pruned`. Records without steps are left out. Raises RecordError for a bad record or a
    trajectory, ValueError for one without scores or a file that is not JSON Lines, FileNotFoundError if it is missing.
    """
    for i, tree in enumerate(read_trees(path)):
        if tree.of_messages:
            remedy = "Leave --alternatives out: trajectories, and trees of them, are selected whole."
            raise RecordError(f"{os.fspath(path)}: record {i + 1}", "messages", "is a trajectory", remedy)
        if tree.nodes:
            yield pruned(merged(tree), most)


def merged(tree: ReasoningTree) -> ReasoningTree:
    """Returns a tree with equal-text siblings merged into one node; chains and pools become trees first.

    Label, score and correctness of a node come from the first sibling that has them, its other fields from the first.
    """
    tree = as_tree(tree)
    nodes: list[Node] = []
    place, first = [-1], {}  # of the problem and every node; of every parent and text
    for node in tree.nodes:
        parent = place[node.parent + 1]
        at = first.setdefault((parent, node.text), len(nodes))
        place.append(at)
        if at == len(nodes):
            nodes.append(dataclasses.replace(node, parent=parent))
            continue
        known = nodes[at]
        fields = {name: getattr(node, name) for name in ("label", "score", "correct") if getattr(known, name) is None}
        nodes[at] = dataclasses.replace(known, **fields)
    return dataclasses.replace(tree, nodes=tuple(nodes))


def pruned(tree: ReasoningTree, most: int) -> ReasoningTree:
    """Returns a new tree with the `most` most convincing alternatives at each step, in their earlier order.

    An alternative is as convincing as the most convincing chain through it, and a chain as its lowest score. Raises
    ValueError if a node has no score.
    """
    score = scores_of(tree)
    after = alternatives_of(tree)
    best = list(score)
    for i in reversed(range(len(best))):
        best[i] = min(score[i], max((best[child] for child in after[i + 1]), default=score[i]))
    place, nodes = {-1: -1}, []
    kept = {i for siblings in after for i in sorted(siblings, key=lambda i: -best[i])[:most]}
    for i, node in enumerate(tree.nodes):
        if i in kept and node.parent in place:
            place[i] = len(nodes)
            nodes.append(dataclasses.replace(node, parent=place[node.parent]))
    return dataclasses.replace(tree, nodes=tuple(nodes))


def scores_of(tree: ReasoningTree) -> list[float]:
    """Returns the score of every node, in order. Raises ValueError if one is missing."""
    scores = [node.score for node in tree.nodes if node.score is not None]
    if len(scores) < len(tree.nodes):
        raise ValueError(f"a step of {tree.problem[:60]!r} has no score: run `jprm score` on the file first")
    return scores


def _chains(tree: ReasoningTree) -> Iterator[ReasoningTree]:
    if tree.kind == "chain":  # free text is split by now
        extra = {key: value for key, value in tree.extra.items() if key not in ("response", "messages", "segmentation")}
        yield dataclasses.replace(tree, extra=extra)
        return
    for path in chains_of(tree):
        steps = [tree.nodes[i] for i in path]
        scored = all(node.score is not None for node in steps)
        nodes = [
            Node(i - 1, node.text, node.label, score=node.score if scored else None) for i, node in enumerate(steps)
        ]
        nodes[-1] = dataclasses.replace(nodes[-1], correct=steps[-1].correct)
        semantics = tree.semantics if any(node.label is not None for node in nodes) else SEMANTICS[0]
        yield ReasoningTree(tree.problem, tuple(nodes), tree.answer, semantics, "chain")


def known_wrong(tree: ReasoningTree) -> dict[int, bool]:
    """Returns, for each labelled node by index, whether its label is incorrect: below 0 for ratings, else below 0.5."""
    limit = 0.0 if tree.semantics == "rating" else 0.5
    return {i: node.label < limit for i, node in enumerate(tree.nodes) if node.label is not None}


def alike(tree: ReasoningTree, labels: Mapping[int, bool], others: Mapping[int, bool]) -> float:
    """Returns how far two labellings (step index to "is wrong") agree, from 0 to 1.

    For a chain: 1 if they have the same first error or both lack one, else 0. For a trajectory or a tree with
    alternatives: the fraction of shared steps with equal labels; 0 without shared steps.
    """
    if ends_at_error(tree):
        first = (
            min((step for step, wrong in wrong_at.items() if wrong), default=None) for wrong_at in (labels, others)
        )
        return float(next(first) == next(first))
    both = labels.keys() & others.keys()
    return sum(labels[step] == others[step] for step in both) / len(both) if both else 0.0


class LogFailed(OSError):
    """It is unknown whether the disk holds an event. Only a restart, which rereads the file, can tell."""


class EventLog:
    """A JSON Lines file to which a single process appends; safe to call from several threads.

    A line is written and synced to disk before it is acknowledged. An incomplete last line was never acknowledged, and
    is cut off when the file is opened. `events` are the events found at opening.
    """

    def __init__(self, file: Any):
        self._file, self._lock, self._failed = file, threading.Lock(), False
        file.seek(0)
        text = file.read()
        self._end = text.rfind(b"\n") + 1
        os.ftruncate(file.fileno(), self._end)
        os.fsync(file.fileno())
        self.events = _whole_lines(text, file.name)

    def append(self, event: Mapping[str, Any]) -> None:
        """Appends an event, which is on disk when this returns; blocks until then. `self.events` does not change.

        Raises:
          OSError: the disk is full or failing. The file contains no part of the event.
          LogFailed: the file's content is unknown. All later calls raise it too.
          ValueError: the event has NaN or an infinity.
        """
        with self._lock:
            if self._failed:
                raise LogFailed("an earlier event failed on the disk: start the server again")
            descriptor, line = self._file.fileno(), dump(event).encode() + b"\n"
            try:
                left = memoryview(line)
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                self._failed = True
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, self._end)
                    self._failed = False
                raise
            try:
                os.fsync(descriptor)
            except OSError as error:  # the kernel may have dropped the page, and a second fsync would not say so
                self._failed = True
                raise LogFailed(f"{self._file.name}: {error.strerror}") from error
            self._end += len(line)


def events_in(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Returns the events in a study's file, in order, even while its server writes; [] if there is no file.

    Stored events have the keys that `Tasks` reads (`changed`, `Tasks.next`). An incomplete last line is not confirmed,
    so it is ignored. Raises RecordError for a line that is not JSON.
    """
    path = pathlib.Path(path)
    return _whole_lines(path.read_bytes(), path) if path.exists() else []


def _whole_lines(text: bytes, path: str | os.PathLike) -> list[dict[str, Any]]:
    return [parse(line, f"{path}:{number}") for number, line in enumerate(text.split(b"\n")[:-1], start=1)]


@contextlib.contextmanager
def open_log(path: str | os.PathLike) -> Iterator[EventLog]:
    """Opens (or creates, with its folder) the file, locked against other processes until the block ends.

    Raises RecordError for a line that is not JSON, ValueError if another process has it open, OSError from the system.
    """
    with path_of(path).growing() as file:
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(folder)  # the file's name
        finally:
            os.close(folder)
        yield EventLog(file)


# ----------------------------------------------------------------------------------------------------------- selection
#
# Mostly wrong answers that the model finds convincing (Lightman et al. 2023, section 2). A model learns little from
# chains that it already scores correctly, and most random chains are such. But a sample chosen by a model does not
# represent all chains, so some are sampled from all of them, with known probability. A tree counts as its most
# convincing chain.


def select(trees: Sequence[ReasoningTree], config: SelectConfig, scale: Scale = PROBABILITY) -> list[ReasoningTree]:
    """Returns the selected trees, at most `config.count`, shuffled, as copies with the key `selection` in `extra`.

    `selection` is {"stratum": ...}: `convincing`, `rest`, `disagreement`, `random` or `fill`; random ones also have
    their `probability`. Random trees are sampled first and from all trees, so that they represent all. If a stratum has
    too few trees, random others replace them (`fill`). Duplicates count once. `scale` defines the meaning of scores,
    which are compared with labels as fractions.

    Raises ValueError if a tree has no scores, or one outside the scale.
    """
    left = list({(tree.problem, *map(_said, tree.nodes)): tree for tree in trees}.values())
    rated = {id(tree): rated_tree(tree) for tree in left}
    scores = {id(tree): scale.fractions(scores_of(rated[id(tree)]), repr(tree.problem[:60])).tolist() for tree in left}

    def convincing(tree: ReasoningTree, wrong: bool) -> float | None:
        """Returns the lowest score of the most convincing chain, optionally only among chains known to be wrong."""
        steps = rated[id(tree)]
        chains = [path for path in chains_of(steps) if not wrong or steps.nodes[path[-1]].correct is False]
        return max((min(scores[id(tree)][i] for i in path) for path in chains), default=None)

    rng = np.random.default_rng(config.seed)
    order = rng.permutation(len(left))
    total, count = len(left), min(config.count, len(left))
    counts = {name: round(count * getattr(config, name)) for name in ("convincing", "rest", "disagreement")}
    pools: dict[str, Callable[[ReasoningTree], float | None]] = {
        "convincing": lambda tree: convincing(tree, wrong=True),
        "disagreement": lambda tree: _distance(rated[id(tree)], scores[id(tree)]),
        "rest": lambda tree: convincing(tree, wrong=False),
    }
    drawn = {int(i) for i in order[: count - sum(counts.values())]}
    chosen: dict[int, str] = {}
    for name, key in pools.items():
        free = [i for i in range(total) if i not in drawn and i not in chosen]
        ranked = [(value, i) for i in free if (value := key(left[i])) is not None]
        ranked.sort(key=lambda pair: (-pair[0], pair[1]))
        chosen |= {i: name for _, i in ranked[: counts[name]]}
    probability = len(drawn) / total if total else 0.0
    chosen |= dict.fromkeys(sorted(drawn), "random")
    more = (int(i) for i in order if i not in chosen)
    chosen |= {next(more): "fill" for _ in range(count - len(chosen))}
    places = sorted(chosen)
    selection = [{"stratum": chosen[i]} | ({"probability": probability} if i in drawn else {}) for i in places]
    return [
        dataclasses.replace(left[places[k]], extra={**left[places[k]].extra, "selection": selection[k]})
        for k in rng.permutation(len(places))
    ]


def _said(node: Node) -> tuple:
    return node.parent, node.role, node.text, json.dumps(node.extra.get("tool_calls") or ())


def _distance(tree: ReasoningTree, scores: Sequence[float]) -> float | None:
    """Returns the largest distance of a score from its label, both in [0, 1], if there are labels."""
    low = -1.0 if tree.semantics in ("rating", "advantage") else 0.0
    pairs = zip(scores, tree.nodes, strict=True)
    labelled = [(score, node.label) for score, node in pairs if node.label is not None]
    return max((abs(score - (label - low) / (1 - low)) for score, label in labelled), default=None)


def select_file(
    source: str | os.PathLike,
    output: str | os.PathLike,
    config: SelectConfig,
    exclude: Iterable[str | os.PathLike] = (),
) -> dict[str, Any]:
    """Writes selected chains or trees from a file of scored records, replacing `output` atomically.

    Returns counts: `chains` (or `trees`, if `config.alternatives` is above 0) read, `excluded`, `selected`, and one per
    stratum that occurs (`select`). Problems in the benchmark files `exclude` are left out, compared as normalised text.
    `SOURCE.info.json`, written by `jprm score`, defines the meaning of the scores; without it they are probabilities.

    Raises ValueError if no chain is left, a chain has no scores, or `output` is also an input; RecordError for a bad
    record; FileNotFoundError for a missing file.
    """
    exclude = list(exclude)
    check_output(output, source, *exclude)
    banned = {problem for path in exclude for problem in problems_in(path)}
    trees = list(trees_in(source, config.alternatives) if config.alternatives else chains_in(source))
    left = [tree for tree in trees if not banned or normalise(tree.problem) not in banned]
    chosen = select(left, config, stored_scale(source))
    if not chosen:
        raise ValueError(f"{os.fspath(source)}: no chain is left to select")
    write_records(output, map(record_of, chosen))
    strata = collections.Counter(tree.extra["selection"]["stratum"] for tree in chosen)
    kind = "trees" if config.alternatives else "chains"
    return {kind: len(trees), "excluded": len(trees) - len(left), "selected": len(chosen), **strata}

"""Labelling jobs from file to file, for `jprm label`. A repeated call continues, except for consensus.

All jobs wait for their work, with a progress bar. `output` appears only once it is complete; its folder is created.
Each raises FileNotFoundError if `input` is absent, RecordError for an invalid record, and ValueError if the input is
empty or damaged, or the output is an input, a link or in use.

Most write `OUTPUT.part` first: the same call continues it, and only counts if the output is complete. If the output is
of another request, they raise ValueError and touch no file. `mc`, `omega` and `critique` keep their samples in a file
instead, and write the output again.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import jax

from jprm import loading
from jprm.checkpoints import base
from jprm.devices import enable_compile_cache
from jprm.io.jsonl import count, dump, parse, read_lines, write_records
from jprm.io.outputs import Bar, check_input, check_output, continued, cut, digest, finish, input_of
from jprm.io.storage import path_of
from jprm.methods.implicit import LogProbability
from jprm.methods.jobs.score import identity
from jprm.methods.judge.critiques import KEY, cost, read
from jprm.methods.judge.judge import Judge
from jprm.methods.label.config import CritiqueConfig, Labeller, MonteCarloConfig, OmegaConfig
from jprm.methods.label.monte_carlo import Rollouts, label_problems, label_trees
from jprm.methods.policy.protocol import Policy, turn_policy
from jprm.methods.policy.sample_cache import KeptPolicy
from jprm.methods.verify import tests_of, verifiers
from jprm.methods.verify.verifiers import Outcome, Verifier, checker, labelled
from jprm.model import Dtype
from jprm.model.heads import of_channels
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.options import find_part, place_of
from jprm.score.scorer import CHUNK, PRM
from jprm.token_tree import REFERENCE
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.tree import ReasoningTree, as_tree, as_written, chains_of, read_records, record_of, tree_of, with_labels

Path = str | os.PathLike

OUTCOMES_AT_ONCE = 64
"""Records whose chains are judged together, because programs run in batches."""

FLUSH_SECONDS = 1.0
"""Maximum seconds of work lost by a kill. In a bucket, each flush writes an object."""


def label_monte_carlo(policy: Policy, input: Path, output: Path, rollouts: Path, config: MonteCarloConfig) -> dict:
    """Labels a file with Monte Carlo values (`label_trees`); returns counts.

    They are `trees`, `labels`, this call's successful `rollouts` and `failed` ones, and `tokens` of all stored
    rollouts. Rollouts are kept in the file `rollouts`, locked: a repeated call samples only missing ones, and replaces
    `output`. A policy that acts in an environment uses its rewards in place of `config.verifier`.

    Raises:
      FileNotFoundError: `input` is absent.
      ValueError: the verifier is unknown, the input is empty, or `output` or `rollouts` is also an input or in use.
      RecordError: a record is invalid, or the verifier cannot judge it; raised before any rollout is sampled.
      PolicyError: the policy failed at all rollouts of a batch; earlier ones are kept.
      OSError: the verifier needs a sandbox, and there is none; raised before any rollout is sampled.
    """
    if acting := turn_policy(policy):
        config = dataclasses.replace(config, verifier="outcome")  # the environment rewards its own episodes
    _check(input, output, rollouts, config.verifier)
    with Rollouts(policy, rollouts) as drawn, _bar(output, count(input)) as bar:
        trees = label_trees(map(acting.steps_of, trees_in(input)) if acting else trees_in(input), drawn, config)
        trees = map(acting.messages_of, trees) if acting else trees
        write_records(output, map(record_of, bar.follow(trees)))
    return _counted(output, drawn)


def label_omega(policy: Policy, input: Path, output: Path, rollouts: Path, config: OmegaConfig) -> dict:
    """Writes OmegaPRM's trees for a file's problems; returns counts.

    They are `trees`, `labels`, this call's successful `rollouts` and `failed` ones, `tokens` of all stored rollouts,
    and the problems left out, by reason: `too easy`, `too hard`, `no rollouts`, `nothing found`, absent if 0. Records
    may be only a problem. The file `rollouts`, locked, keeps them: a repeated call samples only missing ones, and
    replaces `output`. A policy that acts in an environment uses its rewards in place of `config.verifier`.

    Raises FileNotFoundError if `input` is absent, RecordError for a record that is invalid or that the verifier cannot
    judge, ValueError for an unknown verifier, an empty input or files in use, PolicyError if the policy failed at all
    rollouts of more than `FAILED_IN_A_ROW` (16) prefixes in a row, OSError if the verifier's sandbox is missing.
    """
    if acting := turn_policy(policy):
        config = dataclasses.replace(config, verifier="outcome")
    _check(input, output, rollouts, config.verifier, _problems)
    if acting:
        acting.know(input)
    left_out = collections.Counter()
    with Rollouts(policy, rollouts) as drawn, _bar(output, count(input)) as bar:
        trees = label_problems(bar.follow(_problems(input)), drawn, config, left_out=left_out)
        write_records(output, map(record_of, map(acting.messages_of, trees) if acting else trees))
    return _counted(output, drawn, left_out)


def label_critique(judge: Judge, input: Path, output: Path, critiques: Path, config: CritiqueConfig) -> dict:
    """Writes the critiques whose verdicts match the labels (`matching_critiques`); returns counts.

    They are `trees`, `questions`, `critiques`, `matching`, `kept`, `tokens` (generated), the critiques by status, e.g.
    `read`, and `unknown` questions, whose labels differ. All critiques are kept in the file `critiques`: a repeated
    call samples only missing ones, and replaces `output`.

    Raises:
      FileNotFoundError: `input` is absent; RecordError for an invalid record.
      ValueError: the file has no label, its semantics no default threshold, or one path is given twice.
      PolicyError: every critique of some trees failed.
      OSError: the judge's prompt runs code, and there is no sandbox.
    """
    check_output(output, input, critiques)
    check_output(critiques, input)
    trees = list(trees_in(input))
    if not any(node.label is not None for tree in trees for node in tree.nodes):
        raise ValueError(f"{os.fspath(input)}: no step has a label, so no critique can match one")
    counts = collections.Counter(trees=0, questions=0, critiques=0, matching=0, kept=0, tokens=0)
    with KeptPolicy(judge.policy, critiques) as policy, _bar(output, len(trees)) as bar:
        judge = dataclasses.replace(judge, policy=policy)
        write_records(output, matching_critiques(bar.follow(trees), judge, config, counts))
    return dict(counts)


def label_consensus(
    input: Path, others: Sequence[Path], output: Path, thresholds: tuple[float | None, float | None] = (None, None)
) -> dict:
    """Writes the chains of `input` on whose first error all `others` agree, each as a tree of one branch, without `id`
    and `scores` (see `consensus`); returns counts of chains.

    They are `kept`, and the dropped ones by reason, summed over the others: `disagree`, `unlabelled`, `repeated`, `not
    in the other`, absent if 0. `thresholds` are for the input and the others: a label below is an error; `None` is the
    default of the semantics (`THRESHOLDS`). A repeated call replaces `output`.

    Raises ValueError if semantics have no default threshold, a file is empty or also `output`; FileNotFoundError if
    one is absent, RecordError for an invalid record, IndexError if there are no `others`.
    """
    check_output(output, input, *others)
    for path in (input, *others):
        count(path)  # raises if the file is empty
    trees, by_other = trees_in(input), []
    for other in others:
        by_other.append(collections.Counter(kept=0))
        trees = consensus(trees, trees_in(other), thresholds=thresholds, counts=by_other[-1])
    write_records(output, map(record_of, trees))
    dropped = sum(by_other, collections.Counter())
    return {"kept": by_other[-1]["kept"], **{reason: n for reason, n in dropped.items() if reason != "kept"}}


def label_verify(kind: str, input: Path, output: Path, *, in_sandbox: bool = True) -> dict:
    """Labels a file by computation; counts `trees`, and steps that are `correct`, `incorrect` or `not checkable`.

    Their labels are 1, 0 and `None`. All four keys are present. `OUTPUT.part` is written first: the same call continues
    it, and only counts if `output` is complete. Without `in_sandbox`, code runs with the user's permissions. `kind` is
    arithmetic, python, coq or a checker's FILE.json.

    Raises FileNotFoundError if `input` is absent, ValueError for an unknown kind, an empty input or an `output` of
    another request, RecordError for a damaged checker or a record that it cannot check, OSError if the checker is
    absent, or there is no sandbox.
    """
    check = checker(kind, in_sandbox=in_sandbox)
    for number, tree in enumerate(trees_in(input), start=1):
        if kind == "python":
            tests_of(tree.extra, f"{os.fspath(input)}: record {number}")
    request: dict[str, Any] = {"kind": kind, "sandbox": in_sandbox}
    if kind.endswith(".json"):
        request["digests"] = {"checker": digest(check)}
    _continued(input, output, request, lambda trees: [labelled(tree, check(tree)) for tree in trees], chunk=1)
    counts = collections.Counter({"trees": 0, "correct": 0, "incorrect": 0, "not checkable": 0})
    for tree in trees_in(output):
        counts["trees"] += 1
        counts.update({1: "correct", 0: "incorrect", None: "not checkable"}[node.label] for node in tree.nodes)
    return dict(counts)


def label_own(name: str, input: Path, output: Path) -> dict:
    """Labels a file by the user's `Labeller`, module:NAME or FILE.py:NAME; counts `trees` and `labels`.

    All records are checked first. `OUTPUT.part` is written first: the same call continues it, and only counts if
    `output` is complete. Errors of the user's code pass.

    Raises:
      FileNotFoundError: `input` is absent; RecordError for an invalid record.
      ValueError: the input is empty, or `output` is of another request.
      ValueError: the labeller does not exist, rejects a record, or returns a label outside its semantics.
    """
    labeller: Labeller = find_part(name, {}, "labeller", Labeller, files=True)
    for number, tree in enumerate(trees_in(input), start=1):
        labeller.check(tree, f"{os.fspath(input)}: record {number}")

    def labels(trees: list[ReasoningTree]) -> list[ReasoningTree]:
        done = [with_labels(tree, labeller.labels(tree), labeller.semantics, name) for tree in trees]
        return [tree_of(record_of(tree), f"{name}: {tree.problem[:60]!r}") for tree in done]

    _continued(input, output, {"labeller": name, "digests": {"labeller": digest(labeller)}}, labels, chunk=1)
    return _counted(output)


def label_outcomes(verifier: str, input: Path, output: Path) -> dict:
    """Judges a file's chains by a verifier (`with_outcomes`); counts `chains`, `correct`, and `undecided` if above 0.

    `verifier` is `answer`, `tests`, a checker's FILE.json, module:NAME or FILE.py:NAME. `OUTPUT.part` is written first:
    the same call continues it, and only counts if `output` is complete.

    Raises FileNotFoundError if `input` is absent, ValueError if the verifier is unknown, the input is empty, or
    `output` is of another request; before any is judged, RecordError if it cannot judge a record, and OSError if it
    needs a sandbox and there is none.
    """
    judge = verifiers.find(verifier)
    for number, tree in enumerate(trees_in(input), start=1):
        judge.check(verifiers.record_of_problem(tree), f"{os.fspath(input)}: record {number}")
    request = {"verifier": verifier, "digests": {"verifier": digest(judge)}}
    _continued(input, output, request, lambda trees: with_outcomes(judge, trees), chunk=OUTCOMES_AT_ONCE)
    judged = list(trees_in(output))
    outcomes = [node.correct for tree in judged for node in tree.nodes if node.correct is not None]
    undecided = sum(verifiers.UNDECIDED in part.extra for tree in judged for part in (tree, *tree.nodes))
    counts = {"chains": len(outcomes) + undecided, "correct": sum(outcomes)}
    return counts | ({"undecided": undecided} if undecided else {})


def label_teacher(model: Path, input: Path, output: Path) -> dict:
    """Labels a file with the scores of a teacher, a PRM's folder; counts `trees` and `labels`.

    `OUTPUT.part` is written first: the same call continues it, and only counts if `output` is complete.

    Raises FileNotFoundError if a file or the model is absent, ValueError if the model is damaged or its scores are not
    probabilities, the input is empty, or `output` is of another request; RecordError for an invalid record.
    """
    check_output(output, input)
    check_input(input)
    prm = loading.load(model)
    _continued(input, output, identity(prm), lambda trees: teacher_labels(prm, trees), chunk=CHUNK)
    return _counted(output)


def label_judge(judge: Judge, input: Path, output: Path, domain: str, rubric: str) -> dict:
    """Labels a file with a judge's scores; counts `trees`, `labels` and `generated_tokens`.

    `domain` and `rubric` are texts, stored in every record but not shown to the judge. `OUTPUT.part` is written first:
    the same call continues it, and only counts if `output` is complete. Raises FileNotFoundError if `input` is absent,
    RecordError for an invalid record, ValueError if a text is blank, the input empty, or `output` of another request;
    PolicyError if every critique of a batch of 64 records failed, OSError if the prompt lacks its sandbox.
    """
    if not domain.strip() or not rubric.strip():
        raise ValueError("labels of a judge need a domain, and a rubric that defines a correct step")
    request = judge.identity | {"domain": domain, "rubric": rubric}
    _continued(input, output, request, lambda trees: judge_labels(judge, trees, domain, rubric), chunk=CHUNK)
    return _counted(output) | {"generated_tokens": cost(read_records(output))["tokens"]}


def _counted(output: Path, drawn: Rollouts | None = None, left_out: Mapping[str, int] = {}) -> dict:
    """Counts labelled trees, problems left out, and sampled rollouts."""
    counts = collections.Counter(trees=0, labels=0)
    for tree in trees_in(output):
        counts["trees"] += 1
        counts["labels"] += sum(node.label is not None for node in tree.nodes)
    spent = {"rollouts": drawn.sampled, "tokens": drawn.tokens, "failed": drawn.failed} if drawn else {}
    return {**counts, **left_out, **spent}


def label_reference(model: Path, input: Path, output: Path, dtype: Dtype = "float32") -> dict:
    """Adds a language model's log-probabilities to a file's records; counts `trees` and `log-probabilities` (nodes).

    `model` is as in `load_reference`, `dtype` the type of its weights. `OUTPUT.part` is written first: the same call
    continues it, and only counts if `output` is complete.

    Raises FileNotFoundError if a file or the model is absent, ValueError if the model has no language head or is
    damaged, the input is empty or has trajectories, or `output` is of another request; RecordError for an invalid
    record, OSError if the Hub does not answer.
    """
    check_output(output, input)
    check_input(input)
    reference = load_reference(model, dtype)
    request = identity(reference) | {"stored": dtype}
    _continued(input, output, request, lambda trees: with_log_probabilities(reference, trees), chunk=CHUNK)
    sizes = [len(tree.nodes) for tree in trees_in(output)]
    return {"trees": len(sizes), "log-probabilities": sum(sizes)}


# ---- Labels by a verifier, a teacher, a judge and a reference.

_CUT_OFF = Outcome(0.0, {"answer": None})


def with_outcomes(verifier: Verifier, trees: Sequence[ReasoningTree]) -> list[ReasoningTree]:
    """Sets `correct` at the end of every chain, and stores the verifier's other results in the node's `extra`.

    A sample's `answer` is replaced; a chain keeps its record's answer. If `finish_reason` is not `stop`, the chain was
    cut off: it is incorrect and has no answer. A search's unfinished branches are unchanged. All chains are judged in
    one batch. A chain is correct if its reward is at least 1; `correct` is `None` if the verifier left it undecided
    (`extra["undecided"]`). Returns new trees; the verifier's errors pass.
    """
    problems = [(tree, verifiers.record_of_problem(tree), chains_of(tree)) for tree in trees]
    whole = [
        (record, _texts(tree, chain)) for tree, record, chains in problems for chain in chains if _is_whole(tree, chain)
    ]
    judged = iter(verifier.judge(whole) if whole else ())
    return [
        _with_leaves(tree, {
            chain[-1]: next(judged) if _is_whole(tree, chain) else _CUT_OFF
            for chain in chains
            if tree.kind != "tree" or _is_whole(tree, chain)
        })
        for tree, _, chains in problems
    ]  # fmt: skip


def _texts(tree: ReasoningTree, chain: Sequence[int]) -> list[str]:
    """Returns a chain's steps, or the original text they were split from, which preserves indentation."""
    steps = [tree.nodes[i].text for i in chain]
    text = (tree if tree.kind == "chain" else tree.nodes[chain[-1]]).extra.get("response")
    same = isinstance(text, str) and "".join(text.split()) == "".join("".join(steps).split())
    return [text] if same and isinstance(text, str) else steps


def _is_whole(tree: ReasoningTree, chain: Sequence[int]) -> bool:
    leaf = tree.nodes[chain[-1]].extra
    return any(draw.get("finish_reason", "stop") == "stop" for draw in leaf.get("draws", [leaf]))


def _with_leaves(tree: ReasoningTree, outcome: dict[int, Outcome]) -> ReasoningTree:
    nodes, earlier = list(tree.nodes), {verifiers.UNDECIDED, verifiers.UNPROVED}
    for leaf, judgement in outcome.items():
        about = {key: value for key, value in judgement.about.items() if key != "answer" or tree.kind != "chain"}
        extra = {key: value for key, value in nodes[leaf].extra.items() if key not in earlier} | about
        correct = None if verifiers.UNDECIDED in about else judgement.reward >= 1
        nodes[leaf] = dataclasses.replace(nodes[leaf], correct=correct, extra=extra)
    extra = {key: value for key, value in tree.extra.items() if key not in earlier}  # of a chain: its record's keys
    return dataclasses.replace(tree, nodes=tuple(nodes), extra=extra)


def teacher_labels(prm: PRM, trees: Sequence[ReasoningTree]) -> list[ReasoningTree]:
    """Labels every node with the teacher's score; `origin` is `model:NAME@STEP`.

    Returns new trees of kind `tree`, also for chains and pools; context nodes stay unlabelled.

    Labels have semantics `value` if the teacher was trained on outcomes, else `correctness`: a teacher trained on
    ratings outputs the probability that a step is correct, not a rating.

    Raises ValueError if the teacher's scores are not probabilities (advantages, implicit rewards).
    """
    if prm.semantics in ("advantage", "implicit"):
        raise ValueError(f"{prm.name}: its scores, of semantics {prm.semantics!r}, are no probabilities to label by")
    semantics = "value" if prm.semantics == "value" else "correctness"
    origin = f"model:{pathlib.Path(prm.name).name}@{prm.step}"
    return [
        with_labels(tree, map(as_written, score_N), semantics, origin)
        for tree, score_N in zip(trees, prm.score_trees(trees), strict=True)
    ]


def judge_labels(judge: Judge, trees: Sequence[ReasoningTree], domain: str, rubric: str) -> list[ReasoningTree]:
    """Labels every node with the judge's score in [0, 1]; nodes without a readable critique stay unlabelled.

    Returns new trees of kind `tree`, also for chains and pools, and semantics `correctness`. Each stores the critiques
    and their counts under `judge` in its `extra`, and `domain` and `rubric`, which the judge does not see. Raises
    PolicyError if every critique failed, OSError if the prompt runs code and there is no sandbox.
    """
    results = []
    for tree, judgement in zip(trees, judge.judgements(trees), strict=True):
        labels = [None if math.isnan(score) else as_written(score) for score in judgement.score_N]
        scored = with_labels(tree, labels, "correctness", f"judge:{judge.name}")
        about = {"domain": domain, "rubric": rubric, KEY: {"name": judge.name, **judgement.report}}
        results.append(dataclasses.replace(scored, extra={**scored.extra, **about}))
    return results


def load_reference(path: str | os.PathLike, dtype: Dtype = "float32") -> PRM:
    """Loads a language model to score each step by the chain's log-probability up to and including it.

    `path` may be any valid `base` for an experiment: a run, a Hugging Face folder or `hf://` address, a GGUF file.
    `dtype` is the type of its weights. The result's scores are log-probabilities in nats, semantics `implicit`. It uses
    all local devices.

    Raises ValueError if the model has no language head, or is damaged; FileNotFoundError if absent, OSError if the Hub
    does not answer.
    """
    enable_compile_cache()
    attention = "paths" if jax.default_backend() == "cpu" else "blocked"
    config = base.model_config(path, head=of_channels(0), attention=attention)
    grid = make_mesh(MeshConfig(), jax.local_devices())
    with jax.set_mesh(grid):
        params = base.load_language_model(path, config, dtype)
    layout = native_layout(load_tokenizer(path, config.vocab_size))
    name = str(place_of(path).resolve())
    return PRM(params, config, layout, grid, "implicit", name, 0, ratio=LogProbability(config))


def with_log_probabilities(reference: PRM, trees: Sequence[ReasoningTree]) -> list[ReasoningTree]:
    """Stores the log-probability of the chain up to each node, in nats, in the node's `extra["reference"]`.

    The tree's `extra` gets the model's name under the same key. Returns new trees of kind `tree`. Raises ValueError for
    a trajectory.
    """
    results = []
    if turns := next((tree for tree in trees if tree.of_messages), None):
        remedy = 'train on it with data.extras=["begin"], which computes the reference model'
        raise ValueError(f"problem {turns.problem[:60]!r}: is a trajectory, without a place for these: {remedy}")
    for tree, log_N in zip(map(as_tree, trees), reference.score_trees(trees), strict=True):
        extras = [{**node.extra, REFERENCE: float(log)} for node, log in zip(tree.nodes, log_N, strict=True)]
        nodes = tuple(dataclasses.replace(node, extra=extra) for node, extra in zip(tree.nodes, extras, strict=True))
        extra = {**tree.extra, REFERENCE: pathlib.Path(reference.name).name}
        results.append(dataclasses.replace(tree, nodes=nodes, extra=extra))
    return results


# ---- Files.


def _continued(
    input: Path, output: Path, request: dict, label: Callable[[list[ReasoningTree]], list[ReasoningTree]], chunk: int
) -> None:
    """Labels the trees of `input`, `chunk` at a time, into `OUTPUT.part`, which is renamed when complete.

    The same request continues after the last whole chunk; a finished `output` stays.

    Raises ValueError as `jprm.io.outputs`, before any file is changed.
    """
    output, total = path_of(output), count(input)
    request = request | input_of(input)
    with continued(output, request) as part:
        if part is None:
            return
        written, due = cut(part, chunk), 0.0
        with _bar(output, total, written) as bar:
            trees = islice(trees_in(input), written, None)
            while batch := list(islice(trees, chunk)):
                part.write("".join(f"{dump(record_of(tree))}\n" for tree in label(batch)).encode())
                if time.monotonic() >= due:
                    part.flush()
                    due = time.monotonic() + FLUSH_SECONDS
                bar.add(len(batch))
        finish(part, output, request)


def trees_in(path: Path) -> Iterator[ReasoningTree]:
    return map(tree_of, read_records(path))


def _problems(path: Path) -> Iterator[ReasoningTree]:
    """Like `trees_in`, but accepts records that are only a problem; these get a dummy step."""
    for number, line in read_lines(path):
        where = f"{os.fspath(path)}:{number}"
        record = parse(line, where)
        alone = isinstance(record, Mapping) and not {"steps", "samples", "nodes", "completions"} & set(record)
        yield tree_of({**record, "steps": ["-"]} if alone else record, where)


def _check(
    input: Path, output: Path, rollouts: Path, verifier: str, read: Callable[[Path], Iterator[ReasoningTree]] = trees_in
) -> None:
    """Rejects bad input before the first rollout is sampled."""
    check_output(output, input, rollouts)
    check_output(rollouts, input)
    check = verifiers.find(verifier).check
    for number, tree in enumerate(read(input), start=1):
        check(verifiers.record_of_problem(tree), f"{os.fspath(input)}: record {number}")


def _bar(output: Path, total: int, done: int = 0) -> Bar:
    return Bar(f"labelling {os.path.basename(output)}", total, done)


# ------------------------------------------------------------------------------------- first errors by several opinions
#
# Consensus keeps chains on whose first error two label sources agree. With Monte Carlo labels and a judge, Zhang et al.
# (arXiv:2501.07301) keep about 40 % of their chains, and raise their model's F1 on ProcessBench from 40.2 to 66.5.
#
# Critiques to train a generative verifier are sampled from a judge and kept if their verdict equals the known label.
# This is rejection sampling, as for ThinkPRM (Khalifa et al. 2025, arXiv 2504.16828): a critique with the correct
# verdict counts as a correct critique. `objective="next_token"` trains on the kept ones.

THRESHOLDS = {"correctness": 0.5, "rating": 0.0, "value": math.ulp(0.0)}
"""A label below this is an error: more likely incorrect than correct; rated -1; without a correct rollout."""


def first_error(labels: Sequence[float | None], threshold: float) -> int | None:
    """Returns the first index, from 0, with a label below the threshold; -1 if there is no error.

    `None` if an unlabelled step comes before it, or before the end. Labels after the first error may be missing.
    """
    for i, label in enumerate(labels):
        if label is None:
            return None
        if label < threshold:
            return i
    return -1


def threshold_of(tree: ReasoningTree, threshold: float | None) -> float:
    """Returns `threshold`, below which a label is an error, or if `None` the default of the tree's semantics.

    `THRESHOLDS`: 0.5 for `correctness`, 0 for `rating`, the least positive float for `value` (an error is exactly 0).
    Raises ValueError for other semantics.
    """
    threshold = THRESHOLDS.get(tree.semantics) if threshold is None else threshold
    if threshold is None:
        raise ValueError(f"labels of semantics {tree.semantics!r} need a threshold below which a step is an error")
    return threshold


def consensus(
    source: Iterable[ReasoningTree],
    other: Iterable[ReasoningTree],
    *,
    thresholds: tuple[float | None, float | None] = (None, None),
    counts: collections.Counter | None = None,
) -> Iterator[ReasoningTree]:
    """Yields the chains of `source` on whose first error `other` agrees, each once, as a tree with one branch.

    Chains are equal if their problems, steps and tool calls are. A kept chain has the labels of `source`, and the index
    of its first error, or -1, as `consensus` in the tree's `extra`, which loses `id` and `scores`.

    Args:
      source: trees; every pool sample and every tree path is a chain.
      other: the same.
      thresholds: the two sources' error thresholds, by default of their semantics.
      counts: receives chain counts by outcome: kept, disagree, unlabelled (the first error is unknown in either
        source, or equal chains of `other` differ), repeated, not in the other.

    Lazy, but reads all of `other` first. Raises ValueError for semantics without a default threshold.
    """
    counts = collections.Counter() if counts is None else counts
    errors: dict[bytes, int | None] = {}
    for tree in other:
        for key, _, first in _chains(tree, thresholds[1]):
            if errors.setdefault(key, first) != first:
                errors[key] = None  # the source disagrees with itself
    seen = set()
    for tree in source:
        for key, path, first in _chains(tree, thresholds[0]):
            if key in seen:
                counts["repeated"] += 1
            elif key not in errors:
                counts["not in the other"] += 1
            elif first is None or errors[key] is None:
                counts["unlabelled"] += 1
            elif first != errors[key]:
                counts["disagree"] += 1
            else:
                counts["kept"] += 1
                yield _branch(tree, path, first)
            seen.add(key)


def _chains(tree: ReasoningTree, threshold: float | None) -> Iterator[tuple[bytes, list[int], int | None]]:
    threshold, keys = threshold_of(tree, threshold), step_keys(tree)
    for path in chains_of(tree, context=True):
        yield keys[path[-1]], path, first_error(labels_of(tree, path, threshold), threshold)


def step_keys(tree: ReasoningTree) -> dict[int, bytes]:
    """Returns {node index: SHA-256 digest (bytes)} for each step: of the problem and all messages up to it.

    Equal steps after equal prefixes have equal digests, in any file.
    """
    digests: list[bytes] = []
    for node in tree.nodes:
        above = digests[node.parent] if node.parent >= 0 else tree.problem.encode()
        content = json.dumps([node.text, node.extra.get("tool_calls")]).encode()
        digests.append(hashlib.sha256(above + b"\n" + content).digest())
    return {i: digests[i] for i in tree.steps}


def labels_of(tree: ReasoningTree, path: Sequence[int], threshold: float) -> list[float | None]:
    """Returns the step labels along a path (node indices); `None` if unlabelled. Context nodes are left out.

    For semantics `value` and their default `threshold`, gaps are filled as in `implied`.
    """
    labels = [tree.nodes[i].label for i in path if tree.nodes[i].is_step]
    return implied(labels) if tree.semantics == "value" and threshold == THRESHOLDS["value"] else labels


def implied(values: Sequence[float | None]) -> list[float | None]:
    """Returns a chain's values with each gap (`None`) filled by the next positive value, if any; else it stays `None`.

    A correct completion of a prefix also completes every shorter prefix, so these values must be positive too. A tree
    search values only a few prefixes.
    """
    filled, later = [], None
    for value in reversed(values):
        filled.append(later if value is None else value)
        later = value or later
    return filled[::-1]


def _branch(tree: ReasoningTree, path: Sequence[int], first: int) -> ReasoningTree:
    tree = as_tree(tree)
    nodes = tuple(dataclasses.replace(tree.nodes[i], parent=depth - 1) for depth, i in enumerate(path))
    extra = {key: value for key, value in tree.extra.items() if key not in ("scores", "id")} | {"consensus": first}
    return dataclasses.replace(tree, nodes=nodes, kind="tree", extra=extra)


# ---- Critiques whose verdict is the label.


def matching_critiques(
    trees: Iterable[ReasoningTree], judge: Judge, config: CritiqueConfig, counts: collections.Counter
) -> Iterator[dict[str, Any]]:
    """Yields a record per kept critique: `problem` (question), `steps` (critique), `verdict`, `origin` (judge).

    The verdict is 1 (correct step) or 0; for prompts about whole chains, the index (from 0) of the first error or -1.
    Only questions with a known verdict are asked, and at most `config.most` critiques kept per question. `counts`
    receives `trees`, `questions`, `critiques`, `matching` and `kept` critiques, `tokens`, critiques by status, e.g.
    `read`, and `unknown` questions, whose labels differ.

    Raises:
      ValueError: semantics without a default threshold.
      PolicyError: every critique of `config.trees_at_once` trees failed.
      OSError: the judge's prompt runs code, and there is no sandbox.
    """
    trees = iter(trees)
    while chunk := list(itertools.islice(trees, config.trees_at_once)):
        counts["trees"] += len(chunk)
        thresholds = [threshold_of(tree, config.threshold) for tree in chunk]
        known = [_known(tree, judge, threshold) for tree, threshold in zip(chunk, thresholds, strict=True)]
        asked = judge.critiques(chunk, [list(verdicts) for verdicts in known])
        for verdicts, answers in zip(known, asked, strict=True):
            for answer in answers:
                wanted = {verdicts[tuple(path)] for path in answer.paths if tuple(path) in verdicts}
                if len(wanted) != 1:  # labels of equal steps differ, or there are none
                    counts["unknown"] += 1
                    continue
                (verdict,) = wanted
                readings = [read(judge.prompt, critique, len(answer.paths[0])) for critique in answer.critiques]
                matching = [
                    critique for critique, reading in zip(answer.critiques, readings, strict=True)
                    if reading.status == "read" and _verdict(judge, reading.correct, 0.5) == verdict
                ]  # fmt: skip
                kept = matching[: config.most]
                counts.update(reading.status for reading in readings)
                counts.update(questions=1, critiques=len(readings), matching=len(matching), kept=len(kept),
                              tokens=sum(critique.tokens for critique in answer.critiques))  # fmt: skip
                opening = [judge.prompt.opening] if judge.prompt.opening else []
                for critique in kept:
                    steps = [*opening, *critique.steps]
                    yield {"problem": answer.question, "steps": steps, "verdict": verdict, "origin": judge.name}


def _known(tree: ReasoningTree, judge: Judge, threshold: float) -> dict[tuple[int, ...], int]:
    """Returns the verdicts implied by the labels, by path."""
    labels_of_path = {tuple(path): [tree.nodes[i].label for i in path] for path in judge.paths(tree)}
    verdicts = {path: _verdict(judge, labels, threshold) for path, labels in labels_of_path.items()}
    return {path: verdict for path, verdict in verdicts.items() if verdict is not None}


def _verdict(judge: Judge, labels: Sequence[float | None], threshold: float) -> int | None:
    """Returns whether the last step is correct or, for prompts about whole chains, the first error's index or -1."""
    if judge.prompt.asks == "step":
        return None if labels[-1] is None else int(labels[-1] >= threshold)
    return first_error(labels, threshold)

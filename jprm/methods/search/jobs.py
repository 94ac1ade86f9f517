"""Searches from file to file, for `jprm search`.

Until `OUTPUT` is complete, three files are beside it: `OUTPUT.part` with a line per finished problem, `OUTPUT.samples`
with all policy samples, and `OUTPUT.info.json` with the request. So the same command continues: it repeats no
finished problem and pays for no sample twice.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from jaxtyping import Bool, Float, Int

from jprm.io.jsonl import Rejects, dump, read_lines, write_records
from jprm.io.outputs import Bar, atomic_file, check_output, check_own, check_unchanged, continued, cut, digest, input_of
from jprm.io.storage import path_of
from jprm.methods.answers import equivalent, extract, extract_answer
from jprm.methods.evaluate.conformal import Threshold, accept_threshold
from jprm.methods.evaluate.votes import answer_classes, relative
from jprm.methods.judge.critiques import KEY, ReadCritique, report
from jprm.methods.policy.protocol import Policy, read_problems
from jprm.methods.policy.sample_cache import KeptPolicy
from jprm.methods.search.growing_tree import CHOICES, Draw, GrowingTree
from jprm.methods.search.lockstep import LiveScorer, SearchConfig, search
from jprm.score.scale import PROBABILITY_RULES
from jprm.tree import RecordError, as_written, read_records

Path = str | os.PathLike


def search_file(
    policy: Policy,
    scorer: LiveScorer,
    scored_by: Mapping[str, Any],
    input: Path,
    output: Path,
    config: SearchConfig,
    *,
    on_error: str = "stop",
) -> dict[str, int]:
    """Writes the records (`record`) of a file's problems, in its order; returns counts, including earlier calls.

    The counts are `problems`, `chosen`, `correct`, `policy_tokens`, `over_budget_tokens`, and, if above 0, `cut` (off)
    samples and `failed_draws`; then `judge_tokens` for a judge, else `prm_tokens`, and `rejected`. A kill loses the
    tokens of an unfinished problem. `prm_tokens` and `rejected` are absent if the output was complete before: then it
    is only counted.

    `scored_by` identifies the scorer in the results, {} for `Unscored`. A problem without a single sampled step has no
    record: its line goes, byte for byte, to `OUTPUT.rejects`, like bad lines with on_error='skip'. Waits for the policy
    and the scorer, with a progress bar.

    Raises:
      RecordError: a bad line, for on_error='stop'.
      FileNotFoundError: `input` is absent.
      ValueError: `output`, or its part, belongs to another request or running process; no file is touched.
      ValueError: the input is empty or damaged, or a weighted vote has a negative weight.
      PolicyError: the policy does not answer; the same call continues once it does.
    """
    output = path_of(output)
    samples = output.with_name(output.name + ".samples")
    method, settings = type(config.method).__name__, dataclasses.asdict(cast(Any, config.method))
    about = {"method": method, **settings, "budget": config.budget, "seed": config.seed}
    request = {"policy": policy.name, "scorer": dict(scored_by), **input_of(input), **about,
               "rule": config.rule, "choose": config.choose, "digests": {"method": digest(config.method)}}  # fmt: skip
    with continued(output, request, samples) as part:
        if part is None:
            return _counts(output)
        with Rejects(output.with_name(output.name + ".rejects")) as rejects:
            problems = list(read_problems(input, on_error, rejects))
            check_unchanged(request, "Run again when nothing writes it")
            with KeptPolicy(policy, samples) as kept, Bar(f"searching {output.name}", len(problems)) as bar:
                cut(part, 1)  # a kill may leave half a line
                part.seek(0)
                done = {line["index"]: line for line in map(json.loads, part)}
                bar.add(len(done))
                left = [i for i in range(len(problems)) if i not in done]
                tokens = scorer.tokens
                about = {"method": method, **about, "policy": policy.name, "scorer": dict(scored_by)}
                for i, tree in search((problems[i][1] for i in left), kept, scorer, config):
                    result = record(tree, config.rule, config.choose, config.method.kind, about)
                    if result is not None and (rewrite := getattr(scorer, "written", None)):
                        result = rewrite(result)
                    line = {"index": left[i], "record": result, "prm_tokens": scorer.tokens - tokens}
                    if result is None:
                        line["reason"] = f"the policy wrote no step: {tree.error or 'every chain is empty'}"
                    tokens = scorer.tokens
                    part.write(dump(line).encode() + b"\n")
                    part.flush()
                    done[left[i]] = line
                    bar.add()
            for i in sorted(done):
                if done[i]["record"] is None:
                    error = RecordError(f"{os.fspath(input)}: problem {i + 1}", "problem", done[i]["reason"], "")
                    rejects.add(problems[i][0], error)
        check_own(output, request)
        with atomic_file(output) as file:  # named after the rejects: a whole output ends the next call
            results = (done[i]["record"] for i in sorted(done))
            file.writelines(dump(result).encode() + b"\n" for result in results if result is not None)
        part.unlink()
        samples.discard()
    tokens = {} if "judge" in scored_by else {"prm_tokens": sum(line["prm_tokens"] for line in done.values())}
    return _counts(output) | tokens | {"rejected": rejects.count}


def _counts(output: Path) -> dict[str, int]:
    counts = collections.Counter(problems=0, chosen=0, correct=0, policy_tokens=0, over_budget_tokens=0)
    for _, line in read_lines(output):
        written = json.loads(line)
        outcome = written["search"]
        counts.update(problems=1, chosen=outcome["chosen"] is not None, correct=outcome["correct"] is True)
        counts.update({name: outcome[name] for name in ("policy_tokens", "over_budget_tokens")})
        draws = written.get("samples") or [draw for node in written.get("nodes", ()) for draw in node.get("draws", ())]
        if cut_off := sum(draw.get("finish_reason") == "length" for draw in draws):
            counts["cut"] += cut_off
        if "failed" in outcome:
            counts["failed_draws"] += outcome["failed"]
        if KEY in written:
            counts["judge_tokens"] += written[KEY]["tokens"]
    return dict(counts)


# --------------------------------- the result: the best chain or the vote, and the record that keeps everything sampled


def best(key_N: Float[np.ndarray, " N"], answered_N: Bool[np.ndarray, " N"]) -> int | None:
    """Returns the index of the highest key, the first if tied; `None` if all are NaN or there are no keys.

    A chain not marked in `answered_N` is chosen only if no marked one has a key.
    """
    key_N = np.asarray(key_N, float)
    valid_N = ~np.isnan(key_N)
    if (valid_N & answered_N).any():
        valid_N &= answered_N
    index_M = np.flatnonzero(valid_N)
    return int(index_M[np.argmax(key_N[index_M])]) if len(index_M) else None


def vote(class_N: Int[np.ndarray, " N"], weight_N: Float[np.ndarray, " N"]) -> int | None:
    """Returns the class with the largest total weight, the lowest class if tied; `None` if all are -1 (no vote).

    `class_N` has each chain's answer class, from 0, `weight_N` its weight, which must be finite and at least 0: a NaN
    is unchecked and may win.
    """
    class_N = np.asarray(class_N)
    if not (class_N >= 0).any():
        return None
    total_C = np.bincount(class_N[class_N >= 0], np.asarray(weight_N, float)[class_N >= 0])
    share_C = total_C / (total_C.max() or 1)  # weights may be products of many scores, and all of them tiny
    return int(np.argmax(np.round(share_C, 12)))  # sums of equals in another order must still tie


@dataclasses.dataclass(frozen=True)
class Result:
    """The chosen chain: its draw's index in `tree.draws`, or `None` and the `reason`.

    `answer` is `None` if the chain states no answer, `score` (by the rule) if it is not finite, `correct` if unknown.
    """

    draw: int | None
    answer: str | None = None
    score: float | None = None
    correct: bool | None = None
    reason: str | None = None


Answers = dict[int, tuple[str | None, bool | None]]
"""Each chain's answer by its last node, and whether it is correct, if known."""


def choose(tree: GrowingTree, rule: str, how: str, answers: Answers) -> Result:
    """Chooses among the chains that finished within the token budget.

    `how` is "best" (the highest score by `rule`, among chains with an answer if there are any), "majority", or
    "weighted", a vote weighted by score. A vote returns the winning answer's best chain; without answers, the best of
    all. Votes count equivalent answers as one, as evaluations do (`jprm.methods.evaluate.votes.answer_classes`). If
    there is no such chain, the result has the reason. `answers` must be `answers_of(tree)`.

    Raises ValueError if `how` is unknown, a weighted vote has a negative weight, or `rule` multiplies scores outside
    [0, 1]; KeyError for an unknown rule.
    """
    if how not in CHOICES:
        raise ValueError(f"how is {how!r}: use one of {', '.join(CHOICES)}")
    draws = [i for i, draw in enumerate(tree.draws) if is_candidate(tree, draw)]
    if not draws:
        return Result(None, reason=_why_none(tree))
    nodes = [tree.draws[i].end for i in draws]
    value_N, key_N = tree.chain_scores(nodes, rule)
    class_N = answer_classes([answers[node][0] for node in nodes])
    if how != "best":
        if how == "majority":  # needs no score
            weight_N, key_N = np.ones(len(nodes)), np.where(np.isnan(key_N), -np.inf, key_N)
        else:
            if rule not in PROBABILITY_RULES and ((weight_N := tree.scale.weights(value_N)) < 0).any():
                remedy = "Name `weight` in the model's adapter, or choose by best or majority"
                raise ValueError(f"a vote needs weights from 0, and a chain has {np.nanmin(weight_N):.4g}. {remedy}")
            log_N = tree.scale.log_votes(key_N, rule)
            weight_N = relative(np.where((class_N >= 0) & ~np.isnan(log_N), log_N, -np.inf))
        winner = vote(class_N, weight_N)
        key_N = key_N if winner is None else np.where(class_N == winner, key_N, np.nan)
    at = best(key_N, class_N >= 0)
    if at is None:
        return Result(None, reason="no finished chain has a finite score at every step")
    score = float(value_N[at]) if math.isfinite(value_N[at]) else None
    return Result(draws[at], answers[nodes[at]][0], score, answers[nodes[at]][1])


def is_candidate(tree: GrowingTree, draw: Draw) -> bool:
    return draw.end in tree.finished and draw.sample.finish_reason == "stop" and not draw.over_budget


def _why_none(tree: GrowingTree) -> str:
    if tree.draws and all(draw.over_budget for draw in tree.draws):
        return f"the budget of {tree.budget} tokens is smaller than the first draw, of {tree.draws[0].sample.tokens}"
    if not tree.draws:
        return f"the policy failed: {tree.error}"
    if tree.ended == "budget":
        return f"no chain finished within the budget of {tree.budget} tokens"
    return "no chain finished" + (f"; the policy failed {tree.failed} times: {tree.error}" if tree.failed else "")


def answers_of(tree: GrowingTree) -> Answers:
    """Returns {last node: (answer, correct)} of the finished chains, including chains over the budget.

    The answer is `None` if it cannot be extracted, `correct` if the problem's own answer is unknown.
    """
    ends = sorted({draw.end for draw in tree.draws if draw.sample.finish_reason == "stop" and draw.end >= 0})
    if tree.finished_by is not None:
        return {node: tree.finished_by(tree.problem.text, tree.steps(node)) for node in ends}
    answer_of, true = {node: extract_answer("\n".join(tree.steps(node))) for node in ends}, tree.problem.answer
    correct = {answer: None if true is None else equivalent(true, answer) for answer in set(answer_of.values())}
    return {node: (answer, correct[answer]) for node, answer in answer_of.items()}


def record(tree: GrowingTree, rule: str, how: str, kind: str, about: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a finished search's record, by `kind` (`pool` or `tree`); `None` if no step was sampled.

    It has every draw: as a pool sample, or under `draws` in the node where it ends, with the node from which it
    continued; a step sampled twice is one node with two draws. `search` has the choice by `rule` and `how` (e.g.
    `best`, `majority`), the cost, and the fields of `about`. Its own keys: `rule`, `choose`, `chosen`, `answer`,
    `score`, `correct`, `ended`, `policy_tokens`, `over_budget_tokens`, and if they apply `reason`, `failed`, `error`,
    `unscored_steps`, `empty`. `chosen` is the index in `samples` or `nodes`, or null.

    `about["scorer"]` identifies the scorer: {} leaves scores out; a judge's must have `judge`, its name. Own keys win
    over those of `about`. Raises ValueError and KeyError like `choose`.
    """
    if not tree.text:
        return None
    answers = answers_of(tree)
    result = choose(tree, rule, how, answers)
    scored = about.get("scorer") != {}  # as that of a majority without a model
    scores = [as_written(score) if math.isfinite(score) else None for score in tree.score] if scored else []
    drawn = [i for i, draw in enumerate(tree.draws) if draw.end >= 0]  # an empty chain has no place in a record
    out: dict[str, Any] = {"problem": tree.problem.text}
    if kind == "pool":
        out["samples"] = [_sample(tree, tree.draws[i], scores, answers) for i in drawn]
        chosen = drawn.index(result.draw) if result.draw is not None else None
        if len(drawn) < len(tree.draws):
            out["empty_samples"] = len(tree.draws) - len(drawn)  # evaluations count them as incorrect samples
    else:
        out["nodes"] = _nodes(tree, scores, answers)
        chosen = tree.draws[result.draw].end if result.draw is not None else None
    if tree.problem.answer is not None:
        out["answer"] = tree.problem.answer
    unscored = sum(score is None for score in scores)
    choice = {"chosen": chosen, "answer": result.answer, "score": result.score, "correct": result.correct}
    cost = {"ended": tree.ended, "policy_tokens": tree.spent, "over_budget_tokens": tree.overspent}
    odd = {"reason": result.reason, "failed": tree.failed, "error": tree.error, "unscored_steps": unscored,
           "empty": len(tree.draws) - len(drawn)}  # fmt: skip
    out["search"] = about | {"rule": rule, "choose": how} | choice | cost | {k: v for k, v in odd.items() if v}
    if tree.judged:
        out[KEY] = {"name": about["scorer"]["judge"]} | report(_judged(tree, kind, drawn))
    return out | {key: value for key, value in tree.problem.extra.items() if key not in out}


def _judged(tree: GrowingTree, kind: str, drawn: list[int]) -> list[ReadCritique]:
    """Returns the critiques with the record's nodes to which they refer; a pool repeats shared prefixes."""
    path = [node for i in drawn for node in tree.path(tree.draws[i].end)] if kind == "pool" else range(len(tree.text))
    places: dict[int, list[int]] = collections.defaultdict(list)
    for place, node in enumerate(path):
        places[node].append(place)
    return [(places[node], *judged) for node, critiques in tree.judged.items() for judged in critiques]


def _sample(tree: GrowingTree, draw: Draw, scores, answers: Answers) -> dict[str, Any]:
    """Returns a draw as a pool sample. A cut-off chain has no answer and is not correct."""
    path = tree.path(draw.end)
    unknown = tree.problem.answer is None and tree.finished_by is None
    whole, cut_off = draw.sample.finish_reason == "stop", (None, None if unknown else False)
    sample: dict[str, Any] = {"steps": [tree.text[i] for i in path]}
    sample |= _outcome(tree, draw.end, answers[draw.end] if whole else cut_off)
    if scores:  # there is a scorer
        values = [scores[i] for i in path]
        sample |= {"scores": values} if None not in values else {"unscored": True}
    return sample | _about(draw)


def _nodes(tree: GrowingTree, scores, answers: Answers) -> list[dict[str, Any]]:
    nodes = []
    for i, (parent, text) in enumerate(zip(tree.parent, tree.text, strict=True)):
        node: dict[str, Any] = {"parent": parent, "text": text}
        node |= {"score": scores[i]} if scores[i] is not None else {"unscored": True}
        node |= _outcome(tree, i, answers[i]) if i in answers else {}
        nodes.append(node | tree.notes.get(i, {}))
    for draw in tree.draws:
        if draw.end >= 0:
            nodes[draw.end].setdefault("draws", []).append({"from": draw.start} | _about(draw))
    return nodes


def _outcome(tree: GrowingTree, node: int, answered: tuple[str | None, bool | None]) -> dict[str, Any]:
    """Returns a chain's answer, the rule that extracted it (unless an environment gave it), and its verdict."""
    answer, correct = answered
    outcome: dict[str, Any] = {"answer": answer}
    if answer is not None and tree.finished_by is None:
        outcome["answer_rule"] = extract("\n".join(tree.steps(node))).rule
    return outcome if correct is None else outcome | {"correct": correct}


def _about(draw: Draw) -> dict[str, Any]:
    sample = draw.sample
    about: dict[str, Any] = {"finish_reason": sample.finish_reason, "tokens": sample.tokens}
    if sample.logprob is not None:
        about["logprob"] = sample.logprob
    return about | ({"over_budget": True} if draw.over_budget else {})


# --------------------------------------------------------------------------------------- results with few false answers
#
# A filter accepts the result of a search or abstains, with a bound on the error rate of accepted results. The threshold
# comes from results on other problems with known answers. It is the lowest at which, with the requested confidence over
# such calibration sets, at most the requested fraction of accepted answers is incorrect (`accept_threshold`). The bound
# holds for problems like those, searched the same way.

_COSTS = {"chosen", "answer", "score", "correct", "ended", "policy_tokens", "over_budget_tokens", "reason", "failed",
          "error", "unscored_steps", "empty", "accepted", "threshold", "confidence", "error_rate", "seed"}  # fmt: skip
"""Keys of `search` that are results or may differ. The others describe how it searched."""


def calibrate(records: Sequence[Mapping[str, Any]], error_rate: float, confidence: float) -> Threshold:
    """Returns the threshold on the chosen chain's score that bounds the error rate of accepted answers.

    The bound `error_rate` holds with probability `confidence` over calibration sets; both must be in (0, 1). Searches
    without a choice or its score are left out. The threshold is infinite if no score qualifies. Raises ValueError,
    naming the record from 1, if it is not a search result, repeats a problem, has a choice of unknown correctness, or a
    score outside [0, 1].
    """
    scores, right, seen = [], [], set()
    for i, record in enumerate(records, start=1):
        search = _found(record, i)
        if record["problem"] in seen:
            raise ValueError(f"record {i}: problem: occurs twice; the bound needs one result per problem")
        seen.add(record["problem"])
        if (score := _score(search, i)) is None:
            continue
        if search.get("correct") is None:
            raise ValueError(f"record {i}: search.correct: is unknown. Give the problem an `answer` and search again")
        scores.append(score)
        right.append(search["correct"])
    return accept_threshold(np.array(scores), np.array(right, bool), error_rate, confidence=confidence)


def accept(record: Mapping[str, Any], threshold: Threshold) -> dict[str, Any]:
    """Returns a copy of the record whose `search` also has `accepted`, `threshold`, `error_rate` and `confidence`.

    `accepted` is `False` if there is no score; `threshold` is null if infinite. Raises ValueError if the record is not
    a search result, or its score is outside [0, 1].
    """
    score = _score(_found(record, 1), 1)
    verdict = {
        "accepted": score is not None and score >= threshold.threshold,
        "threshold": threshold.to_json()["threshold"],
        "error_rate": threshold.alpha,
        "confidence": threshold.confidence,
    }
    return dict(record) | {"search": dict(record["search"]) | verdict}


def filter_file(input: Path, calibration: Path, output: Path, error_rate: float, confidence: float) -> dict[str, Any]:
    """Writes the results in `input` with `search.accepted` (`accept`); returns counts and the threshold.

    The keys are `accepted`, `abstained`, `accepted_wrong` (if known) and `threshold` (null if it accepts no result). It
    is calibrated on the file `calibration`, as in `calibrate`. Each call calibrates anew and replaces `output`, in one
    step; its folder is created.

    Raises ValueError like `calibrate`, and if a file is empty, the results were searched differently from the
    calibration's or share a problem with it, or `output` is an input; FileNotFoundError if a file is absent,
    RecordError for an invalid record.
    """
    check_output(output, input, calibration)
    known, records = (list(read_records(path)) for path in (calibration, input))
    how, problems = _one_way(known, calibration), {record["problem"] for record in known}
    other = _one_way(records, input)
    for key in sorted(how.keys() | other.keys()):
        if how.get(key) != other.get(key):
            differ = f"is {other.get(key)!r} in {os.fspath(input)} and {how.get(key)!r} in {os.fspath(calibration)}"
            raise ValueError(f"search.{key}: {differ}: a threshold is for results that were searched the same way")
    for i, record in enumerate(records, start=1):
        if record["problem"] in problems:
            raise ValueError(f"{os.fspath(input)}: record {i}: problem: is in the calibration too. Remove it from one")
    threshold = calibrate(known, error_rate, confidence)
    accepted = [accept(record, threshold) for record in records]
    path_of(output).parent.mkdir(parents=True, exist_ok=True)
    write_records(output, accepted)
    taken = [record["search"] for record in accepted if record["search"]["accepted"]]
    counts = {"accepted": len(taken), "abstained": len(accepted) - len(taken)}
    if all(search.get("correct") is not None for search in taken):
        counts["accepted_wrong"] = sum(not search["correct"] for search in taken)
    return counts | {"threshold": threshold.to_json()["threshold"]}


def way_of(record: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Returns the settings in `search` with which a record was searched, e.g. `method`, `rule`, `policy`, `scorer`.

    Raises ValueError, naming the record as the i-th from 1, if it is not a search result.
    """
    return {key: value for key, value in _found(record, i).items() if key not in _COSTS}


def _one_way(records: Sequence[Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """Returns the settings with which the records were searched; they must be equal."""
    if not records:
        raise ValueError(f"{os.fspath(path)}: holds no record")
    ways = [way_of(record, i) for i, record in enumerate(records, 1)]
    for i, way in enumerate(ways, start=1):
        if way != ways[0]:
            raise ValueError(f"{os.fspath(path)}: record {i}: was searched differently from the first")
    return ways[0]


def _found(record: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    search = record.get("search")
    if not isinstance(search, Mapping) or "chosen" not in search:
        raise ValueError(f"record {i}: search: is missing. Give a file written by `jprm search`")
    return search


def _score(search: Mapping[str, Any], i: int) -> float | None:
    """Returns the chosen chain's score, unless no chain was chosen, or a vote without scores chose it."""
    score = search.get("score")
    if search["chosen"] is None or score is None:
        return None
    if not 0 <= score <= 1:
        raise ValueError(f"record {i}: search.score: is {score}, not a probability. Search with a rule that gives one")
    return score

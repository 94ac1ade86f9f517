"""PRM800K (Lightman et al., arXiv 2305.20050): human ratings of every alternative at every step, as trees.

Reads the raw release of both phases, copies that lack some keys or have `human_completion` as plain text, and chains
of the form {"problem", "steps", "ratings"}.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from jprm.data.reader import Dropped, Reader, Record, take
from jprm.tree import RecordError

_URL = "https://github.com/openai/prm800k/raw/main/prm800k/data/"
_ANSWER = "# Answer"  # the policy's heading above its final answer; some copies have it stripped
_CONTROLS = ("is_quality_control_question", "is_initial_screening_question")


@dataclasses.dataclass(frozen=True)
class Prm800kOptions:
    """Choices that the ratings leave open, without defaults.

    Attributes:
      human_written: the label of a step that the labeler wrote, which has no rating. `positive` gives it +1, as
        Lightman et al. and TRL do; `unlabelled` gives it none.
      control_questions: `keep` or `drop` the records that checked or screened labelers. Lightman et al. dropped them.
    """

    human_written: Literal["positive", "unlabelled"]
    control_questions: Literal["keep", "drop"]


def parse(item: Any, where: str, options: Prm800kOptions) -> Iterator[Record]:
    """Yields one tree of a labelling record, or one chain of {"problem", "steps", "ratings"}.

    A node is a completion, in the order of the file. `label` is its rating. `origin` is `human` if it is rated and
    `human_written` if the labeler wrote the step. `chosen` marks the completion from which the path continues; without
    one, the labeler's step continues it. A completion ends a solution if it has "# Answer", or ends the path of a
    record whose `finish_reason` is `solution`. Its `correct` is then false if a step on its path is rated -1, else
    unknown if one is unrated, else true. Other keys are kept.
    """
    if isinstance(item, dict) and "ratings" in item:
        yield _chain(item, where)
        return
    for key in _CONTROLS:
        if isinstance(item, dict) and item.get(key) and options.control_questions == "drop":
            raise Dropped(key)
    steps = take(item, "label.steps", list, where)
    if not any(isinstance(step, dict) and (step.get("completions") or step.get("human_completion")) for step in steps):
        raise Dropped("no step has a completion")
    question, label = dict(take(item, "question", dict, where)), dict(item["label"])
    del label["steps"]
    record = {
        "problem": take(question, "problem", str, where, "question."),
        "nodes": _nodes(steps, where, label, options),
    }
    del question["problem"]
    if "ground_truth_answer" in question:
        record["answer"] = question.pop("ground_truth_answer")
    record |= {"semantics": "rating", **label, **{k: v for k, v in item.items() if k not in ("question", "label")}}
    yield record | ({"question": question} if question else {})


def _chain(item: dict, where: str) -> Record:
    chain = {key: value for key, value in item.items() if key != "ratings"}
    steps, ratings = take(item, "steps", list, where), take(item, "ratings", list, where)
    chain |= {"labels": ratings, "semantics": "rating"}
    if steps and isinstance(steps[-1], str) and _ANSWER in steps[-1] and (-1 in ratings or None not in ratings):
        chain["correct"] = -1 not in ratings
    return chain


def _nodes(steps: list, where: str, label: dict, options: Prm800kOptions) -> list[dict]:
    nodes: list[dict] = []
    state: list[int | None] = []  # of the path up to each node: -1 wrong, None with an unrated step, 1 right
    parent = -1
    for depth, step in enumerate(steps):
        field = f"label.steps[{depth}]"
        if not isinstance(step, dict):
            raise RecordError(where, field, "is not an object", 'A step is {"completions": [...], ...}.')
        if parent is None:
            raise RecordError(where, field, "follows a step that nothing was chosen from", "Remove the steps after it.")
        completions = take(step, "completions", (list, type(None)), where, field + ".") or []
        chosen = take(step, "chosen_completion", (int, type(None)), where, field + ".")
        if chosen is not None and not 0 <= chosen < len(completions):
            reason = f"is {chosen}, of {len(completions)} completions"
            raise RecordError(where, f"{field}.chosen_completion", reason, "It is the index of a completion.")
        before, last, next_parent = 1 if parent == -1 else state[parent], depth == len(steps) - 1, None
        for i, (completion, human) in enumerate([(c, False) for c in completions] + _written(step, where, field)):
            node = _node(completion, human, parent, where, f"{field}.completions[{i}]", options)
            rating = completion.get("rating")
            state.append(-1 if -1 in (before, rating) else 1 if before == 1 and (human or rating is not None) else None)
            goes_on = human if chosen is None else i == chosen
            ends = _ANSWER in node["text"] or (goes_on and last and label.get("finish_reason") == "solution")
            if goes_on:
                next_parent = len(nodes)
            if goes_on and not human:
                node["chosen"] = True
            if ends:
                node |= {} if state[-1] is None else {"correct": state[-1] == 1}
            nodes.append(node)
        parent = next_parent
    return nodes


def _written(step: dict, where: str, field: str) -> list[tuple[dict, bool]]:
    """Returns the labeler's own step, if any: an object in the release, plain text in some copies."""
    written = step.get("human_completion")
    if written is None:
        return []
    if isinstance(written, str):
        written = {"text": written}
    if not isinstance(written, dict):
        raise RecordError(where, f"{field}.human_completion", "is neither text nor an object", "Write one of the two.")
    return [(written, True)]


def _node(completion: Any, human: bool, parent: int, where: str, field: str, options: Prm800kOptions) -> dict:
    if not isinstance(completion, dict) or not isinstance(completion.get("text"), str):
        raise RecordError(where, field, "has no text", 'A completion is {"text": ..., "rating": ...}.')
    extra = {key: value for key, value in completion.items() if key not in ("text", "rating")}
    rating = completion.get("rating")
    node = {"parent": parent, "text": completion["text"]}
    if human and rating is None and options.human_written == "positive":
        rating = 1
    if rating is not None:
        node["label"] = rating
    if human or rating is not None:
        node["origin"] = "human_written" if human else "human"
    return node | extra


READER = Reader(
    parse,
    Prm800kOptions,
    {  # from the Git LFS pointers of the repository
        _URL + "phase1_train.jsonl": "e9da6a73f827ffb9a8c0dc644c541d34ed76b3d4d1e4896ff5f7b37ddf5ae34d",
        _URL + "phase1_test.jsonl": "f4b3bc5b095e45c816453dc4d748b755c680d61d55f9895d929a335b487c727d",
        _URL + "phase2_train.jsonl": "1110237feeb51d1bc200cb37b8f965cfdc1036eac7d506094049366fe7dc1089",
        _URL + "phase2_test.jsonl": "6b172efa884ac8341a946dd82e06947c135b7254109fb3f7aa907c715d98aaad",
    },
)

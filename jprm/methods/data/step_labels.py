"""Readers of published step labels: Math-Shepherd, ProcessBench, PRMBench, PRM800K, RLHFlow, ER-PRM, MATH-APS,
VersaPRM, ActPRM, GenPRM and UltraInteract.

Layouts follow the published code that reads or writes these files; a reader's docstring states any choice it makes.
The files are not part of jprm. `columns` (`readers.py`) reads many others.

Keys with a meaning in records, which most of these readers leave out: `problem`, `steps`, `labels`, `samples`, `nodes`,
`semantics`, `prompt`, `completions`, `messages`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jprm.methods.data.cells import NEGATIVE, OTHER_FILE, POSITIVE, label_of, literal
from jprm.methods.data.reader import Dropped, NoOptions, Reader, Record, others, take, until_error
from jprm.methods.messages.messages import role_content
from jprm.tree import RecordError

# ---- Math-Shepherd (Wang et al., arXiv 2312.08935): steps with automatic labels from Monte Carlo completions.
# `input` is the problem and its steps, each step followed by the tag `ки`; `label` is the same text with every tag
# replaced by `+` (a completion from here reached the answer) or `-`.

_TAG = "ки"
_FIRST = re.compile(r"Step 1\s*:")


def parse_math_shepherd(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one chain from {"input", "label"}, with labels 1 and 0 and semantics `value`.

    A step is the text between two tags `ки` in `input`, with its number ("Step 2: "), stripped; `label` repeats the
    text with + or - for each tag. If the last step has "The answer is", its label is also `correct`, since no
    completion follows it. OpenRLHF's copy has a list with one entry per tag (`value`, `label` or `labels`) instead of
    the second text. Other keys are kept.

    Raises RecordError if the texts differ in more than the tags, or if no tag or problem is found.
    """
    text = take(item, "input", str, where)
    segments = text.split(_TAG)
    listed = next((key for key in ("value", "label", "labels") if isinstance(item.get(key), list)), None)
    if listed is None:
        labels = _signs(take(item, "label", str, where), segments, where)
    else:
        labels = [label_of(label, "value", where, f"{listed}[{i}]") for i, label in enumerate(item[listed])]
        if len(labels) != len(segments) - 1:
            reason = f"has {len(labels)} entries for {len(segments) - 1} tags {_TAG!r}"
            raise RecordError(where, listed, reason, "Give one for each step, which ends in the tag.")
    if segments[-1].strip():
        raise RecordError(where, "input", "has text after the last tag", "Every step ends in a tag.")
    if len(segments) < 2:
        raise RecordError(where, "input", f"has no tag {_TAG!r}", OTHER_FILE)
    problem, first = parted(segments[0], where, "input")
    chain: Record = {"problem": problem, "steps": [step.strip() for step in [first, *segments[1:-1]]]}
    chain |= {"labels": labels, "semantics": "value"}
    if "The answer is" in chain["steps"][-1]:
        chain["correct"] = labels[-1] == 1.0
    yield chain | others(item, "input", listed or "label")


def _signs(labelled: str, segments: list[str], where: str) -> list[float]:
    """Reads labels from Math-Shepherd's second text: + or - replaces each tag."""
    labels, at = [], 0
    for segment in segments[:-1]:
        sign = labelled[at + len(segment) : at + len(segment) + 1]
        if not labelled.startswith(segment, at) or sign not in ("+", "-"):
            reason = f"does not repeat `input` with + or - for tag {len(labels) + 1}"
            raise RecordError(where, "label", reason, "The two texts differ in nothing but the tags.")
        labels.append(1.0 if sign == "+" else 0.0)
        at += len(segment) + 1
    if labelled[at:].strip():
        raise RecordError(where, "label", "has text after the last tag", "Every step ends in a tag.")
    return labels


MATH_SHEPHERD = Reader(
    parse_math_shepherd,
    releases={"https://huggingface.co/datasets/peiyi9979/Math-Shepherd/resolve/main/math-shepherd.jsonl": None},
)

# ---- ProcessBench (Zheng et al., arXiv 2412.06559): chains with the index of the first wrong step.

_PROCESSBENCH = "https://huggingface.co/datasets/Qwen/ProcessBench/resolve/main/"


def parse_processbench(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one chain from {"problem", "steps", "label", "final_answer_correct"}.

    Steps before the first wrong one (`label`, from 0) get label 1, it gets 0, later ones null. `first_error` is its
    index, -1 if every step is right. `correct` is true if the final answer is correct, even if a step is wrong. A wrong
    answer must have a wrong step. Other keys are kept.

    Raises RecordError if it has none, or a key is missing or out of range.
    """
    first, steps = take(item, "label", int, where), take(item, "steps", list, where)
    if not -1 <= first < len(steps):
        remedy = "It is the index of the first wrong step, -1 if there is none."
        raise RecordError(where, "label", f"is {first}, for {len(steps)} steps", remedy)
    correct = take(item, "final_answer_correct", bool, where)
    if first == -1 and not correct:
        remedy = "Name the first wrong step: a solution with a wrong answer has one."
        raise RecordError(where, "label", "is -1, no wrong step, and `final_answer_correct` is false", remedy)
    labels = until_error(first, len(steps), correct)
    yield others(item, "label") | {"labels": labels, "correct": correct, "first_error": first}


PROCESSBENCH = Reader(
    parse_processbench,
    releases={_PROCESSBENCH + f"{split}.json": None for split in ("gsm8k", "math", "olympiadbench", "omnimath")},
)

# ---- PRMBench (Song et al., arXiv 2501.03124): chains of PRM800K with one class of error written into them.

_PREFIX = re.compile(r"^(Step\s*\d+\.\s*|\d+\.\s*)", re.IGNORECASE)
"""`remove_step_prefix` in ssmisya/PRMBench, mr_eval/utils/model_utils.py."""


@dataclasses.dataclass(frozen=True)
class PrmbenchOptions:
    """Attributes:
    process: the `modified` chain, which the benchmark scores, or the `original` one, whose steps are all right.
    outside: a few records in the release list error steps beyond the end of the chain: `error`, or `ignore` these
        numbers.
    prefix: `keep` or `strip` step numbers ("Step 3.", "3.") and the white space around steps.
    empty: one record in the release has a step without text, which no model can score: `error`, or `drop` the step.
    """

    process: Literal["modified", "original"] = "modified"
    outside: Literal["error", "ignore"] = "error"
    empty: Literal["error", "drop"] = "error"
    prefix: Literal["keep", "strip"] = "keep"


def parse_prmbench(item: Any, where: str, options: PrmbenchOptions) -> Iterator[Record]:
    """Yields one chain, labelled 0 at the error steps (1-based in the file) and 1 elsewhere; keeps all other keys.

    Its `problem` and `steps` are `modified_question` and `modified_process`, or the `original_` ones with
    `process=original`, where all labels are 1. A modified chain must have one of `error_steps`, unless its
    `classification` is `multi_solutions` or absent.

    Raises RecordError if it has none, if one is outside the chain (with `outside=error`), or if a key is missing.
    """
    steps = take(item, f"{options.process}_process", list, where)
    problem = take(item, f"{options.process}_question", str, where)
    wrong = take(item, "error_steps", list, where) if options.process == "modified" else []
    of_class = item.get("classification", "multi_solutions")
    if options.process == "modified" and not wrong and of_class != "multi_solutions":
        remedy = "Name the steps of the error that was written into this chain."
        raise RecordError(where, "error_steps", f"is empty, and the class is {of_class!r}", remedy)
    inside = {number for number in wrong if type(number) is int and 1 <= number <= len(steps)}
    for number in wrong:
        if options.outside == "error" and not (type(number) is int and number in inside):
            remedy = "Correct it, or ignore such numbers with the option outside=ignore."
            raise RecordError(where, "error_steps", f"names step {number!r} of {len(steps)}", remedy)
    labels = [0 if number in inside else 1 for number in range(1, len(steps) + 1)]
    if options.prefix == "strip":
        bare = (step.strip() if isinstance(step, str) else step for step in steps)
        # "64." alone is a step that is a number
        steps = [_PREFIX.sub("", step) or step if isinstance(step, str) else step for step in bare]
    if options.empty == "drop":
        kept = [i for i, step in enumerate(steps) if not isinstance(step, str) or step.strip()]
        steps, labels = [steps[i] for i in kept], [labels[i] for i in kept]
    chain = {"problem": problem, "steps": steps, "labels": labels}
    yield chain | others(item, *chain)


PRMBENCH = Reader(parse_prmbench, PrmbenchOptions)


# ---- PRM800K (Lightman et al., arXiv 2305.20050): human ratings of every alternative at every step, as trees. The raw
# release of both phases, copies that lack some keys or have `human_completion` as plain text, and chains of the form
# {"problem", "steps", "ratings"}.


_URL = "https://github.com/openai/prm800k/raw/main/prm800k/data/"
_ANSWER = "# Answer"  # the policy's heading above its final answer; some copies have it stripped
_CONTROLS = ("is_quality_control_question", "is_initial_screening_question")


@dataclasses.dataclass(frozen=True)
class Prm800kOptions:
    """Choices that the ratings leave open; both are required.

    Attributes:
      human_written: the label of an unrated step written by the labeler: `positive` gives it +1, like Lightman et al.
        and TRL; `unlabelled` leaves it without a label.
      control_questions: `keep` or `drop` records that checked or screened labelers. Lightman et al. dropped them.
    """

    human_written: Literal["positive", "unlabelled"]
    control_questions: Literal["keep", "drop"]


def parse_prm800k(item: Any, where: str, options: Prm800kOptions) -> Iterator[Record]:
    """Yields one tree per labelling record, or one chain from {"problem", "steps", "ratings"}.

    Nodes are the completions in file order. `label` is the rating; `origin` is `human` if the node is rated and
    `human_written` if the labeler wrote it. `chosen` marks the completion that continues the path; if no completion is
    chosen, the labeler's step continues it. A completion ends a solution if it contains "# Answer", or if it is the
    last on the path and `finish_reason` is `solution`. Its `correct` is false if a step on its path is rated -1,
    unknown if one is unrated, and true otherwise. `ground_truth_answer` becomes `answer`; other keys are kept.

    Raises `Dropped` for a control question (with `drop`) or if there is no completion, and RecordError if the item has
    another form, or a step follows one without a choice.
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
    nodes = _nodes(steps, where, label, options)
    record = {"problem": take(question, "problem", str, where, "question."), "nodes": nodes}
    del question["problem"]
    if "ground_truth_answer" in question:
        record["answer"] = question.pop("ground_truth_answer")
    record |= {"semantics": "rating", **label, **others(item, "question", "label")}
    yield record | ({"question": question} if question else {})


def _chain(item: dict, where: str) -> Record:
    steps, ratings = take(item, "steps", list, where), take(item, "ratings", list, where)
    chain = others(item, "ratings") | {"labels": ratings, "semantics": "rating"}
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
    """Returns [(the step that the labeler wrote, `True`)], or [] if there is none; `True` marks it as human.

    Some copies of PRM800K store it as plain text.
    """
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


PRM800K = Reader(
    parse_prm800k,
    Prm800kOptions,
    {  # from the Git LFS pointers of the repository
        _URL + "phase1_train.jsonl": "e9da6a73f827ffb9a8c0dc644c541d34ed76b3d4d1e4896ff5f7b37ddf5ae34d",
        _URL + "phase1_test.jsonl": "f4b3bc5b095e45c816453dc4d748b755c680d61d55f9895d929a335b487c727d",
        _URL + "phase2_train.jsonl": "1110237feeb51d1bc200cb37b8f965cfdc1036eac7d506094049366fe7dc1089",
        _URL + "phase2_test.jsonl": "6b172efa884ac8341a946dd82e06947c135b7254109fb3f7aa907c715d98aaad",
    },
)


# ---- What the readers of other projects' files share.


_MEANT = ("problem", "steps", "labels", "samples", "nodes", "semantics", "prompt", "completions", "messages")
"""Keys with a meaning in records."""


def _labelled(
    item: Mapping, problem: str, steps: list, labels: list | None, semantics: str, known: tuple[str, ...], **more: Any
) -> Record:
    """Builds a chain; keeps other keys unless they have a meaning in records."""
    chain: Record = {"problem": problem, "steps": steps, "labels": labels, **more, "semantics": semantics}
    chain = others(chain, "labels", "semantics") if labels is None else chain
    return chain | others(item, *known, *_MEANT)


def parted(text: str, where: str, field: str) -> tuple[str, str]:
    """Splits text into (problem, first step), stripped: before the last "Step 1:", else at the last blank line.

    Raises RecordError, with `where` and `field`, if one of the two is blank.
    """
    starts = [match.start() for match in _FIRST.finditer(text)]
    problem, step = (text[: starts[-1]], text[starts[-1] :]) if starts else text.strip().rpartition("\n\n")[::2]
    if not problem.strip() or not step.strip():
        raise RecordError(where, field, "has no 'Step 1:' and no blank line before a first step", OTHER_FILE)
    return problem.strip(), step.strip()


def _dialogue(item: Any, where: str, reply: str) -> tuple[list[str], list[str]]:
    """Returns the user turns and the assistant turns, which must alternate; skips system messages."""
    turns = []
    for i, turn in enumerate(take(item, "conversations", list, where)):
        turn = role_content(turn)
        role, text = (take(turn, key, str, where, f"conversations[{i}].") for key in ("role", "content"))
        turns += [(role, text)] if role != "system" else []
    if not turns or [role for role, _ in turns] != ["user", "assistant"] * (len(turns) // 2):
        reason = f"are not turns of a user with a step and {reply}"
        raise RecordError(where, "conversations", reason, OTHER_FILE)
    return [text for _, text in turns[::2]], [text for _, text in turns[1::2]]


# ---- RLHFlow (Xiong et al. 2024, RLHF-Reward-Modeling/math): Mistral- and Deepseek-PRM-Data.


def parse_rlhflow(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one chain from {"conversations"}: each user turn is a step, and the assistant answers + or -.

    Answers may also be words in `cells.POSITIVE` and `cells.NEGATIVE`. The first turn also holds the problem, which
    ends at "Step 1:" (Mistral data) or at the last blank line (Deepseek data). If all are + and -, they are Monte Carlo
    rollouts' (semantics `value`), else verdicts such as FoVer's "correct" (semantics `correctness`). Turns may have
    ShareGPT's form (`role_content`). System messages are left out, and other keys kept unless they have a meaning in
    records (listed in the module).

    Raises RecordError if the turns do not alternate, an answer is no such word, or the problem's end is not found.
    """
    steps, signs = _dialogue(item, where, "an assistant's + or -")
    problem, first = parted(steps[0], where, "conversations[0].content")
    words = [sign.strip().lower() for sign in signs]
    for i, word in enumerate(words):
        if word not in POSITIVE | NEGATIVE:
            reason = f"is {signs[i][:40]!r}, neither + nor -"
            raise RecordError(where, f"conversations[{2 * i + 1}].content", reason, OTHER_FILE)
    labels = [float(word in POSITIVE) for word in words]
    texts = [first, *(step.strip() for step in steps[1:])]
    semantics = "value" if {*words} <= {"+", "-"} else "correctness"
    yield _labelled(item, problem, texts, labels, semantics, ("conversations",))


# ---- ER-PRM (Zhang et al. 2024, arXiv 2412.11006): the output of MCTS/convert_autoregressive.py.


def parse_er_prm(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one chain from {"text", "value"}: problem and steps separated by `ки`, and numbers of the first steps.

    The numbers are entropy-regularised rewards from 0 to 1: semantics `value`. Train with the target `soft`; `entropy`
    would regularise them again. Steps after the last number get no label. Other keys are kept unless they have a
    meaning in records (listed in the module).

    Raises RecordError if a step is blank, there are more numbers than steps, or the problem's end is not found.
    """
    text, values = take(item, "text", str, where), take(item, "value", list, where)
    pieces = [piece.strip() for piece in text.split(_TAG)]
    pieces = pieces if pieces[-1] else pieces[:-1]
    if not pieces or not all(pieces) or len(values) > len(pieces):
        reason = f"has {len(values)} numbers for {len(pieces)} steps between the tags {_TAG!r}"
        raise RecordError(where, "value", reason, "A step without a number has none after it either.")
    problem, first = parted(pieces[0], where, "text")
    labels = [*values, *[None] * (len(pieces) - len(values))]
    yield _labelled(item, problem, [first, *pieces[1:]], labels, "value", ("text", "value"))


# ---- openr (Wang et al. 2024, arXiv 2410.09671): MATH-APS, states of OmegaPRM's trees.


def parse_math_aps(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields a chain or a tree from openr's files, with semantics `value`.

    - {"question", "process", "label": ["+"]}: a prefix of a chain; only its last step is labelled. Steps are
      paragraphs. + means a Monte Carlo value above one half. Each prefix is a separate record.
    - {"question", "process", "labels"}: a chain with a tag `ки` after each step, and one label per step.
    - {"question", "reasoning_steps"}: a tree, either as a list of states with `solution_prefix` and `mc_value`, or as
      nested nodes with `text`, `mc_value` and `children`, where the root is the question. `final_answer` becomes
      `answer`.

    Other keys are kept unless they have a meaning in records (listed in the module). Raises RecordError if the item has
    another form.
    """
    if isinstance(item, Mapping) and ("reasoning_steps" in item or "children" in item):
        yield _aps_tree(item, where)
        return
    problem, text = take(item, "question", str, where), take(item, "process", str, where)
    if "labels" in item:
        steps = [step.strip() for step in text.split(_TAG) if step.strip()]
        labels = [label_of(x, "value", where, f"labels[{i}]") for i, x in enumerate(take(item, "labels", list, where))]
        yield _labelled(item, problem, steps, labels, "value", ("question", "process"))
        return
    signs = take(item, "label", list, where)
    steps = [step.strip() for step in re.split(r"\n{2,}", text.replace(_TAG, "")) if step.strip()]
    if len(signs) != 1 or signs[0] not in ("+", "-") or not steps:
        raise RecordError(where, "label", f"is {str(signs)[:60]}, not one + or - for a process", OTHER_FILE)
    labels = [None] * (len(steps) - 1) + [float(signs[0] == "+")]
    yield _labelled(item, problem, steps, labels, "value", ("question", "process", "label"))


def _aps_tree(item: Mapping[str, Any], where: str) -> Record:
    root = item if "children" in item else take(item, "reasoning_steps", (dict, list), where)
    problem = take(item, "question", str, where) if "question" in item else take(root, "text", str, where)
    nodes = _states(root, problem, where) if isinstance(root, list) else _nested(root, where)
    record: Record = {"problem": problem, "nodes": nodes, "semantics": "value"}
    if isinstance(item.get("final_answer"), str | int | float) and not isinstance(item["final_answer"], bool):
        record["answer"] = item["final_answer"]
    known = ("question", "reasoning_steps", "final_answer", "text", "mc_value", "children")
    return record | others(item, *known, *_MEANT)


def _states(states: list, problem: str, where: str) -> list[dict]:
    """Builds nodes from states that repeat their prefix; the parent is the longest other state that is a prefix."""
    texts: dict[str, float | None] = {}
    for i, state in enumerate(states):
        field = f"reasoning_steps[{i}]."
        prefix = take(state, "solution_prefix", str, where, field)
        if not prefix.startswith(problem):
            reason = "does not begin with the question"
            raise RecordError(
                where, field + "solution_prefix", reason, "A prefix is the question and the steps so far."
            )
        texts[prefix] = label_of(take(state, "mc_value", (int, float, type(None)), where, field), "value", where, field)
    nodes: list[dict] = []
    above: list[tuple[str, int]] = [(problem, -1)]  # the states that the next one may continue
    for prefix in sorted(texts):
        while len(above) > 1 and not prefix.startswith(above[-1][0]):
            above.pop()
        if step := prefix[len(above[-1][0]) :].strip():
            nodes.append({"parent": above[-1][1], "text": step, "label": texts[prefix]})
            above.append((prefix, len(nodes) - 1))
    return nodes


def _nested(root: Mapping[str, Any], where: str) -> list[dict]:
    """Returns the nodes below the root, each before its children."""
    nodes: list[dict] = []
    waiting = [(root, -1, "reasoning_steps.")]
    while waiting:
        node, parent, field = waiting.pop()
        if node is not root:
            label = label_of(take(node, "mc_value", (int, float, type(None)), where, field), "value", where, field)
            nodes.append({"parent": parent, "text": take(node, "text", str, where, field), "label": label})
            parent = len(nodes) - 1
        children = take(node, "children", (list, type(None)), where, field) or []
        below = [(child, parent, f"{field}children[{i}].") for i, child in enumerate(children)]
        waiting += below[::-1]
    return nodes


# ---- VersaPRM (Zeng et al. 2025, arXiv 2502.06737): MMLU-Pro-CoT-Train-Labeled.


def parse_versa_prm(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one chain from {"question", "chain_of_thoughts", "labels"}: 1 is label 1; -1 and 0 are label 0.

    The lists may be written as text. `parsed_answer_correctness` becomes `correct` if it is a boolean; a `correct` in
    the file is left out. If `chain_of_thoughts` is a list of {"steps", "labels"}, each is a chain, without `correct`;
    its labels may be null or absent. Other keys are kept unless they have a meaning in records (listed in the module).

    Raises RecordError if a list cannot be read, or its labels are other numbers or not one per step.
    """
    problem, thoughts = take(item, "question", str, where), _list(item, "chain_of_thoughts", where)
    known = ("question", "chain_of_thoughts", "correct")
    if thoughts and all(isinstance(thought, Mapping) for thought in thoughts):
        for i, thought in enumerate(thoughts):
            field = f"chain_of_thoughts[{i}]."
            steps = take(thought, "steps", list, where, field)
            labels = take(thought, "labels", (list, type(None)), where, field)
            ones = None if labels is None else _ones(labels, steps, where, field)
            yield _labelled(item, problem, steps, ones, "correctness", known) | others(thought, *_MEANT, *item)
        return
    right = item.get("parsed_answer_correctness")
    more = {"correct": right} if isinstance(right, bool) else {}
    ones = _ones(_list(item, "labels", where), thoughts, where, "")
    yield _labelled(item, problem, thoughts, ones, "correctness", known, **more)


def _ones(labels: list, steps: list, where: str, field: str) -> list[float]:
    if len(steps) != len(labels) or not {*map(str, labels)} <= {"1", "-1", "0"}:
        reason = f"are {str(labels)[:60]}, not 1 or -1 for each of {len(steps)} steps"
        raise RecordError(where, field + "labels", reason, OTHER_FILE)
    return [float(str(label) == "1") for label in labels]


def _list(item: Any, key: str, where: str) -> list:
    """Returns a list that may be written as Python text, without executing it."""
    value = take(item, key, (list, str), where)
    value = literal(value) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise RecordError(where, key, "is a text that holds no list", OTHER_FILE)
    return value


# ---- ActPRM (Duan et al. 2025, arXiv 2504.10559): ActPRMData, as its pool_based_active_learning.py reads it.


@dataclasses.dataclass(frozen=True)
class ActPrmOptions:
    """Attributes:
    labels: the list to use as labels.
    """

    labels: Literal["hard_labels", "soft_labels"] = "hard_labels"


def parse_act_prm(item: Any, where: str, options: ActPrmOptions) -> Iterator[Record]:
    """Yields a chain from {"question", "steps", "hard_labels", "soft_labels"}, with the labels in `options.labels`.

    Steps after the last label get null; semantics are `correctness`. Other keys are kept unless they have a meaning in
    records (listed in the module); `correct` is left out. Raises RecordError if a key is missing, or there are more
    labels than steps.
    """
    steps, labels = take(item, "steps", list, where), take(item, options.labels, list, where)
    if len(labels) > len(steps):
        reason = f"has {len(labels)} labels for {len(steps)} steps"
        raise RecordError(where, options.labels, reason, OTHER_FILE)
    problem, labels = take(item, "question", str, where), [*labels, *[None] * (len(steps) - len(labels))]
    yield _labelled(item, problem, steps, labels, "correctness", ("question", "correct"))


# ---- GenPRM (Zhao et al. 2025, arXiv 2504.00891): GenPRM-MATH-Data, conversations of critiques.

_QUESTION = re.compile(r"^\s*Question:\s*")
_PARAGRAPH = re.compile(r"^\s*Paragraph \d+:\s*")
_VERDICT = re.compile(r"\\boxed\{\s*(Yes|No)\s*\}")


def parse_genprm(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one chain from {"conversations"}: each user turn is a step, answered by a critique.

    The last `\\boxed{Yes}` (label 1) or `\\boxed{No}` (label 0) in a critique counts, spelt so; other boxes are
    ignored. The first turn is "Question: ", the problem, a blank line and the first step. "Paragraph 1: " etc. before a
    step is removed. Critiques are not stored; `jprm label critique` stores those of a judge. Other keys are kept unless
    they have a meaning in records (listed in the module).

    Raises RecordError if the turns do not alternate, a critique has no such box, or the problem's end is not found.
    """
    steps, critiques = _dialogue(item, where, "a critique")
    problem, first = parted(_QUESTION.sub("", steps[0]), where, "conversations[0].content")
    labels = []
    for i, critique in enumerate(critiques, start=1):
        verdicts = _VERDICT.findall(critique)
        if not verdicts:
            reason = "has no \\boxed{Yes} or \\boxed{No}"
            raise RecordError(where, f"conversations: critique {i}", reason, "Is it whole?")
        labels.append(float(verdicts[-1] == "Yes"))
    texts = [_PARAGRAPH.sub("", step).strip() for step in (first, *steps[1:])]
    yield _labelled(item, problem, texts, labels, "correctness", ("conversations",))


# ---- UltraInteract (Yuan et al. 2024, arXiv 2404.02078): pairs of a correct and an incorrect chain.

_STEP = re.compile(r"(?m)^(?=Step \d+\s*:)")


def parse_ultra_interact(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one pool of two samples from {"trajectory", "chosen", "rejected"}: one correct, one incorrect.

    `trajectory` must have exactly one turn, the problem; longer ones hold tool answers and are refused. Steps begin
    with "Step 1:", "Step 2:" etc.; without these a sample is one step. `answer` is left out; other keys are kept unless
    they have a meaning in records (listed in the module).

    Raises RecordError for more turns, a missing key or a blank sample.
    """
    turns = take(item, "trajectory", list, where)
    if len(turns) != 1:
        reason = f"has {len(turns)} turns, with answers of tools or people"
        raise RecordError(where, "trajectory", reason, "Leave them out: --on-error skip copies them beside the output.")
    problem = take(turns[0], "value", str, where, "trajectory[0].")
    texts = [take(item, key, str, where) for key in ("chosen", "rejected")]
    samples = [[step.strip() for step in _STEP.split(text) if step.strip()] for text in texts]
    if not all(samples):
        raise RecordError(where, "chosen", "or rejected is blank", OTHER_FILE)
    pair = [{"steps": steps, "correct": right} for steps, right in zip(samples, (True, False), strict=True)]
    yield {"problem": problem, "samples": pair} | others(item, *_MEANT, "trajectory", "chosen", "rejected", "answer")


ACTPRM = Reader(parse_act_prm, ActPrmOptions)
ER_PRM = Reader(parse_er_prm)
GENPRM_MATH = Reader(parse_genprm)
MATH_APS = Reader(parse_math_aps)
RLHFLOW = Reader(parse_rlhflow)
ULTRA_INTERACT = Reader(parse_ultra_interact)
VERSAPRM = Reader(parse_versa_prm)

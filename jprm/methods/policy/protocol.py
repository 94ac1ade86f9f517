"""Policies sample next steps or whole completions, given problems or prefixes of chains."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, Self

from jprm.io.jsonl import Rejects, count, parse, read_lines, reject_with
from jprm.tree import ReasoningTree, RecordError, check_id, tree_of

Until = Literal["step", "end"]
"""A sample's extent: one step, or to the end of the chain."""

FINISH_REASONS = ("step", "stop", "length", "error")
"""`step`: ended after a step; the chain may continue. `stop`: the policy ended the chain. `length`: cut off by a token
limit, so that the last step and the chain are incomplete. `error`: sampling failed, see `Sample.error`."""


_ROUNDING = 1e-3
"""Tolerance for log-probabilities above 0, from rounding in half precision."""


class LogProb(float):
    """A natural log-probability: finite and at most 0. Raises ValueError for other values."""

    __slots__ = ()

    def __new__(cls, value: object) -> Self:
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value <= _ROUNDING:
            raise ValueError(f"{str(value)[:40]} is no log-probability: it must be finite and at most 0")
        return super().__new__(cls, min(value, 0.0))


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """A problem and the steps so far."""

    problem: str
    steps: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A policy's text after a prefix.

    The last four fields are empty in stored samples, and if the policy was not asked to report them or does not know
    them.

    Raises ValueError for an unknown `finish_reason`, a blank step, or `error` and `finish_reason` that disagree.
    """

    steps: tuple[str, ...]  # the new, non-blank steps; empty if the policy considers the chain finished
    tokens: int  # generated ones, with the end of text if the policy counts it
    finish_reason: str  # one of FINISH_REASONS
    logprob: float | None = None  # natural, of all generated tokens; the policy defines its temperature
    error: str | None = None  # the reason, only for `error`
    token_logprobs: tuple[tuple[str, LogProb], ...] = ()  # of every generated token, with its text
    token_ids: tuple[int, ...] = ()  # of those tokens
    token_entropies: tuple[float, ...] = ()  # in nats, before each of them
    alternatives: tuple[Mapping[str, LogProb], ...] = ()  # the likeliest tokens in each place, by text

    def __post_init__(self):
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish_reason is {self.finish_reason!r}: use one of {', '.join(FINISH_REASONS)}")
        if (self.finish_reason == "error") != (self.error is not None):
            raise ValueError("an error has finish_reason='error' and a message, anything else has neither")
        if any(not step.strip() for step in self.steps):
            raise ValueError("a step is blank: remove it")


class Policy(Protocol):
    """A step generator.

    `name` must change with the sampled distribution: weights, prompt, temperature and all else. Samples are cached
    under it.
    """

    name: str

    def sample(self, prefixes: Sequence[Prefix], n: int, *, until: Until, seed: int) -> list[list[Sample]]:
        """Returns n samples per prefix, in order: one step each (`until="step"`) or the rest of the chain (`"end"`).

        Blocks until all are drawn. `result[i][j]` is sample j of prefix i.

        Sample j of a prefix has number `seed + j`. Samples with equal numbers must be equally distributed, and
        identical if the policy is deterministic; with different numbers they must be independent.

        A failed sample must be marked `error`, and the others returned. A policy should raise only if no retry could
        succeed.
        """
        ...


class TurnPolicy(Protocol):
    """Methods of a policy acting in an environment: its steps are turns, rewarded by the environment."""

    def know(self, path: str | os.PathLike) -> None:
        """Reads the tasks in a file of problems, for later calls; a later task replaces one with its problem.

        Raises RecordError, ValueError or FileNotFoundError as `read_problems`.
        """
        ...

    def steps_of(self, tree: ReasoningTree) -> ReasoningTree:
        """Converts a message tree to a tree with a step per turn, {"messages": ...} as text, and registers its task.

        Raises RecordError if it has no messages or no turns, or does not begin as the environment does; OSError if the
        environment cannot begin.
        """
        ...

    def messages_of(self, tree: ReasoningTree) -> ReasoningTree:
        """Converts a step tree to a message tree that begins with the environment's messages.

        Its task has the tree's problem. Raises KeyError for an unknown task, ValueError for a step that is not a turn,
        OSError as `steps_of`.
        """
        ...


def turn_policy(policy: Policy) -> TurnPolicy | None:
    """Returns the policy's `as_turns`, or `None` if it writes steps of text."""
    return getattr(policy, "as_turns", None)


# ---- Problems for policies.


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem to solve. `answer` is the true one, if known; `extra` holds the record's other keys."""

    text: str
    answer: str | float | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_CHAINS = frozenset(
    "steps samples nodes labels scores completions semantics search correct outputs judge empty_samples"
    " failed_samples".split()
)
"""Keys about a record's earlier chains, which must not pass for those that are sampled next."""


def read_problems(
    path: str | os.PathLike, on_error: str = "stop", rejects: Rejects | None = None
) -> Iterator[tuple[bytes, Problem]]:
    """Yields (line, problem) from a file or prepared folder of records with `problem` and optionally `answer`.

    `line` is the record's JSON with its line end. Other keys are kept in `Problem.extra`, except those about earlier
    chains, e.g. `steps` and `empty_samples`. With on_error='skip', bad lines go to `rejects` and are left out.

    The file is opened, and errors are raised, only when problems are asked for.

    Raises:
      RecordError: a record is bad, e.g. has a system message or a repeated `id`, and on_error='stop'.
      FileNotFoundError: the file is absent.
      ValueError: the file is empty or damaged, `on_error` is unknown, or 'skip' comes without `rejects`.
    """
    reject = reject_with(on_error, rejects)
    count(path)  # not empty
    first_of: dict[str, str] = {}
    for number, line in read_lines(path):
        where = f"{os.fspath(path)}:{number}"
        try:
            entry = parse(line, where)
            if not isinstance(entry, Mapping):
                raise RecordError(where, "record", "is no object", 'Write {"problem": ..., "answer": ...} a line.')
            if "problem" not in entry:
                has = ", ".join(map(repr, entry)) or "nothing"
                fix = "Read it first: `jprm prepare gsm8k`, `math`, or `columns --set problem=NAME answer=NAME`."
                raise RecordError(where, "problem", f"is absent; the record has {has}", fix)
            known = {"problem": entry.get("problem"), "answer": entry.get("answer"), "steps": ["-"]}
            tree = tree_of(known, where)
            check_id(entry, where, f"line {number}", first_of)
            if isinstance(entry.get("system"), str) and entry["system"].strip():
                reason = "is a system message, and a policy's prompt is set by its own file"
                raise RecordError(where, "system", reason, "Write it into the policy's `prompt`, and remove it here.")
        except RecordError as error:
            reject(line, error)
        else:
            extra = {key: value for key, value in entry.items() if key not in known and key not in _CHAINS}
            yield line, Problem(tree.problem, tree.answer, extra)

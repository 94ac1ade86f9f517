"""Advice to a running agent: every few turns, a critic's lowest turn is told to the agent as a message.

    # critic.py
    from jprm.methods.agents.advice import Critic, advised
    from shop import SHOP

    ADVISED = advised(SHOP, Critic("runs/prm"), every=2)

An advised environment is an environment. Whatever takes one takes it: `--environment critic.py:ADVISED`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import string
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jprm.methods.messages.records import content_of, tree_of_messages
from jprm.methods.worlds.environment import Environment, Message, Record, Reply

WORDS = "A critic finds turn {turn} of your {turns} the least likely to be right ({percent} %). Check it."
"""The message. {turn} counts from 1, {percent} is the turn's score from 0 to 99, {said} is what the turn wrote."""

_FIELDS = frozenset({"turn", "turns", "percent", "said"})


@dataclasses.dataclass(frozen=True)
class Critic:
    """Scores the turns of an episode by a model, or by a judge.

    Attributes:
      place: a model's folder, as `jprm.load` takes it, or a judge's JSON file, as `jprm score --judge`. It is loaded at
        the first call.
    """

    place: str | os.PathLike

    def __call__(self, record: Record) -> Sequence[float]:
        """Returns the score of every turn of the record's messages. Threads take turns."""
        tree = tree_of_messages(record)
        with _LOCK:
            (score_N,) = _scorer(os.fspath(self.place)).score_trees([tree])
        return [float(score_N[step]) for step in tree.steps]


_LOCK = threading.Lock()


@functools.cache
def _scorer(place: str) -> Any:
    from jprm.methods.evaluate.run import open_scorer  # imported with the first critic

    return open_scorer(place)


@dataclasses.dataclass
class _AdvisedState:
    """inner: of the environment. messages: all so far but the advice; none of them is changed. turns: of the policy."""

    inner: Any
    problem: dict[str, Any]
    messages: list[Message]
    turns: int = 0


def advised(
    environment: Environment, critic: Callable[[Record], Sequence[float]], *, every: int, words: str = WORDS
) -> Environment:
    """Returns the environment that tells the agent, after every few turns, its lowest turn so far.

    The message has the role user and follows what the world answers. The critic reads the episode without the messages
    of advice. A turn without a score (NaN) is passed over, and where none has one nothing is told. The critic's time is
    the step's: `seconds` of a `World` bounds both.

    Args:
      environment: the world.
      critic: a record with `problem` and `messages` to the scores, in [0, 1], of its assistant's messages: `Critic`, or
        a function of your own. The same messages have the same scores, or positions cannot be played again.
      every: turns from one message to the next.
      words: the message, with {turn}, {turns}, {percent} and {said}.

    Raises ValueError for `every` below 1, and words with another field.
    """
    if every < 1:
        raise ValueError(f"advised: every={every} must be at least 1")
    if unknown := {name for _, name, _, _ in string.Formatter().parse(words) if name is not None} - _FIELDS:
        raise ValueError(f"advised: words has {{{min(unknown)}}}, which is none of {', '.join(sorted(_FIELDS))}")

    def reset(record: Record) -> tuple[_AdvisedState, Sequence[Message]]:
        inner, messages = environment.reset(record)
        problem = {"problem": record["problem"]} if "problem" in record else {}
        return _AdvisedState(inner, problem, list(messages)), messages

    def step(state: _AdvisedState, message: Message) -> Reply:
        reply = environment.step(state.inner, message)
        state.messages += [message, *reply.messages]
        state.turns += 1
        if reply.done or state.turns % every:
            return reply
        advice = _advice(critic({**state.problem, "messages": list(state.messages)}), state, words)
        return dataclasses.replace(reply, messages=(*reply.messages, *advice))

    def restore(kept: Mapping[str, Any]) -> _AdvisedState:
        return _AdvisedState(environment.restore(kept["inner"]), kept["problem"], [*kept["messages"]], kept["turns"])

    snapshot, close = environment.snapshot, environment.close
    kept = snapshot and (lambda state: {**vars(state), "inner": snapshot(state.inner), "messages": [*state.messages]})
    closed = close and (lambda state: close(state.inner))
    return dataclasses.replace(environment, reset=reset, step=step, snapshot=kept, restore=restore, close=closed)


def _advice(scores: Sequence[float], state: _AdvisedState, words: str) -> list[Message]:
    """Returns the message about the lowest of the policy's turns; none where no turn has a score."""
    turns = [message for message in state.messages if message["role"] == "assistant"]
    if len(scores) != len(turns):
        raise ValueError(f"the critic gave {len(scores)} scores to {len(turns)} turns")
    opening = len(turns) - state.turns  # turns that the world wrote
    known = [(score, i) for i, score in enumerate(scores[opening:]) if not math.isnan(score)]
    if not known:
        return []
    score, i = min(known)
    percent = min(max(math.floor(100 * score), 0), 99)
    text = words.format(turn=i + 1, turns=state.turns, percent=percent, said=_said(turns[opening + i]))
    return [{"role": "user", "content": text}]


def _said(message: Message) -> str:
    """Returns a turn's content and calls in a line each."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    written = [f"{call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}" for call in calls]
    text = content_of(message)
    return "\n".join([*([text] if text else ()), *written])

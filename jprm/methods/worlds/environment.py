"""Environments in which a policy acts, turn by turn.

    reset(record) -> state, messages        step(state, assistant message) -> reply

An `Environment` is a record with such functions. Commands and experiments name the user's own, `FILE.py:NAME` or
`module:NAME`. A `World` runs many episodes at once, in threads or processes, with a time limit per call. A call that
fails or times out costs only its own episode, which ends with the reason in `error`.

    world = World("shop.py:SHOP", at_once=16, seconds=30)
    (episode,) = world.start([record])
    (episode,) = world.step([episode], ["lookup apple"])

An `Episode` is an immutable position, so rollouts may start from any turn, any number of times. With `snapshot`
and `restore`, the environment returns to a position. Without them, turns are replayed from `reset`; different answers
on replay are an error.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, islice
from typing import Any

from jprm.methods.answers import extract_answer
from jprm.methods.worker import Worker, serve
from jprm.options import find_part

Record = Mapping[str, Any]
Message = Mapping[str, Any]
"""As in a trajectory: `role`, `content` and optional keys, e.g. `tool_calls`."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """The environment's answer to a turn.

    Attributes:
      messages: next messages to the policy, of role tool or user; may be empty at the end.
      done: whether the episode has ended.
      reward: of this turn. The sum over an episode is its outcome, and must be in [0, 1].
    """

    messages: Sequence[Message] = ()
    done: bool = False
    reward: float = 0.0


def as_content(text: str) -> Message:
    """Wraps sampled text as an assistant message, {"role": "assistant", "content": text}."""
    return {"role": "assistant", "content": text}


def last_answer(messages: Sequence[Message]) -> str | None:
    """Extracts the final answer from the last assistant message, as for chains; `None` if it states no answer."""
    contents = [message.get("content") for message in messages if message["role"] == "assistant"]
    return extract_answer(contents[-1]) if contents and isinstance(contents[-1], str) else None


@dataclasses.dataclass(frozen=True)
class Environment:
    """An environment's functions.

    Attributes:
      reset: maps a task's record to the initial state and the first messages to the policy, which must describe any
        tools: rollouts render no tool schemas.
      step: maps (state, assistant message) to a `Reply`. It may change the state.
      snapshot: maps a state to a value unaffected by later steps; for processes, it must be JSON-serialisable.
      restore: maps such a value to a state, any number of times.
      parse: maps a turn's sampled text to the assistant message for `step`.
      answer: maps an episode's messages to its final answer, if any, for votes.
      close: frees a state's resources, e.g. a container.
    """

    reset: Callable[[Record], tuple[Any, Sequence[Message]]]
    step: Callable[[Any, Message], Reply]
    snapshot: Callable[[Any], Any] | None = None
    restore: Callable[[Any], Any] = copy.deepcopy
    parse: Callable[[str], Message] = as_content
    answer: Callable[[Sequence[Message]], str | None] = last_answer
    close: Callable[[Any], None] | None = None


def find(name: str) -> Environment:
    """Finds the environment `module:NAME` or `FILE.py:NAME`; imports the module or runs the file.

    Raises ValueError if the module, file or object does not exist, or is not an `Environment`. Other errors of its code
    pass through.
    """
    return find_part(name, {}, "environment", Environment, files=True)


@dataclasses.dataclass(frozen=True)
class Episode:
    """A position in the environment.

    Attributes:
      record: the task.
      messages: all so far, with the policy's turns.
      turns: index in `messages` of each turn, i.e. each assistant message by the policy.
      rewards: of each turn.
      done: whether the episode is over, by the environment or by `error`.
      error: reason why the episode was lost, "" if it was not.
      place: the environment's state here.
    """

    record: Record
    messages: tuple[Message, ...] = ()
    turns: tuple[int, ...] = ()
    rewards: tuple[float, ...] = ()
    done: bool = False
    error: str = ""
    place: Place | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def reward(self) -> float:
        """The sum of rewards so far: the outcome, once the episode is done. 0 before the first turn."""
        return float(sum(self.rewards))

    @property
    def last(self) -> tuple[Message, ...]:
        """Messages after the last turn, which the policy has not seen; all messages before the first turn."""
        return self.messages[self.turns[-1] + 1 :] if self.turns else self.messages


@dataclasses.dataclass
class Place:
    """An episode's state: a snapshot, or a live state, which the next step consumes."""

    snapshot: Any = None
    live: list[Any] = dataclasses.field(default_factory=list)


class World:
    """Runs many episodes in one environment. A failed or late call ends its episode, with `done` and `error`.

    So methods raise no error of the environment; they block until each call has ended or is late. `failures` counts the
    errors by class name, e.g. `KeyError`, and late calls as `slow`.
    """

    def __init__(
        self, environment: str | Environment, *, at_once: int = 16, seconds: float = 30.0, processes: bool = False,
        branches: bool = False,
    ):  # fmt: skip
        """
        Args:
          environment: the record, or its name. Processes need the name.
          at_once: concurrent calls.
          seconds: time limit per call.
          processes: run each call in its own process, which is killed on timeout. Threads suit environments waiting for
            other services; processes suit ones that compute or crash.
          branches: store a snapshot at every position, if the environment supports it. Otherwise, stepping from a
            position a second time replays it from the beginning.

        Raises ValueError if the arguments do not fit each other.
        """
        self.environment = find(environment) if isinstance(environment, str) else environment
        if at_once < 1 or not seconds > 0:
            raise ValueError(f"environment: at_once={at_once} and seconds={seconds} must be above 0")
        if processes and not isinstance(environment, str):
            raise ValueError("environment: processes import it, so give its name, FILE.py:NAME or module:NAME")
        if processes and self.environment.snapshot is None:
            remedy = "Give it snapshot and restore, or run it in threads"
            raise ValueError(f"environment={environment!r}: has no snapshot, which processes need. {remedy}")
        self.at_once, self.seconds, self.branches = at_once, seconds, branches or processes
        self.failures: collections.Counter[str] = collections.Counter()
        self._name = ""
        if isinstance(environment, str):  # a worker may run in another folder
            place, _, attribute = environment.rpartition(":")
            self._name = f"{pathlib.Path(place).resolve()}:{attribute}" if place.endswith(".py") else environment
        self._idle: queue.SimpleQueue[Worker] | None = None
        if processes:
            self._idle = queue.SimpleQueue()
            for _ in range(at_once):
                self._idle.put(Worker("jprm.methods.worlds.environment"))

    def start(self, records: Sequence[Record]) -> list[Episode]:
        """Returns every task's initial position, in order, by `Environment.reset`."""
        return self._all([lambda record=record: self._reset(record) for record in records], [*map(Episode, records)])

    def step(self, episodes: Sequence[Episode], messages: Sequence[Message | str]) -> list[Episode]:
        """Returns the positions after one turn per episode, in order: a message, or a text for `parse`.

        Finished episodes are returned unchanged. `episodes` stay valid positions; without snapshots, stepping from one
        again replays it. Raises ValueError if the numbers of episodes and messages differ.
        """
        going = [pair for pair in zip(episodes, messages, strict=True) if not pair[0].done]
        calls = [lambda pair=pair: self._step(*pair) for pair in going]
        after = iter(self._all(calls, [episode for episode, _ in going]))
        return [episode if episode.done else next(after) for episode in episodes]

    def replay(self, records: Sequence[Record], turns: Sequence[Sequence[Message]]) -> list[Episode]:
        """Returns each task's position after the assistant messages `turns`, a list per task, stepping from the start.

        Turns after its end are ignored; without turns it is the initial position. The environment's answers are its new
        ones: if they differ from a recorded episode's, no error is raised.
        """
        episodes = self.start(records)
        for number in range(max(map(len, turns), default=0)):
            going = [number < len(played) for played in turns]
            stepped = iter(self.step([*compress(episodes, going)], [p[number] for p in compress(turns, going)]))
            episodes = [next(stepped) if goes else episode for episode, goes in zip(episodes, going, strict=True)]
        return episodes

    def close(self, episodes: Sequence[Episode] = ()) -> None:
        """Frees these episodes' live states by the environment's `close`, if it has one, whose errors pass through.

        An episode may be closed twice. A later step from it replays it, unless it has a snapshot.
        """
        if self.environment.close is not None:
            for episode in episodes:
                while episode.place is not None and episode.place.live:
                    self.environment.close(episode.place.live.pop())

    # ---- One call: in this process, or in a worker.

    def _reset(self, record: Record) -> Episode:
        if self._idle is not None:
            first = self._ask({"record": record})
            return Episode(record, tuple(first["messages"]), place=Place(first["snapshot"]))
        state, messages = self.environment.reset(record)
        return Episode(record, tuple(messages), place=self._kept(state))

    def _step(self, episode: Episode, message: Message | str) -> Episode:
        assert episode.place is not None
        if self._idle is not None:
            reply = self._ask({"snapshot": episode.place.snapshot, "message": message})
            turn, *messages = reply["messages"]
            return _after(episode, turn, Reply(messages, reply["done"], reply["reward"]), Place(reply["snapshot"]))
        turn = self.environment.parse(message) if isinstance(message, str) else message
        state = self._state(episode)
        reply = self.environment.step(state, turn)
        if reply.done and self.environment.close is not None:
            self.environment.close(state)
        return _after(episode, turn, reply, None if reply.done else self._kept(state))

    def _kept(self, state: Any) -> Place:
        if self.branches and self.environment.snapshot is not None:
            return Place(self.environment.snapshot(state))
        return Place(live=[state])

    def _state(self, episode: Episode) -> Any:
        """Returns a mutable state at this position."""
        place = episode.place
        assert place is not None
        if place.live:
            return place.live.pop()
        if self.branches and self.environment.snapshot is not None:
            return self.environment.restore(place.snapshot)
        state, messages = self.environment.reset(episode.record)
        seen = list(messages)
        for turn in episode.turns:
            seen += [episode.messages[turn], *self.environment.step(state, episode.messages[turn]).messages]
        if [dict(message) for message in seen] != [dict(message) for message in episode.messages]:
            raise ValueError("the environment answers otherwise when its turns are played again: give it a snapshot")
        return state

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._idle is not None
        worker = self._idle.get()
        try:
            answer = worker.ask({"environment": self._name, **question}, self.seconds)
        finally:
            self._idle.put(worker)
        if answer is None:
            raise TimeoutError(f"took more than {self.seconds:g} s, or its process ended")
        if "error" in answer:
            raise _InProcess(answer["kind"], answer["error"])
        return answer

    def _all(self, calls: Sequence[Callable[[], Episode]], before: Sequence[Episode]) -> list[Episode]:
        """Runs calls. If one fails, its result is the previous episode with the error."""
        # a process has the limit itself, and its first call imports the environment
        seconds = self.seconds if self._idle is None else None
        episodes = []
        for result, earlier in zip(in_threads(calls, self.at_once, seconds), before, strict=True):
            if isinstance(result, BaseException):
                slow = isinstance(result, TimeoutError)
                kind = "slow" if slow else result.kind if isinstance(result, _InProcess) else type(result).__name__
                self.failures[kind] += 1
                result = dataclasses.replace(earlier, done=True, error=f"{kind}: {result}"[:300], place=None)
            episodes.append(result)
        return episodes


class _InProcess(Exception):
    """An error reported by a process. `kind`: its class name there."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def _after(episode: Episode, message: Message, reply: Reply, place: Place | None) -> Episode:
    return dataclasses.replace(
        episode,
        messages=(*episode.messages, message, *reply.messages),
        turns=(*episode.turns, len(episode.messages)),
        rewards=(*episode.rewards, float(reply.reward)),
        done=bool(reply.done),
        place=place,
    )


def in_threads(calls: Sequence[Callable[[], Any]], at_once: int, seconds: float | None) -> list[Any]:
    """Runs calls, `at_once` at a time; returns their results in order. If one raises, its result is the exception.

    If a call takes longer than `seconds` (`None`: no limit), its result is a TimeoutError. A thread cannot be killed:
    it is abandoned, and another takes its place.
    """
    ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def work(i: int) -> None:
        try:
            ended.put((i, calls[i]()))
        except Exception as error:
            ended.put((i, error))

    waiting, running, results = iter(range(len(calls))), {}, {}
    while len(results) < len(calls):
        for i in islice(waiting, at_once - len(running)):
            running[i] = time.monotonic()
            threading.Thread(target=work, args=[i], daemon=True, name="environment").start()
        first = min(running, key=running.__getitem__)
        wait = None if seconds is None else max(0.0, running[first] + seconds - time.monotonic())
        try:
            i, result = ended.get(timeout=wait)
        except queue.Empty:
            i, result = first, TimeoutError(f"took more than {seconds:g} s")
        if running.pop(i, None) is not None:  # else it was too late
            results[i] = result
    return [results[i] for i in range(len(calls))]


def answers() -> Callable[[Any], Any]:
    """Returns the worker's function for answering a `World`'s questions, dicts with `environment` (a name) and more.

    With `record` it resets; with `snapshot` and `message` it steps. It returns `messages`, `done`, `reward` and
    `snapshot`, or `kind` and `error` if the environment raises.
    """

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        try:
            world = World(question["environment"], branches=True)
            if "record" in question:
                episode = world._reset(question["record"])
            else:
                episode = world._step(Episode({}, place=Place(question["snapshot"])), question["message"])
        except Exception as error:
            return {"kind": type(error).__name__, "error": str(error)}
        snapshot = episode.place and episode.place.snapshot
        return {"messages": episode.messages, "done": episode.done, "reward": episode.reward, "snapshot": snapshot}

    return answer


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a world needs no accelerator
    from jprm.methods.worlds.environment import answers  # the module that environments import, not this one, `__main__`

    serve(answers)

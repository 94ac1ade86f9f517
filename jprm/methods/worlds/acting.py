"""Search and labels over turns: a step is a policy's turn plus the environment's answer.

Search methods, Monte Carlo values and OmegaPRM work on text problems and steps. Here a problem is an environment's
task, and a step is a turn as JSON, `{"messages": [turn, answers ...], "outcome": reward?}`, with the outcome if
the episode ended. So they all work on turns without changes:

    WorldPolicy     a `Policy` that samples turns, or the rest of an episode, after any turn
    TurnScorer      a `LiveScorer` that scores turns by a trajectory PRM
    judge_outcomes  the verifier `outcome`: the environment's own reward decides

`steps_of_messages` and `messages_of_steps` convert message trees (`jprm.methods.messages`) to such steps, and back.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jprm.io.jsonl import Rejects, parse, read_lines, write_records
from jprm.io.outputs import check_output, digest
from jprm.io.storage import path_of
from jprm.methods.formats.chat_template import template_of
from jprm.methods.messages.records import KNOWN, content_of, known, problem_of, read_trajectory
from jprm.methods.policy import load as policies
from jprm.methods.policy.protocol import Prefix, Sample, Until, read_problems
from jprm.methods.policy.sampler import Sampler
from jprm.methods.search.lockstep import Rescorer
from jprm.methods.verify.verifiers import Outcome, Verifier
from jprm.methods.worlds.environment import Episode, Message, Record, World
from jprm.methods.worlds.turns import Conversations, EpisodeLimits, Played, TurnLayout, begun, play
from jprm.tree import Node, ReasoningTree, RecordError, chains_of, record_of, tree_of

MOST_SLOTS = 1 << 18
"""Maximum tokens in conversations cached between calls. If exceeded, the cache is cleared."""

MOST_TOKENS = 1 << 16
"""Maximum tokens per episode."""


def step_text(messages: Sequence[Message], outcome: float | None = None) -> str:
    """Encodes a turn and the environment's answer as a step, JSON text with `messages`.

    The last step of an episode also has its `outcome`; `None` leaves it out.
    """
    end = {} if outcome is None else {"outcome": outcome}
    return json.dumps({"messages": [dict(message) for message in messages], **end}, ensure_ascii=False)


def messages_in(steps: Sequence[str]) -> list[Message]:
    """Returns the messages of steps from `step_text`, in order. Raises ValueError for a step that is not JSON."""
    return [message for step in steps for message in json.loads(step)["messages"]]


def outcome_in(steps: Sequence[str]) -> float | None:
    """Returns the outcome in the last of these steps; `None` if it has none, or there are no steps."""
    return json.loads(steps[-1]).get("outcome") if steps else None


def steps_between(episode: Episode, since: int) -> tuple[str, ...]:
    """Returns an episode's turns from number `since` (0-based) on, as steps (`step_text`).

    The last one has the outcome, if the environment ended the episode.
    """
    bounds = itertools.pairwise([*episode.turns, len(episode.messages)])
    steps = [episode.messages[begin:end] for begin, end in bounds]
    outcome_of = {len(steps) - 1: episode.reward} if episode.done and not episode.error else {}
    return tuple(step_text(steps[i], outcome_of.get(i)) for i in range(since, len(steps)))


class WorldPolicy:
    """A policy that acts in an environment. Problems are the records' `problem`.

    Samples after one prefix share their history: in the environment by snapshots, in the model by its keys. A prefix
    from elsewhere, e.g. from a file, is replayed. Methods raise KeyError for a problem that is not in `records`, i.e.
    neither given at the start nor registered by `know` or `steps_of`.
    """

    def __init__(
        self,
        sampler: Sampler,
        world: World,
        layout: TurnLayout,
        limits: EpisodeLimits,
        records: Mapping[str, Record] = {},
    ):
        self.world, self.records = world, dict(records)
        self._sampler, self._layout, self._limits = sampler, layout, limits
        self.name = f"{sampler.name}+{digest([world.environment, limits])[:12]}"
        self._forget()

    @property
    def as_turns(self) -> WorldPolicy:
        """Itself: see `jprm.methods.policy.protocol.TurnPolicy`."""
        return self

    def _forget(self) -> None:
        self._talk = Conversations(self._sampler, self._layout.stop)
        self._known: dict[Prefix, Played] = {}

    def sample(self, prefixes: Sequence[Prefix], n: int, *, until: Until, seed: int) -> list[list[Sample]]:
        """See `Policy.sample`; a step is a turn, as `step_text`. An episode lost by the environment is marked `error`.

        Positions are cached for later calls; the cache is cleared when it exceeds MOST_SLOTS tokens. Raises KeyError
        for an unknown problem.
        """
        if self._talk.size > MOST_SLOTS:
            self._forget()
        self._reach([prefix for prefix in prefixes if prefix not in self._known])
        starts = []
        for prefix in prefixes:
            known = self._known[prefix]
            prompt = known.branch.ids if known.branch is not None else known.prompt  # all tokens before a rollout
            starts += [Played(known.episode, seed + j, prompt, branch=known.branch) for j in range(n)]
        played = play(self._talk, self._layout, self.world, starts, self._limits, until=until)
        samples = []
        for i, acted in enumerate(played):
            prefix, start = prefixes[i // n], starts[i]
            steps = steps_between(acted.episode, len(start.episode.turns))
            sample = _sample(acted, steps, until)
            samples.append(sample)
            if sample.finish_reason == "step":
                self._known.setdefault(Prefix(prefix.problem, prefix.steps + sample.steps), acted)
        return [samples[i * n : (i + 1) * n] for i in range(len(prefixes))]

    def _reach(self, prefixes: Sequence[Prefix]) -> None:
        """Replays the prefixes' turns, so they can be continued."""
        distinct = list(dict.fromkeys(prefixes))
        turns = [[m for m in messages_in(prefix.steps) if m["role"] == "assistant"] for prefix in distinct]
        episodes = self.world.replay([self.records[prefix.problem] for prefix in distinct], turns)
        for prefix, episode in zip(distinct, episodes, strict=True):
            self._known[prefix] = begun(self._talk, self._layout, episode, 0)

    def know(self, path: str | os.PathLike, on_error: str = "stop") -> None:
        """Reads the tasks in a file, as `jprm search` does, into `records`.

        A later task replaces one with its `problem`. A bad record raises RecordError if `on_error` is `stop`; with
        `skip` it is left out. Raises ValueError for an empty file or another `on_error`, FileNotFoundError for a
        missing file.
        """
        unkept = Rejects(path)  # not opened: `search_file` writes them
        for _, task in read_problems(path_of(path), on_error, unkept):
            self.records[task.text] = {**task.extra, "problem": task.text, "answer": task.answer}

    def steps_of(self, tree: ReasoningTree) -> ReasoningTree:
        """Converts a message tree to a step tree (`steps_of_messages`), and registers its task in `records`.

        Raises RecordError if it does not begin with the environment's messages, or as `steps_of_messages`; OSError if
        the environment cannot begin.
        """
        steps, _ = steps_of_messages(tree)
        self.records[tree.problem] = {**steps.extra, "problem": tree.problem, "answer": tree.answer}
        self._known.pop(Prefix(tree.problem), None)
        first = next(i for i, node in enumerate(tree.nodes) if node.is_step)
        if [(node.role, node.text) for node in tree.nodes[:first]] != _told(self.opening(tree.problem)):
            reason = "do not begin as the environment does with this record"
            raise RecordError(f"problem {tree.problem[:60]!r}", "messages", reason, "Give the task's own keys with it.")
        return steps

    def messages_of(self, tree: ReasoningTree) -> ReasoningTree:
        """Converts a step tree to a message tree, which begins with the environment's messages. Raises as `opening`."""
        return messages_of_steps(tree, self.opening(tree.problem))[0]

    def opening(self, problem: str) -> tuple[Message, ...]:
        """Returns the environment's messages before the first turn; resets it for this if they are not cached.

        Raises OSError if the environment cannot begin, KeyError for an unknown problem.
        """
        prefix = Prefix(problem)
        if prefix not in self._known:
            self._reach([prefix])
        episode = self._known[prefix].episode
        if episode.error:
            raise OSError(f"problem {problem[:60]!r}: the environment does not begin: {episode.error}")
        return episode.messages

    def finished(self, problem: str, steps: Sequence[str]) -> tuple[str | None, bool | None]:
        """Returns (final answer, whether the outcome is 1); the second is `None` before the episode's end.

        The answer is `None` if the environment's `answer` finds none in the messages so far. Raises as `opening`.
        """
        outcome = outcome_in(steps)
        answer = self.world.environment.answer([*self.opening(problem), *messages_in(steps)])
        return answer, None if outcome is None else outcome >= 1


def _sample(acted: Played, steps: tuple[str, ...], until: str) -> Sample:
    tokens, logprob = int(acted.sampled_T.sum()), float(acted.log_probability_T.sum())
    if acted.episode.error:
        return Sample((), tokens, "error", error=acted.episode.error)
    reason = "stop" if acted.ended else "length" if acted.cut or until == "end" else "step"
    return Sample(steps, tokens, reason, logprob)


class TurnScorer(Rescorer):
    """A `LiveScorer` for turns, by a PRM that scores message trees."""

    def __init__(self, prm: Any, policy: WorldPolicy):
        super().__init__(prm)
        self._policy, self.finished = policy, policy.finished

    def _score(self, trees: list[ReasoningTree]) -> list[np.ndarray]:
        trajectories = [messages_of_steps(tree, self._policy.opening(tree.problem)) for tree in trees]
        scores = super()._score([tree for tree, _ in trajectories])
        return [np.asarray(score_N)[turn_M] for score_N, (_, turn_M) in zip(scores, trajectories, strict=True)]

    def written(self, record: dict[str, Any]) -> dict[str, Any]:
        """Converts a search's record from steps to messages: a tree, in which the choice is a turn's node.

        Returns a new record. `search.chosen` and each node's `draws[i]["from"]` become node indices of the message
        tree; `chosen` may be `None`. The record must come from a search over turns: others end in a KeyError, TypeError
        or ValueError. Raises OSError and KeyError as `WorldPolicy.opening`.
        """
        tree = tree_of(record)
        trajectory, turns = messages_of_steps(tree, self._policy.opening(tree.problem))
        choice = dict(record["search"])
        if choice["chosen"] is not None:
            at = choice["chosen"] if tree.kind == "tree" else chains_of(tree)[choice["chosen"]][-1]
            choice["chosen"] = turns[at]
        nodes = []
        for node in trajectory.nodes:
            draws = [{**d, "from": turns[d["from"]] if d["from"] >= 0 else -1} for d in node.extra.get("draws", ())]
            nodes.append(dataclasses.replace(node, extra={**node.extra, "draws": draws}) if draws else node)
        extra = {**trajectory.extra, "search": choice}
        return record_of(dataclasses.replace(trajectory, nodes=tuple(nodes), extra=extra))


def judge_outcomes(chains: Sequence[tuple[Record, Sequence[str]]]) -> list[Outcome]:
    """Returns the outcomes of episodes, (record, steps), in order, from their last step; 0 if one did not end.

    Raises ValueError if a last step is not JSON, as of `step_text`.
    """
    return [Outcome(outcome_in(steps) or 0.0) for _, steps in chains]


OUTCOME = Verifier(judge_outcomes, lambda record, where: None)
"""The verifier `outcome`."""


def load_acting(policy: str | os.PathLike, environment: str, turns: int, **options: Any) -> WorldPolicy:
    """Loads a policy to act in an environment for at most `turns` turns, and MOST_TOKENS tokens, per episode.

    `environment` is `FILE.py:NAME` or `module:NAME`. `options` are `World`'s `at_once`, `seconds` and `processes`;
    `branches` is always on. `policy` is a model's folder, a GGUF file, or a policy's JSON file.

    Raises ValueError if the policy is not sampled in this process, its chat template does not end turns with a token,
    or the environment is not found; FileNotFoundError if the policy is missing; RecordError for its JSON file.
    """
    world = World(environment, branches=True, **options)
    sampler = policies.load_policy(policy)
    if not isinstance(sampler, Sampler):
        raise ValueError(f"{policy}: acts through a server, which keeps no turns. Name a model's folder")
    place = policies.policy_settings(policy)["model"] if str(policy).endswith(".json") else policy
    return WorldPolicy(
        sampler, world, TurnLayout(sampler.tokenizer, *template_of(place)), EpisodeLimits(turns, MOST_TOKENS)
    )


def label_replayed(environment: str, input: str | os.PathLike, output: str | os.PathLike) -> dict[str, int]:
    """Replays turns from a JSONL file's trajectories, and writes them with the environment's `outcome`.

    An earlier `outcome` is replaced. Replaces `output` atomically. A trajectory that did not end has outcome 0. If its
    turns cannot be replayed (`lost`) or get other answers (`answers differ`), it is left out. Returns these counts,
    `trajectories` (all), and `solved` (outcome 1).

    Raises RecordError for a bad trajectory, FileNotFoundError for a missing file, ValueError if `output` is the input
    or the environment is not found.
    """
    world = World(environment)
    check_output(output, input)
    counts = {"trajectories": 0, "solved": 0, "answers differ": 0, "lost": 0}

    def replayed() -> Iterator[Record]:
        for number, line in read_lines(input):
            where = f"{os.fspath(input)}:{number}"
            trajectory = read_trajectory(parse(line, where), where)
            messages, about = trajectory["messages"], {k: v for k, v in trajectory.items() if k not in KNOWN}
            turns = [message for message in messages if message["role"] == "assistant"]
            (episode,) = world.replay([about | {"problem": problem_of(messages, about)}], [turns])
            recorded, replayed_turns = _told(messages), _told(episode.messages)
            counts["trajectories"] += 1
            if episode.error or replayed_turns[: len(recorded)] != recorded:
                counts["lost" if episode.error else "answers differ"] += 1
                continue
            outcome = episode.reward if episode.done else 0.0
            counts["solved"] += outcome >= 1
            trajectory["outcome"] = outcome
            yield known(trajectory) | trajectory

    write_records(output, replayed())
    return counts


# ---- Trees of messages as trees of such steps, and back.


def steps_of_messages(tree: ReasoningTree) -> tuple[ReasoningTree, list[int]]:
    """Converts a message tree to a tree whose steps are turns (`step_text`); returns it and each turn's node index.

    Labels, scores and outcomes stay; a label's origin, a score's `outputs`, and the record's `tools` are left out.

    Raises RecordError if the tree is not of messages, has no turns, or its turns are cut into several steps.
    """
    where = f"problem {tree.problem[:60]!r}"
    if not tree.of_messages:
        raise RecordError(where, "record", "has no messages", "An environment needs trajectories: messages with roles.")
    if any(node.continues for node in tree.nodes):
        raise RecordError(where, "segment", "cuts turns into steps", "Write `segment`: 'turn'.")
    below: dict[int, int] = {}
    for i, node in enumerate(tree.nodes):
        if not node.is_step:
            below.setdefault(node.parent, i)
    turns, nodes, place = [], [], {-1: -1}
    for i, node in enumerate(tree.nodes):
        if not node.is_step:
            place[i] = place[node.parent]
            continue
        messages, at = [_message(node)], i
        while (at := below.get(at, -1)) >= 0:
            messages.append(_message(tree.nodes[at]))
        outcome = None if node.correct is None else float(node.correct)
        place[i] = len(nodes)
        turns.append(i)
        text = step_text(messages, outcome)
        nodes.append(Node(place[node.parent], text, node.label, correct=node.correct, score=node.score))
    if not nodes:
        raise RecordError(where, "messages", "have no turn of the assistant", "There is nothing to label.")
    known = {key: value for key, value in tree.extra.items() if key not in ("tools", "outcome", "segment")}
    return ReasoningTree(tree.problem, tuple(nodes), tree.answer, tree.semantics, "tree", known), turns


def messages_of_steps(tree: ReasoningTree, opening: Sequence[Message]) -> tuple[ReasoningTree, list[int]]:
    """Inverts `steps_of_messages`, after the `opening` messages.

    Returns the message tree and each step's turn node index. Label, score and extra keys of a step go to its turn.
    Raises ValueError for a step that is not JSON.
    """
    nodes = [_node(message, i - 1) for i, message in enumerate(opening)]
    first, ends, turns = len(nodes) - 1, [], []
    for step in tree.nodes:
        parent = ends[step.parent] if step.parent >= 0 else first
        for k, message in enumerate(json.loads(step.text)["messages"]):
            node = _node(message, parent)
            if not k:
                turns.append(len(nodes))
                extra = {**node.extra, **step.extra}
                node = dataclasses.replace(
                    node, label=step.label, origin=step.origin, correct=step.correct, score=step.score,
                    outputs=step.outputs, extra=extra,
                )  # fmt: skip
            parent = len(nodes)
            nodes.append(node)
        ends.append(parent)
    return dataclasses.replace(tree, nodes=tuple(nodes), kind="tree"), turns


def _told(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message["role"], content_of(message)) for message in messages]


def _message(node: Node) -> dict[str, Any]:
    null = "content" in node.extra and node.extra["content"] is None
    others = {key: value for key, value in node.extra.items() if key != "content"}
    return {"role": node.role, "content": None if null else node.text, **others}


def _node(message: Message, parent: int) -> Node:
    extra = {key: value for key, value in message.items() if key not in ("role", "content")}
    extra |= {"content": None} if message.get("content") is None else {}
    return Node(parent, content_of(message), extra=extra, role=message["role"])

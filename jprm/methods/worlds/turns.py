"""Conversations sampled turn by turn, keeping keys and values, without retokenising any text.

    with Conversations(sampler, layout.stop) as talk:
        branches = [talk.open(layout.opening(messages)) for messages in first]
        drawn = talk.draw(branches, [[0, 1, 2, 3]] * len(branches), stream=(seed,))   # 4 turns after each
        sample, branch = drawn[0][2]
        branch = branch.followed(layout.answer(turn, observations, stopped=True))      # the environment answers
        drawn = talk.draw([branch], [[2]], stream=(seed,))

A `Branch` is token ids, and the slots with their keys and values. Branches with a common beginning share slots: a
sample group stores its prompt once, and rollouts from one turn store their history once. The environment's answers are
computed together with the next turn, in one call for all branches.

`TurnLayout` writes the text between sampled turns as the tokenizer's chat template does. `play` lets a sampler and a
`World` take turns until all episodes are done.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32

from jprm.methods.decoding import decode
from jprm.methods.decoding.cache import Slots
from jprm.methods.formats.chat_template import render
from jprm.methods.policy.protocol import Until
from jprm.methods.policy.sampler import SHORTEST_PROMPT, Drawn, Sampler
from jprm.methods.worlds.environment import Episode, Message, World
from jprm.rows import padded_size
from jprm.tokenizer import Tokenizer, control_tokens

SLOTS = 4096
"""Initial token slots; doubled when full."""

SHORTEST_NEW = 16
"""Minimum padded length, in tokens, for the environment's answers."""


@dataclasses.dataclass(frozen=True)
class Branch:
    """A conversation so far. `slots` hold the keys and values of its first `len(slots)` tokens."""

    ids: tuple[int, ...]
    slots: np.ndarray = dataclasses.field(compare=False, repr=False, default_factory=lambda: np.zeros(0, np.int64))

    def followed(self, ids: Sequence[int]) -> Branch:
        """Returns a new branch with unsampled ids appended, whose keys are computed at the next `draw`."""
        return Branch((*self.ids, *ids), self.slots)


class Conversations:
    """Conversation branches on a policy's devices. Leaving the `with` block frees their memory, and ends the branches.

    The constructor makes the sampler stop at the token `stop`.
    """

    def __init__(self, sampler: Sampler, stop: int):
        """`stop`: token that ends a turn, besides the end of text."""
        sampler.stop_at(stop)
        self.sampler, self._slots = sampler, Slots(sampler, SLOTS)
        self.computed = 0  # tokens that were not sampled: prompts and answers, each once

    def __enter__(self) -> Conversations:
        return self

    def __exit__(self, *error: object) -> None:
        del self._slots

    @property
    def size(self) -> int:
        """Capacity of the cache in tokens, at least SLOTS; it only grows."""
        return self._slots.size

    def open(self, ids: Sequence[int]) -> Branch:
        """Returns a new branch with these token ids, without computing anything.

        Raises ValueError if there are no ids.
        """
        if not ids:
            raise ValueError("a conversation begins with at least one token")
        return Branch(tuple(ids))

    def draw(
        self, branches: Sequence[Branch], numbers: Sequence[Sequence[int]], stream: tuple[int, ...] = ()
    ) -> list[list[tuple[Drawn, Branch]]]:
        """Samples a turn for each branch and each of its numbers; returns turns and the extended branches.

        Result [i][j] is (turn, branch with it) for `numbers[i][j]`. A turn depends only on the parameters, the ids
        before it, its number, the stream, and the sampler's options (temperature, longest turn). Equal branches are
        computed once. Raises ValueError if there is not one list of numbers per branch.
        """
        places: dict[Branch, list[tuple[int, int, int]]] = collections.defaultdict(list)
        for i, (branch, numbers_of) in enumerate(zip(branches, numbers, strict=True)):
            for j, number in enumerate(numbers_of):
                places[branch].append((i, j, number))
        drawn: list[list[Any]] = [[None] * len(numbers_of) for numbers_of in numbers]
        if not places:
            return drawn
        rows, devices = self.sampler.options.rows, self._slots.rows(1)
        m = min(padded_size(max(map(len, places.values()))), 1 << (max(rows, devices) // devices).bit_length() - 1)
        jobs = [
            (branch, numbers_of[k : k + m])
            for branch, numbers_of in places.items()
            for k in range(0, len(numbers_of), m)
        ]
        jobs.sort(key=lambda job: len(job[0].ids))  # branches of like length together
        size = max(devices, rows // m)
        for first in range(0, len(jobs), size):
            batch = jobs[first : first + size]
            known = self._computed([branch for branch, _ in batch])
            for (_, numbers_of), samples in zip(batch, self._turns(known, batch, m, stream), strict=True):
                for (i, j, _), sample in zip(numbers_of, samples, strict=True):
                    drawn[i][j] = sample
        return drawn

    def _computed(self, branches: Sequence[Branch]) -> list[Branch]:
        """Computes keys and values for each branch except its last token, with which decoding begins."""
        new = {branch: ids for branch in branches if (ids := branch.ids[len(branch.slots) : -1])}
        if not new:
            return list(branches)
        ids, paths = list(new.values()), [branch.slots for branch in new]
        slots = [self._slots.take(len(ids_N)) for ids_N in ids]
        T = padded_size(max(map(len, ids)), SHORTEST_NEW)
        S = padded_size(max(map(len, paths)), SHORTEST_PROMPT)
        self._slots.extend(ids, slots, paths, T, S)
        self.computed += sum(map(len, ids))
        known = {b: Branch(b.ids, np.concatenate([b.slots, taken])) for b, taken in zip(new, slots, strict=True)}
        return [known.get(branch, branch) for branch in branches]

    def _turns(
        self, known: Sequence[Branch], jobs: Sequence[tuple[Branch, Any]], m: int, stream: tuple[int, ...]
    ) -> list[list[tuple[Drawn, Branch]]]:
        R = self._slots.rows(len(jobs))
        S = padded_size(max(len(branch.slots) for branch in known), SHORTEST_PROMPT)
        past = self._slots.past([branch.slots for branch in known], S)
        length_B, last_B = np.ones(R * m, np.int32), np.zeros(R * m, np.int32)
        hash_B, number_B = np.zeros(R * m, np.uint32), np.zeros(R * m, np.uint32)
        end_B = np.full(R * m, decode.STOP, np.int32)
        for r, (branch, (_, numbers_of)) in enumerate(zip(known, jobs, strict=True)):
            at = slice(r * m, r * m + len(numbers_of))
            length_B[r * m : (r + 1) * m], last_B[r * m : (r + 1) * m] = len(branch.ids), branch.ids[-1]
            hash_B[at], end_B[at] = ids_hash(branch.ids, stream), decode.RUNNING
            number_B[at] = [number % 2**32 for _, _, number in numbers_of]
        slots: dict[int, np.ndarray] = {}

        def kept(samples: decode.DecodingState, rows: np.ndarray) -> None:
            """Stores the samples' keys: for the token before each sample, and all its tokens but the last."""
            length_B, places = np.asarray(samples.length_B), []
            for b, length in enumerate(length_B.tolist()):
                sample = int(rows[b // m]) * m + b % m
                if sample in slots:
                    self._slots.put_back(slots[sample])
                slots[sample] = self._slots.take(length)
                places.append(slots[sample])
            self._slots.keep(samples.cache, places)

        drawn = self.sampler.decoded(past, length_B, last_B, number_B, hash_B, end_B, m, "end", kept)

        def turn(branch: Branch, b: int) -> tuple[Drawn, Branch]:
            return drawn[b], Branch((*branch.ids, *drawn[b].ids), np.concatenate([branch.slots, slots[b]]))

        return [
            [turn(branch, r * m + i) for i in range(len(numbers_of))]
            for r, (branch, (_, numbers_of)) in enumerate(zip(known, jobs, strict=True))
        ]


def ids_hash(ids: Sequence[int], stream: tuple[int, ...]) -> int:
    """Returns a number in [0, 2^32) by the token ids and the stream, for random keys; equal in every process."""
    content = np.array(ids, np.int64).tobytes() + json.dumps(stream).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:4], "big")


# ---- The text between sampled turns.


class TurnLayout:
    """Writes a conversation piece by piece, with the same tokens as the chat template writes it whole.

    stop: token that ends a sampled assistant turn.

    Raises ValueError if the template does not end assistant turns with a dedicated token, or the tokenizer does not
    parse special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, tokens: Mapping[str, str]):
        if not hasattr(tokenizer, "encode_control"):
            raise ValueError("turns are written by a chat template, which needs a tokenizer.json")
        self.tokenizer, self._template, self._tokens = tokenizer, template, dict(tokens)
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "reply-7f3a"}]
        tail = render(template, messages, tokens, reply=False).rpartition("reply-7f3a")[2]
        names = control_tokens(tokenizer, tail)
        first = next((name for name in names if tail.startswith(name)), None)
        if first is None:
            raise ValueError(
                f"the chat template ends the assistant's turn with {tail[:20]!r}, and not with a token: a policy could"
                " not say that its turn has ended"
            )
        self._stop, self.stop = first, names[first]
        self._between = functools.lru_cache(maxsize=4096)(self._written)
        self._first = functools.lru_cache(maxsize=4096)(self._opened)

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids for the messages before the first turn, up to the policy's text.

        Raises ValueError if a message contains a control token's name, or the template rejects the messages.
        """
        self._check(messages)
        return list(self._first(json.dumps(list(messages))))

    def turn(self, turn: Message) -> list[int]:
        """Returns a recorded turn's ids, without its end token; control token names in it are plain text.

        Raises ValueError if the template's generation prompt differs from its turn opening.
        """
        messages = [{"role": "user", "content": "question"}, turn]
        opened = render(self._template, messages[:1], self._tokens)
        whole = render(self._template, messages, self._tokens, reply=False)
        if not whole.startswith(opened):
            raise ValueError("the chat template opens a turn otherwise than it asks for one")
        return self.tokenizer.encode(whole[len(opened) : whole.rindex(self._stop)])

    def answer(self, turn: Message, messages: Sequence[Message], *, stopped: bool) -> list[int]:
        """Returns the ids after a turn: its end, the environment's answer, and the next turn's opening.

        The end is left out if the turn was `stopped` by it, as it was sampled then.

        Raises ValueError if the template writes a turn differently when messages follow, or if the answer contains
        control token names, which would be parsed.
        """
        self._check(messages)
        ids = list(self._between(json.dumps([turn, *messages])))
        return ids[1:] if stopped else ids

    def _opened(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(render(self._template, json.loads(text), self._tokens)))

    def _written(self, text: str) -> tuple[int, ...]:
        turn, *messages = json.loads(text)
        opening = [{"role": "user", "content": "question"}, turn]
        before = render(self._template, opening, self._tokens, reply=False)
        cut = before.rindex(self._stop)
        whole = render(self._template, [*opening, *messages], self._tokens)
        if not whole.startswith(before[: cut + len(self._stop)]):
            raise ValueError("the chat template writes a turn otherwise when something follows it")
        return tuple(self._encode(whole[cut:]))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode_control(text, special=False)  # pyright: ignore[reportAttributeAccessIssue]

    def _check(self, messages: Sequence[Message]) -> None:
        for message in messages:
            content = message.get("content")
            if isinstance(content, str) and (names := control_tokens(self.tokenizer, content)):
                raise ValueError(
                    f"a message of the {message['role']} holds the name of a control token, {min(names)!r}, which the"
                    " chat template would make one of"
                )

    def text(self, drawn: Drawn) -> str:
        """Returns a sampled turn's text, without its end token; a turn that was cut off has no end token."""
        return self.tokenizer.decode(drawn.ids[:-1] if drawn.finish_reason == "stop" else drawn.ids)


# ---- A policy and an environment take turns.


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
    """An episode's limits. turns: the policy's. tokens: from the prompt's start to the last sampled one."""

    turns: int
    tokens: int

    def __post_init__(self):
        if min(self.turns, self.tokens) < 1:
            raise ValueError(f"an episode has at least one turn and one token, not {self.turns} and {self.tokens}")


@dataclasses.dataclass(frozen=True)
class Played:
    """A rollout in an environment: its position and tokens.

    Attributes:
      prompt: ids before the first sampled turn.
      ids: all later ids: sampled turns, with the environment's answers between them. The last id is sampled.
      sampled_T: which ids the policy sampled.
      log_probability_T: float32, for sampled ids, at the sampling temperature; 0 for others.
      turn_stop: index in `ids` after each sampled turn's last token.
      texts: the sampled turns' texts.
      ended: the environment ended the episode; otherwise a limit cut it off, or it was lost (`episode.error`).
      branch: the conversation so far; it can be continued while its `Conversations` are open.
    """

    episode: Episode
    number: int
    prompt: tuple[int, ...]
    ids: tuple[int, ...] = ()
    sampled_T: Bool[np.ndarray, " T"] = dataclasses.field(default_factory=lambda: np.zeros(0, bool))
    log_probability_T: Float32[np.ndarray, " T"] = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    turn_stop: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    ended: bool = False
    cut: bool = False
    branch: Branch | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def goes_on(self) -> bool:
        return not (self.ended or self.cut or self.episode.error)


def begun(talk: Conversations, layout: TurnLayout, episode: Episode, number: int) -> Played:
    """Returns rollout `number` at an episode's position, before any sampling, with a new branch.

    Earlier turns, e.g. of a record, are written by the template, as only their text is known. If an episode cannot be
    written, it is lost (`lost`), which raises no error; so is one with an `error` already.
    """
    if episode.error:
        return Played(episode, number, ())
    first = episode.turns[0] if episode.turns else len(episode.messages)
    bounds = [*episode.turns, len(episode.messages)]
    try:
        ids = layout.opening(episode.messages[:first])
        for turn, after in zip(bounds, bounds[1:], strict=False):
            message, answers = episode.messages[turn], episode.messages[turn + 1 : after]
            ids += [*layout.turn(message), *layout.answer(message, answers, stopped=False)]
    except ValueError as error:
        return Played(lost(episode, error), number, ())
    return Played(episode, number, tuple(ids), branch=talk.open(ids))


def lost(episode: Episode, error: ValueError) -> Episode:
    """Returns the episode, marked as one that the layout cannot write: `done`, with `error` "layout: ..."."""
    return dataclasses.replace(episode, done=True, error=f"layout: {error}"[:300])


def play(
    talk: Conversations, layout: TurnLayout, world: World, starts: Sequence[Played], limits: EpisodeLimits,
    *, until: Until = "end", stream: tuple[int, ...] = (),
) -> list[Played]:  # fmt: skip
    """Returns the rollouts `starts` (`begun`) after one more turn (`until="step"`) or at their ends, in order. Blocks.

    All unfinished rollouts advance together: each round samples one turn for each, then the environment answers all at
    once. Finished rollouts are returned unchanged; a failed or lost episode raises no error, but has `episode.error`. A
    rollout that reaches a limit is `cut`, and so is one whose turn exceeds the sampler's own limit: the environment
    does not get that turn. Values of `stream` give independent samples.
    """
    played = list(starts)
    while True:
        going = {i: episode.branch for i, episode in enumerate(played) if episode.goes_on}
        branches = [branch for branch in going.values() if branch is not None]  # one each
        drawn = talk.draw(branches, [[played[i].number] for i in going], stream)
        turns = {i: turn for i, (turn,) in zip(going, drawn, strict=True)}
        texts_of = {i: layout.text(turn) for i, (turn, _) in turns.items()}
        whole = [i for i, (turn, _) in turns.items() if turn.finish_reason == "stop"]
        led = world.step([played[i].episode for i in whole], [texts_of[i] for i in whole])
        episodes = dict(zip(whole, led, strict=True))
        for i, (turn, branch) in turns.items():
            played[i] = _with_turn(played[i], turn, branch, texts_of[i], episodes.get(i), layout, limits)
        if until == "step" or not any(episode.goes_on for episode in played):
            return played


def _with_turn(
    played: Played,
    drawn: Drawn,
    branch: Branch,
    text: str,
    episode: Episode | None,
    layout: TurnLayout,
    limits: EpisodeLimits,
) -> Played:
    """Appends a sampled turn to a rollout; `episode` is the position after it, unless the turn was cut off."""
    ids = (*played.ids, *branch.ids[len(played.prompt) + len(played.ids) :])
    observed = len(ids) - len(played.ids) - len(drawn.ids)  # the world's answer to the turn before
    played = dataclasses.replace(
        played,
        ids=ids,
        sampled_T=np.concatenate([played.sampled_T, np.zeros(observed, bool), np.ones(len(drawn.ids), bool)]),
        log_probability_T=np.concatenate([played.log_probability_T, np.zeros(observed, np.float32), drawn.logprob_N]),
        turn_stop=(*played.turn_stop, len(ids)),
        texts=(*played.texts, text),
        branch=branch,
    )
    if episode is None:
        return dataclasses.replace(played, cut=True)
    if episode.done:
        return dataclasses.replace(played, episode=episode, ended=not episode.error)
    try:
        after = layout.answer(episode.messages[episode.turns[-1]], episode.last, stopped=True)
    except ValueError as error:
        return dataclasses.replace(played, episode=lost(episode, error))
    full = len(played.prompt) + len(ids) + len(after) >= limits.tokens or len(episode.turns) >= limits.turns
    return dataclasses.replace(played, episode=episode, cut=full, branch=branch.followed(after))

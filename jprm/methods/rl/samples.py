"""Samples: a policy's sampled tokens, and groups of samples as token trees.

Text is only for graders and reward models. A text can tokenise to other tokens than the sampled ones, so training on
retokenised text would ascribe to the policy tokens that it never sampled.

In an environment a sample is an episode: the policy's turns, and the environment's answers between them.

A group of samples is one tree, so that common prefixes are computed once. Samples through one token share its
probability ratio r. So two numbers per token represent any group exactly, the sums U and D of its samples' positive and
negative advantages:

    sum_i min(r A_i, clip(r) A_i) = min(r, 1 + high) U + max(r, 1 - low) D

Preferences are right and wrong continuations of one prefix, which DPO compares.

    dpo        the samples of a problem: right if the verifier accepts them (Rafailov et al. 2023)
    step_dpo   the steps that samples took after the same steps (Lai et al. 2024, arXiv 2406.18629). A step is right if
               a sample through it is accepted, the hard estimate of Math-Shepherd

Every right continuation is compared with every wrong one. They are the chains of a tree whose problem is the prefix, so
that the log ratio, which the objective `implicit` sums over a chain, is the continuation's.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from jprm import multihost
from jprm.methods.decoding.decode import step_text
from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import Drawn, Sampler, Wanted, text_hash
from jprm.methods.worlds.environment import World
from jprm.methods.worlds.turns import Conversations, EpisodeLimits, Played, TurnLayout, begun, play
from jprm.token_tree import TokenTree, merged, next_tokens, ranges


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One sample of a chain.

    Attributes:
      ids: the sampled tokens in order, with the end of text if it was sampled.
      log_probability_T: of each token, float32, at the sampling temperature.
      step_stop: for each step, the index in `ids` after its last token. The last step extends to the end, with the end
          of text.
      steps: the steps' texts, never blank.
      ended: whether the policy ended the chain; else a token limit cut it off.
      prompt: the preceding ids, if they are not a problem's: for an episode in an environment.
      observed: for an episode, the spans of `ids` that the environment wrote. They have probability 1, no advantage and
          no weight, and belong to the segment of the following turn.
      episode: `messages`, the message index of every turn (`turns`), `reward`, and the `error` of a lost one.
      drawn_by: if several policies sampled it, for each one the index in `ids` of its first token, and the number of
          the update after which it was the policy.

    Raises ValueError if lengths differ, or step ends do not increase to the number of ids.
    """

    ids: tuple[int, ...]
    log_probability_T: Float32[np.ndarray, " T"]
    step_stop: tuple[int, ...]
    steps: tuple[str, ...]
    ended: bool
    prompt: tuple[int, ...] = ()
    observed: tuple[tuple[int, int], ...] = ()
    episode: Mapping[str, Any] | None = None
    drawn_by: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        stops = (0, *self.step_stop)
        sizes = len(self.ids), len(self.log_probability_T), len(self.steps), len(self.step_stop)
        if sizes[0] != sizes[1] or sizes[2] != sizes[3]:
            raise ValueError(
                "{} ids with {} log-probabilities, {} steps with {} ends: the counts must match".format(*sizes)
            )
        if any(a >= b for a, b in zip(stops, stops[1:], strict=False)) or (self.steps and stops[-1] != len(self.ids)):
            raise ValueError(
                f"steps end at {self.step_stop} of {len(self.ids)} ids: ends must increase to the number of ids"
            )

    @property
    def sampled_T(self) -> Bool[np.ndarray, " T"]:
        """Marks the policy's sampled tokens; all, except in an episode."""
        sampled_T = np.ones(len(self.ids), bool)
        for start, stop in self.observed:
            sampled_T[start:stop] = False
        return sampled_T

    @property
    def lost(self) -> bool:
        """Whether the environment failed; `False` for a sample that is no episode."""
        return self.episode is not None and bool(self.episode["error"])

    @property
    def reward(self) -> float:
        """The environment's reward of an episode, else 0."""
        return self.episode["reward"] if self.episode is not None else 0.0

    def messages(self) -> list[dict[str, Any]]:
        """Returns an episode's messages up to its last turn, {"role", "content", ...}; asserts that it is an episode.

        A turn that the environment did not take is {"role": "assistant", "content": its text}.
        """
        assert self.episode is not None
        turns, all_messages = self.episode["turns"], self.episode["messages"]
        cut = [{"role": "assistant", "content": text} for text in self.steps[len(turns) :]]
        return [*(all_messages if cut else all_messages[: turns[-1] + 1]), *cut] if turns or cut else list(all_messages)

    def json(self) -> dict[str, Any]:
        """Returns the fields by name, as JSON; float32 is preserved, and `of_json` inverts it."""
        return vars(self) | {"log_probability_T": self.log_probability_T.tolist()}

    @staticmethod
    def of_json(value: Mapping[str, Any]) -> Rollout:
        """Inverts `json`. Raises KeyError if `log_probability_T` or `ended` is absent, ValueError as the class."""
        lists = {name: tuple(value.get(name, ())) for name in ("ids", "step_stop", "steps", "prompt")}
        return Rollout(
            log_probability_T=np.array(value["log_probability_T"], np.float32), ended=value["ended"],
            observed=tuple((start, stop) for start, stop in value.get("observed", ())), episode=value.get("episode"),
            drawn_by=tuple((first, by) for first, by in value.get("drawn_by", ())), **lists,
        )  # fmt: skip


def check_exact(policy: Any) -> Sampler:
    """Returns the policy if it reports exact probabilities of sampled tokens.

    Raises ValueError unless it is a `Sampler` with top_p 1 and a temperature above 0.
    """
    if not isinstance(policy, Sampler):
        raise ValueError(
            f"{getattr(policy, 'name', policy)}: gives only text. Reinforcement learning needs the sampled token ids"
            " with their log-probabilities: name a model that is sampled in this process"
        )
    if policy.options.top_p != 1:
        raise ValueError(f"top_p is {policy.options.top_p}: log-probabilities are of all tokens; set it to 1")
    if policy.options.temperature == 0:
        raise ValueError("temperature is 0: the policy would sample only one chain; set it above 0")
    return policy


def sample(
    policy: Any, problems: Sequence[str], n: int, *, seed: int, update: int, costs: Sequence[float] = ()
) -> list[list[Rollout]]:
    """Returns n samples for each problem.

    A draw depends only on seed, update, problem and sample number: the same parameters give the same samples, whatever
    was sampled before. Every process must call it: each samples for a part of the problems, waits for the others, and
    returns all samples. `costs`, the expected tokens per problem, balance the parts; (): all equal.

    Raises ValueError if `check_exact` refuses the policy, or a problem occurs twice, and as `policy.draw`.
    """
    draw = _draw(policy, problems, n, (seed, update))
    return [[Rollout.of_json(value) for value in samples] for samples in multihost.spread(draw, problems, costs)]


def ask(
    policy: Any, problems: Sequence[str], n: int, *, seed: int, update: int, costs: Sequence[float] = ()
) -> Callable[[], list[list[Rollout]]]:
    """Starts `sample`, with its arguments, in a daemon thread, and returns a function that waits for its result.

    So servers sample meanwhile. Every process must call both. Raises ValueError as `sample`; errors of sampling are
    raised by the returned function.
    """
    draw, future = _draw(policy, problems, n, (seed, update)), concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(draw(multihost.own_part(problems, costs)))
        except BaseException as error:  # any error: it is raised where the result is waited for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()

    def result() -> list[list[Rollout]]:
        drawn = multihost.spread(lambda assigned: future.result(), problems, costs)
        return [[Rollout.of_json(value) for value in samples] for samples in drawn]

    return result


def _draw(policy: Any, problems: Sequence[str], n: int, stream: tuple[int, int]) -> Callable[[Sequence[str]], Any]:
    """Returns the function that samples a part of the problems, as JSON."""
    if len(set(problems)) < len(problems):
        raise ValueError("a problem occurs twice in an update: its samples would be the same")
    policy = check_exact(policy)

    def draw(part: Sequence[str]) -> list[list[dict[str, Any]]]:
        drawn = policy.draw([Prefix(problem) for problem in part], n, until="end", seed=0, stream=stream)
        return [[rollout_of(policy, drawn_sample).json() for drawn_sample in samples] for samples in drawn]

    return draw


# ---- Samples that run over an update.


@dataclasses.dataclass(frozen=True)
class Begun:
    """An unfinished chain: its tokens, their policies (`Rollout.drawn_by`), and why it ended, or `open`."""

    ids: tuple[int, ...] = ()
    log_probability_T: tuple[float, ...] = ()
    drawn_by: tuple[tuple[int, int], ...] = ()
    reason: str = "open"

    @staticmethod
    def of_json(value: Mapping[str, Any]) -> Begun:
        spans = tuple((first, by) for first, by in value["drawn_by"])
        return Begun(tuple(value["ids"]), tuple(value["log_probability_T"]), spans, value["reason"])

    @property
    def drawn(self) -> Drawn:
        logprob_N = np.array(self.log_probability_T, np.float32)
        return Drawn(self.ids, logprob_N, float(logprob_N.sum()), self.reason)

    def rollout(self, policy: Sampler) -> Rollout:
        return dataclasses.replace(rollout_of(policy, self.drawn), drawn_by=self.drawn_by)


@dataclasses.dataclass(frozen=True)
class Carried:
    """The begun chains of one problem, for the update `update`."""

    problem: str
    update: int
    chains: tuple[Begun, ...]


def go_on(
    policy: Any, groups: Sequence[Carried], *, seed: int, by: int, costs: Sequence[float] = ()
) -> list[tuple[Begun, ...]]:
    """Continues the groups' open chains until all chains of the first group's update have ended.

    `groups` must not be empty, and in order of updates; `seed` is the run's; `costs`, the expected new tokens per
    group, balance the processes' parts.

    Returns all chains, by group and in order: ended ones unchanged, later updates' maybe still `open`. Every process
    must call it, as `sample`. Raises ValueError if `check_exact` refuses the policy.

    Next tokens are sampled by this policy (the one after update `by`), with the random numbers of `sample`. Earlier
    tokens keep the log-probabilities of the policies that sampled them.
    """
    policy, first = check_exact(policy), groups[0].update

    def draw(part: Sequence[Carried]) -> list[list[dict[str, Any]]]:
        places = [
            (g, i) for g, group in enumerate(part) for i, chain in enumerate(group.chains) if chain.reason == "open"
        ]
        prefixes = [(Prefix(group.problem), (seed, group.update)) for group in part]
        known = [(tuple(policy.prompt(prefix)), text_hash(prefix, stream)) for prefix, stream in prefixes]
        wanted = [Wanted(*known[g], i, part[g].chains[i].drawn) for g, i in places]
        needed = sum(part[g].update == first for g, _ in places)
        drawn = dict(zip(places, policy.go_on(wanted, needed), strict=True))
        return [
            [vars(_after(chain, drawn.get((g, i)), by)) for i, chain in enumerate(group.chains)]
            for g, group in enumerate(part)
        ]

    return [tuple(map(Begun.of_json, chains)) for chains in multihost.spread(draw, groups, costs)]


def _after(chain: Begun, drawn: Drawn | None, by: int) -> Begun:
    """Appends the new tokens to the chain."""
    if drawn is None or len(drawn.ids) == len(chain.ids):
        return chain
    spans = (
        chain.drawn_by if chain.drawn_by and chain.drawn_by[-1][1] == by else (*chain.drawn_by, (len(chain.ids), by))
    )
    return Begun(drawn.ids, tuple(drawn.logprob_N.tolist()), spans, drawn.finish_reason)


def behind_T(rollout: Rollout, update: int) -> Int[np.ndarray, " T"]:
    """Returns for every token by how many updates its policy was behind the one that learns from it.

    It is 0 for the policy after `update` - 1. It is empty, not (T,), without `rollout.drawn_by`.
    """
    first = [index for index, _ in rollout.drawn_by]
    by = np.array([by for _, by in rollout.drawn_by])
    return update - 1 - np.repeat(by, np.diff([*first, len(rollout.ids)]))


def sample_episodes(
    policy: Any, world: World, layout: TurnLayout, limits: EpisodeLimits, records: Sequence[Mapping[str, Any]],
    n: int, *, seed: int, update: int,
) -> list[list[Rollout]]:  # fmt: skip
    """Returns n episodes of each record, like `sample`, including episodes lost by the environment (`Rollout.lost`).

    `seed`, `update`, record and number determine the random numbers, as in `sample`. Errors of the environment do not
    raise. Every process must call it, and plays the episodes of some records; episodes are closed at the end. Raises
    ValueError if `check_exact` refuses the policy.
    """
    policy = check_exact(policy)

    def draw(part: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        with Conversations(policy, layout.stop) as talk:
            episodes = world.start([record for record in part for _ in range(n)])
            starts = [begun(talk, layout, episode, i % n) for i, episode in enumerate(episodes)]
            played = play(talk, layout, world, starts, limits, stream=(seed, update))
        world.close([trajectory.episode for trajectory in played])
        written = [rollout_of_episode(trajectory).json() for trajectory in played]
        return [written[i * n : (i + 1) * n] for i in range(len(part))]

    return [[Rollout.of_json(value) for value in samples] for samples in multihost.spread(draw, records)]


def rollout_of_episode(played: Played) -> Rollout:
    """Returns the sample of an episode; a step is a turn, and `Rollout.episode` is set."""
    edge_T = np.flatnonzero(np.diff(played.sampled_T.astype(np.int8), prepend=1, append=1))
    episode = played.episode
    episode_fields = {"messages": list(episode.messages), "turns": list(episode.turns), "reward": episode.reward}
    return Rollout(
        played.ids, played.log_probability_T, played.turn_stop, played.texts, played.ended, played.prompt,
        tuple((int(a), int(b)) for a, b in edge_T.reshape(-1, 2)), {**episode_fields, "error": episode.error},
    )  # fmt: skip


def rollout_of(policy: Sampler, drawn: Drawn) -> Rollout:
    """Returns the sample of a whole chain, with steps that end at the delimiter; `ended` only for the reason `stop`.

    Blank text after the last step belongs to it. A chain that is all blank has no steps.
    """
    ended = drawn.finish_reason == "stop"
    written = drawn.ids[: len(drawn.ids) - ended]
    bounds = [0, *policy.step_stops(written)[0]]
    if policy.tokenizer.decode(written[bounds[-1] :]).strip():
        bounds.append(len(written))
    spans = [written[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    steps = tuple(step_text(policy.tokenizer.decode(span)) for span in spans)
    stops = (*bounds[1:-1], len(drawn.ids)) if steps else ()
    return Rollout(drawn.ids, drawn.logprob_N, stops, steps, ended)


# ---- Groups as trees.

EXTRAS = ("old", "gain", "penalty", "count")
"""Per slot: the token's log-probability when sampled, the sums of the positive and of the negative advantages of the
samples through it, and the number of these samples."""

SPREAD = 1.0
"""Log-probabilities of one shared token differ between samples only by rounding; in bfloat16 by tenths."""


def group_tree(
    name: str,
    prompt_ids: Sequence[int],
    samples: Sequence[Rollout],
    advantage: Sequence[Float[np.ndarray, " T"]],
    weight: Sequence[Float[np.ndarray, " T"]] | None = None,
) -> TokenTree:
    """Returns the tree of a group, with a slot for every sampled token: see `jprm.token_tree.next_tokens`.

    A slot's weight is the sum of its samples' weights, by default their number, 0 for an environment's token. It is the
    factor of the KL term and metrics, and makes `next_token` on the tree the likelihood of the samples. Its extras are
    `EXTRAS`.

    Args:
        name: for error messages.
        advantage: for every token in every sample, norms folded in (`jprm.methods.rl.credit.token_advantages`).
        weight: for every token in every sample (`jprm.methods.rl.credit.token_weights`).

    Raises ValueError if the prompt, the group or a sample is empty, arrays have wrong lengths or values that are not
    finite, or the log-probabilities of a shared token show that samples come from different models.
    """
    lengths = [len(rollout.ids) for rollout in samples]
    weight = [rollout.sampled_T.astype(float) for rollout in samples] if weight is None else weight
    if not lengths or not min(lengths) or not len(prompt_ids):
        raise ValueError(f"{name!r}: a group must have a prompt and at least one sample, and samples must have tokens")
    for what, arrays in {"advantages": advantage, "weights": weight}.items():
        if [len(array) for array in arrays] != lengths:
            raise ValueError(f"{name!r}: {what} for {[len(x) for x in arrays]} tokens, the samples have {lengths}")
        if not all(np.isfinite(array).all() for array in arrays):
            raise ValueError(f"{name!r}: {what} are not all finite")
    shared = merged(name, prompt_ids, [rollout.ids for rollout in samples])
    tree = next_tokens(shared)
    slot_K = _slots(shared, tree)
    old_K = np.concatenate([np.asarray(rollout.log_probability_T, np.float64) for rollout in samples])
    advantage_K = np.concatenate(advantage).astype(np.float64)

    def total(value_K):
        return np.bincount(slot_K, value_K, len(tree.node_M))

    old_M = total(old_K) / total(np.ones(len(slot_K)))
    if (spread := np.abs(old_K - old_M[slot_K]).max()) > SPREAD:
        raise ValueError(
            f"{name!r}: log-probabilities of a shared token lie {spread:.2f} from their mean, so that these samples are"
            " of different models or temperatures. Make a group of each"
        )
    extras = {
        "old": old_M,
        "gain": total(np.maximum(advantage_K, 0.0)),
        "penalty": total(np.minimum(advantage_K, 0.0)),
        "count": total(np.concatenate([rollout.sampled_T for rollout in samples])),
    }
    return dataclasses.replace(
        tree,
        weight_M=total(np.concatenate(weight)).astype(np.float32),
        extras={key: extras[key].astype(np.float32) for key in EXTRAS},
    )


def _slots(shared: TokenTree, tree: TokenTree) -> Int[np.ndarray, " K"]:
    """Returns the slot for every token in every sample, one sample after the other."""
    slot_N = np.full(len(tree.tokens_N), -1)
    slot_N[tree.node_M] = np.arange(len(tree.node_M))
    paths = []
    for run in shared.run_M[np.argsort(shared.node_M)].tolist():
        path = []
        while run > 0:  # run 0 is the prompt
            path.append(run)
            run = int(shared.parent_R[run])
        path_R = np.array(path[::-1])
        paths.append(slot_N[ranges(shared.start_R[path_R], shared.length_R[path_R])])
    return np.concatenate(paths)


# ---- Preferences.

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """Continuations of a prefix. Equal samples are separate continuations, equal steps are one."""

    prefix: Ids
    right: list[Ids]
    wrong: list[Ids]


def of_chains(
    prompt: Sequence[int], samples: Sequence[Rollout], reward_G: Float[np.ndarray, " G"]
) -> list[Alternatives]:
    """Returns a list with one `Alternatives`: the samples after their prompt, right (reward 1) and wrong (less) ones.

    Either side may be empty.
    """
    pairs = list(zip((rollout.ids for rollout in samples), reward_G, strict=True))
    right, wrong = [ids for ids, reward in pairs if reward >= 1], [ids for ids, reward in pairs if reward < 1]
    return [Alternatives(tuple(prompt), right, wrong)]


def of_steps(
    prompt: Sequence[int], samples: Sequence[Rollout], reward_G: Float[np.ndarray, " G"]
) -> list[Alternatives]:
    """Returns the next steps after each prefix, shortest prefix first; a step is right if a chain with it has reward 1.

    A prefix is the prompt with the tokens before the step. A chain without steps counts as one step.
    """
    reached: dict[Ids, dict[Ids, bool]] = {}
    for rollout, reward in zip(samples, reward_G, strict=True):
        stops = rollout.step_stop or (len(rollout.ids),)
        for begin, stop in zip((0, *stops), stops, strict=False):
            steps = reached.setdefault(rollout.ids[:begin], {})
            step = rollout.ids[begin:stop]
            steps[step] = steps.get(step, False) or bool(reward >= 1)
    return [
        Alternatives(
            (*prompt, *prefix),
            [s for s, right in steps.items() if right],
            [s for s, right in steps.items() if not right],
        )
        for prefix, steps in sorted(reached.items(), key=lambda item: len(item[0]))
    ]


def preference_trees(name: str, pair: Alternatives, tokens: int) -> Iterator[TokenTree]:
    """Yields trees with at most `tokens` tokens in which every right continuation meets every wrong one once.

    There is no tree if a side is empty. `name` is for error messages. The label of a chain is 1 if it is right, else 0.
    If they do not all fit one tree, the longer side is halved. A pair that does not fit is a tree of its own, which the
    packer refuses.
    """
    if not pair.right or not pair.wrong:
        return
    tree = merged(name, pair.prefix, [*pair.right, *pair.wrong])
    if len(tree.tokens_N) <= tokens or len(pair.right) == len(pair.wrong) == 1:
        yield dataclasses.replace(tree, label_M=(tree.node_M < len(pair.right)).astype(np.float32))
        return
    side = max(("right", "wrong"), key=lambda side: (len(texts := getattr(pair, side)) > 1, sum(map(len, texts))))
    texts = getattr(pair, side)
    for half in (texts[: len(texts) // 2], texts[len(texts) // 2 :]):
        yield from preference_trees(name, dataclasses.replace(pair, **{side: half}), tokens)

"""Trajectories: what a policy sampled, as the tokens that it sampled.

Text is for graders and reward models alone. A text can have other tokens than the ones that made it, so training on
text that was tokenised again would ascribe to the policy what it never sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from jprm import multihost
from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import Drawn, Sampler
from jprm.methods.policy.step_ends import step_text


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One sample of a chain.

    Attributes:
      ids: the sampled tokens in order, with the end of text if it was sampled.
      log_probability_T: of each token, float32, at the sampling temperature.
      step_stop: for each step, the index in `ids` after its last token. The last step has all that follows the step
        before it, the end of text included.
      steps: the steps' texts, none of them blank.
      ended: whether the policy ended the chain; else a token limit cut it off.
    """

    ids: tuple[int, ...]
    log_probability_T: Float32[np.ndarray, " T"]
    step_stop: tuple[int, ...]
    steps: tuple[str, ...]
    ended: bool

    def __post_init__(self):
        stops = (0, *self.step_stop)
        sizes = len(self.ids), len(self.log_probability_T), len(self.steps), len(self.step_stop)
        if sizes[0] != sizes[1] or sizes[2] != sizes[3]:
            raise ValueError("{} ids have {} log-probabilities, {} steps {} ends: give one each".format(*sizes))
        if any(a >= b for a, b in zip(stops, stops[1:], strict=False)) or (self.steps and stops[-1] != len(self.ids)):
            raise ValueError(f"steps end at {self.step_stop} of {len(self.ids)} ids: ends rise to the number of ids")

    def json(self) -> dict[str, Any]:
        """Returns the fields as JSON holds them; float32 survives it."""
        return vars(self) | {"log_probability_T": self.log_probability_T.tolist()}

    @staticmethod
    def of_json(value: Mapping[str, Any]) -> Trajectory:
        """Inverts `json`."""
        lists = {name: tuple(value[name]) for name in ("ids", "step_stop", "steps")}
        return Trajectory(
            log_probability_T=np.array(value["log_probability_T"], np.float32), ended=value["ended"], **lists
        )


def check_exact(policy: Any) -> Sampler:
    """Returns the policy. Raises ValueError where it does not tell the probability of the tokens that it sampled."""
    if not isinstance(policy, Sampler):
        raise ValueError(
            f"{getattr(policy, 'name', policy)}: gives text alone. Reinforcement learning needs the sampled token ids"
            " with their log-probabilities: name a model that is sampled in this process"
        )
    if policy.options.top_p != 1:
        raise ValueError(f"top_p is {policy.options.top_p}: log-probabilities are of all tokens; set it to 1")
    if policy.options.temperature == 0:
        raise ValueError("temperature is 0: the policy would sample one chain alone; set it above 0")
    return policy


def sample(policy: Any, problems: Sequence[str], n: int, *, seed: int, update: int) -> list[list[Trajectory]]:
    """Returns n trajectories of each problem.

    A draw is numbered by seed, update, problem and sample alone: the same parameters give the same trajectories,
    whatever was sampled before. Each process samples a part of the problems, and returns the trajectories of all.

    Raises ValueError for a policy that `check_exact` refuses, and for a problem that occurs twice.
    """
    if len(set(problems)) < len(problems):
        raise ValueError("a problem occurs twice in an update: its samples would be the same")
    policy = check_exact(policy)

    def draw(some: Sequence[str]) -> list[list[dict[str, Any]]]:
        drawn = policy.draw([Prefix(problem) for problem in some], n, until="end", seed=0, stream=(seed, update))
        return [[trajectory(policy, each).json() for each in samples] for samples in drawn]

    return [[Trajectory.of_json(one) for one in samples] for samples in multihost.spread(draw, problems)]


def trajectory(policy: Sampler, drawn: Drawn) -> Trajectory:
    """Returns the trajectory of a whole chain: its tokens, cut into steps where the delimiter ends."""
    ended = drawn.finish_reason == "stop"
    written = drawn.ids[: len(drawn.ids) - ended]
    bounds = [0, *policy.step_stops(written)]
    if policy.tokenizer.decode(written[bounds[-1] :]).strip():
        bounds.append(len(written))
    spans = [written[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    steps = tuple(step_text(policy.tokenizer.decode(span)) for span in spans)
    stops = (*bounds[1:-1], len(drawn.ids)) if steps else ()
    return Trajectory(drawn.ids, drawn.logprob_N, stops, steps, ended)

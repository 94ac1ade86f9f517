# type: ignore  # its imports are in the trainer's environment
"""Turn rewards for google-tunix's agentic learners, by a PRM in the same process: a mixin for environments.

    class Env(ScoredTurns, MyEnv): ...
    GRPOLearner(..., env_class=Env, env_kwargs={"prm": jprm.load("runs/prm"), "max_steps": 8})

Every turn's reward is the environment's reward plus `weight` times the PRM's score of the turn. The learner sums turn
rewards over an episode, and compares the sums in the group. A blank turn has no score: its reward is the environment's.
"""

import threading

from jprm.tree import tree_of

_ONE_AT_A_TIME = threading.Lock()  # episodes run in threads


class ScoredTurns:
    def __init__(self, *args, prm, weight=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.prm, self.weight, self.messages, self.scores = prm, weight, [], []

    def reset(self):
        observation, info = super().reset()
        self.messages, self.scores = [user(observation)], []
        return observation, info

    def step(self, action):
        observation, reward, done, info = super().step(action)
        text = getattr(action, "action", action)
        self.messages.append({"role": "assistant", "content": str(text)})
        self.scores.append(self.scored())
        self.messages.append(user(observation))
        return observation, reward + self.weight * (self.scores[-1] or 0.0), done, info

    def scored(self):
        """Returns the PRM's score of the last turn, after the turns before it; None if it is blank."""
        if not self.messages[-1]["content"].strip():
            return None
        read = [message for message in self.messages if message["content"].strip()]
        tree = tree_of({"messages": read, "segment": "turn"})  # a single turn too is one, not the steps of a text
        with _ONE_AT_A_TIME:
            (score_N,) = self.prm.score_trees([tree])
        return float(score_N[-1])


def user(observation):
    """Returns the message that tunix's agents make of an observation."""
    if isinstance(observation, dict):
        observation = observation.get("prompts", observation.get("question", ""))
    return {"role": "user", "content": text_of(observation)}


def text_of(observation):
    """A batched task holds its prompt in a list or an array of one."""
    return observation if isinstance(observation, str) else str(observation[0]) if len(observation) else ""

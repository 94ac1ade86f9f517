"""Policies with values known by hand, for the tests of labels and search."""

import random

from jprm.methods.policy.protocol import Prefix, Sample


class Markov:
    """Chains of `length` steps, "good i" or "bad i", that end in "answer is 1" if the last step is good, else "is 0".

    After a good step the next is good with probability `keep`, after a bad one with probability `heal`; the problem
    counts as good. `calls` and `sampled` count what was asked for.
    """

    name = "markov"

    def __init__(self, length=6, keep=0.8, heal=0.25):
        self.length, self.keep, self.heal = length, keep, heal
        self.sampled, self.drawn = 0, []

    def value(self, good, left):
        """Probability of the right answer with `left` steps to go."""
        if not left:
            return float(good)
        p = self.keep if good else self.heal
        return p * self.value(True, left - 1) + (1 - p) * self.value(False, left - 1)

    def value_of(self, prefix: Prefix):
        good = not prefix.steps or prefix.steps[-1].startswith("good")
        return self.value(good, self.length - len(prefix.steps))

    def sample(self, prefixes, n, *, until, seed):
        return [[self.draw_one(prefix, until, seed + j) for j in range(n)] for prefix in prefixes]

    def draw_one(self, prefix, until, number):
        self.sampled += 1
        self.drawn.append((prefix, number))
        generator = random.Random(repr((prefix, number)))
        good = not prefix.steps or prefix.steps[-1].startswith("good")
        steps = []
        for i in range(len(prefix.steps), self.length):
            good = generator.random() < (self.keep if good else self.heal)
            steps.append(f"{'good' if good else 'bad'} {i}" + f". The answer is {int(good)}" * (i == self.length - 1))
            if until == "step":
                break
        done = len(prefix.steps) + len(steps) == self.length
        return Sample(tuple(steps), 10 * len(steps), "stop" if done else "step")

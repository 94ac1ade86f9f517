"""A toy task with steps, probabilities and scores known by hand, for the tests of search."""

import math

import numpy as np

from jprm.methods.policy.protocol import Sample


class Script:
    """A policy that reads its steps from a table: the draws of a prefix in order, over and over.

    `table[steps]` lists what follows a prefix: a text is a step that ended, a text with "." a step that ends the chain,
    one with "~" a step that was cut off, "" the end without a further step and "!" a failure. Every step costs
    `tokens`, or what `cost` says. `calls` are the (prefixes, n, until, seed) that were asked for.
    """

    name = "script"

    def __init__(self, table, tokens=10, cost=None):
        self.table, self.tokens, self.cost, self.calls = table, tokens, cost or {}, []

    def sample(self, prefixes, n, *, until, seed):
        self.calls.append(([prefix.steps for prefix in prefixes], n, until, seed))
        return [[self.draw_one(prefix.steps, until, seed + j) for j in range(n)] for prefix in prefixes]

    def draw_one(self, steps, until, number):
        new, reason = [], "step"
        while reason == "step":
            options = self.table[(*steps, *new)]
            text = options[number % len(options)]
            if text == "!":
                return Sample((), 0, "error", error="the server is down")
            reason = "length" if "~" in text else "stop" if "." in text or not text else "step"
            new += [text] if text else []
            if until == "step":
                break
        return Sample(tuple(new), sum(self.cost.get(text, self.tokens) for text in new), reason, -1.0)


class Table:
    """A live scorer that reads a step's score from a table by its text, and counts the steps that it computes.

    As a scorer with a cache would, it refuses to extend what was released.
    """

    def __init__(self, scores):
        self.scores, self.tokens, self.calls, self.seen, self.gone = scores, 0, 0, [], set()

    def open(self, problems):
        self.seen += problems
        return list(range(len(self.seen) - len(problems), len(self.seen)))

    def extend(self, parents, steps):
        assert len(parents) == len(steps) and len(steps)
        assert not self.gone & set(parents), "extends a released node"
        self.calls += 1
        self.tokens += len(steps)
        self.seen += steps
        handles = list(range(len(self.seen) - len(steps), len(self.seen)))
        return handles, np.array([self.scores.get(step, math.nan) for step in steps], np.float32)

    def release(self, handles):
        assert not self.gone & set(handles) and len(set(handles)) == len(handles), "released twice"
        self.gone |= set(handles)


def chain(tree, node):
    return " ".join(tree.steps(node))

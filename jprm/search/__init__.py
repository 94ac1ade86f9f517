"""Search: a policy writes steps, a reward model scores them, and a method decides where to go on and what to return.

`lockstep` advances many problems at once; `best_of_n`, `beam`, `mcts` and `refine` are the methods, each a generator
that asks for draws and is told their scores; `choose` picks the result; `conformal_filter` accepts it or abstains.
"""

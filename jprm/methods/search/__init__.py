"""Search: a policy writes steps, a reward model scores them, a method decides where to continue and what to return.

`methods` lists the methods (`best_of_n`, `beam`, `particles`, `mcts`, `refine`), each a generator over a
`growing_tree`. `lockstep` advances many problems at once, and `files` picks a chain, and accepts it or abstains.
"""

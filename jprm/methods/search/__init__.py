"""Search: a policy writes steps, a reward model scores them, a method decides where to continue and what to return.

Each method (`best_of_n`, `beam`, `particles`, `mcts`, `refine`) is a generator over a `growing_tree`. `lockstep`
advances many problems at once, `jobs` searches files, chooses a chain, and accepts it or abstains, and `pools` only
samples, without a scorer.
"""

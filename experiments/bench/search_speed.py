"""Beam search with a PRM of SmolLM2-135M in float32: live trees beside scoring whole chains again.

    python -m experiments.bench.search_speed [--data ../shared/data] [--beams 16] [--steps 10]

A round samples a next step for each of 16 beams, scores all, and keeps the best 4; 4 beams continue from each, as
in search-and-learn with n = 16 and a beam width of 4. The policy is free: its steps are texts of PRM800K's trees of
the same depth, all different. jprm computes a step against the keys and values of its path, which stay on the device.
The peer scores the whole text of every beam in every round, in batches of 4 (search-and-learn's default), with a
Hugging Face token classifier on the same token ids, padded to the longest of the batch.

The figures `ours` and `peer` are tokens computed for every new token, without padding; `cells` is with padding. A new
token is one of a sampled step or of the problem. `seconds` and `peer_seconds` are of the whole search, and
`speedup` is their ratio; compilation is left out.
"""

from __future__ import annotations

import collections
import json
import pathlib
import random
import time
from collections.abc import Sequence

from experiments.bench import yardsticks
from experiments.bench.score_speed import made_up_prm
from jprm.methods.data.readers import find
from jprm.methods.decoding.cache import SHORTEST_STEP, LiveTrees
from jprm.methods.policy.protocol import Prefix, Problem, Sample
from jprm.methods.search.beam import Beam
from jprm.methods.search.lockstep import SearchConfig, search
from jprm.rows import padded_size

WIDTH = 4  # of the beams that go on from one prefix; search-and-learn's default


class Texts:
    """A policy whose sample follows from prefix and number: a text of the prefix's depth, never the end of a chain."""

    name = "texts"

    def __init__(self, by_depth: list[list[str]]):
        self.by_depth = by_depth

    def sample(self, prefixes: Sequence[Prefix], n: int, *, until: str, seed: int) -> list[list[Sample]]:
        return [self._draws(prefix, range(seed, seed + n)) for prefix in prefixes]

    def _draws(self, prefix: Prefix, numbers: range) -> list[Sample]:
        texts = self.by_depth[len(prefix.steps)]
        order = random.Random(repr(prefix)).sample(texts, numbers.stop)  # without repetition
        return [Sample((order[number],), 1, "step") for number in numbers]


class Recorded(LiveTrees):
    """Live trees that record the token ids of every round's chains, and count cells."""

    def __init__(self, prm):
        self.ids: dict[int, list[int]] = {}
        self.rounds: list[list[list[int]]] = []
        self.new = self.cells = 0
        super().__init__(prm)

    def open(self, problems):
        handles = super().open(problems)
        self.ids |= {handle: self._prm.layout.problem(text) for handle, text in zip(handles, problems, strict=True)}
        self.new += sum(map(len, self.ids.values()))
        return handles

    def extend(self, parents, steps):
        handles, score_P = super().extend(parents, steps)
        for handle, parent, step in zip(handles, parents, steps, strict=True):
            tokens = self._prm.layout.step(step, 0)
            self.ids[handle] = self.ids[parent] + tokens
            self.new += len(tokens)
        self.rounds.append([self.ids[handle] for handle in handles])
        return handles, score_P

    def _compute(self, ids, slots, paths, ends, states):
        self.cells += self._slots.rows(len(ids)) * padded_size(max(map(len, ids)), SHORTEST_STEP)
        return super()._compute(ids, slots, paths, ends, states)


def texts(data: pathlib.Path) -> tuple[str, list[list[str]]]:
    """Returns a problem of PRM800K, and the texts at every depth of the trees of phase 1."""
    file = yardsticks.dataset(data, "prm800k/phase1_train.jsonl")
    options = {"human_written": "unlabelled", "control_questions": "keep"}
    by_depth, problem = collections.defaultdict(set), None
    for _, record in find("prm800k").read(file, **options):
        problem, depth = problem or record["problem"], []
        for node in record["nodes"]:
            depth.append(depth[node["parent"]] + 1 if node["parent"] >= 0 else 0)
            by_depth[depth[-1]].add(node["text"])
    return problem, [sorted(by_depth[depth]) for depth in range(len(by_depth))]


def run(prm, problem: str, policy: Texts, beams: int, steps: int) -> tuple[float, Recorded]:
    trees = Recorded(prm)
    config = SearchConfig(Beam(beams // WIDTH, WIDTH, max_steps=steps), "prod")
    start = time.perf_counter()
    for _ in search([Problem(problem)], policy, trees, config):
        pass
    return time.perf_counter() - start, trees


def main() -> None:
    args = yardsticks.parser(__doc__)
    args.add_argument("--beams", type=int, default=16, help=f"a multiple of {WIDTH} (default 16)")
    args.add_argument("--steps", type=int, default=10, help="rounds of the search (default 10)")
    args = args.parse_args()
    script = yardsticks.peer_script(args, "peer_train.py")  # which makes the model that our peer loads
    problem, by_depth = texts(args.data)
    policy, prm = Texts(by_depth), made_up_prm()
    ours = lambda: run(prm, problem, policy, args.beams, args.steps)  # noqa: E731
    _, trees = ours()  # compiles
    median = yardsticks.measure(args.rounds, ours=lambda: {"seconds": ours()[0]})["ours"]["seconds"]
    whole = [sum(map(len, chains)) for chains in trees.rounds]
    assert len(whole) == args.steps and {len(chains) for chains in trees.rounds} == {args.beams}
    peer = {"seconds": None, "cells": None}
    if script:
        request = json.dumps({"rounds": trees.rounds, "bench": str(script.parent)})
        peer = yardsticks.peer(pathlib.Path(__file__).with_name("peer_search.py"), stdin=request)
    yardsticks.report(
        "search_speed", trees.tokens / trees.new, sum(whole) / trees.new, unit="PRM tokens computed for a new token",
        new_tokens=trees.new, tokens=trees.tokens, cells=trees.cells, peer_tokens=sum(whole), peer_cells=peer["cells"],
        seconds=median, peer_seconds=peer["seconds"], speedup=peer["seconds"] and peer["seconds"] / median,
        beams=args.beams, width=WIDTH, steps=args.steps, rounds=args.rounds,
        growth=[{"step": n + 1, "chain_tokens": tokens} for n, tokens in enumerate(whole)],
    )  # fmt: skip


if __name__ == "__main__":
    main()

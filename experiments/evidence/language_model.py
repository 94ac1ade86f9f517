"""What does a language model add to evidence from text? Fixed in writing before any figure of it was computed.

    python -m experiments.evidence.language_model states --shared ../shared/data --out runs/language_model
    python -m experiments.evidence.language_model choice --shared ../shared/data --out runs/language_model
    python -m experiments.evidence.language_model steps --shared ../shared/data --out runs/language_model

Model: SmolLM2-135M-Instruct (Q4_1, dequantised), frozen; its residual stream after layer 15 of 30, which validation
problems of experiments/objectives/ chose before, at the end of each step. A chain's state is that at its last step.

Choice among samples (`choice`):

- Data: three pools of GSM8K test problems. Problems are ordered by a digest of their text; the first N with bucket
  below 1000 (of 1,319) train, the first N of the others test. N = 320, or, if 45 minutes of one core do not suffice, as
  many as they suffice for, in steps of 32: decided only by the clock.
- A policy is tested on by rankers of the two others. Ten seeds draw the training problems with replacement, and with
  them their split: seven tenths train, one tenth chooses the regularisation, two tenths calibrate. (Added when one of
  ten draws of 64 problems failed, before any figure was seen: a split with nothing to rank is drawn again.)
- Arms: `evidence`, all default sources (20 numbers); `evidence + state`, those and 576 numbers of the state; `state`
  alone; the first two without the source `pool` as well. All are the linear ranker of `jprm fuse fit`, trained by the
  pairwise loss within problems (`outcome_ranking`). Validation problems choose its
  regularisation, and then the scale of the state's block (SCALES), so that 576 numbers need not pay the price that 20
  can afford. Equal chains of a pool train once.
- Primary figure: vote less majority, the mean over the three policies, of `evidence + state` less `evidence`. A chain
  weighs its odds to the power 1, for both arms (the vote of the tool shrinks by distances, which more numbers change).
- Secondary: in-problem AUROC, and votes by the power 0.5.
- Interval: 95 %, over seeds and problems, both drawn (2,000 draws; a problem is drawn with all its policies).
- Reading: if the primary figure is below 1 point and its interval excludes 2, the state adds little here.

First errors (`steps`):

- Data: PRM800K phase 1, the first 96 training problems, ratings of steps (neutral as positive), to train on;
  ProcessBench, the first 256 chains of gsm8k and 128 of math, to test on.
- Arms: the numbers of `arithmetic`, `numbers` and `form` by step; the state at the step; both; and what
  `jprm eval processbench` shows beside each model, step length and position. All are logistic regressions of a step's
  label, the regularisation chosen on every fifth training problem. "Both" has the log odds of the state's regression
  as one more number, cross-fitted over five folds of the training problems: as `prm=DIR` would be a source.
- Figure: ProcessBench's F1 with the threshold 0.5, tuned on gsm8k, and cross-fitted, as `jprm eval processbench` has
  them.

Left out: Gemma 3 270M, which was not on the machine; fine-tuning; layers other than 15. Hardware: one CPU core.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from scipy.optimize import minimize

from experiments.objectives import data, heads
from jprm.io.jsonl import write_records
from jprm.io.outputs import write_json
from jprm.methods.data.overlap import normalise
from jprm.methods.data.readers import find
from jprm.methods.evaluate.processbench import f1_draws, processbench_report
from jprm.methods.evidence import sources as evidence
from jprm.methods.evidence.baselines import logistic, rows_of_steps
from jprm.methods.evidence.fit import read_policy
from jprm.methods.evidence.ranker import (
    STRENGTHS,
    Chains,
    Ranker,
    auroc_in_problems,
    calibrated,
    joined,
    pair_loss,
    pairs_of,
    vote_correct,
)
from jprm.methods.evidence.verifier import vote_weights
from jprm.statistics import difference
from jprm.tree import ReasoningTree, chains_of, with_scores

POLICIES = ("chatgpt", "llama13b", "llama7b")
BLOCK, BLOCKS = 32, 10
"""Problems whose states are computed at a time, and of how many blocks."""
SCALES = (0.01, 0.03, 0.1, 0.3, 1.0)
SEEDS, DRAWS = 10, 2000
POWERS = (1.0, 0.5)

# ---- The states, in an order in which every part grows evenly.


def number_of(problem: str) -> int:
    return int(hashlib.sha256(normalise(problem).encode()).hexdigest(), 16)


def distinct(record: dict) -> dict:
    """Returns a pool with each chain once: equal chains have equal states."""
    chains = {tuple(sample["steps"]): sample for sample in reversed(record["samples"])}
    return {**record, "samples": list(reversed(chains.values()))}


def write_data(shared: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the files whose states are computed, in the order in which they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for policy in POLICIES:
        pools = sorted(data.gsm8k_pools(shared, policy), key=lambda record: number_of(record["problem"]) // 1319)
        for part in ("test", "train"):
            if not (path := folder / f"{policy}_{part}.jsonl").is_file():
                tests = part == "test"
                write_records(path, (distinct(r) for r in pools if (number_of(r["problem"]) % 1319 >= 1000) == tests))
    rated = find("prm800k").read(
        shared / "prm800k/phase1_train.jsonl", human_written="unlabelled", control_questions="keep"
    )
    others = {
        "gsm8k": find("processbench").read(shared / "processbench/gsm8k.json"),
        "math": find("processbench").read(shared / "processbench/math.json"),
        "prm800k": rated,
    }
    for name, records in others.items():
        if not (path := folder / f"{name}.jsonl").is_file():
            mixed = sorted((record for _, record in records), key=lambda record: number_of(record["problem"]))
            write_records(path, itertools.islice(mixed, 256))  # ProcessBench has its chains with errors first


def work() -> Iterator[tuple[str, int]]:
    """Yields files and how many of their problems are to have states by then: every part grows evenly."""
    for block in range(1, BLOCKS + 1):
        yield from ((f"{policy}_{part}", block * BLOCK) for part in ("test", "train") for policy in POLICIES)
        if block <= 4:
            yield from (("math", block * BLOCK), ("gsm8k", block * 2 * BLOCK))
        if block <= 3:
            yield "prm800k", block * BLOCK


def states(shared: pathlib.Path, out: pathlib.Path) -> None:
    """Computes all states that are not there yet. A kill loses the chunk at work."""
    write_data(shared, out / "data")
    heads._load = functools.cache(heads._load)  # one copy of the model for all files
    for name, problems in work():
        known = heads.known(out / f"data/{name}.jsonl", out / f"states/{name}", problems)
        print(f"{name}: {len(known.trees)} problems, {len(known.state_ND)} states", flush=True)


def computed(out: pathlib.Path, name: str) -> heads.Known:
    """Returns the trees of a file whose states are there, and their states."""
    chunks = len(list((out / f"states/{name}/after_{heads.DEPTH}").glob("*.npz")))
    return heads.known(out / f"data/{name}.jsonl", out / f"states/{name}", chunks * BLOCK)


# ---- Choice among samples.


def chains_with_states(shared: pathlib.Path, out: pathlib.Path) -> tuple[dict[str, Chains], list[str], list[str]]:
    """Returns each policy's chains, with their states after the evidence, and the problems of training and of tests.

    The pools of every policy are numbered as the problems are: training first.
    """
    sources = [evidence.find(name) for name in evidence.DEFAULT]
    known = {(policy, part): computed(out, f"{policy}_{part}") for policy in POLICIES for part in ("train", "test")}
    parts = {}
    for part, choose in (("train", max), ("test", min)):  # a policy that lacks states of some trains on the others
        most = choose((known[policy, part].trees for policy in POLICIES), key=len)
        parts[part] = [tree.problem for tree in most]
    place = {problem: i for i, problem in enumerate(parts["train"] + parts["test"])}
    chains = {}
    for policy in POLICIES:
        states: dict[tuple, np.ndarray] = {}
        for part in ("train", "test"):
            trees, size_K, state_ND = known[policy, part]
            for tree, state in zip(trees, np.split(state_ND, np.cumsum(size_K)[:-1]), strict=True):
                states |= {_key(tree, chain): state[chain[-1]] for chain in chains_of(tree)}
        problems = {tree.problem for part in ("train", "test") for tree in known[policy, part].trees} & set(place)
        pools = read_policy(shared / f"pools/gsm8k_{policy}_n19.jsonl", sources, problems.__contains__)
        trees = [tree for tree in _pools(shared, policy) if tree.problem in problems]
        x_MD = np.array([states[_key(tree, chain)] for tree in trees for chain in chains_of(tree)], np.float64)
        number_M = np.array([place[problem] for problem in pools.problems])[pools.chains.problem_M]
        chains[policy] = pools.chains._replace(x_MF=np.concatenate([pools.chains.x_MF, x_MD], 1), problem_M=number_M)
    return chains, parts["train"], parts["test"]


def _key(tree: ReasoningTree, chain: list[int]) -> tuple:
    return tree.problem, *(tree.nodes[i].text for i in chain)


def _pools(shared: pathlib.Path, policy: str) -> list[ReasoningTree]:
    return [tree for record in data.gsm8k_pools(shared, policy) if (tree := data.tree_of(record)).nodes]


def drawn(chains: Chains, problems: np.ndarray) -> Chains:
    """Returns the chains of some problems, each as often as it is there, every time a pool of its own."""
    rows = [some_K for problem in problems if len(some_K := np.flatnonzero(chains.problem_M == problem))]
    index_M = np.concatenate(rows)
    number_M = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return Chains(*(x[index_M] for x in chains))._replace(problem_M=number_M)


def split_of(chains: dict[str, Chains], problems: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Returns the problems that train, validate and calibrate, drawn with replacement, each part with some to rank."""
    while True:
        bounds = (7 * problems // 10, 8 * problems // 10)
        split = [rng.choice(part, len(part)) for part in np.split(rng.permutation(problems), bounds)]
        try:
            for policy in POLICIES:
                for part in split:
                    pairs_of(joined([drawn(chains[other], part) for other in POLICIES if other != policy]))
        except ValueError:  # no problem with a correct and an incorrect chain: of few problems, some draw has none
            continue
        return split


def once(chains: Chains) -> Chains:
    """Returns every pool's chains once: equal ones have equal evidence and states."""
    with_pool_MF = np.column_stack([chains.problem_M, np.nan_to_num(chains.x_MF, nan=-9e9)])
    return Chains(*(x[np.sort(np.unique(with_pool_MF, axis=0, return_index=True)[1])] for x in chains))


def fitted(train: Chains, valid: Chains, calibrate: Chains, state_F: np.ndarray) -> Ranker:
    """Returns the calibrated ranker. Validation problems choose its regularisation, and the scale of the states."""
    blank = Ranker.standardising(train.x_MF)
    pairs, valid_pairs = pairs_of(train), pairs_of(valid)
    x_MF, valid_x_MF = blank.standard(train.x_MF), blank.standard(valid.x_MF)

    def best(settings: list[tuple[float, float]]) -> tuple[float, float, float, np.ndarray]:
        candidates = []
        for strength, scale in settings:
            scale_F = np.where(state_F, scale, 1.0)
            weight_F = minimize(
                pair_loss, np.zeros(len(scale_F)), (x_MF * scale_F, pairs, strength), method="L-BFGS-B", jac=True,
                options={"maxiter": 100},
            ).x * scale_F  # fmt: skip
            candidates.append((pair_loss(weight_F, valid_x_MF, valid_pairs)[0], strength, scale, weight_F))
        return min(candidates, key=lambda candidate: candidate[0])

    mixed = state_F.any() and not state_F.all()
    _, strength, _, weight_F = best([(strength, 0.0 if mixed else 1.0) for strength in STRENGTHS])
    if mixed:  # the strength was chosen with the evidence only
        *_, weight_F = best([(strength, scale) for scale in SCALES])
    return calibrated(Ranker(blank.mean_F, blank.scale_F, weight_F, strength=strength), calibrate)


def choice(shared: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Returns the figures of the choice among samples."""
    chains, train, test = chains_with_states(shared, out)
    names = evidence.names([evidence.find(name) for name in evidence.DEFAULT])
    width = chains[POLICIES[0]].x_MF.shape[1]
    state_F = np.arange(width) >= len(names)
    text_F = np.array([not name.startswith("pool.") for name in names] + [False] * (width - len(names)))
    arms = {
        "evidence": ~state_F, "evidence + state": np.ones(width, bool), "state": state_F,
        "text": text_F, "text + state": text_F | state_F,
    }  # fmt: skip
    tests = {
        policy: drawn(of_policy, np.arange(len(train), len(train) + len(test))) for policy, of_policy in chains.items()
    }
    gain = {(arm, power): np.zeros((SEEDS, len(POLICIES), len(test))) for arm in arms for power in POWERS}
    area = {arm: np.zeros((SEEDS, len(POLICIES))) for arm in arms}
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        split = split_of(chains, len(train), rng)
        for p, policy in enumerate(POLICIES):
            others = [chains[other] for other in POLICIES if other != policy]
            train_, valid, calibrate = (joined([drawn(other, part) for other in others]) for part in split)
            for arm, column_F in arms.items():
                only = [part._replace(x_MF=part.x_MF[:, column_F]) for part in (once(train_), once(valid), calibrate)]
                ranker = fitted(only[0], only[1], only[2], state_F[column_F])
                held = tests[policy]._replace(x_MF=tests[policy].x_MF[:, column_F])
                log_odds_M, one_M = ranker.log_odds(held.x_MF), np.ones(len(held.x_MF))
                for power in POWERS:
                    weight_M = vote_weights(log_odds_M, power * one_M, held)
                    gain[arm, power][seed, p] = vote_correct(held, weight_M) - vote_correct(held, one_M)
                area[arm][seed, p] = auroc_in_problems(log_odds_M, pairs_of(held))
        print(f"seed {seed} is done", flush=True)
    base = {
        policy: float(vote_correct(of_policy, np.ones(len(of_policy.x_MF))).mean())
        for policy, of_policy in tests.items()
    }
    results: dict[str, Any] = {"train": len(train), "test": len(test), "majority": base, "arms": {}, "differences": {}}
    for arm in arms:
        results["arms"][arm] = {
            "auroc_in_problems": {policy: area[arm][:, p].mean() for p, policy in enumerate(POLICIES)},
            **{
                f"vote_less_majority, power {power:g}": {
                    "mean": interval(100 * gain[arm, power].mean(1)),
                    **{policy: interval(100 * gain[arm, power][:, p]) for p, policy in enumerate(POLICIES)},
                }
                for power in POWERS
            },
        }
    for more, less in (("evidence + state", "evidence"), ("text + state", "text"), ("evidence", "state")):
        results["differences"][f"{more} less {less}"] = {
            "auroc_in_problems": [float(x) for x in (area[more] - area[less]).mean(1)],
            **{
                f"vote, power {power:g}": {
                    "mean": interval(100 * (gain[more, power] - gain[less, power]).mean(1)),
                    **{
                        policy: interval(100 * (gain[more, power] - gain[less, power])[:, p])
                        for p, policy in enumerate(POLICIES)
                    },
                }
                for power in POWERS
            },
        }
    return results


def interval(value_SP: np.ndarray) -> dict[str, Any]:
    """Returns the mean over seeds and problems, its 95 % interval with both drawn, and each seed's mean."""
    rng, (seeds, problems) = np.random.default_rng(0), value_SP.shape
    drawn_R = [
        value_SP[rng.integers(seeds, size=seeds)].mean(0)[rng.integers(problems, size=problems)].mean()
        for _ in range(DRAWS)
    ]
    low, high = np.percentile(drawn_R, [2.5, 97.5])
    return {
        "value": round(float(value_SP.mean()), 2), "low": round(float(low), 2), "high": round(float(high), 2),
        "seeds": [round(float(x), 2) for x in value_SP.mean(1)],
    }  # fmt: skip


# ---- First errors.


def steps(shared: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Returns the figures of first errors."""
    del shared
    known = {name: computed(out, name) for name in ("prm800k", "gsm8k", "math")}
    rows = {name: np.concatenate(rows_of_steps(data.trees)) for name, data in known.items()}
    states = {name: np.nan_to_num(data.state_ND.astype(np.float64)) for name, data in known.items()}
    trained = known["prm800k"]
    of_N = np.repeat(np.arange(len(trained.trees)), trained.size_K)
    label_N = np.array([np.nan if node.label is None else node.label for t in trained.trees for node in t.nodes])
    right_N, some_N, valid_N = (label_N >= 0).astype(float), ~np.isnan(label_N), of_N % 5 == 4

    def regression(x: dict[str, np.ndarray], train_N: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        fit_N, stop_N = train_N & some_N & ~valid_N, train_N & some_N & valid_N
        x_NF = x["prm800k"]
        return logistic(x_NF[fit_N], right_N[fit_N], x_NF[stop_N], right_N[stop_N])

    everything = np.ones(len(of_N), bool)
    by_state = regression(states, everything)
    odds = {name: _log_odds(by_state(states[name])) for name in ("gsm8k", "math")}
    odds["prm800k"] = np.zeros(len(of_N))
    for fold in range(5):  # five folds that are none of the validation's
        held_N = of_N // 5 % 5 == fold
        odds["prm800k"][held_N] = _log_odds(regression(states, ~held_N)(states["prm800k"][held_N]))
    both = {name: np.column_stack([rows[name], odds[name]]) for name in rows}
    scores = {
        "text": {name: regression(rows, everything)(rows[name]) for name in ("gsm8k", "math")},
        "state": {name: 1 / (1 + np.exp(-odds[name])) for name in ("gsm8k", "math")},
        "both": {name: regression(both, everything)(both[name]) for name in ("gsm8k", "math")},
    }
    results: dict[str, Any] = {
        "problems": len(trained.trees),
        "ratings": int(some_N.sum()),
        "arms": {},
        "differences": {},
    }
    draws = {}
    for arm, of_files in scores.items():
        scored = {
            name: [
                with_scores(tree, part.tolist())
                for tree, part in zip(
                    known[name].trees, np.split(score_N, np.cumsum(known[name].size_K)[:-1]), strict=True
                )
            ]
            for name, score_N in of_files.items()
        }
        results["arms"][arm] = processbench_report(scored, "gsm8k", 0)
        draws[arm] = f1_draws(scored, "gsm8k", 0)
    for kind, by_file in draws["both"].items():
        for name, joint in by_file.items():
            for less in ("text", "state"):
                results["differences"][f"both less {less}, {name}, {kind}"] = difference(
                    joint, draws[less][kind][name]
                ).json()
    return results


def _log_odds(p_N: np.ndarray) -> np.ndarray:
    p_N = np.clip(p_N, 1e-9, 1 - 1e-9)
    return np.log(p_N / (1 - p_N))


def main(
    what: Annotated[Literal["states", "choice", "steps"], tyro.conf.Positional],
    shared: pathlib.Path = pathlib.Path("../shared/data"), out: pathlib.Path = pathlib.Path("runs/language_model"),
) -> None:  # fmt: skip
    """Compute the states, or one of the two experiments on them.

    Args:
        what: What to do.
        shared: The folder of the data.
        out: The folder of states and results.
    """
    jax.config.update("jax_platforms", "cpu")
    if what == "states":
        states(shared, out)
        return
    results = {"choice": choice, "steps": steps}[what](shared, out)
    write_json(out / f"{what}.json", results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    tyro.cli(main)

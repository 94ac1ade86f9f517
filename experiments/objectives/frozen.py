"""Every objective on a frozen decoder: heads trained on states that are computed once, for all cells of the study.

    python experiments/objectives/frozen.py gsm8k_llama7b outcome_steps 0 --shared ../shared/data
    python experiments/objectives/table.py runs/objectives_frozen

The first cell of a data set computes its states (`states.py`); after that a cell takes half a minute. What is compared
is the objective: data, states, head and rates are the same for all. `implicit`, `dpo` and `outcome_tokens`, which need
every token, are for `run.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Array, Float

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import data
import measure
import recipes
import states

from jprm import objectives
from jprm.evaluate.drift import drift
from jprm.experiment import Experiment, ObjectiveConfig
from jprm.jsonl import parse, read_trees
from jprm.layout import Layout, native_layout
from jprm.model.heads import find
from jprm.outputs import write_json
from jprm.pack import pack, token_tree
from jprm.rows import Rows
from jprm.score.aggregate import DEFAULT_RULE
from jprm.score.scale import PROBABILITY
from jprm.tokenizer import load_tokenizer
from jprm.tree import ReasoningTree, with_scores

Positional = tyro.conf.Positional
TOKENS, SLOTS = 2**17, 512
"""A row of steps. Nothing attends here: only the slots cost anything."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """How heads are trained; chosen on validation pools of ChatGPT with `outcome_steps`."""

    hidden: int = 128
    epochs: int = 4
    rows: int = 4
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    dropout: float = 0.3


class Labelled(NamedTuple):
    """Rows of steps on the host, and the states at their slots, standardised: (R, S, F)."""

    rows: Rows
    x_RSF: Float[np.ndarray, "R S F"]


class Scaling(NamedTuple):
    """Of the training steps' states; what is far out is clipped."""

    mean_F: Float[np.ndarray, " F"]
    std_F: Float[np.ndarray, " F"]

    def __call__(self, state_NGD: np.ndarray) -> Float[np.ndarray, "N F"]:
        x_NF = (state_NGD.reshape(len(state_NGD), -1).astype(np.float32) - self.mean_F) / self.std_F
        return np.clip(np.nan_to_num(x_NF), -8, 8)


def scaling(state_NGD: np.ndarray) -> Scaling:
    x_NF = state_NGD.reshape(len(state_NGD), -1).astype(np.float32)
    return Scaling(np.nanmean(x_NF, 0), np.nanstd(x_NF, 0) + 1e-6)


def labelled(trees: Sequence[ReasoningTree], x_NF: np.ndarray, experiment: Experiment, layout: Layout) -> Labelled:
    """Returns an objective's rows of whole trees and their states; `x_NF` are those of all nodes, in order."""
    given = experiment.data
    of = [token_tree(tree, layout, given.supervise, given.extras, given.weight) for tree in trees]
    packed = pack(of, TOKENS, SLOTS, too_long="truncate", siblings=given.siblings)
    first_N = np.cumsum([0, *(len(tree.nodes) for tree in trees)])
    some_RS = packed.tree_BS >= 0
    x_RSF = np.zeros((*some_RS.shape, x_NF.shape[-1]), np.float32)
    x_RSF[some_RS] = x_NF[first_N[packed.tree_BS[some_RS]] + packed.node_BS[some_RS]]
    return Labelled(packed.rows, x_RSF)


def initial(key: Array, width: int, channels: int, fit: Fit) -> dict[str, Array]:
    """Returns the parameters of a head with one hidden layer; its logits start at 0."""
    hidden_FE = jax.random.normal(key, (width, fit.hidden)) * width**-0.5
    out = {"kernel": jnp.zeros((fit.hidden, channels)), "bias": jnp.zeros(channels)}
    return {"hidden_kernel": hidden_FE, "hidden_bias": jnp.zeros(fit.hidden), **out}


def logits(params: dict[str, Array], x: Float[Array, "*B F"], key: Array | None = None, dropout: float = 0.0):
    """Returns the logits (..., C); with a key, states and hidden units are dropped."""
    if key is not None:
        first, second = jax.random.split(key)
        x = x * jax.random.bernoulli(first, 1 - dropout, x.shape) / (1 - dropout)
    y = jax.nn.gelu(x @ params["hidden_kernel"] + params["hidden_bias"])
    if key is not None:
        y = y * jax.random.bernoulli(second, 1 - dropout, y.shape) / (1 - dropout)
    return y @ params["kernel"] + params["bias"]


def trained(experiment: Experiment, of: Labelled, fit: Fit) -> dict[str, Array]:
    """Returns a head trained by the experiment's objective; the seed is of its start and of the order of rows."""
    objective: Any = objectives.find(experiment.objective, experiment.objective_options)
    count = len(of.x_RSF)
    total = fit.epochs * -(-count // fit.rows)
    rate = optax.warmup_cosine_decay_schedule(0.0, fit.learning_rate, max(total // 20, 1), total)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=fit.weight_decay))
    key = jax.random.key(experiment.seed)
    params = initial(key, of.x_RSF.shape[-1], find(experiment.model.head).size(0), fit)
    state, rng = optimizer.init(params), np.random.default_rng(experiment.seed)
    update = jax.jit(functools.partial(_update, optimizer, objective, experiment.task, fit.dropout))
    for step, some in enumerate(itertools.chain.from_iterable(_orders(rng, count, fit))):
        rows = jax.tree.map(lambda x, some=some: x[some], of.rows)
        params, state = update(params, state, rows, of.x_RSF[some], jax.random.fold_in(key, step))
    return params


def _orders(rng: np.random.Generator, count: int, fit: Fit):
    """Yields every epoch's batches of rows; a last batch is filled up with rows of the epoch's beginning."""
    for _ in range(fit.epochs):
        order = rng.permutation(count)
        order = np.resize(order, -(-count // fit.rows) * fit.rows)
        yield order.reshape(-1, fit.rows)


def _update(optimizer, objective: Any, task: ObjectiveConfig, dropout: float, params, state, rows: Rows, x_BSF, key):
    def loss(params):
        total, weight, _ = objective.of_logits(logits(params, x_BSF, key, dropout), rows, task)
        return total / jnp.maximum(weight, 1)

    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def scored(
    params: dict[str, Array], experiment: Experiment, trees: Sequence[ReasoningTree], x_NF: np.ndarray
) -> list[ReasoningTree]:
    """Returns the trees with the head's scores."""
    readout = find(experiment.model.head).readout
    assert readout is not None  # heads of steps have one
    score_N = np.asarray(jax.jit(lambda x: readout.score(logits(params, x)))(x_NF))
    parts = np.split(score_N, np.cumsum([len(tree.nodes) for tree in trees])[:-1])
    return [with_scores(tree, part.tolist()) for tree, part in zip(trees, parts, strict=True)]


def known(path: pathlib.Path, folder: pathlib.Path, problems: int | None) -> tuple[list[ReasoningTree], np.ndarray]:
    """Returns a file's trees and the states of all their steps, which it computes where they are not there."""
    states.states(path, folder, problems)
    trees, found = list(itertools.islice(read_trees(path), problems)), states.read(folder)
    if len(found) != (count := sum(len(tree.nodes) for tree in trees)):
        raise ValueError(f"{folder}: has the states of {len(found)} steps, {path} has {count}: delete the folder")
    return trees, found


def cell(
    source: str, objective: str, seed: int, shared: pathlib.Path, out: pathlib.Path, fit: Fit, problems: int | None
) -> dict[str, Any]:  # fmt: skip
    """Trains and measures a head; returns what it wrote to `cell.json`."""
    folder = out / source / objective / str(seed)
    if (folder / "cell.json").is_file():
        return parse((folder / "cell.json").read_bytes(), str(folder / "cell.json"))
    files = data.SOURCES[source](shared, out / source / "data")
    experiment = recipes.experiment(source, objective, seed, files, shared)
    if experiment.model.head == "language" or experiment.data.supervise == "outcome_tokens":
        raise ValueError(f"{objective} needs the states of every token: use run.py")
    began = time.perf_counter()
    train = pathlib.Path(experiment.data.train[0])
    trees, state_NGD = known(train, out / "states" / f"{source}_{train.stem}", problems)
    scale, layout = scaling(state_NGD), native_layout(load_tokenizer(experiment.tokenizer))
    params = trained(experiment, labelled(trees, scale(state_NGD), experiment, layout), fit)
    rule, tests, before = DEFAULT_RULE[experiment.semantics], {}, None
    for name, path in {"valid": files.valid, **files.tests}.items():
        if name == "held_out_values":  # of heads with bounds
            continue
        test, state_NGD = known(path, out / "states" / (f"{source}_valid" if name == "valid" else name), None)
        test = scored(params, experiment, test, scale(state_NGD))
        before = before or test
        tests[name] = measure.numbers(path, test, PROBABILITY, rule)
        tests[name]["drift"] = drift(before, test, seed=0)["verdict"]  # from the validation problems
    found = {
        "source": source, "objective": objective, "seed": seed, "fit": dataclasses.asdict(fit), "rule": rule,
        "problems": len(trees), "seconds_of_last_call": round(time.perf_counter() - began, 1), "tests": tests,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "cell.json", found)
    print(f"{folder / 'cell.json'}: written")
    return found


def main(
    source: Annotated[str, Positional], objective: Annotated[str, Positional], seed: Annotated[int, Positional] = 0,
    shared: pathlib.Path = pathlib.Path("../shared/data"), out: pathlib.Path = pathlib.Path("runs/objectives_frozen"),
    problems: int | None = None,
) -> None:  # fmt: skip
    """Run one cell.

    Args:
        source: The data set: `prm800k`, or `gsm8k_` or `gsm8k_but_` and a policy.
        objective: A name of `recipes.OBJECTIVES` whose labels are of steps or chains.
        seed: Of the head's start and the order of the data.
        shared: The folder of the data.
        out: The folder of all cells and of the states.
        problems: Train on the first ones alone.
    """
    cell(source, objective, seed, shared, out, Fit(), problems)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    tyro.cli(main)

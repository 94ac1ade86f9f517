"""Checks of a part: it computes the same everywhere, or is refused.

    from jprm.testing import check_part

    check_part("mine.py", ["model.steps=look_back:LookBack"])

An experiment names its parts: layer kinds, head, step layer, attention, objective, optimizer. `check_part` gives the
model random float32 parameters, packs small trees of byte tokens, and prints a table. It raises AssertionError if two
ways to compute the same numbers differ. If jprm refuses a use of the part (e.g. to decode a kind without `cached`), the
table has the reason.

| check | what is equal |
|---|---|
| `packed` | loss, count, metrics and gradients: trees in one row, each tree alone, and other padding |
| `chains` | loss, count, metrics and gradients: trees, and one chain per row |
| `split` | loss, count, metrics and gradients: whole trees, and trees split over rows |
| `devices` | loss, count, metrics and gradients: one device, and four |
| `gradients` | every gradient is finite, and one is not 0 |
| `updates` | the optimizer's update: one device, and four |
| `resumed` | parameters, bit for bit: a run, and the same run continued from its checkpoint |
| `scored` | a head's outputs: trees, and chains alone |
| `live` | scores: trees, and trees that grow in a search (a policy: logits of tokens, and by cached keys) |
| `cached` | a head's outputs: trees, and from the prefix cache of a server |
| `exported` | a head's outputs: a run, and the folder that `jprm convert` writes of it |

Sizes are the experiment's own; change them with settings, e.g. `model.width=64`. On a CPU, start Python with
`JAX_NUM_CPU_DEVICES=4` to check four devices. The same as a command:

    python -m jprm.testing mine.py --set model.steps=look_back:LookBack
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import math
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax.traverse_util import flatten_dict
from tokenizers import decoders, models, pre_tokenizers

from jprm import objectives
from jprm.checkpoints import base
from jprm.experiment import Experiment, ObjectiveConfig, load, override
from jprm.loading import load as load_model
from jprm.methods.decoding import decode
from jprm.methods.decoding.cache import LiveTrees, PrefixCache
from jprm.methods.export.export import export
from jprm.methods.implicit import LogRatio
from jprm.model import transformer
from jprm.model.attention import chain_rows
from jprm.model.config import ModelConfig
from jprm.model.heads import find
from jprm.model.mesh import MeshConfig, check_mesh, make_mesh, put_rows
from jprm.objectives import Objective, summed
from jprm.pack import Packed, pack
from jprm.rows import Rows, empty_rows, padded_size
from jprm.score.scale import LOG_ODDS
from jprm.score.scorer import PRM, longest_chain
from jprm.token_tree import TokenTree, token_tree
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.train import Trainer
from jprm.train.batches import check_supervision
from jprm.train.state import make_optimizer
from jprm.tree import Node, ReasoningTree, chain_tree, chains_of, read_records, tree_of

SUMS, SCORES = 1e-3, 1e-4
"""Tolerances, relative to the largest value of an array: sums and gradients of float32 in another order; scores."""

ROWS = 4
"""Rows computed at once; four devices divide them."""

OF_A_BATCH = ("expert_balance", "experts")
"""Metrics of all tokens in a batch, not of labels: they depend on how trees are packed."""


def check_part(
    experiment: Experiment | str | os.PathLike, settings: Sequence[str] = (), *, trees: Sequence[ReasoningTree] = (),
    tokenise: Callable[[ReasoningTree], TokenTree] | None = None, only: Iterable[str] = (),
) -> PartReport:  # fmt: skip
    """Prints and returns the differences between ways of computing the same numbers with an experiment's parts.

    Args:
      experiment: an `Experiment`, or a file with a function `experiment()`. Its data, base and mesh are not used.
      settings: changes, as after `jprm train --set`, e.g. `["model.mixers=['shift:SHIFT']", "model.width=64"]`.
      trees: labelled trees that branch. Default: random ones, with numbers for `data.extras`.
      tokenise: replaces `jprm.token_tree.token_tree`, e.g. for samples of reinforcement learning.
      only: names in `CHECKS`. Default: all. Those on 4 devices (JAX_NUM_CPU_DEVICES=4) are else not applicable.

    It compiles many small programs, and writes only to a temporary folder. Raises AssertionError, with the table, if a
    check fails or differs beyond its tolerance, and errors as `examine`.
    """
    report = examine(experiment, settings, trees=trees, tokenise=tokenise, only=only)
    print(report)
    report.check()
    return report


def examine(
    experiment: Experiment | str | os.PathLike, settings: Sequence[str] = (), *, trees: Sequence[ReasoningTree] = (),
    tokenise: Callable[[ReasoningTree], TokenTree] | None = None, only: Iterable[str] = (),
) -> PartReport:  # fmt: skip
    """Returns the report of `check_part`, a row for each of `only` in order; a check's own errors are in its row.

    Raises ValueError for an unknown check or setting, or parts that do not fit together; errors of the file as
    `jprm.experiment.load`.
    """
    if not isinstance(experiment, Experiment):
        experiment = load(experiment)
    names = tuple(only) or tuple(CHECKS)
    if unknown := [name for name in names if name not in CHECKS]:
        raise ValueError(f"only={unknown[0]!r} is no check; they are {', '.join(CHECKS)}")
    with tempfile.TemporaryDirectory() as folder, jax.default_matmul_precision("highest"):
        part = CheckedPart(override(experiment, settings), pathlib.Path(folder), trees, tokenise)
        return PartReport(described(part.experiment), tuple(part.row(name) for name in names))


# --------------------------------------------------------------------------------------------------------- the report


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """A check's result: ok, differs, fails (raised an error), refused (by jprm, for the part) or not applicable."""

    check: str
    status: Literal["ok", "differs", "fails", "refused", "not applicable"]
    difference: float | None = None  # as `difference`; None unless ok or differs, and so is `tolerance`
    tolerance: float | None = None
    note: str = ""  # the reason, or the first line of the error
    error: Exception | None = None

    @property
    def wrong(self) -> bool:
        return self.status in ("differs", "fails")


@dataclasses.dataclass(frozen=True)
class PartReport:
    """The checks of one part. `str` gives a Markdown table."""

    part: str
    rows: tuple[CheckResult, ...]

    def __getitem__(self, check: str) -> CheckResult:
        return next(row for row in self.rows if row.check == check)

    def __str__(self) -> str:
        lines = [f"{self.part}\n", "| check | difference | tolerance | result |", "|---|---|---|---|"]
        for row in self.rows:
            number = lambda x: "" if x is None else f"{x:.1e}"  # noqa: E731
            result = f"{row.status}: {row.note}" if row.note else row.status
            lines.append(f"| {row.check} | {number(row.difference)} | {number(row.tolerance)} | {result} |")
        return "\n".join(lines)

    def check(self) -> None:
        """Raises AssertionError, with the table, if a check differs or fails."""
        if wrong := [row for row in self.rows if row.wrong]:
            names = ", ".join(f"{row.check} {row.status}" for row in wrong)
            raise AssertionError(f"{names}\n{self}") from next((row.error for row in wrong if row.error), None)


def described(experiment: Experiment) -> str:
    """Returns the parts of an experiment in one line."""
    model, optimizer = experiment.model, experiment.optimizer
    parts = {
        "mixers": ", ".join(model.mixers), "mlps": ", ".join(model.mlps), "head": model.head, "steps": model.steps,
        "attention": model.attention, "objective": experiment.objective, "optimizer": optimizer.name,
    }  # fmt: skip
    return "; ".join(f"{field} {name}" for field, name in parts.items() if name)


class NotApplicable(Exception):
    """The check does not apply to the part."""


class Refused(Exception):
    """jprm refuses this use of the part."""


def asked(function: Callable, *arguments: Any) -> Any:
    """Returns function(*arguments), which must not run the part's code. Raises Refused for its ValueError or
    NotImplementedError."""
    try:
        return function(*arguments)
    except (NotImplementedError, ValueError) as error:
        raise Refused(str(error)) from error


def difference(actual: Any, expected: Any) -> float:
    """Returns the largest difference of two equal pytrees of arrays, each relative to its largest expected value.

    An array counts as if its largest value were at least a hundredth of the largest in the tree: a value that is 0
    but for rounding has no digits. Infinity if one is not finite. Raises ValueError for shapes that do not broadcast.
    """
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    ]
    if not all(np.isfinite(x).all() for pair in pairs for x in pair):
        return math.inf
    sizes = [float(np.abs(b).max(initial=0)) for _, b in pairs]
    least = max(max(sizes) / 100, 1e-30)
    return max(float(np.abs(a - b).max(initial=0)) / max(top, least) for (a, b), top in zip(pairs, sizes, strict=True))


# ----------------------------------------------------------------------------------------------- the part and its data


class CheckedPart:
    """An experiment's parts with random parameters and small trees. Values for several checks are computed once.

    A tokenizer and a run are written to `folder`, which must exist. A property raises NotApplicable if there is none.
    """

    def __init__(self, experiment: Experiment, folder: pathlib.Path, trees, tokenise):
        byte_tokenizer(folder)
        data = dataclasses.replace(
            experiment.data, train=("none",), valid=(), mixture=(), cache="", streams=1,
            rows=(rows := math.lcm(ROWS, jax.device_count())), micro_rows=rows,
        )  # fmt: skip
        self.experiment = experiment = dataclasses.replace(
            experiment, model=dataclasses.replace(experiment.model, dtype="float32"), tokenizer=str(folder), data=data,
            base="", base_dtype="float32", new_parameters="", probe_rows=0, mesh=MeshConfig(), steps=4, trackers=(),
            reference=str(folder / "reference") if experiment.reference else "", reference_dtype="float32",
        )  # fmt: skip
        check_supervision(experiment)
        self.folder, self.model, self.task = folder, experiment.model, experiment.task
        self.objective = objectives.find(experiment.objective, experiment.objective_options)
        objectives.check(self.objective, self.task)
        self.layout = native_layout(load_tokenizer(str(folder), self.model.vocab_size))
        self.trees = list(trees) or random_trees(experiment)
        native = functools.partial(
            token_tree, layout=self.layout, supervise=data.supervise, extras=data.extras, weight=data.weight
        )
        self.token_trees = list(map(tokenise or native, self.trees))
        sizes = [len(tree.tokens_N) for tree in self.token_trees]
        self.tokens = padded_size(min(sum(sizes), 2 * max(sizes)), 64)  # two trees share a row
        self.longest = max(map(longest_chain, self.token_trees))

    def row(self, name: str) -> CheckResult:
        """Runs the check of this name in `CHECKS`; its error becomes the result's."""
        tolerance, check = CHECKS[name]
        try:
            value = check(self)
        except NotApplicable as reason:
            return CheckResult(name, "not applicable", note=str(reason))
        except Refused as reason:
            return CheckResult(name, "refused", note=str(reason))
        except Exception as error:
            note = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            return CheckResult(name, "fails", note=note, error=error)
        return CheckResult(name, "ok" if value <= tolerance else "differs", value, tolerance)

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return make_mesh(MeshConfig(), jax.devices()[:1])

    @functools.cached_property
    def mesh_of_four(self) -> jax.sharding.Mesh:
        if (count := jax.device_count()) < 4:
            raise NotApplicable(f"the process has {count} devices; on a CPU set JAX_NUM_CPU_DEVICES=4")
        for sizes in (MeshConfig(fsdp=2, tensor=2), MeshConfig(fsdp=4)):
            mesh = make_mesh(sizes, jax.devices()[:4])
            try:
                check_mesh(self.model, mesh, ROWS, self.tokens)
                return mesh
            except ValueError as error:
                reason = str(error)
        raise NotApplicable(reason)

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """The objective's argument: host arrays of the model and, if there is one, of the reference."""
        names = ("model", "reference") if self.experiment.reference else ("model",)
        return {name: random_parameters(self.model, seed) for seed, name in enumerate(names)}

    def placed(self, mesh: jax.sharding.Mesh) -> dict[str, Any]:
        places = places_of(self.model, mesh)
        return {name: put(params, places) for name, params in self.parameters.items()}

    @functools.cached_property
    def placed_on_one(self) -> dict[str, Any]:
        return self.placed(self.mesh)

    # ---- sums and gradients of the objective

    def packed(self, trees: Sequence[TokenTree] = (), tokens: int = 0, chains: bool = False) -> Packed:
        size, chains = tokens or self.tokens, chains or chain_rows(self.model)
        siblings = self.experiment.data.siblings
        return pack(trees or self.token_trees, size, size, too_long="error", chains=chains, siblings=siblings)

    def batches(self, rows: Rows, count: int = ROWS) -> list[Rows]:
        """Returns batches with `count` rows each, padded to one shape so that one program computes all."""
        B, T = len(rows.tokens), self.tokens
        wide = empty_rows(-(-B // count) * count, T, T, tuple(rows.extras))
        for target, x in zip(jax.tree.leaves(wide), jax.tree.leaves(rows), strict=True):
            target[:B, : x.shape[1]] = x
        return [jax.tree.map(lambda x, b=b: x[b : b + count], wide) for b in range(0, len(wide.tokens), count)]

    def sums(self, rows: Rows, mesh: jax.sharding.Mesh | None = None) -> tuple[dict[str, Any], Any]:
        """Returns (sums, the loss's gradient, nested as the parameters), in float64 host arrays.

        Sums are one flat dict: `loss`, `count` and each metric by its name, a `ScoreSums` if the metric is `Judged`.
        `mesh` is by default of one device.
        """
        params, mesh = self.placed_on_one if mesh is None else self.placed(mesh), mesh or self.mesh
        with jax.set_mesh(mesh):
            totals = [sums_of(self.objective, self.task, params, put_rows(rows, mesh)) for rows in self.batches(rows)]
        return jax.tree.map(lambda *xs: sum(np.asarray(x, np.float64) for x in xs), *totals)

    @functools.cached_property
    def whole(self) -> tuple[dict[str, Any], Any]:
        return self.sums(self.packed().rows)

    def apart(self, sums: tuple[dict[str, Any], Any]) -> float:
        """Returns the largest `difference` of `self.sums(...)` from that of whole trees, without `OF_A_BATCH`."""
        (values, gradient), (expected, expected_gradient) = sums, self.whole
        named = [{name: x for name, x in metrics.items() if name not in OF_A_BATCH} for metrics in (values, expected)]
        alone = [difference(x, y) for x, y in zip(*map(dict.values, named), strict=True)]
        return max(*alone, difference(gradient, expected_gradient))

    # ---- scores

    @functools.cached_property
    def prm(self) -> PRM:
        params, ratio, fields = self.placed_on_one, objectives.log_ratio(self.objective), {}
        if ratio is not None:
            fields = {"ratio": LogRatio(params["reference"], self.model, ratio), "scale": LOG_ODDS}
        elif find(self.model.head).readout is None:
            raise NotApplicable("a policy scores no steps")
        return PRM(params["model"], self.model, self.layout, self.mesh, self.experiment.semantics, "part", 1, **fields)

    @functools.cached_property
    def outputs(self) -> list[dict[str, np.ndarray]]:
        return self.prm.outputs_of(self.trees)

    # ---- a run

    @functools.cached_property
    def run(self) -> tuple[pathlib.Path, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Trains two steps, with a checkpoint between, in `folder`/run, then the second again from the checkpoint.

        The run's folder, its flat parameters, and those after the continuation.
        """
        if self.experiment.reference:
            plain = dataclasses.replace(self.experiment, reference="", objective="jprm.testing:level",
                                        objective_options={})  # fmt: skip
            with Trainer(plain, self.experiment.reference, position=Nowhere()) as trainer:
                trainer.save()
        (rows, *_), folder = self.batches(self.packed().rows, self.experiment.data.rows), self.folder / "run"
        with Trainer(self.experiment, folder, position=Nowhere()) as trainer:
            varied = varied_parameters(trainer.state.trained, self.model, 0)
            trained = put(varied, jax.tree.map(lambda x: x.sharding, trainer.state.trained))
            trainer.state = dataclasses.replace(trainer.state, trained=trained)
            trainer.step(rows)
            trainer.save()
            trainer.step(rows)
            undisturbed = jax.tree.map(np.asarray, trainer.state.params)
        quiet = contextlib.redirect_stdout(io.StringIO())  # of the line that it continues
        with quiet, Trainer(self.experiment, folder, position=Nowhere()) as trainer:
            trainer.step(rows)
            return folder, undisturbed, jax.tree.map(np.asarray, trainer.state.params)


class Nowhere:
    """A position in no data: the rows of a check are given."""

    def get_state(self) -> Any:
        return {}

    def set_state(self, state: Any) -> None:
        pass


def level(params: dict[str, Any], rows: Rows, config: ObjectiveConfig):
    """An objective (loss sum, weight sum, {}) for any head, the sum of first logits; its run is a check's reference."""
    logit_BSC = transformer.step_logits(params["model"], config.model, rows)
    return jnp.sum(rows.weight * logit_BSC[..., 0]), jnp.sum(rows.weight), {}


@functools.partial(jax.jit, static_argnums=(0, 1))
def sums_of(objective: Objective, task: ObjectiveConfig, params: dict[str, Any], rows: Rows):
    def loss(model: Any):
        total, count, metrics = objective({**params, "model": model}, rows, task)
        return total, {"count": count, **summed(metrics)}

    (total, sums), gradient = jax.value_and_grad(loss, has_aux=True)(params["model"])
    return {"loss": total, **sums}, gradient


def places_of(model: ModelConfig, mesh: jax.sharding.Mesh) -> Any:
    """Returns the sharding of each parameter on the mesh, in the parameters' nested form."""
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
    return jax.tree.map(lambda x: jax.NamedSharding(mesh, x.sharding.spec), shapes)


def put(arrays: Any, places: Any) -> Any:
    return jax.tree.map(jax.device_put, arrays, places)


def random_parameters(model: ModelConfig, seed: int) -> dict[str, Any]:
    """Returns initial parameters as nested float32 host arrays, changed by `varied_parameters`."""
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        params = jax.jit(transformer.init, static_argnums=0)(model, jax.random.key(seed))
    return varied_parameters(params, model, seed)


def varied_parameters(params: Mapping[str, Any], model: ModelConfig, seed: int) -> Any:
    """Returns float32 host arrays: parameters times 0.5 to 1.5, and random instead of 0, so that each one matters."""
    rng = np.random.default_rng(seed)

    def varied(x: Any) -> np.ndarray:
        x = np.asarray(x) * rng.uniform(0.5, 1.5, x.shape)
        return np.where(x == 0, rng.normal(size=x.shape) * model.width**-0.5, x).astype(np.float32)

    return jax.tree.map(varied, params)


def random_trees(experiment: Experiment, count: int = 3, nodes: int = 6) -> list[ReasoningTree]:
    """Returns `count` trees of `nodes` nodes, with labels, outcomes and (most nodes) extras for the experiment.

    They branch anywhere, and are the same at every call.
    """
    rng, target = np.random.default_rng(0), experiment.target
    labels = {"rating": (-1.0, 0.0, 1.0), "correctness": (0.0, 1.0)}.get(target.labels, (0.0, 0.25, 0.75, 1.0))
    extras = {*experiment.data.extras, *filter(None, [experiment.data.weight])}

    def word() -> str:
        return "".join(rng.choice(list("abc"), int(rng.integers(2, 5))))

    def tree() -> ReasoningTree:
        parents = [-1, -1, *(int(rng.integers(-1, i)) for i in range(2, nodes))]
        ends = [i for i in range(nodes) if i not in parents]
        drawn = [
            Node(parent, word(), float(rng.choice(labels)), correct=bool(ends.index(i) % 2) if i in ends else None,
                 extra={name: float(rng.integers(2)) for name in extras if rng.random() < 0.8})
            for i, parent in enumerate(parents)
        ]  # fmt: skip
        return ReasoningTree(word(), tuple(drawn), semantics=target.labels)

    return [tree() for _ in range(count)]


def byte_tokenizer(folder: pathlib.Path) -> None:
    """Writes tokenizer.json and its config, one token per byte, to an existing folder. Byte 0 ends a text; ids are not
    byte values."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "Ā"}', encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- the checks


def _packed(part: CheckedPart) -> float:
    rows = part.packed().rows
    alone = [part.sums(part.packed([tree]).rows) for tree in part.token_trees]
    index_T = np.arange(rows.tokens.shape[1])
    padding = (rows.until == index_T + 1) & (rows.position == 0)
    label = np.where(rows.tree < 0, 0.0, rows.label).astype(np.float32)
    other = dataclasses.replace(rows, label=label, tokens=np.where(padding, 7, rows.tokens))
    return max(part.apart(jax.tree.map(lambda *xs: sum(xs), *alone)), part.apart(part.sums(other)))


def _chains(part: CheckedPart) -> float:
    return part.apart(part.sums(_comparable(part, part.packed(tokens=part.longest, chains=True))))


def _split(part: CheckedPart) -> float:
    if all(len(tree.tokens_N) <= part.longest for tree in part.token_trees):
        raise NotApplicable("no tree is longer than the longest chain")
    return part.apart(part.sums(_comparable(part, part.packed(tokens=part.longest))))


def _comparable(part: CheckedPart, packed: Packed) -> Rows:
    pairs, report = getattr(part.objective, "pairs", False), packed.report
    if pairs and (report.problem_pairs_lost if pairs == "problem" else report.pairs_lost):
        raise NotApplicable("the objective has `pairs`, and training counts those that rows separate (pairs_lost)")
    return packed.rows


def _devices(part: CheckedPart) -> float:
    (values, gradient), mesh = part.whole, part.mesh_of_four
    actual, actual_gradient = part.sums(part.packed().rows, mesh)
    return max(*map(difference, actual.values(), values.values()), difference(actual_gradient, gradient))


def _gradients(part: CheckedPart) -> float:
    values, gradient = part.whole
    named: dict[str, Any] = {"loss": values["loss"], **flatten_dict(gradient, sep="/")}
    if bad := [name for name, x in named.items() if not np.isfinite(x).all()]:
        raise FloatingPointError(f"not finite: {', '.join(bad)}")
    if not values["count"] or not any(np.any(x) for x in jax.tree.leaves(gradient)):
        raise ValueError("no label is counted, or every gradient is 0")
    return 0.0


def _updates(part: CheckedPart) -> float:
    config = part.experiment.optimizer
    if config.name == "adamw":
        raise NotApplicable("AdamW works element by element")
    transformation, gradient = make_optimizer(config), jax.tree.map(np.float32, part.whole[1])

    def two_updates(mesh: jax.sharding.Mesh) -> Any:
        places, host = places_of(part.model, mesh), (part.parameters["model"], gradient)
        params, grads = (flatten_dict(put(arrays, places), sep="/") for arrays in host)
        with jax.set_mesh(mesh):
            step = jax.jit(lambda g, s, p: transformation.update(g, s, p, loss=jnp.float32(1), rate=jnp.float32(1)))
            state = jax.jit(transformation.init)(params)
            for _ in range(2):
                new, state = step(grads, state, params)
        return jax.tree.map(np.asarray, new)

    return difference(two_updates(part.mesh_of_four), two_updates(part.mesh))


def _resumed(part: CheckedPart) -> float:
    _, undisturbed, continued = part.run
    return difference(continued, undisturbed)


def _scored(part: CheckedPart) -> float:
    worst = 0.0
    for tree, outputs in zip(part.trees, part.outputs, strict=True):
        for chain in chains_of(tree):
            steps = chain_tree(tree.problem, [tree.nodes[i].text for i in chain])
            (alone,) = part.prm.outputs_of([steps])
            worst = max(worst, *(difference(alone[name], x_N[chain]) for name, x_N in outputs.items()))
    return worst


def _live(part: CheckedPart) -> float:
    if find(part.model.head).readout is None and objectives.log_ratio(part.objective) is None:
        return _decoded_difference(part)
    grown, worst = asked(LiveTrees, part.prm), 0.0
    for tree, outputs in zip(part.trees, part.outputs, strict=True):
        handles = {-1: grown.open([tree.problem])[0]}
        score_N = np.zeros(len(tree.nodes))
        for i, node in enumerate(tree.nodes):
            (handles[i],), (score_N[i],) = grown.extend([handles[node.parent]], [node.text])
        worst = max(worst, difference(score_N, outputs["score"]))
    return worst


def _decoded_difference(part: CheckedPart) -> float:
    """Returns the difference of a policy's logits: half of a chain's tokens by the cached keys of the other half."""
    asked(decode.check, part.model)
    with jax.set_mesh(part.mesh):
        ids_1T = put_rows(np.array([_chain_ids(part)], np.int32), part.mesh)
        half, params = ids_1T.shape[1] // 2, part.placed_on_one["model"]
        first, rest = _decoded(params, part.model, ids_1T, half)
        logit_TC = _policy_logits(part, params, part.model, part.mesh)
    return difference(np.concatenate([first[0], rest[0]]), logit_TC)


@functools.partial(jax.jit, static_argnums=(1, 3))
def _decoded(params: Any, config: ModelConfig, ids_BT: jax.Array, half: int) -> tuple[jax.Array, jax.Array]:
    """Returns logits after every token, of the first `half` and of the rest."""
    position_BT = jnp.zeros_like(ids_BT) + jnp.arange(ids_BT.shape[1])
    first_BTD, cache = decode.forward(params, config, ids_BT[:, :half], position_BT[:, :half])
    past = decode.Past(cache, jnp.ones_like(ids_BT[:, :half], bool), state_R=jnp.zeros_like(ids_BT[:, 0]))
    rest_BTD, _ = decode.forward(params, config, ids_BT[:, half:], position_BT[:, half:], past)
    return transformer.head_logits(params, config, first_BTD), transformer.head_logits(params, config, rest_BTD)


def _chain_ids(part: CheckedPart) -> list[int]:
    tree = max(part.trees, key=lambda tree: len(tree.nodes))
    chain = max(chains_of(tree), key=len)
    steps = (part.layout.step(tree.nodes[i].text, depth) for depth, i in enumerate(chain))
    return [*part.layout.problem(tree.problem), *(id for ids in steps for id in ids)]


def _policy_logits(part: CheckedPart, params: Any, config: ModelConfig, mesh: jax.sharding.Mesh) -> np.ndarray:
    """Returns the logits after every token of a chain, (T, C), as in training."""
    T = len(ids := _chain_ids(part))
    rows = empty_rows(1, T, T)
    rows.tokens[:], rows.position[:], rows.until[:], rows.step_end[:] = ids, range(T), T, range(T)
    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(transformer.step_logits, static_argnums=1)(params, config, put_rows(rows, mesh)))[0]


def _cached(part: CheckedPart) -> float:
    needed = sum(len(tree.tokens_N) for tree in part.token_trees)
    kept, worst = asked(PrefixCache, part.prm, padded_size(needed, 512)), 0.0
    for tree, outputs in zip(part.trees, part.outputs, strict=True):
        for _ in range(2):  # filled, then read
            actual, _ = kept.outputs_of(tree, "caller")
            worst = max(worst, *(difference(actual[name], x_N) for name, x_N in outputs.items()))
    return worst


def _exported(part: CheckedPart) -> float:
    folder, *_ = part.run
    out = str(asked(export, str(folder), str(part.folder / "exported")))
    if not find(part.model.head).readout:
        config = dataclasses.replace(base.model_config(out, head=part.model.head), attention=part.model.attention)
        with jax.set_mesh(part.mesh):
            actual = _policy_logits(part, base.load_language_model(out, config), config, part.mesh)
            trained = base.load_language_model(str(folder), part.model)
        return difference(actual, _policy_logits(part, trained, part.model, part.mesh))
    score = load_model(folder).outputs_of(part.trees)
    again = load_model(out).outputs_of(part.trees)
    return max(difference(b[name], a[name]) for a, b in zip(score, again, strict=True) for name in a)


CHECKS: dict[str, tuple[float, Callable[[CheckedPart], float]]] = {
    "packed": (SUMS, _packed), "chains": (SUMS, _chains), "split": (SUMS, _split), "devices": (SUMS, _devices),
    "gradients": (0.0, _gradients), "updates": (SUMS, _updates), "resumed": (0.0, _resumed),
    "scored": (SCORES, _scored), "live": (SCORES, _live), "cached": (SCORES, _cached),
    "exported": (SCORES, _exported),
}  # fmt: skip
"""Check to its tolerance and the function that returns the difference."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (FILE, --set, --trees, --only), by default the process's; prints the table.

    Returns 0, 1 if a check is wrong, 2 for bad input; wrong arguments exit by SystemExit(2).
    """
    parser = argparse.ArgumentParser("python -m jprm.testing", description="Prints the table of `check_part`.")
    parser.add_argument("experiment", help="a file with a function experiment()")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="changes, as for `jprm train`")
    parser.add_argument("--trees", metavar="FILE", help="labelled records (JSON Lines); default: random trees")
    parser.add_argument("--only", nargs="*", default=[], choices=[*CHECKS], help="checks; default: all")
    options = parser.parse_args(arguments)
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        with contextlib.suppress(RuntimeError):  # jax has started
            jax.config.update("jax_num_cpu_devices", 4)
    try:
        trees = [tree_of(record) for record in read_records(options.trees)] if options.trees else ()
        report = examine(options.experiment, options.set, trees=trees, only=options.only)
    except (ValueError, OSError) as error:  # of the experiment or the records; a check's errors are in its row
        named = isinstance(error, OSError) and error.filename and f"{error.filename}: {error.strerror}"
        print(f"error: {named or error}", file=sys.stderr)
        return 2
    print(report)
    return int(any(row.wrong for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())

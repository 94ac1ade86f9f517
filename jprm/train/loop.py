"""The training loop: reads rows, calls the step, writes metrics and checkpoints, and continues where it stopped."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jprm import data
from jprm.checkpoints import base, store
from jprm.data.pipeline import PipelineConfig, packed_batches
from jprm.evaluate.metrics import auroc, jsonable
from jprm.jsonl import atomic_file
from jprm.layout import NativeLayout
from jprm.model import transformer
from jprm.model.config import ModelConfig
from jprm.model.sharding import check, make_mesh, put_rows
from jprm.rows import Rows
from jprm.tokenizer import Tokenizer, load_tokenizer
from jprm.train.config import DataConfig, Experiment, read, to_json
from jprm.train.lora import TRAINED, merge
from jprm.train.lora import init as init_adapters
from jprm.train.losses import judged
from jprm.train.optimizer import join, make_optimizer, split
from jprm.train.probe import fitted_head, labelled_steps
from jprm.train.step import Metrics, State, make_step
from jprm.train.targets import TargetConfig, targets
from jprm.tree import ReasoningTree, tree_of

EXPERIMENT = "experiment.json"
FREE = ("mesh", "log_every", "valid_every", "checkpoint_every", "keep", "base", "tokenizer")
"""Fields that may differ when a run is continued: they change neither the parameters' meaning nor the data's order. The
tokenizer may lie elsewhere, but must be the same."""


class Diverged(FloatingPointError):
    """The loss, its gradient or the parameters after the step are not finite."""


def train(experiment: Experiment, workdir: str | os.PathLike) -> dict[str, Any]:
    """Trains to `experiment.steps`, from the newest checkpoint in `workdir` where there is one.

    Returns the last metrics, which are also written to `result.json`. Raises ValueError where `workdir` holds another
    experiment's run, and Diverged, naming the step and the last good checkpoint, where the loss is not finite.
    """
    workdir = pathlib.Path(workdir)
    mesh = make_mesh(experiment.mesh)
    check(experiment.model, mesh, experiment.data.micro_rows)
    tokenizer = load_tokenizer(experiment.tokenizer)
    if tokenizer.vocab_size > experiment.model.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {experiment.model.vocab_size}")
    batches = iter(batches_of(experiment.data, experiment.data.train, experiment.target, NativeLayout(tokenizer)))
    step = make_step(
        experiment.model, experiment.target, experiment.loss, experiment.optimizer, experiment.steps, experiment.lora
    )
    _claim(workdir, experiment, tokenizer)
    tokenizer.save(workdir)

    with jax.set_mesh(mesh), store.open_checkpoints(workdir, experiment.keep) as checkpoints:
        state = initial_state(experiment, load_base=checkpoints.latest is None)
        if checkpoints.latest is not None:
            state, batches = _resume(checkpoints, state, batches)
            print(f"continuing from step {int(state.step)} in {workdir}")
        elif experiment.probe_rows:
            state = _probed(experiment, state, tokenizer)
        log = _Log(workdir, experiment, int(state.step))
        pending: tuple[int, Metrics] | None = None  # read one step late, so that the device never waits for the host
        with log.bar:
            for done in range(int(state.step) + 1, experiment.steps + 1):
                rows = put_rows(_micro(next(batches), experiment.data.micro_rows), mesh, lead=1)
                state, metrics = step(state, rows)
                if pending:
                    log.add(*pending, checkpoints)
                pending = (done, metrics)
                end = done == experiment.steps
                save = end or done % experiment.checkpoint_every == 0
                judge = experiment.valid_every > 0 and done % experiment.valid_every == 0
                judge = bool(experiment.data.valid) and (end or judge)
                if save or judge:
                    log.add(*pending, checkpoints, close=save)  # a step that has diverged is never saved
                    pending = None
                if judge:
                    log.write({"step": done, **validate(experiment, merge(state.params, experiment.lora), tokenizer)})
                if save:
                    _save(checkpoints, state, batches)
            checkpoints.wait()
            if log.board:
                log.board.close()
    result = {**log.last, "step": experiment.steps}
    with atomic_file(workdir / "result.json") as file:
        file.write((json.dumps(result, indent=2) + "\n").encode())
    return result


def batches_of(
    config: DataConfig, files: Sequence[str], target: TargetConfig, layout: NativeLayout, *, once: bool = False
) -> grain.IterDataset[Rows]:
    """Batches of `config.rows` rows; shuffled and for ever, or with `once` in order and to the end."""
    sources = [grain.MapDataset.source(data.load(file)) for file in files]
    pipeline = PipelineConfig(
        rows=config.rows, tokens=config.tokens, slots=config.slots, too_long=config.too_long,
        supervise=config.supervise, window=config.window, seed=config.seed, shuffle=not once,
        epochs=1 if once else None,
    )  # fmt: skip

    def checked(record: dict) -> ReasoningTree:
        tree = tree_of(record)
        if config.supervise == "step" and tree.semantics != target.labels:
            raise ValueError(
                f"problem {tree.problem[:60]!r}: its labels are of semantics {tree.semantics!r}, but target.labels is"
                f" {target.labels!r}: set it to what the labels are"
            )
        return tree

    source = grain.MapDataset.concatenate(sources) if len(sources) > 1 else sources[0]
    return packed_batches(source, layout, pipeline, checked)


def initial_state(experiment: Experiment, load_base: bool = True) -> State:
    """Parameters from the base model, or random ones, and adapters; the optimizer's state, sharded like the trained."""
    model, key = experiment.model, jax.random.key(experiment.seed)
    if experiment.base and load_base:
        head = jax.jit(lambda key: transformer.init(model, key).get("head"))(key)
        params = {"decoder": base.load_decoder(experiment.base, model), **({"head": head} if head else {})}
    else:
        params = jax.jit(transformer.init, static_argnums=0)(model, key)
    freeze, lora = experiment.optimizer.freeze, experiment.lora
    adapters = jax.jit(init_adapters, static_argnums=(0, 1, 2))(lora, model, freeze, jax.random.fold_in(key, 1))
    trained, frozen = split(join(flatten_dict(params, sep="/"), adapters), freeze, TRAINED if lora.rank else "")
    optimizer = jax.jit(make_optimizer(experiment.optimizer, experiment.steps).init)(trained)
    return State(jnp.int32(0), trained, frozen, optimizer)


def _probed(experiment: Experiment, state: State, tokenizer: Tokenizer) -> State:
    """The state with its head fitted, on the first rows that training will see."""
    batches = batches_of(experiment.data, experiment.data.train, experiment.target, NativeLayout(tokenizer))
    params = merge(state.params, experiment.lora)
    steps = labelled_steps(params, experiment.model, experiment.target, batches, experiment.probe_rows)
    head, area = fitted_head(experiment.model.head, steps)
    left_out = "" if area is None else f": AUROC {area:.3f} on the last fifth, when that was left out"
    print(f"the head is fitted on {len(steps.target_N):,} labelled steps{left_out}")
    fitted = {
        f"head/{name}": jax.device_put(value, state.trained[f"head/{name}"].sharding) for name, value in head.items()
    }
    return dataclasses.replace(state, trained=state.trained | fitted)


def validate(experiment: Experiment, params: dict, tokenizer) -> dict[str, float | None]:
    """Accuracy and AUROC over the labelled steps of the validation files, by the same target policy.

    The AUROC is None where the labels are all right or all wrong.
    """
    config, mesh = experiment.data, jax.sharding.get_mesh()
    score, positive, weight = [], [], []
    for rows in batches_of(config, config.valid, experiment.target, NativeLayout(tokenizer), once=True):
        for micro in _unstack(_micro(rows, config.micro_rows)):
            judgement = _judge(params, experiment.model, experiment.target, put_rows(micro, mesh))
            for part, out in zip((score, positive, weight), judgement, strict=True):
                part.append(np.asarray(out).ravel())
    score_N, positive_N, weight_N = (np.concatenate(part) for part in (score, positive, weight))
    weight_N = weight_N.astype(np.float64)
    right = np.sum(weight_N * ((score_N > 0.5) == positive_N))
    return {
        "valid_step_accuracy": float(right / max(weight_N.sum(), 1)),
        "valid_auroc": jsonable(auroc(score_N, positive_N, weight_N)),
        "valid_labels": float(weight_N.sum()),
    }


@functools.partial(jax.jit, static_argnums=(1, 2))
def _judge(params: dict, model: ModelConfig, target: TargetConfig, rows: Rows):
    target_BS, weight_BS = targets(rows, target)
    return *judged(model.head, transformer.step_logits(params, model, rows), target_BS), weight_BS


def _resume(checkpoints, state: State, batches) -> tuple[State, Iterator[Rows]]:
    wanted = {"params": store.abstract(state.params), "optimizer": store.abstract(state.optimizer), "data": batches}
    loaded = store.restore(checkpoints, wanted)
    trained, frozen = {}, {}
    for path, value in split(loaded["params"], "")[0].items():
        (trained if path in state.trained else frozen)[path] = value
    step = jnp.int32(checkpoints.latest.step)
    return State(step, trained, frozen, loaded["optimizer"]), loaded["data"]


def _save(checkpoints, state: State, batches) -> None:
    parts = {"params": join(state.trained, state.frozen), "optimizer": state.optimizer, "data": batches}
    checkpoints.save_checkpointables_async(int(state.step), parts, overwrite=True)


def _claim(workdir: pathlib.Path, experiment: Experiment, tokenizer: Tokenizer) -> None:
    """Writes the experiment into its folder, or checks that the checkpoints there are this experiment's."""
    path, here = workdir / EXPERIMENT, to_json(experiment)
    if path.exists() and any(step.name.isdigit() for step in (workdir / store.FOLDER).glob("*")):
        new, old = _flat(here), _flat(to_json(read(path)))
        differing = sorted(
            key for key in {**old, **new} if key.split(".")[0] not in FREE and old.get(key) != new.get(key)
        )
        if differing:
            detail = "; ".join(f"{key}: {old.get(key)} there, {new.get(key)} here" for key in differing)
            raise ValueError(f"{path}: is another experiment's run ({detail}). Use another --workdir")
        _check_tokenizer(workdir, tokenizer, experiment.tokenizer)
    workdir.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write((json.dumps(here, indent=2) + "\n").encode())


def _check_tokenizer(workdir: pathlib.Path, tokenizer: Tokenizer, source: str) -> None:
    """Raises ValueError where the tokenizer that the run started with has other content than this one."""
    with tempfile.TemporaryDirectory() as folder:  # as files: what a tokenizer says of itself is all in them
        tokenizer.save(folder)
        for file in sorted(pathlib.Path(folder).iterdir()):
            there = workdir / file.name
            if not there.is_file() or there.read_bytes() != file.read_bytes():
                raise ValueError(
                    f"{there}: is not the tokenizer that {source} holds, and the parameters were trained with it. Set"
                    f" tokenizer={workdir}, or use another --workdir"
                )


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """{"a": {"b": value}} as {"a.b": value}: the names that `--set` takes."""
    return flatten_dict(tree, sep=".")


def _micro(rows: Rows, size: int) -> Rows:
    """(A x B, ...) to (A, B, ...) on the host: A micro-batches of `size` rows."""
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, size, *x.shape[1:]), rows)


def _unstack(rows: Rows) -> Iterator[Rows]:
    return (jax.tree.map(lambda x, i=i: x[i], rows) for i in range(len(rows.tokens)))


class _Log:
    """Sums metrics over `log_every` steps and writes them: a JSON line, the progress bar, TensorBoard if there."""

    def __init__(self, workdir: pathlib.Path, experiment: Experiment, start: int):
        self.path, self.every = workdir / "metrics.jsonl", experiment.log_every
        self.last: dict[str, Any] = {}
        self.board = None
        if importlib.util.find_spec("tensorboardX"):  # the extra `tensorboard`
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(str(workdir / "tensorboard"))
        self.sum, self.steps, self.since, self.labels = None, 0, time.perf_counter(), 0.0
        columns = TextColumn(experiment.name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, TextColumn("{task.fields[note]}"))
        self.task = self.bar.add_task("train", total=experiment.steps, completed=start, note="compiling")
        if self.path.exists():  # what was logged after the checkpoint will be logged again
            lines = self.path.read_bytes().splitlines(keepends=True)
            whole = [(line, json.loads(line)) for line in lines if line.endswith(b"\n")]  # a kill may leave half a line
            with atomic_file(self.path) as file:
                for line, values in whole:
                    if values["step"] <= start:
                        file.write(line)
                        self.last |= values

    def add(self, step: int, metrics: Metrics, checkpoints, *, close: bool = False) -> None:
        """Adds a step's sums, which become a line at every `log_every`-th step, and at this one with `close`.

        A checkpoint closes: the sums are not saved with it, and a run that continues must log what one does that was
        never stopped.
        """
        metrics = jax.tree.map(np.asarray, metrics)
        if not all(map(math.isfinite, (metrics.loss, metrics.gradient_norm, metrics.parameter_norm))):
            good = f"step {checkpoints.latest.step}" if checkpoints.latest else "none yet"
            raise Diverged(
                f"step {step}: loss {float(metrics.loss)}, gradient norm {float(metrics.gradient_norm)}, norm of the"
                f" parameters after it {float(metrics.parameter_norm)}; last good checkpoint: {good}. Lower"
                " optimizer.learning_rate or clip_norm, or look at the data of this step"
            )
        self.labels += float(metrics.weight)
        self.sum = metrics if self.sum is None else jax.tree.map(np.add, self.sum, metrics)
        self.steps += 1
        self.bar.update(self.task, completed=step)
        if close or step % self.every == 0:
            if self.labels == 0:
                raise ValueError(
                    f"no labelled step in {self.steps} updates: data.supervise and target leave every step of the data"
                    " without a label; `outcome` needs records with `correct`"
                )
            now = time.perf_counter()
            self.write({"step": step, **self._means(metrics, now - self.since)})
            self.sum, self.steps, self.since = None, 0, now

    def write(self, values: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")
        self.last |= values
        for name, value in values.items() if self.board else ():
            if value is not None and name != "step":
                self.board.add_scalar(name, value, values["step"])
        note = " ".join(
            f"{k} {v:.4g}"
            for k, v in values.items()
            if k in ("loss", "auroc", "valid_auroc", "tokens_per_second") and v is not None
        )
        self.bar.update(self.task, note=note)
        if not self.bar.console.is_terminal:  # a log file gets lines
            print(json.dumps(values), flush=True)

    def _means(self, newest: Metrics, seconds: float) -> dict[str, float]:
        total, weight = self.sum, max(float(self.sum.weight), 1.0)
        wrong_N, right_N = total.histogram_CN.astype(np.float64)
        below_N = np.cumsum(wrong_N) - wrong_N
        pairs = wrong_N.sum() * right_N.sum()
        area = float(np.sum(right_N * (below_N + 0.5 * wrong_N)) / pairs) if pairs else None
        return {
            "loss": float(total.loss) / weight,
            "step_accuracy": float(total.right) / weight,
            "auroc": area,
            "learning_rate": float(newest.learning_rate),
            "gradient_norm": float(total.gradient_norm) / self.steps,
            "labels": float(total.weight),
            "labels_per_second": float(total.weight) / seconds,
            "tokens_per_second": float(total.tokens) / seconds,
            "seconds": seconds,
        }

"""The training loop: reads rows, calls the step, writes metrics and checkpoints, and continues where it stopped.

Of several processes each runs this loop on the same batches, of which it computes its devices' rows; the first writes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jprm import data, multihost
from jprm.checkpoints import base, store
from jprm.data.pipeline import PipelineConfig, packed_batches
from jprm.data.streams import Streams, own_streams
from jprm.experiment import Experiment, OptimizerConfig, TargetConfig, from_json, read, to_json
from jprm.layout import NativeLayout
from jprm.model import transformer
from jprm.model.config import ModelConfig
from jprm.model.heads import find
from jprm.model.lora import TRAINED, merge
from jprm.model.lora import init as init_adapters
from jprm.model.mesh import check_mesh, gathered, make_mesh, put_rows
from jprm.model.parameters import join, split
from jprm.objectives.targets import targets
from jprm.outputs import atomic_file
from jprm.rows import Rows
from jprm.statistics import auroc, jsonable
from jprm.tokenizer import Tokenizer, load_tokenizer
from jprm.train.head_init import fitted_head, labelled_steps
from jprm.train.log import Log
from jprm.train.optimizer import Guarded, guard, make_optimizer
from jprm.train.preemption import Goodput, Stopped, Watchdog, stop_signal, versions
from jprm.train.step import Metrics, State, make_step
from jprm.tree import ReasoningTree, tree_of

EXPERIMENT = "experiment.json"
FREE = ("mesh", "log_every", "valid_every", "checkpoint_every", "keep", "keep_every", "stall_seconds", "base",
        "tokenizer", "optimizer.bad_steps", "optimizer.spike")  # fmt: skip
"""Fields that may differ when a run is continued: they change neither the parameters' meaning nor the data's order. The
tokenizer may lie elsewhere, but must be the same. What is done about bad steps may change after one."""


def train(experiment: Experiment, workdir: str | os.PathLike) -> dict[str, Any]:
    """Trains to `experiment.steps`, from the newest checkpoint in `workdir` where there is one.

    Returns the last metrics, which are also written to `result.json`. Raises ValueError where `workdir` holds another
    experiment's run; Diverged, naming the step and the last good checkpoint, where the loss is not finite or
    `optimizer` calls the step bad; and Stopped, when all is saved, after SIGTERM.
    """
    workdir = pathlib.Path(workdir)
    _check_supervision(experiment)
    mesh = make_mesh(experiment.mesh)
    check_mesh(experiment.model, mesh, experiment.data.micro_rows, experiment.data.tokens)
    tokenizer = load_tokenizer(experiment.tokenizer)
    if tokenizer.vocab_size > experiment.model.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {experiment.model.vocab_size}")
    batches = training_batches(experiment, mesh, tokenizer)
    step = make_step(
        experiment.model, experiment.target, experiment.loss, experiment.optimizer, experiment.steps, experiment.lora
    )
    multihost.first(lambda: _claim(workdir, experiment, tokenizer))
    if not multihost.everywhere((workdir / EXPERIMENT).is_file()):
        raise ValueError(f"{workdir}: is not the same folder on every host; --workdir must lie where all can write")

    with (
        jax.set_mesh(mesh),
        store.open_checkpoints(workdir, experiment.keep, experiment.keep_every) as checkpoints,
        stop_signal() as asked_to_stop,
        Watchdog(workdir, experiment.stall_seconds) as watchdog,
    ):
        state, goodput = initial_state(experiment, load_base=checkpoints.latest is None), Goodput()
        if checkpoints.latest is not None:
            state, goodput = _resume(checkpoints, state, batches)
            if multihost.is_first():
                print(f"continuing from step {int(state.step)} in {workdir}")
        elif experiment.probe_rows:
            state = _probed(experiment, state, tokenizer)
        log = Log(workdir, experiment, int(state.step), goodput)
        pending: tuple[int, Metrics] | None = None  # read one step late, so that the device never waits for the host
        start, stop = int(state.step), False
        with log.bar:
            for done in range(start + 1, experiment.steps + 1):
                watchdog.at(done, "data")
                rows = put_rows(next(batches), mesh, lead=1)
                watchdog.at(done, "step")
                if done == start + 1:
                    multihost.compile_together(step, state, rows)
                state, metrics = step(state, rows)
                if pending:
                    log.add(*pending, checkpoints)
                pending = (done, metrics)
                end, stop = done == experiment.steps, asked_to_stop(done)
                save = end or stop or done % experiment.checkpoint_every == 0
                judge = experiment.valid_every > 0 and done % experiment.valid_every == 0
                judge = bool(experiment.data.valid) and (end or judge)
                if save or judge:
                    log.add(*pending, checkpoints, close=save)  # a step that has diverged is never saved
                    pending = None
                if judge:
                    watchdog.at(done, "validation")
                    log.write({"step": done, **validate(experiment, merge(state.params, experiment.lora), tokenizer)})
                if save:
                    watchdog.at(done, "checkpoint")
                    _save(checkpoints, state, batches, experiment, goodput)
                if save or judge:
                    goodput.rest()
                if stop:
                    break
            checkpoints.wait()
            log.close()
        if stop and not end:
            raise Stopped(f"SIGTERM: saved at step {done} of {experiment.steps}; the same command continues")
    result = {**log.last, "step": experiment.steps}
    if multihost.is_first():
        with atomic_file(workdir / "result.json") as file:
            file.write((json.dumps(result, indent=2) + "\n").encode())
    return result


def _check_supervision(experiment: Experiment) -> None:
    """Raises ValueError where the head or the target does not take the labels that `data.supervise` gives."""
    supervise, target, head = experiment.data.supervise, experiment.target, experiment.model.head
    if supervise not in (takes := find(head).target.supervise):
        raise ValueError(f"data.supervise={supervise!r} does not fit head {head!r}, which takes {' or '.join(takes)}")
    if supervise != "step" and target.labels == "rating":
        raise ValueError(
            f"data.supervise={supervise!r} gives no ratings, of which 0 is neutral and all above it are one: set"
            " target.labels to value or correctness, and target.neutral=none"
        )
    if supervise == "token" and (target.after_error, target.soft) != ("keep", "soft"):
        raise ValueError("data.supervise='token' gives ids of tokens: target.after_error=keep and target.soft=soft do")


def training_batches(experiment: Experiment, mesh: jax.sharding.Mesh, tokenizer: Tokenizer) -> Streams:
    """Batches of shape (A, B, ...), for ever, of which this process packs the rows that its devices compute."""
    config, layout = experiment.data, NativeLayout(tokenizer)
    streams = {
        k: batches_of(experiment, config.train, layout, stream=(k, config.streams))
        for k in own_streams(mesh, config.micro_rows, config.streams)
    }
    return Streams(streams, config.streams, config.micro_rows)


def batches_of(
    experiment: Experiment, files: Sequence[str], layout: NativeLayout, *, once: bool = False,
    stream: tuple[int, int] = (0, 1),
) -> grain.IterDataset[Rows]:  # fmt: skip
    """A stream's part of batches of `data.rows` rows; shuffled, for ever, or with `once` in order, to the end."""
    config, target = experiment.data, experiment.target
    sources = [grain.MapDataset.source(data.load(file)) for file in files]
    pipeline = PipelineConfig(
        rows=config.rows // stream[1], tokens=config.tokens, slots=config.slots, too_long=config.too_long,
        supervise=config.supervise, extras=config.extras, window=config.window, seed=config.seed, shuffle=not once,
        epochs=1 if once else None, stream=stream, chains=experiment.model.chain_rows,
    )  # fmt: skip

    # Of values 0 is a count: no completion was right. A probability of being right is hardly ever 0.
    zero_alone = (config.supervise, target.labels) == ("step", "correctness")
    zero_alone &= (target.after_error, target.soft) != ("keep", "soft")

    def checked(record: dict) -> ReasoningTree:
        tree = tree_of(record)
        if config.supervise == "step" and tree.semantics != target.labels:
            raise ValueError(
                f"problem {tree.problem[:60]!r}: its labels are of semantics {tree.semantics!r}, but target.labels is"
                f" {target.labels!r}: set it to what the labels are"
            )
        if zero_alone and any(node.label is not None and 0 < node.label < 1 for node in tree.nodes):
            raise ValueError(
                f"problem {tree.problem[:60]!r}: its labels are probabilities between 0 and 1, and target."
                "after_error=mask and soft=hard take 0 alone for wrong: set keep and soft, or make the labels 0 and 1"
            )
        return tree

    source = grain.MapDataset.concatenate(sources) if len(sources) > 1 else sources[0]
    return packed_batches(source, layout, pipeline, checked)


def initial_state(experiment: Experiment, load_base: bool = True) -> State:
    """Parameters from the base model, or random ones, and adapters; the optimizer's state, sharded like the trained."""
    model, key = experiment.model, jax.random.key(experiment.seed)
    if experiment.base and load_base:
        params = {"decoder": base.load_decoder(experiment.base, model), **_head(experiment, key)}
    else:
        params = jax.jit(transformer.init, static_argnums=0)(model, key)
    freeze, lora = experiment.optimizer.freeze, experiment.lora
    adapters = jax.jit(init_adapters, static_argnums=(0, 1, 2))(lora, model, freeze, jax.random.fold_in(key, 1))
    trained, frozen = split(join(flatten_dict(params, sep="/"), adapters), freeze, TRAINED if lora.rank else "")
    optimizer = jax.jit(make_optimizer(experiment.optimizer, experiment.steps).init)(trained)
    return State(jnp.int32(0), trained, frozen, optimizer)


def _head(experiment: Experiment, key: jax.Array) -> dict[str, Any]:
    """A new head; but a policy goes on with its base's own, which may be the embedding."""
    model = experiment.model
    if find(model.head).channels:
        return {"head": jax.jit(lambda key: transformer.init(model, key)["head"])(key)}
    tied = base.model_config(experiment.base).tied_embeddings
    if tied != model.tied_embeddings:
        raise ValueError(f"{experiment.base}: tied_embeddings is {tied}, the config says {model.tied_embeddings}")
    return {} if tied else {"head": base.load_language_head(experiment.base, model)}


def _probed(experiment: Experiment, state: State, tokenizer: Tokenizer) -> State:
    """The state with its head fitted, on the first rows that training will see."""
    batches = training_batches(experiment, jax.sharding.get_mesh(), tokenizer)
    params = merge(state.params, experiment.lora)
    micro_batches = itertools.chain.from_iterable(map(_unstack, batches))
    steps = labelled_steps(params, experiment.model, experiment.target, micro_batches, experiment.probe_rows)
    head, area = fitted_head(experiment.model.head, steps)
    left_out = "" if area is None else f": AUROC {area:.3f} on the last fifth, when that was left out"
    if multihost.is_first():
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
    for rows in batches_of(experiment, config.valid, NativeLayout(tokenizer), once=True):
        for micro in _unstack(_micro(rows, config.micro_rows)):
            arguments = params, experiment.model, experiment.target, put_rows(micro, mesh)
            if not score:
                multihost.compile_together(_judge, *arguments)
            judgement = _judge(*arguments)
            for part, out in zip((score, positive, weight), gathered(judgement), strict=True):
                part.append(out.ravel())
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
    return *find(model.head).judge(transformer.step_logits(params, model, rows), target_BS), weight_BS


def _resume(checkpoints, state: State, batches: Streams) -> tuple[State, Goodput]:
    """The newest checkpoint's state, its arrays placed as those of `state` are; `batches` goes on where it was."""
    run = store.restore(checkpoints, {"run": None})["run"]
    now = state.optimizer
    bare = now.inner if isinstance(now, Guarded) else now
    then = guard(bare) if from_json(OptimizerConfig, run["experiment"]["optimizer"]).guarded else bare
    loaded = store.restore(checkpoints, {"params": store.abstract(state.params), "optimizer": store.abstract(then)})
    optimizer = loaded["optimizer"]
    if isinstance(now, Guarded) and not isinstance(then, Guarded):
        optimizer = guard(optimizer)
    elif isinstance(then, Guarded) and not isinstance(now, Guarded):
        optimizer = optimizer.inner
    trained, frozen = {}, {}
    for path, value in split(loaded["params"], "")[0].items():
        (trained if path in state.trained else frozen)[path] = value
    batches.set_state(run["data"])
    return State(jnp.int32(checkpoints.latest.step), trained, frozen, optimizer), Goodput(**run["goodput"])


def _save(checkpoints, state: State, batches: Streams, experiment: Experiment, goodput: Goodput) -> None:
    run = {
        "data": batches.get_state(), "experiment": to_json(experiment), "versions": versions(), "goodput": goodput.saved
    }  # fmt: skip
    parts = {"params": join(state.trained, state.frozen), "optimizer": state.optimizer, "run": run}
    checkpoints.save_checkpointables_async(int(state.step), parts, overwrite=True)


def _claim(workdir: pathlib.Path, experiment: Experiment, tokenizer: Tokenizer) -> None:
    """Writes the experiment into its folder, or checks that the checkpoints there are this experiment's."""
    path, here = workdir / EXPERIMENT, to_json(experiment)
    if path.exists() and any(step.name.isdigit() for step in (workdir / store.FOLDER).glob("*")):
        new, old = _flat(here), _flat(to_json(read(path)))
        differing = sorted(
            key for key in {**old, **new} if not {key, key.split(".")[0]} & set(FREE) and old.get(key) != new.get(key)
        )
        if differing:
            detail = "; ".join(f"{key}: {old.get(key)} there, {new.get(key)} here" for key in differing)
            raise ValueError(f"{path}: is another experiment's run ({detail}). Use another --workdir")
        _check_tokenizer(workdir, tokenizer, experiment.tokenizer)
    workdir.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write((json.dumps(here, indent=2) + "\n").encode())
    tokenizer.save(workdir)


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

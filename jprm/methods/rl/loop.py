"""`train`: a policy learns from its own samples, update by update, starting at its newest checkpoint.

An update depends only on the parameters, the seed and its number: problems, samples, rewards and scores are made anew.

Every process runs this loop. The learner's parameters are split over all processes' devices. Each process samples and
judges some problems on its own devices, with a policy copy. All processes then learn from the same groups. Process 0
writes. With `sampling_hosts` the last processes sample and judge meanwhile (`jprm.methods.rl.sampling_hosts`), and the
others run this loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jprm import loading, multihost
from jprm.checkpoints import store
from jprm.experiment import ID, RUN, to_json
from jprm.io.outputs import write_json
from jprm.io.storage import Place, mark_own, path_of
from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import Sampler
from jprm.methods.rl import RESULT, refresh, rollout, sampling_hosts
from jprm.methods.rl.config import METHODS, RLExperiment, learner
from jprm.methods.rl.engine import Probes, RemoteSampler
from jprm.methods.rl.progress import Progress, best_of, claim_rl, fired, fresh_test, suspected, verdict
from jprm.methods.rl.sampling import Carrying, Here, Problems, Samples, SampleSource, Servers, sampler_options
from jprm.methods.rl.sampling_hosts import SamplingHosts
from jprm.methods.verify import verifiers
from jprm.model.attention import chain_rows
from jprm.model.mesh import mesh_by_heads, own_mesh
from jprm.model.parameters import join
from jprm.pack import PackReport
from jprm.rows import Rows
from jprm.tokenizer import Layout, native_layout
from jprm.train import Stopped, Trainer, stop_signal
from jprm.train.callbacks import Callback, Log, Watchdog

BEST = "best"

PROBES = 16
"""Held-out problems with samples that test an engine after every push."""

VERSION = 1
"""Of rl.json."""


def train(config: RLExperiment, workdir: str | os.PathLike, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Trains to `config.updates`, or until a guard ends the run, from the newest checkpoint in `workdir`.

    Returns `rl.json` (`Loop.write`). `workdir` is the policy's run, with checkpoints, metrics.jsonl and
    rl_experiment.json; `workdir`/best is a run from its best evaluation. A finished run is not trained further.
    `callbacks`: as in `jprm.train.train`.

    Every process must call it, and each returns the result.

    Raises:
        ValueError: `workdir` holds another experiment's run, the experiment's parts do not fit, or a record is bad.
        FileNotFoundError: a model or a file of problems is absent.
        OSError: the environment lost all episodes of an update, the verifier cannot run, or no server answers at first.
        Diverged: the loss is not finite; names the last good checkpoint.
        Stopped: after SIGTERM, when the state is saved.
    """
    if config.refresh.every:
        refresh.check(config)
    if not config.sampling_hosts:
        return learn(config, workdir, callbacks)
    learners, samplers = sampling_hosts.parted(config)
    if jax.process_index() in samplers:
        with multihost.among(samplers):
            return sampling_hosts.serve(config, workdir)
    with multihost.among(learners), sampling_hosts.ending() as ended:
        ended(result := learn(config, workdir, callbacks))
    return result


def learn(config: RLExperiment, workdir: str | os.PathLike, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Runs the updates of `train`, on the learning processes; returns and raises as `train` does."""
    workdir, progress, experiment = path_of(workdir), Progress(), learner(config)
    claim_rl(workdir, config)
    with (
        stop_signal() as asked_to_stop,
        Watchdog(workdir, config.stall_seconds) as watchdog,
        Trainer(experiment, workdir, position=progress) as trainer,
    ):
        assert trainer.checkpoints is not None
        if trainer.checkpoints.latest is None and multihost.is_first():
            (workdir / "metrics.jsonl").unlink(missing_ok=True)
        with Log(workdir, experiment, int(trainer.state.step), trainer.goodput, callbacks) as log:
            loop = Loop(config, trainer, progress, log, watchdog.at)
            stopped = loop.run_updates(asked_to_stop)
            trainer.checkpoints.wait()
        if stopped:
            raise Stopped(f"SIGTERM: saved at update {progress.update} of {config.updates}; the same command continues")
        return loop.write(finished=True)


class Loop:
    """The updates of one run. `at(update, phase)` is called before each phase, e.g. at(3, "sampling").

    Every process must call each method, in the same order. Raises ValueError, also RecordError, if the problems' files
    are bad, share problems, or have one that is too long for a row; and as `SampleSource`.
    """

    def __init__(
        self, config: RLExperiment, trainer: Trainer, progress: Progress, log: Log, at: Callable[[int, str], None]
    ):
        self.config, self.trainer, self.progress, self.log, self.at = config, trainer, progress, log, at
        self.working = verifiers.find_working(config.working)
        self.problems = Problems.read(config)
        self.records, self.held_out = self.problems.records, self.problems.held_out
        self._check_records(native_layout(trainer.tokenizer))
        self.samples = self._open_samples(self._name(int(trainer.state.step)))

    def _open_samples(self, name: str) -> Samples:
        """Returns the sample source, with the parameters of policy `name`."""
        config, trainer, ahead, lengths = self.config, self.trainer, self.progress.ahead, self.progress.lengths
        model, tokenizer = trainer.experiment.model, trainer.tokenizer
        if config.sampling_hosts:
            return SamplingHosts(self.problems, tokenizer, trainer.params, name, ahead, lengths)
        source, mesh = SampleSource(self.problems, tokenizer, self._prm), own_mesh(trainer.mesh)
        parts = trainer.params, model, tokenizer
        if config.engine:
            prefixes = [Prefix(record["problem"]) for record in self.held_out[:PROBES]]
            probes = Probes(prefixes, self._folder / "engine", config.tokens)
            source.policy = RemoteSampler(config.engine, probes, *parts, mesh, sampler_options(config), name)
            return Servers(source, ahead, lengths)
        heads = mesh_by_heads(model, list(mesh.devices.flat))
        source.policy = Sampler(*parts, heads, sampler_options(config), name)
        return (Carrying if config.carry else Here)(source, ahead, lengths)

    @property
    def _prm(self) -> str:
        """The current PRM's folder; empty without a PRM."""
        return str(self._folder / self.progress.prm) if self.progress.prm else self.config.prm

    def _name(self, step: int) -> str:
        return f"{self.trainer.workdir}@{step}"

    def _check_records(self, layout: Layout) -> None:
        """Raises ValueError if held-out problems are trained on, or a problem is too long for a row."""
        both = {record["problem"] for record in self.records} & {record["problem"] for record in self.held_out}
        if both:
            raise ValueError(f"{len(both)} problems are in problems and in held_out, such as {min(both)[:60]!r}")
        if self.config.environment:
            return
        longest = max(len(layout.problem(record["problem"])) for record in self.records)
        what, count = ("pairs", 2) if METHODS[self.config.method].pairs else ("chains", 1)
        if longest + count * self.config.max_tokens > self.config.tokens:
            raise ValueError(
                f"the longest prompt has {longest} tokens, and with max_tokens={self.config.max_tokens} {what} do"
                f" not fit rows of tokens={self.config.tokens}: lengthen rows, or lower max_tokens"
            )

    def run_updates(self, asked_to_stop: Callable[[int], bool]) -> bool:
        """Runs the remaining updates; returns whether it was stopped before the last.

        Evaluates before the first update and every `evaluate_every` ones. Saves checkpoints, and after a new best
        evaluation best/. At the end it evaluates the best policy on fresh samples.

        `asked_to_stop` is called with the optimizer's step and returns whether SIGTERM came to any process. Raises as
        `update`.
        """
        config, progress = self.config, self.progress
        if asked_to_stop(int(self.trainer.state.step)) and progress.update < config.updates:
            return True  # there is no more than what was saved
        if not progress.evaluations:
            self.evaluate()
        if self._best == progress.update:  # as well where a kill came between a checkpoint and best/
            self._save_best()
        while progress.update < config.updates and not progress.ended:
            self.update(progress.update + 1)
            end = progress.update == config.updates
            stop = asked_to_stop(int(self.trainer.state.step))
            evaluated = end or progress.update % config.evaluate_every == 0
            if evaluated:
                self.evaluate()
            if end or progress.ended:
                self._confirm_best()
            better = evaluated and self._best == progress.update
            if end or stop or progress.ended or better or progress.update % config.checkpoint_every == 0:
                self.at(progress.update, "checkpoint")
                self.trainer.save()
                self.trainer.goodput.rest()
            if better:
                self._save_best()
            if stop and not (end or progress.ended):
                return True
        return False

    def update(self, number: int) -> None:
        """Runs update `number` (from 1): samples, judges, learns, and pushes the parameters to the sampler.

        Sets `progress.update`, and writes a line to metrics.jsonl, but no checkpoint. Every `refresh.every` updates the
        PRM learns too. Raises Diverged if the loss is not finite, and as `Samples` and `refresh`.
        """
        config, began = self.config, time.perf_counter()
        began -= self.samples.waited  # for this update's samples, at the end of the update before
        self.at(number, "sampling")
        groups, figures = self._groups(number)
        sampled = time.perf_counter()
        batches = [self._batch(part) for part in rollout.minibatches(groups, config.minibatches)]
        for index, batch in enumerate(batches, start=1):
            self.at(number, "updating")
            self._learn(*batch, figures, began, sampled, close=index == config.minibatches)
        self.at(number, "pushing")
        self.samples.settle()
        self._push(int(self.trainer.state.step))
        self.progress.update = number
        if config.refresh.every and number % config.refresh.every == 0:
            self.at(number, "refreshing")
            self.refresh(groups)

    def _push(self, step: int) -> None:
        self.samples.push(self.trainer.params, self._name(step))

    def _groups(self, number: int) -> tuple[list[Any], dict[str, Any]]:
        """Returns an update's groups (or demonstration records) and figures."""
        config = self.config
        if not METHODS[config.method].samples:
            count = config.problems_an_update * config.samples
            return rollout.chosen(self.records, count, config.seed, number - 1), {"update": number}
        self.samples.begin(number, due=min(number + config.stale, config.updates))
        ahead = self.samples.take(number)
        self.at(number, "scoring")
        groups = self.samples.judged(ahead)
        for group in groups:
            mean = float(np.mean([len(sample.ids) for sample in group.samples]))
            self.progress.lengths[group.record["problem"]] = mean
        of_samples = self.samples.figures(ahead, number)
        return groups, {"update": number, **of_samples, **rollout.train_figures(groups)}

    def _batch(self, part: Sequence[Any]) -> tuple[Rows, PackReport, int]:
        """Returns one optimizer step's rows, packing counts, and sampled token count."""
        trainer, config = self.trainer, self.config
        if not METHODS[config.method].samples:
            trees = rollout.demonstrations(part, self.samples.layout, config)
            tokens = sum(len(tree.node_M) for tree in trees)
        else:
            trees = rollout.trees_of(part, self.samples.layout, config)
            tokens = sum(len(sample.ids) for group in part for sample in group.samples)
        rows, report = rollout.packed(trees, trainer.experiment.data, chain_rows(trainer.experiment.model))
        if config.minibatches > 1 and config.objective_options.get("truncate"):
            rows = rollout.with_proximal(rows, trainer, config.temperature)
        return rows, report, tokens

    def _learn(
        self, rows: Rows, report: PackReport, tokens: int, figures: dict[str, Any], began: float, sampled: float,
        close: bool,
    ) -> None:  # fmt: skip
        """Takes one optimizer step; `close` writes the update's line."""
        trainer, progress = self.trainer, self.progress
        progress.tokens += tokens
        metrics = trainer.step(rows)
        more = {
            **figures,
            "sampled_tokens": progress.tokens,
            "packed_tokens": report.tokens,
            "separate_tokens": report.leaf_tokens,
            "sampling_seconds": sampled - began,
        }
        self.log.add(int(trainer.state.step), metrics, trainer.checkpoints, close=close, more=more)

    def evaluate(self) -> None:
        """Evaluates the policy on held-out problems and ends the run, `progress.ended`, if a guard fires.

        Appends to `progress.evaluations`: `rollout.evaluation` with `update`, `sampled_tokens`, `kl` (`None` without a
        reference), with a PRM `prm` (the adopted refresh, or "") and `auroc`, and `check` (`fresh_test`) after a
        suspicion. Logs them, and writes `rl.json` unless the run ends.
        """
        config, progress = self.config, self.progress
        self.at(progress.update, "evaluating")
        groups = self.samples.held_out(rollout.STREAM)
        figures = self._evaluation(groups)
        if config.prm:
            figures |= {"prm": progress.prm, "auroc": self._auroc(groups, [g.scores or [] for g in groups])}
        kl = rollout.drift(self.trainer, self.samples.layout, groups, config) if config.reference else None
        figures = {"update": progress.update, "sampled_tokens": progress.tokens, "kl": kl, **figures}
        progress.evaluations.append(figures)
        if multihost.first(suspected, progress.evaluations, config.guards):
            figures["check"] = self._check_gaming()
        progress.ended = multihost.first(fired, progress.evaluations, config.guards)
        shown = {key: value for key, value in figures.items() if isinstance(value, int | float)}
        self.log.write({"step": int(self.trainer.state.step), **shown})
        if not progress.ended:  # else the best policy is measured before the verdict
            self.write(finished=False)

    def _evaluation(self, groups: list[rollout.Group]) -> dict[str, Any]:
        return multihost.first(rollout.evaluation, groups, self.working, self.config.seed)

    def _check_gaming(self) -> dict[str, Any]:
        """Returns the guard's test: the best against the present policy on fresh samples from both."""
        progress, state = self.progress, self.trainer.state
        self.at(progress.update, "checking")
        now = self._evaluation(self.samples.held_out(rollout.fresh(progress.update)))
        self._take_best()
        best = self._evaluation(self.samples.held_out(rollout.fresh(progress.update)))
        self.trainer.state = state
        self._push(int(state.step))
        earlier = sum("check" in evaluation for evaluation in progress.evaluations)
        return multihost.first(fresh_test, best, now, earlier, self.config.seed)

    def _confirm_best(self) -> None:
        """Evaluates the best policy on fresh samples at the end. A run that a guard ended keeps its parameters."""
        progress, state = self.progress, self.trainer.state
        self.at(progress.update, "confirming")
        self._take_best()
        groups = self.samples.held_out(rollout.fresh(progress.update, report=True))
        progress.fresh = {"update": self._best, **self._evaluation(groups)}
        if not progress.ended:
            self.trainer.state = state

    @property
    def _best(self) -> int:
        """The update of the best evaluation."""
        return self.progress.evaluations[best_of(self.progress.evaluations)]["update"]

    def _take_best(self) -> None:
        """Loads the best evaluation's parameters into trainer and sampler."""
        if self._best != self.progress.update:
            self._push(self.trainer.take(self._folder / BEST))

    def _auroc(self, groups: list[rollout.Group], scores: rollout.Scores) -> float | None:
        return multihost.first(rollout.step_auroc, groups, scores, self.working)

    def refresh(self, groups: list[rollout.Group]) -> None:
        """Trains the PRM on the groups' steps; adopts it if its AUROC on held-out steps has not fallen.

        Appends {"update", "before", "after", "adopted"} to `progress.refreshes` and logs it. An AUROC is `None` without
        both right and wrong steps; then the PRM stays. Does nothing if no step has a label. Blocks until the PRM is
        trained. Raises as the functions `refresh.fresh` and `refresh.refreshed`.
        """
        progress, config = self.progress, self.config
        records = refresh.fresh(config, self._prm, groups, self.working, self.problems.verifier, self.samples.policy)
        folder = refresh.refreshed(config, self._folder, self._prm, records, progress.update)
        if folder is None:
            return
        new, held = loading.load(folder, dtype=config.prm_dtype or None), self.samples.held_out(rollout.STREAM)
        drawn = [group.samples for group in held]
        before = self._auroc(held, [group.scores or [] for group in held])
        after = self._auroc(held, rollout.scored(new, self.held_out, drawn))
        adopted = before is not None and after is not None and after >= before
        outcome = {"update": progress.update, "before": before, "after": after, "adopted": adopted}
        progress.refreshes.append(outcome)
        if adopted:
            progress.prm = f"{refresh.FOLDER}/{progress.update}"
            self.samples.adopt(new)
        self.log.write({"step": int(self.trainer.state.step), **{f"refresh_{k}": x for k, x in outcome.items()}})

    def write(self, finished: bool) -> dict[str, Any]:
        """Writes `rl.json` atomically, in process 0, and returns it; `finished` is false while the run goes on.

        Keys: `version`, `name`, `finished`, `verdict` (sentences), `ended` (by which guard, or ""), `update`,
        `sampled_tokens`, `best` (an index into `evaluations`), `experiment`, `evaluations`, `fresh` (at the end, the
        best policy's evaluation, else `None`) and `refreshes`.
        """
        progress, config = self.progress, self.config
        result = {
            "version": VERSION, "name": config.name, "finished": finished,
            "verdict": verdict(progress.evaluations, progress.ended, config.seed, progress.fresh),
            "ended": progress.ended, "update": progress.update, "sampled_tokens": progress.tokens,
            "best": best_of(progress.evaluations), "experiment": to_json(config),
            "evaluations": progress.evaluations, "fresh": progress.fresh, "refreshes": progress.refreshes,
        }  # fmt: skip
        if multihost.is_first():
            write_json(self._folder / RESULT, result)
        return result

    @property
    def _folder(self) -> Place:
        assert self.trainer.workdir is not None
        return self.trainer.workdir

    def _save_best(self) -> None:
        """Saves the parameters as a separate run.

        This evaluation's checkpoint is complete first. So a continued run has the parameters from the best evaluation
        it knows in best/, or as its own.
        """
        state, trainer, folder = self.trainer.state, self.trainer, self._folder / BEST
        assert trainer.checkpoints is not None
        trainer.checkpoints.wait()
        id = store.claim(folder, trainer.experiment, trainer.tokenizer)
        mark_own(folder / RUN)
        with store.open_checkpoints(folder, keep=2) as best, jax.set_mesh(trainer.mesh):
            parts = {"params": join(state.trained, state.frozen), "run": {ID: id}}
            best.save_checkpointables_async(int(state.step), store.savable(parts), overwrite=True)

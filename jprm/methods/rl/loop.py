"""`train`: a policy learns from its own samples, update by update, and from its newest checkpoint on.

An update is a function of the parameters, the seed and its number: problems, samples, rewards and scores are made anew
from them. So a run that was killed anywhere, and continued, ends bit for bit like one that was not (on one mesh).

Every process runs this loop. The learner's parameters are split over the devices of all processes. Each process samples
and judges a part of the problems on its own devices, with a copy of the policy. All processes then learn from the same
groups. Process 0 writes. With `sampling_hosts` the last processes sample and judge meanwhile
(`jprm.methods.rl.sampling_hosts`), and the others run this loop.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
import scipy  # its parts are loaded when they are first used

from jprm import loading, multihost
from jprm.checkpoints import store
from jprm.experiment import from_json, to_json
from jprm.io.jsonl import parse
from jprm.io.outputs import digest, write_json
from jprm.io.storage import Place, path_of
from jprm.methods.agents import environment
from jprm.methods.decoding.sampler import Sampler
from jprm.methods.evaluate.blocks import decided, percent, points
from jprm.methods.policy.engine import Probes, RemoteSampler
from jprm.methods.policy.protocol import Prefix
from jprm.methods.rl import RESULT, refresh, rollout, sampling_hosts
from jprm.methods.rl.config import METHODS, GuardConfig, RLExperiment, learner
from jprm.methods.rl.sampling import Ahead, Carrying, Here, Problems, Samples, SampleSource, Servers, sampler_options
from jprm.methods.rl.sampling_hosts import SamplingHosts
from jprm.methods.verify import verifiers
from jprm.model.attention import chain_rows
from jprm.model.mesh import mesh_by_heads, own_mesh
from jprm.model.parameters import join
from jprm.pack import PackReport
from jprm.rows import Rows
from jprm.statistics import mean_differences
from jprm.tokenizer import Layout, native_layout
from jprm.train import Stopped, Trainer, stop_signal
from jprm.train.callbacks import Callback, Log, Watchdog

BEST = "best"

PROBES = 16
"""Held-out problems of whose samples an engine must know the probability after every push."""

VERSION = 1
"""Of rl.json."""

CONFIG = "rl_experiment.json"
FREE = ("policy", "updates", "mesh", "engine", "sampling_hosts", "checkpoint_every", "keep", "stall_seconds",
        "trackers")  # fmt: skip
"""Fields that may differ when a run continues. With other `updates` the schedule is computed anew."""


def train(config: RLExperiment, workdir: str | os.PathLike, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Trains to `config.updates`, or until a guard ends the run, from the newest checkpoint in `workdir`.

    Returns what it also writes to `rl.json`: the verdict, and the figures of every evaluation. `workdir` is a run of
    the policy, `workdir`/best one of its best evaluation.

    Raises:
        ValueError: `workdir` holds another experiment's run, or parts of the experiment do not fit each other.
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
    """Does in the processes that learn what `train` does."""
    workdir, progress, experiment = path_of(workdir), Progress(), learner(config)
    multihost.first(claim_rl, workdir, config)
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
    """The updates of one run. `at(update, phase)` is called before each phase."""

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
        """Returns whom the experiment has sample, with the policy `name`'s parameters."""
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
        """The folder of the PRM that scores; empty where there is none."""
        return str(self._folder / self.progress.prm) if self.progress.prm else self.config.prm

    def _name(self, step: int) -> str:
        return f"{self.trainer.workdir}@{step}"

    def _check_records(self, layout: Layout) -> None:
        """Raises ValueError where problems are held out and trained on, or too long for a row."""
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
        """Runs the remaining updates; returns whether it was asked to stop before the last."""
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
        """Samples, judges and learns from one update's problems, and pushes the parameters to the sampler."""
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
        """Returns an update's groups, or its records of demonstrations, and figures."""
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
        """Returns the rows of one step of the optimizer, what packing did, and the number of sampled tokens."""
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
        """One step of the optimizer; `close` writes the update's line."""
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
        """Evaluates the policy and asks the guards."""
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
        """Returns the figures of held-out groups; see `rollout.evaluation`."""
        return multihost.first(rollout.evaluation, groups, self.working, self.config.seed)

    def _check_gaming(self) -> dict[str, Any]:
        """Returns the guard's test of the best policy and the present one on fresh samples of both."""
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
        """Evaluates the best policy on fresh samples, at the end of the run. A run that a guard ended keeps it."""
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
        """Gives trainer and sampler the parameters of the best evaluation."""
        if self._best != self.progress.update:
            self._push(self.trainer.take(self._folder / BEST))

    def _auroc(self, groups: list[rollout.Group], scores: rollout.Scores) -> float | None:
        return multihost.first(rollout.step_auroc, groups, scores, self.working)

    def refresh(self, groups: list[rollout.Group]) -> None:
        """Trains the PRM on the update's steps; adopts it if its AUROC on fresh held-out steps has not fallen."""
        progress, config = self.progress, self.config
        source = cast(Here, self.samples).source  # the experiment refuses sampling_hosts
        records = refresh.fresh(config, self._prm, groups, self.working, self.problems.verifier, source.policy)
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
            progress.prm, source.prm = f"{refresh.FOLDER}/{progress.update}", new
        self.log.write({"step": int(self.trainer.state.step), **{f"refresh_{k}": x for k, x in outcome.items()}})

    def write(self, finished: bool) -> dict[str, Any]:
        """Writes `rl.json`, in process 0, and returns it."""
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
        """Saves the parameters as a run of their own.

        The checkpoint of this evaluation is complete before. So a run that continues has the parameters of the best
        evaluation that it knows in best/, or as its own.
        """
        state, trainer, folder = self.trainer.state, self.trainer, self._folder / BEST
        assert trainer.checkpoints is not None
        trainer.checkpoints.wait()
        multihost.first(store.claim, folder, trainer.experiment, trainer.tokenizer)
        with store.open_checkpoints(folder, keep=2) as best, jax.set_mesh(trainer.mesh):
            params = {"params": join(state.trained, state.frozen)}
            best.save_checkpointables_async(int(state.step), store.savable(params), overwrite=True)


# ------------------------------------------------------------------------------------------- what a run knows of itself


def claim_rl(workdir: Place, config: RLExperiment) -> None:
    """Writes the experiment into its folder. Raises ValueError where another experiment's run is there."""
    path = workdir / CONFIG
    if path.exists() and store.saved(workdir):
        recorded = from_json(RLExperiment, parse(path.read_bytes(), str(path)))
        store.check_experiment(path, to_json(recorded), to_json(config), FREE)
    judges: dict[str, Any] = {"working": verifiers.find_working(config.working)}
    if config.environment:
        judges["environment"] = environment.find(config.environment.name)
    else:
        judges["verifier"] = verifiers.find(config.verifier)
    digests = {name: digest(judge) for name, judge in judges.items()}
    store.keep_digests(
        workdir, digests | {file: store.data_digest(file) for file in (*config.problems, *config.held_out)}
    )
    write_json(path, to_json(config))


@dataclasses.dataclass
class Progress:
    """What a checkpoint holds beside the state: a `Position` of the trainer."""

    update: int = 0
    tokens: int = 0  # sampled, or of demonstrations, in all updates
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ended: str = ""  # the guard that ended the run, in words
    fresh: dict[str, Any] | None = None  # at the end of the run, the best policy's evaluation on fresh samples
    prm: str = ""  # the adopted refresh, a folder in that of the run; empty: the experiment's PRM
    refreshes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ahead: list[Ahead] = dataclasses.field(default_factory=list)
    lengths: dict[str, float] = dataclasses.field(default_factory=dict)  # mean tokens of a problem's last samples

    def get_state(self) -> dict[str, Any]:
        ahead = [batch.json() for batch in self.ahead]
        return copy.deepcopy({name: value for name, value in vars(self).items() if name != "ahead"}) | {"ahead": ahead}

    def set_state(self, state: dict[str, Any]) -> None:
        known = {field.name for field in dataclasses.fields(self)}
        vars(self).update({name: value for name, value in state.items() if name in known})
        self.ahead = [Ahead.of_json(batch) for batch in state.get("ahead", [])]


# ----------------------------------------------------------------------------------------------- guards and the verdict
#
# Whether an evaluation ends the run, and the run's verdict in words. Pure functions of the evaluations.
#
# The gaming guard looks at every evaluation, and the best of many evaluations is lucky: compared with it at 95 %, most
# long runs whose accuracy never changes look worse at some time. So a comparison raises no more than a suspicion. Then
# both policies draw fresh samples, and one test on these decides.

Evaluation = Mapping[str, Any]

FALSE_ALARMS = 0.05
"""The most of the runs without a loss of accuracy that the gaming guard ends, whatever their length."""

SUSPICION = 0.025
"""The p-value below which an evaluation looks worse than the best one."""


def best_of(evaluations: Sequence[Evaluation]) -> int:
    """Returns the index of the evaluation with the most correct answers, the first of equals."""
    return int(np.argmax([evaluation["gold"] for evaluation in evaluations]))


def suspected(evaluations: Sequence[Evaluation], config: GuardConfig) -> bool:
    """Returns whether the last evaluation looks like gaming: a higher PRM's score and fewer correct answers."""
    now, best = evaluations[-1], evaluations[best_of(evaluations)]
    if not config.gaming or "proxy" not in now or not now["proxy"] > best["proxy"]:
        return False
    return p_worse(best, now) < SUSPICION


def fresh_test(best: Evaluation, now: Evaluation, earlier: int, seed: int) -> dict[str, Any]:
    """Returns the test of a suspicion on fresh samples of both policies, as JSON holds it.

    The k-th test of a run rejects at p < FALSE_ALARMS / (k (k + 1)), levels whose sum over all k is FALSE_ALARMS. Fresh
    samples do not depend on what raised the suspicion, so by the union bound this sum bounds the false alarms of a run.

    Args:
        best, now: evaluations on the same problems, on samples that nothing was chosen by.
        earlier: the number of the run's tests before.
    """
    level = FALSE_ALARMS / ((earlier + 1) * (earlier + 2))
    change = {key: x for key, x in gold_change(best, now, seed).items() if key != "better"}
    return {"best": best["gold"], "now": now["gold"], **change, "p": p_worse(best, now), "level": level}


def p_worse(before: Evaluation, after: Evaluation) -> float:
    """Returns the one-sided p-value of "no fewer answers are correct after", by the t-test paired by problem."""
    change_P = np.array(after["gold_P"]) - np.array(before["gold_P"])
    if len(change_P) < 2 or change_P.mean() >= 0:
        return 1.0
    error = change_P.std(ddof=1) / math.sqrt(len(change_P))
    return float(scipy.special.stdtr(len(change_P) - 1, change_P.mean() / error)) if error else 0.0


def fired(evaluations: Sequence[Evaluation], config: GuardConfig) -> str:
    """Returns the guard that the last evaluation fires, in words; empty where none does.

    The evaluation has the key `check` where `fresh_test` tested a suspicion.
    """
    now, best = evaluations[-1], evaluations[best_of(evaluations)]
    if (test := now.get("check")) and test["p"] < test["level"]:
        return (
            f"gaming: the PRM's score rose from {best['proxy']:.3f} to {now['proxy']:.3f} since update {best['update']}"
            f" while correct answers changed by {points(test)} on fresh samples"
        )
    if config.kl_budget and (now.get("kl") or 0.0) > config.kl_budget:
        return f"KL budget: {now['kl']:.4f} nats a token from the start, more than {config.kl_budget:g}"
    if config.disagreement and now["disagreement"] is not None and now["disagreement"] > config.disagreement:
        return (
            f"disagreement: the two PRMs' scores of a step lie {now['disagreement']:.3f} apart, more than"
            f" {config.disagreement:g}"
        )
    return ""


def gold_change(before: Evaluation, after: Evaluation, seed: int) -> dict[str, Any]:
    """Returns the paired difference in correct answers over the same problems, `after` less `before`."""
    difference_P1 = np.array(after["gold_P"])[:, None] - np.array(before["gold_P"])[:, None]
    problems = [str(i) for i in range(len(difference_P1))]
    interval = mean_differences(difference_P1, problems, seed).json()
    return {key: value[0] for key, value in interval.items()}


def verdict(evaluations: Sequence[Evaluation], ended: str, seed: int, fresh: Evaluation | None = None) -> list[str]:
    """Returns what the run shows, a sentence each.

    `fresh` is the best policy's evaluation on samples that it was not chosen by, which a run has at its end. The
    samples that it was chosen by show it better than it is.
    """
    first, last, best = evaluations[0], evaluations[-1], evaluations[best_of(evaluations)]
    shown = (fresh or best) if ended else last
    change, where = gold_change(first, shown, seed), ", on fresh samples," if ended and fresh else ""
    if shown is first or (ended and best is first):
        sentences = [f"Correct answers: {percent(first['gold'])} % at the start. No later evaluation was better."]
    else:
        sentences = [
            f"Correct answers went from {percent(first['gold'])} % to {percent(shown['gold'])} %{where} at update"
            f" {shown['update']}: {points(change)} on the same problems, {decided(change)}."
        ]
    if ended:
        sentences.append(f"A guard ended the run at update {last['update']}, {ended}.")
        sentences.append(f"The parameters are those of the best evaluation, at update {best['update']}.")
    elif fresh and best is not last and gold_change(fresh, last, seed)["high"] < 0:
        sentences.append(
            f"Update {best['update']}, which best/ holds, was better than the last: {percent(fresh['gold'])} % on fresh"
            " samples."
        )
    tests = [evaluation["check"] for evaluation in evaluations if "check" in evaluation]
    if unconfirmed := sum(test["p"] >= test["level"] for test in tests):
        sentences.append(
            f"At {unconfirmed} of {len(evaluations)} evaluations the run looked like gaming, and fresh samples did"
            " not confirm it."
        )
    if "proxy" in first:
        moved = "rose" if last["proxy"] > first["proxy"] else "fell"
        sentences.append(
            f"The PRM's mean lowest score {moved} from {first['proxy']:.3f} to {last['proxy']:.3f} by update"
            f" {last['update']}."
        )
    sentences.append(
        f"Right working: {percent(first['working'])} % of chains at the start, {percent(shown['working'])} % at update"
        f" {shown['update']}. Tokens a chain: {first['tokens']:.1f} and {shown['tokens']:.1f}."
    )
    return sentences

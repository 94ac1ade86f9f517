"""Online PRM: the PRM continues learning from the current policy's steps.

A PRM knows the mistakes of the policy behind its data. As the policy moves, it makes others. Labels come from the check
of the working, from the policy's rollouts, or from the chains' outcomes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jprm import multihost
from jprm.experiment import RUN, Experiment, kind_of, read
from jprm.io.jsonl import dump, read_lines, write_records
from jprm.io.storage import Place
from jprm.methods.policy.protocol import Policy, Prefix
from jprm.methods.rl.config import RefreshConfig, RLExperiment
from jprm.methods.rl.rollout import Group
from jprm.methods.verify.verifiers import Verifier, Working
from jprm.options import place_of
from jprm.train import Trainer

FOLDER = "prm"


def check(config: RLExperiment) -> None:
    """Raises ValueError if the PRM is no run of jprm, or cannot learn from `refresh.labels`.

    Raises FileNotFoundError if its folder is absent. Reads no weights.
    """
    labels = config.refresh.labels
    if kind_of(config.prm) != "run":
        raise ValueError(f"refresh.every={config.refresh.every} trains the PRM, but {config.prm} is not a run of jprm")
    prm = read(place_of(config.prm) / RUN)
    supervise = prm.data.supervise
    if (labels == "outcome") != supervise.startswith("outcome"):
        takes = "'outcome'" if supervise.startswith("outcome") else "'working' or 'rollouts'"
        raise ValueError(f"{config.prm}: was trained with data.supervise={supervise!r}: set refresh.labels={takes}")
    if labels == "working" and prm.target.labels == "value":
        raise ValueError(
            f"{config.prm}: predicts values, but the check of the working gives verdicts: set refresh.labels='rollouts'"
        )


def verdicts_of_rollouts(
    groups: Sequence[Group], policy: Policy, verifier: Verifier, config: RefreshConfig
) -> list[list[list[float | None]]]:
    """Returns, by group, sample and step, the accepted fraction of the policy's completions.

    Failed and cut-off ones count as rejected. The last step has 1 if the chain's own reward is at least 1, else 0.
    Samples beyond a problem's first `config.chains` have `None` at each step. Draws `config.rollouts` completions per
    other step, in one call.

    Raises as `policy.sample` and `Verifier.rewards`.
    """
    records = {
        Prefix(group.record["problem"], sample.steps[:end]): group.record
        for group in groups
        for sample in group.samples[: config.chains]
        for end in range(1, len(sample.steps))
    }
    drawn = policy.sample(list(records), config.rollouts, until="end", seed=0)
    completions = [(record, prefix, samples) for (prefix, record), samples in zip(records.items(), drawn, strict=True)]
    value = dict(zip(records, (float(np.mean(right)) for right in verifier.accepts(completions)), strict=True))

    def of_chain(group: Group, i: int) -> list[float | None]:
        steps = group.samples[i].steps
        if not steps or i >= config.chains:
            return [None] * len(steps)
        inner = [value[Prefix(group.record["problem"], steps[:end])] for end in range(1, len(steps))]
        return [*inner, float(group.reward_G[i] >= 1)]

    return [[of_chain(group, i) for i in range(len(group.samples))] for group in groups]


def labelled(
    groups: Sequence[Group],
    verdicts: Sequence[Sequence[Sequence[float | None]]],
    semantics: Literal["value", "correctness", "rating"],
) -> list[dict[str, Any]]:
    """Returns pool records with the groups' chains and a label for each step with a verdict in [0, 1].

    A record is {"problem", "samples": [{"steps", "labels"}], "semantics"}. Chains without a verdict, and groups without
    such chains, are left out.

    Args:
        verdicts: by group, sample and step; `None` gives the label `None`. Raises ValueError for other counts of
            groups, samples or steps.
        semantics: with `value` a label is the verdict itself. With `correctness` it is 1.0 or 0.0, with `rating` 1.0 or
            -1.0: any verdict above 0 is right, Math-Shepherd's hard estimate.
    """
    of_verdict = {"value": float, "correctness": lambda x: float(x > 0), "rating": lambda x: 1.0 if x > 0 else -1.0}
    records = []
    for group, chains in zip(groups, verdicts, strict=True):
        samples = []
        for sample, verdict_P in zip(group.samples, chains, strict=True):
            if len(verdict_P) != len(sample.steps):
                problem = f"{group.record['problem'][:60]!r}"
                raise ValueError(f"{problem}: {len(verdict_P)} verdicts for a chain with {len(sample.steps)} steps")
            labels = [None if x is None else of_verdict[semantics](x) for x in verdict_P]
            if any(label is not None for label in labels):
                samples.append({"steps": list(sample.steps), "labels": labels})
        if samples:
            records.append({"problem": group.record["problem"], "samples": samples, "semantics": semantics})
    return records


def with_outcomes(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Returns pool records {"problem", "samples": [{"steps", "correct"}]} with the groups' chains and their outcomes.

    `correct` is true for the reward 1. Blank chains are left out, and groups with only blank ones.
    """
    records = []
    for group in groups:
        pairs = [(sample, bool(reward >= 1)) for sample, reward in zip(group.samples, group.reward_G, strict=True)]
        samples = [{"steps": list(sample.steps), "correct": right} for sample, right in pairs if sample.steps]
        if samples:
            records.append({"problem": group.record["problem"], "samples": samples})
    return records


def fresh(
    config: RLExperiment, prm: str, groups: Sequence[Group], working: Working, verifier: Verifier, policy: Policy
) -> list[dict[str, Any]]:
    """Returns records with the groups' chains and labels from `refresh.labels`, in the semantics of the PRM in `prm`.

    With "outcome" they are `with_outcomes`, else `labelled`. Every process must call it: each samples completions for
    some groups, and returns all records. Raises as `verdicts_of_rollouts` and `labelled`, or errors of `working`.
    """
    if config.refresh.labels == "outcome":
        return with_outcomes(groups)
    if config.refresh.labels == "rollouts":
        verdicts = multihost.spread(lambda part: verdicts_of_rollouts(part, policy, verifier, config.refresh), groups)
    else:
        verdicts = multihost.first(
            lambda: [[list(working(group.record, sample.steps)) for sample in group.samples] for group in groups]
        )
    return labelled(groups, verdicts, read(place_of(prm) / RUN).target.labels)


def refreshed(
    config: RLExperiment, workdir: Place, prm: str, records: Sequence[dict[str, Any]], update: int
) -> Place | None:
    """Trains the PRM in folder `prm` on an update's records; returns the new run's folder, or `None` without records.

    The folder is `workdir`/prm/UPDATE, and the records are written to `workdir`/prm/UPDATE.jsonl. Earlier updates'
    records and `refresh.replay` are included. It blocks for `refresh.steps` optimizer steps; a finished refresh is not
    computed again, and a stopped one begins anew. Every process must call it.

    Raises as `jprm.train.Trainer`, e.g. ValueError if the folder holds another experiment's run, and as its `step`,
    e.g. Diverged.
    """
    folder, experiment = workdir / FOLDER / str(update), read(place_of(prm) / RUN)
    if not records:
        return None
    files = multihost.first(lambda: _files(config, workdir / FOLDER, records, update))
    experiment = _experiment(config, experiment, prm, tuple(files), update)
    with Trainer(experiment, folder) as trainer:
        if not int(trainer.state.step):
            trainer.take(prm)  # as it is now
        left = experiment.steps - int(trainer.state.step)
        for rows in itertools.islice(trainer.batches, left):
            trainer.step(rows)
        if left:
            trainer.save()
    multihost.everywhere(True)  # before another process reads what process 0 has just completed
    return folder


def _files(config: RLExperiment, folder: Place, records: Sequence[dict[str, Any]], update: int) -> list[str]:
    """Writes an update's records, and returns the names of all files to train on."""
    earlier = [folder / f"{n}.jsonl" for n in range(config.refresh.every, update, config.refresh.every)]
    folder.mkdir(exist_ok=True)
    file, lines = folder / f"{update}.jsonl", [dump(record).encode() + b"\n" for record in records]
    if not file.is_file() or [line for _, line in read_lines(file)] != lines:  # in a bucket they would be new data
        write_records(file, records)
    return list(map(str, (file, *(path for path in earlier if path.is_file()), *config.refresh.replay)))


def _experiment(config: RLExperiment, prm: Experiment, folder: str, files: tuple[str, ...], update: int) -> Experiment:
    optimizer = dataclasses.replace(
        prm.optimizer, learning_rate=config.refresh.learning_rate, warmup_steps=0, decay="constant"
    )
    return dataclasses.replace(
        prm, name=f"{config.name}_prm_{update}", base=folder, tokenizer=folder, optimizer=optimizer, probe_rows=0,
        data=dataclasses.replace(prm.data, train=files, valid=(), seed=update), steps=config.refresh.steps,
        checkpoint_every=config.refresh.steps, keep=1, keep_every=0, mesh=config.mesh,
    )  # fmt: skip

"""A policy and a PRM of random parameters over 16 characters, problems, and an experiment that takes seconds."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import tokenizers
from tiny import TINY, params
from tiny_run import experiment as run_experiment
from tokenizers import Regex, decoders, models, pre_tokenizers

from jprm.checkpoints import store
from jprm.experiment import OptimizerConfig, to_json
from jprm.io.jsonl import write_records
from jprm.methods.rl.config import RefreshConfig, RLExperiment
from jprm.methods.rl.credit import CreditConfig
from jprm.methods.rl.engine import EngineConfig
from jprm.methods.rl.samples import Rollout

PIECES = ("<eos>", "\n", " ", *"0123456789", "+", "=", "?")
POLICY = dataclasses.replace(TINY, vocab_size=len(PIECES), head="language", attention="reference", remat="nothing")
PRM = dataclasses.replace(POLICY, head="binary")


def reward(record, steps):
    """The verifier: the answer's digit is in the last step."""
    return float(str(record["answer"]) in steps[-1])


def working(record, steps):
    """A step is right if it has an even digit, not checkable without a digit."""
    return [None if not set(step) & set("0123456789") else bool(set(step) & set("02468")) for step in steps]


def save_run(folder, model, seed, scale, **changes):
    """A run's folder as training leaves it; `changes` of its experiment."""
    inner = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<eos>"])
    weights = dict(params(model, seed))
    weights["decoder"] = {**weights["decoder"], "embed": weights["decoder"]["embed"] * scale}  # flatter, or steeper
    save(folder, inner, {"eos_token": "<eos>"}, model, weights, **(dict(rows=4) | changes))


def save(folder, tokenizer, config, model, weights, **changes):
    """A run's folder with this tokenizer, its `config`, and these weights."""
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "experiment.json").write_text(json.dumps(to_json(run_experiment(folder, model=model, **changes))))
    with store.open_checkpoints(folder, 1) as checkpoints:
        checkpoints.save_checkpointables(1, {"params": jax.tree.map(jax.numpy.asarray, weights)})


def chain(*steps, ended=True):
    """A sample with a token a step, or one token in all."""
    ids = tuple(range(1, len(steps) + 1))
    return Rollout(ids or (0,), np.zeros(max(len(ids), 1), np.float32), ids, steps, ended)


def make(folder):
    """Writes everything that `experiment(folder)` names."""
    save_run(folder / "policy", POLICY, 0, 0.3)
    save_run(folder / "prm", PRM, 1, 1.0)
    rng = np.random.default_rng(0)
    seen = [f"{a}+{b}=?" for a in range(10) for b in range(10)]
    records = [{"problem": p, "answer": int(p[0]), "steps": [p[:-1] + p[0], p[0]]} for p in rng.permutation(seen)]
    write_records(folder / "problems.jsonl", records[:24])
    write_records(folder / "held_out.jsonl", records[24:44])
    chains = [["".join(rng.choice(PIECES[3:], rng.integers(1, 6))) for _ in range(3)] for _ in range(200)]
    labels = [[None if right is None else 2.0 * right - 1 for right in working({}, steps)] for steps in chains]
    write_records(folder / "rated.jsonl", [
        {"problem": f"{i}+{i}=?", "steps": steps, "labels": labels_of, "semantics": "rating"}
        for i, (steps, labels_of) in enumerate(zip(chains, labels, strict=True))
    ])  # fmt: skip
    return folder


def servable(folder):
    """As `make`, with a policy that is a Qwen2, which a push can be written as."""
    make(folder)
    shutil.rmtree(folder / "policy")
    save_run(folder / "policy", dataclasses.replace(POLICY, qk_norm=False), 0, 0.3)
    return folder


def refresh(folder):
    return RefreshConfig(every=4, steps=30, learning_rate=0.01, replay=(str(folder / "rated.jsonl"),))


def ahead(data, **changes):
    """Samples drawn ahead, two minibatches, every second update a checkpoint.

    Adam's eps is above most gradients: else its first steps, of a rate each way, would turn rounding errors of
    gradients near zero into whole rates.
    """
    values = dict(
        updates=4, evaluate_every=2, evaluate_samples=2, stale=1, objective_options={"truncate": 2.0},
        optimizer=OptimizerConfig(learning_rate=0.02, decay="constant", eps=0.1),
    )  # fmt: skip
    return experiment(data, **(values | changes))


def by_engine(data, url, folder="", **changes):
    """Only by the verifier, with samples that engines draw."""
    values = dict(
        prm="", credit=CreditConfig("verifier", "rloo", "constant", length=16), max_tokens=12,
        optimizer=OptimizerConfig(learning_rate=0.02, decay="constant", eps=0.1),
        engine=EngineConfig(
            url, dtype="float32", tolerance=1e-3, timeout_s=60, patience_s=2.0, folder=str(folder)
        ),
    )  # fmt: skip
    return experiment(data, **(values | changes))


def stormy(folder):
    """Every phase several times: samples drawn ahead, refreshes by rollouts, a second PRM."""
    folder = pathlib.Path(folder)
    return experiment(
        folder, updates=4, stale=1, objective_options={"truncate": 2.0}, evaluate_samples=2,
        second_prm=str(folder / "prm"),
        refresh=RefreshConfig(2, 5, 0.01, (str(folder / "rated.jsonl"),), "rollouts", rollouts=2, chains=2),
    )  # fmt: skip


def experiment(folder, **changes):
    values = dict(
        name="tiny", policy=str(folder / "policy"), problems=(str(folder / "problems.jsonl"),),
        held_out=(str(folder / "held_out.jsonl"),), prm=str(folder / "prm"), verifier="tiny_rl:reward",
        working="tiny_rl:working", credit=CreditConfig("min_form", "rloo", "constant", length=16, offset=-1.0),
        optimizer=OptimizerConfig(learning_rate=0.02, decay="constant"), updates=4, problems_an_update=4, samples=4,
        max_tokens=16, tokens=256, micro_rows=4, minibatches=2, evaluate_every=2, evaluate_samples=4,
        checkpoint_every=2,
    )  # fmt: skip
    return RLExperiment(**(values | changes))

"""A training run that takes seconds: synthetic trees, a tokenizer of bytes, two narrow layers.

Everything that a run needs comes from a folder's path, so that a process started by a test can build it too.
"""

import contextlib
import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from tiny import TINY
from tokenizers import decoders, models, pre_tokenizers

from jprm import loading
from jprm import train as training
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig, to_json
from jprm.io.jsonl import write_records
from jprm.methods.formats.adapters import load as published
from jprm.model.mesh import MeshConfig, make_mesh

MODEL = dataclasses.replace(TINY, vocab_size=256, attention="reference", remat="nothing")  # the quickest way so small
VALUE = TargetConfig(labels="value", neutral="none", after_error="keep")
WORDS = ("add", "bad", "cut", "dot", "end", "far")


@dataclasses.dataclass(frozen=True)
class Run:
    folder: pathlib.Path
    experiment: Experiment
    result: dict[str, Any]


def save_tokenizer(path):
    """One token a byte: nothing to train, and every text has ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.save(str(path))


def steps_of(rng, count):
    return [f"{rng.choice(WORDS)} {rng.integers(10)}" for _ in range(count)]


def rating_of(text):
    return -1 if "bad" in text else 0 if "cut" in text else 1


def trees(count, seed=0):
    """Rated trees of up to eight steps, which branch anywhere and often begin alike."""
    rng = np.random.default_rng(seed)
    return [
        {
            "problem": f"p{seed} {i}",
            "nodes": [
                {"parent": int(rng.integers(-1, n)), "text": text, "label": rating_of(text)}
                for n, text in enumerate(steps_of(rng, int(rng.integers(2, 9))))
            ],
            "semantics": "rating",
        }
        for i in range(count)
    ]


def chains(count, seed=0, longest=8):
    """Rated chains whose outcome is right if no step is wrong, with a key that jprm does not know."""
    rng = np.random.default_rng(seed)
    records = []
    for i in range(count):
        steps = steps_of(rng, int(rng.integers(1, longest + 1)))
        ratings = [rating_of(step) for step in steps]
        records.append(
            {
                "id": f"c{i}",
                "problem": f"q{seed} {i}",
                "steps": steps,
                "labels": ratings,
                "semantics": "rating",
                "correct": -1 not in ratings,
                "mine": {"kept": [i, None]},
            }  # fmt: skip
        )
    return records


def experiment(folder, **changes) -> Experiment:
    """An experiment on the files that `make_data` puts into the folder; fields of `data` may be changed by name too."""
    base = dict(
        train=(str(folder / "train.jsonl"),), supervise="step", too_long="error", valid=(str(folder / "valid.jsonl"),),
        tokens=128, slots=32, rows=8, micro_rows=4, window=16,
    )  # fmt: skip
    names = {field.name for field in dataclasses.fields(DataConfig)} - {"seed"}
    data = DataConfig(**(base | {name: value for name, value in changes.items() if name in names}))
    values = dict(
        name="tiny", model=MODEL, tokenizer=str(folder / "tokenizer.json"), data=data,
        target=TargetConfig(labels="rating", neutral="positive", after_error="keep"), objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=2, weight_decay=0.1),
        steps=6, log_every=2, checkpoint_every=3,
    )  # fmt: skip
    return Experiment(**(values | {name: value for name, value in changes.items() if name not in names}))


def of_two_processes(folder, **changes) -> Experiment:
    """What two processes of four devices train: every row over two of them."""
    values = dict(
        mesh=MeshConfig(context=2), steps=6, rows=16, micro_rows=8, log_every=1, checkpoint_every=4, streams=2,
    )  # fmt: skip
    return experiment(folder, **(values | changes))


def write_experiment(path, config):
    """Writes an experiment as a file of Python, which reads it from a file of JSON beside it; returns its path."""
    kind, values = type(config), path.with_suffix(".json")
    values.write_text(json.dumps(to_json(config)))
    path.write_text(
        f"import json\n\nfrom jprm.experiment import from_json\nfrom {kind.__module__} import {kind.__name__}\n\n\n"
        f"def experiment():\n    return from_json({kind.__name__}, json.load(open({str(values)!r})))\n"
    )
    return path


def make_data(folder):
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder / "tokenizer.json")
    write_records(folder / "train.jsonl", trees(40))
    write_records(folder / "valid.jsonl", trees(12, seed=1))
    return folder


@contextlib.contextmanager
def one_device(count=1):
    """Training and scoring on only the first device, or the first `count`."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (training, loading, published):
            patch.setattr(module, "make_mesh", lambda config, devices=None: make_mesh(config, jax.devices()[:count]))
        yield


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def untimed(values):
    """The metrics without what a clock says."""
    return [
        {
            k: v
            for k, v in line.items()
            if "second" not in k and k not in ("goodput", "mfu") and not k.startswith("lost_")
        }
        for line in values
    ]


def params(folder):
    """The newest checkpoint's parameters as numpy arrays."""
    with one_device():
        return jax.tree.map(np.asarray, loading.load(folder).params)


def equal(a, b):
    """Whether two trees of arrays are the same bit for bit."""
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and x.tobytes() == y.tobytes(), a, b)
    return all(jax.tree.leaves(same))


def assert_same_run(folder, other):
    """Two runs have the same parameters and, but for what a clock says, the same log."""
    assert equal(params(folder), params(other))
    assert untimed(lines(folder)) == untimed(lines(other))


def pool_of(records):
    """Samples of the chains' steps, for one problem."""
    samples = [{"steps": record["steps"], "correct": record["correct"], "note": i} for i, record in enumerate(records)]
    return {"problem": "q", "samples": samples, "answer": "12", "source": {"of": "chains"}}


def processbench_file(path, count, seed):
    firsts = [-1 if chain["correct"] else chain["labels"].index(-1) for chain in chains(count, seed)]
    items = [
        {"id": f"{path.stem}-{i}", "generator": "none", "problem": chain["problem"], "steps": chain["steps"],
         "final_answer_correct": chain["correct"], "label": first}
        for i, (chain, first) in enumerate(zip(chains(count, seed), firsts, strict=True))
    ]  # fmt: skip
    assert {first >= 0 for first in firsts} == {True, False}
    path.write_text(json.dumps(items))  # as released: one JSON list
    return path


def pool_file(path):
    pools = [pool_of(chains(4, seed)) | {"problem": f"pool {seed}"} for seed in range(3)]
    pools[0]["samples"].append({"steps": [], "correct": False})
    write_records(path, pools)
    return path

"""What any objective must hold: the registered ones, one of a file outside the library, and one with a reference.

To try an objective of your own, add a `Case`.
"""

import dataclasses
import pathlib
import re
import shutil
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import breadth
from refusing import refused
from tiny import Characters, chain_ids
from tiny_run import MODEL, VALUE, assert_same_run, equal, experiment, lines, make_data, one_device, pool_of, training
from tiny_run import chains as rated_chains

import jprm
from jprm import objectives
from jprm import options as parts
from jprm.experiment import ObjectiveConfig, TargetConfig, read_record, written
from jprm.io.jsonl import write_records
from jprm.methods.implicit import Implicit
from jprm.methods.label.jobs import label_reference
from jprm.methods.rl.samples import Rollout, group_tree
from jprm.model.mesh import put_rows
from jprm.model.parameters import Int8
from jprm.model.transformer import step_logits
from jprm.objectives import Mean
from jprm.pack import pack
from jprm.testing import examine
from jprm.token_tree import TokenTree, token_tree
from jprm.tree import ReasoningTree, chains_of, tree_of

FILE = pathlib.Path(__file__).with_name("pairwise.py")


@dataclasses.dataclass(frozen=True)
class Case:
    objective: str
    head: str
    target: TargetConfig = TargetConfig("rating", "positive", "keep")
    supervise: str = "step"
    reference: bool = False
    options: tuple = ()
    tokenised: Callable[[ReasoningTree], TokenTree] | None = None  # by default as `data.supervise` says
    extras: tuple = ()


def sampled(tree):
    """The tree's whole chains as a group of samples, which a policy drew that knew nothing."""
    layout, inner = Characters(end=1), {node.parent for node in tree.nodes}
    chains = [chain_ids(tree, leaf, layout) + [1] for leaf in range(len(tree.nodes)) if leaf not in inner]
    prompt = layout.problem(tree.problem)
    drawn = [tuple(ids[len(prompt) :]) for ids in chains]
    samples = [Rollout(ids, np.full(len(ids), -5.5, np.float32), (), (), True) for ids in drawn]
    advantage = [(-1.0) ** g * np.linspace(0.5, 1.5, len(sample.ids)) for g, sample in enumerate(samples)]
    return group_tree(tree.problem, prompt, samples, advantage)


def pull(params, rows, config):
    """The squared distance from the reference's logits: the least that looks at a second model."""
    far_BSC = step_logits(params["model"], config.model, rows) - step_logits(params["reference"], config.model, rows)
    total, count = jnp.sum(rows.weight * jnp.sum(far_BSC**2, axis=-1)), jnp.sum(rows.weight)
    return total, count, {"distance": Mean(total, 2 * count)}


def level(params, rows, config):
    """The mean first logit: an objective for any head."""
    return jnp.sum(rows.weight * step_logits(params["model"], config.model, rows)[..., 0]), jnp.sum(rows.weight), {}


THIRD, TOKEN = TargetConfig("rating", "third", "keep"), TargetConfig("correctness", "none", "keep")
CASES = {
    "cross_entropy": Case("cross_entropy", "scalar"),
    "squared_error": Case("squared_error", "binary"),
    "ternary_cross_entropy": Case("ternary_cross_entropy", "ternary", THIRD),
    "next_token": Case("next_token", "language", TOKEN, "token"),
    "likelihood": Case("likelihood", "quantile"),
    "policy_gradient": Case("policy_gradient", "language", TOKEN, "token", reference=True, tokenised=sampled),
    "named_outputs": Case("named_outputs", "sigmoid=right,sum,unit", extras=("sum", "unit")),
    "softmax": Case("named_outputs", "softmax=right,sum,unit", extras=("sum", "unit")),
    "bradley_terry": Case("bradley_terry", "scalar"),
    "pqm": Case("pqm", "scalar"),
    "td_lambda": Case("td_lambda", "ensemble", VALUE, "outcome"),
    "implicit": Case("implicit", "language", VALUE, "outcome", reference=True),
    "dpo": Case("implicit", "language", VALUE, "outcome", reference=True, options=(("loss", "dpo"), ("beta", 0.5))),
    "pairwise": Case(f"{FILE}:bradley_terry", "binary"),
    "pull": Case(f"{__name__}:pull", "binary", reference=True),
}


def test_every_registered_objective_is_tried():
    assert set(objectives.OBJECTIVES) <= set(CASES)


QUICK = ("cross_entropy", "named_outputs", "bradley_terry", "policy_gradient")
OTHERS_HOLD = ("softmax", "pairwise")  # as `named_outputs` and `bradley_terry` do


@pytest.mark.parametrize("name", [
    *breadth((name for name in CASES if name not in OTHERS_HOLD), but=QUICK),
    *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS_HOLD),
])  # fmt: skip
def test_an_objective_is_the_same_packed_alone_split_and_on_four_devices(name):
    """With inert padding and finite gradients."""
    checks, case = ("packed", "devices", "gradients", "chains", "split"), CASES[name]
    report = examine(experiment_of(case, pathlib.Path("data"), layers=1), tokenise=case.tokenised, only=checks)
    print(report)
    report.check()
    lost = [row.check for row in report.rows if "pairs_lost" in row.note]
    assert lost == (["chains", "split"] if name in ("bradley_terry", "dpo", "pairwise") else [])


def run_of(case, folder, **changes):
    data = folder.parent / "data"
    if not data.exists():
        make_data(data)
        if case.supervise == "outcome":
            for name, seed in (("train", 0), ("valid", 1)):
                write_records(data / f"{name}.jsonl", [pool_of(rated_chains(4, seed=10 * i + seed)) for i in range(8)])
    return experiment_of(case, data, **changes)


def experiment_of(case, data, layers=2, **changes):
    values = dict(
        model=dataclasses.replace(MODEL, head=case.head, layers=layers, layer_groups=(layers,)), target=case.target,
        objective=case.objective, supervise=case.supervise, steps=4, log_every=1, checkpoint_every=2,
        objective_options=dict(case.options), extras=case.extras,
        reference=str(data.with_name("base")) if case.reference else "",
        reference_dtype="int8" if case.objective == "implicit" else "float32",
    )  # fmt: skip
    if case.supervise == "token":
        values |= dict(slots=128)
    if case.objective == "bradley_terry":
        values |= dict(tokens=32, window=4, siblings=True, too_long="truncate")
    return experiment(data, **(values | changes))


def train_base(case, tmp_path):
    """A step of the case's model, which is the reference of the case."""
    base = dataclasses.replace(case, objective=f"{__name__}:level", reference=False, options=())
    training.train(run_of(base, tmp_path / "x", steps=1, checkpoint_every=1), tmp_path / "base")


@pytest.mark.parametrize(
    "name",
    [
        *breadth(["bradley_terry"]),
        *(pytest.param(objective, marks=pytest.mark.slow) for objective in ("dpo", "pairwise", "pull")),
    ],
)
def test_resumed_is_undisturbed(name, tmp_path):
    """In the loop, with its log and its validation; a file's objective from the copy in the run's folder."""
    case, whole, cut = CASES[name], tmp_path / "whole", tmp_path / "cut"
    with one_device():
        if case.reference:
            train_base(case, tmp_path)
        if name == "pairwise":  # a file that is gone when the run continues
            case = dataclasses.replace(case, objective=f"{shutil.copy(FILE, tmp_path / 'mine.py')}:bradley_terry")
        result = training.train(run_of(case, whole), whole)
        shutil.copytree(whole, cut)
        shutil.rmtree(cut / "checkpoints" / "4")
        (tmp_path / "mine.py").unlink(missing_ok=True)
        training.train(run_of(case, whole), cut)
    assert_same_run(cut, whole)
    assert np.isfinite(result["valid_loss"]) and result["valid_labels"] > 0
    if name in ("bradley_terry", "dpo"):  # short rows: pairs are lost, and counted at every checkpoint
        lost = [line["pairs_lost"] for line in lines(whole) if "pairs_lost" in line]
        assert len(lost) == 2 and 0 < lost[0] < lost[1] == result["pairs_lost"]
        assert name == "dpo" or result["truncated_labels"] > 0
    if name == "pull":
        assert result["valid_distance"] == pytest.approx(result["valid_loss"] / 2)
    if name == "dpo":
        assert {"pair_accuracy", "valid_pair_accuracy"} <= set(result)
        scores_are_what_it_learned(case, whole)
    if name == "pairwise":
        assert {"pair_accuracy", "auroc", "valid_pair_accuracy", "valid_auroc"} <= set(result)
        assert jprm.load(whole).score("p", ["add 1"]).shape == (1,)  # scoring needs no objective
        (tmp_path / "mine.py").write_text(FILE.read_text() + "\n")
        with one_device(), pytest.raises(ValueError, match="mine.py"):
            training.train(run_of(case, whole), whole)


def scores_are_what_it_learned(case, folder):
    """A loaded run's last scores are the log ratios of which its loss is made."""
    with one_device():
        prm = jprm.load(folder)
    tree = tree_of(pool_of(rated_chains(4, seed=10)))
    chains = [[tree.nodes[i] for i in chain] for chain in chains_of(tree)]
    r = np.array([prm.score(tree.problem, [node.text for node in chain])[-1] for chain in chains])
    correct = np.array([chain[-1].correct for chain in chains])
    wanted = sum(np.log1p(np.exp(worse - better)) for better in r[correct] for worse in r[~correct])
    rows = pack([token_tree(tree, prm.layout, "outcome")], 512, 64, too_long="error").rows  # one row
    task = ObjectiveConfig(prm.config, case.target, reference=True, supervise="outcome")
    both = {"model": prm.params, "reference": prm.ratio.params}
    objective = jax.jit(objectives.find(case.objective, dict(case.options)), static_argnums=2)
    with jax.set_mesh(prm.mesh):
        loss, count, _ = objective(both, put_rows(rows, prm.mesh), task)
    assert count == correct.sum() * (~correct).sum() > 0 and prm.semantics == "implicit"
    assert isinstance(prm.ratio.params["decoder"]["embed"], Int8)  # as it was trained against
    np.testing.assert_allclose(loss, wanted, rtol=1e-4)  # float32 sums over the tokens of a tree and of chains


OWN = """
import dataclasses
from jprm.methods.implicit import Implicit

@dataclasses.dataclass(frozen=True)
class Mine(Implicit):
    beta: float = 0.5
"""


def test_a_run_scores_as_its_objective_says_whatever_its_name(tmp_path, one_device):
    """By the module's name, a file's class with another default, and an object given to `Trainer`."""
    case = CASES["implicit"]
    (tmp_path / "mine.py").write_text(OWN)
    names = {"file": (f"{tmp_path / 'mine.py'}:Mine", {}), "object": ("implicit", {"beta": 0.5})}
    names |= {"module": ("jprm.objectives.implicit:implicit", {"beta": 0.5})}
    score = {}
    train_base(case, tmp_path)
    for name, (objective, options) in names.items():
        run = run_of(case, tmp_path / "x", objective=objective, objective_options=options, steps=1, valid=())
        chosen = Implicit() if name == "object" else None
        with jprm.Trainer(run, tmp_path / name, objective=chosen) as trainer:
            trainer.save()  # before a step: its parameters differ from the reference's, which took one
    (tmp_path / "mine.py").unlink()  # scoring needs no objective
    for name in names:
        prm = jprm.load(tmp_path / name)
        assert prm.semantics == "implicit" and prm.ratio.scale == 0.5
        score[name] = prm.score("q", ["add 1", "add 2"])
    assert np.any(score["object"])
    for name in names:
        np.testing.assert_array_equal(score[name], score["object"])


def test_runs_that_do_not_record_how_they_score_are_read_by_their_objective(tmp_path, monkeypatch):
    """As versions before 0.2 wrote them."""
    for name in ("implicit", "jprm.objectives.implicit:implicit"):
        run = run_of(CASES["implicit"], tmp_path / "x", objective=name, objective_options={"beta": 0.5})
        (tmp_path / "experiment.json").write_text(written(run))
        assert read_record(tmp_path / "experiment.json") == (run, 0.5)
    # A clone from which `python -m jprm` runs is the current folder, and its own modules are no one else's.
    monkeypatch.setattr(parts, "_unasked", lambda: str(pathlib.Path(jprm.__file__).resolve().parent.parent))
    monkeypatch.delitem(sys.modules, "jprm.methods.implicit")
    assert read_record(tmp_path / "experiment.json") == (run, 0.5)
    level = dataclasses.replace(run, objective="cross_entropy", objective_options={})
    (tmp_path / "experiment.json").write_text(written(level))
    assert read_record(tmp_path / "experiment.json") == (level, None)


@pytest.mark.slow
def test_adapters_share_the_reference_they_train_on(tmp_path, one_device):
    """With the base as reference the objective starts at 0, and no second decoder is there."""
    case = CASES["pull"]
    training.train(run_of(CASES["squared_error"], tmp_path / "x", steps=1, checkpoint_every=1), tmp_path / "base")
    lora = dataclasses.replace(experiment(tmp_path).lora, rank=2)
    run = run_of(case, tmp_path / "x", base=str(tmp_path / "base"), lora=lora)
    trainer, apart = jprm.Trainer(run), jprm.Trainer(dataclasses.replace(run, base=f"{tmp_path / 'base'}/"))
    assert set(trainer.state.reference) == {"head"} and set(apart.state.reference) == {"decoder", "head"}
    rows = next(trainer.batches)
    metrics, others = trainer.step(rows), apart.step(rows)
    assert metrics.loss == others.loss
    assert equal(trainer.params, apart.params)


def test_a_reference_in_the_data_is_one_that_is_computed(tmp_path, one_device):
    """Labelled once, by a command that continues, and refused where it is another model's."""
    case, train = CASES["dpo"], tmp_path / "data/train.jsonl"
    run = run_of(case, tmp_path / "x", tokens=256, valid=(str(train),), reference_dtype="float32")
    train_base(case, tmp_path)
    counts = label_reference(tmp_path / "base", train, tmp_path / "labelled.jsonl")
    assert counts["trees"] == 8 and counts["log-probabilities"] > 8
    labelled = (str(tmp_path / "labelled.jsonl"),)
    data = dataclasses.replace(run.data, train=labelled, valid=labelled, extras=("reference",))
    stored = dataclasses.replace(run, data=data)
    trainer = jprm.Trainer(stored)
    assert trainer.state.reference == {}
    wanted, metrics = jprm.Trainer(run).evaluate(), trainer.evaluate()
    assert metrics["valid_labels"] == wanted["valid_labels"] > 0
    assert metrics["valid_loss"] == pytest.approx(wanted["valid_loss"], rel=1e-4)  # rows of another length
    other = dataclasses.replace(stored, reference=str(tmp_path / "other"))
    refused(ValueError, "'base'", jprm.Trainer(other).evaluate)
    unnamed = dataclasses.replace(data, train=(str(train),), valid=(str(train),))
    refused(ValueError, "label reference", jprm.Trainer(dataclasses.replace(run, data=unnamed)).evaluate)
    refused(ValueError, "`reference`", jprm.Trainer, dataclasses.replace(stored, reference=""))


HINGE = """
from __future__ import annotations
import dataclasses
from typing import Literal

@dataclasses.dataclass(frozen=True)
class Hinge:
    margin: float
    power: Literal[1, 2] = 1
    body: tuple = ()

    def __post_init__(self):
        if self.margin < 0:
            raise ValueError(f"margin={self.margin} must not be negative")

    def __call__(self, params, rows, config): ...

hinge = Hinge(1.0)

@dataclasses.dataclass
class Thawed:
    margin: float = 1.0

    def __call__(self, params, rows, config): ...
"""


def test_options_are_fields_of_the_objective(tmp_path):
    (tmp_path / "hinge.py").write_text(HINGE)
    file = f"{tmp_path}/hinge.py"
    changed, built = objectives.find(f"{file}:hinge", {"margin": 2}), objectives.find(f"{file}:Hinge", {"margin": 2.0})
    assert (changed.margin, changed.power) == (2.0, 1) and changed == built and hash(changed) == hash(built)
    assert objectives.find(f"{file}:hinge") == objectives.find(f"{file}:hinge", {"power": 1})
    known = re.escape("may set: margin (float), power (1 or 2): ")
    for name, options, message in [
        (f"{file}:hinge", {"margins": 1.0}, known + "margins: is no known field"),
        (f"{file}:hinge", {"body": (1,)}, known + "body: is no known field"),
        (f"{file}:hinge", {"margin": "wide"}, known + "margin: 'wide' is not a float"),
        (f"{file}:hinge", {"power": 3}, known + "power: 3 is not"),
        (f"{file}:hinge", {"margin": -1}, known + "margin=-1.0 must not be negative"),
        (f"{file}:Hinge", {}, known + ".*missing 1 required.*'margin'"),
        (f"{file}:Thawed", {"margin": 1.0}, "unhashable"),
        ("cross_entropy", {"beta": 1.0}, "known"),
        (f"{FILE}:bradley_terry", {"beta": 1.0}, "known"),
    ]:
        refused(ValueError, message, objectives.find, name, options)

"""docs/extending.md: every block runs, in order, in a folder that holds nothing but the run it starts from."""

import dataclasses
import importlib
import json
import re
import shlex
import sys

import numpy as np
import pytest
from pages import Shell, blocks
from refusing import refused
from scipy.special import comb
from scipy.stats import betabinom, norm
from stub_server import reply
from tiny_rl import save_run
from tiny_run import MODEL, save_tokenizer

import jprm
from jprm import options, testing
from jprm.experiment import ObjectiveConfig, TargetConfig
from jprm.methods.decoding.cache import LiveTrees
from jprm.rows import empty_rows
from jprm.tree import read_records

BLOCKS = blocks("docs/extending.md")
CHECK = r"^python -m jprm\.testing (?:.*\\\n)*.*\n"


def said(number, body):
    """A policy that writes one more step, and ends the chain at the second."""
    done = "2 * 3" in body["prompt"].partition("\n\n")[2]
    return reply("So 8." if done else "2 * 3 = 6.\n\n", tokens=4, stop_reason=None if done else "\n\n")


@pytest.fixture
def folder(one_device, serve, tmp_path, monkeypatch):
    """The page's folder: a run of a model that transformers has too, and the policy that server.json names."""
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path / "runs/tiny", dataclasses.replace(MODEL, qkv_bias=False), 0, 1.0)
    save_tokenizer(tmp_path / "runs/tiny/tokenizer.json")
    (tmp_path / "runs/tiny/tokenizer_config.json").write_text(json.dumps({"eos_token": "Ā"}))
    (tmp_path / "server.json").write_text(json.dumps({"url": serve(said).url, "model": "stub"}))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith((str(tmp_path), "focal", "probit", "beta")):
            del sys.modules[name]


@pytest.mark.breadth
def test_every_block_runs(folder, monkeypatch):
    named = ("graded", "focal", "probit", "look_back", "greedy", "confidence", "credited")
    assert {name for name, _, _ in BLOCKS} > {f"{name}.py" for name in named}
    shell = Shell(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name, language, block in BLOCKS:
        if name:
            (folder / name).write_text(block)
        else:
            assert language == "sh"
            for check in re.findall(CHECK, block, re.MULTILINE):  # the quick ones
                arguments = shlex.split(check.replace("\\\n", ""))[3:]
                quick = [] if "--only" in arguments else ["--only", "packed", "split", "live"]
                with shell.here():
                    assert testing.main(arguments + quick) == 0
            shell.run(re.sub(CHECK, "", block, flags=re.MULTILINE))

    for name, labels in {"graded": [[1, 1], [1, 0]], "strict": [[1, 1], [0, 0]]}.items():
        assert [chain["labels"] for chain in jprm.data.load(folder / f"data/{name}")] == labels

    prm = jprm.load("runs/mine")
    logit_P1 = prm.logits("What is 2 + 2 * 3?", ["2 * 3 = 6."])
    np.testing.assert_allclose(prm.score("What is 2 + 2 * 3?", ["2 * 3 = 6."]), norm.cdf(logit_P1[:, 0]), rtol=1e-6)
    assert (folder / "runs/mine/objective.py").read_text() == (folder / "focal.py").read_text()

    for run, scored in (("looking", "looked"), ("shifted", "shifted")):
        (chain, *_) = read_records(folder / f"{scored}.jsonl")
        trees = LiveTrees(loaded := jprm.load(f"runs/{run}"))
        handles = trees.open([chain["problem"]])
        for step, score in zip(chain["steps"], chain["scores"], strict=True):
            handles, live = trees.extend(handles, [step])
            assert live[0] == pytest.approx(score, abs=1e-4)
        assert run == "shifted" or "kernel" in loaded.params["steps"]
    (written,) = map(json.loads, (folder / "written.jsonl").read_text("utf-8").splitlines())
    assert written["search"]["method"] == "Greedy" and written["search"]["policy_tokens"] > 0

    (record,) = map(json.loads, (folder / "found.jsonl").read_text("utf-8").splitlines())
    assert record["search"]["method"] == "Greedy" and record["search"]["expand"] == 2 and record["search"]["correct"]
    shell.run("python credited.py")
    assert 0 < json.loads((folder / "confidence.json").read_text())["mean"]["value"] < 1

    shell.run("jprm score --model exported/tiny --input data/strict --output plain.jsonl")
    wrong, right = (
        np.concatenate([chain["scores"] for chain in read_records(folder / name)])
        for name in ("detected.jsonl", "plain.jsonl")
    )
    np.testing.assert_allclose(wrong, 1 - right, atol=2e-6)  # a softmax of two in float32, written with 6 digits


def test_the_head_for_counts_reads_them_and_not_labels(tmp_path, monkeypatch):
    """By scipy's Beta-binomial, with labels that are hard, an adaptive budget's estimate, and a known outcome."""
    (block,) = (block for name, _, block in BLOCKS if name == "beta_binomial.py")
    (tmp_path / "beta_binomial.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    part = importlib.import_module("beta_binomial")
    monkeypatch.delitem(sys.modules, "beta_binomial")
    label_M, n_M, k_M = np.array([[1, 0.3, 0, 1], [8, 12, np.nan, np.nan], [1, 7, np.nan, np.nan]])
    rows = empty_rows(1, 4, 4, ("rollouts", "right"))
    rows.step_end[:], rows.label[:], rows.weight[:] = np.arange(4), label_M, 1.0
    rows.extras["rollouts"][:], rows.extras["right"][:] = n_M, k_M
    model = dataclasses.replace(MODEL, head="beta_binomial:BETA")
    config = ObjectiveConfig(model, TargetConfig("value", "none", "keep"), extras=("rollouts", "right"))
    logit_M2 = np.array([[-1.0, 1.0], [0.5, -0.5], [2.0, 0.0], [-20.0, 20.0]], np.float32)
    right_M, wrong_M = np.exp(8 * np.tanh(logit_M2 / 8)).T
    n_M, k_M = np.where(np.isnan(n_M), 1, n_M), np.where(np.isnan(k_M), label_M, k_M)
    loss, count, _ = part.counts.of_logits(logit_M2[None], rows, config)
    ways_M = np.log(comb(n_M, k_M))  # the same for all parameters, and left out
    assert count == 4
    assert float(loss) == pytest.approx(np.sum(ways_M - betabinom.logpmf(k_M, n_M, right_M, wrong_M)), rel=1e-3)

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "beta_binomial", part)
        part.counts.check(config)
        target = config.target
        for message, other in {
            "beta_binomial:BETA": dataclasses.replace(config, model=MODEL),
            "soft=soft": dataclasses.replace(config, target=dataclasses.replace(target, soft="hard")),
            "labels=value": dataclasses.replace(config, target=dataclasses.replace(target, labels="correctness")),
            "smoothing=0": dataclasses.replace(config, target=dataclasses.replace(target, smoothing=0.2)),
            "lacks right": dataclasses.replace(config, extras=("rollouts",)),
        }.items():
            refused(ValueError, message, part.counts.check, other)


def test_a_file_is_run_once_and_its_objects_are_the_same(tmp_path):
    (tmp_path / "part.py").write_text("class Part: pass\nPART = Part()\n")
    name = f"{tmp_path}/part.py:PART"
    assert options.find_part(name, {}, "part", files=True) is options.find_part(name, {}, "part", files=True)
    (tmp_path / "part.py").write_text("PART = 1\n")
    assert options.find_part(name, {}, "part", int, files=True) == 1


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("beam", object, "part='beam'"),
        ("{}/none.py:PART", object, "there is no file"),
        ("{}/part.py:OTHER", object, "part.py"),
        ("{}/part.py:PART", str, "builtins.str"),
        ("json:OTHER", object, "PYTHONPATH"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, name, kind, message):
    (tmp_path / "part.py").write_text("PART = 1\n")
    refused(ValueError, message, options.find_part, name.format(tmp_path), {"known": 0}, "part", kind, files=True)


def test_a_models_folder_runs_no_file(tmp_path):
    """A head's name is in the run's folder, and so might a file be."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nHEAD = 1\n")
    refused(ValueError, "write evil:HEAD.*PYTHONPATH", options.find_part, f"{tmp_path}/evil.py:HEAD", {}, "head")
    assert not (tmp_path / "ran").exists()

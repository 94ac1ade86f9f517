"""The gate names what changed, and nothing changes between two runs of one tree."""

import json
import pathlib

import gate
import numpy as np
import orbax.checkpoint as ocp
import pytest
from refusing import refused
from safetensors.numpy import save_file


def run_folder(folder, *, score=0.25, seconds=1.5, weight=1.0, moment=0.0, letter="a", byte=7):
    """What a run may leave: scores, metrics, a checkpoint, tensors, a page and a binary file."""
    folder.mkdir()
    (folder / "scores.jsonl").write_text('{"scores": [0.5]}\n' + json.dumps({"scores": [0.5, score]}) + "\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 2, "seconds": seconds, "loss": 0.125}) + "\n")
    matrix = np.zeros((2, 3), np.float32)
    matrix[1, 2] = weight
    save_file({"head": matrix, "body": matrix * 0}, folder / "model.safetensors")
    for part, tree in {"params": {"head": {"kernel": matrix}}, "optimizer": [{"mu": np.full(3, moment)}]}.items():
        ocp.PyTreeCheckpointer().save((folder / "checkpoints/4" / part).absolute(), tree)
    (folder / "checkpoints/4/run").mkdir()
    (folder / "checkpoints/4/run/data.json").write_text(json.dumps({"goodput": seconds, "position": 3}))
    (folder / "page.html").write_text("x" * 5000 + letter + "y" * 5000)
    (folder / "cache.bin").write_bytes(bytes([255, byte]))
    return folder


@pytest.fixture
def differences(tmp_path):
    """Returns a function from a change to what the gate reports of it."""
    gate.keep_files(run_folder(tmp_path / "base"), tmp_path / "kept_base")

    def report(**change):
        gate.keep_files(run_folder(tmp_path / "tree", **change), tmp_path / "kept_tree")
        return gate.compare(tmp_path / "kept_base", tmp_path / "kept_tree")

    return report


def test_equal_runs_differ_in_clocks_alone(differences):
    assert differences(seconds=2.5) == []


@pytest.mark.parametrize(
    ("line", "other", "equal"),
    [
        ("3 of 4, 1 s left, loss 1, tokens per second 849", "3 of 4, 9 s left, loss 1, tokens per second 1,229", True),
        ("run: 4 of 4, loss 0.66, tokens per second 1,229", "run: 4 of 4, loss 0.67, tokens per second 1,229", False),
        ('{"tokens_per_second": 5.5, "loss": 0.5}', '{"tokens_per_second": 12345.5, "loss": 0.5}', True),
        ('{"id": "0b51838fe48b9e33"}', '{"id": "2260e3395525a201"}', True),
        ('{"seconds": 5, "labels": 7}', '{"seconds": 5, "labels": 8}', False),
    ],
)  # fmt: skip
def test_lines_differ_in_clocks_alone(line, other, equal):
    assert (gate.normalised(line) == gate.normalised(other)) == equal


@pytest.mark.parametrize(
    ("change", "file", "line", "shown"),
    [
        (dict(score=np.nextafter(0.25, 1)), "scores.jsonl", 2, "0.25000000000000006"),
        (dict(moment=1e-300), "checkpoints/4.arrays", 2, "optimizer[0]['mu'] float64 (3,)"),
        (dict(letter="b"), "page.html", 1, "xxbyy"),
        (dict(byte=8), "cache.bin", 1, "2 bytes"),
    ],
)
def test_the_first_difference_is_named(differences, change, file, line, shown):
    (difference,) = differences(**change)
    assert difference.startswith(f"{file}: line {line}, column ") and shown in difference


def test_an_element_of_an_array_is_reported_wherever_it_is_saved(differences):
    changes = differences(weight=np.nextafter(np.float32(1), np.float32(2)))
    assert [line.partition(":")[0] for line in changes] == ["checkpoints/4.arrays", "model.safetensors"]
    assert "params['head']['kernel'] float32 (2, 3)" in changes[0]


def test_a_file_of_one_tree_alone_is_reported(tmp_path):
    for name, files in {"a": ["x", "y"], "b": ["x"]}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("same\n")
    assert gate.compare(tmp_path / "a", tmp_path / "b") == [f"y: only in {tmp_path / 'a'}"]
    (tmp_path / "empty").mkdir()
    refused(SystemExit, "empty", gate.compare, tmp_path / "a", tmp_path / "empty")


@pytest.mark.slow
def test_two_runs_of_one_tree_are_equal(tmp_path):
    gate.finish(*(gate.start(gate.REPOSITORY, tmp_path / name) for name in ("a", "b")))
    assert gate.compare(tmp_path / "a", tmp_path / "b") == []
    kept = {path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*")}
    assert {pathlib.Path("policy/checkpoints/90.arrays"), pathlib.Path("rl.html"), pathlib.Path("served.json")} <= kept

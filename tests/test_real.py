"""The experiments on real models: published scores divided into chains, states read back, readers in closed form."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "experiments/real"))
import published  # pyright: ignore[reportMissingImports]

from jprm.statistics import auroc


@pytest.mark.parametrize("split", published.SPLITS)
def test_published_scores_give_the_published_aurocs(shared_data, split):
    read = published.read(shared_data / f"published_scores/processbench_{split}.json")
    assert len(read.first_error_C) == 250
    assert len(read.step) == 5
    for model, numbers in read.published.items():
        assert float(auroc(read.step[model], read.right_N)) == pytest.approx(numbers["step_auroc"], abs=1e-9)
        right_C = read.first_error_C < 0
        assert float(auroc(read.chain[model], right_C)) == pytest.approx(numbers["chain_auroc"], abs=1e-9)
        for c, score_K in enumerate(read.by_chain(read.step[model])):
            assert score_K.min() >= read.chain[model][c]
            assert not right_C[c] or score_K.min() == read.chain[model][c]
            assert right_C[c] or read.first_error_C[c] == len(score_K) - 1


def test_flat_steps_are_divided_as_they_were_joined():
    rng = np.random.default_rng(0)
    sizes, right_C = rng.integers(1, 6, 40), rng.random(40) < 0.5
    steps = [rng.random((3, size)) for size in sizes]
    right_N = np.concatenate([[True] * (size - 1) + [bool(right)] for size, right in zip(sizes, right_C, strict=True)])
    later_MC = np.where(right_C, np.inf, rng.random((3, 40)))  # after its first error a chain may be scored lower
    chain_MC = np.minimum(np.stack([x.min(axis=1) for x in steps], axis=1), later_MC)
    ends = published.chains_of_file(right_N, right_C, np.concatenate(steps, axis=1), chain_MC)
    assert ends == np.cumsum(sizes).tolist()

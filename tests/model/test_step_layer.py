"""`model.steps`: a layer between decoder and head, through which training, scores, search and server all go."""

import dataclasses
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import breadth
from refusing import refused
from test_live import CLOSE, make, word
from tiny import TINY, filled, packed_trees, random_tree
from tiny_run import MODEL, chains, experiment, lines, make_data, one_device, training

import jprm
from jprm.experiment import TargetConfig, from_json, to_json
from jprm.methods.decoding.cache import LiveTrees, PrefixCache
from jprm.methods.export.export import export
from jprm.methods.layers.head_init import labelled_steps
from jprm.methods.search.lockstep import Rescorer
from jprm.model.config import ModelConfig, step_layer
from jprm.model.mesh import make_mesh
from jprm.model.parameters import LoraConfig
from jprm.rows import at_slots
from jprm.testing import check_part
from jprm.train.batches import check_supervision
from jprm.train.state import initial_state
from jprm.tree import tree_of


class LookBack(nn.Module):
    """Adds a product with the state at the step before, which that step's own look back has not changed."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BSD, parent_BS):
        before_BSD = jnp.where(parent_BS[..., None] >= 0, at_slots(x_BSD, jnp.maximum(parent_BS, 0)), 0)
        kernel_DD = self.param("kernel", nn.initializers.normal(0.5), (x_BSD.shape[-1],) * 2)
        return x_BSD + before_BSD @ kernel_DD.astype(x_BSD.dtype)


class Half(nn.Module):
    config: ModelConfig

    def __call__(self, x_BSD, parent_BS):
        return x_BSD[..., :8]


STEPS = "test_step_layer:LookBack"


@pytest.fixture(scope="module")
def prm():
    return make(steps=STEPS)


def test_scores_are_equal_through_score_search_and_server(prm):
    rng, plain = np.random.default_rng(0), dataclasses.replace(prm, config=dataclasses.replace(prm.config, steps=""))
    steps = [word(rng) for _ in range(20)]  # more than the least chain that a live search compiles
    scores = prm.score("abc", steps)
    trees, cache = LiveTrees(prm), PrefixCache(prm, 256)
    for scorer in (trees, Rescorer(prm)):
        (handle,), scores_read = scorer.open(["abc"]), []
        for step in steps:
            (handle,), score = scorer.extend([handle], [step])
            scores_read += score.tolist()
        np.testing.assert_allclose(scores_read, scores, **CLOSE)
    for n in (5, 20):  # the second time most tokens are there
        outputs, cached = cache.outputs_of(tree_of({"problem": "abc", "steps": steps[:n]}), "me")
        np.testing.assert_allclose(outputs["score"], scores[:n], **CLOSE)
        assert bool(cached) == (n == 20)
    without = plain.score("abc", steps)
    assert abs(without[0] - scores[0]) < 1e-4 and np.abs(without - scores)[1:].max() > 1e-2


def test_a_step_layer_is_the_same_packed_alone_split_live_cached_and_on_four_devices():
    run = experiment(pathlib.Path("data"), model=dataclasses.replace(MODEL, steps=STEPS))
    check_part(run, only=("packed", "split", "devices", "scored", "live", "cached"))


def test_the_heads_first_fit_reads_what_the_head_reads(prm):
    config, weights = prm.config, prm.params
    rows = filled(packed_trees([random_tree(s, 8) for s in range(4)], 64, 16).rows, 4)
    target = TargetConfig("rating", neutral="negative", after_error="keep")
    with jax.set_mesh(prm.mesh):
        actual, plain = (
            labelled_steps(weights, c, target, [rows], 4).x_ND for c in (config, dataclasses.replace(config, steps=""))
        )
    some_BS = np.asarray(rows.weight) > 0
    x_BSD = np.zeros((*some_BS.shape, TINY.width), np.float32)
    x_BSD[some_BS] = plain
    parent_BS = np.asarray(rows.parent)
    assert all(some_BS[b, parent_BS[b, s]] for b, s in zip(*np.nonzero(parent_BS >= 0), strict=True))
    before_BSD = np.where(parent_BS[..., None] >= 0, np.take_along_axis(x_BSD, parent_BS[..., None], axis=1), 0)
    wanted = (x_BSD + before_BSD @ np.asarray(weights["steps"]["kernel"]))[some_BS]
    np.testing.assert_allclose(actual, wanted, atol=1e-4)


@pytest.mark.parametrize("lora", [LoraConfig(), *breadth([LoraConfig(rank=2)])])
def test_a_run_trains_the_layer_and_is_loaded_with_it(lora, tmp_path):
    data = make_data(tmp_path / "data")
    run = experiment(data, steps=3, checkpoint_every=3, lora=lora)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, steps=STEPS))
    assert from_json(type(run), to_json(run)) == run
    with one_device():
        with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
            start = np.asarray(initial_state(run).trained["steps/kernel"])
        training.train(run, tmp_path / "run")
        prm = jprm.load(tmp_path / "run")
        small = jprm.load(tmp_path / "run", dtype="int8")
    assert [line["step"] for line in lines(tmp_path / "run") if "loss" in line] == [2, 3]
    assert np.any(np.asarray(prm.params["steps"]["kernel"]) != start)
    chain = chains(1)[0]
    scores = prm.score(chain["problem"], chain["steps"])
    np.testing.assert_allclose(small.score(chain["problem"], chain["steps"]), scores, atol=0.05)
    refused(ValueError, "computes", export, tmp_path / "run", tmp_path / "out")
    based = dataclasses.replace(run, base=str(tmp_path / "run"), lora=LoraConfig())
    with one_device(), jax.set_mesh(make_mesh(devices=jax.devices()[:1])):  # decoder, layer and head go on
        np.testing.assert_array_equal(initial_state(based).trained["steps/kernel"], prm.params["steps"]["kernel"])


def test_what_does_not_tell_where_steps_end_is_refused(prm, tmp_path):
    refused(ValueError, "needs the ends of steps, and token ids have none: use `score`", prm.token_logits, [1, 2], [1])
    run = experiment(tmp_path, supervise="outcome_tokens", target=TargetConfig("value", "none", "keep"))
    check_supervision(run)
    layered = dataclasses.replace(run, model=dataclasses.replace(run.model, steps=STEPS))
    refused(ValueError, "outcome_steps", check_supervision, layered)
    refused(ValueError, r"8\) .*16\)", make, steps="test_step_layer:Half")
    assert step_layer(STEPS) is LookBack

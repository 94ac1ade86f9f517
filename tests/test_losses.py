"""Losses against their formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from jprm.methods.evaluate.steps import label_class
from jprm.model.heads import HEADS, Weighted
from jprm.objectives import OBJECTIVES, Pointwise, likelihood

squared_error = OBJECTIVES["squared_error"].loss
rng = np.random.default_rng(0)
LOGITS = {classes: rng.normal(scale=3, size=(2, 5, classes)).astype(np.float32) for classes in (1, 2, 3, 5)}
TARGET, WEIGHT = rng.uniform(size=(2, 5)), rng.integers(0, 2, (2, 5)) * 0.5
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)  # float32 sums of ten terms of size 1


OF = {1: HEADS["scalar"], 2: HEADS["binary"], 3: HEADS["ternary"]}
"""Heads by their logits."""


def softmax(logit_BSC):
    return special.softmax(logit_BSC.astype(np.float64), axis=-1)


def right(classes):
    return special.expit(LOGITS[1][..., 0].astype(np.float64)) if classes == 1 else 1 - softmax(LOGITS[classes])[..., 0]


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_a_score_is_the_probability_that_the_step_is_not_wrong(classes):
    close(OF[classes].readout(LOGITS[classes])["score"], right(classes))


def test_a_score_of_three_classes_is_never_above_one():
    """Of 10,000 sure judgements some twenty are, before they are cut: 1 + 2^-23."""
    logit_BSC = (8 * np.random.default_rng(0).normal(size=(100, 100, 3))).astype(np.float32)
    assert jnp.sum(jax.nn.softmax(logit_BSC)[..., 1:], axis=-1).max() > 1
    assert OF[3].readout.score(logit_BSC).max() == 1
    assert Weighted("softmax", (0.0, 1.0, 1.0))(logit_BSC).max() == 1


@pytest.mark.parametrize("head", ["language", "ternary"])
def test_a_loss_over_classes_is_that_of_the_chosen_ones(head):
    chosen = np.array([[0, 2, 1, 1, 0], [2, 2, 0, 1, 2]])
    p = np.take_along_axis(softmax(LOGITS[3]), chosen[..., None], -1)[..., 0]
    close(likelihood(HEADS[head], LOGITS[3], chosen.astype(np.float32), WEIGHT), -(WEIGHT * np.log(p)).sum())
    if head == "language":  # and a policy's score is its token's probability
        score, positive = HEADS[head].judge(LOGITS[3], chosen.astype(np.float32))
        close(score, p)
        assert positive.all()


@pytest.mark.parametrize("head", ["binary", "scalar"])
def test_training_calls_those_steps_right_that_the_evaluation_does(head):
    label_S = np.array([0, 0.25, 0.5, 0.75, 1], np.float32)  # of two or four rollouts, half are often right
    _, right_BS = HEADS[head].judge(LOGITS[2 if head == "binary" else 1][:1], label_S[None])
    assert right_BS[0].tolist() == [label_class(label, "value", "drop") == 1 for label in label_S.tolist()]


@pytest.mark.parametrize("classes", [1, 2])
def test_losses_equal_their_formulas(classes):
    p, cross_entropy = right(classes), functools.partial(likelihood, OF[classes])
    expected = -TARGET * np.log(p) - (1 - TARGET) * np.log(1 - p)
    close(cross_entropy(LOGITS[classes], TARGET, WEIGHT), (WEIGHT * expected).sum())
    close(squared_error(OF[classes], LOGITS[classes], TARGET, WEIGHT), (WEIGHT * (p - TARGET) ** 2).sum())
    # A soft target is a mixture of hard ones.
    hard_right = cross_entropy(LOGITS[classes], np.ones((2, 5)), WEIGHT * TARGET)
    hard_wrong = cross_entropy(LOGITS[classes], np.zeros((2, 5)), WEIGHT * (1 - TARGET))
    close(cross_entropy(LOGITS[classes], TARGET, WEIGHT), hard_right + hard_wrong)


def test_one_logit_is_the_difference_of_two():
    logit_BSC = LOGITS[2]
    log_odds = logit_BSC[..., 1:] - logit_BSC[..., :1]
    for loss in (likelihood, squared_error):
        close(loss(OF[1], log_odds, TARGET, WEIGHT), loss(OF[2], logit_BSC, TARGET, WEIGHT))


@pytest.mark.parametrize("name", [name for name, objective in OBJECTIVES.items() if isinstance(objective, Pointwise)])
@pytest.mark.parametrize("size", [0.0, 100.0, 1e30])
def test_losses_and_gradients_are_finite_where_the_model_is_certain(name, size):
    for head in [head for head in HEADS if OBJECTIVES[name].target in (None, HEADS[head].target)]:
        loss = functools.partial(OBJECTIVES[name].loss, HEADS[head])
        logit_BSC = size * jnp.sign(LOGITS[HEADS[head].size(3)])
        for target in (0.0, 1.0):
            value, gradient = jax.value_and_grad(loss)(logit_BSC, jnp.full((2, 5), target), jnp.ones((2, 5)))
            assert np.isfinite(value) and np.isfinite(gradient).all()
        assert loss(logit_BSC, jnp.ones((2, 5)), jnp.zeros((2, 5))) == 0  # no label, no loss


def test_a_wrong_certainty_still_has_a_gradient():
    slope = jax.grad(functools.partial(likelihood, OF[2]))
    close(slope(jnp.array([[[100.0, -100.0]]]), jnp.ones((1, 1)), jnp.ones((1, 1))), [[[1, -1]]])

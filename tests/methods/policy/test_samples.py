"""Samples of a policy: the sampled tokens with their probabilities, numbered draws, and parameters that are pushed."""

import dataclasses

import jax
import numpy as np
import pytest
from refusing import refused
from test_sampler import MODEL, Letters, make, prompt_ids, weights
from tiny import chain_rows, logits, placed

from jprm.methods.decoding import decode
from jprm.methods.policy import sampler as sampling
from jprm.methods.policy.protocol import Prefix
from jprm.methods.rl.samples import Rollout, rollout_of, sample

PROBLEMS = ("abc", "the problem")
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def policy():
    return make(temperature=TEMPERATURE, top_p=1.0)


@pytest.fixture(scope="module")
def drawn(policy):
    return sample(policy, PROBLEMS, 6, seed=3, update=5)


def learned(params, problem, ids):
    """Log-probability of every token at the sampling temperature, by the model that trains, all tokens at once."""
    before = prompt_ids(Prefix(problem))
    rows = chain_rows([[*before, *ids]], 128)
    slots = np.zeros((1, 64), np.int32)
    slots[0, : len(ids)] = np.arange(len(before) - 1, len(before) + len(ids) - 1)
    rows = dataclasses.replace(
        rows, step_end=slots, **{name: np.zeros((1, 64), getattr(rows, name).dtype)
        for name in ("label", "weight", "tree", "parent", "problem", "owned")},
    )  # fmt: skip
    log_TV = np.asarray(jax.nn.log_softmax(logits(params, MODEL, rows)[0] / TEMPERATURE))
    return log_TV[np.arange(len(ids)), ids]


def test_the_samplers_log_probabilities_are_the_learners(drawn):
    for problem, samples in zip(PROBLEMS, drawn, strict=True):
        for rollout in samples:
            # float32 sums in another order, through two layers and the softmax
            np.testing.assert_allclose(rollout.log_probability_T, learned(weights(), problem, rollout.ids), atol=1e-4)
    assert {rollout.ended for samples in drawn for rollout in samples} == {True, False}


def test_steps_are_spans_of_the_sampled_tokens(policy, drawn):
    texts = policy.sample([Prefix(problem) for problem in PROBLEMS], 6, until="end", seed=0)  # another stream of draws
    assert [s.steps for s in sum(texts, [])] != [t.steps for t in sum(drawn, [])]
    raw = policy.draw([Prefix(problem) for problem in PROBLEMS], 6, until="end", seed=0, stream=(3, 5))
    for rollout, ids in zip(sum(drawn, []), sum(raw, []), strict=True):
        assert rollout.ids == ids.ids and rollout.ended == (rollout.ids[-1] == 1)
        written = rollout.ids[:-1] if rollout.ended else rollout.ids
        assert tuple(s.strip() for s in Letters().decode(written).split("\n") if s.strip()) == rollout.steps
        spans = [rollout.ids[a:b] for a, b in zip((0, *rollout.step_stop), rollout.step_stop, strict=False)]
        assert sum(spans, ()) == (rollout.ids if rollout.steps else ())


def test_a_draw_is_numbered_by_seed_update_problem_and_sample(policy, drawn):
    again = sample(policy, PROBLEMS[::-1], 3, seed=3, update=5)[::-1]
    for few, many in zip(again, drawn, strict=True):
        assert [sample.ids for sample in few] == [sample.ids for sample in many[:3]]
    others = [sample(policy, PROBLEMS, 6, seed=s, update=u) for s, u in ((3, 6), (4, 5), (5, 3))]
    chains = [sample.ids for batch in (drawn, *others) for samples in batch for sample in samples]
    long = [ids for ids in chains if len(ids) > 4]  # a short one may be drawn twice
    assert len(set(long)) == len(long)


def test_pushed_parameters_are_sampled_without_compiling_again_and_are_a_copy(drawn):
    policy = make(temperature=TEMPERATURE, top_p=1.0)
    changed = weights(0.3)
    pushed = placed(changed, policy.mesh)
    sample(policy, PROBLEMS, 6, seed=3, update=5)
    compiled = decode.decode_samples._cache_size(), decode.prefill._cache_size()
    policy.push(pushed, "letters@1")
    jax.tree.map(lambda x: x.delete(), pushed)  # the learner donates its own to the next step
    after = sample(policy, PROBLEMS, 6, seed=3, update=5)
    assert (decode.decode_samples._cache_size(), decode.prefill._cache_size()) == compiled
    assert policy.name.startswith("letters@1#") and [t.ids for t in after[0]] != [t.ids for t in drawn[0]]
    for drawn_sample in after[0]:
        np.testing.assert_allclose(
            drawn_sample.log_probability_T, learned(changed, PROBLEMS[0], drawn_sample.ids), atol=1e-4
        )


def test_a_blank_chain_has_no_step(policy):
    drawn = sampling.Drawn((0, 2, 1), np.zeros(3, np.float32), 0.0, "stop")
    blank = rollout_of(policy, drawn)
    assert (blank.ids, blank.steps, blank.step_stop, blank.ended) == ((0, 2, 1), (), (), True)
    last = rollout_of(policy, sampling.Drawn((5, 0, 6, 2, 1), np.zeros(5, np.float32), 0.0, "stop"))
    assert (last.steps, last.step_stop) == (("B", "C"), (2, 5))


def test_what_is_not_exact_is_refused(policy):
    class Server:
        name = "http://somewhere"

    refused(ValueError, "somewhere", sample, Server(), PROBLEMS, 2, seed=0, update=0)
    refused(ValueError, "top_p", sample, make(temperature=1.0), PROBLEMS, 2, seed=0, update=0)
    refused(ValueError, "temperature", sample, make(temperature=0.0, top_p=1.0), PROBLEMS, 2, seed=0, update=0)
    refused(ValueError, "occurs twice", sample, policy, ("a", "a"), 2, seed=0, update=0)
    refused(ValueError, "steps end", Rollout, (1, 2, 3), np.zeros(3, np.float32), (2,), ("a",), True)

"""Rows that take new samples when theirs have ended, and samples that run over an update."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from refusing import refused
from test_deltanet import HYBRID
from test_rl_loop import Killed, params_of
from test_sampler import MODEL, Letters, N, assert_same, make, weights
from tiny import placed
from tiny_rl import experiment
from tiny_rl import make as make_data
from tiny_run import lines, untimed

from jprm import multihost
from jprm.methods.decoding import decode
from jprm.methods.policy import sampler
from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import NOTHING, Sampler, SamplerConfig, Wanted
from jprm.methods.rl import loop
from jprm.methods.rl.credit import CreditConfig
from jprm.methods.rl.engine import log_probabilities
from jprm.methods.rl.samples import Rollout, behind_T
from jprm.model.mesh import MeshConfig, make_mesh, mesh_by_heads
from jprm.train.callbacks import Watchdog

PROBLEMS = [Prefix(text * (1 + i % 3)) for i, text in enumerate("abcdefghijklmnop")]


@pytest.fixture
def turns(monkeypatch):
    """The turns of the loop, over all calls."""
    counted, run = [], decode.decode_samples

    def decode_samples(params, config, temperature, top_p, samples, *rest, **options):
        before = int(samples.count)
        after = run(params, config, temperature, top_p, samples, *rest, **options)
        counted.append(int(after.count) - before)
        return after

    monkeypatch.setattr(decode, "decode_samples", decode_samples)
    return counted


@pytest.mark.parametrize("split", [(1, 1, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow)])
def test_a_row_that_has_ended_takes_the_next_sample(monkeypatch, turns, split):
    """32 samples in 8 rows are those of 32 rows, in fewer turns than four batches take that wait for their longest."""
    monkeypatch.setattr(sampler, "SHORTEST_SAMPLE", 4)  # the rings grow, and go round
    mesh = make_mesh(MeshConfig(*split), jax.devices()[: int(np.prod(split))])
    together = make(mesh, temperature=1.0, rows=64).sample(PROBLEMS, 2, until="step", seed=3)
    lengths = sorted(sample.tokens for samples in together for sample in samples)
    assert 4 * lengths[0] < lengths[-1]
    turns.clear()
    assert_same(make(mesh, temperature=1.0, rows=8).sample(PROBLEMS, 2, until="step", seed=3), together)
    refilled, least = sum(turns), sum(lengths) / 8
    monkeypatch.setattr(sampler, "REFILL", 1)  # new samples wait until all rows are free
    turns.clear()
    assert_same(make(mesh, temperature=1.0, rows=8).sample(PROBLEMS, 2, until="step", seed=3), together)
    assert least <= refilled < sum(turns)


@pytest.mark.slow
def test_a_row_of_a_hybrid_starts_from_its_prompts_state():
    model = dataclasses.replace(HYBRID, head="language")
    together = make(model=model, temperature=1.0, rows=32, max_tokens=24).sample(PROBLEMS[:8], 2, until="end", seed=3)
    assert len({sample.tokens for samples in together for sample in samples}) > 2
    for mesh in (None, mesh_by_heads(model, jax.devices()[:4])):
        few = make(mesh, model=model, temperature=1.0, rows=4, max_tokens=24)
        assert_same(few.sample(PROBLEMS[:8], 2, until="end", seed=3), together)


def prompt(prefix):
    return tuple(Letters().encode(f"{prefix.problem}\n"))


def wanted(begun=()):
    begun = begun or [NOTHING] * (len(PROBLEMS) * N)
    return [Wanted(prompt(prefix), i, j, begun[i * N + j]) for i, prefix in enumerate(PROBLEMS) for j in range(N)]


@pytest.mark.breadth
def test_chains_go_on_in_fewer_rows_than_devices():
    mesh, few = make_mesh(MeshConfig(2, 1, 1), jax.devices()[:2]), wanted()[:3]
    single, many = (
        make(on, temperature=1.0, top_p=1.0, rows=rows).go_on(few, 3) for on, rows in ((mesh, 1), (None, 16))
    )
    assert [sample.ids for sample in single] == [sample.ids for sample in many]


def test_chains_that_were_interrupted_go_on_as_if_they_were_not():
    policy = make(temperature=1.0, top_p=1.0, rows=16)
    whole = policy.go_on(wanted(), len(wanted()))
    begun = policy.go_on(wanted(), 8)
    reasons = [sample.finish_reason for sample in begun]
    assert "open" not in reasons[:8] and {"open", "stop"} <= set(reasons[8:])
    assert any(sample.finish_reason == "open" and sample.ids for sample in begun) and not begun[-1].ids
    left = [i for i, sample in enumerate(begun) if sample.finish_reason == "open"]
    after = policy.go_on([wanted(begun)[i] for i in left], len(left))
    for i, chain in zip(left, after, strict=True):
        begun[i] = chain
    for chain, expected in zip(begun, whole, strict=True):
        assert (chain.ids, chain.finish_reason) == (expected.ids, expected.finish_reason)
        np.testing.assert_allclose(chain.logprob_N, expected.logprob_N, atol=1e-4)
        assert chain.logprob == pytest.approx(expected.logprob, abs=1e-3)


def test_every_token_has_the_probability_of_the_policy_that_drew_it():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    old, new = (placed(weights(scale), mesh) for scale in (0.5, 0.2))
    policy = Sampler(old, MODEL, Letters(), mesh, SamplerConfig(max_tokens=40, temperature=1.0, rows=16), "letters")
    begun = policy.go_on(wanted(), 8)
    policy.push(new, "new")
    interrupted = [i for i, chain in enumerate(begun) if chain.finish_reason == "open" and chain.ids]
    after = policy.go_on([wanted(begun)[i] for i in interrupted], len(interrupted))
    i, chain, first = next(
        (i, chain, len(begun[i].ids)) for i, chain in zip(interrupted, after, strict=True) if len(chain.ids) > 35
    )
    sequence = [(wanted()[i].prompt, chain.ids)]
    of_old, of_new = (log_probabilities(params, MODEL, mesh, sequence) for params in (old, new))
    np.testing.assert_allclose(chain.logprob_N[:first], of_old[:first], atol=1e-4)
    np.testing.assert_allclose(chain.logprob_N[first:], of_new[first:], atol=1e-4)
    assert np.abs(of_old - of_new).max() > 0.1


def test_costs_are_shared_out():
    assert multihost.parts([1.0] * 7, 3) == [[0, 3, 6], [1, 4], [2, 5]]
    costs = [9.0, 1, 1, 8, 1, 1, 7, 1]
    parts = multihost.parts(costs, 3)
    assert sorted(sum(parts, [])) == list(range(8))
    assert [sum(costs[i] for i in part) for part in parts] == [10, 10, 9]


def test_staleness_is_told_by_token():
    rollout = Rollout((1, 2, 3, 4), np.zeros(4, np.float32), (4,), ("x",), True, drawn_by=((0, 2), (3, 4)))
    assert behind_T(rollout, 5).tolist() == [2, 2, 2, 0]
    assert Rollout.of_json(json.loads(json.dumps(rollout.json()))).drawn_by == rollout.drawn_by


def carried(data, **changes):
    alone = dict(prm="", credit=CreditConfig("verifier", "rloo", "constant", length=16), reference=False)
    return experiment(data, stale=1, carry=True, sampler_rows=8, objective_options={"truncate": 2.0},
                      evaluate_samples=2, **alone, **changes)  # fmt: skip


@pytest.mark.slow
def test_a_run_whose_samples_are_carried_over_goes_on_bit_for_bit(tmp_path, monkeypatch, one_device):
    data, places, at = make_data(tmp_path / "data"), [(1, "updating"), (3, "sampling"), (4, "pushing")], Watchdog.at
    seen, of_group = [], loop.rollout.judged

    def judged(records, drawn, *rest, **options):
        seen.extend(sample.drawn_by for samples in drawn for sample in samples)
        return of_group(records, drawn, *rest, **options)

    monkeypatch.setattr(loop.rollout, "judged", judged)

    def killed(self, update, phase):
        at(self, update, phase)
        if places and (update, phase) == places[0]:
            places.pop(0)
            raise Killed

    result = loop.train(carried(data, checkpoint_every=1), tmp_path / "whole")
    assert {len(spans) for spans in seen} >= {1, 2}  # some were drawn by two policies
    monkeypatch.setattr(Watchdog, "at", killed)
    while places:
        with pytest.raises(Killed):
            loop.train(carried(data, checkpoint_every=1), tmp_path / "run")
    assert loop.train(carried(data, checkpoint_every=1), tmp_path / "run") == result
    assert params_of(tmp_path / "run") == params_of(tmp_path / "whole")
    assert untimed(lines(tmp_path / "run")) == untimed(lines(tmp_path / "whole"))
    behind = [row["behind"] for row in lines(tmp_path / "whole") if "behind" in row]
    assert behind[0] == 0 and all(0 < share <= 1 for share in behind[1:])


def test_carrying_needs_samples_that_are_drawn_ahead(tmp_path):
    refused(ValueError, "stale", dataclasses.replace, carried(tmp_path), stale=0)

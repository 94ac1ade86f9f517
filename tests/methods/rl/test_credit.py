"""Credit: closed forms, limits, and what a step's reward does to the optimum of a task that can be enumerated."""

import itertools
import types
from typing import Any

import numpy as np
import pytest
from refusing import refused

from jprm.methods.rl import credit
from jprm.methods.rl.credit import ADVANTAGES, CREDITS, CreditConfig
from jprm.score.scale import LOG_ODDS, PROBABILITY, Scale

DIFFERENCE = Scale(threshold=0.0, weight="half")
REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 0.5])


def chain(*lengths, tail=0):
    """What credit reads of a trajectory with steps of these many tokens; the loop's own leave no tail."""
    count, stops = sum(lengths) + tail, tuple(itertools.accumulate(lengths))
    return types.SimpleNamespace(ids=range(count), step_stop=stops, sampled_T=np.ones(count, bool))


def config(name="verifier", advantage="rloo", norm: Any = "constant", length=1, **options):
    return CreditConfig(name, advantage, norm, length if norm == "constant" else 0, **options)


def outcome(reward_G, advantage):
    """The advantages of whole samples, here chains without steps."""
    chains = [np.zeros(0)] * len(reward_G)
    return np.concatenate(credit.segment_advantages(reward_G, chains, config(advantage=advantage)))


def test_outcome_advantages_by_their_definitions():
    G, mean = len(REWARDS), REWARDS.mean()
    deviation = np.sqrt(np.sum((REWARDS - mean) ** 2) / (G - 1))
    others = np.array([np.delete(REWARDS, i).mean() for i in range(G)])
    np.testing.assert_allclose(outcome(REWARDS, "grpo"), (REWARDS - mean) / deviation)
    np.testing.assert_allclose(outcome(REWARDS, "dr_grpo"), REWARDS - mean)
    np.testing.assert_allclose(outcome(REWARDS, "rloo"), REWARDS - others)
    np.testing.assert_allclose(outcome(REWARDS, "rloo"), outcome(REWARDS, "dr_grpo") * G / (G - 1))
    np.testing.assert_array_equal(outcome(REWARDS, "reinforce"), REWARDS)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_without_variance_gives_exactly_nothing(name):
    for rewards in (np.full(7, 0.1), np.zeros(3), 0.7 + 1e-8 * np.arange(6)):  # 0.1 seven times has a rounded mean
        np.testing.assert_array_equal(outcome(rewards, name), np.zeros(len(rewards)))
    assert outcome(np.array([0.1, 0.1, 0.2]), name).any()
    refused(ValueError, "1", outcome, np.ones(1), name)


def test_min_form_goes_from_the_minimum_to_the_mean():
    scores = np.random.default_rng(0).uniform(-1, 1, (20, 6))
    for score_P in scores:
        worst = int(score_P.argmin())
        cold = credit.to_go(credit.min_form(score_P, 1e-5))
        np.testing.assert_allclose(cold[: worst + 1], score_P.min(), atol=1e-9)
        np.testing.assert_allclose(cold[worst + 1 :], 0, atol=1e-9)
        assert credit.min_form(score_P, 1e6).sum() == pytest.approx(score_P.mean(), abs=1e-5)
        weight = np.exp(-score_P / 0.3)
        np.testing.assert_allclose(credit.min_form(score_P, 0.3)[:-1], weight / weight.sum() * score_P)
    assert np.isfinite(credit.min_form(np.array([-1e3, 1e3]), 1e-3)).all()
    np.testing.assert_array_equal(credit.min_form(np.zeros(0), 0.1), [0.0])


def best_actions(reward_of, gamma):
    """For every prefix of a task with steps a and b, at most three, the actions of best value, by enumeration.

    `reward_of` gives a chain's rewards, one a step and one of the decision to stop.
    """
    value = {}
    for length in range(4):
        for steps in itertools.product("ab", repeat=length):
            returns = credit.to_go(reward_of(steps), gamma)
            for at in range(length + 1):
                action = steps[at] if at < length else "stop"
                actions = value.setdefault(steps[:at], {})
                actions[action] = max(actions.get(action, -np.inf), returns[at])
    return {
        prefix: {action for action, x in actions.items() if x > max(actions.values()) - 1e-9}
        for prefix, actions in value.items()
    }


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_shaping_leaves_the_optimum_and_the_sum_moves_it(gamma):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        prefixes = [steps for length in range(4) for steps in itertools.product("ab", repeat=length)]
        score = {steps: rng.uniform(0.2, 1) for steps in prefixes}
        answer = {steps: float(rng.integers(2)) for steps in prefixes}
        answer[("a",)] = 1.0

        def rewards(steps, form, score=score, answer=answer):
            reward_P1 = form(np.array([score[steps[: i + 1]] for i in range(len(steps))]))
            reward_P1[-1] += answer[steps]
            return reward_P1

        verifier = best_actions(lambda x: rewards(x, lambda r: np.zeros(len(r) + 1)), gamma)
        shaped = best_actions(lambda x: rewards(x, lambda r: credit.shaping(5 * r, gamma)), gamma)
        summed = best_actions(lambda x: rewards(x, credit.sum_form), gamma)
        assert shaped == verifier
        assert verifier != summed
        if gamma == 1.0:  # steps pay: under the sum no chain stops before the limit, though shorter ones are correct
            best = ()
            while "stop" not in summed[best]:
                best += (min(summed[best]),)
            assert len(best) == 3


def test_progress_and_implicit_telescope():
    value_P = np.array([0.6, 0.3, 0.9])
    np.testing.assert_allclose(credit.progress(value_P, 0.5), [0.1, -0.3, 0.6, 0])
    np.testing.assert_allclose(credit.implicit(value_P), [0.6, -0.3, 0.6, 0])
    assert credit.shaping(value_P, 1.0).sum() == pytest.approx(0)


@pytest.mark.parametrize("steps", range(5))
def test_last_credit_pays_only_the_last_step(steps):
    score_P = 0.9 - 0.2 * np.arange(steps)
    expected_P1 = np.where(np.arange(steps + 1) == steps - 1, np.append(score_P, 0.0), 0.0)
    form = CREDITS["last"].form
    assert form is not None
    np.testing.assert_array_equal(form(score_P, config("last"), 0.5), expected_P1)


GROUP = [chain(2, 3, 1), chain(4), chain(1, 1, tail=2), chain(tail=3)]
SCORES = [np.array([0.9, 0.2, 0.6]), np.array([0.4]), np.array([0.8, 0.7]), np.zeros(0)]
VERDICTS = np.array([0.0, 1.0, 1.0, 0.0])


def by_hand(name, baseline, gated=False, weight=0.5):
    """Leave-one-out advantages of every token of `GROUP`, step by step."""
    forms = {
        "verifier": lambda r: [0.0] * len(r),
        "sum": list,
        "last": lambda r: [0.0] * (len(r) - 1) + r[-1:],
        "min_form": lambda r: [x * np.exp(-x / 0.1) / sum(np.exp(-y / 0.1) for y in r) for x in r],
        "implicit": lambda r: [x - (r[i - 1] if i else 0) for i, x in enumerate(r)],
    }
    credits = []
    for score_P, verdict in zip(SCORES, VERDICTS, strict=True):
        rewards = [weight * x for x in forms[name](list(score_P))]
        credits.append([min(x, 0) for x in rewards] if gated and not verdict else rewards)

    def mean(values):
        return float(np.mean(values)) if len(values) else 0.0

    advantages = []
    for i, rollout in enumerate(GROUP):
        others = [rewards for j, rewards in enumerate(credits) if j != i]
        start_of = [0, *rollout.step_stop]
        tokens = []
        for t in range(len(rollout.ids)):
            step = sum(t >= stop for stop in rollout.step_stop)  # those before have ended
            assert step == len(rollout.step_stop) or start_of[step] <= t < rollout.step_stop[step]
            left = credits[i][step:]
            of_baseline = {
                "return": mean([sum(rewards) for rewards in others]),
                "to_go": mean([sum(rewards[step:]) for rewards in others if len(rewards) >= step]),
                "step": len(left) * mean([mean(rewards) for rewards in others if rewards]),
            }
            outcome = VERDICTS[i] - np.delete(VERDICTS, i).mean()
            tokens.append(outcome + sum(left) - of_baseline[baseline])
        advantages.append(np.array(tokens))
    return advantages


@pytest.mark.parametrize("baseline", credit.BASELINES)
@pytest.mark.parametrize("name", ["verifier", "sum", "last", "min_form", "implicit"])
def test_tokens_have_the_return_of_their_step(name, baseline):
    for gated in [False, True] if name != "verifier" else [False]:
        options = config(name, weight=0.5, gate=gated, baseline=baseline)
        advantages = credit.token_advantages(GROUP, VERDICTS, SCORES, options)
        for a, b in zip(advantages, by_hand(name, baseline, gated), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


def test_grpo_normalises_the_rewards_of_steps():
    """Shao et al. 2024, section 4.1.3: every step's reward over all of the group, and then the sums to go."""
    step_N = np.concatenate(SCORES)
    advantages = credit.segment_advantages(VERDICTS, SCORES, config("sum", "grpo", weight=0.5))
    for advantage, of_outcome, score_P in zip(advantages, outcome(VERDICTS, "grpo"), SCORES, strict=True):
        normal_P = (score_P - step_N.mean()) / step_N.std(ddof=1)
        wanted = [of_outcome + 0.5 * normal_P[j:].sum() for j in range(len(score_P) + 1)]
        np.testing.assert_allclose(advantage, wanted)
    alike = [0.9 + 0.001 * np.array(x) for x in ([0, 1, 2, 1], [1, 0, 1, 1], [2, 1, 0, 1], [1, 1, 1, 0])]
    advantages = np.concatenate(credit.segment_advantages(np.ones(4), alike, config("sum", "grpo")))
    assert np.abs(advantages).max() < 10  # -174 to -590 by the deviation of full returns
    assert not np.any(credit.segment_advantages(np.ones(4), [np.full(3, 0.9)] * 4, config("sum", "grpo")))


def test_credits_name_the_scales_that_they_take():
    for name, scale, message in [
        ("sum", LOG_ODDS, "credit.name='sum'"),
        ("min_form", LOG_ODDS, "credit.name='min_form'"),
        ("progress", DIFFERENCE, "runs/prm"),
        ("implicit", PROBABILITY, "credit.name='implicit'"),
    ]:
        refused(ValueError, message, config(name).check, scale, "runs/prm")
    for name, scales in {
        "verifier": (PROBABILITY, DIFFERENCE, LOG_ODDS), "shaping": (PROBABILITY, DIFFERENCE, LOG_ODDS),
        "sum": (PROBABILITY, DIFFERENCE), "min_form": (PROBABILITY, DIFFERENCE), "progress": (PROBABILITY,),
        "implicit": (LOG_ODDS,),
    }.items():  # fmt: skip
        for scale in scales:
            config(name).check(scale, "runs/prm")


def test_a_credit_of_ones_own_is_found_by_its_file_and_checked(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom jprm.methods.rl.credit import Credit\n"
        "def last(r, config, start):\n    return np.where(np.arange(len(r) + 1) == len(r) - 1, np.append(r, 0), 0)\n"
        "LAST = Credit('mine', last)\n"
        "SHORT = Credit('mine', lambda r, config, start: r)\n"
        "TAIL = Credit('mine', lambda r, config, start: np.append(r, 1.0))\nOTHER = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    advantages = credit.segment_advantages(VERDICTS, SCORES, config("mine.py:LAST", baseline="return"))
    wanted = VERDICTS + np.array([0.6, 0.4, 0.7, 0.0])
    np.testing.assert_allclose([x[0] for x in advantages], outcome(wanted, "rloo"))
    for name, message in [
        ("mine.py:SHORT", "3 rewards"), ("mine.py:TAIL", "rewards"),
        ("mine.py:OTHER", "jprm.methods.rl.credit.Credit"), ("mine.py:NONE", "NONE"),
    ]:  # fmt: skip
        refused(ValueError, message, lambda: credit.segment_advantages(VERDICTS, SCORES, config(name)))  # noqa: B023


def test_progress_is_added_to_the_outcomes_advantage():
    advantages = credit.token_advantages(GROUP, VERDICTS, SCORES, config("progress", weight=2.0))
    start = float(np.mean([0.9, 0.4, 0.8]))
    of_outcome = outcome(VERDICTS, "rloo")
    np.testing.assert_allclose(advantages[0], of_outcome[0] + 2 * np.repeat([0.9 - start, -0.7, 0.4], [2, 3, 1]))
    np.testing.assert_allclose(advantages[2], of_outcome[2] + 2 * np.repeat([0.8 - start, -0.1, 0.0], [1, 1, 2]))


def test_norms_divide_by_what_they_say():
    lengths = [len(rollout.ids) for rollout in GROUP]
    plain, sequence, group, last, constant = (
        credit.token_advantages(GROUP, VERDICTS, SCORES, config("sum", **norm))
        for norm in ({}, {"norm": "sequence"}, {"norm": "group"}, {"norm": "last"}, {"length": 20})
    )
    for i, length in enumerate(lengths):
        np.testing.assert_allclose(sequence[i], plain[i] / length)
        np.testing.assert_allclose(group[i], plain[i] * len(GROUP) / sum(lengths))
        np.testing.assert_allclose(constant[i], plain[i] / 20)
        np.testing.assert_allclose(last[i], [0.0] * (length - 1) + [plain[i][0]])
    for norm in ("sequence", "group", "last"):  # divided by the samples, a group weighs 1
        weights = credit.token_weights(lengths, config(norm=norm))
        assert sum(x.sum() for x in weights) == pytest.approx(len(GROUP))
    assert sum(x.sum() for x in credit.token_weights(lengths, config(length=20))) == pytest.approx(sum(lengths) / 20)


def test_offset_makes_steps_cost():
    scores = [np.full(2, 0.9), np.full(5, 0.9)]
    longer, shorter = (
        credit.segment_advantages(np.zeros(2), scores, config("sum_prm_alone", offset=offset)) for offset in (0.0, -1.0)
    )
    assert longer[0][0] < longer[1][0] and shorter[0][0] > shorter[1][0]


def test_a_prm_alone_is_asked_for_by_name():
    alone = {name for name, entry in CREDITS.items() if not entry.verifier}
    assert alone == {name for name in CREDITS if name.endswith(credit.PRM_ALONE)} and len(alone) == 5
    for name, entry in CREDITS.items():
        assert entry.source
        one_way, other_way = (
            np.concatenate(
                credit.segment_advantages(verdicts, SCORES, config(name, "reinforce" if name == "turn_gae" else "rloo"))
            )
            for verdicts in (VERDICTS, 1 - VERDICTS)
        )
        assert np.allclose(one_way, other_way) == (name in alone), name


def test_rewards_that_mean_nothing_are_refused():
    assert set(ADVANTAGES) == {"reinforce", "dr_grpo", "rloo", "grpo"}
    refused(ValueError, "not finite", credit.token_advantages, GROUP, np.array([np.nan, 0, 0, 0]), SCORES, config())
    scores = [SCORES[0], np.zeros(2), *SCORES[2:]]
    refused(ValueError, "sample 1", credit.token_advantages, GROUP, VERDICTS, scores, config("sum"))


def test_a_penalty_counts_under_every_credit():
    scores, zero = [np.array([0.5, 0.5]), np.zeros(0), np.array([0.9, 0.1])], np.zeros(3)
    for name in ("min_form", "sum_prm_alone", "verifier"):
        settings = config(name, "dr_grpo", length=8)
        blank, free = (credit.segment_advantages(zero - [0, penalty, 0], scores, settings)[1][0] for penalty in (1, 0))
        assert blank == pytest.approx(free - 2 / 3)  # less the group's mean, which has a third of it


# ---- Methods with baselines of their own, against sums written out.

VALUED = [np.array([0.2, 0.9, 0.4]), np.array([0.5]), np.zeros(0), np.array([0.7, 0.1])]
OUTCOMES = np.array([1.0, 0.0, 0.5, 1.0])


def deviations(values):
    return (np.array(values) - np.mean(values)) / np.std(values, ddof=1)


def test_gdpo_normalises_each_component_by_itself():
    means = [score_P.mean() if len(score_P) else 0.0 for score_P in VALUED]
    wanted = deviations(OUTCOMES) + 0.5 * deviations(means)
    given = credit.segment_advantages(OUTCOMES, VALUED, config("gdpo", "grpo", weight=0.5))
    for advantage_P1, total, score_P in zip(given, wanted, VALUED, strict=True):
        np.testing.assert_allclose(advantage_P1, np.full(len(score_P) + 1, total))
    wide = credit.segment_advantages(
        OUTCOMES, [1000 * score_P for score_P in VALUED], config("gdpo", "grpo", weight=0.5)
    )
    np.testing.assert_allclose(np.concatenate(wide), np.concatenate(given))  # the scale of a component does not count


def test_gigpo_compares_returns_in_equal_states():
    states = [["q", "a", "b", "c"], ["q", "a"], ["q"], ["q", "b", "a"]]
    gamma, weight = 0.9, 0.3
    rewards = [[*score_P, reward] for score_P, reward in zip(VALUED, OUTCOMES, strict=True)]
    to_go = [[sum(gamma ** (k - j) * r[k] for k in range(j, len(r))) for j in range(len(r))] for r in rewards]
    whole = deviations([sum(r) for r in rewards])
    for i, of_sample in enumerate(
        credit.segment_advantages(OUTCOMES, VALUED, config("gigpo", "grpo", gamma=gamma, weight=weight), states)
    ):
        for j, advantage in enumerate(of_sample):
            same = [to_go[a][b] for a in range(4) for b in range(len(states[a])) if states[a][b] == states[i][j]]
            step = 0.0 if len(same) == 1 else (to_go[i][j] - np.mean(same)) / np.std(same, ddof=1)
            np.testing.assert_allclose(advantage, whole[i] + weight * step)


def test_turn_gae_is_the_sum_of_discounted_errors():
    start, gamma, lam = np.mean([0.2, 0.5, 0.7]), 0.9, 0.6
    given = credit.segment_advantages(OUTCOMES, VALUED, config("turn_gae", "reinforce", gamma=gamma, lam=lam))
    for advantage_P1, score_P, reward in zip(given, VALUED, OUTCOMES, strict=True):
        value, count = [start, *score_P, 0.0], len(score_P) + 1
        error = [(reward if k == count - 1 else 0.0) + gamma * value[k + 1] - value[k] for k in range(count)]
        wanted = [sum((gamma * lam) ** (k - j) * error[k] for k in range(j, count)) for j in range(count)]
        np.testing.assert_allclose(advantage_P1, wanted)
    whole = credit.segment_advantages(OUTCOMES, VALUED, config("turn_gae", "reinforce", lam=1.0))
    np.testing.assert_allclose(whole[0], 1.0 - np.array([start, *VALUED[0]]))  # R less the value before each turn


def test_states_are_the_words_of_the_world_or_all_tokens_before():
    def episode(ids, stops, observed=()):
        return types.SimpleNamespace(ids=ids, step_stop=stops, observed=observed)

    first = credit.states_of(episode([1, 2, 9, 8, 3], (2, 5), ((2, 4),)))
    other = credit.states_of(episode([5, 9, 8, 3, 4], (1, 5), ((1, 3),)))
    assert first[0] == other[0] and first[1] == other[1] and first[2] != other[2]
    plain = [credit.states_of(episode(ids, (1, 2))) for ids in ([1, 2, 3], [1, 4, 3])]
    assert plain[0][:2] == plain[1][:2] and plain[0][2] != plain[1][2]


def test_settings_that_do_not_fit_a_method_are_refused():
    for settings in (
        {"name": "gigpo", "baseline": "to_go"}, {"name": "turn_gae", "advantage": "rloo"},
        {"name": "gdpo", "gate": True},
        {"name": "turn_gae", "advantage": "reinforce", "lam": 1.5}, {"name": "gigpo", "norm": "last"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"credit"):
            config(**settings)

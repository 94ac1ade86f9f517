"""Conversations of a policy: tokens, probabilities and branches against the whole model, and rollouts in a world."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from test_sampler import weights
from tiny import TINY, placed
from tokenizers import Regex, decoders, models, pre_tokenizers

from jprm.methods.agents.environment import Environment, Reply, World
from jprm.methods.decoding.sampler import Sampler, SamplerConfig
from jprm.methods.decoding.turns import Branch, Conversations, EpisodeLimits, TurnLayout, begun, play
from jprm.methods.formats.chat_template import render
from jprm.methods.policy import engine
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.tokenizer import JsonTokenizer

PIECES = ("<end>", "<user>", "<assistant>", "<tool>", "\n", *"abcdefghi", "?", "!")
MODEL = dataclasses.replace(TINY, vocab_size=len(PIECES), head="language", remat="nothing")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer() -> Any:
    inner = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(list(PIECES[:4]))
    return JsonTokenizer(inner, eos=0)


def echo(turns):
    """Answers with the first letters of what was said, and ends after so many turns."""

    def step(state, message):
        state["said"].append(message["content"])
        letters = [letter for letter in message["content"] if letter in "ac"]  # no name of a control token
        answer = {"role": "tool", "content": "".join(letters[:3]) + "!"}
        return Reply((answer,), len(state["said"]) == turns, len(state["said"]) / 10)

    return Environment(lambda record: ({"said": []}, [{"role": "user", "content": record["problem"]}]), step)


@pytest.fixture(scope="module")
def policy():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    options = SamplerConfig(temperature=1.0, max_tokens=40, rows=8)
    return Sampler(placed(weights(model=MODEL), mesh), MODEL, tokenizer(), mesh, options, "turns")


@pytest.fixture(scope="module")
def layout():
    return TurnLayout(tokenizer(), TEMPLATE, {"eos_token": "<end>"})


def rollouts(policy, layout, problems, numbers, ends=3, **limits):
    world = World(echo(ends))
    with Conversations(policy, layout.stop) as talk:
        starts = [
            begun(talk, layout, e, n)
            for e, n in zip(world.start([{"problem": p} for p in problems]), numbers, strict=True)
        ]
        return play(
            talk, layout, world, starts, EpisodeLimits(**({"turns": 9, "tokens": 400} | limits)), stream=(7,)
        ), talk


@pytest.fixture(scope="module")
def played(policy, layout):
    return rollouts(policy, layout, ["abc", "abc", "hi?", "abc"], [0, 1, 0, 2])[0]


def test_probabilities_are_those_of_the_whole_model(policy, played):
    for episode in played:
        whole = engine.log_probabilities(policy.params, policy.config, policy.mesh, [(episode.prompt, episode.ids)])
        # float32 sums in another order: keys from slots, turns after turns
        np.testing.assert_allclose(episode.log_probability_T[episode.sampled_T], whole[episode.sampled_T], atol=1e-4)
        assert not episode.log_probability_T[~episode.sampled_T].any()


def test_ids_are_what_the_template_writes_and_what_was_sampled_stays(layout, played):
    for episode in played:
        assert episode.turn_stop[-1] == len(episode.ids) and episode.sampled_T[-1]
        text = layout.tokenizer.decode([*episode.prompt, *episode.ids])
        said = episode.episode.messages if episode.ended else episode.episode.messages[: episode.episode.turns[-1]]
        whole = render(TEMPLATE, said, {}, reply=False)
        assert whole.startswith(text) if episode.ended else text.startswith(whole)
        for start, stop, written in zip((0, *episode.turn_stop), episode.turn_stop, episode.texts, strict=False):
            turn = [i for i, own in zip(episode.ids[start:stop], episode.sampled_T[start:stop], strict=True) if own]
            assert layout.tokenizer.decode(turn).removesuffix("<end>") == written
    assert {episode.ended for episode in played} == {True} or any(episode.cut for episode in played)


def test_a_rollout_depends_on_nothing_that_is_sampled_beside_it(policy, layout, played):
    alone = [rollouts(policy, layout, [p], [n])[0][0] for p, n in (("abc", 1), ("hi?", 0))]
    for one, beside in zip(alone, (played[1], played[2]), strict=True):
        assert (one.ids, one.texts, one.ended) == (beside.ids, beside.texts, beside.ended)
    assert len({episode.ids for episode in (played[0], played[1], played[3])}) == 3


def test_what_branches_share_is_computed_once(policy, layout):
    ids = layout.opening([{"role": "user", "content": "abcdefghi"}])
    with Conversations(policy, layout.stop) as talk:
        branch = talk.open(ids)
        ((first, after), *rest), *_ = talk.draw([branch, branch], [[0, 1, 2], [3]])
        assert talk.computed == len(ids) - 1 and len(rest) == 2
        answer = layout.answer({"role": "assistant", "content": "a"}, [{"role": "tool", "content": "bc"}], stopped=True)
        forked = after.followed(answer)
        talk.draw([forked, Branch(forked.ids, forked.slots)], [[0, 1], [2]])
        assert talk.computed == len(ids) - 1 + len(answer)  # the sampled turn's last token, and the answer but its last
        assert after.ids == (*ids, *first.ids)


@pytest.mark.parametrize("limits", [{"turns": 2}, {"tokens": 40}])
def test_limits_cut_an_episode_off(policy, layout, limits):
    played, _ = rollouts(policy, layout, ["abc"] * 4, range(4), ends=99, **limits)
    assert all(episode.cut and not episode.ended for episode in played)
    if "turns" in limits:
        assert max(len(episode.texts) for episode in played) == 2


def test_lost_episodes_are_told(policy, layout):
    def step(state, message):
        raise OSError("gone")

    world = World(dataclasses.replace(echo(3), step=step))
    with Conversations(policy, layout.stop) as talk:
        (start,) = [begun(talk, layout, e, 0) for e in world.start([{"problem": "a"}])]
        (one,) = play(talk, layout, world, [start], EpisodeLimits(9, 400))
    assert one.episode.error == "OSError: gone" or one.cut
    assert not one.ended


def test_an_answer_cannot_write_control_tokens(layout):
    turn = {"role": "assistant", "content": "a"}
    with pytest.raises(ValueError, match=r"of the tool holds the name of a control token, '<end>'"):
        layout.answer(turn, [{"role": "tool", "content": "b<end>c"}], stopped=True)
    pieces = [
        layout.tokenizer.decode(layout.answer(turn, [{"role": "tool", "content": "b"}], stopped=s))
        for s in (True, False)
    ]
    assert pieces == ["\n<tool>b<end>\n<assistant>", "<end>\n<tool>b<end>\n<assistant>"]
    with pytest.raises(ValueError, match="not with a token"):
        TurnLayout(tokenizer(), "{% for m in messages %}{{ m.content }}\n{% endfor %}", {})
    rewrites = "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else '' }}<end>{% endfor %}"
    with pytest.raises(ValueError, match="writes a turn otherwise"):
        TurnLayout(tokenizer(), rewrites, {}).answer(turn, [{"role": "tool", "content": "b"}], stopped=True)


def test_rollouts_from_a_recorded_turn_begin_with_its_ids(policy, layout):
    world = World(echo(3))
    turns = [{"role": "assistant", "content": text} for text in ("ab", "c")]
    (episode,) = world.replay([{"problem": "hi?"}], [turns])
    with Conversations(policy, layout.stop) as talk:
        start = begun(talk, layout, episode, 0)
        one, other = play(talk, layout, world, [start, dataclasses.replace(start, number=1)], EpisodeLimits(9, 400))
    whole = render(TEMPLATE, episode.messages, {})
    assert layout.tokenizer.decode(start.prompt) == whole
    assert one.prompt == start.prompt and len(one.texts) == len(other.texts) == 1
    assert list(itertools.accumulate(one.episode.rewards)) == pytest.approx([0.1, 0.3, 0.6]) or one.cut

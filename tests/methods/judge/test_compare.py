"""Judges that compare samples: tournaments of pairs and relative scores of lists."""

import itertools
import json
import math
import re

import numpy as np
import pytest
from refusing import refused
from stub_server import reply

from jprm.methods.judge.compare import Comparison
from jprm.methods.judge.load import load_judge, load_judge_of_steps, load_plain_judge
from jprm.methods.policy.openai_client import ServerConfig, ServerPolicy
from jprm.methods.search.lockstep import live_scorer
from jprm.tree import RecordError, tree_of

WORTH = {"poor": 0.1, "fair": 0.5, "good": 0.9}
POOL = {"problem": "p", "samples": [{"steps": ["begin", name]} for name in ("fair", "good", "poor")], "answer": "1"}


def worths(body):
    """The worth of each sample that a question shows, in its order."""
    return [WORTH[name] for name in re.findall(r"Solution \d+:\nbegin\n(\w+)", body["prompt"])]


def comparison(server, compares, samples=1, rounds=0, **changes):
    settings = {"backoff_s": 0.01, "retries": 0, "prompt": "{problem}"} | changes
    return Comparison(ServerPolicy(ServerConfig(server.url, "tiny", **settings)), compares, samples, 0, rounds)


def wins(number, body):
    a, b = worths(body)
    return reply(rf"So \boxed{{{1 if a > b else 2}}}", tokens=3)


def scores_of(record):
    return [sample["scores"][-1] for sample in record["samples"]]


def test_a_sample_scores_the_fraction_of_pairs_that_it_wins(serve):
    server = serve(wins)
    [record] = comparison(server, "pairwise").score_many([POOL])
    assert scores_of(record) == [0.5, 1.0, 0.0]
    assert [sample["scores"] for sample in record["samples"]] == [[0.5, 0.5], [1.0, 1.0], [0.0, 0.0]]
    assert (record["judge"]["asked"], record["judge"]["tokens"]) == (6, 18)  # three pairs in both orders
    asked = [tuple(worths(body)) for _, body in server.requests]
    assert sorted(asked) == sorted(itertools.permutations(WORTH.values(), 2))


def test_a_judge_that_prefers_a_place_says_nothing(serve):
    [record] = comparison(serve(lambda number, body: reply(r"\boxed{1}")), "pairwise").score_many([POOL])
    assert scores_of(record) == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(("cut", "left"), [((0, 1, 2), ()), ((0,), (1, 2)), ((), (0, 1, 2))])
def test_a_pair_counts_only_if_both_orders_are_read(serve, cut, left):
    """The judge always names the first, and its questions with one of these samples in second place are cut."""
    order = list(WORTH.values())

    def script(number, body):
        second = order.index(worths(body)[1])
        return reply(r"\boxed{1}", finish="length" if second in cut else "stop")

    pool = {"problem": "p", "samples": [{"steps": ["begin", name]} for name in WORTH]}
    [record] = comparison(serve(script), "pairwise").score_many([pool])
    scores = [sample.get("scores", [None])[-1] for sample in record["samples"]]
    assert scores == [0.5 if i in left else None for i in range(3)]


def test_the_orders_of_a_pair_weigh_alike(serve):
    """Three of four critiques of one order are unreadable."""

    def script(number, body):
        a, b = worths(body)
        return reply(r"\boxed{1}" if a < b or body["seed"] == 0 else "no box")

    [record] = comparison(serve(script), "pairwise", samples=4).score_many([POOL])
    assert scores_of(record) == [0.5, 0.5, 0.5] and record["judge"]["unreadable"] == 9


def test_a_win_is_its_probability_where_tokens_are_known(serve):
    def script(number, body):
        a, b = worths(body)
        p = a / (a + b)
        return reply(r"\boxed{1}", logprobs={"tokens": [r"\boxed{", "1", "}"],
                                             "token_logprobs": [0.0, math.log(p), 0.0]})  # fmt: skip

    [record] = comparison(serve(script), "pairwise", logprobs=True).score_many([POOL])
    wanted = [np.mean([a / (a + b) for b in WORTH.values() if b != a]) for a in (0.5, 0.9, 0.1)]
    assert scores_of(record) == pytest.approx(wanted, abs=1e-6)


def test_rounds_bound_what_a_tournament_asks(serve):
    names = [f"s{i}" for i in range(8)]
    pool = {"problem": "p", "samples": [{"steps": [name]} for name in names]}
    server = serve(lambda number, body: reply(r"\boxed{1}"))
    [record] = comparison(server, "pairwise", rounds=1).score_many([pool])
    assert record["judge"]["asked"] == 16 and scores_of(record) == [0.5] * 8  # a ring, in both orders


def test_a_list_has_relative_scores(serve):
    server = serve(lambda number, body: reply("I see. \\boxed{" + ", ".join(map(str, worths(body))) + "}"))
    [record] = comparison(server, "listwise").score_many([POOL])
    assert scores_of(record) == [0.5, 0.9, 0.1] and len(server.requests) == 1
    asked = server.requests[0][1]["prompt"]
    assert "numbers from 0 to 1" in asked and "Compare the 3" in asked


def test_a_list_within_thoughts_is_not_read(serve):
    text = r"<think>\boxed{0.5, 0.5, 0.5}</think> I cannot say."
    [record] = comparison(serve(lambda number, body: reply(text)), "listwise").score_many([POOL])
    assert "scores" not in record["samples"][0] and record["judge"]["unreadable"] == 1


@pytest.mark.parametrize(
    "text", [r"\boxed{0.5, 0.5}", r"\boxed{0.5, x, 1}", r"\boxed{0.5, 2, 1}", r"\boxed{1.5, 0, 0}", ""]
)
def test_a_list_that_cannot_be_read_gives_no_scores(serve, text):
    [record] = comparison(serve(lambda number, body: reply(text or "no")), "listwise").score_many([POOL])
    assert "scores" not in record["samples"][0] and record["judge"]["unreadable"] == 1


def test_equal_samples_are_not_compared_and_one_chain_is_refused(serve):
    server = serve(wins)
    same = {**POOL, "samples": [POOL["samples"][0]] * 3}
    for compares in ("pairwise", "listwise"):
        [record] = comparison(server, compares).score_many([same])
        assert scores_of(record) == [0.5] * 3
    assert not server.requests
    twice = {**POOL, "samples": [POOL["samples"][0]] * 3 + POOL["samples"]}
    [record] = comparison(server, "pairwise", rounds=1).score_many([twice])
    assert scores_of(record) == [0.5] * 4 + [1.0, 0.0] and len(server.requests) == 6
    with pytest.raises(ValueError, match="has one chain"):
        comparison(server, "pairwise").outputs_of([tree_of({"problem": "p", "steps": ["a"]})])


def test_a_file_names_a_comparison(tmp_path):
    settings = {"url": "http://localhost:1/v1", "model": "m", "judge": {"compare": "pairwise", "rounds": 2}}
    (tmp_path / "judge.json").write_text(json.dumps(settings))
    loaded = load_judge(tmp_path / "judge.json")
    assert isinstance(loaded, Comparison) and (loaded.rounds, loaded.rule) == (2, "last")
    for load in (load_plain_judge, load_judge_of_steps):
        refused(RecordError, "compare", load, tmp_path / "judge.json")
    refused(ValueError, "compares finished samples", live_scorer, loaded)

"""Searches over files: kills, bad lines, servers, results, and the filter by a threshold."""

import json
import math

import numpy as np
import pytest
from refusing import refused
from stub_server import reply, serving
from toy_policy import Markov
from toy_search import Script, Table

import jprm
from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.evaluate.best_of_n import best_of_n_report
from jprm.methods.evaluate.conformal import accept_threshold
from jprm.methods.jobs import score as scored_files
from jprm.methods.policy import load as policies
from jprm.methods.policy.protocol import Problem, read_problems
from jprm.methods.policy.sample_cache import PolicyError
from jprm.methods.search import jobs as files
from jprm.methods.search import lockstep
from jprm.methods.search.beam import Beam
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.growing_tree import GrowingTree
from jprm.methods.search.jobs import (
    accept,
    best,
    calibrate,
    choose,
    filter_file,
    record,
    search_file,
    vote,
)
from jprm.methods.search.lockstep import Rescorer, SearchConfig, search
from jprm.score.aggregate import RULES, aggregate, rank_keys
from jprm.tree import RecordError, read_records, record_of, tree_of

PROBLEMS = [{"problem": f"p{i}", "answer": "1", "id": i, "steps": ["unused"]} for i in range(5)]


class Good:
    """Scores whole trees: 0.9 for a good step, 0.2 for a bad one. Stops at scoring `limit` trees."""

    name, step, rule = "good", 3, "prod"

    def __init__(self, limit=math.inf):
        self.limit = limit

    def score_trees(self, trees):
        self.limit -= len(trees)
        if self.limit < 0:
            raise KeyboardInterrupt
        return [[0.9 if node.text.startswith("good") else 0.2 for node in tree.nodes] for tree in trees]


@pytest.fixture
def folder(tmp_path):
    write_records(tmp_path / "problems.jsonl", PROBLEMS)
    return tmp_path


def run(folder, policy=None, method=None, scorer=None, input="problems.jsonl", on_error="stop", **options):
    config = SearchConfig(method or Beam(2, 3), "prod", **({"budget": 400, "at_once": 2} | options))  # pyright: ignore[reportArgumentType]
    files = folder / input, folder / "out.jsonl"
    return search_file(policy or Markov(), Rescorer(scorer or Good()), {"model": "good"}, *files, config,
                       on_error=on_error)  # fmt: skip


def left(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("method", [BestOfN(8), Beam(2, 3)], ids=["best_of_n", "beam"])
def test_a_killed_run_continues(folder, method):
    policy = Markov()
    counts = run(folder, policy, method)
    whole = (folder / "out.jsonl").read_bytes()
    drawn = policy.sampled
    assert left(folder) == ["out.jsonl", "out.jsonl.info.json", "problems.jsonl"]
    assert (counts["problems"], counts["rejected"]) == (5, 0)
    assert run(folder, policy, method)["correct"] == counts["correct"] and policy.sampled == drawn  # it is there

    (folder / "out.jsonl").unlink()
    policy, stops = Markov(), 0
    for limit in range(3, 60, 6):
        try:
            run(folder, policy, method, Good(limit))
            break
        except KeyboardInterrupt:
            stops += 1
            for name in ("out.jsonl.part", "out.jsonl.samples"):  # a line that was being written
                with (folder / name).open("ab") as file:
                    file.write(b'{"index": 0, "rec')
    assert stops >= 2
    assert (folder / "out.jsonl").read_bytes() == whole
    assert policy.sampled == drawn and len(set(policy.drawn)) == drawn  # nothing was sampled twice
    assert left(folder) == ["out.jsonl", "out.jsonl.info.json", "problems.jsonl"]


def test_a_run_killed_before_it_tidied_up_is_tidied_by_the_next(folder):
    counts = run(folder)
    for name in ("out.jsonl.part", "out.jsonl.samples"):
        (folder / name).write_bytes(b'{"index": 0}\n')
    whole = (folder / "out.jsonl").read_bytes()
    assert run(folder) == {key: counts[key] for key in run(folder)}
    assert left(folder) == ["out.jsonl", "out.jsonl.info.json", "problems.jsonl"]
    assert (folder / "out.jsonl").read_bytes() == whole


def test_rejects_have_their_name_before_the_output_has(folder, monkeypatch):
    """A later call does nothing where the output is whole, so rejects without a name would never get one."""
    with (folder / "problems.jsonl").open("a") as file:
        file.write("no record\n")

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "atomic_file", killed)
        run(folder, on_error="skip")
    assert (folder / "out.jsonl.rejects").read_text() == "no record\n" and not (folder / "out.jsonl").exists()
    assert run(folder, on_error="skip")["rejected"] == 1
    assert left(folder) == ["out.jsonl", "out.jsonl.info.json", "out.jsonl.rejects", "problems.jsonl"]


def test_finished_problems_are_not_searched_again(folder):
    with pytest.raises(KeyboardInterrupt):
        run(folder, scorer=Good(14))
    lines = [json.loads(line) for line in (folder / "out.jsonl.part").read_text().splitlines()]
    assert 0 < len(lines) < 5
    policy = Markov()
    run(folder, policy)
    assert not {prefix.problem for prefix, _ in policy.drawn} & {line["record"]["problem"] for line in lines}
    assert [record["id"] for record in read_records(folder / "out.jsonl")] == [0, 1, 2, 3, 4]


def test_problems_replaced_while_they_are_read_are_noticed(folder, monkeypatch):
    """The request holds size and age of the file that it was made from, and the new file is not that."""
    other = folder / "other.jsonl"
    other.write_bytes(b'{"problem": "q", "answer": "7"}\n')

    def replacing(path, *rest):
        other.rename(path)
        return read_problems(path, *rest)

    monkeypatch.setattr(files, "read_problems", replacing)
    policy = Markov()
    refused(ValueError, "problems.jsonl", run, folder, policy)
    assert policy.sampled == 0 and left(folder) == ["problems.jsonl"]


def test_another_request_touches_nothing(folder):
    run(folder)
    before = (folder / "out.jsonl").read_bytes()
    for change in ({"budget": 300}, {"seed": 1}, {"method": Beam(2, 2)}, {"choose": "majority"}):
        refused(ValueError, "out.jsonl", run, folder, **change)
    assert (folder / "out.jsonl").read_bytes() == before
    refused(ValueError, "input", run, folder, input="out.jsonl")


def test_bad_lines_stop_or_are_set_aside(folder):
    lines = (folder / "problems.jsonl").read_text().splitlines(keepends=True)
    bad = ['{"problem": ""}\n', '["p"]\n', '{"problem": "x", "answer": []}\n', '{"proble']
    (folder / "bad.jsonl").write_text("".join(lines[:2] + bad))
    refused(RecordError, "bad.jsonl:3: problem", run, folder, input="bad.jsonl")
    counts = run(folder, input="bad.jsonl", on_error="skip")
    assert (counts["problems"], counts["rejected"]) == (2, 4)
    assert (folder / "out.jsonl.rejects").read_text() == "".join(bad) + "\n"


class Poison(Markov):
    """Fails at p1, and says nothing but the end for p3."""

    def draw_one(self, prefix, until, number):
        if prefix.problem in ("p1", "p3"):
            return Script({(): ["!" if prefix.problem == "p1" else ""]}).draw_one((), until, number)
        return super().draw_one(prefix, until, number)


def test_a_problem_without_a_step_is_set_aside(folder):
    counts = run(folder, Poison())
    assert [record["id"] for record in read_records(folder / "out.jsonl")] == [0, 2, 4]
    assert (counts["problems"], counts["rejected"]) == (3, 2)
    assert list(map(json.loads, (folder / "out.jsonl.rejects").read_text().splitlines())) == [PROBLEMS[1], PROBLEMS[3]]


def test_a_server_that_goes_down_loses_nothing(folder):
    class Down(Markov):
        up = 60

        def draw_one(self, prefix, until, number):
            self.up -= 1
            return (
                super().draw_one(prefix, until, number)
                if self.up >= 0
                else Script({(): ["!"]}).draw_one((), until, number)
            )

    refused(PolicyError, "server", run, folder, Down())
    policy = Markov()
    run(folder, policy)
    whole = Markov()
    (folder / "out.jsonl").unlink()
    run(folder, whole)
    assert whole.sampled - policy.sampled == 60


def load_good(monkeypatch):
    monkeypatch.setattr(jprm, "load", lambda folder, **_: Good(), raising=False)
    monkeypatch.setattr(scored_files, "identity", lambda prm: {"model": prm.name, "digest": "0"})
    monkeypatch.setattr(lockstep, "live_scorer", Rescorer)


def write_policy(monkeypatch, policy):
    monkeypatch.setattr(policies, "load_policy", lambda path: policy)
    load_good(monkeypatch)


METHODS = {
    "best-of-n": ["--n", "6"],
    "beam": ["--width", "2", "--expand", "3"],
    "particles": ["--particles", "4"],
    "dvts": ["--subtrees", "2", "--expand", "3"],
    "mcts": ["--simulations", "9", "--expand", "3", "--rollouts", "1"],
    "refine": ["--rounds", "4", "--drafts", "2"],
}


@pytest.mark.parametrize("method", METHODS)
def test_the_command(method, folder, monkeypatch):
    write_policy(monkeypatch, Markov())
    args = ["search", method, "--policy", "p.json", "--model", "run", "--input", str(folder / "problems.jsonl")]
    args += ["--budget", "2000", "--output", str(folder / "out.jsonl"), *METHODS[method]]
    assert cli.main(args) == 0
    records = list(read_records(folder / "out.jsonl"))
    for stored in records:
        assert record_of(tree_of(stored)) == stored
        result = stored["search"]
        assert result["rule"] == "prod" and result["policy"] == "markov"  # what the model's labels call for
        assert result["scorer"] == {"model": "good", "digest": "0"} and result["policy_tokens"] <= 2000
    if method == "best-of-n":
        report = best_of_n_report(map(tree_of, records), seed=0)
        right = [record["search"]["correct"] for record in records]
        assert report["rules"]["prod"]["best_of_n"]["value"][-1] == pytest.approx(sum(right) / 5)


def test_a_beam_from_a_server(folder, monkeypatch):
    """Two steps, of which the first is good for two seeds of three, through the policy's own file and HTTP."""

    def arithmetic(number, body):
        first = body["prompt"].count("\n\n") == 1
        if first:
            return reply("good so\n\n" if body["seed"] % 3 else "bad so\n\n", tokens=2, stop_reason="\n\n")
        return reply(f"good. The answer is {1 if 'good' in body['prompt'] else 0}", tokens=5, stop_reason=None)

    load_good(monkeypatch)
    with serving(arithmetic) as server:
        (folder / "policy.json").write_text(json.dumps({"url": server.url, "model": "tiny", "backoff_s": 0.05}))
        args = f"search beam --width 1 --expand 3 --policy {folder}/policy.json --model run --budget 100"
        args += f" --input {folder}/problems.jsonl --output {folder}/out.jsonl"
        assert cli.main(args.split()) == 0
    spent = [record["search"]["policy_tokens"] for record in read_records(folder / "out.jsonl")]
    assert sum(spent) == 5 * (3 * 2 + 3 * 5)
    # An attempt that finds the server's queue full is made again: the same prompt and seed.
    assert len({(body["prompt"], body["seed"]) for _, body in server.requests}) == 5 * 6


# ---- Chain scores, votes and the record of a search, against values worked out by hand.


TABLE = {(): ["a", "b", "c~", "a"], ("a",): ["The answer is 1."], ("b",): ["The answer is 2."]}
SCORES = {"a": 0.5, "b": 0.9, "c~": 1.0, "The answer is 1.": 0.6, "The answer is 2.": 0.8}


def result_of(method, table=TABLE, scores=SCORES, truth="1", choose_by="best", **options):
    config = SearchConfig(method, "prod", choose_by, **options)
    policy = Script(table, cost=options.pop("cost", None))
    ((_, tree),) = search([Problem("p", truth, {"id": 7})], policy, Table(scores), config)
    return tree, record(tree, config.rule, config.choose, method.kind, {"method": type(method).__name__}), policy


@pytest.mark.parametrize("rule", RULES)
def test_chain_scores_are_those_of_the_aggregation(rule):
    tree = GrowingTree(Problem("p"), 0, None)
    tree.parent, tree.text, tree.score = [-1, 0, 1, 0, -1], list("abcde"), [0.5, 0.0, 1.0, 0.25, math.nan]
    value_N, key_N = tree.chain_scores([0, 2, 3, 4, -1], rule)
    score_BP = np.array([[0.5, 0, 0], [0.5, 0, 1], [0.5, 0.25, 0]], np.float32)
    mask_BP = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 0]], bool)
    np.testing.assert_allclose(key_N[:3], rank_keys(score_BP, mask_BP)[rule], rtol=1e-6)
    np.testing.assert_allclose(value_N[:3], aggregate([[0.5], [0.5, 0.0, 1.0], [0.5, 0.25]], rule), rtol=1e-6)
    assert np.isnan(value_N[3:]).all() and np.isnan(key_N[3:]).all()


def test_a_rule_of_probabilities_refuses_other_scores():
    tree = GrowingTree(Problem("p"), 0, None)
    tree.parent, tree.text, tree.score = [-1], ["a"], [-0.5]
    refused(ValueError, "'prod'", tree.chain_scores, [0], "prod")
    assert tree.chain_scores([0], "min")[0] == [-0.5]


def test_the_best_by_hand():
    yes, no = np.ones(3, bool), np.zeros(3, bool)
    assert best([0.1, 0.7, 0.7], yes) == 1
    assert best([0.1, 0.7, np.nan], np.array([True, False, True])) == 0  # an answer comes before a score
    assert best([0.1, 0.7, np.nan], no) == 1
    assert best([-np.inf, np.nan, -np.inf], yes) == 0  # a product of 0 is a score
    assert best([np.nan] * 3, yes) is None


def test_votes_by_hand():
    assert vote([0, 1, 1, -1, -1, -1], [1, 1, 1, 1, 1, 1]) == 1
    assert vote([0, 1, 1], [0.9, 0.3, 0.4]) == 0
    assert vote([0, 1, 0, 1], [0.1, 0.3, 0.2, 0.0]) == 0  # 0.1 + 0.2 ties with 0.3, the first to appear wins
    assert vote([-1, -1], [1, 1]) is None
    assert vote([0, 1, 0], [1e-14, 3e-14, 1e-14]) == 1  # products of many scores: what counts is their ratio
    assert vote([1, 0, 1], [1e-14, 3e-14, 2e-14]) == 0 and vote([1, 0], [0.0, 0.0]) == 0  # and they tie as others do


def test_best_of_n_and_votes_on_one_pool():
    tree, record, policy = result_of(BestOfN(4))
    assert [call[1:] for call in policy.calls] == [(4, "end", 0)]
    # Chains: a 1 (0.30) twice, b 2 (0.72), and one cut off, whose score would be the best.
    assert record["search"]["chosen"] == 1 and record["search"]["score"] == pytest.approx(0.72)
    assert (record["search"]["answer"], record["search"]["correct"]) == ("2", False)
    for how, answer, score in (("majority", "1", 0.30), ("weighted", "2", 0.72)):
        result = choose(tree, "prod", how, {1: ("1", True), 3: ("2", False)})
        assert (result.answer, result.score) == (answer, pytest.approx(score))


@pytest.mark.parametrize("how", ["Weighted", "best ", "vote", ""])
@pytest.mark.parametrize("draws", [True, False])
def test_choose_refuses_an_unknown_choice(how, draws):
    tree = result_of(BestOfN(4))[0] if draws else GrowingTree(Problem("p"), 0, None)
    with pytest.raises(ValueError, match=f"how is {how!r}: use one of best, majority, weighted"):
        choose(tree, "prod", how, {1: ("1", True), 3: ("2", False)})


def test_a_low_score_is_kept_as_it_is():
    _, result, _ = result_of(BestOfN(4), scores=SCORES | {"a": 3e-9, "b": 2e-8})
    assert [sample["scores"][0] for sample in result["samples"]] == [3e-9, 2e-8, 1.0, 3e-9]


def test_a_pool_is_read_by_the_evaluation():
    _, result, _ = result_of(BestOfN(4))
    assert record_of(tree_of(result)) == result
    assert [sample["steps"][0] for sample in result["samples"]] == ["a", "b", "c~", "a"]
    assert [sample["correct"] for sample in result["samples"]] == [True, False, False, True]
    assert result["samples"][2]["answer"] is None and result["samples"][2]["finish_reason"] == "length"
    assert result["samples"][0] | {"scores": None} == {
        "steps": ["a", "The answer is 1."], "answer": "1", "answer_rule": "statement", "correct": True, "scores": None,
        "finish_reason": "stop", "tokens": 20, "logprob": -1.0}  # fmt: skip
    assert result["id"] == 7
    report = best_of_n_report([tree_of(result)], seed=0)
    assert report["rules"]["prod"]["best_of_n"]["value"][-1] == 0  # b, which is wrong, as chosen above
    assert report["majority"]["value"][-1] == 1 and report["without_answer"] == 1


def test_a_tree_holds_every_draw():
    _, result, _ = result_of(Beam(2, 2), {k: v[:2] for k, v in TABLE.items()})
    assert record_of(tree_of(result)) == result
    # Four first draws are two steps drawn twice, and each of them is drawn from twice, with one result.
    assert [(node["text"], len(node["draws"])) for node in result["nodes"]] == [
        ("a", 2), ("b", 2), ("The answer is 2.", 2), ("The answer is 1.", 2)]  # fmt: skip
    node = result["nodes"][result["search"]["chosen"]]
    assert (node["answer"], node["correct"], node["parent"]) == ("2", False, 1)
    assert node["draws"] == [{"from": 1, "finish_reason": "stop", "tokens": 10, "logprob": -1.0}] * 2
    assert result["search"]["policy_tokens"] == 80 == sum(d["tokens"] for n in result["nodes"] for d in n["draws"])


def test_scores_that_are_not_numbers_are_marked():
    tree, result, _ = result_of(BestOfN(4), scores={})
    assert (result["search"]["chosen"], result["search"]["unscored_steps"]) == (None, 5)
    assert result["search"]["reason"] == "no finished chain has a finite score at every step"
    assert len(result["samples"]) == 4 and all(sample["unscored"] for sample in result["samples"])
    tree_of(result)
    answers = {1: ("1", True), 3: ("2", False)}
    assert choose(tree, "prod", "majority", answers).answer == "1"  # a majority asks for no score
    _, result, _ = result_of(Beam(2, 2), scores={})
    assert result["search"]["chosen"] is None and [node["text"] for node in result["nodes"]] == ["a", "b", "c~"]


def test_a_problem_without_an_answer_has_a_result_that_is_not_judged():
    _, result, _ = result_of(BestOfN(4), truth=None)
    assert result["search"]["answer"] == "2" and result["search"]["correct"] is None
    assert "answer" not in result and not any("correct" in sample for sample in result["samples"])


def test_empty_chains_and_failures_are_counted():
    _, result, _ = result_of(BestOfN(4), TABLE | {(): ["", "!", "a", "b"]})
    assert len(result["samples"]) == 2
    assert (result["search"]["empty"], result["search"]["failed"]) == (1, 1)
    assert result["empty_samples"] == 1  # an evaluation of the record draws from three samples
    assert best_of_n_report([tree_of(result)], seed=0)["n_samples"] == 3
    assert result["search"]["error"] == "the server is down"
    tree, result, _ = result_of(BestOfN(4), {(): [""]})
    assert result is None and len(tree.draws) == 4


# ---- The conformal filter: what it accepts, guarantees and refuses.


WAY = {"method": "BestOfN", "n": 8, "rule": "prod", "choose": "best", "policy": "p", "seed": 0}


def results(count, number, name="p", **way):
    """Chosen chains whose score is the probability that they are right."""
    rng = np.random.default_rng(number)
    score_N = rng.uniform(size=count)
    right_N = rng.uniform(size=count) < score_N
    return [
        {"problem": f"{name}{i}", "samples": [{"steps": ["s"]}], "search": WAY | way | {
            "chosen": 0, "answer": "1", "score": float(score), "correct": bool(right), "policy_tokens": i}}
        for i, (score, right) in enumerate(zip(score_N, right_N, strict=True))
    ]  # fmt: skip


def written(tmp_path, known, new):
    write_records(tmp_path / "known.jsonl", known)
    write_records(tmp_path / "new.jsonl", new)
    return tmp_path / "new.jsonl", tmp_path / "known.jsonl", tmp_path / "out.jsonl"


def test_the_threshold_is_that_of_the_bound():
    records = results(500, 0)
    scores, right = (np.array([record["search"][key] for record in records]) for key in ("score", "correct"))
    threshold = calibrate(records, 0.2, 0.9)
    assert threshold == accept_threshold(scores, right, 0.2, confidence=0.9) and 0.4 < threshold.threshold < 0.9
    edge = {**records[0], "search": records[0]["search"] | {"score": threshold.threshold}}
    assert accept(edge, threshold)["search"]["accepted"]
    edge["search"]["score"] -= 1e-9
    assert not accept(edge, threshold)["search"]["accepted"]


def test_a_search_without_a_choice_is_not_accepted_and_not_counted():
    records = results(500, 0)
    none = {"problem": "none", "search": WAY | {"chosen": None, "score": None, "correct": None}}
    threshold = calibrate(records, 0.2, 0.9)
    assert calibrate([*records, none], 0.2, 0.9) == threshold
    assert accept(none, threshold)["search"]["accepted"] is False


def test_too_few_results_accept_nothing():
    threshold = calibrate(results(5, 0), 0.01, 0.99)
    verdict = accept(results(1, 1)[0], threshold)["search"]
    assert (verdict["accepted"], verdict["threshold"]) == (False, None)


def test_the_command_of_the_filter(tmp_path, capsys):
    new, known, out = written(tmp_path, results(500, 0), results(200, 1, "q"))
    args = ["search", "filter", "--input", str(new), "--calibrate", str(known), "--output", str(out)]
    assert cli.main([*args, "--error-rate", "0.2", "--confidence", "0.9"]) == 0
    records = list(read_records(out))
    taken = [record["search"] for record in records if record["search"]["accepted"]]
    assert len(records) == 200 and 20 < len(taken) < 150
    assert {(x["error_rate"], x["confidence"]) for x in taken} == {(0.2, 0.9)}
    assert min(x["score"] for x in taken) >= taken[0]["threshold"]
    said = capsys.readouterr().out
    assert f"accepted: {len(taken)}, abstained: {200 - len(taken)}" in said
    assert sum(not x["correct"] for x in taken) == int(said.split("accepted_wrong: ")[1].split(",")[0])


@pytest.mark.parametrize(
    ("known", "new", "said"),
    [
        (results(9, 0), results(9, 1, "q", n=4, seed=1), "search.n"),
        (results(9, 0), results(9, 1), "1: problem"),
        (results(9, 0) + results(1, 1), results(9, 1, "q"), "10: problem"),
        (results(9, 0) + results(9, 0, "r", n=4), results(9, 1, "q"), "record 10"),
        ([{"problem": "p", "steps": ["s"]}], results(9, 1, "q"), "1: search"),
    ],
)
def test_refusals(known, new, said, tmp_path):
    new, known, out = written(tmp_path, known, new)
    refused(ValueError, said, filter_file, new, known, out, 0.2, 0.9)
    assert not out.exists()


def test_refused_scores():
    records = json.loads(json.dumps(results(3, 0)))
    records[1]["search"]["correct"] = None
    refused(ValueError, "record 2: search.correct", calibrate, records, 0.2, 0.9)
    records[0]["search"]["score"] = 1.5
    refused(ValueError, "record 1: search.score", calibrate, records, 0.2, 0.9)


@pytest.mark.parametrize(
    "record",
    [
        {"samples": [{"steps": ["a"], "finish_reason": "length"}, {"steps": ["b"], "finish_reason": "stop"}]},
        {"nodes": [{"parent": -1, "text": "a", "draws": [{"from": -1, "finish_reason": "length"}]}]},
    ],
)
def test_samples_that_were_cut_off_are_counted_and_the_limit_is_named(record, tmp_path, capsys):
    from types import SimpleNamespace

    from jprm.apps.cli.search import tell_cut
    from jprm.methods.search.jobs import _counts

    search = {"chosen": None, "correct": None, "policy_tokens": 160, "over_budget_tokens": 0}
    write_records(tmp_path / "found.jsonl", [{"problem": "p", **record, "search": search}])
    counts = _counts(tmp_path / "found.jsonl")
    assert counts["cut"] == 1 and counts["chosen"] == 0
    tell_cut(counts, SimpleNamespace(config=SimpleNamespace(max_tokens=160)))
    assert "1 samples were cut off by max_tokens" in capsys.readouterr().out

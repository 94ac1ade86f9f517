"""`jprm sample`: what a pool holds, and how a stopped command continues; and majorities without a model."""

import json
import math
import re
import types

import jax
import numpy as np
import pytest
from refusing import refused
from stub_server import reply
from test_sampler import Letters, make
from toy_policy import Markov

from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.io.outputs import Bar
from jprm.methods.decoding.decode import top_entropy
from jprm.methods.policy.load import load_policy
from jprm.methods.policy.protocol import Prefix, Problem, Sample
from jprm.methods.policy.sample_cache import PolicyError
from jprm.methods.search.pools import pool, sample_file
from jprm.tree import RecordError, read_records, tree_of

PROBLEMS = [{"problem": f"p{i}", "answer": "1", "id": i, "steps": ["unused"]} for i in range(7)]


@pytest.fixture
def folder(tmp_path):
    write_records(tmp_path / "problems.jsonl", PROBLEMS)
    return tmp_path


def run(folder, policy=None, n=4, at_once=2):
    return sample_file(policy or Markov(), folder / "problems.jsonl", folder / "pools.jsonl", n, at_once=at_once)


class Stopping(Markov):
    """Stops at sampling more than `limit` chains."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def draw_one(self, prefix, until, number):
        if self.sampled == self.limit:
            raise KeyboardInterrupt
        return super().draw_one(prefix, until, number)


def test_every_problem_becomes_a_pool(folder):
    counts = run(folder)
    records = list(read_records(folder / "pools.jsonl"))
    assert [(record["problem"], record["id"]) for record in records] == [(f"p{i}", i) for i in range(7)]
    policy = Markov()
    for record in records:
        tree_of(record)  # is a pool
        for number, sample in enumerate(record["samples"]):
            drawn = policy.draw_one(Prefix(record["problem"]), "end", number)
            assert sample["steps"] == list(drawn.steps) and sample["tokens"] == drawn.tokens
            assert sample["correct"] == (sample["answer"] == "1")
    samples = [sample for record in records for sample in record["samples"]]
    assert counts == {
        "problems": 7, "samples": 28, "correct": sum(sample["correct"] for sample in samples), "cut": 0,
        "tokens": 28 * 60,
    }  # fmt: skip
    before = (folder / "pools.jsonl").read_bytes()
    assert run(folder) == counts and (folder / "pools.jsonl").read_bytes() == before


def test_samples_that_are_cut_empty_or_failed_have_no_answer():
    whole, cut = Sample(("so the answer is 3",), 9, "stop", -1.5), Sample(("the answer is 3",), 8, "length")
    nothing, failed = Sample((), 1, "stop"), Sample((), 0, "error", error="down")
    record = pool(Problem("1 + 2", "3", {"id": 5}), [whole, cut, nothing, failed])
    assert record == {
        "problem": "1 + 2", "answer": "3", "id": 5, "empty_samples": 1, "failed_samples": 1,
        "samples": [
            {"steps": list(whole.steps), "answer": "3", "answer_rule": "statement", "correct": True,
             "finish_reason": "stop", "tokens": 9, "logprob": -1.5},
            {"steps": list(cut.steps), "answer": None, "correct": False, "finish_reason": "length", "tokens": 8},
        ],
    }  # fmt: skip
    assert "correct" not in pool(Problem("1 + 2"), [whole])["samples"][0]  # nobody knows


@pytest.mark.parametrize("limit", [0, 5, 8, 23, 27])
def test_a_stopped_command_continues_to_the_same_bytes(folder, limit):
    run(folder)
    whole = (folder / "pools.jsonl").read_bytes()
    (folder / "pools.jsonl").unlink()
    with pytest.raises(KeyboardInterrupt):
        run(folder, Stopping(limit))
    if (part := folder / "pools.jsonl.part").exists():
        part.write_bytes(part.read_bytes() + b'{"problem": "p')  # a line that was being written
    rest = Markov()
    run(folder, rest)
    assert (folder / "pools.jsonl").read_bytes() == whole
    assert rest.sampled == 28 - limit // 8 * 8  # whole blocks of two problems stay


class Telling(Markov):
    """Tells of each sample when it has ended, the last problem's first, and stops at the `limit`-th."""

    def __init__(self, limit=math.inf):
        super().__init__()
        self.limit, self.took = limit, lambda place, sample: None

    def sample(self, prefixes, n, *, until, seed):
        drawn = super().sample(prefixes, n, until=until, seed=seed)
        for count, place in enumerate(reversed(range(n * len(prefixes)))):
            if count == self.limit:
                raise KeyboardInterrupt
            self.took(place, drawn[place // n][place % n])
        return drawn


@pytest.mark.parametrize(("limit", "kept"), [(0, 0), (3, 0), (4, 1), (11, 2), (27, 6)])
def test_a_problem_is_kept_as_soon_as_its_samples_have_ended(folder, limit, kept):
    run(folder, at_once=7)
    whole = (folder / "pools.jsonl").read_bytes()
    (folder / "pools.jsonl").unlink()
    with pytest.raises(KeyboardInterrupt):
        run(folder, Telling(limit), at_once=7)
    part = folder / "pools.jsonl.part"
    lines = part.read_text().splitlines() if part.exists() else []
    assert [json.loads(line)["index"] for line in lines] == [6, 5, 4, 3, 2, 1][:kept]
    rest = Telling()
    run(folder, rest, at_once=7)
    assert (folder / "pools.jsonl").read_bytes() == whole and rest.sampled == 4 * (7 - kept)


def test_the_part_of_an_earlier_release_is_continued(folder):
    run(folder)
    whole = (folder / "pools.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (folder / "pools.jsonl").unlink()
    (folder / "pools.jsonl.part").write_bytes(b"".join(lines[:4]) + lines[4][:20])
    rest = Markov()
    run(folder, rest)
    assert (folder / "pools.jsonl").read_bytes() == whole and rest.sampled == 12


def test_the_bar_counts_samples_and_says_how_long_at_most(folder, monkeypatch, capsys):
    said = []
    monkeypatch.setattr(Bar, "add", lambda self, count=1, note=None: said.append((count, note)))
    policy = Telling()
    policy.watch, policy.options = None, types.SimpleNamespace(max_tokens=100)
    telling = policy.sample

    def sample(prefixes, n, **how):
        policy.watch(50, 0)
        return telling(prefixes, n, **how)

    policy.sample = sample
    run(folder, policy, at_once=7)
    first, *_, last = [note for _, note in said if note]
    assert "at most" in first and "50 tokens" in first and "at most" not in last and "% cut off" in last
    assert sum(count for count, _ in said) == 28


def test_published_problems_are_sent_to_the_command_that_reads_them(folder):
    write_records(folder / "problems.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    wanted = "problem: is absent; the record has 'question', 'answer'. Read it first: `jprm prepare gsm8k`"
    refused(RecordError, re.escape(wanted), run, folder)


def test_two_problems_of_one_id_are_refused_as_scores_of_them_would_be(folder):
    write_records(folder / "problems.jsonl", [*PROBLEMS, PROBLEMS[0]])
    refused(RecordError, "problems.jsonl:8: id: 0 is the id of line 1 too", run, folder)
    assert not (folder / "pools.jsonl").exists()


def test_another_request_and_a_policy_that_is_down_are_refused(folder):
    run(folder, n=4)
    refused(ValueError, r"another .*request \(n\)", run, folder, n=5)

    class Down(Markov):
        def draw_one(self, prefix, until, number):
            return Sample((), 0, "error", error="no route to host")

    (folder / "pools.jsonl").unlink()
    with pytest.raises(PolicyError, match="no route to host"):
        run(folder, Down())


def test_a_sampler_tells_of_each_sample_once_it_has_ended():
    sampler, took = make(temperature=0.7), {}
    sampler.took = took.__setitem__
    drawn = sampler.sample([Prefix("abc"), Prefix("b")], 2, until="end", seed=3)
    assert [[took[0], took[1]], [took[2], took[3]]] == drawn


def test_a_server_tells_of_each_sample(server):
    policy, took = load_policy(server / "policy.json"), {}
    policy.took = took.__setitem__
    drawn = policy.sample([Prefix("abc"), Prefix("b")], 2, until="end", seed=3)
    assert [[took[0], took[1]], [took[2], took[3]]] == drawn


def test_numbers_of_every_token():
    """Ids, log-probabilities and entropies are as many as the tokens; the entropies are those of the logits."""
    sampler, heard = make(logprobs=True, entropies=5, temperature=0.7, top_p=1.0), []
    sampler.watch = lambda tokens, ended: heard.append((tokens, ended))
    ((first, second),) = sampler.sample([Prefix("abc")], 2, until="end", seed=3)
    assert heard == sorted(heard) and heard[-1] == (first.tokens + second.tokens, 2)  # it tells how far it is
    assert len(first.token_ids) == len(first.token_logprobs) == len(first.token_entropies) == first.tokens
    ((plain, _),) = make(temperature=0.7, top_p=1.0).sample([Prefix("abc")], 2, until="end", seed=3)
    assert plain.steps == first.steps and plain.logprob == first.logprob and not plain.token_entropies
    record = pool(Problem("abc", "1"), [first])["samples"][0]
    assert record["token_ids"] == list(first.token_ids)
    np.testing.assert_allclose(record["token_entropies"], first.token_entropies, atol=1e-6)
    assert all(0 <= entropy <= math.log(5) + 1e-6 for entropy in first.token_entropies)
    assert sampler.tokenizer.decode(list(first.token_ids)) == "".join(text for text, _ in first.token_logprobs)
    assert isinstance(sampler.tokenizer, Letters)


def test_the_entropy_is_of_the_most_probable_tokens():
    logit_BV = np.log(np.array([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]], np.float32))
    entropy_B = jax.jit(top_entropy, static_argnums=1)(logit_BV, 2)
    third = 1 / 3
    two = -(2 * third * math.log(2 * third) + third * math.log(third))  # of 2/3 and 1/3
    np.testing.assert_allclose(entropy_B, [two, math.log(2)], rtol=1e-6)
    np.testing.assert_allclose(top_entropy(logit_BV, 9)[1], math.log(4), rtol=1e-6)


@pytest.fixture
def server(folder, serve):
    """A policy's file, whose server answers by the seed."""
    url = serve(lambda number, body: reply(f"so\n\nthe answer is {body['seed'] % 3}", tokens=7)).url
    (folder / "policy.json").write_text(json.dumps({"url": url, "model": "stub"}))
    return folder


def command(folder, *words):
    return cli.main([word.format(folder=folder) for word in words])


SAMPLE = ("sample", "--policy", "{folder}/policy.json", "--input", "{folder}/problems.jsonl", "--n", "3")


def test_shards_are_merged_to_the_same_bytes(server):
    files = [*SAMPLE, "--at-once", "2", "--output"]
    assert command(server, *files, "{folder}/whole.jsonl") == 0
    for shard in ("0/2", "1/2"):
        assert command(server, *files, "{folder}/parts.jsonl", "--shard", shard) == 0
    assert command(server, "merge", *map(str, sorted(server.glob("parts.jsonl.0*")))) == 0
    assert (server / "parts.jsonl").read_bytes() == (server / "whole.jsonl").read_bytes()


def test_the_command_line_changes_the_policy(server, capsys):
    changed = [*SAMPLE, "--output", "{folder}/pools.jsonl", "--prompt", "Solve {{problem}}"]
    assert command(server, *changed, "--set", "max_tokens=9") == 0
    assert f"\n{server}/pools.jsonl: 33.3% correct, 0.0% cut off\n" in capsys.readouterr().out
    assert command(server, *changed, "--set", "chat=true") == 2
    assert "chat: is no known field" in capsys.readouterr().err


def test_a_majority_needs_no_model(server, capsys):
    search = ["search", "best-of-n", "--policy", "{folder}/policy.json", "--input", "{folder}/problems.jsonl"]
    search += ["--budget", "1000", "--n", "4", "--output", "{folder}/votes.jsonl"]
    assert command(server, *search, "--choose", "majority") == 0
    for record in read_records(server / "votes.jsonl"):
        assert record["search"]["answer"] == "0" and record["search"]["score"] is None  # of 0, 1, 2, 0
        assert all("scores" not in sample and "unscored" not in sample for sample in record["samples"])
    assert command(server, *search, "--choose", "best") == 2
    assert "give --model DIR|P.json" in capsys.readouterr().err

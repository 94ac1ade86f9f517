"""`jprm search` from file to file: the command, what a killed run has left, and how it refuses."""

import json
import math
import threading

import pytest
from refusing import refused
from stub_server import Server, reply
from toy_policy import Markov
from toy_search import Script

import jprm
from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods import scored_files
from jprm.methods.decoding.sample_cache import PolicyError
from jprm.methods.evaluate.best_of_n import best_of_n_report
from jprm.methods.policy import load as policies
from jprm.methods.search import files, lockstep
from jprm.methods.search.beam import Beam
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.files import read_problems, search_file
from jprm.methods.search.lockstep import Rescorer, SearchConfig
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

    def one(self, prefix, until, number):
        if prefix.problem in ("p1", "p3"):
            return Script({(): ["!" if prefix.problem == "p1" else ""]}).one((), until, number)
        return super().one(prefix, until, number)


def test_a_problem_without_a_step_is_set_aside(folder):
    counts = run(folder, Poison())
    assert [record["id"] for record in read_records(folder / "out.jsonl")] == [0, 2, 4]
    assert (counts["problems"], counts["rejected"]) == (3, 2)
    assert list(map(json.loads, (folder / "out.jsonl.rejects").read_text().splitlines())) == [PROBLEMS[1], PROBLEMS[3]]


def test_a_server_that_goes_down_loses_nothing(folder):
    class Down(Markov):
        up = 60

        def one(self, prefix, until, number):
            self.up -= 1
            return super().one(prefix, until, number) if self.up >= 0 else Script({(): ["!"]}).one((), until, number)

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
    for record in records:
        assert record_of(tree_of(record)) == record
        result = record["search"]
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

    server = Server(arithmetic)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    load_good(monkeypatch)
    (folder / "policy.json").write_text(json.dumps({"url": server.url, "model": "tiny", "backoff_s": 0.05}))
    args = [
        "search",
        "beam",
        "--width",
        "1",
        "--expand",
        "3",
        "--policy",
        str(folder / "policy.json"),
        "--model",
        "run",
    ]
    args += ["--input", str(folder / "problems.jsonl"), "--output", str(folder / "out.jsonl"), "--budget", "100"]
    try:
        assert cli.main(args) == 0
    finally:
        server.shutdown()
        server.server_close()
    spent = [record["search"]["policy_tokens"] for record in read_records(folder / "out.jsonl")]
    assert sum(spent) == 5 * (3 * 2 + 3 * 5)
    # An attempt that finds the server's queue full is made again: the same prompt and seed.
    assert len({(body["prompt"], body["seed"]) for _, body in server.requests}) == 5 * 6

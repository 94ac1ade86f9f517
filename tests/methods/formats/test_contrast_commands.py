"""The contrast of two language models in every command: one folder or --reference, one set of scores."""

import dataclasses
import json
import time

import gguf
import numpy as np
import pytest
from published import CASES, CONTROL, VOCABULARY, make
from test_gguf import write
from test_serve import call, post
from tiny import TINY, params
from tiny_run import processbench_file
from toy_search import Script

import jprm
from experiments.real import state_readers, token_states
from jprm.apps import cli
from jprm.apps.serve import app
from jprm.apps.serve.app import prefix_cache
from jprm.apps.serve.engine import Engine
from jprm.checkpoints import base as bases
from jprm.methods.formats import hub
from jprm.methods.policy import load as policies
from jprm.tree import chains_of, tree_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)

pytestmark = pytest.mark.usefixtures("rows_of_512")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders `large`, `small` (one tokenizer and chat template), `other` (another tokenizer), and records of pairs."""
    folder = tmp_path_factory.mktemp("contrast")
    case = dataclasses.replace(CASES["math-psa"], lora=False)
    other = dataclasses.replace(CASES["math-shepherd"], name="other", config={})
    for name, of_model in {"large": case, "small": case, "other": other}.items():
        made, _ = make(folder, dataclasses.replace(of_model, name=name), seed=name)
        fields = json.loads((made / "tokenizer_config.json").read_text())
        (made / "tokenizer_config.json").write_text(json.dumps(fields | {"chat_template": CHATML}))
    for name, reference in {"contrast": "small", "mismatch": "other"}.items():
        record = {"like": "contrast", "base": "../large", "reference": f"../{reference}"}
        (folder / name).mkdir()
        (folder / name / "adapter.json").write_text(json.dumps(record))
    return folder


def pool(number, count=6, samples=4):
    """Pools whose right chains end in the sum."""
    rng = np.random.default_rng(number)
    for _ in range(count):
        a, b = (int(x) for x in rng.integers(3, 40, 2))
        steps = [[f"{a} + {b} = {a + b + k % 2}", f"The answer is {a + b + k % 2}."] for k in range(samples)]
        chains = [{"steps": s, "answer": a + b + k % 2, "correct": k % 2 == 0} for k, s in enumerate(steps)]
        yield {"problem": f"{number}: What is {a} + {b}?", "answer": a + b, "samples": chains}


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(line):
    assert cli.main(line.split()) == 0


def lines(path):
    return list(map(json.loads, path.read_text().splitlines()))


@pytest.fixture(scope="module")
def scored(folder):
    """Records, and their scores by `jprm score --model --reference`."""
    written(folder / "pool.jsonl", pool(0))
    both = f"--model {folder}/large --reference {folder}/small"
    run(f"score {both} --input {folder}/pool.jsonl --output {folder}/scored.jsonl")
    return lines(folder / "scored.jsonl")


def scores_of(records):
    return [sample["scores"] for record in records for sample in record["samples"]]


def test_a_server_answers_with_the_scores_of_the_command(folder, scored):
    prm = jprm.load(folder / "contrast")
    assert prefix_cache(prm, 1024) is None
    engine = Engine(prm, 256, "contrast")
    answers = [answer.json() for answer in call(engine, *(post("/v1/score", record) for record in pool(0)))]
    engine.close()
    np.testing.assert_allclose(scores_of([a["record"] for a in answers]), scores_of(scored), atol=1e-4, rtol=0)
    assert {answer["rule"] for answer in answers} == {"last"}


@pytest.mark.parametrize("method", ["best-of-n --n 2", "beam --width 2 --expand 2"])
def test_a_search_ranks_by_the_scores_of_the_command(folder, scored, tmp_path, monkeypatch, method):
    problem, *_ = pool(0)
    chains = [sample["steps"] for sample in problem["samples"][:2]]
    table = {(): [chain[0] for chain in chains]} | {(chain[0],): [chain[1]] for chain in chains}
    monkeypatch.setattr(policies, "load_policy", lambda path: Script(table))
    written(tmp_path / "problems.jsonl", [{key: problem[key] for key in ("problem", "answer")}])
    files = f"--policy any --input {tmp_path}/problems.jsonl --budget 80"
    wanted = {tuple(sample["steps"]): sample["scores"] for sample in scored[0]["samples"]}
    for name, models in {"two": f"{folder}/large --reference {folder}/small", "one": f"{folder}/contrast"}.items():
        out = tmp_path / f"{name}.jsonl"
        run(f"search {method} --model {models} {files} --output {out}")
        (found,) = map(tree_of, lines(out))
        for chain in chains_of(found):
            steps = tuple(found.nodes[i].text for i in chain)
            np.testing.assert_allclose([found.nodes[i].score for i in chain], wanted[steps], atol=1e-4, rtol=0)
        best = max(wanted[tuple(chain)][-1] for chain in chains)
        assert lines(out)[0]["search"]["score"] == pytest.approx(best, abs=1e-4)


def test_a_contrast_is_fused_and_the_verifier_used(folder, scored, tmp_path):
    one, two = (written(tmp_path / f"policy{i}.jsonl", pool(i)) for i in (1, 2))
    run(f"fuse fit {one} {two} --sources form prm={folder}/contrast --output {tmp_path}/fused")
    run(f"score --model {tmp_path}/fused --input {folder}/pool.jsonl --output {tmp_path}/out.jsonl")
    verifier = json.loads((tmp_path / "fused" / "verifier.json").read_text())
    assert [source["name"] for source in verifier["sources"]] == ["form", f"prm={folder}/contrast"]
    assert all(0 <= score <= 1 for scores in scores_of(lines(tmp_path / "out.jsonl")) for score in scores)


def test_benchmarks_and_their_page_read_a_contrast(folder, tmp_path):
    processbench_file(tmp_path / "easy.json", 12, 1)
    written(tmp_path / "pool.jsonl", pool(3))
    suite = {"processbench": {"data": ["easy.json"], "calibrate": "easy.json"}, "best_of_n": {"data": ["pool.jsonl"]}}
    (tmp_path / "suite.json").write_text(json.dumps(suite))
    easy, prm = tmp_path / "easy.json", folder / "contrast"
    run(f"eval processbench --model {prm} --data {easy} --calibrate {easy} --json {tmp_path}/report.json")
    assert json.loads((tmp_path / "report.json").read_text())["easy"]["threshold"] == 0  # of log ratios
    run(f"eval suite --model {prm} --suite {tmp_path}/suite.json --output {tmp_path}/suite")
    run(f"report {tmp_path}/suite --output {tmp_path}/page.html")
    assert "contrast" in (tmp_path / "page.html").read_text()


class Opened:
    """A server that opens, and ends when it is asked to."""

    def __init__(self, application):
        self.state, self.should_exit = application.state, False

    def run(self):
        self.state.when_open()
        while not self.should_exit:
            time.sleep(0.01)


@pytest.mark.parametrize(
    "line",
    [
        "score --model {bad} --input {pool} --output {out}",
        "score --model {folder}/large --reference {folder}/other --input {pool} --output {out}",
        "search best-of-n --n 2 --policy any --model {bad} --input {pool} --budget 80 --output {out}",
        "fuse fit {pool} --sources prm={bad} --output {out}",
        "serve {bad} --port 0",
        "eval best-of-n --model {bad} --data {pool} --json {out}",
    ],
)
def test_two_tokenizers_are_refused_with_both_names(folder, scored, tmp_path, line, capfd, monkeypatch):
    monkeypatch.setattr(policies, "load_policy", lambda path: Script({}))
    monkeypatch.setattr(app.uvicorn, "Config", lambda app, **options: app)
    monkeypatch.setattr(app.uvicorn, "Server", Opened)
    monkeypatch.setattr(app.sys, "setswitchinterval", lambda seconds: None)
    names = {"folder": folder, "bad": folder / "mismatch", "pool": folder / "pool.jsonl", "out": tmp_path / "out"}
    assert cli.main(line.format(**names).split()) == 2
    said = capfd.readouterr().err
    assert said.count("have different tokenizers") == 1
    assert "/large and" in said and "/other have" in said


def test_names_of_the_hub_reach_the_resolver(folder, scored, tmp_path, monkeypatch):
    asked = []

    def resolve(address, names=(), found=None):
        asked.append(address)
        return jprm.io.storage.path_of(folder / address.split("/")[3].partition("@")[0])

    monkeypatch.setattr(hub, "folder", resolve)
    large, reference = "hf://o/large@main", "hf://o/small@main"
    run(f"score --model {large} --reference {reference} --input {folder}/pool.jsonl --output {tmp_path}/a")
    assert scores_of(lines(tmp_path / "a")) == scores_of(scored)
    (tmp_path / "hub").mkdir()
    record = {"like": "contrast", "base": large, "reference": reference}
    (tmp_path / "hub" / "adapter.json").write_text(json.dumps(record))
    run(f"score --model {tmp_path}/hub --input {folder}/pool.jsonl --output {tmp_path}/b")
    assert scores_of(lines(tmp_path / "b")) == scores_of(scored)
    assert set(asked) == {large, reference}


def test_each_model_is_loaded_once_and_reads_a_row_once(folder, monkeypatch):
    from jprm.methods import implicit

    loaded, read, load, log_probs = [], [], bases.load_language_model, implicit.log_probs
    monkeypatch.setattr(bases, "load_language_model", lambda *a: loaded.append(a[0]) or load(*a))
    monkeypatch.setattr(
        implicit, "log_probs", lambda p, c, rows: read.append(rows.tokens.shape) or log_probs(p, c, rows)
    )
    prm = jprm.load(folder / "contrast")
    (record,) = pool(0, 1)
    prm.score_trees([tree_of(record)])
    assert len(loaded) == 2 and read == [(1, 512)] * 2


def test_the_command_equals_the_study(folder, scored):
    prompt = "{problem}"
    bases_ = [token_states.Base.load(str(folder / name), [1], prompt) for name in ("small", "large")]
    for record, result in zip(pool(0), scored, strict=True):
        tree = tree_of(record)
        small, large = (token_states.samples_of(token_states.computed(base, 1, tree), tree) for base in bases_)
        sums = state_readers.contrast(small, large) * [len(sample.logprob_T) for sample in small]
        np.testing.assert_allclose([sample["scores"][-1] for sample in result["samples"]], sums, atol=1e-4, rtol=0)


def test_a_gguf_file_and_a_folder_are_mixed(folder):
    inner = json.loads((folder / "small" / "tokenizer.json").read_text())
    words = sorted(inner["model"]["vocab"], key=inner["model"]["vocab"].get)
    path = write(
        folder / "small.gguf", config := dataclasses.replace(TINY, vocab_size=VOCABULARY), params(config)["decoder"],
        "qwen2", add_tokenizer_model="gpt2", add_tokenizer_pre="qwen2", add_token_list=[*words, *CONTROL],
        add_token_merges=[" ".join(pair) for pair in inner["model"]["merges"]],
        add_token_types=[gguf.TokenType.NORMAL] * len(words) + [gguf.TokenType.CONTROL] * len(CONTROL),
        add_eos_token_id=len(words) + CONTROL.index("<|im_end|>"), add_chat_template=CHATML, add_context_length=600,
    )  # fmt: skip
    (record,) = pool(0, 1)

    def scores(model, reference):
        return jprm.load(folder / model, reference=str(folder / reference)).score_trees([tree_of(record)])[0]

    there, back = scores("large", path.name), scores(path.name, "large")
    np.testing.assert_allclose(there, -back, atol=1e-4, rtol=0)
    np.testing.assert_allclose(there + scores(path.name, "small"), scores("large", "small"), atol=1e-4, rtol=0)
    assert jprm.load(folder / "large", reference=str(path)).context == 600

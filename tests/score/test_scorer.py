"""Scores of a trained run: equal through every interface, and files of scores that survive a kill."""

import dataclasses
import gc
import json
import math
import shutil

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from tiny import one_chain_each
from tiny_run import chains, pool_of, trees

import jprm
from jprm.methods.implicit import LogRatio
from jprm.methods.jobs import score as scored_files
from jprm.pack import PackReport, pack
from jprm.score import scorer
from jprm.token_tree import token_tree
from jprm.tree import chains_of, record_of, tree_of

CLOSE = 2e-6
"""Rows of other lengths and neighbours add in another order: some units in the last place of a float32 near one, and a
rounding to seven digits."""


@pytest.fixture(scope="module", autouse=True)
def short_rows():
    """Rows of 128 to 512 tokens, so that the tiny run's texts meet every size; chunks of 8 records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "SHORTEST", 128)
        patch.setattr(scorer, "FILLED", 512)
        patch.setattr(scorer, "LONGEST", 512)
        for module in (scorer, scored_files):
            patch.setattr(module, "CHUNK", 8)
        yield


def test_a_score_depends_on_nothing_behind_its_step(prm):
    record = chains(1, seed=4, longest=8)[0]
    whole = prm.score(record["problem"], record["steps"])
    assert whole.shape == (len(record["steps"]),) and whole.dtype == np.float32
    assert ((0 < whole) & (whole < 1)).all() and len(set(whole.tolist())) > 1
    for k in range(1, len(whole)):
        np.testing.assert_allclose(prm.score(record["problem"], record["steps"][:k]), whole[:k], atol=CLOSE, rtol=0)


def test_one_string_is_no_list_of_steps(prm):
    for read in (prm.score, prm.logits):
        refused(TypeError, "steps", read, "2 + 2?", "4.")
        refused(TypeError, "score_many", read, ["2 + 2?", "3 + 3?"], [["4."], ["6."]])


def test_logits_need_no_mesh_and_give_the_score(prm):
    record = chains(1, seed=4)[0]
    logits = prm.logits(record["problem"], record["steps"])
    assert logits.shape == (len(record["steps"]), 2) and logits.dtype == np.float32
    score = prm.score(record["problem"], record["steps"])
    np.testing.assert_allclose(np.asarray(prm.readout.score(logits)), score, atol=1e-6)  # rounded to seven decimals


def test_files_keep_the_digits_of_a_low_score():
    """Seven decimals made all below 5e-8 the same, and a product with one of them 0."""
    score_N = np.array([3e-9, 2e-8, 1e-30, 0, 0.01234567, 0.1, 1 / 3, 1 - 2**-24, 1, -123.45678], np.float32)
    chain = {"problem": "p", "steps": ["x"] * len(score_N)}
    stored = json.loads(json.dumps(scorer.scored(chain, tree_of(chain), {"score": score_N})))["scores"]
    np.testing.assert_allclose(stored, score_N, rtol=5e-7)  # half a unit of the seventh digit
    assert stored[4:7] == [0.01234567, 0.1, 0.3333333]  # and none that float32 has not


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_trees_and_pools_score_as_their_chains_do(prm, seed):
    tree = trees(1, seed)[0]
    pool = pool_of(chains(4, seed))
    scored_tree, scored_pool = prm.score_many([tree, pool])
    texts = [node["text"] for node in tree["nodes"]]
    for path in chains_of(tree_of(tree)):
        expected = prm.score(tree["problem"], [texts[node] for node in path])
        actual = [scored_tree["nodes"][node]["score"] for node in path]
        np.testing.assert_allclose(actual, expected, atol=CLOSE, rtol=0)
    for sample in scored_pool["samples"]:
        np.testing.assert_allclose(sample["scores"], prm.score("q", sample["steps"]), atol=CLOSE, rtol=0)


def test_records_come_back_in_order_with_scores_and_nothing_else_changed(prm):
    records = [*chains(9, seed=5), *trees(5, seed=5), pool_of(chains(3, seed=6)), *chains(3, seed=7, longest=40)]
    as_given = json.dumps(records)
    scored = list(prm.score_many(iter(records)))
    assert json.dumps(records) == as_given
    for record, after in zip(records, scored, strict=True):
        if "steps" in record:
            assert after == record | {"scores": after["scores"]}
            assert len(after["scores"]) == len(record["steps"])
        elif "nodes" in record:
            assert [{k: v for k, v in node.items() if k != "score"} for node in after["nodes"]] == record["nodes"]
            assert {**after, "nodes": None} == {**record, "nodes": None}
        else:
            stripped = [{k: v for k, v in sample.items() if k != "scores"} for sample in after["samples"]]
            assert after | {"samples": stripped} == record
    # In another order and in other company, every record has the same scores.
    for record, after in zip(records[::-1], prm.score_many(records[::-1]), strict=True):
        before = scored[records.index(record)]
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            assert a == b or a == pytest.approx(b, abs=CLOSE)


@pytest.mark.parametrize("one_chain", [False, True])
def test_pools_without_steps_come_back_even_if_they_fill_a_chunk(prm, monkeypatch, one_chain):
    monkeypatch.setattr(scorer, "chain_rows", lambda config: one_chain)
    empty, (chain,) = {"problem": "2 + 2?", "samples": [], "empty_samples": 3}, chains(1, seed=2)
    records = [*[empty] * 8, chain, empty]  # the first chunk has no step, the second a few
    assert [*prm.score_many(records)] == [*[empty] * 8, *prm.score_many([chain]), empty]
    sizes = [len(score_N) for score_N in prm.score_trees(list(map(tree_of, records)))]
    assert sizes == [0] * 8 + [len(chain["steps"]), 0]
    assert prm.outputs_of([]) == [] and prm.score_trees([tree_of(empty)])[0].shape == (0,)


def test_a_chain_longer_than_any_row_gets_its_own(prm):
    long = {"problem": "long", "steps": [f"add {i}" for i in range(120)]}
    assert sum(len(step) + 1 for step in long["steps"]) > scorer.LONGEST
    score, *rest = prm.score_many([long, *chains(3)])
    np.testing.assert_allclose(prm.score("long", long["steps"][:20]), score["scores"][:20], atol=CLOSE, rtol=0)
    assert len(score["scores"]) == 120 and len(rest) == 3


def test_a_tree_longer_than_any_row_is_split(prm):
    branch = [f"dot {i}" for i in range(20)]
    pool = {"problem": "wide", "samples": [{"steps": [f"end {j}", *branch]} for j in range(10)]}
    (scored,) = prm.score_many([pool])
    for sample in (scored["samples"][0], scored["samples"][9]):
        np.testing.assert_allclose(sample["scores"], prm.score("wide", sample["steps"]), atol=CLOSE, rtol=0)


def test_rows_are_no_longer_than_asked_for_unless_a_chain_is(prm):
    """Trees are split at their branches: scores stay those of the whole tree."""
    pool = tree_of({"problem": "wide", "samples": [{"steps": [f"end {j}", "dot 1", "far 2"]} for j in range(60)]})
    chain = tree_of({"problem": "long", "steps": [f"dot {i}" for i in range(60)]})
    prepared = prm.prepare([pool, chain], 256)
    lengths = [batch.rows.tokens.shape[1] for batch in prepared.batches]
    assert set(lengths) == {256, 512} and lengths.count(512) == 1
    for short, whole in zip(prm.outputs_of(prepared), prm.outputs_of([pool, chain]), strict=True):
        np.testing.assert_allclose(short["score"], whole["score"], atol=CLOSE, rtol=0)


def test_every_tree_has_its_row_and_rows_are_full(prm):
    """Trees of 20 to 250 tokens: what is left after full rows goes into shorter ones, one of a size."""
    token_trees = [token_tree(tree_of(tree), prm.layout) for tree in trees(100, seed=8)]
    groups = scorer.row_groups(token_trees, scorer.LONGEST)
    assert sorted(i for members in groups.values() for i in members) == list(range(100))
    packed = [
        pack([token_trees[i] for i in group], tokens, tokens // 2, too_long="error") for tokens, group in groups.items()
    ]
    assert list(groups) == sorted(groups, reverse=True) and max(groups) == scorer.FILLED
    assert all(len(p.rows.tokens) <= 2 for p in packed[1:])
    report = sum((p.report for p in packed), PackReport())
    assert report.tokens == sum(len(tree.tokens_N) for tree in token_trees)
    assert report.padding_share < 0.1


def test_a_chain_a_row_gives_the_same_scores(prm, monkeypatch):
    """By the same attention, so that only rows differ: each chain in the shortest, several of these at once."""
    branch = [f"dot {i}" for i in range(20)]
    wide = {"problem": "wide", "samples": [{"steps": [f"end {j}", *branch[: 2 * j]]} for j in range(10)]}
    equal = {"problem": "equal", "samples": [{"steps": ["add 1"]}] * 300}  # more than a row has slots
    records = [*chains(5, seed=5), *trees(5, seed=5), wide, equal, *chains(2, seed=7, longest=40)]
    expected, sizes = list(prm.score_many(records)), []
    whole = scorer.readout_of_rows

    def counted(params, config, rows, reading):
        assert one_chain_each(rows).all()
        sizes.append(rows.tokens.shape)
        return whole(params, config, rows, reading)

    counted.lower = whole.lower  # compiled before
    monkeypatch.setattr(scorer, "readout_of_rows", counted)
    monkeypatch.setattr(scorer, "chain_rows", lambda config: True)
    for a, b in zip(prm.score_many(records), expected, strict=True):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x == y or x == pytest.approx(y, abs=CLOSE)
    assert set(sizes) == {(4, 128), (2, 256), (1, 512)}  # rows of so many tokens, 512 at once
    assert sizes.count((1, 512)) < len(sizes) / 4


def test_two_models_score_a_chain_a_row_too(prm, monkeypatch):
    policy = dataclasses.replace(prm.config, head="language")
    other = LogRatio(jax.tree.map(lambda x: 1.1 * x, prm.params), policy, 0.5)
    implicit = dataclasses.replace(prm, config=policy, ratio=other)
    scored_trees = [tree_of(record) for record in trees(5, seed=5)]
    expected = np.concatenate(implicit.score_trees(scored_trees))
    monkeypatch.setattr(scorer, "chain_rows", lambda config: True)
    # Sums of up to a hundred differences of logarithms, each off by a few 6e-8 of some five.
    np.testing.assert_allclose(np.concatenate(implicit.score_trees(scored_trees)), expected, atol=1e-4, rtol=0)
    assert np.ptp(expected) > 0.1


def test_few_shapes_are_compiled(prm):
    scorer.readout_of_rows.clear_cache()
    records = [record for k in range(50) for record in chains(1, seed=100 + k, longest=2 + 3 * (k % 25))]
    assert len({len(record["steps"]) for record in records}) > 10
    for record in records:
        prm.score(record["problem"], record["steps"])
    list(prm.score_many(records))
    assert scorer.readout_of_rows._cache_size() <= 4


def test_parameters_that_are_not_finite_are_named(prm):
    broken = dataclasses.replace(prm, params=jax.tree.map(lambda x: x * math.nan, prm.params))
    refused(FloatingPointError, "'the problem', step 0", broken.score, "the problem", ["add 1", "add 2"])


def test_a_folder_that_holds_no_run_is_refused(tiny_run, tmp_path, one_device):
    refused(FileNotFoundError, "nowhere", jprm.load, tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    shutil.copy(tiny_run.folder / "experiment.json", tmp_path)
    refused(ValueError, "checkpoint", jprm.load, tmp_path)

    folder = tmp_path / "run"
    shutil.copytree(tiny_run.folder, folder)
    (folder / "tokenizer.json").unlink()
    refused(FileNotFoundError, "tokenizer.json", jprm.load, folder)
    values = json.loads((folder / "experiment.json").read_text())
    for text in ('{"name": ', "[]", json.dumps(values | {"steps": "six"}), json.dumps({"name": "x"}), "\xff"):
        (folder / "experiment.json").write_text(text, encoding="latin-1")
        refused(ValueError, "experiment.json", jprm.load, folder)


def test_a_run_that_was_trained_with_a_kernel_is_scored_on_a_cpu(tiny_run, tmp_path, one_device):
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    path = tmp_path / "run" / "experiment.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"model": values["model"] | {"attention": "kernel"}}))
    stored, original = jprm.load(tmp_path / "run"), jprm.load(tiny_run.folder)
    assert (original.config.attention, stored.config.attention) == ("reference", "paths")
    assert jprm.load(tmp_path / "run", attention="kernel").config.attention == "kernel"  # asked for: interpreted
    scored_trees = [tree_of(record) for record in [*chains(5), *trees(2)]]
    # Sums of one row in another order: a few roundings of 6e-8 on logits of size 1.
    np.testing.assert_allclose(
        *(np.concatenate(prm.score_trees(scored_trees)) for prm in (stored, original)), atol=1e-5, rtol=0
    )


def test_a_chain_that_no_memory_holds_is_named_before_it_is_compiled(prm, monkeypatch):
    """Written out, attention over a million tokens is 2^40 float32 a head: 4 TiB, which no machine gives."""
    written_out = dataclasses.replace(prm, config=dataclasses.replace(prm.config, attention="reference"), context=None)
    monkeypatch.setattr(scorer, "readout_of_rows", lambda *args: pytest.fail("compiled"))
    refused(ValueError, "'long': .*1,048,576", written_out.score, "long", ["3 + 4 = 7 " * 60_000])


# A restore that fails leaves reads of Orbax behind; they end, with warnings, when they are collected.
@pytest.mark.filterwarnings("ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_that_is_damaged_or_of_another_model_says_what_is_wrong(tiny_run, one_device, tmp_path):
    """And not which handlers the library tried."""
    gc.freeze()  # the collection at the end walks only this test's objects
    folder = shutil.copytree(tiny_run.folder, tmp_path / "run")
    said = (folder / "experiment.json").read_text()
    (folder / "experiment.json").write_text(said.replace('"vocab_size": 256', '"vocab_size": 300'))
    refused(ValueError, r"\(300, .*\(256, ", jprm.load, folder)
    (folder / "experiment.json").write_text(said)
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(newest / "params" / "d")
    refused(ValueError, f"{newest}: ", jprm.load, folder)
    gc.collect()


@pytest.mark.parametrize("records", ["chains.jsonl", {"problem": "p", "steps": ["a"]}])
def test_what_are_no_records_is_refused_at_the_call(prm, records):
    refused(ValueError, "takes records", prm.score_many, records)


def test_score_many_names_the_bad_record(prm, monkeypatch):
    monkeypatch.setattr(scorer, "CHUNK", 2)
    records = [*({"problem": "p", "steps": ["a"]} for _ in range(2)), {"problem": "p", "steps": "a"}]
    refused(jprm.tree.RecordError, "^record 3: steps: ", list, prm.score_many(records))


def test_arrays_and_tuples_are_lists(prm):
    """As in `DataFrame.to_dict("records")` of a Parquet file."""
    record = {"problem": "What is 3 + 4?", "steps": ["3 + 4 = 7", "So 7."], "labels": [1, 0]}
    (expected,) = prm.score_many([record])
    for steps, labels in ((np.array(record["steps"], object), np.array([1, 0])), (tuple(record["steps"]), (1, 0))):
        (scored,) = prm.score_many([record | {"steps": steps, "labels": labels}])
        assert scored["scores"] == expected["scores"]
        assert record_of(tree_of(scored)) == record_of(tree_of(expected))

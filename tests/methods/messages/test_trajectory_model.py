"""A model on trees of messages: scores, gradients and packing, each beside the trajectories alone."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from refusing import refused
from test_turns import read_by_jprm
from tiny import TINY, chain_rows, logits, params, placed
from tiny_run import VALUE
from trajectories import branched, labelled, long_run, trajectory

from jprm import objectives
from jprm.experiment import ObjectiveConfig, TargetConfig
from jprm.methods.formats.adapters.load import layout_of
from jprm.methods.formats.adapters.published import PUBLISHED
from jprm.methods.implicit import LogRatio, log_probs
from jprm.methods.messages.records import trajectories_of
from jprm.methods.messages.tokens import turns_of, windows_of
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.pack import PackReport, pack
from jprm.score import scorer
from jprm.score.scorer import PRM
from jprm.token_tree import BEGIN, token_tree
from jprm.tokenizer import native_layout
from jprm.tree import chains_of, record_of, steps_only, tree_of

TOKENIZER = read_by_jprm("qwen3")
LAYOUT = native_layout(TOKENIZER)
MODEL = dataclasses.replace(TINY, vocab_size=512, rope_theta=10000.0)
TARGET = TargetConfig(labels="rating", neutral="drop", after_error="keep")
CLOSE = 3e-6
"""Rows of other lengths add in another order: some units in the last place of a float32 near one."""


def short(seed, **options):
    return tree_of(branched(seed, turns=3, users=False, **options))


@pytest.fixture(scope="module")
def prm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "SHORTEST", 512)
        patch.setattr(scorer, "FILLED", 2048)
        mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
        yield PRM(placed(params(MODEL), mesh), MODEL, LAYOUT, mesh, "rating", "tiny", 0)


def test_a_tree_scores_its_turns_as_each_trajectory_alone_does(prm):
    trees = [short(seed) for seed in range(4)]
    for tree, score_N in zip(trees, prm.score_trees(trees), strict=True):
        assert np.isfinite(score_N[tree.steps]).all()
        assert np.isnan(np.delete(score_N, tree.steps)).all()  # context has no score
        alone = prm.score_trees([tree_of(branch) for branch in trajectories_of(tree)])
        paths = [chain for chain in chains_of(tree)]
        for chain in paths:
            scores = [s[np.isfinite(s)] for s in alone if np.isfinite(s).sum() >= len(chain)]
            gaps = [np.abs(s[: len(chain)] - score_N[chain]).max() for s in scores]
            assert min(gaps) < CLOSE


def test_a_score_depends_on_nothing_after_its_turn(prm):
    record = trajectory(12, turns=3, users=False)
    (whole,) = prm.score_trees([tree_of(record)])
    for end in [i for i, m in enumerate(record["messages"]) if m["role"] == "assistant"]:
        (part,) = prm.score_trees([tree_of({**record, "messages": record["messages"][: end + 1]})])
        np.testing.assert_allclose(part[end], whole[end], atol=CLOSE, rtol=0)


def test_a_windowed_run_scores_as_its_windows_do_by_hand(prm):
    """Each window is a record by itself; a run that fits is scored as without a limit."""
    record = long_run(9, tools=False)
    (whole,) = prm.score_trees([tree_of(record)])
    turns = turns_of(tree_of(record), TOKENIZER)
    context = (len(turns.problem) + max(map(len, turns.ids))) // 2  # half of the turns fit
    limited = dataclasses.replace(prm, context=context)
    speed = scorer.Speed()
    [scored] = limited.score_many([record], speed)
    windows = list(windows_of(tree_of(record), TOKENIZER, context))
    by_hand = []
    for window in windows:
        [alone] = prm.score_many([record_of(window.tree)])
        by_hand += [m["score"] for m in alone["messages"] if m["role"] == "assistant"][window.repeated :]
    scores = [message["score"] for message in scored["messages"] if message["role"] == "assistant"]
    assert len(windows) > 1 and len(scores) == 9
    np.testing.assert_allclose(scores, by_hand, atol=CLOSE, rtol=0)
    assert f"({speed.runs} runs in {speed.windows} windows)" in str(speed) and speed.windows >= len(windows)
    fitting = dataclasses.replace(prm, context=max(map(len, turns.ids)))
    np.testing.assert_array_equal(fitting.score_trees([tree_of(record)])[0], whole)
    assert fitting.fits(record) and limited.fits(record)
    refused(
        ValueError,
        "its longest chain takes",
        dataclasses.replace(prm, context=len(turns.problem) + 2).score_trees,
        [tree_of(record)],
    )


def test_records_come_back_with_scores_at_turns(prm):
    records = [trajectory(3, turns=3, users=False), branched(4, turns=3, users=False)]
    for record, scored in zip(records, prm.score_many(records), strict=True):
        nodes = scored.get("messages") or scored["nodes"]
        assert [("score" in node) for node in nodes] == [node["role"] == "assistant" for node in nodes]
        messages = record.get("messages") or record["nodes"]
        plain = [{k: v for k, v in node.items() if k != "score"} for node in nodes]
        assert plain == [{k: v for k, v in node.items() if k != "score"} for node in messages]


def loss_of(rows, supervise: Any = "step"):
    objective = objectives.find("cross_entropy")
    target = TARGET if supervise == "step" else dataclasses.replace(TARGET, labels="value", neutral="none")
    config = ObjectiveConfig(MODEL, target, supervise=supervise)
    return jax.jit(lambda p: objective({"model": p}, rows, config)[0])


def gradients(rows):
    return jax.value_and_grad(loss_of(rows))(params(MODEL))


@pytest.mark.breadth
def test_gradients_of_some_turns_are_those_of_each_alone():
    """The loss of a packed tree is the sum over its labelled turns, each with all before it in a row of its own."""
    tree = short(7)
    packed = pack([token_tree(tree, LAYOUT)], 384, 32, too_long="error")
    loss, gradient = gradients(packed.rows)
    turns, ids, label = turns_of(tree, TOKENIZER), [], []
    for place, node in enumerate(tree.steps):
        if (target := tree.nodes[node].label) is not None and target:
            ids.append(turns.ids[place])
            label.append(target)
    rows = chain_rows(ids, 384)
    alone_loss, alone = gradients(dataclasses.replace(rows, label=np.array(label, np.float32)[:, None]))
    np.testing.assert_allclose(loss, alone_loss, rtol=1e-5)  # sums of other orders
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=0)


def test_outcomes_at_tokens_are_of_what_the_agent_wrote():
    """The loss is the sum over the tokens of the turns, each at the end of a row of its own, with the outcome."""
    tokenizer = read_by_jprm("qwen2.5")
    tree = tree_of({**trajectory(5, turns=2, calls=False, thoughts=False), "outcome": 1})
    packed = pack([token_tree(tree, native_layout(tokenizer), "outcome_tokens")], 512, 256, too_long="error")
    loss = loss_of(packed.rows, "outcome_tokens")(params(MODEL))
    turns = turns_of(tree, tokenizer)
    whole, spans = turns.ids[-1], turns.written
    rows = chain_rows([whole[: i + 1] for begin, end in spans for i in range(begin, end)], 512)
    alone = loss_of(rows, "outcome_tokens")(params(MODEL))
    np.testing.assert_allclose(loss, alone, rtol=1e-5)  # sums of other orders


def test_a_cut_keeps_whole_turns_and_is_counted():
    """A turn is kept with all before it, or dropped with the answers that only it had read."""
    report, dropped = PackReport(), 0
    for seed in range(12):
        tree = tree_of(labelled(trajectory(seed, turns=6), seed))
        tokens, turns = token_tree(tree, LAYOUT), turns_of(tree, TOKENIZER)
        limit = int(np.median([len(ids) for ids in turns.ids])) + 1
        packed = pack([tokens], limit, 64, too_long="truncate")
        report += packed.report
        kept = [ids for ids in turns.ids if len(ids) <= limit]
        dropped += len(turns.ids) - len(kept)
        assert sorted(packed.node_BS[packed.node_BS >= 0]) == [
            node for node, ids in zip(tree.steps, turns.ids, strict=True) if len(ids) <= limit
        ]
        assert packed.report.tokens - packed.report.repeated == len(
            set().union(*({tuple(ids[: i + 1]) for i in range(len(ids))} for ids in kept))
        )
        if len(kept) < len(turns.ids):
            refused(ValueError, "its longest chain takes", pack, [tokens], limit, 64, too_long="error")
    assert report.truncated == dropped > 0


def test_trees_save_tokens_over_rows_of_one_trajectory():
    trees = [tree_of(branched(seed, alternatives=6, turns=5, users=False)) for seed in range(10)]
    report = pack([token_tree(tree, LAYOUT) for tree in trees], 4096, 512, too_long="error").report
    assert report.tokens < report.leaf_tokens


def test_figures_see_steps_alone():
    tree = short(5)
    plain = steps_only(tree)
    assert [node.text for node in plain.nodes] == [tree.nodes[i].text for i in tree.steps]
    assert [len(chain) for chain in chains_of(plain)] == [len(chain) for chain in chains_of(tree)]
    assert plain.kind == "pool" and steps_only(plain) is plain
    assert steps_only(tree_of(trajectory(1))).kind == "chain"
    assert record_of(tree) == record_of(tree_of(record_of(tree)))


@pytest.mark.breadth
def test_logits_of_padding_do_not_matter(prm):
    tree = token_tree(short(2), LAYOUT)
    small, large = (pack([tree], tokens, 64, too_long="error") for tokens in (1024, 2048))
    a, b = (np.asarray(logits(params(MODEL), MODEL, packed.rows)) for packed in (small, large))
    used = small.node_BS[0] >= 0
    np.testing.assert_allclose(a[0][used], b[0, : len(used)][used], atol=1e-5)


LANGUAGE = dataclasses.replace(MODEL, head="language", tied_embeddings=False)
BETA = 0.05


@pytest.fixture(scope="module")
def tuned(prm):
    """A tuned policy with its reference: two models of other parameters."""
    model, reference = (placed(params(LANGUAGE, seed=seed), prm.mesh) for seed in (0, 1))
    ratio = LogRatio(reference, LANGUAGE, BETA)
    return dataclasses.replace(prm, params=model, config=LANGUAGE, semantics="implicit", ratio=ratio)


def log_ratio(ids, begin, end):
    """Returns beta times the sum over ids[begin:end] of the log ratio, each given the ids before it, computed alone."""
    rows, models = chain_rows([ids], 1024), (params(LANGUAGE), params(LANGUAGE, seed=1))
    both = [np.asarray(log_probs(model, LANGUAGE, rows))[0] for model in models]
    return BETA * float((both[0] - both[1])[begin:end].sum())


def test_a_turns_log_ratio_is_of_the_tokens_that_the_agent_wrote(tuned):
    tree = tree_of(trajectory(9, turns=3, users=False))
    (outputs,) = tuned.outputs_of([tree])
    turns, total = turns_of(tree, TOKENIZER), 0.0
    assert len(tree.steps) > 1 and any(node.role == "tool" for node in tree.nodes)
    for node, ids, (begin, end) in zip(tree.steps, turns.ids, turns.written, strict=True):
        wanted = log_ratio(ids, begin, end)
        assert outputs["turn"][node] == pytest.approx(wanted, abs=1e-4)
        total += wanted
        assert outputs["score"][node] == pytest.approx(total, abs=1e-4)
    assert np.isnan(np.delete(outputs["score"], tree.steps)).all()
    (record,) = tuned.score_many([record_of(tree)])
    told = [message for message in record["messages"] if message["role"] == "assistant"]
    assert [set(message["outputs"]) for message in told] == [{"turn"}] * len(told)


@pytest.mark.breadth
def test_log_ratios_of_a_tree_are_those_of_each_trajectory(tuned):
    for seed in range(2):
        tree = short(seed)
        (whole,) = tuned.outputs_of([tree])
        alone = [tree_of(branch) for branch in trajectories_of(tree)]
        for chain, single, outputs in zip(chains_of(tree), alone, tuned.outputs_of(alone), strict=True):
            for name in ("score", "turn"):
                np.testing.assert_allclose(outputs[name][single.steps], whole[name][chain], atol=1e-5)


def test_answers_of_tools_change_no_turn_before_them(tuned):
    """And their own tokens are in no sum: an answer matters by what the agent writes after it."""
    record = trajectory(9, turns=3, users=False)
    other = {**record, "messages": [dict(message) for message in record["messages"]]}
    last = max(i for i, message in enumerate(other["messages"]) if message["role"] == "tool")
    other["messages"][last]["content"] = "something else entirely, and much longer than before"
    a, b = tuned.outputs_of([tree_of(record), tree_of(other)])
    before = [i for i in tree_of(record).steps if i < last]
    np.testing.assert_allclose(a["score"][before], b["score"][before], atol=1e-5)


def test_training_takes_the_agents_tokens_alone(tuned):
    """Where the template keeps the turns before; one that rewrites them is refused."""
    kept = native_layout(read_by_jprm("qwen2.5"))
    records = [trajectory(seed, turns=3, users=False, thoughts=False) for seed in (0, 1, 17, 38)]
    trees = [tree_of({**record, "outcome": i % 2}) for i, record in enumerate(records)]
    task = ObjectiveConfig(LANGUAGE, VALUE, reference=True, supervise="outcome", extras=(BEGIN,))
    rows = pack([token_tree(tree, kept, "outcome", (BEGIN,)) for tree in trees], 1024, 64, too_long="error").rows
    objective = objectives.find("implicit", {"beta": BETA})
    both = {"model": params(LANGUAGE), "reference": params(LANGUAGE, seed=1)}
    loss, count = jax.jit(lambda both: objective(both, rows, task)[:2])(both)
    scored = zip(trees, dataclasses.replace(tuned, layout=kept).outputs_of(trees), strict=True)
    score = np.array([outputs["score"][tree.steps[-1]] for tree, outputs in scored])
    right = np.array([tree.nodes[tree.steps[-1]].correct for tree in trees])
    assert count == len(trees)
    np.testing.assert_allclose(loss, np.log1p(np.exp(np.where(right, -score, score))).sum(), rtol=1e-5)
    refused(ValueError, "rewrites the turns before", token_tree, trees[0], LAYOUT, "outcome", (BEGIN,))


def test_an_adapter_says_whether_its_model_knows_turns():
    native, other = (layout_of(PUBLISHED[name], TOKENIZER, {}) for name in ("jprm", "trl"))
    tree = short(3)
    assert token_tree(tree, native).tokens_N.tolist() == token_tree(tree, LAYOUT).tokens_N.tolist()
    refused(ValueError, "in a layout of its own", token_tree, tree, other)

"""The study of agents' runs: texts are cut in the middle, calls become text, and heads never see their own fold."""

import numpy as np

from experiments.studies import agents


def test_cut_keeps_both_ends_and_names_every_call():
    call = {"id": "c", "type": "function", "function": {"name": "refund", "arguments": {"order": "#" * 400}}}
    messages = [
        {"role": "user", "content": "a" * 300 + "z" * 300},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
        {"role": "assistant", "content": ""},
    ]
    first, calling, answer, blank = (m["content"] for m in agents.cut({"messages": messages}, 400)["messages"])
    assert first == "a" * 50 + " ... " + "z" * 50 and answer == "done" and blank == "-"
    assert calling.startswith('[call] refund {"order"') and calling.endswith('"}') and len(calling) < 80
    assert messages[1]["content"] is None  # the record itself stays


def test_scores_are_of_heads_fitted_to_other_folds():
    """A run's own labels change nothing of its scores."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(20, 3)).astype(np.float32) for _ in range(10)]
    classes = [(row[:, 0] > 0).astype(int) for row in rows]
    fold_K = np.arange(10) % agents.FOLDS
    before = agents.cross_fitted(rows, classes, fold_K)
    flipped = [1 - c if fold == 0 else c for c, fold in zip(classes, fold_K.tolist(), strict=True)]
    after = agents.cross_fitted(rows, flipped, fold_K)
    np.testing.assert_array_equal(before[0], after[0])
    assert not np.array_equal(before[1], after[1])
    assert np.mean([(s > 0.5) == c for s, c in zip(before, classes, strict=True)]) > 0.9

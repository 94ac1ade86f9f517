"""Runs beyond a model's context: which turns a window shows, and in which one each is scored."""

import pytest
from test_turns import read_by_jprm
from trajectories import long_run

from jprm.methods.messages.tokens import turns_of, windows_of, written_messages
from jprm.tokenizer import native_layout
from jprm.tree import record_of, tree_of

TOKENIZERS = {name: read_by_jprm(name) for name in ("qwen2.5", "qwen3")}


def sizes_of(tree, tokenizer):
    """Tokens of the head, and of a turn with its observation in the mean."""
    turns = turns_of(tree, tokenizer)
    head = len(turns.problem)
    return head, (max(map(len, turns.ids)) - head) / len(turns.ids)


def said(tree):
    """The beginnings of a trajectory's turns."""
    return [node.text[:7] for node in tree.nodes if node.role == "assistant"]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("turns", "fitting", "words"), [(12, 3, 8), (30, 7, 12), (7, 2.5, 3), (40, 30, 8)])
def test_each_turn_is_scored_in_one_window_behind_the_head(name, turns, fitting, words):
    tokenizer, tree = TOKENIZERS[name], tree_of(long_run(turns, words))
    head, turn = sizes_of(tree, tokenizer)
    context = int(head + fitting * turn)
    windows = list(windows_of(tree, tokenizer, context))
    scored = [turn for window in windows for turn in said(window.tree)[window.repeated :]]
    assert scored == said(tree)
    for window in windows:
        assert [node.text for node in window.tree.nodes[:2]] == [node.text for node in tree.nodes[:2]]
        assert window.tree.tools == tree.tools
        assert max(map(len, window.turns.ids)) <= context
        alone = turns_of(tree_of(record_of(window.tree)), tokenizer)  # as a record by itself
        assert (alone.ids, alone.written) == (window.turns.ids, window.turns.written)
    assert all(window.repeated for window in windows[1:]) and not windows[0].repeated
    assert turns / fitting <= len(windows) < 3.5 * turns / fitting
    written = written_messages(tree, native_layout(tokenizer), context)
    assert list(written.nodes) == tree.steps


def test_windows_repeat_at_most_half():
    tokenizer, tree = TOKENIZERS["qwen2.5"], tree_of(long_run(60))
    head, turn = sizes_of(tree, tokenizer)
    whole = len(turns_of(tree, tokenizer).ids[-1])
    windows = list(windows_of(tree, tokenizer, int(head + 12 * turn)))
    read = head + sum(len(window.turns.ids[-1]) - head for window in windows)
    assert 1 < read / whole < 2.2
    assert all(window.repeated <= len(window.turns.ids) // 2 for window in windows)


def test_a_run_that_fits_is_read_as_without_a_limit():
    layout, tree = native_layout(TOKENIZERS["qwen3"]), tree_of(long_run(9))
    longest = max(map(len, turns_of(tree, TOKENIZERS["qwen3"]).ids))
    assert written_messages(tree, layout, longest) == written_messages(tree, layout)
    assert written_messages(tree, layout, longest - 1) != written_messages(tree, layout)


def test_tool_results_are_cut_in_the_middle_only_where_a_turn_does_not_fit():
    record = long_run(6)
    record["messages"][5]["content"] = "first " + "word " * 3000 + "last"  # behind the second turn
    tree = tree_of(record)
    head, turn = sizes_of(tree_of(long_run(6)), TOKENIZERS["qwen2.5"])
    context = int(head + 5 * turn)
    windows = list(windows_of(tree, TOKENIZERS["qwen2.5"], context))
    assert [turn for window in windows for turn in said(window.tree)[window.repeated :]] == said(tree)
    results = [[node.text for node in window.tree.nodes if "first word" in node.text] for window in windows]
    [[text]] = [texts for texts in results if texts]
    assert len(text) < 8000 and text.endswith("last") and " more ... " in text
    assert all(max(map(len, window.turns.ids)) <= context for window in windows)
    assert tree.nodes[5].text == record["messages"][5]["content"]


def test_a_turn_that_cannot_fit_is_yielded_too_long():
    record = long_run(4)
    record["messages"][4]["content"] = "word " * 2000
    head, turn = sizes_of(tree_of(long_run(4)), TOKENIZERS["qwen2.5"])
    context = int(head + 3 * turn)
    windows = list(windows_of(tree_of(record), TOKENIZERS["qwen2.5"], context))
    assert any(max(map(len, window.turns.ids)) > context for window in windows)
    assert sum(len(window.turns.ids) - window.repeated for window in windows) == 4

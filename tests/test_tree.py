"""Records and trees: exact round trips, and one clear error for every mistake."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused

from jprm.io.jsonl import Rejects, write_records
from jprm.tree import (
    SEMANTICS,
    RecordError,
    chains_of,
    in_order_of,
    read_records,
    record_of,
    tree_of,
    with_labels,
    with_scores,
)

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda s: s.strip())
number = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
json_value = st.recursive(
    st.none() | st.booleans() | number | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=5,
)
unknown = st.dictionaries(st.sampled_from(["id", "level", "zeta", "x y"]), json_value, max_size=3)
label_of = {
    "rating": st.sampled_from([-1, 0, 1]),
    "correctness": st.floats(0, 1) | st.sampled_from([0, 1]),
    "value": st.floats(0, 1),
    "advantage": number,
    "implicit": number,
}


def optional(**fields):
    return st.fixed_dictionaries({}, optional=fields)


@st.composite
def branches(draw, semantics, sample):
    steps = draw(st.lists(text, min_size=1, max_size=4))

    def with_length(values):
        return st.lists(values, min_size=len(steps), max_size=len(steps))

    keys = {
        "labels": with_length(st.none() | label_of[semantics]),
        "correct": st.none() | st.booleans(),
        "scores": with_length(number),
        "outputs": st.dictionaries(st.sampled_from(["low", "high"]), with_length(number)) | json_value,
    }
    if sample:
        keys["answer"] = st.none() | text | number
    return {"steps": steps} | draw(optional(**keys)) | draw(unknown)


@st.composite
def records(draw):
    head = draw(optional(answer=st.none() | text | number, semantics=st.sampled_from(SEMANTICS) | st.none()))
    semantics = head.get("semantics") or "correctness"
    kind = draw(st.sampled_from(["chain", "pool", "tree"]))
    if kind == "chain":
        body = draw(branches(semantics, False))
    elif kind == "pool":
        body = {"samples": draw(st.lists(branches(semantics, True), min_size=1, max_size=3))} | draw(unknown)
    else:
        node = optional(
            label=st.none() | label_of[semantics],
            origin=st.none() | text,
            correct=st.none() | st.booleans(),
            score=number,
            outputs=st.dictionaries(st.sampled_from(["low", "high"]), number) | json_value,
        )
        body = {
            "nodes": [
                {"parent": draw(st.integers(-1, i - 1)), "text": draw(text)} | draw(node) | draw(unknown)
                for i in range(draw(st.integers(1, 5)))
            ]
        } | draw(unknown)
    return {"problem": draw(text)} | head | body


def exact(value):
    """JSON text with sorted keys: unlike `==`, it tells true from 1 and 1 from 1.0."""
    return json.dumps(value, sort_keys=True)


@given(records())
def test_record_of_is_the_inverse_of_tree_of(record):
    assert exact(record_of(tree_of(record))) == exact(record)


@given(st.lists(records(), max_size=4))
@settings(max_examples=30)
def test_a_file_gives_back_its_records(tmp_path_factory, written):
    written = [record | ({"id": i} if "id" in record else {}) for i, record in enumerate(written)]
    path = tmp_path_factory.mktemp("file") / "made.jsonl"
    write_records(path, written)
    assert [exact(record) for record in read_records(path)] == [exact(record) for record in written]


@given(json_value | st.dictionaries(st.sampled_from(["problem", "steps", "samples", "nodes", "prompt"]), json_value))
def test_any_json_is_a_record_or_a_record_error(value):
    try:
        tree = tree_of(value)
    except RecordError as error:
        assert str(error).startswith("record: ")
    else:
        assert exact(record_of(tree)) == exact(value)


def test_labels_leave_a_pool_without_steps_a_record_that_can_be_read():
    pool = tree_of({"problem": "p", "samples": [], "empty_samples": 3})
    labelled = with_labels(pool, [], "value", "monte_carlo")
    assert tree_of(record_of(labelled)) == labelled and labelled.extra == pool.extra


OF_NODES = {
    "text": "a\nb",
    "role": "assistant",
    "score": "high",
    "origin": 5,
    "label": 7,
    "parent": 3,
    "outputs": {"q": 1},
}


@pytest.mark.parametrize("key", OF_NODES)
def test_labels_keep_sample_keys_that_nodes_have_too_under_another_name(key):
    sample = {"steps": ["a", "b"], key: OF_NODES[key], "correct": True, "note": 1}
    labelled = with_labels(tree_of({"problem": "p", "samples": [sample, {"steps": ["c"]}]}), [None] * 3, "value", "x")
    record = record_of(labelled)
    assert tree_of(record) == labelled and record["nodes"][0] == {"parent": -1, "text": "a"}
    assert record["nodes"][1] == {"parent": 0, "text": "b", "correct": True, f"sample_{key}": OF_NODES[key], "note": 1}
    assert record_of(with_labels(tree_of(record), [None] * 3, "value", "x")) == record


def test_a_changed_tree_says_what_changed_even_where_the_record_had_null():
    record = {"problem": "p", "nodes": [{"parent": -1, "text": "a", "label": None}], "answer": None}
    tree = tree_of(record)
    node = dataclasses.replace(tree.nodes[0], label=0.25)
    changed = record_of(dataclasses.replace(tree, nodes=(node,), answer="7", semantics="value"))
    nodes = [{"parent": -1, "text": "a", "label": 0.25}]
    assert changed == {"problem": "p", "nodes": nodes, "answer": "7", "semantics": "value"}


def test_pool_samples_are_branches_with_their_outcome_on_the_leaf():
    sample = {"steps": ["a", "b"], "answer": 1, "correct": True, "scores": [0.5, 0.25]}
    tree = tree_of({"problem": "p", "samples": [sample, {"steps": ["a"], "correct": False}]})
    assert [node.parent for node in tree.nodes] == [-1, 0, -1]
    assert [node.correct for node in tree.nodes] == [None, True, False]
    assert [node.score for node in tree.nodes] == [0.5, 0.25, None]
    assert tree.nodes[1].extra == {"answer": 1}
    assert chains_of(tree) == [[0, 1], [2]]


@given(records())
def test_new_scores_replace_those_of_a_record_of_any_kind_and_nothing_else(record):
    tree = tree_of(record)
    scores = [i / 8 for i in range(len(tree.nodes))]
    scored = record_of(with_scores(tree, scores, {"low": scores[::-1]}))
    again = tree_of(scored)
    assert [node.score for node in again.nodes] == scores
    assert [node.outputs for node in again.nodes] == [{"low": score} for score in scores[::-1]]
    kept, still = ([(n.parent, n.text, n.label, n.origin, n.correct) for n in x.nodes] for x in (tree, again))
    assert still == kept
    for pair in zip((tree, *tree.nodes), (again, *again.nodes), strict=True):
        before, after = ({key: value for key, value in x.extra.items() if key != "outputs"} for x in pair)
        assert exact(before) == exact(after)
    ordered = in_order_of(record, scored)
    assert exact(ordered) == exact(scored)
    assert [key for key in ordered if key in record] == [key for key in record if key in ordered]


@given(st.lists(st.integers(0, 2**30), min_size=1, max_size=12))
def test_chains_of_equals_a_walk_from_the_root(draws):
    parents = [draw % (i + 1) - 1 for i, draw in enumerate(draws)]
    tree = tree_of({"problem": "p", "nodes": [{"parent": parent, "text": "t"} for parent in parents]})

    def walk(index, path):
        children = [i for i, parent in enumerate(parents) if parent == index]
        return [path] if not children else [chain for i in children for chain in walk(i, [*path, i])]

    assert chains_of(tree) == sorted(walk(-1, []), key=lambda chain: chain[-1])


@pytest.mark.parametrize("shape", ["deep", "wide"])
def test_a_tree_of_100_000_steps(shape):
    """Finishes in a second or two; recursion would fail, and anything quadratic would take an hour."""
    nodes = [{"parent": i - 1 if shape == "deep" else -1, "text": "t"} for i in range(100_000)]
    tree = tree_of(record := {"problem": "p", "nodes": nodes})
    assert record_of(tree) == record
    assert [len(chain) for chain in chains_of(tree)] == ([100_000] if shape == "deep" else [1] * 100_000)


CHAIN = {"problem": "p", "steps": ["a", "b"]}


def test_what_a_chain_has_no_place_for_is_refused_and_not_lost():
    tree = tree_of(CHAIN)
    first, second = tree.nodes
    half = with_scores(tree, [0.5, None])
    for nodes, named in (
        (half.nodes, "use kind='tree'"),
        ((dataclasses.replace(first, origin="model"), second), "use kind='tree'"),
        ((first, second, dataclasses.replace(second, text="c")), "branches"),
    ):
        refused(ValueError, named, record_of, dataclasses.replace(tree, nodes=nodes))
    assert "score" not in record_of(dataclasses.replace(half, kind="tree"))["nodes"][1]


GOOD = b'{"problem": "p", "steps": ["a"], "id": 1}\n'
BAD = {
    b'{"problem": "p", "steps": ["a"\n': "is not JSON",
    b'{"problem": "p\xff", "steps": ["a"]}\n': "is not UTF-8 at byte 14",
    b'{"problem": "p", "steps": ["a"], "labels": [NaN]}\n': "NaN is no JSON number",
    b'{"problem": "p", "steps": ["a"], "z": 1e999}\n': "too large for a float",
    b'{"problem": "p", "steps": ["a"], "z": "\\udc00"}\n': "half a surrogate pair",
    b'{"problem": "p", "steps": ["a"], "z": ' + b"9" * 5000 + b"}\n": "is not JSON",
    b"[" * 100_000 + b"\n": "is not JSON",
    b'{"problem": "q", "steps": [" "], "note": "caf\xc3\xa9"}  \r\n': "steps[0]: is empty",
    GOOD: "1 is the id of line 1 too",
}


@pytest.mark.parametrize("line", BAD)
def test_stop_names_file_and_line(tmp_path, line):
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD + b"\n  \n" + line)
    reading = read_records(path)
    assert next(reading) == {"problem": "p", "steps": ["a"], "id": 1}
    with pytest.raises(RecordError) as caught:
        next(reading)
    assert str(caught.value).startswith(f"{path}:4: ") and BAD[line] in str(caught.value)


def test_skip_writes_the_rejects_byte_for_byte_and_counts_them(tmp_path):
    path, rejected = tmp_path / "in.jsonl", tmp_path / "rejects.jsonl"
    last = b'{"problem": "the file ends here'
    path.write_bytes(GOOD + b"".join(BAD) + b'{"problem": "q", "steps": ["b"]}\n' + last)
    with Rejects(rejected) as rejects:
        kept = list(read_records(path, on_error="skip", rejects=rejects))
    assert [record["problem"] for record in kept] == ["p", "q"]
    assert rejected.read_bytes() == b"".join(BAD) + last + b"\n"
    assert rejects.count == len(BAD) + 1
    assert sorted(tmp_path.iterdir()) == [path, rejected]

    path.write_bytes(GOOD)
    with Rejects(rejected) as rejects:
        assert len(list(read_records(path, on_error="skip", rejects=rejects))) == 1
    assert not rejected.exists(), "a file of rejects from an earlier run would lie about this one"


@pytest.mark.parametrize("on_error", ["skip", "ignore"])
def test_skipping_needs_a_place_for_the_rejects(tmp_path, on_error):
    refused(ValueError, "'skip'", lambda: next(read_records(tmp_path / "absent", on_error=on_error)))


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "out.jsonl"
    write_records(path, [CHAIN])
    before = path.read_bytes()
    refused(ValueError, "JSON compliant", write_records, path, [CHAIN, CHAIN | {"z": float("nan")}])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]

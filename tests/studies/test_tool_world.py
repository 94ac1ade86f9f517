"""The tool world's task: its tools, its authors, and its labels against a search of all that an agent can do."""

import functools
import itertools

import numpy as np
import pytest

from experiments.tool_world import shop
from jprm.methods.worlds.environment import World


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(0)
    return [shop.task(rng) for _ in range(60)]


def test_authors_without_habits_are_right_by_the_shortest_way(records):
    rng = np.random.default_rng(1)
    assert {record["asks"] for record in records} == {"total", "sum", "worth", "cheaper", "cheapest"}
    for record in records:
        whole = shop.demonstration(record, rng, None)
        turns = [m for m in shop.labelled(record, whole["messages"]) if m["role"] == "assistant"]
        assert whole["outcome"] == 1 and all(turn["label"] == 1 for turn in turns)
        assert len(turns) == shop.limit(record) - shop.SPARE


def test_habits_make_every_mistake_and_some_are_right_by_luck(records):
    rng = np.random.default_rng(2)
    seen = set()
    for record in records * 6:
        whole = shop.demonstration(record, rng, shop.Habits())
        seen.add((shop.habit_of(record, whole["messages"]), whole["outcome"]))
    assert {("right by luck", 1.0), ("repeated call", 1.0), ("none", 1.0), ("wrong answer", 0.0)} <= seen
    assert {"wrong lookup", "other number"} <= {habit for habit, _ in seen}


def test_the_distance_is_that_of_a_search_through_all_calls():
    """Breadth first over every sensible call, what is known being what the calls told."""
    table = {"pear": {"kind": "fruit", "price": 3, "stock": 4}, "fig": {"kind": "fruit", "price": 2, "stock": 4}}
    asks = [
        {"asks": "total", "item": "pear", "amount": 5}, {"asks": "sum", "items": ["pear", "fig"]},
        {"asks": "worth", "item": "fig"}, {"asks": "cheaper", "items": ["pear", "fig"]},
        {"asks": "cheapest", "kind": "fruit"},
    ]  # fmt: skip
    looks = [["lookup", item, field] for item in table for field in shop.FIELDS]
    for ask in asks:
        record = {"table": table, **ask}
        left, right = ("5", "3") if ask["asks"] == "total" else ("3", "2") if ask["asks"] == "sum" else ("2", "4")
        calcs = [["calc", left, sign, right] for sign in "+*"] + [["calc", right, "+", left]]
        moves = [*looks, *calcs, ["filter", "fruit"]]
        step = functools.partial(shop.distance, record)
        for n in range(5):
            ways = itertools.permutations(moves, n)
            if any(step(way) == 1 for way in ways):
                assert step(()) == n + 1
                break
        for way in itertools.permutations(moves, 2):
            assert step(way) <= step(way[:1]) <= step(())
            assert min(step([*way, move]) for move in moves) >= step(way) - 1


def test_labels_of_the_planted_habits():
    record = {
        "problem": "Which is cheaper, pear or fig?", "answer": "fig", "asks": "cheaper", "items": ["pear", "fig"],
        "table": {"pear": {"kind": "fruit", "price": 3, "stock": 4}, "fig": {"kind": "fruit", "price": 2, "stock": 4}},
    }  # fmt: skip
    look, other, stock = ["lookup", "pear", "price"], ["lookup", "fig", "price"], ["lookup", "pear", "stock"]
    good, none, lost = (True, True), (True, False), (False, False)

    def labels_of(*calls):
        return [tuple(verdict.values()) for verdict in shop.verdicts(record, calls)]

    assert labels_of(look, other, ["submit", "fig"]) == [good, good, good]
    assert labels_of(look, look, other, ["submit", "fig"]) == [good, none, good, good]  # a repeated call
    assert labels_of(look, ["submit", "fig"]) == [good, lost]  # right by luck
    assert labels_of(look, other, ["submit", "pear"]) == [good, good, lost]  # an ignored observation
    assert labels_of(stock, stock, stock) == [none, none, lost]  # wrong tools: two turns are spare
    assert labels_of(look, [], other) == [good, none, good]  # no call


def test_the_door_plays_the_world_and_calls_are_written_as_they_are_sampled(records):
    world = World(shop.SHOP, branches=True)
    episodes = world.start(records)
    texts = ["lookup pear price", "calc 2 * 3", "filter toy", "what?", "lookup moon price", "submit 7"] * 10
    after = world.step(episodes, texts)
    assert not world.failures
    for record, text, episode in zip(records, texts, after, strict=True):
        content = shop.TEMPLATE  # the template writes a call as its text
        import jinja2
        from jinja2 import ext, nodes

        class Generation(ext.Extension):
            tags = {"generation"}

            def parse(self, parser):
                line = next(parser.stream).lineno
                return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

        rendered = jinja2.Environment(extensions=[Generation]).from_string(content).render(messages=episode.messages)
        assert rendered.startswith(f"<user>{record['problem']}<end><assistant>{text}<end>")
        assert episode.done == text.startswith("submit")
        if not episode.done:
            assert rendered.endswith(f"<tool>{shop.tool(record, *_split(text))}<end>")
    tokenizer = shop.tokenizer()
    for record, text in zip(records, texts, strict=True):
        for written in (record["problem"], text):
            ids = tokenizer.encode(written).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == written or "what" in text or "moon" in text


def _split(text):
    name, *arguments = text.split(" ")
    return (name, arguments) if name in shop.ARGUMENTS else ("", [])

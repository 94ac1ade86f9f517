"""The doors to samples: whoever draws them, updates come in their order, drawn by the policy that they are due from."""

import dataclasses
import types

import pytest

from jprm.methods.rl import sampling, sampling_hosts
from jprm.methods.rl.rollout import Group
from jprm.methods.rl.samples import Begun
from jprm.methods.rl.sampling import Ahead, Carrying, Here, Servers
from jprm.methods.rl.sampling_hosts import ORDER, SamplingHosts

STALE, SAMPLES, LAST = 2, 3, 6


class Policy:
    """Names the parameters that it was pushed."""

    layout, failures, drawn_here = "layout", ["one"], 4
    name = "run@0"

    def push(self, params, name):
        self.name = name


def source(policy):
    """Problem p<u> in update u; a sample tells its update and the policy that drew it."""
    problems = types.SimpleNamespace(chosen=lambda update: [{"problem": f"p{update}"}])
    config = types.SimpleNamespace(stale=STALE, samples=SAMPLES, seed=0)

    def sample(records, n, update, costs):
        assert costs == [2.0 for _ in records]
        return [[(record["problem"], update, policy.name)] * n for record in records]

    judged = lambda update, drawn: [("judged", update, drawn)]  # noqa: E731
    held_out = lambda stream: [("held out", stream, policy.name)]  # noqa: E731
    return types.SimpleNamespace(
        policy=policy, problems=problems, config=config, sample=sample, judged=judged, held_out_groups=held_out
    )


LENGTHS = {"p1": 2.0}
"""Of the samples so far: those of other problems are expected to be as long."""


def learnt(samples, first=1):
    """Updates as the loop makes them: (update, by, problems) of what each learns from."""
    taken = []
    for update in range(first, LAST + 1):
        samples.begin(update, min(update + STALE, LAST))
        ahead = samples.take(update)
        taken.append((ahead.update, ahead.by))
        samples.settle()
        samples.push({}, f"run@{update}")
    assert not samples.ahead
    return taken


DUE = [(update, max(update - 1 - STALE, 0)) for update in range(1, LAST + 1)]


def asked(policy, problems, n, *, seed, update, costs):
    drawn = [[(problem, update, policy.name)] * n for problem in problems]
    return lambda: drawn


@pytest.mark.parametrize("door", [Here, Servers])
def test_samples_are_drawn_ahead_by_the_policy_of_then(door, monkeypatch):
    monkeypatch.setattr(sampling, "ask", asked)
    policy = Policy()
    samples, drawn = door(source(policy), [], LENGTHS), []
    take = samples.take
    samples.take = lambda update: drawn.append(take(update)) or drawn[-1]
    assert learnt(samples) == DUE
    for (update, by), ahead in zip(DUE, drawn, strict=True):
        assert ahead.drawn == [[(f"p{update}", update, f"run@{by}")] * SAMPLES]
    assert policy.name == f"run@{LAST}" and samples.layout == "layout"
    figures = samples.figures(Ahead(5, 2, []), 5)
    assert figures == {"behind": 2} | ({"left_out": 1, "drawn_here": 4} if door is Servers else {})
    assert samples.judged(Ahead(5, 2, ["a"])) == [("judged", 5, ["a"])]
    assert samples.held_out(7) == [("held out", 7, f"run@{LAST}")]
    held = [Ahead(4, 1, [["kept"]]), Ahead(5, 2, [["kept"]])]  # by a checkpoint: not drawn again
    assert learnt(door(source(Policy()), held, LENGTHS), first=4) == [(4, 1), (5, 2), (6, 3)]


def test_unfinished_samples_go_on_with_the_next_policy(monkeypatch):
    """Each update draws a token for every open chain; those of its own problems then end."""
    monkeypatch.setattr(Begun, "rollout", lambda self, policy: self)

    def go_on(policy, groups, *, seed, by, costs):
        assert [group.update for group in groups] == sorted(group.update for group in groups)
        assert costs == [sum(max(2.0 - len(chain.ids), 1.0) for chain in group.chains) for group in groups]
        first = groups[0].update
        return [
            tuple(
                dataclasses.replace(
                    chain, ids=(*chain.ids, by), drawn_by=(*chain.drawn_by, (len(chain.ids), by)),
                    reason="stop" if group.update == first else "open",
                )
                for chain in group.chains
            )
            for group in groups
        ]  # fmt: skip

    monkeypatch.setattr(sampling, "go_on", go_on)
    samples, taken = Carrying(source(Policy()), [], LENGTHS), []
    for update in range(1, LAST + 1):
        samples.begin(update, min(update + STALE, LAST))
        taken.append(samples.take(update))
    assert [(ahead.update, ahead.by) for ahead in taken] == DUE
    for (update, by), ahead in zip(DUE, taken, strict=True):
        ((first, *rest),) = ahead.drawn
        assert first.ids == tuple(range(by, update)) and len(rest) == SAMPLES - 1
    ahead = types.SimpleNamespace(drawn=[[types.SimpleNamespace(ids=(1, 2, 3), drawn_by=((0, 2), (1, 4)))]])
    assert samples.figures(ahead, 6) == {"behind": (3 + 1 + 1) / 3}


def test_hosts_are_waited_for_once_before_each_push(monkeypatch):
    orders, replies = [], []

    def post(kind, order):
        assert kind == ORDER
        orders.append(order)
        if order["do"] == "draw":
            replies.append([f"group of {order['update']}"])

    monkeypatch.setattr(sampling_hosts.multihost, "post", post)
    monkeypatch.setattr(sampling_hosts.multihost, "received", lambda kind: {"value": replies.pop(0)})
    monkeypatch.setattr(Group, "of_json", staticmethod(lambda group, records: ("group", group)))
    hosts = SamplingHosts.__new__(SamplingHosts)
    hosts.problems, hosts.ahead, hosts._lengths = source(Policy()).problems, [], LENGTHS
    hosts._begun, hosts._records, hosts.update, hosts.waited = sampling_hosts.collections.deque(), {}, 0, 0.0
    hosts.push = lambda params, name: post(ORDER, {"do": "push", "name": name, "at": hosts.update})
    assert learnt(hosts) == DUE and not replies
    assert hosts.judged(Ahead(1, 0, [], judged=["x"])) == [("group", "x")]
    done = [(order["do"], order.get("update", order.get("name"))) for order in orders]
    assert done[:5] == [("draw", 1), ("draw", 2), ("draw", 3), ("push", "run@1"), ("draw", 4)]
    assert [order["at"] for order in orders if order["do"] == "push"] == list(range(1, LAST + 1))

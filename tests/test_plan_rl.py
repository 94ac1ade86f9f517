"""Plans of reinforcement learning: what a device holds, and the counts of each program against counts by hand."""

import dataclasses
import json
import shutil

import pytest
from refusing import refused
from tiny import optimised
from tiny_rl import PIECES, POLICY, PRM, experiment, save_run
from tiny_run import write_experiment

from jprm.apps import cli
from jprm.apps.plan import counts, rl
from jprm.apps.plan.topologies import devices, find
from jprm.experiment import load
from jprm.methods.rl.config import RLExperiment
from jprm.model.mesh import make_mesh


@pytest.fixture
def file(tmp_path):
    """A policy and a PRM of only experiment.json, their parameters removed."""
    big = dict(width=128, heads=8, kv_heads=8, head_dim=16, mlp_width=256, attention="blocked", dtype="bfloat16")
    for name, model in {"policy": POLICY, "prm": PRM}.items():
        save_run(tmp_path / name, dataclasses.replace(model, **big), 0, 1.0)
        shutil.rmtree(tmp_path / name / "checkpoints")
    config = experiment(tmp_path, problems_an_update=8, samples=4, sampler_rows=32, minibatches=1, micro_rows=8)
    return write_experiment(tmp_path / "rl.py", config)


@pytest.mark.slow
def test_a_plan_of_an_update(file, tmp_path, capsys, monkeypatch):
    pytest.importorskip("libtpu", reason="needs libtpu: the extra `tpu`")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # the command sets it
    out = tmp_path / "plan.json"
    with optimised():
        assert cli.main(f"plan {file} --rl --topology v5e-8 --output {out}".split()) == 0
    report, printed = json.loads(out.read_text()), capsys.readouterr().out
    model = dataclasses.replace(POLICY, width=128, heads=8, kv_heads=8, head_dim=16, mlp_width=256)
    resident, programs = report["resident"], report["programs"]
    parameters = 4 * report["parameters"] / 8  # float32 over 8 chips
    # v5e-8 is one host; the sampler's copy has bfloat16.
    for name, copies in {"parameters": 1, "moments": 2, "reference": 1, "sampler": 0.5, "PRM": 1}.items():
        assert copies * parameters <= resident[name] < 1.2 * copies * parameters + 4096, name  # biases are not split
    assert report["fits"] and set(programs) == {"update", "scoring", "prefill", "decode", "push"}
    for program in programs.values():
        assert sum(resident.values()) <= program["peak"] and program["fits"]
    # A chip decodes 32 rows with an eighth of the heads: 2 FLOPs a row and parameter of matrices and head, and 4 for
    # every query and key of the prompt's 256 tokens, and of the sample's 16 where the compiler makes a product of it.
    matrices = model.layers * sum(counts.matrices(model).values()) + model.width * len(PIECES)
    least = 2 * 4 * matrices + 4 * 4 * model.layers * model.heads * model.head_dim * 256
    assert least <= programs["decode"]["program"]["flops"] <= least * (1 + 16 / 256)
    assert programs["decode"]["times"] == 16 and programs["prefill"]["times"] == 1
    assert programs["push"]["program"]["flops"] == 0
    push = programs["push"]  # of each layer
    assert push["times"] == model.layers and push["program"]["received"] * model.layers <= resident["sampler"]
    total = sum(program["times"] * program["bounds"]["step"] for program in programs.values())
    packing = report["host"]["packing_seconds"]
    assert report["update_seconds"] == pytest.approx(total + packing) and "an update takes" in printed
    assert report["expected_seconds"] == pytest.approx(total / 0.6 + packing)


def of_two_meshes(file):
    return dataclasses.replace(load(file, (), RLExperiment), stale=1, sampling_hosts=2)


def test_hosts_that_sample_take_their_time_while_the_others_learn(file, monkeypatch):
    """And no device has what the others have."""
    pytest.importorskip("libtpu", reason="needs libtpu: the extra `tpu`")
    beside, took = {}, {"update": 5.0, "push": 1.0, "scoring": 2.0, "prefill": 1.0, "decode": 3.0}

    def measure(name, program, resident, *_):
        beside[name] = resident, {device.process_index for device in program.mesh.devices.flat}
        return {"times": 1, "peak": 1.0, "fits": True, "program": {"flops": 1.0}, "bounds": {"step": took[name]}}

    monkeypatch.setattr(rl, "measure", measure)
    monkeypatch.setattr(rl, "packing_seconds", lambda *_: 0.5)
    planned = rl.plan(of_two_meshes(file), find("v5e-16"))
    held = planned["resident"]
    for name in ("update", "push"):
        assert beside[name] == (
            held["parameters"] + held["moments"] + held["reference"],
            {2, 3},
        )  # which stand for 0 and 1
    for name in ("scoring", "prefill", "decode"):
        assert beside[name][0] == held["sampler"] + held["PRM"]
    assert planned["update_seconds"] == 1.0 + max(5.0 + 0.5, 2.0 + 1.0 + 3.0)
    assert planned["expected_seconds"] == pytest.approx((1.0 + 6.0) / 0.6)  # packing takes the processor as long
    slow = rl.in_all(planned["work"], 7.0, apart=True), rl.in_all(planned["work"], 7.0, apart=False)
    assert slow == (1.0 + 12.0, 1.0 + 12.0 + 6.0)
    with pytest.raises(ValueError, match="4 of 4 hosts"):
        rl.plan(dataclasses.replace(of_two_meshes(file), sampling_hosts=4), find("v5e-16"))


@pytest.mark.slow
def test_a_plan_of_two_meshes_is_that_of_each(file):
    """Two hosts that learn on eight chips, as a v5e-8 does, and two that sample, as four do twice as many."""
    pytest.importorskip("libtpu", reason="needs libtpu: the extra `tpu`")
    config = of_two_meshes(file)
    alone = dataclasses.replace(config, stale=0, sampling_hosts=0)
    twice = dataclasses.replace(alone, problems_an_update=16, micro_rows=16)

    def measured(config, slice, *names):
        topology = find(slice)
        mesh = make_mesh(config.mesh, devices(topology.without(config.sampling_hosts)))
        runs, resident = rl.programs(config, rl.longest(config), mesh, topology)
        return resident, {name: rl.measure(name, runs[name], 0.0, {}, lambda line: None) for name in names}

    with optimised():
        held, programs = measured(config, "v5e-16", "update", "decode", "prefill", "push")
        learners, learnt = measured(alone, "v5e-8", "update")
        samplers, sampled = measured(twice, "v5e-16", "decode", "prefill", "push")
    assert {**learners, **{name: samplers[name] for name in ("sampler", "PRM")}} == held
    push, sampled_push = programs["push"]["program"], sampled.pop("push")["program"]
    assert push["received"] == 2 * sampled_push["received"] > 0  # every layer goes to the hosts that sample as well
    assert {name: programs[name] for name in sampled} == sampled
    assert programs["update"]["program"]["flops"] == learnt["update"]["program"]["flops"]
    assert programs["update"]["peak"] == pytest.approx(learnt["update"]["peak"], rel=0.1)


def test_links_are_those_of_the_slice():
    """Bytes a second: v5p 100e9 a link, v5e 50e9, v6e 100e9. A host of v5p is a 2 x 2 of chips with two links each."""
    links = {name: find(name).interconnect / 1e9 for name in ("v5p-8", "v5p-64", "v5p-128", "v5e-64", "v5e-256")}
    assert links == {"v5p-8": 200, "v5p-64": 300, "v5p-128": 600, "v5e-64": 100, "v5e-256": 200}
    assert find("v6e-16").interconnect == 200e9 and find("h100-8").interconnect == 450e9
    hosts = {name: find(name).host.chips for name in ("v5p-128", "v5e-64", "v5e-8", "v6e-16", "v5e-4")}
    assert hosts == {"v5p-128": 4, "v5e-64": 4, "v5e-8": 8, "v6e-16": 4, "v5e-4": 4}
    # Of a part the chip with the fewest: 4 x 4 x 2 of v5p-128 wraps around along two axes; of v5e, only rectangles.
    parts = {hosts: find("v5p-128").without(hosts).interconnect / 1e9 for hosts in (0, 1, 8, 15)}
    assert parts == {0: 600, 1: 500, 8: 500, 15: 200}
    part = find("v5e-64").without(8)
    assert (part.chips, part.hosts, part.interconnect, part.host) == (32, 8, 100e9, find("v5e-64").host)
    refused(ValueError, "take a multiple of 4", find("v5e-64").without, 2)
    assert find("v6e-64").without(2).chips == 56 and find("v5p-128", 4).without(32).slices == 2
    refused(ValueError, "whole slices, of 16 hosts", find("v5p-128", 4).without, 8)
    nodes = find("h100-8", 2)
    assert (nodes.host.chips, nodes.host.slices) == (8, 1)

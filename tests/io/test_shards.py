"""Shards of a file: N runs and a merge give the bytes of one run, and what does not belong together is refused."""

import itertools
import json
import os
import random

import pytest
from refusing import refused
from test_scorer import short_rows  # noqa: F401  (autouse)
from tiny_run import chains

from jprm.apps import cli
from jprm.apps.cli.fleets import shard_of
from jprm.io import shards
from jprm.io.jsonl import write_records
from jprm.io.shards import Shard
from jprm.io.storage import path_of

EQUATIONS = ["2 + 2 = 4", "3 * 3 = 10", "so it is", "7 - 5 = 2"]


def arithmetic(count, seed=0):
    """Returns chains to check, some of the same problem and some equal."""
    draw = random.Random(seed)
    return [
        {"problem": f"Problem {draw.randrange(count // 2)}", "steps": draw.choices(EQUATIONS, k=3), "id": draw.random()}
        for _ in range(count)
    ] + [{"problem": "Twice", "steps": ["1 + 1 = 2"]}] * 2


def verify(input, output, *more):
    return cli.main(["label", "verify", "--kind", "arithmetic", "--input", str(input), "--output", str(output), *more])


def merge(*paths):
    return cli.main(["merge", *map(str, paths)])


@pytest.fixture
def files(tmp_path):
    """An input, and the output of one process."""
    write_records(tmp_path / "in.jsonl", arithmetic(60))
    assert verify(tmp_path / "in.jsonl", tmp_path / "one.jsonl") == 0
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl", (tmp_path / "one.jsonl").read_bytes()


def sharded(input, output, count):
    """The outputs of `count` processes."""
    for index in range(count):
        assert verify(input, output, "--shard", f"{index}/{count}") == 0
    return [output.with_name(f"{output.name}.{index:05d}-of-{count:05d}") for index in range(count)]


def beside(path, name):
    return path.with_name(f"{path.name}.{name}")


def test_sixteen_shards_of_an_indexed_job_give_the_bytes_of_one_process(files, monkeypatch, capsys):
    input, output, whole = files
    for index in random.Random(1).sample(range(16), 16):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        assert verify(input, output, "--shard", "auto/16") == 0
    capsys.readouterr()
    assert merge(*output.parent.glob("out.jsonl.*")) == 0
    assert output.read_bytes() == whole
    told = json.loads((output.parent / "out.jsonl.manifest.json").read_text())
    assert (told["shards"], told["records"], told["counts"]["trees"]) == (16, 62, 62)
    # the file is the one process's: the same command finds it finished, and so does another merge
    assert verify(input, output) == merge(*output.parent.glob("out.jsonl.0*")) == 0
    assert output.read_bytes() == whole


def scored(folder, records, shards, *more):
    """Scores of a file by so many processes, merged; or by one, in another file."""
    (folder / "in.jsonl").write_bytes(b"".join(records))
    command = ["score", "--model", "m", "--input", str(folder / "in.jsonl"), *more, "--output"]
    if not shards:
        return cli.main([*command, str(folder / "one.jsonl")])
    for index in range(shards):
        assert cli.main([*command, str(folder / "out.jsonl"), "--shard", f"{index}/{shards}"]) == 0
    return merge(*folder.glob("out.jsonl.*"))


def test_scores_are_equal_since_chunks_stay_together(prm, tmp_path, monkeypatch):
    monkeypatch.setattr("jprm.score.scorer.CHUNK", 4)
    monkeypatch.setattr("jprm.methods.jobs.score.CHUNK", 4)
    monkeypatch.setattr("jprm.load", lambda *_, **__: prm)
    records = [json.dumps(x | {"id": i}).encode() + b"\n" for i, x in enumerate([*chains(20), *chains(7, seed=3)])]
    assert scored(tmp_path, records, 0) == scored(tmp_path, records, 3) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    said = [json.loads((tmp_path / f"{name}.jsonl.info.json").read_text()) for name in ("one", "out")]
    assert said[0] == said[1]


def test_rejects_come_in_the_order_of_the_input(prm, tmp_path, monkeypatch):
    monkeypatch.setattr("jprm.load", lambda *_, **__: prm)
    good = [json.dumps(record).encode() + b"\n" for record in chains(8)]
    bad = [b'{"problem": "p"}\n', b"no JSON\n", b"no JSON\n"]
    records = [good[0], bad[0], *good[1:5], bad[1], *good[5:], bad[2]]
    assert scored(tmp_path, records, 2, "--on-error", "skip") == 0
    assert (tmp_path / "out.jsonl.rejects").read_bytes() == b"".join(bad)
    kept = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["problem"] for line in kept] == [json.loads(line)["problem"] for line in good]


def test_a_record_keeps_its_shard_whatever_stands_around_it():
    lines = [json.dumps(record).encode() for record in arithmetic(50)]
    place = {line: index for index, (line,) in shards.divided(lines, 7, 1)}
    shuffled = random.Random(2).sample(lines, 30)
    assert all(place[line] == index for index, (line,) in shards.divided(shuffled, 7, 1))
    of_problem = {}
    for line, index in place.items():
        of_problem.setdefault(json.loads(line)["problem"], set()).add(index)
    assert all(len(indices) == 1 for indices in of_problem.values())
    assert set(place.values()) == set(range(7))


def test_commands_that_drop_or_add_results_are_merged_by_problem(tmp_path):
    """A result belongs to the next record of its problem: none, one or several for each."""
    write_records(tmp_path / "in.jsonl", [{"problem": f"p{i}"} for i in range(30)])
    source = shards.input_of(tmp_path / "in.jsonl")
    results = {f"p{i}": [{"problem": f"p{i}", "k": k} for k in range(i % 3)] for i in range(30)}
    for index in range(4):
        shard = Shard(index, 4)
        out = shard.part_of(tmp_path / "out.jsonl")
        kept = shards.write_input(shard, shards.lines_of(tmp_path / "in.jsonl"), source, out)
        problems = [json.loads(line)["problem"] for line in kept.read_bytes().splitlines()]
        write_records(out, itertools.chain.from_iterable(results[problem] for problem in problems))
        shards.write_manifest(shard, out, {}, {"kept": 1, "name": "text"}, seconds=2.0, devices="cpu")
    merged = shards.merge([Shard(i, 4).part_of(tmp_path / "out.jsonl") for i in range(4)])
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert list(map(json.loads, lines)) == list(itertools.chain.from_iterable(results.values()))
    assert (merged.records, merged.counts, merged.seconds, merged.devices) == (30, {"kept": 4}, 8.0, {"cpu": 4})


def keep(path, change):
    path.write_bytes(change(path.read_bytes()))


MORE = b'{"problem": "more", "steps": ["1 = 1"]}\n'
HARMS = {
    "missing": lambda input, shard_files: shard_files[1].unlink(),
    "unfinished": lambda input, shard_files: shard_files[1].rename(beside(shard_files[1], "part")),
    "another kind": lambda input, shard_files: keep(
        beside(shard_files[1], "info.json"), lambda x: x.replace(b"arithmetic", b"coq")
    ),
    "other records": lambda input, shard_files: keep(shard_files[1], lambda _: shard_files[0].read_bytes()),
    "manifest cut": lambda input, shard_files: keep(beside(shard_files[1], "manifest.json"), lambda x: x[:40]),
    "input changed": lambda input, shard_files: keep(input, lambda x: x + MORE),
}


@pytest.mark.parametrize("harm", [*HARMS, "given twice", "none"])
def test_what_does_not_belong_together_is_refused_and_nothing_is_written(files, harm, capsys):
    input, output, _ = files
    shard_files = sharded(input, output, 3)
    paths = {"given twice": [*shard_files, shard_files[1]], "none": [input]}.get(harm) or list(
        output.parent.glob("out.jsonl.*")
    )
    named = {"given twice": "00001-of-00003", "none": "OUT", "input changed": input.name}.get(harm, shard_files[1].name)
    if harm in HARMS:
        HARMS[harm](input, shard_files)
    capsys.readouterr()
    assert merge(*paths) == 2
    assert named in capsys.readouterr().err
    assert not output.exists() and not beside(output, "part").exists()


@pytest.mark.parametrize("text", ["3/3", "-1/3", "1", "1/x", "auto", "a/2", "/"])
def test_odd_shards_are_refused(text):
    refused(ValueError, "shard", shard_of, text, {})


@pytest.mark.parametrize(
    ("environment", "text", "shard"),
    [
        ({"JOB_COMPLETION_INDEX": "5"}, "auto/8", Shard(5, 8)),
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "1",
          "SLURM_ARRAY_TASK_STEP": "2"}, "auto", Shard(3, 4)),
        ({"BATCH_TASK_INDEX": "0", "BATCH_TASK_COUNT": "2"}, "auto", Shard(0, 2)),
        ({}, "2/4", Shard(2, 4)),
    ],
)  # fmt: skip
def test_schedulers_name_the_shard(environment, text, shard):
    assert shard_of(text, environment) == shard


def test_a_shard_of_another_input_is_not_continued(files):
    input, output, _ = files
    assert verify(input, output, "--shard", "0/2") == 0
    write_records(input, arithmetic(60, seed=9))
    assert verify(input, output, "--shard", "0/2") == 2


def test_a_shard_without_records_ends_well(tmp_path):
    write_records(tmp_path / "in.jsonl", [{"problem": "p", "steps": ["1 + 1 = 2"]}])
    assert merge(*sharded(tmp_path / "in.jsonl", tmp_path / "out.jsonl", 3)) == 0
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 1


def test_shards_of_a_bucket(files, s3):
    input, _, whole = files
    path_of(f"{s3}/in.jsonl").write_bytes(input.read_bytes())
    for index in range(2):
        assert verify(f"{s3}/in.jsonl", f"{s3}/out.jsonl", "--shard", f"{index}/2") == 0
    assert merge(*(f"{s3}/out.jsonl.0000{index}-of-00002" for index in range(2))) == 0
    assert path_of(f"{s3}/out.jsonl").read_bytes() == whole


def forged(shard_files, **changes):
    """Changes the manifest of the first shard, and says what `merge` then answers."""
    path = beside(shard_files[0], "manifest.json")
    content = path.read_text()
    path.write_text(json.dumps(json.loads(content) | changes))
    with pytest.raises(ValueError) as raised:
        shards.merge(shard_files)
    path.write_text(content)
    return str(raised.value)


def test_what_a_strangers_manifest_says_is_checked(files):
    shard_files = sharded(*files[:2], 2)
    stamp = json.loads(beside(shard_files[0], "manifest.json").read_text())["source"]
    address = "http://127.0.0.1:9/secret/in.jsonl"  # nobody listens: to ask there would be another error
    assert "nothing is downloaded" in forged(shard_files, source=stamp | {"input": address})
    for changes in ({"unit": 10**24}, {"unit": 0}, {"seconds": "x"}, {"seconds": -1}, {"source": {"input": 3}}):
        assert ".00000-of-00002.manifest.json" in forged(shard_files, **changes), changes
    assert not files[1].exists()
    # nor is a checksum believed of a shard that was cut
    keep(shard_files[0], lambda x: b"".join(x.splitlines(keepends=True)[:-1]))
    assert "has changed" in forged(shard_files, output=path_of(shard_files[0]).checksum())


def test_merge_waits_for_no_pipe_and_counts_no_endless_shards(files):
    shard_files = sharded(*files[:2], 2)
    for path in (shard_files[0], beside(shard_files[0], "manifest.json")):
        path.rename(path.with_suffix(".kept"))
        os.mkfifo(path)
        refused(ValueError, "not a file on disk", shards.merge, shard_files)
        path.with_suffix(".kept").rename(path)
    refused(ValueError, "99,999,999,999 shards", shards.merge, ["out.00000-of-99999999999"])

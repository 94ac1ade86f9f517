"""Trees of tokens on disk and in shards: each once an epoch, in an order that any process resumes bit for bit."""

import collections
import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run as tiny
from array_record.python import array_record_module
from families import breadth
from fsspec.implementations.memory import MemoryFileSystem
from refusing import refused

from jprm.checkpoints import store
from jprm.data import SHARDS, is_shards
from jprm.experiment import RUN, DataConfig, OptimizerConfig, read
from jprm.io import folders
from jprm.io.jsonl import write_records
from jprm.io.shards import Shard
from jprm.io.storage import Remote, path_of
from jprm.methods.data.stored_trees import (
    ShardOrder,
    TokenShards,
    TokenTrees,
    cached_trees,
    shard_name,
    tokenise,
    write_trees,
)
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.token_tree import TokenTree, token_tree
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.train import Trainer
from jprm.train.batches import Streams, _batches, _mixed, _sources, own_batches, tokens_of
from jprm.tree import tree_of


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """An experiment on files of records, and the same on their shards."""
    folder = tiny.make_data(tmp_path_factory.mktemp("shards"))
    write_records(folder / "train.jsonl", [tree | {"id": i} for i, tree in enumerate(tiny.trees(90))])
    write_records(folder / "more.jsonl", tiny.trees(20, seed=5))
    plain = tiny.experiment(folder, window=8)
    tokenise(plain, folder / "tokens", shards=7, workers=1)
    tokenise(plain, folder / "more", [str(folder / "more.jsonl")], shards=2, workers=1)
    return folder, plain, experiment_on(plain, folder / "tokens")


@pytest.fixture
def bucket(world):
    """A bucket with the shards."""
    remote = Remote(f"memory://bucket/{uuid.uuid4().hex}")
    remote.upload_folder(world[0] / "tokens", last=SHARDS)
    return remote


def names(shards):
    return [tree.name for tree in shards]


def experiment_on(experiment, *train, **changes):
    train = tuple(map(str, train))
    return dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, train=train, **changes))


def layout_of(experiment):
    return native_layout(load_tokenizer(experiment.tokenizer))


def streams(experiment, count, indices=None):
    layout = layout_of(experiment)
    indices = range(count) if indices is None else indices
    parts = {k: _batches(experiment, _sources(experiment, experiment.data.train, layout), once=False, stream=(k, count))
             for k in indices}  # fmt: skip
    return Streams(parts, count, experiment.data.micro_rows)


def same(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_threads_read_by_index_at_once(world):
    """Each has opened its shard before either reads."""
    both = threading.Barrier(2, timeout=300)

    class Shards(TokenShards):
        @property
        def read(self):
            both.wait()
            return super().read

    folder = world[0] / "tokens"
    places = [0, len(TokenShards(folder)) - 1]
    with ThreadPoolExecutor(2) as threads:
        for i, tree in zip(places, threads.map(Shards(folder).__getitem__, places), strict=True):
            equal(tree, TokenShards(folder)[i])


def test_the_shards_hold_the_trees_of_all_records(world):
    folder, plain, _ = world
    records = [json.loads(line) for line in (folder / "train.jsonl").open()]
    layout = layout_of(plain)
    by_name = {tree.name: tree for tree in (tokens_of(record, plain, layout) for record in records)}
    trees = list(TokenShards(folder / "tokens"))
    assert len(trees) == len(by_name) == 90
    for tree in trees:
        equal(tree, by_name[tree.name])
    about = json.loads((folder / "tokens" / SHARDS).read_text())["shards"]
    assert sum(shard["tokens"] for shard in about) == sum(len(tree.tokens_N) for tree in trees)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_streams_divide_an_epoch(world, count):
    shards = TokenShards(world[0] / "tokens")
    orders = [ShardOrder(shards, 3, (k, count)) for k in range(count)]
    epochs = [collections.Counter() for _ in range(2)]
    for k, order in enumerate(orders):
        mine = itertools.chain.from_iterable(order.members(group) for group in range(40))
        for place, shard in zip(range(k, 14, count), mine, strict=False):
            epochs[place // 7][shard] += 1
    assert all(epoch == dict.fromkeys(range(7), 1) for epoch in epochs)
    first = order.members(0)
    named = collections.Counter(order(i).name for i in range(sum(shards.records[shard] for shard in first)))
    expected = collections.Counter(shards[shards._starts[s] + i].name for s in first for i in range(shards.records[s]))
    assert named == expected


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_resumed_rows_are_equal_bit_for_bit(world, bucket, tmp_path, place):
    _, _, experiment = world
    if place == "memory":
        experiment = experiment_on(experiment, bucket, cache=str(tmp_path / "cache"))
    whole = list(itertools.islice(streams(experiment, 2), 30))  # four epochs
    for stop in (1, 7, 16):
        before = streams(experiment, 2)
        for _ in range(stop):
            next(before)
        state = json.loads(json.dumps(before.get_state()))
        stream = streams(experiment, 2, [1])
        stream.set_state(state)
        for rows, other in zip(itertools.islice(stream, 6), whole[stop : stop + 6], strict=True):
            same(jax.tree.map(lambda x: x[:, 2:], rows), jax.tree.map(lambda x: x[:, 2:], other))
    if place == "memory":
        same(whole, list(itertools.islice(streams(world[2], 2), 30)))
        assert len(list((tmp_path / "cache").iterdir())) == 7


def test_copies_of_shards_are_bounded(world, bucket, tmp_path):
    tokens, cache = world[0] / "tokens", tmp_path / "cache"
    most = 2.5 * max(path_of(tokens / shard_name(i, 7)).stat().st_size for i in range(7))
    shards, local = TokenShards(bucket, cache=cache, most=most), TokenShards(tokens)
    assert names(shards) == names(local)
    assert len(list(cache.iterdir())) == 2
    order, of_local = (ShardOrder(trees, 0, (0, 1)) for trees in (shards, local))
    assert [order(i).name for i in range(200)] == [of_local(i).name for i in range(200)]


def test_a_copy_that_makes_room_while_it_is_opened_is_no_damage(world, bucket, tmp_path, monkeypatch):
    """Each is removed once before it is opened, and every time before it is read, and is written again at once."""
    cache = tmp_path / "cache"
    shards, gone = TokenShards(bucket, cache=cache, most=1), []
    fetch, reader = shards.fetch, array_record_module.ArrayRecordReader

    def fetched_and_gone(shard):
        path = fetch(shard)
        if shard not in gone:
            gone.append(shard)
            path.unlink()
        return path

    def removed_and_there(name, options):
        copies = {path: path.read_bytes() for path in cache.iterdir()}
        for path in copies:
            path.unlink()
        try:
            return reader(name, options)
        finally:
            for path, content in copies.items():
                path.write_bytes(content)

    monkeypatch.setattr(shards, "fetch", fetched_and_gone)
    monkeypatch.setattr(array_record_module, "ArrayRecordReader", removed_and_there)
    assert names(shards) == names(TokenShards(world[0] / "tokens"))
    assert gone == list(range(7))


def test_threads_that_ask_for_a_shard_copy_it_once(world, bucket, tmp_path, monkeypatch):
    shards, copies, download = TokenShards(bucket, cache=tmp_path / "cache"), [], Remote.download

    def slowly(remote, file):
        copies.append(remote.url)
        time.sleep(0.05)
        download(remote, file)

    monkeypatch.setattr(Remote, "download", slowly)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(shards.fetch, [3] * 4))
    assert len(copies) == 1 and paths[0].read_bytes() == (world[0] / "tokens" / shard_name(3, 7)).read_bytes()


def test_a_part_of_an_object_is_no_copy(bucket, tmp_path, monkeypatch):
    shards = TokenShards(bucket, cache=tmp_path / "cache")

    def cut(self, place, file, **_):
        Path(file).write_bytes(self.cat_file(place)[:-1])

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", cut)
        refused(OSError, shard_name(3, 7), shards.open, 3)
    assert list((tmp_path / "cache").iterdir()) == []
    assert shards.open(3).num_records() == shards.records[3]


@pytest.mark.parametrize("kind", ["shards", "records", *breadth(["cache"])])
def test_a_mixture_keeps_its_weights_and_resumes(world, tmp_path, kind):
    folder, plain, _ = world
    train = ("tokens", "more") if kind == "shards" else ("train.jsonl", "more.jsonl")
    more = {"cache": str(tmp_path)} if kind == "cache" else {}
    mixed = experiment_on(plain, *(folder / name for name in train), mixture=(1.0, 3.0), **more)
    whole = list(itertools.islice(streams(mixed, 1), 24))
    again = streams(mixed, 1)
    for _ in range(9):
        next(again)
    state = again.get_state()
    resumed = streams(mixed, 1)
    resumed.set_state(state)
    same(list(itertools.islice(resumed, 15)), whole[9:])
    if kind == "shards":
        sources = [TokenShards(folder / name) for name in train]
        endless = _mixed([source.stream(i, (0, 1)) for i, source in enumerate(sources)], mixed.data.mixture)
        second = {tree.name for tree in sources[1]}
        assert sum(endless[i].name in second for i in range(400)) == 300


CURRICULUM = """
def later(step, steps):
    return (1 - step / steps, step / steps)

def wrong(step, steps):
    return (0.0, 0.0) if step else (1.0, 0.0)

def late(step, steps):
    return 1 - step, step

def one(step, steps):
    return 1.0,

def scalar(step, steps):
    return 1.0

def none(step, steps):
    pass

def words(step, steps):
    return "ab"

def unknown(step, steps):
    return float("nan"), 1.0
"""


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["shards", "records"])
def test_a_curriculum_follows_the_step_and_resumes(world, tmp_path, kind, count):
    folder, plain, _ = world
    (tmp_path / "mine.py").write_text(CURRICULUM)
    train = ("tokens", "more") if kind == "shards" else ("train.jsonl", "more.jsonl")
    changes = dict(mixture=f"{tmp_path / 'mine.py'}:later", rows=2, micro_rows=2)
    mixed = dataclasses.replace(experiment_on(plain, *(folder / name for name in train), **changes), steps=24)
    whole = list(itertools.islice(streams(mixed, count), 24))
    resumed = streams(mixed, count)
    for _ in range(9):
        next(resumed)
    state, resumed = json.loads(json.dumps(resumed.get_state())), streams(mixed, count)
    resumed.set_state(state)
    same(list(itertools.islice(resumed, 15)), whole[9:])

    def of_second(state):
        taken = [part["parent"]["next"] for part in state["streams"]]
        return sum(second for _, second in taken) / max(sum(first + second for first, second in taken), 1)

    late = streams(mixed, count)
    shares = [of_second(late.get_state()) for _ in itertools.islice(late, 24)]
    assert shares[0] == 0 and shares[12] < shares[-1] < 0.6 and shares[-1] > 0.3


def test_a_curriculum_is_recorded_and_checked(world, tmp_path):
    folder, plain, _ = world
    (tmp_path / "mine.py").write_text(CURRICULUM)
    train = (folder / "train.jsonl", folder / "more.jsonl")
    mixed = experiment_on(plain, *train, mixture=f"{tmp_path / 'mine.py'}:wrong", window=1)
    refused(ValueError, r"mine\.py:wrong.*\[0\.0, 0\.0\] at step 1", streams, mixed, 1)
    for name, returned in {"late": "1.0", "one": "1.0", "scalar": "1.0", "none": "None", "words": "'ab'",
                           "unknown": "nan"}.items():  # fmt: skip
        bad = dataclasses.replace(mixed, data=dataclasses.replace(mixed.data, mixture=f"{tmp_path / 'mine.py'}:{name}"))
        refused(ValueError, rf"mine\.py:{name}': returns .*{returned}.* Return 2 weights", streams, bad, 1)
    refused(ValueError, "mixture", experiment_on, plain, *train, mixture="later")
    store.claim(path_of(tmp_path / "run"), mixed, load_tokenizer(plain.tokenizer))
    assert read(tmp_path / "run" / RUN).data.mixture == mixed.data.mixture
    assert "data.mixture" in json.loads((tmp_path / "run" / store.DIGESTS).read_text())


def test_training_takes_shards_and_another_experiment_is_refused(world):
    folder, plain, experiment = world
    assert is_shards(folder / "tokens") and not is_shards(folder / "train.jsonl")
    mesh, tokenizer = make_mesh(MeshConfig(), jax.devices()[:1]), load_tokenizer(plain.tokenizer)
    outcomes = experiment_on(experiment, folder / "tokens", supervise="outcome")
    refused(ValueError, "supervise", own_batches, outcomes, outcomes.data.train, mesh, tokenizer)
    both = experiment_on(plain, folder / "tokens", folder / "train.jsonl")
    refused(ValueError, r"train\.jsonl|tokens", _sources, both, (str(folder / "tokens"), "x"), layout_of(plain))
    assert list(
        _batches(experiment, _sources(experiment, [str(folder / "more")], layout_of(plain)), once=True, stream=(0, 1))
    )
    base = dict(train=("a", "b"), supervise="step", too_long="error")
    for changes in (dict(mixture=(1.0,)), dict(cache_gb=0.0)):
        refused(ValueError, rf"data\.{min(changes)}", DataConfig, **base, **changes)


def test_a_stopped_command_goes_on_and_parts_make_the_same_bytes(world, tmp_path):
    folder, plain, _ = world
    first = tokenise(plain, tmp_path / "out", shards=7, workers=1, part=Shard(1, 2))
    assert (first.written, first.shards) == (3, 7) and not (tmp_path / "out" / SHARDS).exists()
    refused(ValueError, "not all written", is_shards, tmp_path / "out")
    refused(ValueError, "shards", tokenise, plain, tmp_path / "out", shards=6, workers=1)
    (tmp_path / "out" / f"{shard_name(3, 7)}.json").unlink()  # killed between the two
    whole = tokenise(plain, tmp_path / "out", shards=7, workers=2)
    assert whole.written == 7 and whole == tokenise(plain, folder / "tokens", shards=7)
    for name in (shard_name(i, 7) for i in range(7)):
        assert (tmp_path / "out" / name).read_bytes() == (folder / "tokens" / name).read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("x")
    refused(ValueError, "other files", tokenise, plain, other, workers=1)


def test_damage_is_named(world, tmp_path):
    copy, name = tmp_path / "copy", shard_name(2, 7)
    shutil.copytree(world[0] / "tokens", copy)
    (copy / name).write_bytes((copy / name).read_bytes()[:100])
    refused(ValueError, name, list, TokenShards(copy))


def test_a_run_on_shards_continues_as_if_undisturbed(world, tmp_path, one_device):
    _, _, experiment = world
    experiment = dataclasses.replace(experiment, steps=4, checkpoint_every=2, optimizer=OptimizerConfig(0.01))

    def trained(folder, steps):
        with Trainer(experiment, tmp_path / folder) as trainer:
            for rows in itertools.islice(trainer.batches, steps):
                trainer.step(rows)
            trainer.save()
            return jax.tree.map(np.asarray, trainer.params)

    whole = trained("a", 4)
    trained("b", 2)
    same(trained("b", 2), whole)


# ---- Token trees on disk: the same batches bit for bit, written once, whole after a kill.


RECORDS = tiny.trees(40, seed=3)
PLAIN = {"extras": []}


@pytest.fixture(scope="module")
def layout(tiny_run):
    return native_layout(load_tokenizer(tiny_run.folder))


def equal(first: TokenTree, second: TokenTree):
    for name in (field.name for field in dataclasses.fields(TokenTree)):
        x, y = getattr(first, name), getattr(second, name)
        np.testing.assert_equal(x, y, err_msg=name)
        assert getattr(x, "dtype", None) == getattr(y, "dtype", None), name
    assert list(first.extras) == list(second.extras)


@pytest.mark.parametrize("supervise", ["step", "outcome_tokens"])
def test_trees_come_back_as_they_were(layout, tmp_path, supervise):
    trees = [token_tree(tree_of(record), layout, supervise) for record in RECORDS]
    trees[3] = dataclasses.replace(trees[3], name="ein Umlaut: ä")
    if supervise == "step":
        trees = [dataclasses.replace(t, extras={"b": t.label_M / 3, "a": t.weight_M}) for t in trees]
    write_trees(tmp_path, trees, {"extras": list(trees[0].extras)})
    stored = TokenTrees(tmp_path)
    assert len(stored) == len(trees)
    for tree, other in zip(trees, stored, strict=True):
        equal(tree, other)
    equal(stored[2:9:3][1], trees[5])


def batches(files, layout, cache, count=1, **options):
    experiment = tiny.experiment(Path(files[0]).parent)
    config = dataclasses.replace(experiment.data, cache=str(cache), **options)
    experiment = dataclasses.replace(experiment, data=config)
    batches = iter(_batches(experiment, _sources(experiment, files, layout), once=False, stream=(0, 1)))
    return batches, [next(batches) for _ in range(count)]


def test_batches_are_the_same_bit_for_bit_over_epochs_and_resumed(layout, tmp_path):
    for i in range(2):
        write_records(tmp_path / f"{i}.jsonl", RECORDS[i::2])
    files = [str(tmp_path / f"{i}.jsonl") for i in range(2)]
    _, expected = batches(files, layout, "", 12, window=8)
    resumed, rows = batches(files, layout, tmp_path / "cache", 12, window=8)
    jax.tree.map(np.testing.assert_array_equal, rows, expected)
    again, _ = batches(files, layout, tmp_path / "cache", window=8)
    again.set_state(resumed.get_state())
    jax.tree.map(np.testing.assert_array_equal, next(again), next(resumed))


def test_what_the_trees_depend_on_makes_other_trees(layout, tmp_path, monkeypatch):
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    write_records(path, RECORDS[:8])
    batches([str(path)], layout, cache)
    assert len(list(cache.iterdir())) == 1
    with monkeypatch.context() as patch:  # nothing is tokenised again
        patch.setattr("jprm.methods.data.stored_trees.write_trees", None)
        batches([str(path)], layout, cache, tokens=512, seed=7)
    batches([str(path)], layout, cache, supervise="outcome")
    assert len(list(cache.iterdir())) == 2
    write_records(path, RECORDS[8:16])
    batches([str(path)], layout, cache)
    assert len(list(cache.iterdir())) == 3


def test_a_bad_record_leaves_no_trees(layout, tmp_path):
    def trees():
        yield token_tree(tree_of(RECORDS[0]), layout)
        raise ValueError("record 2 is bad")

    refused(ValueError, "record 2", cached_trees, tmp_path, trees(), 2, PLAIN)
    assert list(tmp_path.iterdir()) == []


WRITE = """
import sys
from jprm.methods.data.stored_trees import cached_trees
from jprm.token_tree import merged
def trees():
    print("writing", flush=True)
    sys.stdin.readline()
    yield merged("theirs", [1, 2], [[3]])
cached_trees(sys.argv[1], trees(), 1, {"of": "both", "extras": []})
"""


@pytest.mark.parametrize("how", ["killed", "whole"])
def test_a_second_run_waits_for_the_first_or_takes_its_place(layout, tmp_path, monkeypatch, how):
    monkeypatch.setattr(folders, "WAIT_S", 0.01)
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "writing\n"
    token_trees = [token_tree(tree_of(record), layout) for record in RECORDS[:3]]
    taken = []
    thread = threading.Thread(
        target=lambda: taken.append(cached_trees(tmp_path, token_trees, 3, {"of": "both"} | PLAIN))
    )
    thread.start()
    time.sleep(0.1)
    assert not taken, "it did not wait"
    other.kill() if how == "killed" else other.communicate("\n")
    thread.join(300)
    other.wait()
    assert len(taken[0]) == (3 if how == "killed" else 1)


def test_trees_that_another_run_wrote_meanwhile_are_taken(layout, tmp_path):
    """It ended between this one's look and its lock, so that this one's folder cannot have the name."""
    (tree,) = (token_tree(tree_of(record), layout) for record in RECORDS[:1])

    def trees():
        cached_trees(tmp_path / "other", [tree, tree], 2, PLAIN)
        (place,) = (tmp_path / "other").iterdir()
        place.rename(tmp_path / "cache" / place.name)
        yield tree

    assert len(cached_trees(tmp_path / "cache", trees(), 1, PLAIN)) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 1

"""Each process reads and packs its own part of files that are read once."""

import jax
import numpy as np
import pytest
from tiny_run import experiment, make_data, trees

from jprm.io.jsonl import write_records
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.tokenizer import load_tokenizer
from jprm.train import batches


@pytest.mark.parametrize("records", [12, 5, 1])  # of one, three streams have none
@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_read_a_part_each_and_pack_the_rows_of_one_process(tmp_path, monkeypatch, count, records):
    run = experiment(make_data(tmp_path), streams=count)
    write_records(tmp_path / "valid.jsonl", trees(records, seed=1))
    mesh, tokenizer = make_mesh(MeshConfig(), jax.devices()[:1]), load_tokenizer(run.tokenizer)
    tokens_of, read = batches.tokens_of, []
    monkeypatch.setattr(
        batches, "tokens_of", lambda record, **about: read.append(record["problem"]) or tokens_of(record, **about)
    )

    def of_process(*streams):
        read.clear()
        monkeypatch.setattr(batches, "own_streams", lambda *_: list(streams))
        rows = list(batches.own_batches(run, run.data.valid, mesh, tokenizer, once=True))
        return rows, sorted(read)

    whole, problems = of_process(*range(count))
    assert problems == sorted(f"p1 {i}" for i in range(records))
    parts = [of_process(k) for k in range(count)]
    assert sorted(sum((read for _, read in parts), [])) == problems
    assert max(len(read) for _, read in parts) <= -(-records // count)
    block = run.data.micro_rows // count
    for k, (rows, _) in enumerate(parts):
        for i, batch in enumerate(whole):
            of_block = jax.tree.map(lambda x, k=k: x[:, k * block : (k + 1) * block], batch)
            if i < len(rows):
                own = jax.tree.map(lambda x, k=k: x[:, k * block : (k + 1) * block], rows[i])
                jax.tree.map(np.testing.assert_array_equal, own, of_block)
            else:  # the stream has ended
                assert not of_block.weight.any() and not of_block.tokens.any()

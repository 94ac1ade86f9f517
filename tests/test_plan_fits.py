"""What fits on one card: the sizes of what is kept, by closed forms, and the table."""

import json

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from refusing import refused

from jprm.apps import cli
from jprm.apps.plan import fits
from jprm.apps.plan.plan import Memory, abstract_state
from jprm.model.mesh import MESH_AXES


def size_of(way, size="7B"):
    """Bytes of the frozen and the trained parameters, without allocating any."""
    mesh = AbstractMesh((1,) * 5, MESH_AXES, axis_types=(AxisType.Explicit,) * 5)
    state = abstract_state(fits.experiment(size, way, 2048), mesh)
    return [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in (state.frozen, state.trained)]


def test_a_base_takes_what_its_type_says():
    c = fits.experiment("7B", "training, all parameters", 2048).model
    layer = c.width * (2 * c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.width * c.mlp_width
    matrices, embed = c.layers * layer, c.vocab_size * c.width
    vectors = c.layers * (2 * c.width + (c.heads + 2 * c.kv_heads) * c.head_dim) + c.width
    assert size_of("training, all parameters")[0] == 0
    frozen, trained = size_of("LoRA, base in 4 bits")
    assert frozen == matrices * 36 // 64 + 2 * embed + 4 * vectors
    assert trained < 4 * 45e6
    norms = c.layers * 2 * c.width + c.width
    assert size_of("LoRA, base in bfloat16") == [2 * (matrices + embed + vectors - norms) + 4 * norms, trained]
    assert size_of("scoring in 4 bits") == [frozen, 4 * 2 * (c.width + 1)]


def test_the_smallest_card_of_each_size():
    assert [fits.smallest(gigabytes * 1e9) for gigabytes in (23.6, 23.8, 44.5, 78, 78.2, 139)] == [
        "24 GB", "48 GB", "80 GB", "80 GB", "141 GB", "none",
    ]  # fmt: skip


def test_a_table_that_stopped_goes_on(tmp_path, monkeypatch, capsys):
    compiled = []

    def fake(function, arguments, mesh, available):
        if len(compiled) == 3:
            raise KeyboardInterrupt
        compiled.append(arguments)
        return Memory(30e9, available, 20e9), None

    monkeypatch.setattr(fits, "devices", lambda topology: jax.devices()[:1])
    monkeypatch.setattr(fits, "compiled", fake)
    monkeypatch.setattr(fits, "training_step", lambda config, *_: (None, config.name))
    monkeypatch.setattr(fits, "scoring_step", lambda config, *_: (None, config.name))
    with pytest.raises(KeyboardInterrupt):
        fits.fits(tmp_path / "fits.json")
    compiled[:] = []
    monkeypatch.setattr(fits, "compiled", lambda *_: (compiled.append(_) or Memory(30e9, 0.0, 20e9), None))
    report = fits.fits(tmp_path / "fits.json")
    cells = len(fits.SHAPES) * len(fits.WAYS) * len(fits.TOKENS)
    assert len(compiled) == cells - 3 and len(report["cells"]) == cells
    assert json.loads((tmp_path / "fits.json").read_text()) == report
    table, note = fits.tables(report)
    assert [row for row in table.rows if row][0] == ["0.5B", "training, all parameters", *["30.0", "48 GB"] * 2]


def test_the_table_takes_nothing_else(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    refused(ValueError, "--fits takes only --json", cli.plan, fits=True, topology="h100-1")
    refused(ValueError, "name an experiment file and --topology, or --fits", cli.plan)

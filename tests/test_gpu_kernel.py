"""The GPU's kernels of interval attention, interpreted on a CPU, against the reference; and their tables."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from test_attention import arrays_of, by_rule, close
from test_kernel import REFERENCE, SMALL, long_rows, real_rows
from tiny import TINY, packed_trees, reasoning_trees

from jprm.methods.kernels import gpu as gpu_kernel
from jprm.methods.kernels.gpu import Launch, Launches, default_launches, find_blocks
from jprm.model.attention import check, suited
from jprm.model.mesh import MeshConfig, make_mesh, spec
from jprm.model.transformer import check_model

KERNEL = dataclasses.replace(TINY, attention="gpu_kernel")
# float32 sums of numbers of size 1 in another order, and powers of two where the reference has powers of e.
EXACT = 1e-5


def test_heads_and_rows_of_any_size_are_padded():
    """Chains, subtrees and padding, in the default blocks: heads of 20, rows of 150 tokens."""
    H, G = 20, 3
    until_BT, position_BT = (x[[0, 2, 3, 4], :150].clip(max=150) for x in long_rows())
    arrays = (*arrays_of(0, 4, 150, K=2, G=G, H=H), until_BT, position_BT)
    model = dict(heads=2 * G, kv_heads=2, head_dim=H)
    actual, expected = (by_rule(*arrays, dataclasses.replace(x, **model)) for x in (KERNEL, REFERENCE))
    assert [x.shape for x in actual] == [x.shape for x in expected]
    close(actual, expected, EXACT)


def test_rows_of_prm800k_and_chains(shared_data, smollm2_gguf):
    rows = real_rows(shared_data, smollm2_gguf, 512, 128, 8)
    chain = np.full((1, 512), 512)
    until_BT = np.concatenate([rows.until[:2], chain])
    position_BT = np.concatenate([rows.position[:2], np.arange(512)[None]])
    assert np.any(np.diff(until_BT[0]) < 0) and np.any(np.diff(until_BT[0]) > 0)  # subtrees
    arrays = (*arrays_of(1, 3, 512, K=1, H=16), until_BT, position_BT)
    shape = dict(kv_heads=1, heads=2, head_dim=16)
    actual, expected = (by_rule(*arrays, dataclasses.replace(x, **shape)) for x in (KERNEL, REFERENCE))
    close(actual[:1], expected[:1], EXACT)
    # A key's gradient is a sum over up to 512 queries: errors of float32 grow with the gradients, which reach 20.
    for a, b in zip(actual[1:], expected[1:], strict=True):
        assert np.max(np.abs(a - b)) < EXACT * np.max(np.abs(b))


tables = jax.jit(find_blocks, static_argnums=(2, 3))


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from([(6, 8), (4, 12), (12, 4)]), st.sampled_from([1, 2]))
def test_tables_hold_the_visible_pairs_and_no_other(data, sizes, parts):
    """Of any `until`, nested or not, whole pairs first; in one part or two of the queries."""
    size, (query, key) = 24, sizes
    until_T = [data.draw(st.integers(j + 1, size)) for j in range(size)]
    until_BT = np.array([until_T, range(1, size + 1), [size] * size], np.int32)
    launch = Launch(query, key, 4, 1)
    blocks = jax.tree.map(np.asarray, tables(until_BT, until_BT, Launches(launch, launch, launch), parts))
    M, N, of_part = size // query, size // key, size // query // parts
    for b in range(3):
        seen_TT = (np.arange(size) <= np.arange(size)[:, None]) & (np.arange(size)[:, None] < until_BT[b])
        seen_MNQK = seen_TT.reshape(M, query, N, key).swapaxes(1, 2)
        any_visible, all_visible = (set(zip(*np.nonzero(x(seen_MNQK, (2, 3))), strict=True)) for x in (np.any, np.all))
        for whole, expected in ((True, all_visible), (False, any_visible - all_visible)):
            by_query = [(m, n) for m, line in enumerate(blocks.forward[b]) for n in listed(line, whole)]
            assert sorted(by_query) == sorted(expected)
            by_key = [
                (m + i // N * of_part, i % N) for i, line in enumerate(blocks.dkv[b]) for m in listed(line, whole)
            ]
            assert sorted(by_key) == sorted(expected)


@settings(max_examples=20, deadline=None)
@given(st.lists(reasoning_trees(), min_size=1, max_size=5), st.integers(1, 30), st.sampled_from([1, 2]))
def test_tables_of_windows_leave_out_what_no_query_sees(trees, window, parts):
    """Pairs of blocks with a visible pair are needed, whole ones are visible throughout, and chains need no more."""
    rows = packed_trees(trees, 24, 12, too_long="truncate").rows
    until_BT = np.concatenate([rows.until[:1], np.full((1, 24), 24)]).astype(np.int32)
    position_BT = np.concatenate([rows.position[:1], np.arange(24)[None]]).astype(np.int32)
    launch, index_T = Launch(4, 6, 4, 1), np.arange(24)
    blocks = windowed(until_BT, position_BT, Launches(launch, launch, launch), parts, (window,))
    forward, _, dkv = map(np.asarray, blocks.local)
    for b in range(2):
        seen_TT = (index_T <= index_T[:, None]) & (index_T[:, None] < until_BT[b])
        seen_TT &= position_BT[b][:, None] - position_BT[b] < window
        seen_MNQK = seen_TT.reshape(6, 4, 4, 6).swapaxes(1, 2)
        any_visible, every = (set(zip(*np.nonzero(x(seen_MNQK, (2, 3))), strict=True)) for x in (np.any, np.all))
        whole, rest = ({(m, n) for m, line in enumerate(forward[b]) for n in listed(line, x)} for x in (True, False))
        assert whole <= every and any_visible <= whole | rest
        assert b == 0 or (whole == every and rest == any_visible - every)
        walked = [(m + i // 4 * (6 // parts), i % 4) for i, line in enumerate(dkv[b]) for m in listed(line, True)]
        assert set(walked) == whole


windowed = jax.jit(find_blocks, static_argnums=(2, 3, 4))


def listed(line, whole):
    n, count = line[:2].tolist()
    return line[2 : 2 + n].tolist() if whole else line[2 + n : 2 + count].tolist()


def test_a_mesh_changes_nothing(monkeypatch):
    """Rows, heads and the tokens of a row split over devices."""
    monkeypatch.setattr(gpu_kernel, "launches", lambda *_: SMALL)
    until_BT, position_BT = (x[:4, :128].clip(max=128) for x in long_rows())
    arrays = (*arrays_of(2, 4, 128), until_BT, position_BT)
    expected = by_rule(*arrays, REFERENCE)
    grid, place = make_mesh(MeshConfig(1, 2, 2, 2)), ("batch", "tokens", "kv_heads")
    config = dataclasses.replace(KERNEL, norm_eps=2e-6)  # a program of its own, since the launches are another
    with jax.set_mesh(grid):
        heads = (jax.device_put(x, jax.NamedSharding(grid, spec(*place))) for x in arrays[:3])
        rows = (jax.device_put(x, jax.NamedSharding(grid, spec("batch", "tokens"))) for x in arrays[3:])
        actual = by_rule(*heads, *rows, config)
    close(actual, expected, EXACT)
    assert all(x.sharding.spec[:3] == actual[0].sharding.spec[:3] for x in actual)


def test_a_gpu_takes_it_for_what_is_not_its_own(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gpu = type("GPU", (), dict(compute_capability="8.0", device_kind="NVIDIA A100-SXM4-80GB"))
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert [suited(x) for x in ("blocked", "paths", "kernel", "gpu_kernel")] == ["gpu_kernel"] * 4
    assert suited("reference") == "reference"
    monkeypatch.setattr(gpu_kernel, "tuned", lambda: {gpu.device_kind: {"128x2": dataclasses.asdict(SMALL)}})
    assert gpu_kernel.launches(96, 2) == SMALL and gpu_kernel.launches(64, 2) == default_launches(64, 2)
    for gpu.compute_capability in ("7.5", "gfx90a"):
        assert suited("paths") == "blocked"
        refused(ValueError, "8.0", check, "gpu_kernel", KERNEL, "gpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert suited("gpu_kernel") == "blocked"
    refused(ValueError, "attention='kernel'", check, "gpu_kernel", KERNEL, "tpu")
    refused(ValueError, "head_dim=512", check_model, dataclasses.replace(KERNEL, head_dim=512))


def test_the_table_of_measured_blocks_is_well_formed():
    for device, cases in gpu_kernel.tuned().items():
        assert device.startswith("NVIDIA")
        for launches in cases.values():
            Launches(**{name: Launch(**launches[name]) for name in ("forward", "dq", "dkv")})


@pytest.mark.slow
def test_the_check_for_machines_with_a_gpu_runs_through(tmp_path, monkeypatch):
    """At a tiny size, interpreted: errors within their bounds, a sweep, speeds, and a table that the code can read."""
    from experiments.bench import gpu_check

    out, table = tmp_path / "check.json", tmp_path / "blocks.json"
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--tiny", "--json", str(out)])
    gpu_check.main()
    report = json.loads(out.read_text())
    assert {x["implementation"] for x in report["exactness"] if x.get("ok")} >= {"blocked", "gpu_kernel"}
    (speed,) = [x for x in report["speed"] if x["attention"] == "gpu_kernel"]
    assert speed["training"] > 0 and speed["scoring"] > 0
    table.write_text('{"NVIDIA A": {"64x2": 1}}')
    gpu_check.write_table(table, report["sweep"])
    launches = json.loads(table.read_text())[jax.local_devices()[0].device_kind]["16x2"]
    Launches(**{name: Launch(**launches[name]) for name in launches})

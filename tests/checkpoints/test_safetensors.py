"""Folders of safetensors: exact round trips, and damage named by file."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusing import bad, refused
from safetensors.numpy import save_file

from jprm.checkpoints.safetensors import INDEX, Tensors

A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, np.float16)
SHARDS = {"model-1.safetensors": {"a": A}, "model-2.safetensors": {"b": B}}


def sharded(folder, shards=None, weight_map=None):
    """A folder of shards, and an index that may say something else."""
    folder.mkdir(exist_ok=True)
    shards = SHARDS if shards is None else shards
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    true = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": true if weight_map is None else weight_map}))
    return folder


def with_header(path, header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    return path


def test_tensors_of_every_type_come_back_bit_for_bit(tmp_path):
    kinds = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_)
    written = {np.dtype(kind).name: np.arange(12).reshape(3, 4).astype(kind) for kind in kinds}
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "np"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        tensors = Tensors(path)
        assert sorted(tensors) == sorted(written)
        for name, array in written.items():
            assert tensors.shape(name) == (3, 4)
            read = tensors.tensor(name)
            assert read.dtype == array.dtype and read.tobytes() == array.tobytes()


def test_shards_are_one_set_of_tensors(tmp_path):
    tensors = Tensors(sharded(tmp_path))
    assert set(tensors) == {"a", "b"} and "a" in tensors and "c" not in tensors
    np.testing.assert_array_equal(tensors.tensor("a"), A)
    np.testing.assert_array_equal(tensors.tensor("b"), B)
    refused(ValueError, "tensor c", tensors.tensor, "c")


@pytest.mark.parametrize(("weight_map", "message"), bad("an index of safetensors"))
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, weight_map, message):
    folder = sharded(tmp_path / "m", weight_map=weight_map)
    refused(FileNotFoundError if "model-3" in message else ValueError, message, Tensors, folder)


def test_tensors_that_are_named_twice_are_refused(tmp_path):
    twice = {"model-1.safetensors": {"a": A}, "model-2.safetensors": {"a": A, "b": B}}
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    with pytest.raises(ValueError, match="model-2.safetensors: .*model-1.safetensors"):
        Tensors(sharded(tmp_path / "across", twice, places))
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    file = with_header(tmp_path / "x.safetensors", f'{{"a": {entry}, "a": {entry}}}'.encode(), bytes(4))
    refused(ValueError, "x.safetensors: .*'a'", Tensors, file)
    folder = sharded(tmp_path / "index")
    (folder / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}')
    refused(ValueError, "index.json: .*'a'", Tensors, folder)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        refused(ValueError, "cut.safetensors", Tensors, tmp_path / "cut.safetensors")


def test_folders_without_safetensors_say_what_they_hold(tmp_path):
    refused(FileNotFoundError, "checkpoint", Tensors, tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    refused(FileNotFoundError, "index.json", Tensors, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(ValueError, "pytorch_model.bin", Tensors, tmp_path)
    refused(ValueError, "pytorch_model.bin", Tensors, tmp_path / "pytorch_model.bin")
    refused(FileNotFoundError, "none.safetensors", Tensors, tmp_path / "none.safetensors")


def test_headers_that_claim_more_than_there_is_are_refused(tmp_path):
    def entry(shape, offsets, dtype="F32"):
        return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}

    for header, data, size in [
        (entry([2], [0, 8]), bytes(8), 10**15),
        (entry([2], [0, 8]), bytes(4), None),
        (entry([2**40, 2**40], [0, 8]), bytes(8), None),
        (entry([2**40], [0, 2**42]), bytes(8), None),
        (entry([3], [0, 8]), bytes(8), None),
        (entry([2], [0, 8]), bytes(16), None),
    ]:
        with pytest.raises(ValueError, match="x.safetensors"):
            Tensors(with_header(tmp_path / "x.safetensors", header, data, size))
    with pytest.raises(ValueError, match="F8_E4M3"):
        Tensors(with_header(tmp_path / "x.safetensors", entry([2], [0, 2], "F8_E4M3"), bytes(2)))


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", "F4", "F8_E8M0", "C64", "X", 1, None]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 2**31, 2**63, -1, 1.5, "2"]), max_size=3) | st.just(7),
        "data_offsets": st.lists(st.sampled_from([0, 2, 4, 8, 16, 2**64 - 1, -4, 2**70]), max_size=3),
        "more": st.just(1),
    },
)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), st.lists, max_leaves=4)
HEADER = st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), ENTRY | JSON) | JSON
FUZZ = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@FUZZ
@given(HEADER | st.binary(max_size=60), st.sampled_from([0, 4, 8, 16]), st.sampled_from([None, 0, 5, 2**40, 2**64 - 1]))
def test_no_header_does_more_than_be_refused(tmp_path, header, data, size):
    """Either it is refused in one line that names the file, or all its tensors can be read."""
    path = with_header(tmp_path / "x.safetensors", header, bytes(data), size)
    try:
        tensors = Tensors(path)
    except ValueError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        for name in tensors:
            assert tensors.tensor(name).shape == tensors.shape(name)
            assert tensors.tensor(name).nbytes <= data


@FUZZ
@given(st.dictionaries(st.sampled_from(["weight_map", "metadata"]), st.dictionaries(st.text(max_size=3), JSON) | JSON))
def test_no_index_does_more_than_be_refused(tmp_path, index):
    (tmp_path / INDEX).write_text(json.dumps(index))
    refused((ValueError, FileNotFoundError), str(tmp_path), Tensors, tmp_path)

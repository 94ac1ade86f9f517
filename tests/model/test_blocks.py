"""Matrices in blocks of a few bits: exact against those who defined them, and trained on as on what they stand for."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import breadth
from flax.traverse_util import flatten_dict
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from refusing import refused
from test_gguf import write
from test_lora import adapted
from tiny import TINY, chain_rows, logits, params
from tiny_run import equal, experiment, lines, make_data, one_device, training, untimed
from tiny_run import params as loaded

import jprm
from jprm.checkpoints import base, store
from jprm.methods.export.export import export
from jprm.methods.formats.blocks import FORMATS, Blocks, nf4
from jprm.methods.formats.gguf import load_decoder
from jprm.model import parameters, transformer
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.model.parameters import LoraConfig, held_decoder, widened

WIDE = dataclasses.replace(TINY, qkv_bias=False, width=64, head_dim=16, mlp_width=256, vocab_size=256)
LORA = LoraConfig(rank=3, alpha=6.0)
ROWS = chain_rows([list(range(1, 13)), [5, 4, 3, 2, 1]], 16)


@pytest.mark.parametrize("kind", [name for name in FORMATS if name != "nf4"])
def test_blocks_stand_for_what_the_package_gguf_says(kind):
    known, format_ = GGMLQuantizationType[kind], FORMATS[kind]
    assert GGML_QUANT_SIZES[known] == (format_.numbers, format_.size)
    byte_RX = np.random.default_rng(0).integers(0, 256, (8, 4 * format_.size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = {"F32": np.float32, "F16": np.float16}.get(kind)
        wanted = byte_RX.view(wanted).astype(np.float32) if wanted else dequantize(byte_RX, known)
    of_gate = Blocks(jnp.asarray(byte_RX)[None], None, (kind,), "gate", (4 * format_.numbers, 8))
    actual = np.asarray(jax.jit(lambda w: w.astype("float32"))(of_gate))[0].T
    finite = np.isfinite(wanted)
    assert finite.mean() > 0.9 and (np.isfinite(actual) == finite).all()
    np.testing.assert_array_equal(actual[finite], wanted[finite])


def test_nf4_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    torch = pytest.importorskip("torch")
    x_DF = np.random.default_rng(0).normal(size=(128, 32)).astype(np.float32)
    x_DF[:64, 3] = 0
    code, state = functional.quantize_4bit(torch.tensor(x_DF.T.copy()), blocksize=64, quant_type="nf4")
    small = jax.jit(nf4, static_argnums=0)("gate", x_DF)
    np.testing.assert_array_equal(np.asarray(small.data).reshape(32, 2, 36)[..., :32].ravel(), code.numpy().ravel())
    np.testing.assert_array_equal(small.astype("float32").T, functional.dequantize_4bit(code, state).numpy())


@pytest.mark.parametrize("role", ["query", "out", "delta_out", *breadth(["value", "gate", "down", "expert_down"])])
def test_nf4_is_near_whatever_the_matrix(role):
    """The largest gap of two of its numbers is 0.30 of a block's largest magnitude."""
    weight = parameters.layers.weight_of(role)
    size = {"E": 3, "D": 64, "F": 128, "K": 2, "G": 2, "H": 16, "V": 32}
    x = np.random.default_rng(0).normal(size=(2, *(size[axis] for axis in weight.axes))).astype(np.float32)
    small = nf4(role, x)
    assert isinstance(small, Blocks) and small.astype("float32").shape == x.shape
    error = np.abs(np.asarray(small.astype("float32")) - x)
    assert error.max() < 0.153 * np.abs(x).max() and 0.05 < error.mean() / np.abs(x).mean() < 0.12
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(small)) == x.size * 36 // 64
    layer = jax.tree.map(lambda leaf: leaf[1], small)  # as a scan over layers has it
    np.testing.assert_array_equal(layer.astype("float32"), small.astype("float32")[1])


def test_inputs_that_do_not_divide_into_blocks_are_in_int8():
    assert isinstance(nf4("gate", np.ones((2, 96, 8), np.float32)), parameters.Int8)


def mixed(path):
    """A file whose layers differ in the format of `value` and `down`, as most of llama.cpp's do."""
    kinds = {"attn_v": ("Q8_0", "Q5_0"), "ffn_down": ("Q6_K", "Q4_K"), "attn_q": ("Q5_1", "Q5_1")}
    of_layers = {f"blk.{i}.{name}.weight": kind for name, both in kinds.items() for i, kind in enumerate(both)}
    quantised = {name: GGMLQuantizationType[kind] for name, kind in {**of_layers, "token_embd.weight": "Q4_0"}.items()}
    return write(path, WIDE, params(WIDE)["decoder"], quantised=quantised)


def test_a_files_blocks_are_kept(tmp_path):
    file = mixed(tmp_path / "m.gguf")
    whole, kept = load_decoder(file, WIDE), load_decoder(file, WIDE, "gguf")
    jax.tree.map(np.testing.assert_array_equal, jax.jit(widened)(kept), whole)
    assert kept["layers_0"]["down"].formats == ("Q4_K", "Q6_K") and kept["embed"].formats == ("Q4_0",)
    size = sum(x.nbytes for x in jax.tree.leaves([kept["layers_0"][role] for role in ("value", "down", "query")]))
    assert size == 2 * (64 * 32 // 32 * 34 + 64 * 256 // 256 * 210 + 64 * 64 // 32 * 24 + 8)
    actual, wanted = (logits(params(WIDE) | {"decoder": decoder}, WIDE, ROWS) for decoder in (kept, whole))
    np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=1e-5)
    with jax.set_mesh(make_mesh(MeshConfig(4, 2))):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(widened)(load_decoder(file, WIDE, "gguf")), whole)
    refused(ValueError, "dtype='gguf' keeps", held_decoder, whole, "gguf")


@pytest.mark.parametrize("dtype", ["gguf", "nf4", *breadth(["int8", "bfloat16"])])
def test_gradients_are_those_of_what_the_base_stands_for(tmp_path, dtype):
    config = dataclasses.replace(WIDE, layers=2, remat="full")
    kept = load_decoder(mixed(tmp_path / "m.gguf"), config, dtype)
    _, flat = adapted(config, LORA)
    head = params(config)["head"]

    def loss(adapters, decoder):
        whole = parameters.join(flatten_dict({"decoder": decoder, "head": head}, sep="/"), adapters)
        logit_BSC = transformer.step_logits(parameters.merge(whole, LORA), config, ROWS)
        return jnp.sum(jnp.sin(logit_BSC)), logit_BSC

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    small = {path: 0.1 * x for path, x in flat.items()}
    (actual, logit), (wanted, right) = gradient(small, kept), gradient(small, jax.jit(widened)(kept))
    np.testing.assert_allclose(logit, right, rtol=1e-5, atol=1e-5)
    for path in actual:
        np.testing.assert_allclose(actual[path], wanted[path], rtol=2e-4, atol=2e-5 * np.abs(wanted[path]).max())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run on a file's blocks, its experiment, and the file."""
    data = make_data(tmp_path_factory.mktemp("blocks") / "data")
    file = mixed(data / "m.gguf")
    model = base.model_config(file, attention="reference", head="binary")
    lora = dataclasses.replace(LORA, targets="query|out|down")
    trained = experiment(data, model=model, base=str(file), base_dtype="gguf", lora=lora)
    with one_device():
        training.train(trained, data.with_name("run"))
    return data.with_name("run"), trained, file


def test_a_run_keeps_adapters_and_head_and_continues_exactly(run, tmp_path):
    folder, trained, _ = run
    saved = loaded(folder)
    with store.open_checkpoints(folder) as checkpoints:
        kept = flatten_dict(checkpoints.checkpointables_metadata(6).metadata["params"], sep="/")
    roles = {path.rpartition("/")[2].partition("_lora")[0] for path in kept}
    assert roles == {"query", "out", "down", "kernel", "bias"} and len(kept) == 2 * 3 + 2
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints" / "6")
    with one_device():
        training.train(trained, copy)
    assert equal(loaded(copy), saved) and untimed(lines(copy)) == untimed(lines(folder))


@pytest.mark.breadth
def test_a_run_scores_as_what_its_base_stands_for(run, tmp_path):
    folder, trained, file = run
    chain = {"problem": "p0 1", "steps": ["add 1", "bad 2", "cut 3"]}
    with one_device():
        kept, whole = jprm.load(folder), jprm.load(folder, dtype="float32")
        assert isinstance(kept.params["decoder"]["layers_0"]["gate"], Blocks)
        np.testing.assert_allclose(kept.score(**chain), whole.score(**chain), atol=1e-6)
        assert 0 < np.abs(jprm.load(folder, dtype="nf4").score(**chain) - whole.score(**chain)).max() < 0.1
        exported = jprm.load(export(folder, tmp_path / "out"))
        np.testing.assert_allclose(exported.score(**chain), whole.score(**chain), atol=1e-5)


def test_a_base_that_changed_is_refused(run, tmp_path):
    folder, trained, file = run
    copy, moved = tmp_path / "run", tmp_path / "m.gguf"
    shutil.copytree(folder, copy)
    moved.write_bytes(file.read_bytes())
    elsewhere = dataclasses.replace(trained, base=str(moved), steps=7)
    with one_device():
        training.train(elsewhere, copy)
        jprm.load(copy)
        with moved.open("ab") as out:
            out.write(b"more")
        refused(ValueError, "m.gguf: changed since", jprm.load, copy)
        refused(ValueError, "base changed since", training.train, dataclasses.replace(elsewhere, steps=8), copy)


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(lora=LoraConfig()), "decoder/embed.*lora.rank"),
        (dict(base=""), "needs a base"),
        (dict(model=dataclasses.replace(WIDE, remat="dots")), "model.remat full or attention"),
    ],
)
def test_what_would_not_be_in_the_smaller_type_is_refused(run, changes, reason):
    _, trained, _ = run

    def start():
        with one_device():
            training.Trainer(dataclasses.replace(trained, **changes))

    refused(ValueError, reason, start)


@pytest.mark.breadth
def test_two_devices_train_on_the_same_blocks(run):
    """Rows are divided and the blocks are not."""
    _, trained, _ = run
    losses = []
    for mesh in (MeshConfig(), MeshConfig(2), MeshConfig(1, 2)):
        with one_device(mesh.data * max(mesh.fsdp, 1)):
            with training.Trainer(dataclasses.replace(trained, mesh=mesh)) as trainer:
                losses.append([float(trainer.step(next(trainer.batches)).loss) for _ in range(2)])
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)

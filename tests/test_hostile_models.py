"""Model files made to hang, to fill the memory or to give other numbers are refused at once, by name."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from families import breadth
from hostile import models as hostile
from refusing import refused
from test_gguf import write
from tiny import TINY, params

import jprm
from jprm.experiment import read
from jprm.methods.formats import gguf, huggingface
from jprm.methods.formats.gguf import open_gguf
from jprm.methods.worker import Worker
from jprm.tokenizer import load_tokenizer


@pytest.mark.parametrize(("content", "reason"), hostile.GGUF.values(), ids=hostile.GGUF)
def test_a_gguf_file_is_checked_against_its_size(tmp_path, content, reason):
    (tmp_path / "m.gguf").write_bytes(content)
    refused(ValueError, f"m.gguf: .*{reason}", open_gguf, tmp_path / "m.gguf")


VALUES = [(field, value) for field, values in hostile.VALUES.items() for value in values]


@pytest.mark.parametrize(("field", "value"), VALUES, ids=[f"{field}={value}" for field, value in VALUES])
def test_gguf_metadata_is_refused_as_config_json_is(tmp_path, monkeypatch, field, value):
    file = write(tmp_path / "m.gguf", TINY, params()["decoder"])
    fields = open_gguf(file).fields
    monkeypatch.setitem(fields, f"llama.{field}", value)
    refused(ValueError, "m.gguf: ", gguf.model_config, file)


@pytest.mark.parametrize(("fields", "named"), hostile.VOCABULARIES.values(), ids=hostile.VOCABULARIES)
def test_a_damaged_vocabulary_in_a_gguf_file_is_named(tmp_path, fields, named):
    (tmp_path / "m.gguf").write_bytes(hostile.vocabulary(fields))
    refused(ValueError, f"m.gguf: tokenizer.ggml.{named}", load_tokenizer, tmp_path / "m.gguf")


@pytest.mark.parametrize("content", hostile.GROWING.values(), ids=hostile.GROWING)
def test_a_tokenizer_that_fills_the_memory_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    refused(ValueError, "tokenizer.json", load_tokenizer, tmp_path)


@pytest.mark.parametrize(
    "part",
    [
        hostile.replace({"String": " "}, "\u2581"),  # SentencePiece's word start
        hostile.sequence(*[{"type": "NFC"}] * 30, {"type": "Lowercase"}, {"type": "NFKC"}),
        hostile.sequence({"type": "Prepend", "prepend": "\u2581"}, hostile.replace({"Regex": " {2,}"}, "\u2581")),
    ],
)
def test_usual_normalizers_are_loaded(tmp_path, part):
    (tmp_path / "tokenizer.json").write_text(json.dumps(hostile.tokenizer(normalizer=part)))
    assert load_tokenizer(tmp_path).encode("abc")[-3:] == [0, 1, 2]


def test_a_panic_of_the_library_is_an_error_of_the_text(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(hostile.BACKTRACKING))
    refused(ValueError, "aaaa.*retry-limit", load_tokenizer(tmp_path).encode, hostile.LONG)


def test_ids_beyond_the_model_are_refused(tmp_path):
    def load(**fields):
        (tmp_path / "tokenizer.json").write_text(json.dumps(hostile.tokenizer(**fields)))
        return load_tokenizer(tmp_path, 4)

    def added(special):
        token = {"id": 4, "content": "<new>", "special": special, "normalized": False}
        return [token | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)]

    assert load().vocab_size == 4
    assert "<new>" not in (tokenizer := load(added_tokens=added(True))).decode(tokenizer.encode("abc<new>"))
    refused(ValueError, "tokenizer.json", load, added_tokens=added(False))
    with pytest.raises(ValueError, match="1,000,000"):  # four tokens, but one with a large id
        load(model={"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "x": 10**6}, "merges": []})
    fields = {"tokens": hostile.TOKENS, "merges": hostile.array(hostile.STRING, ["a b"])}
    (tmp_path / "m.gguf").write_bytes(hostile.vocabulary(fields))
    refused(ValueError, "m.gguf", load_tokenizer, tmp_path / "m.gguf", 2)


CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_a_count_of_layers_fills_no_memory(tmp_path, family):
    config = CONFIG | {"model_type": family, "num_hidden_layers": 2_000_000_000, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(ValueError, "config.json", huggingface.model_config, tmp_path)


@pytest.mark.parametrize("field", ["attention_block", "heads", "kv_heads", "head_dim", "vocab_size", "layers"])
def test_a_model_without_size_is_refused(field):
    refused(ValueError, f"{field}=0", dataclasses.replace, TINY, **{field: 0})


def test_a_run_reads_no_text_that_is_far_too_long(tiny_run, one_device):
    prm = jprm.load(tiny_run.folder)
    assert prm.context == 8192  # its rows have 128 tokens
    refused(ValueError, "'aaa.*8,192", prm.score, "a" * 400_000, ["b"])


EVIL = "open({marker!r}, 'w').close()\nfrom jprm.model.heads import HEADS\nHEAD = HEADS['binary']\n"


@pytest.fixture
def stranger(tiny_run, tmp_path, monkeypatch):
    """A stranger's run below the current folder, with a module in it and one beside it, and what they would write."""
    marker, folder = tmp_path / "code has run", tmp_path / "work/acme-prm-7b"
    folder.mkdir(parents=True)
    shutil.copytree(tiny_run.folder, folder, dirs_exist_ok=True)
    for place in (folder / "evilmod.py", folder / "package/__init__.py", folder.parent / "beside.py"):
        place.parent.mkdir(exist_ok=True)
        place.write_text(EVIL.format(marker=str(marker)))
    monkeypatch.chdir(folder.parent)

    def named(**names):
        values = json.loads((tiny_run.folder / "experiment.json").read_bytes())
        values |= {"objective": names.pop("objective", values["objective"])}
        (folder / "experiment.json").write_text(json.dumps(values | {"model": values["model"] | names}))
        return folder

    yield named, marker
    for name in [name for name in sys.modules if name.startswith(("acme-prm-7b", "beside", "evilmod", "package"))]:
        del sys.modules[name]


@pytest.mark.parametrize("names", [
    {"head": "acme-prm-7b.evilmod:HEAD"}, {"attention": "acme-prm-7b.evilmod:HEAD"}, {"head": "beside:HEAD"},
    {"objective": "acme-prm-7b.package:HEAD"},
])  # fmt: skip
@pytest.mark.parametrize("start", ["notebook", "notebook that adds a folder", "python -m"])
def test_no_module_of_a_models_folder_or_the_current_one_is_run(stranger, monkeypatch, names, start):
    named, marker = stranger
    folder = named(**names)
    starts = {"notebook": [""], "notebook that adds a folder": ["/usr/lib", ""], "python -m": [str(folder.parent)]}
    monkeypatch.setattr(sys, "path", [*starts[start], *sys.path])
    for load in (jprm.load, lambda folder: read(folder / "experiment.json")):
        refused(ValueError, "experiment.json: .*=", load, folder)
    assert not marker.exists()


@pytest.mark.parametrize("head", ["acme-prm-7b.evilmod:HEAD", "evilmod:HEAD", "package.more:HEAD"])
def test_not_even_where_the_search_path_has_it(stranger, monkeypatch, head):
    named, marker = stranger
    folder = named(head=head)
    for place in (folder, folder.parent):
        monkeypatch.syspath_prepend(place)
        monkeypatch.setenv("PYTHONPATH", str(place))
    (folder.parent / "link").symlink_to(folder)
    for place in (folder, folder.parent / "link"):
        refused(ValueError, "module", jprm.load, place)
    assert not marker.exists()


def scored(start, folder, place, cwd):
    """Runs `jprm score` with this PYTHONPATH, in a folder."""
    (folder.parent / "x.jsonl").write_text('{"problem": "p", "steps": ["s"]}\n')
    command = [*start, "score", "--model", folder.name, "--input", "x.jsonl", "--output", "y.jsonl"]
    return subprocess.run(command, cwd=cwd, env=os.environ | {"PYTHONPATH": place}, capture_output=True, text=True)


@pytest.mark.parametrize("variable", [":{jprm}", *breadth(["{jprm}:", "{jprm}::/tmp"])])
@pytest.mark.parametrize(
    "start", [["-m", "jprm"], *breadth([["-c", "import jprm.apps.cli as c, sys; sys.exit(c.main())"]])]
)
def test_an_empty_entry_of_pythonpath_names_no_folder(stranger, variable, start):
    """PYTHONPATH=$PYTHONPATH:/x with nothing before has Python look in the current folder, which nobody named."""
    named, marker = stranger
    folder = named(head="beside:HEAD")
    place = variable.replace("{jprm}", str(Path(jprm.__file__).parent.parent))
    done = scored([sys.executable, *start], folder, place, folder.parent)
    assert done.returncode == 2 and "current folder" in done.stderr and not marker.exists(), done.stderr


def test_the_command_runs_no_code_of_a_strangers_run(stranger):
    named, marker = stranger
    folder = named(head="acme-prm-7b.evilmod:HEAD")
    done = scored([sys.executable, "-m", "jprm"], folder, str(Path(jprm.__file__).parent.parent), None)
    assert done.returncode == 2 and "whose code is never run" in done.stderr and not marker.exists()


def test_a_module_on_pythonpath_or_imported_by_the_user_is_taken(stranger, monkeypatch):
    named, marker = stranger
    folder = named(head="beside:HEAD")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    assert read(folder / "experiment.json").model.head == "beside:HEAD" and marker.exists()
    monkeypatch.delenv("PYTHONPATH")
    assert read(folder / "experiment.json").model.head == "beside:HEAD"  # it is imported already


def test_a_worker_imports_nothing_of_the_current_folder(tmp_path, monkeypatch):
    for name in ("json.py", "jinja2.py", "jprm/__init__.py", "jprm/chat_template.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(EVIL.format(marker=str(tmp_path / "code has run")))
    monkeypatch.chdir(tmp_path)
    worker = Worker("jprm.methods.formats.chat_template")
    worker.ask({}, 300)
    worker._idle.pop().stop()
    assert not (tmp_path / "code has run").exists()

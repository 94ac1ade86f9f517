"""Names that stand in a stranger's files: no request is made for them, no variable read and no code run."""

import hashlib
import http.server
import json
import shutil
import threading

import numpy as np
import pytest
from huggingface_hub import constants
from refusing import refused

import jprm
from jprm.apps.report.runs import followed, training
from jprm.experiment import RUN
from jprm.io.jsonl import PreparedRecords
from jprm.io.storage import Found, mark_own, path_of
from jprm.methods.data.prepare import write_folder
from jprm.methods.evidence import sources as evidence
from jprm.methods.evidence.ranker import Ranker
from jprm.methods.evidence.verifier import FusedVerifier, Vote
from jprm.methods.formats import hub
from jprm.options import ForeignCode, check_foreign, place_of


def saved(folder, *names):
    """Saves a verifier that weighs nothing, as the user's own."""
    sources = tuple(map(evidence.find, names))
    F = len(evidence.names(sources))
    ranker = Ranker(np.zeros(F), np.ones(F), np.zeros(F), 1.0, 0.0, 1.0)
    FusedVerifier(sources, ranker, Vote(), str(folder), {}).save(folder)


CODE = "open({marker!r}, 'w').close()\nSOURCE = None\n"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Requests that came to a server on this machine, which is the Hub too; and a secret that it must not see."""
    lines = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            lines.append(f"{self.command} {self.path} {self.headers.get('Authorization')}")
            self.send_error(404)

        do_POST = do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    lines.append(address)
    yield lines
    server.shutdown()
    server.server_close()


VERIFIERS = {
    "code beside the folder": "{here}/tools.py:SOURCE",
    "code by another name of the current folder": "/proc/self/cwd/tools.py:SOURCE",
    "code by a relative name": "tools.py:SOURCE",
    "code in the folder": "{here}/model/inner.py:SOURCE",
    "a judge beside the folder": "judge={here}/judge.json",
    "a judge by another name of the current folder": "judge=/proc/self/cwd/judge.json",
    "a judge in the folder": "judge={here}/model/judge.json",
    "a judge by a relative name": "judge=judge.json",
    "a judge at an address": "judge={address}/judge.json",
    "a model at an address": "prm={address}/bucket/model",
    "a model of the Hub": "prm=hf://evil/model",
    "a commit of the Hub": "prm=hf://evil/model@" + "c" * 40,
    "a branch of the Hub that is a path": "prm=hf://evil/model@../../x",
    "another stranger's verifier": "prm={here}/other",
    "a module of Python": "antigravity:SOURCE",
    "a module of the current folder": "tools:SOURCE",
    "a relative module": ".tools:SOURCE",
}


@pytest.mark.parametrize("name", VERIFIERS.values(), ids=VERIFIERS)
def test_a_strangers_verifier_leads_nowhere(asked, tmp_path, monkeypatch, name):
    here, marker, address = tmp_path / "repository", tmp_path / "code has run", asked.pop()
    for folder in (here / "model", here / "other"):
        folder.mkdir(parents=True)
    for file in (here / "tools.py", here / "model/inner.py"):
        file.write_text(CODE.format(marker=str(marker)))
    judge = {"url": f"{address}/v1", "model": "m", "key_variable": "HF_TOKEN", "judge": {}}
    for file in (here / "judge.json", here / "model/judge.json"):
        file.write_text(json.dumps(judge))
    monkeypatch.chdir(here)
    saved(tmp_path / "own", "form")
    data = json.loads((tmp_path / "own/verifier.json").read_text())
    digest = hashlib.sha256((here / "tools.py").read_bytes()).hexdigest()
    for folder, source in ((here / "model", name), (here / "other", "judge=/proc/self/cwd/judge.json")):
        entry = {"name": source.format(here=here, address=address), "version": 1, "numbers": ["x"]}
        entry["request"] = {"sha256": digest}
        (folder / "verifier.json").write_text(json.dumps(data | {"sources": [entry]}))
    refused((ValueError, OSError), "sources.0.|source=|OWNER.NAME", jprm.load, here / "model")
    assert not asked and not marker.exists()


OWN_SOURCE = """
from jprm.methods.evidence.sources import Source, of_chains
LENGTH = Source("length", ("characters",), of_chains(lambda problem, steps: [(float(len(step)),) for step in steps]))
"""


def test_ones_own_verifier_names_judges_code_and_models(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN_SOURCE)
    (tmp_path / "judge.json").write_text(json.dumps({"url": "http://127.0.0.1:9/v1", "model": "m", "judge": {}}))
    saved(tmp_path / "inner", "form")
    names = f"{tmp_path}/own.py:LENGTH", f"judge={tmp_path}/judge.json", f"prm={tmp_path}/inner"
    saved(tmp_path / "outer", *names)
    assert [source.name for source in jprm.load(tmp_path / "outer").sources] == list(names)
    shutil.copytree(tmp_path / "outer", tmp_path / "copy")
    assert [source.name for source in jprm.load(tmp_path / "copy").sources] == list(names)
    (tmp_path / "own.py").write_text("changed = 1\n")
    refused(ValueError, "own.py is absent or has changed", jprm.load, tmp_path / "outer")
    saved(tmp_path / "local", "arithmetic", f"prm={tmp_path}/inner")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    refused(ForeignCode, "never run", jprm.load, tmp_path / "outer")
    assert len(jprm.load(tmp_path / "local").sources) == 2  # weights on this machine are read
    mark_own(tmp_path / "outer/verifier.json")
    refused(ValueError, "own.py is absent or has changed", jprm.load, tmp_path / "outer")


@pytest.mark.parametrize("base", ["{address}/bucket/base", "hf://evil/base@main", "hf://evil/base@" + "c" * 40])
@pytest.mark.parametrize("field", ["base", "reference"])
def test_a_strangers_run_fetches_nothing(tiny_run, asked, tmp_path, base, field):
    address = asked.pop()
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    values = json.loads((tmp_path / "run" / RUN).read_bytes())
    values |= {field: base.format(address=address)}
    values |= {"log_ratio": 0.1} if field == "reference" else {"base_dtype": "int8"}
    values["model"] |= {"remat": "full", "product_layers": 0}
    (tmp_path / "run" / RUN).write_text(json.dumps(values))
    refused((ValueError, OSError), f"{RUN}: {field} is ", jprm.load, tmp_path / "run")
    assert not asked


def test_ones_own_run_counts_as_typed(tiny_run):
    file = path_of(tiny_run.folder) / RUN
    assert Found(file, "base", "gs://any/bucket").written_here and Found(file, "base", "hf://a/b").trusted("downloaded")


@pytest.mark.parametrize("folder", ["{address}/bucket/run", "hf://evil/run", "memory://other/run"])
def test_a_report_reads_no_run_at_an_address_of_strangers_results(asked, tmp_path, folder):
    found = Found(path_of(tmp_path / "results.json"), "model.folder", folder.format(address=asked.pop()))
    found.file.write_text("{}")
    assert followed(found) is None and list(training([("stranger", found)])) == []
    assert not asked


def test_a_name_of_the_hub_in_a_file_leads_to_the_cache(tmp_path, monkeypatch):
    """As `hf download` leaves it, by another program."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    folder, commit, weights = tmp_path / "models--a--b", "c" * 40, b"weights"
    sha256 = hashlib.sha256(weights).hexdigest()
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / sha256).write_bytes(weights)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "model.safetensors").symlink_to(folder / "blobs" / sha256)
    entry = {"size": 7, "blob_id": "d" * 40, "lfs_sha256": sha256, "lfs_size": 7, "xet_hash": None}
    from huggingface_hub import _snapshot_download as library

    library.write_tree_cache(str(folder), commit, {"model.safetensors": library.TreeCacheEntry(**entry)})
    file = path_of(tmp_path / "experiment.json")
    file.write_text("{}")
    place = place_of(Found(file, "base", f"hf://a/b@{commit}"))
    assert (place / "model.safetensors").read_bytes() == weights
    hub.folder.cache_clear()
    (folder / "blobs" / sha256).write_bytes(b"changed")
    refused(OSError, "damaged", place_of, Found(file, "base", f"hf://a/b@{commit}"))


@pytest.mark.parametrize("name", ["antigravity:X", "turtledemo.clock:X", "subprocess.run:X", ".:X", ":X"])
def test_no_module_of_python_is_a_part(name, tmp_path):
    refused(ForeignCode, "model.attention", check_foreign, name, tmp_path, "model.attention")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("features.json", '{"pythonClassName": "inner.FeaturesDict"}'),
        ("features.json", '{"type": "inner.FeaturesDict", "content": {}}'),
        ("features.json", '{"python_class_name": "inner.FeaturesDict"}'),
        ("features.json", '{"\\u0070ythonClassName": "inner.FeaturesDict"}'),
        ("features.json", '{"pythonClassName": "tensorflow_datasets.core.features.x.Y", "pythonClassName": "inner.X"}'),
        ("dataset_info.json", '{"splits": [{"filepathTemplate": "/gs/evil/{SPLIT}"}]}'),
        ("dataset_info.json", '{"splits": [{"filepath_template": "/etc/{SPLIT}"}]}'),
        ("dataset_info.json", '{"splits": [{"filepathTemplate": "{SPLIT}/../../x"}]}'),
    ],
)
def test_a_prepared_folder_names_no_code_and_no_other_file(tmp_path, monkeypatch, file, text):
    (tmp_path / "inner.py").write_text(CODE.format(marker=str(tmp_path / "code has run")))
    monkeypatch.syspath_prepend(tmp_path)
    write_folder(tmp_path, [("a", {"problem": "p", "steps": ["s"]})])
    (tmp_path / "report.json").write_text("{}")
    assert len(PreparedRecords(tmp_path)) == 1
    (tmp_path / file).write_text(text)
    refused(ValueError, f"{file}: names code or files", PreparedRecords, tmp_path)
    assert not (tmp_path / "code has run").exists()

"""docs/tutorial.md: every block runs, in order, in an empty folder, at a smaller size than the page's."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from pages import Shell, blocks, text
from pod import free_port

PAGE = "docs/tutorial.md"
SMALLER = {
    "TRAIN, HELD_OUT = 600, 100": "TRAIN, HELD_OUT = 24, 12",
    "layers=6, layer_groups=(3, 3)": "layers=2, layer_groups=(1, 1)",
    "tokens=1024": "tokens=256",
    "steps=40": "steps=6",
}


def served(port):
    """The page's server, in a process of its own, once it is ready."""
    command = "import sys; from jprm.apps.cli import main; sys.exit(main(sys.argv[1:]))"
    (line,) = re.findall(r"^    jprm (serve .*)$", text(PAGE), re.MULTILINE)
    server = subprocess.Popen([sys.executable, "-c", command, *shlex.split(line), "--port", str(port)])
    until = time.monotonic() + 600
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=60).close()
            return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    server.terminate()
    raise AssertionError("the server is not ready")


@pytest.mark.breadth
def test_every_block_runs(smollm2_gguf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    port = free_port()
    for old in SMALLER:
        assert text(PAGE).count(old) == 1, old
    server, said, shell = None, "", Shell(tmp_path)
    try:
        for name, language, block in blocks(PAGE):
            for old, new in SMALLER.items():
                block = block.replace(old, new)
            if name:
                Path(name).write_text(block.replace(":8000", f":{port}"))
                continue
            assert language == "sh"
            if "ask.py" in block:
                server = served(port)
            said = shell.run(block)
        answered = json.loads(said.splitlines()[-1])
        assert len(answered) == 2 and all(0 <= score <= 1 for score in answered)
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    assert json.loads(Path("data/train/report.json").read_text())["kept"] <= 24
    assert np.isfinite(json.loads(Path("steps.json").read_text())["auroc"]["value"])
    pool = json.loads(Path("scored.jsonl").read_text())
    assert [len(sample["scores"]) for sample in pool["samples"]] == [3, 3]
    assert all('id="chains"' in Path(page).read_text() for page in ("report.html", "scored.html"))
    assert os.path.isdir("mine/checkpoints")

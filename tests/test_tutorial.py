"""docs/tutorial.md: every block runs, in order, in an empty folder, at a smaller size than the page's."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from pod import free_port

from jprm.apps import cli

PAGE = (Path(__file__).resolve().parent.parent / "docs/tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?:^`([\w.]+)`:\n\n)?^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
SMALLER = {
    "TRAIN, HELD_OUT = 600, 100": "TRAIN, HELD_OUT = 24, 12",
    "layers=6, layer_groups=(3, 3)": "layers=2, layer_groups=(1, 1)",
    "tokens=1024": "tokens=256",
    "steps=40": "steps=6",
}


def served(port):
    """The page's server, in a process of its own, once it is ready."""
    command = "import sys; from jprm.apps.cli import main; sys.exit(main(sys.argv[1:]))"
    (line,) = re.findall(r"^    jprm (serve .*)$", PAGE, re.MULTILINE)
    server = subprocess.Popen([sys.executable, "-c", command, *shlex.split(line), "--port", str(port)])
    until = time.monotonic() + 240
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
            return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    server.terminate()
    raise AssertionError("the server is not ready")


def test_every_block_runs(smollm2_gguf, one_device, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    port = free_port()
    for old in SMALLER:
        assert PAGE.count(old) == 1, old
    server = None
    try:
        for name, language, block in BLOCKS:
            for old, new in SMALLER.items():
                block = block.replace(old, new)
            if name:
                Path(name).write_text(block.replace(":8000", f":{port}"))
                continue
            assert language == "sh"
            for line in block.replace("\\\n", " ").splitlines():
                program, *args = shlex.split(line)
                if args == ["ask.py"]:
                    server = served(port)
                    capfd.readouterr()
                if program == "python":
                    runpy.run_path(*args)
                else:
                    assert (program, cli.main(args)) == ("jprm", 0), line
        answered = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert len(answered) == 2 and all(0 <= score <= 1 for score in answered)
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    assert json.loads(Path("data/train/report.json").read_text())["kept"] <= 24
    assert np.isfinite(json.loads(Path("steps.json").read_text())["auroc"]["value"])
    pool = json.loads(Path("scored.jsonl").read_text())
    assert [len(sample["scores"]) for sample in pool["samples"]] == [3, 3]
    assert os.path.isdir("mine/checkpoints")

"""Compares what two versions of jprm compute, byte by byte: `make gate BASE=COMMIT`, or

    python tests/gate.py keep FOLDER           # runs the fixed set of runs and keeps what they leave, as lines of text
    python tests/gate.py compare FOLDER        # runs it again and names the first difference of every kept file
    python tests/gate.py against COMMIT        # runs a commit and this tree beside each other, and compares

The exit status is 1 if anything differs. This is for changes that move or rewrite code and are to change no result. The
runs use the commands of `python -m jprm`, experiment files and overrides only, so that they run on any tree whose
modules have moved. What a clock or a path says is replaced by name; `CLOCKS`, `VARYING` and `LEFT_OUT` list it all.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import io
import itertools
import json
import os
import pathlib
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import typing
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

CLOCKS = ("seconds", "update_seconds", "sampling_seconds", "tokens_per_second", "labels_per_second", "goodput", "began",
          "productive", "modified", "step_seconds_p50", "step_seconds_p95", "step_seconds_max", "mfu", "starting",
          "compiling", "input", "saving", "validating")  # fmt: skip
"""Keys, of JSON or (with spaces) in a progress bar, whose number is a time or a speed."""

VARYING = (
    (r"(/[\w.-]+)*/gate-\w{8}\b", "WORK"),  # the folder in which everything runs
    (r"\b\d+:\d\d:\d\d\b|\b\d+ (s|min|h|days)(?= left\b)", "CLOCK"),  # of progress bars
    (r',\s*"lost_\w+": [-+.\w]+', ""),  # of the kinds of time that a clock saw at all
    (r'("spent": )\{[^}]*\}', r"\1CLOCK"),
    (r"[\d,]+ tokens/s|waited \d+% of [\d.]+ s", "CLOCK"),
    (r'(?s)<svg(?:(?!</svg>).)*"training-goodput-title".*?</svg>', "CLOCK"),
    (r'("commit": )"[\w-]+"', r"\1"),
    (r'"(id|run)": "[0-9a-f]{16}"(,\s*)?', ""),  # of a run, drawn at its start
    (r'("reading": )"[0-9a-f]{16}"', r"\1"),  # of a reader, by the name of its function
    (r'("moduleName": "jprm)[\w.]*', r"\1"),  # of prepared data: where the code is that wrote it
    (r'("prepared": )"[0-9a-f]{16}"', r"\1"),  # a digest of these data, with that name
    (r'("request": )"[0-9a-f]{64}"|[0-9a-f]{64}(  export\.json)', r"\1\2"),  # of an export, with the model's full path
)
"""Patterns of other text that differs between two runs of one tree or when modules move, and what replaces it."""

LEFT_OUT = ("stdout/runs", "token_cache/")
"""What is not kept: a table with columns of speeds, whose numbers are in runs.json, and a cache named by full paths."""

# ---- Inputs. Sums of small numbers, so that a tiny policy learns them: "1+2" is solved by "1+2=3" and "3".

SUMS = [(a, b) for a in range(4) for b in range(4)]
SMALL = dict(
    vocab_size=260, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32, rope_theta=100.0, norm_eps=1e-6,
    qkv_bias=True, attention="reference", remat="nothing",
)  # fmt: skip
OPTIMIZER = dict(learning_rate=0.01, warmup_steps=2, weight_decay=0.1)


def experiment() -> Any:
    """Returns the training run that the gate's variants change by overrides."""
    data = dict(
        train=("prepared",), valid=("inputs/valid.jsonl",), supervise="step", too_long="error", tokens=128, slots=32,
        rows=8, micro_rows=4, window=16,
    )  # fmt: skip
    return config("Experiment", dict(
        name="gate", model=SMALL, tokenizer="inputs/tokenizer", data=data, objective="cross_entropy",
        target=dict(labels="rating", neutral="positive", after_error="keep"), optimizer=OPTIMIZER, steps=4, log_every=2,
        checkpoint_every=2,
    ))  # fmt: skip


def reinforcement() -> Any:
    """Returns two updates of the policy by verifier and PRM, with a refresh of the PRM."""
    credit = dict(name="min_form", advantage="rloo", norm="constant", length=16, offset=-1.0)
    return config("RLExperiment", dict(
        name="gate", policy="policy", problems=("inputs/problems.jsonl",), held_out=("inputs/held_out.jsonl",),
        prm="cross_entropy", second_prm="bfloat16", verifier="answer", working="arithmetic", credit=credit,
        optimizer=OPTIMIZER, updates=2, problems_an_update=4, samples=4, max_tokens=16, tokens=256, micro_rows=4,
        minibatches=2, evaluate_every=1, evaluate_samples=2, checkpoint_every=1,
        refresh=dict(every=1, steps=2, learning_rate=0.01, replay=("inputs/chains.jsonl",)),
    ))  # fmt: skip


def config(name: str, values: dict[str, Any]) -> Any:
    """Returns an instance of jprm's configuration class of that name, wherever it is defined."""
    import jprm

    root = pathlib.Path(jprm.__file__).parent
    file = next(file for file in sorted(root.rglob("*.py")) if re.search(rf"(?m)^class {name}\b", file.read_text()))
    module = importlib.import_module(".".join(["jprm", *file.relative_to(root).with_suffix("").parts]))
    return _built(getattr(module, name), values)


def _built(kind: Any, values: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(**{
        name: _built(hints[name], value) if dataclasses.is_dataclass(hints[name]) else value
        for name, value in values.items()
    })  # fmt: skip


class StopAt:
    """A tracker that stops the run, as the end of a machine does, when it logs step 2 for the first time."""

    id = "gate"

    def __init__(self, run: Any):
        self.first = not run.step

    def log(self, step: int, values: Any) -> None:
        if self.first and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self, status: str) -> None: ...


def chains(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yields rated chains, every second of which errs in its first or second step."""
    for i, (a, b) in zip(range(first, first + count), itertools.cycle(SUMS), strict=False):
        wrong = i % 4
        steps = [f"{a}+{b}={a + b + (wrong == 1)}", f"2*{a}={2 * a + (wrong == 2)}", str(a + b + (wrong in (1, 2)))]
        labels = [-1 if wrong == 1 else i % 3 % 2, -1 if wrong == 2 else 1, -1 if wrong in (1, 2) else 1]
        yield {
            "id": f"c{i}", "problem": f"{a}+{b} ({i})", "steps": steps, "labels": labels, "semantics": "rating",
            "answer": str(a + b), "correct": wrong not in (1, 2), "kept": [i, None],
        }  # fmt: skip


def trees(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yields rated trees that branch at every step."""
    for i in range(first, first + count):
        texts = [f"{i}+{k}={i + k}" for k in range(6)]
        parents = [-1, -1, 0, 0, 1, 3 if i % 2 else 4]
        nodes = [
            {"parent": parent, "text": text, "label": (i + 2 * k) % 3 - 1, "value": (i + k) % 5 / 4, "rollouts": k + 1}
            for k, (parent, text) in enumerate(zip(parents, texts, strict=True))
        ]
        yield {"id": f"t{i}", "problem": f"sum {i}", "nodes": nodes, "semantics": "rating"}


def pools(count: int) -> Iterator[dict[str, Any]]:
    """Yields problems with four samples each."""
    for i in range(count):
        part = list(chains(7 * i, 4))
        samples = [
            {"steps": chain["steps"], "answer": chain["steps"][-1], "correct": chain["correct"]} for chain in part
        ]
        yield {"id": f"p{i}", "problem": f"pool {i}", "answer": part[0]["answer"], "samples": samples}


def policy_lines() -> Iterator[dict[str, Any]]:
    for a, b in SUMS:
        yield {"problem": f"{a}+{b}", "steps": [f"{a}+{b}={a + b}", str(a + b)], "labels": [1, 1],
               "semantics": "correctness", "answer": str(a + b), "correct": True}  # fmt: skip


def make_inputs(folder: pathlib.Path) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    (folder / "tokenizer").mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    inner.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "<eos>"}\n')

    def write(name: str, records: Any) -> None:
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    write("trees.jsonl", [*trees(0, 24), *chains(0, 16)])
    write("valid.jsonl", trees(24, 8))
    write("chains.jsonl", chains(40, 24))
    write("calibration.jsonl", chains(120, 24))
    write("sums.jsonl", [chain | {"problem": chain["problem"].split(" ")[0]} for chain in chains(0, 24)])
    write("pools.jsonl", pools(6))
    write("policy_lines.jsonl", policy_lines())
    problems = [{"id": f"{a}{b}", "problem": f"{a}+{b}", "answer": str(a + b)} for a, b in SUMS]
    write("problems.jsonl", problems[:8])
    write("held_out.jsonl", problems[8:12])
    rated = list(chains(80, 16))
    benchmark = [
        {"id": f"b-{chain['id']}", "generator": "none", "problem": chain["problem"], "steps": chain["steps"],
         "final_answer_correct": chain["correct"],
         "label": chain["labels"].index(-1) if -1 in chain["labels"] else -1} for chain in rated
    ]  # fmt: skip
    (folder / "processbench.json").write_text(json.dumps(benchmark))
    suite = {
        "neutral": "positive",
        "processbench": {"data": ["processbench.json"], "calibrate": "processbench.json"},
        "steps": {"data": ["chains.jsonl"]},
        "best_of_n": {"data": ["pools.jsonl"]},
        "calibration": {"data": ["chains.jsonl"], "calibrate": ["calibration.jsonl"]},
    }
    (folder / "suite.json").write_text(json.dumps(suite))
    (folder / "sampler.json").write_text(json.dumps({"model": "policy", "max_tokens": 16, "rows": 16}))
    (folder / "run.py").write_text("from gate import experiment\n")
    (folder / "rl.py").write_text("from gate import reinforcement as experiment\n")


# ---- The runs, in order: a name, the command, and what it is to leave (by default all new files).

VARIANTS = {
    "policy": 'objective=next_token model.head=language data.supervise=token data.train=["inputs/policy_lines.jsonl"]'
    " data.valid=[] target.labels=correctness target.neutral=none data.rows=2 data.micro_rows=2"
    " steps=90 log_every=30 checkpoint_every=90 optimizer.learning_rate=0.03",
    "cross_entropy": "",
    "pqm": "objective=pqm model.head=scalar data.siblings=true",
    "bradley_terry": "objective=bradley_terry model.head=scalar data.cache=token_cache",
    "td_lambda": "objective=td_lambda model.head=ensemble data.supervise=outcome target.labels=value"
    ' target.neutral=none data.train=["inputs/chains.jsonl"] data.valid=[]',
    "implicit": "objective=implicit model.head=language data.supervise=outcome target.labels=value target.neutral=none"
    ' data.train=["inputs/chains.jsonl"] data.valid=[] base=policy reference=policy',
    "lora": "base=cross_entropy lora.rank=2 probe_rows=8",
    "quantile": "objective=likelihood model.head=quantile data.streams=2",
    "bfloat16": "model.dtype=bfloat16 model.remat=full model.attention=blocked target.after_error=mask",
    "gemma": "objective=ternary_cross_entropy model.head=ternary target.neutral=third model.design=gemma"
    " model.windows=[5,0] model.qkv_bias=false model.qk_norm=true model.attention=paths model.attention_block=32"
    " model.remat=attention",
}


def commands() -> Iterator[tuple[str, str, int]]:
    """Yields the name of a command, the command, and the status with which it is to end."""
    yield "prepare", "prepare jsonl --source inputs/trees.jsonl --out prepared --exclude inputs/valid.jsonl", 0
    for name, overrides in VARIANTS.items():
        yield name, f"train inputs/run.py --workdir {name}" + f" --set {overrides}" * bool(overrides), 0
    stopped = 'train inputs/run.py --workdir stopped --set trackers=["gate:StopAt"]'
    yield "stopped", stopped, 128 + signal.SIGTERM
    yield "continued", stopped, 0
    scored = {"cross_entropy": ("chains", "pools", "trees"), "lora": ("pools",), "quantile": ("chains",),
              "implicit": ("pools",), "gemma": ("trees",)}  # fmt: skip
    for model, kinds in scored.items():
        for data in kinds:
            output = f"{model}_{data}.jsonl"
            yield f"score {model} {data}", f"score --model {model} --input inputs/{data}.jsonl --output {output}", 0
    yield "score prepared", "score --model td_lambda --input prepared --output prepared_int8.jsonl --dtype int8", 0
    yield "suite", "eval suite --model cross_entropy bfloat16 --suite inputs/suite.json --out results", 0
    yield "report", "report results/cross_entropy results/bfloat16 --out report.html --figures figures", 0
    for method, options in {"best-of-n": "--n 4", "beam": "--width 2 --expand 2 --max-steps 4"}.items():
        files = f"--input inputs/problems.jsonl --output {method}.jsonl"
        models = "--policy inputs/sampler.json --model cross_entropy"
        yield method, f"search {method} {models} {files} --budget 200 {options}", 0
    for name, options in {
        "mc": "--policy inputs/sampler.json --rollouts rollouts.jsonl --estimate soft --k 2",
        "verify": "--kind arithmetic",
        "teacher": "--model cross_entropy",
        "reference": "--model policy",
        "consensus": "--other verify.jsonl",
    }.items():
        yield name, f"label {name} {options} --input inputs/sums.jsonl --output {name}.jsonl", 0
    yield "rl", "rl inputs/rl.py --workdir rl", 0
    yield "rl report", "report rl --out rl.html", 0
    yield "convert", "convert cross_entropy exported", 0
    yield "convert adapters", "convert lora merged --dtype bfloat16", 0
    yield "runs", "runs cross_entropy stopped lora --json runs.json", 0


def run(command: str, expected: int) -> str:
    """Runs a command in this process as `python -m jprm` does, and returns its standard output."""
    out, argv = io.StringIO(), sys.argv
    sys.argv = ["jprm", *command.split()]
    status = 0
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_module("jprm", run_name="__main__")
    except SystemExit as ended:
        status = ended.code or 0
    finally:
        sys.argv = argv
    if status != expected:
        raise SystemExit(f"jprm {command}: ended with status {status}, not {expected}\n{out.getvalue()}")
    return out.getvalue()


# ---- What is kept: one file of lines for every file, and for the arrays of every checkpoint.


def keep(tree: pathlib.Path, folder: pathlib.Path) -> None:
    """Runs everything with a tree's jprm in a temporary folder, and writes what is left, as lines, into `folder`."""
    import jprm

    if not pathlib.Path(jprm.__file__).is_relative_to(tree):
        raise SystemExit(f"gate: {jprm.__file__} is imported, not the jprm of {tree}")
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="gate-") as scratch:
        os.chdir(scratch)
        make_inputs(pathlib.Path("inputs"))
        pathlib.Path("stdout").mkdir()
        for name, command, status in commands():
            began = time.monotonic()
            pathlib.Path("stdout", name.replace(" ", "_")).write_text(run(command, status))
            print(f"{time.monotonic() - began:6.1f} s  jprm {command}", file=sys.stderr, flush=True)
        pathlib.Path("served.json").write_text(served("cross_entropy"))
        keep_files(pathlib.Path(), folder)
        os.chdir(folder)
    undisturbed, continued = (pathlib.Path(run, "checkpoints/4.arrays") for run in ("cross_entropy", "stopped"))
    if undisturbed.read_text() != continued.read_text():
        raise SystemExit(f"{folder}: {continued} differs from {undisturbed}: a run that is stopped does not continue")


def served(model: str) -> str:
    """Returns what `jprm serve` answers to /v1/score."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jprm", "serve", model, "--port", str(port), "--longest", "128"]
    chain = next(chains(0, 1))
    body = json.dumps({"problem": chain["problem"], "steps": chain["steps"]}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/score", body, {"content-type": "application/json"})
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while server.poll() is None:
                with contextlib.suppress(ConnectionError, urllib.error.URLError):
                    return urllib.request.urlopen(request, timeout=60).read().decode()
                time.sleep(0.2)
            raise SystemExit(f"{' '.join(command)}: ended with status {server.returncode}")
        finally:
            server.terminate()


def keep_files(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the lines of every file below `root`, and of every checkpoint's arrays, into `folder`."""
    for path, lines in artefacts(root):
        if str(path.relative_to(root)).startswith(LEFT_OUT):
            continue
        kept = folder / path.relative_to(root)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("".join(f"{line}\n" for line in lines))


def artefacts(root: pathlib.Path) -> Iterator[tuple[pathlib.Path, list[str]]]:
    """Yields paths and lines."""
    for folder, names, files in os.walk(root):
        here = pathlib.Path(folder)
        if here.parent.name == "checkpoints":
            names.clear()
            yield here.with_name(f"{here.name}.arrays"), arrays(here)
            if (run := here / "run/data.json").exists():
                yield here.with_name(f"{here.name}.run"), normalised(run.read_text())
            continue
        yield from ((here / name, content(here / name)) for name in files)


def arrays(step: pathlib.Path) -> list[str]:
    """Returns a line for every array of a training checkpoint, parameters and optimizer alike."""
    import jax
    import orbax.checkpoint as ocp

    lines = []
    for part in ("params", "optimizer"):
        if (step / part).is_dir():
            tree = ocp.PyTreeCheckpointer().restore(step.absolute() / part)
            leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
            lines += [array(part + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    return lines


def array(name: str, values: Any) -> str:
    import numpy as np

    values = np.asarray(values)
    size = float(np.abs(values.astype(np.float64)).sum())
    return f"{name} {values.dtype} {values.shape} sum|x|={size!r} {hashlib.sha256(values.tobytes()).hexdigest()}"


def content(path: pathlib.Path) -> list[str]:
    """Returns a file's lines: of its text, of its tensors, or a digest."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "np") as file:
            return [repr(file.metadata()), *(array(name, file.get_tensor(name)) for name in sorted(file.keys()))]
    data = path.read_bytes()
    try:
        return normalised(data.decode())
    except UnicodeDecodeError:
        return [f"{len(data)} bytes {hashlib.sha256(data).hexdigest()}"]


def normalised(text: str) -> list[str]:
    """Returns the lines of a text without what a clock or a path says."""
    keys = "|".join(CLOCKS).replace("_", "[_ ]")
    text = re.sub(rf'\b({keys})("?:? )[-+.\w]+(,\d{{3}})*', r"\1\2CLOCK", text)
    for pattern, replacement in VARYING:
        text = re.sub(pattern, replacement, text)
    return text.split("\n")


def compare(a: pathlib.Path, b: pathlib.Path) -> list[str]:
    """Returns the first difference of every file that differs between two folders that `keep` wrote."""
    names = [{path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} for folder in (a, b)]
    if not all(names):
        raise SystemExit(f"{a if names[1] else b}: holds nothing that was kept")
    differences = []
    for name in sorted(names[0] | names[1]):
        if name not in names[0] & names[1]:
            differences.append(f"{name}: only in {a if name in names[0] else b}")
            continue
        lines = [(folder / name).read_text().split("\n") for folder in (a, b)]
        for number, (x, y) in enumerate(itertools.zip_longest(*lines, fillvalue="(no such line)"), 1):
            if x != y:
                at = next((i for i, (c, d) in enumerate(zip(x, y, strict=False)) if c != d), min(len(x), len(y)))
                start = max(0, at - 80)
                shown = "".join(f"\n  {line[start : at + 80]}" for line in (x, y))
                differences.append(f"{name}: line {number}, column {at + 1}:{shown}")
                break
    return differences


def start(tree: pathlib.Path, folder: pathlib.Path) -> subprocess.Popen:
    """Starts `keep FOLDER` in a process whose jprm is that of a tree."""
    env = os.environ | {
        "PYTHONPATH": f"{tree}{os.pathsep}{REPOSITORY / 'tests'}", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(REPOSITORY / ".cache/jax"), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05", "COLUMNS": "120",
        "PYTHONSAFEPATH": "1",  # the current folder's jprm is not imported
    }  # fmt: skip
    code = "import gate, pathlib, sys; gate.keep(*map(pathlib.Path, sys.argv[1:]))"
    return subprocess.Popen([sys.executable, "-c", code, str(tree), str(folder.absolute())], env=env)


def finish(*runs: subprocess.Popen) -> None:
    """Waits for runs. Raises SystemExit where one failed, after ending the others."""
    try:
        if any([run.wait() for run in runs]):
            raise SystemExit("gate: a run failed; its last lines say which command")
    finally:
        for run in runs:
            run.terminate()


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[pathlib.Path]:
    """The files of a commit in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder, "tree")
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def report(base: pathlib.Path, tree: pathlib.Path) -> int:
    """Prints how two kept folders differ, and returns the exit status."""
    differences = compare(base, tree)
    print("\n".join(differences))
    files = sum(path.is_file() for path in tree.rglob("*"))
    print(
        f"gate: {len(differences)} of {files} kept files differ" if differences else f"gate: {files} kept files equal"
    )
    return int(bool(differences))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keeping = commands.add_parser("keep", help="run everything with this tree and keep what it leaves")
    keeping.add_argument("folder", type=pathlib.Path, help="a folder that is not there yet")
    comparing = commands.add_parser("compare", help="compare two kept folders, or one with this tree")
    comparing.add_argument("base", type=pathlib.Path)
    comparing.add_argument("tree", type=pathlib.Path, nargs="?", help="default: this tree is run")
    against = commands.add_parser("against", help="compare a commit with this tree")
    against.add_argument("commit")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        here, base = pathlib.Path(scratch, "tree"), pathlib.Path(scratch, "base")
        if chosen.command == "keep":
            finish(start(REPOSITORY, chosen.folder))
            return 0
        if chosen.command == "against":
            with worktree(chosen.commit) as tree:
                finish(start(tree, base), start(REPOSITORY, here))
            return report(base, here)
        if chosen.tree is None:
            finish(start(REPOSITORY, here))
        return report(chosen.base, chosen.tree or here)


if __name__ == "__main__":
    sys.exit(main())

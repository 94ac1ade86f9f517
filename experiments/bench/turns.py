"""Training, scoring, search and reinforcement learning of two versions of jprm, in turns on one machine.

    python -m experiments.bench.turns COMMIT [--rounds 5]

A commit and this tree run the same commands after each other, again and again, each in a process of its own with a
cache of compiled programs that its first, uncounted round fills. Prints the median seconds of both and the median of
the rounds' ratios, this tree's seconds over the commit's, with the least and the largest. It uses the inputs of
`tests/gate.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import types

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
gate = types.SimpleNamespace(**runpy.run_path(str(REPOSITORY / "tests/gate.py")))

MODEL = (
    "model.layers=4 model.width=128 model.heads=4 model.kv_heads=2 model.head_dim=32 model.mlp_width=384"
    " data.rows=32 data.micro_rows=32 data.window=64"
)
POLICY = gate.VARIANTS["policy"]
COMMANDS = {
    "training, 60 steps": f"train inputs/run.py --workdir trained --set {MODEL} steps=60 log_every=20"
    " checkpoint_every=60",
    "scoring, 2,000 chains": "score --model model --input inputs/many.jsonl --output scored.jsonl",
    "search, best of 16 for 48 problems": "search best-of-n --policy inputs/sampler.json --model model"
    " --input inputs/tasks.jsonl --output best.jsonl --budget 400 --n 16",
    "search, beam for 48 problems": "search beam --policy inputs/sampler.json --model model --input inputs/tasks.jsonl"
    " --output beam.jsonl --budget 400 --width 4 --expand 4 --max-steps 4",
    "reinforcement learning, 8 updates": "rl inputs/rl.py --workdir rl --set updates=8 checkpoint_every=8 prm=model"
    ' second_prm="" refresh.every=0',
}


def prepare(folder: pathlib.Path, tree: pathlib.Path) -> None:
    """Writes the inputs, and trains the policy and the PRM that the commands use with a tree."""
    folder.mkdir()
    here = pathlib.Path.cwd()
    os.chdir(folder)
    gate.make_inputs(pathlib.Path("inputs"))
    os.chdir(here)
    write(folder / "inputs/many.jsonl", gate.chains(1000, 2000))
    sums = [(i % 4, i // 4 % 4) for i in range(48)]
    problems = [{"id": f"{i}", "problem": f"{a}+{b}", "answer": str(a + b)} for i, (a, b) in enumerate(sums)]
    write(folder / "inputs/tasks.jsonl", problems)
    run(tree, folder, "prepare jsonl --input inputs/trees.jsonl --output prepared --exclude inputs/valid.jsonl")
    run(tree, folder, f"train inputs/run.py --workdir policy --set {POLICY}")
    run(tree, folder, f"train inputs/run.py --workdir model --set {MODEL} steps=4")


def write(path: pathlib.Path, records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run(tree: pathlib.Path, folder: pathlib.Path, command: str) -> float:
    """Returns the seconds that a command of a tree takes in a folder."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / f"cache-{tree.name}"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    path = os.pathsep.join([str(tree), str(REPOSITORY / "tests")])
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "jprm", *command.split()], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, **cache, "PYTHONPATH": path})  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{tree}: jprm {command}: ended with {done.returncode}\n{done.stderr[-3000:]}")
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        other = pathlib.Path(scratch) / "before"
        worktree = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*worktree, "add", "-q", "--detach", str(other), args.commit], check=True)
        try:
            prepared = pathlib.Path(scratch) / "prepared"
            prepare(prepared, other)  # this tree reads what an earlier one wrote
            seconds = {name: [] for name in COMMANDS}
            for round in range(args.rounds + 1):
                for name, command in COMMANDS.items():
                    pair = []
                    for tree in (other, REPOSITORY)[:: 1 if round % 2 else -1]:
                        folder = pathlib.Path(scratch) / "work"
                        shutil.copytree(prepared, folder)
                        pair.append(run(tree, folder, command))
                        shutil.rmtree(folder)
                    if round:
                        pair = pair[:: 1 if round % 2 else -1]
                        seconds[name].append(pair)
                        print(f"round {round}, {name}: {pair[0]:.1f} s, {pair[1]:.1f} s", flush=True)
        finally:
            subprocess.run([*worktree, "remove", "--force", str(other)], check=True)
    print(f"\n| command | {args.commit[:7]}, s | this tree, s | ratio |\n|---|---|---|---|")
    for name, pairs in seconds.items():
        ratios = sorted(after / before for before, after in pairs)
        before, after = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        ratio = f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        print(f"| {name} | {before:.1f} | {after:.1f} | {ratio} |")


if __name__ == "__main__":
    main()

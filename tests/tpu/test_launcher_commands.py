"""Launchers run against stand-ins for gcloud, kubectl and Slurm: every call has options of the public references."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from test_launcher_watch import STUBS, cloud  # noqa: F401  (a fixture)
from test_launchers import GKE, QUEUED, REPOSITORY, RUN, SLURM

REFERENCES = json.loads((STUBS / "references.json").read_text())
"""By command: version and date of its reference, and by subcommand its number of words and the options that it takes.
`values`: options whose value is the next word; others have it behind "=", or none."""

STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys
text = sys.stdin.buffer.read().decode(errors="replace")
name = pathlib.Path(sys.argv[0]).name
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(dict(words=[name, *sys.argv[1:]], input=text if name == "sbatch" else "")) + "\\n")
if "describe" in sys.argv:
    state = os.environ.get("STATE", "ACTIVE")
    sys.exit("ERROR: NOT_FOUND: no resource" if state == "ABSENT" else print(state))
"""


@pytest.fixture
def called(tmp_path):
    """Returns a function that runs a launcher in a copy of the checkout, and returns the calls of its commands."""
    for folder in ("tpu", "experiments"):
        shutil.copytree(
            REPOSITORY / folder, tmp_path / "checkout" / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    (tmp_path / "bin").mkdir()
    for name in REFERENCES:
        (tmp_path / "bin" / name).write_text(STAND_IN)
        (tmp_path / "bin" / name).chmod(0o755)
    person = {f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "CALLS": str(tmp_path / "calls"),
        **person,
    }
    for command in (["init", "-q"], ["add", "tpu"], ["commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path / "checkout", env=env, check=True)

    def run(script, command, **more):
        (tmp_path / "calls").write_text("")
        words = ["bash", str(tmp_path / "checkout" / "tpu" / f"{script}.sh"), *shlex.split(command)]
        done = subprocess.run(
            words, env=env | RUN | {"TMPDIR": str(tmp_path)} | more, capture_output=True, text=True, timeout=300,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        run.printed = done.stdout
        return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]

    return run


def check(words):
    """Checks a call's subcommand, its options and its number of other words against the command's reference."""
    name, *words = words
    commands = REFERENCES[name]["commands"]
    subcommand = max((c for c in commands if words[: len(c.split())] == c.split()), key=len)
    reference, rest, plain = commands[subcommand], iter(words[len(subcommand.split()) :]), 0
    for word in rest:
        if not word.startswith("--") or word == "--":
            if reference["words"] is None:  # of another command
                return subcommand
            plain += 1
            continue
        option, equals, _ = word.partition("=")
        assert option in reference["options"], f"{name} {subcommand} has no {option}"
        if option in reference.get("values", ()) and not equals:
            assert next(rest, None) is not None, word
    assert plain == reference["words"], (name, subcommand, words)
    return subcommand


FURTHER = "--reserved --network=shared --subnetwork=a --internal-ips --service-account=b --valid-until-duration=6h"
DISKS = "--boot-disk=size=500GB --data-disk=source=projects/p/zones/z/disks/d,mode=read-write"
QUEUE = dict(QUEUE="research", PRIORITY="urgent", HOURS="2", SPEND="10", PRICE="1")
LAUNCHED = {  # launcher, command, settings: the subcommands that are called
    ("queued", "create", "ABSENT"): ["describe", "create"],
    ("queued", f"create {FURTHER} {DISKS}", "ABSENT"): ["describe", "create"],
    ("queued", "create", "SUSPENDED"): ["describe", "delete", "create"],
    ("queued", "create", "ACTIVE"): ["describe"],
    ("queued", "deploy", "ACTIVE"): ["scp", "ssh"],
    ("queued", "launch", "ACTIVE"): ["ssh"],
    ("queued", "status", "ACTIVE"): ["describe", "ssh"],
    ("queued", "logs", "ACTIVE"): ["ssh"],
    ("queued", "stop", "ACTIVE"): ["ssh", "ssh"],
    ("queued", "delete", "ACTIVE"): ["delete"],
    ("gke", "build", ""): ["build", "push"],
    ("gke", "launch", ""): ["apply"],
    ("gke", "submit", ""): ["job submit"],
    ("gke", "status", ""): ["get jobset", "get pods"],
    ("gke", "logs", ""): ["logs"],
    ("gke", "stop", ""): ["patch jobset"],
    ("gke", "delete", ""): ["delete jobset"],
    ("gke", "manifest", ""): [],
    ("slurm", "launch --partition=gpu --account=a --qos=high", ""): [""],
    ("slurm", "array score --model m --input i", ""): [""],
    ("slurm", "status", ""): ["", "storage cat"],
    ("slurm", "stop", ""): [""],
    ("slurm", "delete", ""): [""],
    ("slurm", "script", ""): [],
}


@pytest.mark.parametrize("case", LAUNCHED, ids=" ".join)
def test_a_command_is_called_with_options_that_its_reference_has(called, case):
    """Also with all settings: several slices, spot, a queue, a cap on costs, and variables to forward."""
    script, command, state = case
    wanted = [f"compute tpus queued-resources {verb}" if script == "queued" else verb for verb in LAUNCHED[case]]
    base = {"queued": QUEUED, "gke": GKE, "slurm": SLURM}[script] | {"STATE": state, "JPRM_BASE": "it's a b"}
    for more in ({}, {"SLICES": "2", "SPOT": "1", "TASK": "rl", "ARGUMENTS": "--set 'name=a b'"}, QUEUE):
        calls = called(script, command, **base | more)
        if more == QUEUE and command == "stop" and script == "gke":
            wanted = ["delete jobset"]  # Kueue would resume it
        assert [check(call["words"]) for call in calls] == wanted
        batches = [call["input"] for call in calls if call["words"][0] == "sbatch"]
        for line in (line for batch in batches for line in batch.splitlines() if line.startswith("#SBATCH")):
            check(["sbatch", *shlex.split(line)[1:]])
        for line in (line for batch in batches for line in batch.splitlines() if line.startswith("srun")):
            check(shlex.split(line))
        for line in re.findall(r"scontrol requeue \S+", "".join(batches)):
            check(shlex.split(line.rstrip(";")))


@pytest.mark.parametrize("workdir", ["gs://bucket/runs/x", "/shared/runs/x"])
def test_slurms_script_is_the_one_submitted_and_logs_follow_its_output(called, tmp_path, workdir):
    settings = SLURM | {"WORKDIR": str(tmp_path / "run") if workdir.startswith("/") else workdir}
    (submitted,) = (call["input"] for call in called("slurm", "launch", **settings) if call["words"][0] == "sbatch")
    assert called("slurm", "script", **settings) == [] and called.printed == submitted
    (tmp_path / "bin" / "tail").write_text(STAND_IN)
    (tmp_path / "bin" / "tail").chmod(0o755)
    (call,) = called("slurm", "logs", **settings)
    output = re.search(r"#SBATCH --output=(.*)", submitted)[1].replace("%x", RUN["NAME"])
    assert call["words"] == ["tail", "-n", "50", "-f", output] and pathlib.Path(output).is_absolute()


def test_a_call_that_a_reference_lacks_is_found():
    good = ["gcloud", "compute", "tpus", "queued-resources", "delete", "a", "--force"]
    assert check(good) == "compute tpus queued-resources delete"
    for wrong in ([*good, "--spot"], [*good, "b"], ["kubectl", "logs", "--tail"], ["scancel", "--label"]):
        with pytest.raises(AssertionError):
            check(wrong)
    for about in REFERENCES.values():
        assert about["version"] and re.fullmatch(r"20\d\d-\d\d(-\d\d)?", about["date"])


# ---- The page for the first hour, from create to delete.


COMMANDS = {
    "jprm": """#!/bin/bash
# Inputs must be there, and outputs are written.
echo "jprm $*" >> "$STUB/typed"
previous=""
for word in "$@"; do
  case $previous in
    --input | --model) case $word in Qwen*) ;; *) [ -e "$word" ] || { echo "jprm $*: no $word" >&2; exit 1; } ;; esac ;;
    --output | --workdir) mkdir -p "$(dirname "$word")"; mkdir "$word" ;;
    train | tokenise | plan) [ -e "$word" ] || { echo "jprm $*: no $word" >&2; exit 1; } ;;
    runs) [ -d "$word" ] || exit 1 ;;
  esac
  previous=$word
done
""",
    # Only the run's own: `pkill -9 jprm` would end other programs of this machine.
    "pkill": '#!/bin/sh\n[ "$*" = "-9 jprm" ] && /usr/bin/pkill -9 -P "$(cat "$TMPDIR/jprm-run.pid")" -f bin/jprm\n',
    # `logs` follows for ever; this reader leaves when the run that was launched has started.
    "tail": """#!/bin/bash
[ "$3" = -f ] || exec /usr/bin/tail "$@"
echo >> "$STUB/followed"
until [ "$(cat "$STUB/starts" 2> /dev/null | wc -l)" -ge "$(wc -l < "$STUB/followed")" ]; do sleep 0.05; done
exec /usr/bin/tail "$1" "$2" "$4"
""",
}


def steps_of_page(folder):
    """Returns the page's commands in order: its blocks, and commands in its sentences that are to be run."""
    page = (REPOSITORY / "tpu" / "first_hour.md").read_text()
    for written, meant in {
        "/tmp/": f"{folder}/", "gs://BUCKET": f"{folder}/bucket", "PROJECT=...": "PROJECT=p",
        "SPEND=...": "SPEND=50", "PRICE=...": "PRICE=1.2", " ssh ... ": " ssh first ",
    }.items():  # fmt: skip
        assert written in page
        page = page.replace(written, meant)
    found = re.finditer(r"(?:^ {4}.*\n)+|`((?:tpu|jprm)[^`]*(?:&&|\$)[^`]*)`", page, re.MULTILINE)
    return [step[1] or re.sub(r"(?m)^ {4}", "", step[0]) for step in found]


def test_the_first_hour_goes_from_create_to_delete(cloud):  # noqa: F811
    """Every step finds what it needs. The host's commands run in the host's folder; the run waits until it is stopped,
    waits until it is killed, and then ends."""
    folder, checkout = cloud.folder, cloud.folder / "checkout"
    for name, text in COMMANDS.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    first, rest = (folder / "jprm").read_text().split("\n", 1)
    here = 'case "$*" in *--distributed*) ;; *) exec "$STUB/bin/jprm" "$@" ;; esac'
    (folder / "jprm").write_text(f"{first}\n{here}\n{rest}")
    for file in ("experiments/prm800k_smollm2.py", "experiments/tiny.py", "examples/tiny_chain.jsonl"):
        (checkout / file).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / file, checkout / file)
    (checkout / "phase1_train.jsonl").write_text("")
    (folder / "plan").write_text("wait\nwait\n0\n")
    steps, script = steps_of_page(folder), ["set -e"]
    for number, step in enumerate(steps):
        on_host = ".venv/bin/jprm" in step
        script.append(f"echo '# {number}'")
        script.append(f'(cd "$STUB/hosts/h0/jprm"; {step}\n)' if on_host else step)
        if "pkill" in step:
            script.append(f"until grep -q 'status 0, ' {folder}/bucket/runs/first/status/h0; do sleep 0.1; done")
    env = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), "STUB": str(folder), "HOSTS": "h0",
        "HOST_NAME": "h0", "TMPDIR": str(folder), "FORWARD": "PAUSE", "PAUSE": "0", "EVERY": "0.1",
        **{f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }  # fmt: skip
    subprocess.run(["git", "add", "-A"], cwd=checkout, env=env, check=True)
    subprocess.run(["git", "commit", "-qm", "with experiments"], cwd=checkout, env=env, check=True)
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=checkout, env=env, capture_output=True, text=True, timeout=600,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 1 and "NOT_FOUND" in done.stderr.splitlines()[-1], done.stdout + done.stderr
    assert done.stderr.count("NOT_FOUND") == 1  # only the last command, after `delete`
    verbs = (folder / "calls").read_text().split()
    assert verbs[-2:] == ["delete", "describe"] and verbs.count("create") == verbs.count("delete") == 1
    assert not (folder / "slice").exists()
    assert len((folder / "starts").read_text().splitlines()) == 3  # launched, launched after the stop, killed
    typed = [line.split()[1] for line in (folder / "typed").read_text().splitlines()]
    assert typed == ["prepare", "tokenise", "train", *["score"] * 4, "plan", "runs"]
    status = pathlib.Path(f"{folder}/bucket/runs/first/status/h0").read_text()
    assert "status 0, the run is finished" in status

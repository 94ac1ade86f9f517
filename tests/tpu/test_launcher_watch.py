"""`tpu/queued.sh watch` on a stub of gcloud with two hosts: it always ends, and the slice is then deleted."""

import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

STUBS = REPOSITORY / "tests" / "launchers"


@pytest.fixture
def cloud(tmp_path):
    """A checkout with the launchers, and a stub of gcloud: returns a function that starts tpu/queued.sh."""
    checkout = tmp_path / "checkout"
    shutil.copytree(REPOSITORY / "tpu", checkout / "tpu")
    setup = 'mkdir -p .venv/bin\ncp "$STUB/jprm" .venv/bin/jprm\n[ ! -e "$STUB/no-setup" ]\n'
    files = {
        "checkout/tpu/setup.sh": f'#!/bin/sh\ncd "$(dirname "$0")/.."\n{setup}',
        "bin/gcloud": (STUBS / "gcloud.sh").read_text(),
        "bin/hostname": "#!/bin/sh\necho $HOST_NAME\n",
        "jprm": (STUBS / "jprm.sh").read_text(),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    person = {f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "STUB": str(tmp_path),
        "EVERY": "0.1", "TMPDIR": str(tmp_path), "NAME": "my-run", "PROJECT": "p", "ZONE": "z", "TYPE": "v5litepod-16",
        "RUNTIME": "r", "EXPERIMENT": "x.py", "WORKDIR": str(tmp_path / "work"), "HOURS": "1", "PAUSE": "0",
        "RETRIES": "2", "FORWARD": "PAUSE RETRIES", "JPRM_BASE": "/models/base", **person,
    }  # fmt: skip
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=checkout, env=env, check=True)

    def start(command, *plan, **more):
        if plan:
            (tmp_path / "plan").write_text("".join(f"{line}\n" for line in plan))
        script, pipe = ["bash", str(checkout / "tpu" / "queued.sh"), command], subprocess.PIPE
        return subprocess.Popen(script, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env | more)

    def watch(*plan, **more):
        child = start("watch", *plan, **more)
        try:
            out, _ = child.communicate(timeout=300)
        finally:
            child.kill()
        return child.returncode, out

    watch.start, watch.folder = start, tmp_path
    return watch


def lines(cloud, name):
    file = cloud.folder / name
    return file.read_text().splitlines() if file.exists() else []


GONE = "UNAVAILABLE: the service is currently unavailable\n"
ENDS = {  # what the starts do, files and settings; the watch's status, how often gcloud was called, and the starts
    "finished": (["slow"], {}, {}, 0, {"create": 1, "scp": 1}, [2]),
    "refused": (["2"], {}, {}, 2, {"create": 1}, [1, 2]),
    "starts that bring nothing": (["1", "7"], {}, {}, 7, {"create": 1}, [1, 2, 3, 4]),
    # One more where the first host has ended again before the second reboots.
    "a reboot, and a launch": (["reboot", "0"], {}, {}, 0, {"create": 1}, [4, 5]),
    "preempted, and another slice": (["preempt", "0"], {}, {}, 0, {"create": 2}, [3, 4]),
    "describe fails twice": (["slow"], {"fail-describe": f"\n\n{GONE * 2}"}, {}, 0, {"create": 1, "scp": 1}, [2]),
    "delete fails twice": (["0"], {"fail-delete": GONE * 2}, {}, 0, {"delete": 3}, [2]),
    "no setup": (["0"], {"no-setup": ""}, {"LAUNCHES": "2"}, 1, {"scp": 2}, [0]),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_watch_ends_as_its_run_and_the_slice_is_deleted(cloud, name):
    """Every start has the first commit, though the checkout has a newer one when a second slice is there."""
    plan, files, settings, status, calls, starts = ENDS[name]
    for file, text in files.items():
        (cloud.folder / file).write_text(text)
    ended, out = cloud(*plan, **settings)
    assert ended == status and not (cloud.folder / "slice").exists(), out
    assert {verb: lines(cloud, "calls").count(verb) for verb in calls} == calls
    started = lines(cloud, "starts")
    assert len(started) in starts and len({line.split()[1] for line in started}) <= 1
    assert name != "describe fails twice" or "UNKNOWN" in out
    records = [record[0] for host in ("h0", "h1") if (record := lines(cloud, f"work/status/{host}"))]
    assert any(f"status {status}, " in record for record in records) or name == "no setup"
    if name == "finished":
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=cloud.folder / "checkout", text=True)
        command = f"{head.strip()} /models/base train x.py --workdir {cloud.folder}/work --distributed auto"
        assert sorted(started) == [f"h0 {command}", f"h1 {command}"]
        assert len(records) == 2 and all("status 0, the run is finished" in record for record in records)


def live(cloud):
    """Starts a run that waits for SIGTERM on both hosts, and ends its watch, however slow the machine is."""
    child = cloud.start("watch", "wait")
    until(lambda: len(lines(cloud, "starts")) == 2)
    child.terminate()
    child.communicate(timeout=300)


def test_a_run_that_has_cost_enough_is_stopped_and_deleted(cloud):
    """16 chips at 225 an hour cost 1 a second. 280 of 300 are spent already, and a stop may take 20 seconds."""
    live(cloud)
    counted = cloud.folder / ".cache/jprm/watch/my-run"
    counted.parent.mkdir(parents=True, exist_ok=True)
    counted.write_text("280\n")
    status, out = cloud(SPEND="300", PRICE="225", GRACE="20")
    assert status == 124 and "SPEND=300 is spent" in out, out
    assert not (cloud.folder / "slice").exists() and not counted.exists()
    assert any("SIGTERM" in line for line in lines(cloud, "work/status/h0"))


@pytest.mark.breadth
def test_a_watch_that_starts_again_leaves_a_live_run_alone(cloud):
    live(cloud)
    second = cloud.start("watch")
    until(lambda: lines(cloud, "calls").count("describe") > 8)
    assert lines(cloud, "calls").count("scp") == 1 and len(lines(cloud, "starts")) == 2
    assert cloud.start("stop").wait(300) == 0
    second.communicate(timeout=300)
    assert second.returncode == 143 and not (cloud.folder / "slice").exists()


def until(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.breadth
def test_after_the_hours_the_run_is_saved_and_the_slice_deleted(cloud):
    live(cloud)
    status, out = cloud(HOURS="0")
    assert status == 124 and not (cloud.folder / "slice").exists(), out
    for host in ("h0", "h1"):
        record = "\n".join(lines(cloud, f"work/status/{host}"))
        assert "status 143, SIGTERM" in record and "saved" in record
    assert cloud("wait", HOURS="two")[0] == 2 and cloud("wait", HOURS="")[0] != 0


def test_a_slice_deleted_from_elsewhere_is_not_created_again(cloud):
    child = cloud.start("watch", "wait")
    until(lambda: len(lines(cloud, "starts")) == 2)
    (cloud.folder / "fail-ssh").write_text("UNAVAILABLE\n" * 10_000)  # nobody sees how the run ends
    for host in ("h0", "h1"):
        os.kill(int((cloud.folder / "hosts" / host / "jprm-run.pid").read_text()), signal.SIGTERM)
    (cloud.folder / "slice").unlink()
    child.communicate(timeout=300)
    assert child.returncode == 1 and lines(cloud, "calls").count("create") == 1

"""Ray: shards on a cluster whose nodes die."""

import pytest
from test_shards import arithmetic, files, verify  # noqa: F401  (a fixture)

from jprm.apps.cli.fleets import run_shards


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of this machine with two processes."""
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    ray.init("local", num_cpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    yield ray
    ray.shutdown()


@pytest.mark.breadth
def test_shards_on_ray_give_the_bytes_of_one_process(files, cluster):  # noqa: F811
    input, output, whole = files
    on_ray = ["--engine", "ray", "shards=5", "workers=1,2"]
    assert verify(input, output, *on_ray) == 0
    assert output.read_bytes() == whole
    assert verify(input, output, *on_ray) == 0  # finished shards are found
    assert verify(input, output) == 0


@pytest.mark.breadth
def test_a_bad_record_is_the_command_s_own_error(files, cluster, capsys):  # noqa: F811
    input, output, _ = files
    with input.open("a") as file:
        file.write('{"problem": "p", "steps": "no list"}\n')
    capsys.readouterr()
    assert verify(input, output, "--engine", "ray", "shards=3") == 2
    error = capsys.readouterr().err
    assert "error: " in error and "steps" in error and ".input:" in error and not output.exists()


@pytest.mark.parametrize(
    "options",
    ["ray", "ray shards=2 --shard 0/2", "ray shards=0", "ray shards=two", "ray shards", "ray shards=2 cpus=1",
     "ray shards=2 workers=2,1", "dask shards=2"],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused_in_one_line(files, options, capsys):  # noqa: F811
    input, output, _ = files
    capsys.readouterr()
    assert verify(input, output, "--engine", *options.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


@pytest.mark.breadth
def test_a_dead_process_costs_no_record_and_doubles_none(cluster, tmp_path):
    """Each shard kills its process at its first attempt, after half of its work."""

    def work(number, folder=str(tmp_path)):
        import os

        mark = f"{folder}/{number}.begun"
        if not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), 9)
        open(mark.replace("begun", "done"), "x").close()

    assert sorted(run_shards(work, 6, workers=(2, 2))) == list(range(6))
    assert len(list(tmp_path.glob("*.done"))) == 6

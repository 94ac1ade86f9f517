"""The command line: help, speed, refusals. What commands do is tested with the library."""

import json
import os
import re
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
from refusing import refused

from jprm.apps import cli
from jprm.apps.cli.arguments import SYNONYMS, Acting, Commands, Option, arranged, options_of, settings, with_settings
from jprm.apps.serve import Served
from jprm.apps.web import Listen
from jprm.methods.data.readers import READERS
from jprm.methods.evaluate.benchmarks import find
from jprm.methods.evaluate.options import OPTIONS


def commands(group):
    """Yields the words of every command and group below a group."""
    for name, (command, _) in group.registered.items():
        yield [name]
        if isinstance(command, Commands):
            yield from ([name, *words] for words in commands(command))


COMMANDS = list(commands(cli.app))

OWN = """
import dataclasses
from jprm.methods.evaluate.benchmark import Benchmark, CommandOptions, Files

@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    data: Files

OWN = Benchmark(name="own", title="Own", options=Options, run=lambda options: {})
"""


@pytest.fixture
def library(monkeypatch):
    """Stands in for the library: `library("jprm.train", train=function)`."""

    def replace(name, **functions):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**functions))

    return replace


def test_the_examples_of_prepare_lack_no_option(capsys, monkeypatch, tmp_path):
    """Each gets as far as its files, which are not there: a reader's options are checked before."""
    monkeypatch.chdir(tmp_path)
    lines = (cli.DESCRIPTION + cli.prepare.__doc__).replace("\\\n", " ").splitlines()
    examples = [line.split()[1:] for line in lines if line.split()[:2] == ["jprm", "prepare"]]
    assert len(examples) == 6
    for example in examples:
        assert cli.main(example) == 2
        assert "no such file" in capsys.readouterr().err


HELP = """
import sys
from jprm.apps.cli import main
heavy = {"jax", "flax", "numpy", "tensorflow_datasets", "grain", "orbax", "torch"}
for command in eval(sys.argv[1]):
    try:
        main([*command, "--help"])
    except SystemExit as stop:
        print(command, stop.code, sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("columns", [60, 100])
def test_help_fits_the_terminal(columns, capsys, monkeypatch):
    """All but examples, which are to be copied."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (["serve"], ["runs"], ["eval", "processbench"]):
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert not [line for line in lines if len(line) > columns and not line.startswith("  ")]


def test_lines_of_an_example_end_with_one_backslash():
    docs = {" ".join(words): str(getattr(cli.app.chosen(words), "__doc__", "")) for words in COMMANDS}
    assert [name for name, doc in docs.items() if "\\\n" in doc]
    assert not [name for name, doc in docs.items() if "\\\\" in doc]


@pytest.mark.parametrize("words", [["search", "beam"], ["score"], ["serve"], ["label", "mc"], ["prepare"]])
def test_help_shows_the_eight_options_of_most_use_first(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    shown = re.findall(r"^[│ ] --([\w.-]+)|^(?:├─)? (more options) ", plain, re.MULTILINE)
    command = cli.app.chosen(words)
    assert command is not None
    names, options = [name or heading for name, heading in shown], options_of(command)
    assert names.index("more options") == 8
    names.remove("more options")
    assert sorted(names) == sorted(options)
    wanted = {name for name, option in options.items() if option.required or option.first}
    assert wanted <= set(names[:8]) or wanted >= set(names[:8])


def test_the_heading_of_more_options_is_as_wide_as_the_box():
    options = {f"o{i}": Option(f"o{i}", "", False, (), None, first=i == 9) for i in range(10)}
    lines = ["╭─ options ────────╮", *(f"│ --{name:14} │" for name in ("help", *options)), "╰──────────────────╯"]
    shown = arranged("\n".join(lines), options).split("\n")
    assert {len(line) for line in shown} == {20} and shown[2] == "│ --o9             │"
    assert shown[10] == "├─ more options ───┤" and len(shown) == 14


def test_help_needs_no_array_library():
    """Importing one takes seconds, and starting a backend would take the accelerator from a run on the same machine."""
    run = subprocess.run([sys.executable, "-c", HELP, repr(COMMANDS)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stderr.splitlines() == [f"{command} 0 []" for command in COMMANDS]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("score --modle x", "jprm score has no option --modle. Did you mean --model?"),
        ("score --model x", "jprm score: --input F.jsonl|DIR, --output G.jsonl are missing; `jprm score --help`"),
        ("eval steps --model x --input y --neutral maybe", "--neutral is 'maybe': positive, negative or drop"),
        ("prepare prm800k --input x --output y --on-error ignore", "--on-error is 'ignore': stop or skip"),
        ("sample --policy p --input x --output y --n many", "--n"),
    ],
)
def test_a_wrong_command_line_is_one_line(args, said, capsys):
    assert cli.main(args.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line


def test_one_thing_has_one_name_in_all_commands():
    """The names that docs/contributing.md states; those that commands had before are taken and shown nowhere."""
    page = (Path(__file__).parents[3] / "docs" / "contributing.md").read_text()
    for words in COMMANDS:
        group = cli.app
        for word in words:
            group = group.registered[word][0]
        if isinstance(group, Commands):
            continue
        options = options_of(group)
        assert not set(options) & (set(SYNONYMS) - {"shards"}), words
        for name in {"on-error", "shard", "at-once"} & set(options):
            assert f"`--{name}" in page


def test_the_help_of_prepare_names_every_reader():
    names = cli.prepare.__doc__.split("kind.")[1].split("FILE.py:NAME")[0]
    assert not set(READERS) - set(names.replace(",", " ").replace(";", " ").replace(".", " ").split())


def test_an_evaluation_needs_no_file_to_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    samples = [{"steps": ["a"], "scores": [score], "answer": answer, "correct": answer == "1"}
               for score, answer in ((0.9, "1"), (0.1, "2"))]  # fmt: skip
    Path("pool.jsonl").write_text(json.dumps({"problem": "p", "answer": "1", "samples": samples}) + "\n")
    assert cli.main(["eval", "best-of-n", "--input", "pool.jsonl"]) == 0
    assert "pass@n" in capsys.readouterr().out and os.listdir() == ["pool.jsonl"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("prepare NAME --source a b --out=c", "prepare NAME --input a b --output=c"),
        ("eval steps --model m --data a --json b --neutral drop --too-long error",
         "eval steps --model m --input a --output b --neutral drop --on-error stop"),
        ("tokenise e.py --out a --shards 2 --part 0/2", "tokenise e.py --output a --files 2 --shard 0/2"),
        ("label mc --policy p --input a --output b --rollouts r --estimate soft --k 2 --trees_at_once 3",
         "label mc --policy p --input a --output b --rollouts r --estimate soft --n 2 --at-once 3"),
        ("score --judge p.json --input a --output b", "score --model p.json --input a --output b"),
        ("label judge --judge=p.json --input a --output b --domain d --rubric r",
         "label judge --model=p.json --input a --output b --domain d --rubric r"),
        ("search filter --input a --calibration b --output c --error-rate 0.1",
         "search filter --input a --calibrate b --output c --error-rate 0.1"),
    ],
)  # fmt: skip
def test_the_names_that_options_had_are_taken(old, new):
    assert cli.app.renamed(old.split()) == new.split()


@pytest.mark.parametrize(
    ("args", "instead"),
    [
        ("score --model m --input a --output b --engine ray --shards 4", "--engine ray shards=N"),
        ("search beam --policy p --workers 1 4", "--engine ray shards=N workers=MIN,MAX"),
        ("label mc --turns 4", "--environment FILE.py:NAME turns=N"),
        ("label mc --z 2", "only Python can set z"),
        ("label omega --alpha 0.4", "only Python can set alpha"),
        ("label consensus --other-threshold 0.4", "--threshold INPUT OTHERS"),
        ("eval steps --model m --reference n", "adapter.json"),
        ("serve --judge p.json", "jprm serve DIR P.json"),
        ("serve m --queue-seconds=9", "--set queue_seconds=VALUE"),
        ("table runs --latex", "--format latex"),
        ("score --model m --judge j", "--judge is a former name of --model"),
    ],
)
def test_an_ended_option_names_what_to_write_instead(args, instead):
    refused(ValueError, instead, cli.app.renamed, args.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [(["items"], "--set 'items'"), (["items=1.5"], "--set items: 1.5"), (["host=x"], "--set host: is no known field"),
     (["items=0"], "items is 0")],
)  # fmt: skip
def test_settings_of_a_server_are_typed(words, message):
    refused(ValueError, message, with_settings, words, Served())
    (served,) = with_settings(["items=7", "weights=split", "queue_seconds=9"], Served())
    assert (served.items, served.weights, served.queue_seconds) == (7, "split", 9.0)


@pytest.mark.parametrize("words", [["turns"], ["turns=x"], ["turns=2.5"], ["turn=3"]])
def test_settings_of_an_environment_are_typed(words):
    refused(ValueError, "--environment", settings, Acting, words, "environment")
    assert settings(Acting, ["turns=3"], "environment").turns == 3 and Acting().turns == 16


def test_an_option_of_a_users_own_keeps_its_name(tmp_path, monkeypatch):
    """The words are those of the user's class, not synonyms."""
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path}/own.py:OWN"
    cli.add_benchmark(cli.evaluations, name)
    assert cli.app.renamed(["eval", name, "--data", "a"]) == ["eval", name, "--data", "a"]
    refused(ValueError, "no option --outputs. Did you mean --output", cli.app.renamed, ["eval", name, "--outputs", "a"])


@pytest.mark.parametrize(
    ("args", "meant"),
    [(["trian"], "train"), (["eval", "best_of"], "best-of-n"), (["label", "verfy", "--kind", "coq"], "verify")],
)
def test_a_mistyped_command_names_the_one_that_was_meant(args, meant, capsys):
    assert cli.main(args) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


# A report of best-of-n over one problem with two samples, with nothing but what its table shows.
NO_WARNINGS = {"trained_on_words": lambda report: [], "unread_words": lambda report: []}
CURVE = {"value": [0.5, 0.75], "low": [0.25, 0.5], "high": [0.75, 1.0]}
BEST_OF_N = {"n_max": 2, "n_problems": 1, "mean_accuracy": 0.5, "pass_at_n": CURVE, "majority": None, "rules": {},
             "baselines": {}}  # fmt: skip


def test_a_report_is_written_whole_and_printed(library, tmp_path):
    calls = []
    library("jprm.methods.evaluate.run", run=lambda *args: calls.append(args) or BEST_OF_N, **NO_WARNINGS)
    target = tmp_path / "new" / "report.json"
    assert cli.main(["eval", "best-of-n", "--input", "s.jsonl", "--output", str(target)]) == 0
    benchmark = find("best_of_n")
    assert calls == [(benchmark, OPTIONS["best_of_n"](input=Path("s.jsonl"), to=target))]
    assert json.loads(target.read_text()) == BEST_OF_N
    assert [file.name for file in target.parent.iterdir()] == ["report.json"]


def test_a_report_with_nan_leaves_the_old_one_alone(library, tmp_path):
    library("jprm.methods.evaluate.run", run=lambda *_: {"auroc": float("nan")}, **NO_WARNINGS)
    target = tmp_path / "report.json"
    target.write_text("{}")
    assert cli.main(["eval", "best-of-n", "--input", "s.jsonl", "--output", str(target)]) == 2
    assert target.read_text() == "{}"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a.jsonl:3: steps[1]: is empty. Remove it"), "error: a.jsonl:3: steps[1]: is empty. Remove it"),
        (ValueError("two\n  lines"), "error: two lines"),
        (FileNotFoundError(2, "No such file or directory", "m"), "error: m: No such file or directory"),
        (FileNotFoundError("no checkpoint in m: train one first"), "error: no checkpoint in m: train one first"),
        (NotImplementedError(), "error: NotImplementedError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_refusal_is_one_line(library, capsys, monkeypatch, error, line):
    def refuse(*args, **kwargs):
        raise error

    library("jprm.loading", load=refuse)
    args = "score --model m --input examples/tiny_chain.jsonl --output b.jsonl".split()
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line + "\n")

    monkeypatch.setenv("JPRM_TRACEBACK", "1")
    with pytest.raises(type(error)):
        cli.main(args)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("serve runs/prm --longest 0", "longest is 0: it must be above 0"),
        ("serve runs/policy --port 99999", "port is 99999: it must be from 0 to 65535"),
    ],
)
def test_options_of_servers_are_refused_in_one_line(args, line, capsys):
    assert cli.main(args.split()) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_a_bug_keeps_its_traceback(library):
    library("jprm.loading", load=lambda *args, **kwargs: {}["key"])
    with pytest.raises(KeyError):
        cli.main("score --model m --input examples/tiny_chain.jsonl --output b".split())


def test_a_missing_extra_is_named(library, capsys, monkeypatch):
    requires = ["numpy>=2", 'tensorflow-datasets>=4.9; extra == "train"', 'jax-prm[train]; extra == "test"']
    monkeypatch.setattr(cli.metadata, "requires", lambda name: requires)
    args = "score --model m --input examples/tiny_chain.jsonl --output b.jsonl".split()

    def load(*args, **kwargs):
        raise ModuleNotFoundError(name=absent)

    library("jprm.loading", load=load)
    absent = "tensorflow_datasets"
    assert cli.main(args) == 2
    said = capsys.readouterr().err
    assert "tensorflow_datasets" in said
    assert said.count("\n") == 1
    absent = "no_such_module"
    with pytest.raises(ModuleNotFoundError):  # no extra brings it: a bug
        cli.main(args)


def test_a_reader_that_leaves_is_no_error():
    """As of `jprm --help | head -1`: the rest is not printed, and nothing is said about it."""
    run = [sys.executable, "-m", "jprm", "search", "--help"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(run, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_says_that_the_same_command_continues(library, capsys):
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    library("jprm.loading", load=stopped)
    assert cli.main("score --model m --input examples/tiny_chain.jsonl --output b".split()) == 130
    assert "continues" in capsys.readouterr().err


@pytest.mark.parametrize("item", ["phase", "=1", ""])
def test_a_setting_without_key_or_value_is_refused(library, item, capsys):
    library("jprm.methods.data.prepare", prepare=lambda *args, **kwargs: None)
    assert cli.main(["prepare", "prm800k", "--input", "a", "--output", "b", "--set", item]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_is_taken_is_one_line(host):
    """A connection that was closed a moment ago, as of a server that is started again, takes none."""
    http = pytest.importorskip("jprm.apps.web.http", reason="needs the extra `serve`")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with socket.create_connection(taken.getsockname()), taken.accept()[0]:
            refused(OSError, f"port {port} of {host}: .*--port; 0 takes", http.opened, Listen(host=host, port=port))
    with http.opened(Listen(host=host, port=port)) as free:
        assert free.getsockname()[1] == port


@pytest.mark.parametrize("command", ["serve MODEL"])
def test_a_server_on_a_port_that_is_taken_says_so_before_it_loads_anything(command, tmp_path, capsys):
    pytest.importorskip("uvicorn", reason="needs the extra `serve`")
    (tmp_path / "config.json").write_text("{}")
    words = [str(tmp_path) if word.isupper() else word for word in command.split()]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main([*words, "--port", str(port)]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: port {port} of 127.0.0.1: ") and "--port" in line


def test_an_error_gives_the_terminal_no_control_characters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = "\x1b]0;title\x07\x1b[2J\n\u202eb"
    assert cli.main(["score", "--model", name, "--input", name, "--output", "o.jsonl"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.rstrip("\n").isprintable() and "\\x1b]0;title" in err

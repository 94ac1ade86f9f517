"""The `jprm` command: parses, calls the library, prints.

A command imports what it calls when it runs, so that `jprm --help` needs neither jax nor a second. A refusal of the
library (a bad record, a missing file, an unsupported combination) is one `error:` line and exit status 2.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, cast

from tyro.conf import FlagCreatePairsOff, Positional, arg

import jprm
from jprm.apps import Name, StoredAs
from jprm.apps.cli.arguments import (
    REFUSALS,
    Commands,
    Count,
    Distributed,
    Files,
    Folder,
    Help,
    JudgeFile,
    Number,
    OneModel,
    OnError,
    Settings,
    one_scorer,
    run_of,
    scorer_of,
)
from jprm.apps.cli.evaluate import add as add_benchmark
from jprm.apps.cli.evaluate import evaluation
from jprm.apps.cli.fleets import UNDIVIDED, Divided, Once, RunFiles, divided, merge
from jprm.apps.cli.label import add as add_labeller
from jprm.apps.cli.label import annotate, label
from jprm.apps.cli.runs import plan, report, runs, sweep, table
from jprm.apps.cli.search import add as add_method
from jprm.apps.cli.search import fuse, sample, search
from jprm.apps.serve import Served
from jprm.devices import enable_compile_cache, quiet_without_tpu
from jprm.io.jsonl import shortened
from jprm.io.storage import FULL, path_of
from jprm.methods.export import FileDtype, Format
from jprm.methods.search.growing_tree import METHODS
from jprm.options import assigned

DESCRIPTION = """Train, evaluate and use process reward models: models that score every step of
a chain of reasoning.

A first run, from step labels to figures:
  jprm prepare prm800k --input phase1_train.jsonl --output data/prm800k \\
    --set human_written=unlabelled control_questions=drop
  jprm train experiments/prm800k_smollm2.py --workdir runs/prm800k_smollm2
  jprm eval steps --model runs/prm800k_smollm2 --input phase1_test.jsonl --neutral positive

JPRM_TRACEBACK=1 shows where in the code an error arose. `jprm --version` prints the version."""

NO_WRITE = {errno.EPIPE, *FULL}
"""Errors of an output that nobody reads, or that is full."""

app = Commands()


@app.command
def prepare(
    name: Annotated[Positional[str], arg(metavar="NAME")],
    input: Annotated[tuple[str, ...], arg(metavar="FILE|URL ...")],
    output: Folder,
    exclude: Files = (),
    sha256: Annotated[tuple[str, ...], arg(metavar="HEX ...", help_behavior_hint="")] = (),
    on_error: OnError = "stop",
    overwrite: FlagCreatePairsOff[bool] = False,
    duplicates: Literal["keep", "drop"] = "keep",
    near: Number = None,
    split: Annotated[tuple[str, ...], arg(metavar="PART=FRACTION ...", help_behavior_hint="")] = (),
    set_: Settings = (),
) -> None:
    """Read step labels into reasoning trees on disk.

    Prints what was read, kept and rejected, and why. A stopped command leaves no data set.

    For example:
      jprm prepare prm800k --input phase1_train.jsonl --output data/prm800k \\
        --set human_written=unlabelled control_questions=drop
      jprm prepare gsm8k --input train.jsonl --output data/gsm8k --exclude processbench/gsm8k.json \\
        --set calculator_marks=strip
      jprm prepare jsonl --input mine.jsonl --output data/mine --on-error skip
      jprm prepare columns --input mine.parquet --output data/mine --set problem=question steps=solution.steps
      jprm prepare columns --input mine.csv --output data/mine --split held_out=0.1

    Args:
        name: The source's kind. Of steps: prm800k, math_shepherd, processbench, prmbench, gsm8k, gsm8k_solutions, math,
            programs, pools, trl, text, rlhflow, er_prm, math_aps, versaprm, actprm, genprm_math, ultra_interact,
            mr_ben, big_bench_mistake, hard2verify; jsonl for jprm's own records, and columns for those of other names.
            Of agents: openai, anthropic, otel, verifiers, atif, swe_agent, mini_swe_agent, openhands, claude_code,
            codex, tau_bench, tau2_bench, agentrx, inspect, who_and_when, agent_process_bench. Or your own reader,
            module:NAME or FILE.py:NAME.
        input: The files to read (JSON Lines, JSON lists, Parquet, Arrow), also in a bucket, or URLs, which are
            downloaded into `downloads` beside DIR, or into ~/.cache/jprm/downloads for a DIR in a bucket.
            hf://datasets/OWNER/NAME[@REVISION]/FILE is a file of the Hugging Face Hub.
        output: The folder to write, also in a bucket. It must hold no other data set, unless --overwrite is given.
        exclude: Benchmark files, whose problems are left out and counted. Problems are compared by normalised text.
        sha256: Checksums that you trust, for downloads whose checksum jprm does not know.
        on_error: Stop at the first bad record, or skip bad records and write them beside the output.
        overwrite: Replace the data set in DIR.
        duplicates: Leave out records whose problem and steps repeat an earlier record's, and count them.
        near: With --exclude and --duplicates drop, texts count as equal from this Jaccard similarity of their sets of
            five words on, such as 0.8. Needs the extra `near`.
        split: Parts of the problems, e.g. held_out=0.1: DIR/held_out gets a tenth of them, and DIR/train the rest.
            Equal problems are in one part.
        set_: Options of the source, as in docs/data.md. The error for an unknown one lists all, with their values.
            `split=NAME` reads one list of a file that holds its splits.
    """
    from jprm.methods.data.prepare import prepare

    options = dict(map(assigned, set_))
    if taken := sorted(set(inspect.signature(prepare).parameters) & set(options)):
        raise ValueError(f"--set {taken[0]}: unknown, not an option of a reader")
    parts = {}
    for name_, share in map(assigned, split):
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise ValueError(f"--split {name_}={share}: not of the form PART=FRACTION, e.g. held_out=0.1")
        parts[name_] = share
    checked = {"on_error": on_error, "sha256": sha256, "overwrite": overwrite, "duplicates": duplicates, "near": near}
    prepare(name, input, output, exclude=exclude, parts=parts, **checked, **options)


@app.command
def tokenise(
    experiment: Annotated[Positional[Path], arg(metavar="EXPERIMENT.py")],
    output: Folder,
    input: Annotated[tuple[str, ...], arg(metavar="DIR|F.jsonl ...", help_behavior_hint="")] = (),
    set_: Settings = (),
    files: Count = None,
    workers: Count = None,
    shard: Annotated[str, arg(metavar="I/N", help_behavior_hint="")] = "0/1",
) -> None:
    """Write records as shards of tokens, which training reads without tokenising; continues a stopped command.

    Each process of a run then reads its own shards, from a bucket too.

    For example:
      jprm tokenise experiments/prm800k_smollm2.py --output gs://BUCKET/tokens/prm800k
      jprm tokenise experiments/pod.py --input data/shepherd --output gs://BUCKET/tokens/shepherd --shard auto/16
      jprm train experiments/pod.py --workdir gs://BUCKET/runs/pod --distributed auto \\
        --set 'data.train=["gs://BUCKET/tokens/prm800k","gs://BUCKET/tokens/shepherd"]' 'data.mixture=[2,1]'

    Args:
        experiment: The file whose tokenizer, target, data.supervise, data.extras and data.weight decide the tokens.
        output: The folder to write, also in a bucket.
        input: Folders that `jprm prepare` wrote, or JSONL files. Default: the experiment's data.train.
        set_: Values that replace the experiment's.
        files: How many files. Default: of about 16 million tokens.
        workers: Processes that tokenise. Default: one for each core.
        shard: Write each N-th file from the I-th on, from 0, as one of N machines; `auto` and `auto/N` read I from a
            Kubernetes, Slurm or Batch job with an index. The last one to finish completes the folder.
    """
    from jprm.apps.cli.fleets import shard_of
    from jprm.experiment import load
    from jprm.methods.data.stored_trees import tokenise

    report = tokenise(load(experiment, set_), output, input, shards=files, workers=workers, part=shard_of(shard))
    print(
        f"{output}: {report.written} of {report.shards} files, {report.records:,} records, {report.tokens:,} tokens in"
        f" {report.steps:,} steps ({report.labelled:,} labelled), {report.bytes / 1e6:,.1f} MB"
    )
    if report.written < report.shards:
        left = report.shards - report.written
        print(f"{left} files are of other shards of the work; the last one to finish completes the folder")


@app.command
def train(
    experiment: Annotated[Positional[Path], arg(metavar="EXPERIMENT.py")],
    workdir: Folder,
    set_: Settings = (),
    distributed: Distributed = None,
) -> None:
    """Train the model that an experiment file describes; the same command continues a stopped run.

    SIGTERM makes a run save and exit with status 143. A run may continue on another mesh or number of hosts.

    For example:
      jprm train experiments/prm800k_smollm2.py --workdir runs/prm800k_smollm2
      jprm train experiments/prm800k_smollm2.py --workdir runs/short --set steps=20 optimizer.learning_rate=1e-4
      jprm train experiments/prm800k_smollm2.py --workdir gs://BUCKET/runs/pod --distributed auto

    Args:
        experiment: The file that describes the run.
        workdir: The folder for checkpoints, metrics and the configuration, on this machine or in a bucket
            (gs://BUCKET/RUN, s3://BUCKET/RUN). A run in it is continued.
        set_: Values that replace the experiment's, by their path in its configuration.
        distributed: For several processes, given to each: `auto` reads the cluster's environment (Cloud TPU, GKE,
            Slurm, Open MPI); or INDEX/COUNT@HOST:PORT, with a free port of process 0's host. DIR must be in a gs://
            bucket or on a file system that all share. Default: one process.
    """
    from jprm import multihost
    from jprm.experiment import load
    from jprm.methods.formats.hub import pinned
    from jprm.train import train

    with run_of(distributed):
        result = train(pinned(load(experiment, set_)), workdir)
    if multihost.is_first():
        figures = [f"{name} {result[name]:.4g}" for name in ("loss", "valid_loss", "valid_auroc") if name in result]
        print(f"{workdir}: {result['step']:,} steps, {', '.join(figures)}")
        print(f"next: jprm score --model {workdir} --input FILE.jsonl --output SCORED.jsonl")


@app.command
def score(
    input: Annotated[str, arg(metavar="F.jsonl|DIR")],
    output: Annotated[str, arg(metavar="G.jsonl")],
    model: OneModel = None,
    judge: JudgeFile = None,
    on_error: OnError = "stop",
    adapter: Name = None,
    reference: Name = None,
    dtype: StoredAs = None,
    attention: Name = None,
    calibrated: FlagCreatePairsOff[bool] = False,
    by: Name = None,
    distributed: Distributed = None,
    how: Divided = UNDIVIDED,
) -> None:
    """Score every step of the chains, pools and trees of a file; the same command continues a stopped one.

    For example:
      jprm score --model runs/prm800k_smollm2 --input examples/tiny_chain.jsonl --output scored.jsonl
      jprm score --model Qwen2.5-Math-PRM-7B --input pool.jsonl --output scored.jsonl
      jprm score --model mine --adapter trl --input pool.jsonl --output scored.jsonl
      jprm score --model qwen2.5-7b --reference qwen2.5-0.5b --input pool.jsonl --output contrast.jsonl
      jprm score --judge judge.json --input pool.jsonl --output judged.jsonl
      jprm score --model runs/agent --input trajectory.json --output scored_trajectory.json

    Args:
        model: The folder of a trained or a published model, also in a bucket. Give this or --judge.
        judge: A policy's JSON file with a section `judge`: a language model that writes critiques, whose verdicts are
            the scores. The output has the critiques and their cost under `judge`.
        input: Records to score, one per line, or a folder that `jprm prepare` wrote. Input and output may be in a
            bucket: gs://BUCKET/F.jsonl, s3://BUCKET/F.jsonl. A file may hold ATIF documents.
        output: The same records in the same order, with `scores` in each chain and sample and `score` in each node. Of
            ATIF documents the same bytes, with each turn's score in `extra.jprm` of its step.
        on_error: Stop at the first bad record, or skip bad records, and those longer than the model reads, and write
            them beside the output.
        adapter: How to read a published model whose files do not show it: NAME, F.json, module:NAME or FILE.py:NAME.
        reference: A smaller language model of the same tokenizer. A step's score is then the log-probability of the
            steps so far under --model less that under this one: no training is needed. Both may be Hugging Face
            folders, GGUF files or hf://OWNER/NAME@REVISION.
        dtype: How the parameters are stored; int8 takes a quarter of float32's memory, nf4 an eighth. Default: as
            trained; a published model in float32, on a GPU in bfloat16.
        attention: The attention implementation; all give the same scores. `paths` is the fastest on a CPU, `kernel` is
            for TPUs, `gpu_kernel` for NVIDIA GPUs, `blocked` for all. Default:
            `gpu_kernel` on a GPU; elsewhere the model's own where it runs here, `blocked` for a published model.
        calibrated: Map scores to probabilities by the map that `jprm eval calibration --store` stored.
        by: Another of the model's named outputs as the score, such as a classifier's label or `low`.
        distributed: For several processes, as in `jprm train`. Each scores its part on its own devices, which must fit
            the model. The output equals one process's.
    """
    from jprm import multihost
    from jprm.io.outputs import check_input, check_output
    from jprm.methods.data.agents.atif import is_atif
    from jprm.methods.jobs.score import score_atif, score_file
    from jprm.score.scorer import CHUNK, PRM, Speed
    from jprm.tree import read_records

    one_scorer("score", model, judge)
    if judge and any((adapter, reference, dtype, attention, calibrated, by, distributed)):
        raise ValueError("score: --judge takes no option of a model, such as --adapter, --reference or --dtype")
    if not how.here and distributed:
        raise ValueError("score: --shard and --engine divide over jobs, --distributed over hosts of one job: give one")
    if distributed:
        multihost.start(distributed)
    options = {"dtype": dtype, "adapter": adapter, "attention": attention, "reference": reference}
    scorer = Once(lambda: scorer_of("score", model, judge, **options))

    if Path(output).suffix in (".csv", ".tsv", ".parquet", ".xlsx", ".gz"):
        raise ValueError(f"{output}: JSON Lines are written; name a .jsonl file. DuckDB and pandas read it")

    def work(part: RunFiles) -> dict[str, Any]:
        source = part.input
        check_input(source)  # this and the next four before the model is loaded
        check_output(part.output, source)
        atif = not path_of(source).is_dir() and is_atif(source)
        if not atif and on_error == "stop":
            next(read_records(source), None)  # a file of another format
        prm, speed = scorer(), Speed()
        if by:
            if not isinstance(prm, PRM):
                raise ValueError(f"--by {by}: {prm.name} has only the output score")
            prm = prm.by(by)
        if model and multihost.is_first():
            print(prm.read_as, file=sys.stderr)
        if atif:
            if on_error != "stop":
                raise ValueError(f"{source}: ATIF documents are scored all or none: leave out --on-error skip")
            summary = score_atif(prm, source, part.output, calibrated=calibrated, speed=speed)
        else:
            options = {"on_error": on_error, "calibrated": calibrated, "speed": speed}
            summary = score_file(prm, source, part.output, **options)
        if multihost.is_first():
            print(summary)
        if not judge:
            return {"tokens": speed.tokens}
        from jprm.methods.judge.critiques import cost

        spent = cost(read_records(f"{part.output}.turns.jsonl" if atif else part.output))
        print("critiques: " + ", ".join(f"{name}: {count}" for name, count in spent.items()))
        return spent

    divided("score", how, work, input, output, unit=CHUNK, tell=False)


@app.command
def convert(
    source: Annotated[Positional[Path], arg(metavar="SRC")],
    target: Annotated[Positional[Path], arg(metavar="DST")],
    dtype: FileDtype = "float32",
    format: Format = "transformers",
    push: Annotated[str, arg(metavar="OWNER/NAME", help_behavior_hint="")] = "",
    dry_run: FlagCreatePairsOff[bool] = False,
) -> None:
    """Write a trained model as a folder that transformers, vLLM or PEFT loads, with the same logits.

    The same command continues a stopped one, and checks a finished folder against its SHA256SUMS.

    For example:
      jprm convert runs/prm800k_smollm2 exported/prm800k_smollm2
      jprm convert runs/lora exported/adapters --format peft
      jprm convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2
      jprm convert runs/prm800k_smollm2 exported/prm800k_smollm2 --push ana/prm800k-smollm2 --dry-run

    Args:
        source: The folder of a trained model, also in a bucket; or a language model, as a GGUF file or a Hugging Face
            folder.
        target: The folder to write, also in a bucket. A stopped command leaves DST.partial, which it continues, never
            half a DST.
        dtype: Type of the numbers in the files. The model's own is float32.
        format: transformers: a token classifier with merged adapters, which vLLM serves too; of a policy, a causal
            language model. qwen2-prm: the format of Qwen2.5-Math-PRM, for a Qwen2 model. peft: the adapters and the
            head of a LoRA run.
        push: Then upload DST with its card to this model of the Hugging Face Hub, which is made, and private, where it
            is not there. The token is that of `hf auth login` or HF_TOKEN.
        dry_run: With --push: say what would be uploaded.
    """
    from jprm.methods.export.export import export
    from jprm.methods.formats import hub

    if push:
        hub.check_push(push, dry_run)
    elif dry_run:
        raise ValueError("--dry-run is for --push OWNER/NAME")
    written = export(source, target, dtype=dtype, format=format)
    print(f"{written}: whole, as its SHA256SUMS says")
    if dry_run:
        for file in written.files():
            print(f"would upload {file.name}, {file.stamp()['bytes']:,} bytes, to {push}")
    elif push:
        print(f"{hub.push(written, push)}: uploaded")


def rl(
    experiment: Annotated[Positional[Path], arg(metavar="EXPERIMENT.py")],
    workdir: Folder,
    set_: Settings = (),
    distributed: Distributed = None,
) -> None:
    """Let a policy learn from its own samples, by a verifier and a PRM; the same command continues a stopped run.

    An update samples chains of some problems, has the verifier and the PRM judge them, gives every token its credit,
    and steps. Evaluations on held-out problems show correct answers beside the PRM's score. Where the score rises while
    correct answers fall, the policy games the PRM: the run ends, with the best parameters restored.

    DIR is then a policy, which `jprm search --policy DIR` takes. DIR/best is the policy of the best evaluation,
    DIR/rl.json the verdict and every figure, and `jprm report DIR --output PAGE.html` their page.

    For example:
      jprm rl experiments/quickstart/rl.py --workdir runs/rl
      jprm rl experiments/quickstart/rl.py --workdir runs/sum --set credit.name=sum_prm_alone credit.offset=0
      jprm rl experiments/quickstart/rl.py --workdir runs/rft --set method=rejection
      jprm rl experiments/pod.py --workdir gs://BUCKET/runs/rl --distributed auto
      jprm rl experiments/pod.py --workdir gs://BUCKET/runs/rl --set stale=1 sampling_hosts=4 --distributed auto

    Args:
        experiment: A file whose function experiment() returns a jprm.methods.rl.config.RLExperiment.
        workdir: The folder for checkpoints, metrics and the configuration, also in a bucket. A run in it is continued.
        set_: Values that replace the experiment's, by their path in its configuration.
        distributed: For several processes, as in `jprm train`. Each samples and judges a part of the problems on its
            own devices, whose memory must hold the policy and the PRMs beside its part of the learner. With
            sampling_hosts the last processes sample and judge while the others learn.
    """
    from jprm import multihost
    from jprm.experiment import load
    from jprm.methods.formats.hub import pinned
    from jprm.methods.rl.config import RLExperiment
    from jprm.methods.rl.loop import train

    with run_of(distributed):
        result = train(pinned(load(experiment, set_, RLExperiment)), workdir)
    if multihost.is_first():
        print("\n".join(result["verdict"]))


SERVED = Served()


def serve(config: Annotated[Served, arg(name="")] = SERVED) -> None:
    """Score over HTTP: /v1/score, /v1/rewards, /v1/rerank, /v1/continue, /v1/chat/completions by search, and more.

    With the environment variable JPRM_API_KEY, clients send the key as `Authorization: Bearer KEY`. SIGTERM ends the
    server after it has answered what it admitted.

    For example:
      jprm serve runs/prm800k_smollm2
      curl localhost:8000/v1/score --json '{"problem": "What is 2 + 2?", "response": "2 + 2 = 4. So it is 4."}'
    """
    from jprm.apps.serve.app import serve

    serve(config)


app.command(
    evaluations := evaluation(),
    name="eval",
    help=f"Tell how good a model or a data set is: {', '.join(evaluations.registered)}.\n\nFor example:\n"
    "  jprm eval steps --model runs/prm --input phase1_test.jsonl --neutral positive\n"
    "  jprm eval best-of-n --model runs/prm --input pool.jsonl --output best_of_n.json",
)
for _command in (merge, report, runs, table, sweep, serve, plan, rl):
    app.command(_command)
app.command(
    label,
    name="label",
    help="Label steps without humans: mc (Monte Carlo), omega (OmegaPRM), verify (checks), outcomes, teacher, judge,"
    " consensus; reference, a frozen model's log-probabilities; and critique, training data of generative verifiers."
    "\n\nFor example:\n  jprm label verify --kind arithmetic --input chains.jsonl --output checked.jsonl\n"
    "  jprm label teacher --model runs/prm --input chains.jsonl --output soft.jsonl",
)
app.command(
    annotate,
    name="annotate",
    help="Label steps by humans: select chains, serve the page, report what the labels are worth, export them.\n\n"
    "For example:\n  jprm annotate serve studies/one --input queue.jsonl --annotators ana ben",
)
app.command(
    fuse,
    name="fuse",
    help="Fit a verifier that weighs evidence from many sources.\n\nFor example:\n"
    "  jprm fuse fit small.jsonl large.jsonl --output runs/fused",
)
app.command(sample)
app.command(
    search,
    name="search",
    help=f"Find a chain for each problem: {', '.join(METHODS)}; and filter the results.\n\nFor example:\n"
    "  jprm search best-of-n --policy server.json --model runs/prm --input problems.jsonl --budget 8192 --n 16 \\\n"
    "    --output best.jsonl",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status.

    That is 0, 2 for a refusal of the library, 130 for Ctrl-C, or 141 if the reader of standard output has gone.
    """
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    enable_compile_cache()
    quiet_without_tpu()
    try:
        try:
            if odd := [item for item in args if HALF_PAIRS.search(item)]:
                raise ValueError(f"{odd[0]!a}: is not UTF-8, which outputs and their requests hold; rename the file")
            if args == ["--version"]:
                print(f"jprm {jprm.__version__}")
            else:
                _check_addresses(args)
                _add_own(*args[:2])
                shown = contextlib.redirect_stdout(cast(TextIO, Help(sys.stdout)))
                with shown if {"-h", "--help"} & set(args) else contextlib.nullcontext():
                    app.cli(prog="jprm", description=DESCRIPTION, args=args)
            return 0
        finally:
            print(end="", flush=True)  # fails here rather than when the interpreter ends
    except KeyboardInterrupt:
        print("stopped: the same command continues from what is saved, if anything is", file=sys.stderr)
        return 130
    except (TypeError, AttributeError, NameError, SyntaxError, KeyError, ImportError) as error:
        said = extra_hint(error) if isinstance(error, ModuleNotFoundError) else None
        if said is None and (place := place_in(error, [word for word in args if word.endswith(".py")])):
            said = f"{place}: {type(error).__name__}: {_line(error)}. Correct the file"
        if said is None or os.environ.get("JPRM_TRACEBACK") == "1":
            raise
        print(f"error: {said}", file=sys.stderr)
        return 2
    except REFUSALS as error:
        if isinstance(error, OSError) and error.errno in NO_WRITE and (lost := _lost_output()):
            if isinstance(lost, BrokenPipeError):
                return 128 + signal.SIGPIPE
            error = lost
        if os.environ.get("JPRM_TRACEBACK") == "1":
            raise error
        print(f"error: {_line(error)}", file=sys.stderr)
        return 2


def place_in(error: BaseException, files: Sequence[str]) -> str | None:
    """Returns FILE:LINE where an error arose, if that is in one of the user's files itself; else None."""
    own = {os.path.realpath(file): file for file in files}
    if isinstance(error, SyntaxError) and os.path.realpath(error.filename or "") in own:
        return f"{error.filename}:{error.lineno}"
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    file = os.path.realpath(last.tb_frame.f_code.co_filename) if last is not None else ""
    return f"{own[file]}:{last.tb_lineno}" if last is not None and file in own else None


def _add_own(command: str = "", name: str = "") -> None:
    """Adds the command of a method or a benchmark outside the library, as in `jprm search FILE.py:NAME`."""
    if ":" in name and command == "search":
        add_method(name)
    if ":" in name and command == "eval":
        add_benchmark(evaluations, name)
    if ":" in name and command == "label":
        add_labeller(name)


HALF_PAIRS = re.compile("[\ud800-\udfff]")
"""What the bytes of an argument become that are not UTF-8."""

ADDRESS = re.compile(r"(gs|gcs|s3|az|abfss?|hf)://")

FIELDS_IN_BUCKETS = (
    "base", "reference", "tokenizer", "data.train", "data.valid", "policy", "prm", "second_prm", "problems", "held_out",
    "refresh.replay",
)  # fmt: skip
"""Fields of an experiment that may be in a bucket."""


def _check_addresses(args: Sequence[str]) -> None:
    """Raises ValueError for a bucket's address of what must be on this machine: code, and studies, which grow."""
    for word in filter(ADDRESS.search, args):
        field, code = re.match(r"([\w.]+)=", word), re.search(r"\.py(:\w+)?$", word)
        if code or args[0] == "annotate" or (field and field[1] not in FIELDS_IN_BUCKETS):
            raise ValueError(
                f"{word}: is to be a file or folder of this machine; what may be in a bucket is in docs/guide.md. Copy"
                " it here first"
            )


def _lost_output() -> OSError | None:
    """Returns why standard output takes nothing more: it is full, or nobody reads it, as after `jprm --help | head`.

    What is left to print then goes nowhere; else the interpreter would complain when it ends.
    """
    try:
        print(flush=True)
        return None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error.filename = "standard output"
        return error


def _line(error: BaseException) -> str:
    """Returns the message as one line of bounded length, with control characters escaped: a terminal obeys them."""
    named = isinstance(error, OSError) and error.filename is not None
    text = f"{error.filename}: {error.strerror}" if named else " ".join(str(error).split())
    text = shortened(text, 2000) or type(error).__name__
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def extra_hint(error: ModuleNotFoundError) -> str | None:
    """Names the extra of jprm that installs the missing package; None if no extra does."""
    package = _canonical((error.name or "").split(".")[0])
    try:
        requirements = metadata.requires("jax-prm") or []
    except metadata.PackageNotFoundError:  # a checkout that is only on the path
        return None
    for requirement in requirements:
        match = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", requirement)
        if match and (_canonical(match[1]) + "-").startswith(package + "-"):  # opentelemetry is of many packages
            return f"this command needs {error.name}, which is not installed: pip install 'jax-prm[{match[2]}]'"
    return None


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

"""The `jprm` command: parses arguments, calls the library, prints.

Commands import the library inside their functions, so that `jprm --help` loads no jax and starts fast. If the library
refuses an input (e.g. a bad record or a missing file), the command prints one `error:` line and exits with status 2.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

import jprm
from jprm.apps import FIRST, Name, StoredAs
from jprm.apps.cli.annotate import annotate
from jprm.apps.cli.arguments import (
    REFUSALS,
    Commands,
    Count,
    Distributed,
    Files,
    Folder,
    Model,
    Number,
    OnError,
    Settings,
    arranging,
    check_judge,
    of_inputs,
    run_of,
    scorer_of,
    with_settings,
)
from jprm.apps.cli.evaluate import add as add_benchmark
from jprm.apps.cli.evaluate import evaluation
from jprm.apps.cli.fleets import UNDIVIDED, Divided, Once, RunFiles, divided, merge
from jprm.apps.cli.label import add as add_labeller
from jprm.apps.cli.label import label
from jprm.apps.cli.plan import plan
from jprm.apps.cli.runs import report, runs, sweep, table
from jprm.apps.cli.search import add as add_method
from jprm.apps.cli.search import fuse, sample, search
from jprm.apps.serve import Served
from jprm.devices import enable_compile_cache, quiet_without_tpu
from jprm.io.jsonl import printable, shortened
from jprm.io.storage import FULL, path_of
from jprm.methods.export import FileDtype, Format
from jprm.methods.judge import is_judge
from jprm.methods.search.growing_tree import METHODS
from jprm.options import assigned

DESCRIPTION = """Train, evaluate and use process reward models: models that score each step of
a reasoning chain.

A first run, from step labels to figures:
  jprm prepare prm800k --input phase1_train.jsonl --output data/prm800k \\
    --set human_written=unlabelled control_questions=drop
  jprm train experiments/prm800k_smollm2.py --workdir runs/prm800k_smollm2
  jprm eval steps --model runs/prm800k_smollm2 --input phase1_test.jsonl --neutral positive

JPRM_TRACEBACK=1 shows the traceback of an error. `jprm --version` prints the version."""

NO_WRITE = {errno.EPIPE, *FULL}
"""Errors of a full output, or one without a reader."""

app = Commands()


@app.command
def prepare(
    name: Annotated[Positional[str], arg(metavar="NAME")],
    input: Annotated[tuple[str, ...], arg(metavar="FILE|URL ...")],
    output: Folder,
    set_: Settings = (),
    split: Annotated[tuple[str, ...], arg(metavar="PART=FRACTION ...", help_behavior_hint="")] = (),
    on_error: OnError = "stop",
    exclude: Files = (),
    duplicates: Literal["keep", "drop"] = "keep",
    overwrite: FlagCreatePairsOff[bool] = False,
    near: Number = None,
    sha256: Annotated[tuple[str, ...], arg(metavar="HEX ...", help_behavior_hint="")] = (),
) -> None:
    """Read step labels from many formats into reasoning trees on disk.

    Prints what was read, kept and rejected, and why. A stopped command leaves no data set. If DIR already holds this
    data set, it is left alone; without --overwrite, any other content is an error.

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
        input: Files to read (JSON Lines, JSON lists, Parquet, Arrow), local or in a bucket; or URLs, which are
            downloaded into `downloads` beside DIR (into ~/.cache/jprm/downloads if DIR is in a bucket).
            hf://datasets/OWNER/NAME[@REVISION]/FILE names a file on the Hugging Face Hub.
        output: Folder to write, local or in a bucket. It must not hold a data set, unless you pass --overwrite.
        exclude: Benchmark files. Records with a problem from them are left out and counted; problems are compared as
            normalised text.
        sha256: Trusted checksums, for downloads whose checksum jprm does not know.
        on_error: Stop at the first bad record, or skip bad records and write them beside the output.
        overwrite: Replace the data set in DIR.
        duplicates: `drop` leaves out and counts records with an earlier record's problem and steps.
        near: With --exclude or --duplicates drop, also match texts whose five-word shingles have at least this Jaccard
            similarity, e.g. 0.8. Needs the extra `near`.
        split: Split by problem, e.g. held_out=0.1 writes a tenth of the problems to DIR/held_out and the rest to
            DIR/train. Equal problems stay together.
        set_: Options of the source, listed in docs/data.md (an unknown name prints all of them). `split=NAME` reads one
            list from a file with several splits.
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
    """Write records as shards of tokens, which training reads without tokenising. Rerun to continue.

    Each process of a run then reads its own shards, from a bucket too. DIR must be new, or of the same request.

    For example:
      jprm tokenise experiments/prm800k_smollm2.py --output gs://BUCKET/tokens/prm800k
      jprm tokenise experiments/pod.py --input data/shepherd --output gs://BUCKET/tokens/shepherd --shard auto/16
      jprm train experiments/pod.py --workdir gs://BUCKET/runs/pod --distributed auto \\
        --set 'data.train=["gs://BUCKET/tokens/prm800k","gs://BUCKET/tokens/shepherd"]' 'data.mixture=[2,1]'

    Args:
        experiment: Experiment file. Its tokenizer, target, data.supervise, data.extras and data.weight determine the
            tokens.
        output: Folder to write, local or in a bucket.
        input: Folders from `jprm prepare`, or JSONL files. Default: data.train of the experiment.
        set_: Values that override the experiment, e.g. data.supervise=outcome.
        files: Number of output files. Default: about 16 million tokens per file.
        workers: Number of tokenising processes. Default: one per core.
        shard: Write files I, I + N, ... (I from 0), as one of N machines. `auto` and `auto/N` read I from the index of
            a Kubernetes, Slurm or Batch job. The last shard to finish completes the folder.
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
        print(f"{left} files belong to other shards; the last shard to finish completes the folder")


@app.command
def train(
    experiment: Annotated[Positional[Path], arg(metavar="EXPERIMENT.py")],
    workdir: Folder,
    set_: Settings = (),
    distributed: Distributed = None,
) -> None:
    """Train the model described by an experiment file. Rerun the command to continue a stopped run.

    SIGTERM makes a run save and exit with status 143. A run may continue on another mesh or number of hosts, or for
    more steps; other settings of the model, data, objective or optimizer are an error. If the loss is not finite, the
    run exits with status 2 and names its last good checkpoint. Prints the last metrics.

    For example:
      jprm train experiments/prm800k_smollm2.py --workdir runs/prm800k_smollm2
      jprm train experiments/prm800k_smollm2.py --workdir runs/short --set steps=20 optimizer.learning_rate=1e-4
      jprm train experiments/prm800k_smollm2.py --workdir gs://BUCKET/runs/pod --distributed auto

    Args:
        experiment: Experiment file, e.g. experiments/prm800k_smollm2.py.
        workdir: Folder for checkpoints, metrics and configuration, local or in a bucket (gs://BUCKET/RUN,
            s3://BUCKET/RUN). If it holds a run, that run continues.
        set_: Values that override the experiment, e.g. optimizer.learning_rate=1e-4.
        distributed: Run as one of several processes; pass it to each. `auto` reads the cluster's environment (Cloud
            TPU, GKE, Slurm, Open MPI); INDEX/COUNT@HOST:PORT names a free port on the host of process 0. DIR must be a
            gs:// bucket or on a shared file system. Default: one process.
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
        print(f"next: jprm {follow_up(workdir)}")


def follow_up(workdir: str | os.PathLike) -> str:
    """Returns the command to suggest after training, without `jprm`: `sample ...` for a policy, `score ...` for a PRM.

    Reads the run's settings; raises FileNotFoundError or ValueError if `workdir` is not a run.
    """
    from jprm.experiment import RUN, read_record
    from jprm.model.heads import find

    trained, log_ratio = read_record(path_of(workdir) / RUN)
    if find(trained.model.head).readout is None and log_ratio is None:
        return f"sample --policy {workdir} --input PROBLEMS.jsonl --output POOLS.jsonl --n 8"
    return f"score --model {workdir} --input FILE.jsonl --output SCORED.jsonl"


@app.command
def score(
    input: Annotated[str, arg(metavar="F.jsonl|DIR")],
    output: Annotated[str, arg(metavar="G.jsonl")],
    model: Model,
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
    """Score every step of the chains, pools and trees in a file. Rerun to continue a stopped command.

    Until it is whole, the output is G.jsonl.part; G.jsonl.info.json describes the request. An output of another request
    is an error, and stays.

    For example:
      jprm score --model runs/prm800k_smollm2 --input examples/tiny_chain.jsonl --output scored.jsonl
      jprm score --model Qwen2.5-Math-PRM-7B --input pool.jsonl --output scored.jsonl
      jprm score --model mine --adapter trl --input pool.jsonl --output scored.jsonl
      jprm score --model qwen2.5-7b --reference qwen2.5-0.5b --input pool.jsonl --output contrast.jsonl
      jprm score --model judge.json --input pool.jsonl --output judged.jsonl
      jprm score --model runs/agent --input trajectory.json --output scored_trajectory.json

    Args:
        model: Folder of a trained or published model, local or in a bucket; or a judge, the JSON file of a policy with
            a section `judge`. A judge's language model writes critiques, and their verdicts are the scores. The output
            stores critiques and cost under `judge`.
        input: Records to score, one per line, or a folder from `jprm prepare`; also ATIF documents. Input and output
            may be in a bucket, e.g. gs://BUCKET/F.jsonl or s3://BUCKET/F.jsonl.
        output: The records in input order, with `scores` in each chain and sample and `score` in each node. An ATIF
            document keeps its bytes, with turn scores added in `extra.jprm` of its steps.
        on_error: Stop at the first bad record, or skip bad and too long records and write them beside the output.
        adapter: Adapter that reads a published model, if its files do not identify it: NAME, F.json, module:NAME or
            FILE.py:NAME.
        reference: A smaller language model with the same tokenizer. A step's score is then the log-probability of the
            steps so far under --model minus that under the reference; neither needs training. Both may be Hugging Face
            folders, GGUF files or hf://OWNER/NAME@REVISION.
        dtype: Storage type of the parameters; int8 takes a quarter of float32's memory, nf4 an eighth. Default: as
            trained; for a published model float32, or bfloat16 on a GPU.
        attention: Attention implementation; all give the same scores. `paths` is the fastest on a CPU, `kernel` needs a
            TPU, `gpu_kernel` an NVIDIA GPU, `blocked` runs anywhere. Default: `gpu_kernel` on a GPU; elsewhere the
            model's own if it runs here, or `blocked` for a published model.
        calibrated: Map scores to probabilities by the map from `jprm eval calibration --store`.
        by: Use another named output of the model as the score, e.g. a classifier label or `low`.
        distributed: Run as one of several processes, as in `jprm train`. Each scores a part on its own devices, which
            must hold the whole model. The output equals a single process's.
    """
    from jprm import multihost
    from jprm.io.outputs import check_input, check_output
    from jprm.methods.data.agents.atif import is_atif
    from jprm.methods.jobs.score import score_atif, score_file
    from jprm.score.scorer import CHUNK, PRM, Speed
    from jprm.tree import read_records, read_trees

    options = {"dtype": dtype, "adapter": adapter, "attention": attention, "reference": reference}
    check_judge(model, options | {"calibrated": calibrated, "by": by, "distributed": distributed})
    if not how.here and distributed:
        raise ValueError("score: give --shard or --engine (separate jobs), or --distributed (hosts of one job)")
    if distributed:
        multihost.start(distributed)
    scorer = Once(lambda: scorer_of(model, **options))

    if Path(output).suffix in (".csv", ".tsv", ".parquet", ".xlsx", ".gz"):
        raise ValueError(f"{output}: the output format is JSON Lines. Name a .jsonl file; DuckDB and pandas read it")

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
        if not is_judge(model) and multihost.is_first():
            print(prm.read_as, file=sys.stderr)
        if atif:
            if on_error != "stop":
                raise ValueError(f"{source}: ATIF documents are scored all or none. Leave out --on-error skip")
            summary = score_atif(prm, source, part.output, calibrated=calibrated, speed=speed)
        else:
            options = {"on_error": on_error, "calibrated": calibrated, "speed": speed}
            summary = score_file(prm, source, part.output, **options)
        if multihost.is_first():
            print(summary)
        if not is_judge(model):
            return {"tokens": speed.tokens}
        from jprm.methods.judge.critiques import cost
        from jprm.methods.judge.judge import missing_of

        judged = f"{part.output}.turns.jsonl" if atif else part.output
        spent = cost(read_records(judged))
        print("critiques: " + ", ".join(f"{name}: {count}" for name, count in spent.items() if name != "sent"))
        steps = sum(len(tree.steps) for tree in read_trees(judged))
        print(f"sent: {spent['sent']:,} characters, {spent['sent'] / max(steps, 1):,.0f} per turn or step")
        if missing := [len(turns) for record in read_records(judged) if (turns := missing_of(record))]:
            print(f"incomplete: {sum(missing)} turns in {len(missing)} runs have no score. The same command asks again")
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
    """Write a trained model as a folder for transformers, vLLM or PEFT, with equal logits.

    The same command continues a stopped one, and checks a finished folder against its SHA256SUMS. Another folder at
    DST is an error.

    For example:
      jprm convert runs/prm800k_smollm2 exported/prm800k_smollm2
      jprm convert runs/lora exported/adapters --format peft
      jprm convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2
      jprm convert runs/prm800k_smollm2 exported/prm800k_smollm2 --push ana/prm800k-smollm2 --dry-run

    Args:
        source: Folder of a trained model, local or in a bucket; or a language model as a GGUF file or Hugging Face
            folder.
        target: Folder to write, local or in a bucket. A stopped command leaves DST.partial and later continues it; DST
            itself is always complete.
        dtype: Number type in the files. The model itself has float32.
        format: transformers: a token classifier with merged adapters, which vLLM also serves; for a policy, a causal
            language model. qwen2-prm: the format of Qwen2.5-Math-PRM, for Qwen2 models. peft: the adapters and head of
            a LoRA run.
        push: Then upload DST and its card to this Hugging Face Hub model, e.g. ana/prm800k. A missing model is created
            as private. The token comes from `hf auth login` or HF_TOKEN.
        dry_run: With --push: only print the files that would be uploaded.
    """
    from jprm.methods.export.export import export
    from jprm.methods.formats import hub

    if push:
        hub.check_push(push, dry_run)
    elif dry_run:
        raise ValueError("--dry-run needs --push OWNER/NAME")
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
    """Train a policy on its own samples, with a verifier and a PRM. Rerun to continue a stopped run.

    Each update samples chains for some problems, judges them by the verifier and the PRM, assigns credit to every
    token, and steps. Evaluations on held-out problems show accuracy beside the PRM score. If the score rises while
    accuracy falls, the policy is gaming the PRM: the run ends and restores the best parameters.

    DIR is then a policy for `jprm search --policy DIR`. DIR/best is the policy of the best evaluation, DIR/rl.json
    holds the verdict and all figures, and `jprm report DIR --output PAGE.html` shows them.

    For example:
      jprm rl experiments/quickstart/rl.py --workdir runs/rl
      jprm rl experiments/quickstart/rl.py --workdir runs/sum --set credit.name=sum_prm_alone credit.offset=0
      jprm rl experiments/quickstart/rl.py --workdir runs/rft --set method=rejection
      jprm rl experiments/pod.py --workdir gs://BUCKET/runs/rl --distributed auto
      jprm rl experiments/pod.py --workdir gs://BUCKET/runs/rl --set stale=1 sampling_hosts=4 --distributed auto

    Args:
        experiment: File whose function experiment() returns a jprm.methods.rl.config.RLExperiment.
        workdir: Folder for checkpoints, metrics and configuration, local or in a bucket. If it holds a run, that run
            continues.
        set_: Values that override the experiment, e.g. credit.offset=0.
        distributed: Run as one of several processes, as in `jprm train`. Each samples and judges a part of the problems
            on its own devices, which must hold the policy and the PRMs beside a part of the learner. With
            sampling_hosts, the last processes sample and judge while the others learn.
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


def serve(config: Annotated[Served, arg(name="")] = SERVED, set_: Annotated[Settings, FIRST] = ()) -> None:
    """Score over HTTP: /v1/score, /v1/rewards, /v1/rerank, /v1/continue, /v1/chat/completions by search, and more.

    If the environment variable JPRM_API_KEY is set, clients must send `Authorization: Bearer KEY`. On SIGTERM the
    server answers the requests it has accepted, then exits.

    For example:
      jprm serve runs/prm800k_smollm2
      curl localhost:8000/v1/score --json '{"problem": "What is 2 + 2?", "response": "2 + 2 = 4. So it is 4."}'
      jprm serve runs/prm800k_smollm2 judge.json --set items=8192 queue_seconds=60

    Args:
        set_: Limits and other settings: weights=split, a part of the parameters on each device rather than a copy, for
            a model that is too large for one; prefix_tokens=4096 tokens whose keys and values are kept
            (`prompt_cache_key`; 0: none); of a request, items=4096 texts, steps, nodes and samples, critiques=1024 of
            a judge, body_bytes=8388608, body_seconds=30 to arrive and answer_seconds=120 to be answered;
            queue_seconds=30 of waiting work, after which requests get 503.
    """
    from jprm.apps.serve.app import serve

    serve(*with_settings(set_, config))


app.command(
    evaluations := evaluation(),
    name="eval",
    help=f"Evaluate a model or a data set: {', '.join(evaluations.registered)}.\n\nFor example:\n"
    "  jprm eval steps --model runs/prm --input phase1_test.jsonl --neutral positive\n"
    "  jprm eval best-of-n --model runs/prm --input pool.jsonl --output best_of_n.json",
)
for _command in (merge, report, runs, table, sweep, serve, plan, rl):
    app.command(_command)
app.command(
    label,
    name="label",
    help="Label steps without humans: mc (Monte Carlo), omega (OmegaPRM), verify (checks), outcomes, teacher, judge,"
    " consensus; reference, a frozen model's log-probabilities; and critique, training data for generative verifiers."
    "\n\nFor example:\n  jprm label verify --kind arithmetic --input chains.jsonl --output checked.jsonl\n"
    "  jprm label teacher --model runs/prm --input chains.jsonl --output soft.jsonl",
)
app.command(
    annotate,
    name="annotate",
    help="Label steps by humans: select chains, serve the page, report label quality, export.\n\n"
    "For example:\n  jprm annotate serve studies/one --input queue.jsonl --annotators ana ben",
)
app.command(
    fuse,
    name="fuse",
    help="Fit a verifier that combines evidence from several sources.\n\nFor example:\n"
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


OWN = {"search": add_method, "eval": functools.partial(add_benchmark, evaluations), "label": add_labeller}
"""Functions that register a command from the user's code, e.g. for `jprm search FILE.py:NAME`, by group."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command (`argv`, by default the process's arguments) and returns the exit status.

    No arguments: `--help`. The status is 0; 2 if the library refuses an input, the user's Python file fails or an extra
    is missing (one line on stderr); 130 after Ctrl-C; 141 if standard output is closed. `--help` and errors that the
    option parser finds raise SystemExit; so does a run that SIGTERM stopped (143). Other errors are bugs, and raised;
    with JPRM_TRACEBACK=1 refusals are raised too.
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
                group, name, *_ = (*args, "")
                if group in OWN and ":" in name:
                    OWN[group](name)
                helps = {"-h", "--help"} & set(args)
                with arranging(app.chosen(args)) if helps else contextlib.nullcontext():
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
    """Returns FILE:LINE if the error was raised in one of the user's own `files`, else `None`.

    Only the innermost frame counts: an error raised in a library that a user's file called gives `None`. A syntax
    error counts for the file that has it.
    """
    file_of_path = {os.path.realpath(file): file for file in files}
    if isinstance(error, SyntaxError) and os.path.realpath(error.filename or "") in file_of_path:
        return f"{error.filename}:{error.lineno}"
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    file = os.path.realpath(last.tb_frame.f_code.co_filename) if last is not None else ""
    return f"{file_of_path[file]}:{last.tb_lineno}" if last is not None and file in file_of_path else None


HALF_PAIRS = re.compile("[\ud800-\udfff]")
"""Surrogates, by which Python represents argument bytes that are not UTF-8."""

ADDRESS = re.compile(r"(gs|gcs|s3|az|abfss?|hf)://")

FIELDS_IN_BUCKETS = (
    "base", "reference", "tokenizer", "data.train", "data.valid", "policy", "prm", "second_prm", "problems", "held_out",
    "refresh.replay",
)  # fmt: skip
"""Experiment fields whose value may be a bucket address."""


def _check_addresses(args: Sequence[str]) -> None:
    """Raises ValueError if code or an annotation study, which must be local, is given as a bucket address."""
    for word in filter(ADDRESS.search, args):
        field, code = re.match(r"([\w.]+)=", word), re.search(r"\.py(:\w+)?$", word)
        if code or args[0] == "annotate" or (field and field[1] not in FIELDS_IN_BUCKETS):
            raise ValueError(
                f"{word}: must be a local file or folder; docs/guide.md lists the options that take a bucket. Copy it"
                " here first"
            )


def _lost_output() -> OSError | None:
    """Returns the error if standard output is full or closed (e.g. `jprm --help | head`).

    Redirects later output to the null device, so that the interpreter does not complain on exit.
    """
    try:
        print(flush=True)
        return None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error.filename = "standard output"
        return error


def _line(error: BaseException) -> str:
    """Returns the message as one line of bounded length; control characters, which terminals obey, are escaped."""
    text = " ".join(of_inputs(str(error)).split())
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return printable(shortened(text, 2000) or type(error).__name__).replace("\n", r"\n")


def extra_hint(error: ModuleNotFoundError) -> str | None:
    """Returns a message with the pip command for the missing package if an extra of jprm has it, else `None`."""
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

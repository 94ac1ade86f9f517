"""The whole loop on a laptop, with nothing downloaded: policy, samples, labels, reward models, search, and a verdict.

    python -m experiments.quickstart.run --seed 0 --out runs/quickstart
    python -m experiments.quickstart.seeds runs/quickstart_0 runs/quickstart_1 runs/quickstart_2

A policy learns word problems (`task.py`) from solutions whose authors have habits of error. It is sampled; its steps
are labelled by rollouts and by a formal checker; two process reward models and an outcome reward model are trained on
the same chains for the same tokens; and on problems that none of them has seen, the ways of using them are compared.

Everything is measured in the run, from the seed; a stage whose output is there is not run again. A run repeats bit for
bit on CPUs of one kind, however many cores they have. README.md has the figures of three seeds, and says how the task
and the habits were chosen.
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console

from experiments.quickstart import judge, models, task
from jprm.io.jsonl import write_records
from jprm.io.outputs import Bar
from jprm.methods.label.config import MonteCarloConfig
from jprm.methods.label.monte_carlo import Rollouts, label_trees
from jprm.methods.policy.protocol import Prefix, Sample
from jprm.methods.policy.sampler import Sampler, SamplerConfig, load_sampler
from jprm.train import Stopped, train
from jprm.tree import read_records, record_of, tree_of

SOLUTIONS = 9_000
"""Worked solutions that the policy sees once: about 70 tokens each, 0.6 M."""

LABELLED, LABELLED_SAMPLES, ROLLOUTS = 2_400, 2, 4
"""Problems whose samples are labelled, samples of each, and rollouts of every prefix. Many stories and few samples of
each: a reward model learns by heart what is right in 400 stories."""

TESTED, TESTED_SAMPLES = 200, 64

TEMPERATURE = 0.7
"""Of all samples. At 1 a policy so small makes every rare slip somewhere in 64 samples."""

REACHES_ANSWER = "experiments.quickstart.task:reaches_answer"
"""The verifier of completions, by the name that the rollouts' file keeps."""

console = Console()


class Stages:
    """Prints a line when a stage of a run begins, and measures it; a run that continues adds to the file's figures.

    `report` has (seconds, CPU seconds of all threads, peak memory in GB so far) by stage. On idle cores a stage takes
    at least its CPU seconds divided by the cores.
    """

    def __init__(self, file: pathlib.Path):
        self.file, self._name, self._since = file, "", (0.0, 0.0)
        self.report: dict[str, tuple[float, ...]] = json.loads(file.read_text()) if file.is_file() else {}

    def begin(self, name: str) -> None:
        self.end()
        so_far = sum(seconds for seconds, *_ in self.report.values())
        console.print(f"{so_far:5.0f} s  {name}", highlight=False)
        self._name, self._since = name, (time.perf_counter(), time.process_time())

    def end(self) -> None:
        if not self._name:
            return
        seconds, cpu_seconds, peak = self.report.get(self._name, (0.0, 0.0, 0.0))
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)
        seconds += time.perf_counter() - self._since[0]
        cpu_seconds += time.process_time() - self._since[1]
        self.report[self._name] = round(seconds, 1), round(cpu_seconds, 1), round(max(peak, used), 2)
        self._name = ""
        self.file.write_text(json.dumps(self.report, indent=2) + "\n")

    def totals(self) -> dict[str, Any]:
        """Returns the entries of results.json: seconds, CPU seconds, peak memory, and the stages."""
        self.end()
        seconds, cpu_seconds, peak = zip(*self.report.values(), strict=True)
        totals = {"seconds": sum(seconds), "cpu_seconds": sum(cpu_seconds), "peak_gb": max(peak)}
        return {name: round(value, 2) for name, value in totals.items()} | {"stages": self.report}


def main(out: pathlib.Path = pathlib.Path("runs/quickstart"), seed: int = 0) -> None:
    """Run the quickstart.

    Args:
        out: The folder for everything that is made; a run that was stopped continues in it.
        seed: Of the problems, the solutions, the training and the samples.
    """
    out.mkdir(parents=True, exist_ok=True)
    check_seed(out, seed)
    stages = Stages(out / "stages.json")
    stages.begin("authors with habits of error solve problems")
    vocabulary = make_data(out, seed, task, {"test_problems": TESTED, "problems": LABELLED, "solutions": SOLUTIONS})
    stages.begin("a policy learns from their solutions")
    if not (out / "policy/result.json").is_file():
        train(models.policy(out, vocabulary, seed), out / "policy")
    policy = load_sampler(out / "policy", SamplerConfig(temperature=TEMPERATURE, max_tokens=128, rows=512))
    stages.begin(f"it solves {LABELLED + TESTED} more problems")
    sample_pools(policy, out / "problems.jsonl", out / "pools.jsonl", LABELLED_SAMPLES, seed, pool)
    sample_pools(policy, out / "test_problems.jsonl", out / "test_pools.jsonl", TESTED_SAMPLES, seed, pool)
    stages.begin(f"labels: a formal checker, and {ROLLOUTS} rollouts of every prefix")
    label(policy, out, seed, task, REACHES_ANSWER)
    for labels, named in judge.NAMED.items():
        stages.begin(f"a reward model learns: {named}")
        if not (out / labels / "result.json").is_file():
            train(models.reward(out, vocabulary, labels, seed), out / labels)
    results = judge.judge(policy, out, seed, stages.begin)
    results |= stages.totals() | {"seed": seed}
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    judge.show(console, results)
    minutes, cpu = results["seconds"] / 60, results["cpu_seconds"] / 60
    console.print(f"{minutes:.1f} minutes ({cpu:.1f} of CPU), {results['peak_gb']:.1f} GB at most. In {out}:")
    console.print("  report.html: the page\n  results.json: every figure")


def check_seed(out: pathlib.Path, seed: int) -> None:
    """Raises SystemExit where the folder holds a run of another seed, whose outputs would be taken for this one's."""
    file = out / "seed.json"
    if file.is_file() and (stored := json.loads(file.read_text())) != seed:
        sys.exit(f"{out}: holds a run of seed {stored}, not {seed}: name another --out")
    file.write_text(f"{seed}\n")


def make_data(out: pathlib.Path, seed: int, world: ModuleType, counts: dict[str, int]) -> int:
    """Writes a world's tokenizer and files of so many problems; returns the size of the vocabulary.

    `solutions` are worked by authors with habits. No problem is in two files.
    """
    tokenizer = world.tokenizer()
    (out / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(out / "tokenizer/tokenizer.json"))
    (out / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "<eos>"}\n')
    rng = np.random.default_rng(seed)
    seen = set()
    for name, count in counts.items():
        records = []
        while len(records) < count:
            problem = world.problem(rng)
            if problem.text in seen:
                continue
            seen.add(problem.text)
            worked = {"steps": world.solution(problem, rng, world.Habits())} if name == "solutions" else {}
            records.append(world.record(problem, rng) | worked)
        if not (out / f"{name}.jsonl").is_file():
            write_records(out / f"{name}.jsonl", records)
    return tokenizer.get_vocab_size()


def sample_pools(
    policy: Sampler,
    problems: pathlib.Path,
    pools: pathlib.Path,
    count: int,
    seed: int,
    pool: Callable[[dict, list[Sample]], dict],
) -> None:
    """Samples every problem `count` times, and writes the pools that `pool` makes of its record and samples."""
    if pools.is_file():
        return
    records = problems_of(problems)
    drawn = policy.sample([Prefix(record["problem"]) for record in records], count, until="end", seed=seed)
    write_records(pools, (pool(record, samples) for record, samples in zip(records, drawn, strict=True)))


def problems_of(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def pool(record: dict, samples: list[Sample]) -> dict:
    """Returns a pool record. A sample that was cut off has no answer."""

    def entry(sample: Sample) -> dict:
        answer = task.answer_of(sample.steps) if sample.finish_reason == "stop" else None
        correct = answer == record["answer"]
        return {"steps": list(sample.steps), "answer": answer, "correct": correct, "tokens": sample.tokens}

    whole = [entry(sample) for sample in samples if sample.steps]
    return {"problem": record["problem"], "answer": record["answer"], "samples": whole}


def label(policy: Sampler, out: pathlib.Path, seed: int, world: ModuleType, verifier: str) -> None:
    """Writes the labelled samples twice: labels of the world's checker, and values by rollouts."""
    pools = list(read_records(out / "pools.jsonl"))
    if not (out / "formal.jsonl").is_file():
        write_records(out / "formal.jsonl", (formally_labelled(record, world) for record in pools))
    if (out / "monte_carlo.jsonl").is_file():
        return
    with (
        Rollouts(policy, out / "rollouts.jsonl", batch=4096) as rollouts,
        Bar("problems labelled by rollouts", len(pools)) as bar,
    ):
        config = MonteCarloConfig(estimate="soft", k=ROLLOUTS, seed=seed, trees_at_once=50, verifier=verifier)
        trees = label_trees(map(tree_of, pools), rollouts, config)
        write_records(out / "monte_carlo.jsonl", map(record_of, bar.follow(trees)))


def formally_labelled(record: dict, world: ModuleType) -> dict:
    problem = world.parse(record["problem"])
    samples = [sample | {"labels": world.labels(problem, sample["steps"])} for sample in record["samples"]]
    return record | {"samples": samples}


if __name__ == "__main__":
    os.environ.setdefault("NPROC", "2")  # XLA's threads: they share sums, so their number changes the last digits
    jax.config.update("jax_platforms", "cpu")  # its models are made for one; updates of 4 rows suit no more devices
    try:
        tyro.cli(main)
    except Stopped as stopped:  # SIGTERM during a training
        sys.exit(str(stopped))

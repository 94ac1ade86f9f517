"""What a base stored in fewer bits costs and saves: LoRA's memory and speed, and scores beside float32's.

    python -m experiments.bench.base_dtypes train MODEL.gguf PREPARED [--dtype gguf ...] [--tokens 512] [--steps 3]
    python -m experiments.bench.base_dtypes probe MODEL.gguf PREPARED --run RUN [--tokens 1024]
    python -m experiments.bench.base_dtypes scores RUN PROCESSBENCH.json [--dtype float32 ...] [--chains 60]

`train` takes steps of LoRA (rank 16) and head on rows of what `jprm prepare` wrote, computed in bfloat16, each type in
a process of its own, and prints the peak of its resident memory. `probe` makes a PRM in minutes: a head that is fitted
on 12 rows of the first half of the layers, which stay in the file's blocks. `scores` scores chains of ProcessBench by a
run, which is stored in each type, and prints the AUROC of right steps against the first wrong one, the distance of
scores from float32's, and how many steps change sides at 0.5. Each type's scores are kept beside the run.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys
import time


def peak_mib() -> float:
    """Returns the most memory that was resident in this process."""
    line = re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert line
    return int(line[1]) / 1024


def experiment(model: str, prepared: str, dtype: str, tokens: int, steps: int, probe: bool = False):
    from jprm.checkpoints import base
    from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
    from jprm.model.parameters import LoraConfig

    return Experiment(
        name="base_dtypes",
        base=model,
        base_dtype=dtype,  # pyright: ignore[reportArgumentType]
        tokenizer=model,
        model=base.model_config(
            model,
            dtype="float32" if probe else "bfloat16",
            attention="paths" if probe else "blocked",
            remat="full",
            **({"layers": base.model_config(model).layers // 2} if probe else {}),
        ),
        data=DataConfig(
            train=(prepared,),
            supervise="step",
            too_long="truncate",
            tokens=tokens,
            slots=tokens // 8,
            rows=1,
            window=16,
        ),  # fmt: skip
        target=TargetConfig(labels="rating", neutral="positive", after_error="keep"),
        objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=1, freeze="^decoder/" if probe else ""),
        lora=LoraConfig(rank=0 if probe else 16),
        probe_rows=12 if probe else 0,
        steps=steps,
    )


def train(arguments: argparse.Namespace) -> None:
    if len(arguments.dtype) > 1:
        for dtype in arguments.dtype:
            options = ["--dtype", dtype, "--tokens", str(arguments.tokens), "--steps", str(arguments.steps)]
            subprocess.run([sys.executable, __file__, "train", arguments.model, arguments.data, *options], check=False)
        return
    import jax

    from jprm.train import Trainer

    (dtype,) = arguments.dtype
    began, parts = time.perf_counter(), {"imports": peak_mib()}
    with Trainer(experiment(arguments.model, arguments.data, dtype, arguments.tokens, arguments.steps)) as trainer:
        jax.block_until_ready(trainer.state)
        parts["loaded"], loaded = peak_mib(), time.perf_counter() - began
        size = {
            name: sum(x.nbytes for x in jax.tree.leaves(part)) / 2**20
            for name, part in {"base": trainer.state.frozen, "trained": trainer.state.trained}.items()
        }
        losses, seconds = [], []
        for _ in range(arguments.steps):
            rows, start = next(trainer.batches), time.perf_counter()
            losses.append(trainer.step(rows).means()["loss"])
            seconds.append(round(time.perf_counter() - start, 1))
    figures = {"dtype": dtype, "tokens": arguments.tokens, "losses": losses, "seconds": seconds, "load_seconds": loaded,
               "mib": size, "peak_mib": {**parts, "trained": peak_mib()}}  # fmt: skip
    print(json.dumps(figures), flush=True)


def probe(arguments: argparse.Namespace) -> None:
    from jprm.train import train

    train(experiment(arguments.model, arguments.data, "gguf", arguments.tokens, 1, probe=True), arguments.run)


def scores(arguments: argparse.Namespace) -> None:
    import numpy as np

    import jprm
    from jprm.statistics import auroc

    run = pathlib.Path(arguments.model)
    chains = json.loads(pathlib.Path(arguments.data).read_text())[: arguments.chains]
    read_scores: dict[str, np.ndarray] = {}
    for dtype in arguments.dtype:
        kept = run / f"scores_{dtype}_{len(chains)}.json"
        if not kept.exists():
            prm = jprm.load(run, dtype=dtype)
            every = [prm.score(chain["problem"], chain["steps"]).tolist() for chain in chains]
            kept.write_text(json.dumps(every))
        read_scores[dtype] = np.concatenate([np.asarray(x) for x in json.loads(kept.read_text())])
    right, counts = [], []
    for chain in chains:
        count, first = len(chain["steps"]), chain["label"]
        last = count if first < 0 else first + 1
        right += [i != first for i in range(count)]
        counts += [i < last for i in range(count)]
    right_N, counts_N = np.array(right), np.array(counts)
    exact_N = read_scores[arguments.dtype[0]]
    for dtype, score_N in read_scores.items():
        off_N = np.abs(score_N - exact_N)
        print(json.dumps({
            "dtype": dtype, "steps": int(counts_N.sum()), "auroc": float(auroc(score_N[counts_N], right_N[counts_N])),
            "mean_off": float(off_N.mean()), "largest_off": float(off_N.max()),
            "other_side": int(((score_N > 0.5) != (exact_N > 0.5)).sum()), "of": len(score_N),
        }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "probe", "scores"))
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--dtype", nargs="+")
    parser.add_argument("--run")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--chains", type=int, default=60)
    arguments = parser.parse_args()
    if arguments.what == "train":
        arguments.dtype = arguments.dtype or ["gguf", "nf4", "int8", "bfloat16", "float32"]
        train(arguments)
    elif arguments.what == "probe":
        probe(arguments)
    else:
        arguments.dtype = arguments.dtype or ["float32", "bfloat16", "int8", "nf4"]
        scores(arguments)


if __name__ == "__main__":
    main()

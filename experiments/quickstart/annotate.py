"""The loop of human labels, with simulated annotators: score, select, label, report, export, prepare, train.

It uses the policy and the problems of `make quickstart`, whose checker knows every label. Annotators err on a step with
a known probability, so that the report can be compared with the truth. Each labels through the application that
`jprm annotate serve` serves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import time

import httpx2
import jax
import numpy as np
import rich.console
import tyro

import jprm
from experiments.quickstart import models, task
from jprm.apps.annotate import SelectConfig, StudyConfig, study
from jprm.apps.annotate.app import make_app
from jprm.apps.annotate.quality import export, figures, tables, tasks_of
from jprm.apps.annotate.study import select_file
from jprm.apps.web import Listen
from jprm.experiment import TargetConfig
from jprm.io.jsonl import write_records
from jprm.methods.data.prepare import prepare
from jprm.methods.evaluate.blocks import show
from jprm.methods.jobs.score import score_file
from jprm.statistics import auroc
from jprm.train import train
from jprm.tree import read_records

ERRORS = {"ana": 0.01, "ben": 0.05, "eve": 0.6}
"""How often each annotator mislabels a step. Screening is to stop the last."""

COUNT, STEPS = 300, 120
"""Chains to label, and updates of the training."""


def known(chain: dict) -> dict:
    labels = task.labels(task.parse(chain["problem"]), chain["steps"])
    return {"problem": chain["problem"], "steps": chain["steps"], "labels": labels}


async def annotate(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Every annotator rates chains until there is none left for them."""
    annotation = study.read(folder)
    with study.open_log(annotation.events) as events:
        transport = httpx2.ASGITransport(make_app(annotation, events, Listen()))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            count, left = 0, list(annotation.config.annotators)

            async def post(name: str, path: str, **body) -> dict:
                answer = await client.post(f"/v1/annotators/{name}/{path}", json=body)
                answer.raise_for_status()
                return answer.json()

            while left:  # they take turns
                for name in list(left):
                    tasks = (await post(name, "next"))["tasks"]
                    if not tasks:
                        left.remove(name)
                        continue
                    shown, wrong = tasks[0], False
                    for step, label in enumerate(known(shown)["labels"]):
                        wrong = (label < 0.5) != (rng.random() < ERRORS[name])
                        count += 1
                        event = {"uuid": f"event-{count:08}", "task": shown["task"], "seconds": 1.0}
                        await post(name, "events", kind="rate", step=step, rating=-1 if wrong else 1, **event)
                        if wrong:
                            break
                    count += 1
                    event = {"uuid": f"event-{count:08}", "task": shown["task"], "seconds": 0.0}
                    await post(name, "events", kind="finish", reason="found_error" if wrong else "solution", **event)


def area(file: pathlib.Path) -> float:
    """Returns the AUROC of the scores of all steps of a scored file of pools, by the checker's labels."""
    scores, truth = [], []
    for pool in read_records(file):
        for sample in pool["samples"]:
            scores += sample["scores"]
            truth += task.labels(task.parse(pool["problem"]), sample["steps"])
    return float(auroc(np.array(scores), np.array(truth) > 0.5))


def main(quickstart: pathlib.Path = pathlib.Path("runs/quickstart"),
         out: pathlib.Path = pathlib.Path("runs/annotate_demo")) -> None:  # fmt: skip
    """Run the loop once.

    Args:
        quickstart: The finished quickstart.
        out: A folder that is not there yet.
    """
    began = time.perf_counter()
    out.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pools = list(read_records(quickstart / "pools.jsonl"))
    test = [pool | {"samples": pool["samples"][:8]} for pool in read_records(quickstart / "test_pools.jsonl")]
    write_records(out / "pools.jsonl", pools[20:])
    write_records(out / "test.jsonl", test)
    measured = [known({"problem": pool["problem"], **sample}) for pool in pools[:20] for sample in pool["samples"][:3]]
    write_records(out / "screening.jsonl", measured[:10])
    write_records(out / "gold.jsonl", measured[10:])

    print("score with the outcome model, which needs no label of a step, and select")
    outcome = jprm.load(quickstart / "outcome")
    for name in ("pools", "test"):
        score_file(outcome, out / f"{name}.jsonl", out / f"{name}_by_outcome.jsonl")
    exclude = [quickstart / "test_problems.jsonl"]
    print(select_file(out / "pools_by_outcome.jsonl", out / "queue.jsonl", SelectConfig(COUNT), exclude))

    print("label")
    config = StudyConfig(tuple(ERRORS), pass_screening=0.7)
    study.create(out / "study", out / "queue.jsonl", config, gold=out / "gold.jsonl", screening=out / "screening.jsonl")
    asyncio.run(annotate(out / "study", rng))
    report = figures(tasks_of(out / "study"))
    show(tables(report), rich.console.Console(width=110))

    print("export, prepare, train")
    print(export(out / "study", out / "labelled.jsonl", disagreements="cut"))
    prepare("jsonl", [out / "labelled.jsonl"], out / "prepared", exclude=exclude)
    like = models.reward(quickstart, task.tokenizer().get_vocab_size(), "formal", 0)
    data = dataclasses.replace(like.data, train=(str(out / "prepared"),))
    target = TargetConfig(labels="rating", neutral="drop", after_error="keep")
    train(dataclasses.replace(like, name="annotated", data=data, target=target, steps=STEPS, checkpoint_every=STEPS),
          out / "prm")  # fmt: skip

    print("score and select again")
    prm = jprm.load(out / "prm")
    for name in ("pools", "test"):
        score_file(prm, out / f"{name}.jsonl", out / f"{name}_by_prm.jsonl")
    print(select_file(out / "pools_by_prm.jsonl", out / "queue_2.jsonl", SelectConfig(COUNT, seed=1), exclude))
    results = {
        "auroc_outcome_model": area(out / "test_by_outcome.jsonl"),
        "auroc_trained_on_labels": area(out / "test_by_prm.jsonl"),
        "report": report,
        "seconds": round(time.perf_counter() - began, 1),
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print({key: value for key, value in results.items() if key != "report"})


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # as the quickstart's models
    tyro.cli(main)

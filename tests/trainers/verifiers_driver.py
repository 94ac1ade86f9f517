# type: ignore  # its imports are in another environment
"""A task with the mixin, scored by verifiers on a trace with token ids and on one without. Prints JSON."""

import asyncio
import importlib.util
import json
import sys

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import AssistantMessage, UserMessage


def main(adapter, folder):
    spec = importlib.util.spec_from_file_location("adapter", adapter)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Sums(module.StepRewards, vf.Task[vf.TaskData]):
        pass

    results = []
    for sample in json.load(sys.stdin):
        for with_ids in (True, False):
            task = Sums(vf.TaskData(prompt=sample["problem"]))
            ids = [1, *sample["ids"]] if with_ids else []
            nodes = [
                MessageNode(parent=None, message=UserMessage(content=sample["problem"])),
                MessageNode(
                    parent=0, message=AssistantMessage(content=sample["text"]), sampled=True, token_ids=ids,
                    mask=[False] + [True] * len(sample["ids"]) if ids else [],
                ),
            ]  # fmt: skip
            trace = vf.Trace(
                task=vf.TraceTask(type="Sums", data=task.data), agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes
            )
            asyncio.run(task.score(trace))
            results.append({"reward": trace.reward, "metrics": trace.metrics, "info": trace.info["step_rewards"]})
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

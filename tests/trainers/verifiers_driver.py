# type: ignore  # its imports are in another environment
"""A task with the mixin, scored by verifiers on a trace with token ids and on one without."""

import asyncio

import verifiers.v1 as vf
from run import loaded
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import AssistantMessage, UserMessage


def main(adapter, folder, samples):
    module = loaded(adapter)

    class Sums(module.StepRewards, vf.Task[vf.TaskData]):
        pass

    results = []
    for sample in samples:
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
    return results

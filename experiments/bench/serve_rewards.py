"""Dense rewards by one request a problem, beside one request for every step: SmolLM2-135M in float32.

    python -m experiments.bench.serve_rewards [--data ../shared/data] [--problems 4] [--samples 8]

Both sides reward the same samples of GSM8K through the whole application, without a socket. `dense` is one /v1/rewards
with all samples of a problem. The others are what a client does that has one score a request, /v1/score with the
beginning of a sample up to each of its steps: `at_once` sends all requests of a problem together, which the server
merges as far as it can, and `in_turn` one after another. Scores are compared. The sides are measured in turns;
compilation is left out.

The last line is one JSON object: of each side requests, computed tokens without and with padding, and samples, steps
and requests a second.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import pathlib
import time
from typing import Any

import httpx2 as httpx
import tyro

from experiments.bench import yardsticks
from experiments.bench.score_speed import made_up_prm
from experiments.bench.serve_load import LONGEST, chains_of_pool
from jprm.apps.serve import ServeConfig
from jprm.apps.serve.app import make_app
from jprm.apps.serve.engine import Engine
from jprm.tree import read_records, tree_of

SIDES = ("dense", "at_once", "in_turn")


def main(
    data: pathlib.Path = yardsticks.REPOSITORY.parent / "shared" / "data", problems: int = 4, samples: int = 8
) -> None:
    """Measure rewards of the samples of some problems.

    Args:
        data: The folder that holds pools/.
        problems: Problems, each measured by both sides.
        samples: Samples of each problem.
    """
    prm = made_up_prm()
    prm.warm_up(8192)  # of all rows: an engine that does not compile ahead takes any
    engine = Engine(prm, LONGEST, "model")
    app = make_app([engine], ServeConfig(longest=LONGEST, queue_seconds=1e9, answer_seconds=1e9))
    pools = [tree_of(r) for r in itertools.islice(read_records(data / "pools/gsm8k_chatgpt_n19.jsonl"), problems)]
    total: dict[str, dict[str, float]] = {side: dict(requests=0, tokens=0, cells=0, seconds=0.0) for side in SIDES}
    count, steps, gap = 0, 0, 0.0

    async def send(path: str, bodies: list[dict], together: bool) -> list[dict[str, Any]]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
            if together:
                answers = await asyncio.gather(*(client.post(path, json=body) for body in bodies))
            else:
                answers = [await client.post(path, json=body) for body in bodies]
        for answer in answers:
            answer.raise_for_status()
        return [answer.json() for answer in answers]

    def timed(side: str, path: str, bodies: list[dict]) -> list[dict[str, Any]]:
        prm.counts.clear()
        began = time.perf_counter()
        answers = asyncio.run(send(path, bodies, side != "in_turn"))
        total[side]["seconds"] += time.perf_counter() - began
        total[side]["requests"] += len(bodies)
        total[side]["tokens"] += prm.counts["tokens"]
        total[side]["cells"] += prm.counts["cells"]
        return answers

    for number, pool in enumerate(pools):
        chains = [[node.text for node in tree.nodes] for tree in chains_of_pool(pool, prm)[:samples]]
        texts = [{"problem": pool.problem, "response": "\n".join(chain), "segmentation": "lines"} for chain in chains]
        prefixes = [
            {"problem": pool.problem, "steps": c[: k + 1], "rule": "last"} for c in chains for k in range(len(c))
        ]
        sides = [("dense", "/v1/rewards", [{"credit": "min_form", "samples": texts}])]
        sides += [("at_once", "/v1/score", prefixes), ("in_turn", "/v1/score", prefixes)]
        got = {side: timed(side, path, bodies) for side, path, bodies in (sides if number % 2 else sides[::-1])}
        dense = [step["score"] for sample in got["dense"][0]["samples"] for step in sample["steps"]]
        single = [answer["chains"][0]["score"] for answer in got["in_turn"]]
        gap = max(gap, *(abs(a - b) for a, b in zip(dense, single, strict=True)))
        count, steps = count + len(chains), steps + len(single)
    engine.close()
    for side in total.values():
        counts = {"samples": count, "steps": steps, "requests": side["requests"]}
        side |= {f"{what}_per_second": number / side["seconds"] for what, number in counts.items()}
    print(json.dumps({"samples": count, "steps": steps, "largest_gap": gap} | total))


if __name__ == "__main__":
    tyro.cli(main)

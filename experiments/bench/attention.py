"""Time and memory of attention on a CPU: jprm's implementations, jax.nn.dot_product_attention and a T x T mask.

    python -m experiments.bench.attention [--data ../shared/data] [--lengths 1024 4096 16384]

One layer of SmolLM2-135M's shape (9 query heads, 3 key-value heads of 64, float32), forward and backward, on rows of
one chain, of PRM800K's trees as they are packed, and of stars: a stem of T/2 tokens and branches that share the rest.
Every measurement is a process of its own. A program that would take more than two thirds of the machine's memory is
compiled and not run: its seconds are null.

The last line is one JSON object: `ours` and `peer`, seconds forward and backward of PRM800K's row of 4,096 tokens, and
`rows`, one object for every measurement:

    seconds           forward and backward, the median of a few; plan_seconds, what is computed once for all layers
    peak              bytes of inputs, outputs, plan and temporaries, as a multiple of the bytes of inputs and outputs
                      (q, k, v, y and their gradients); from the compiled program
    peak_rss          the same, of the resident memory that the kernel saw grow
    needed            fraction of the computed pairs of query and key in which the query sees the key
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import yardsticks
from jprm.methods.data.readers import find
from jprm.methods.kernels.cpu import path_pairs
from jprm.model.attention import attend, plan
from jprm.model.config import ModelConfig
from jprm.pack import pack
from jprm.token_tree import token_tree
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.tree import tree_of

BLOCK = {"paths": 128, "blocked": 256}
WIDTHS = (4, 16, 64)
WIDE = 4096  # tokens of the rows of stars, and of the row that `ours` and `peer` are of
TREES = 16  # of PRM800K, enough to fill the longest row


def config(way: str) -> ModelConfig:
    return ModelConfig(
        vocab_size=1, layers=1, width=576, heads=9, kv_heads=3, head_dim=64, mlp_width=1, rope_theta=1e4, norm_eps=1e-5,
        attention="reference" if way == "jax.nn" else way, attention_block=BLOCK.get(way, 1),
    )  # fmt: skip


def row(shape: str, T: int, data: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns `until` and `position` of a row of this shape, each (1, T)."""
    kind, _, width = shape.partition(" ")
    index_T = np.arange(T, dtype=np.int32)[None]
    if kind == "chain":
        return np.full((1, T), T, np.int32), index_T
    if kind == "star":
        branch = T // 2 // int(width)
        end_T = T // 2 + ((index_T - T // 2) // branch + 1) * branch
        stem_T = index_T < T // 2
        return np.where(stem_T, T, end_T), np.where(stem_T, index_T, T // 2 + (index_T - T // 2) % branch)
    layout, trees = native_layout(load_tokenizer(yardsticks.smollm2())), []
    file = yardsticks.dataset(data, "prm800k/phase1_train.jsonl")
    for _, record in find("prm800k").read(file, human_written="unlabelled", control_questions="keep"):
        trees.append(token_tree(tree_of(record), layout))
        if len(trees) == TREES:
            break
    rows = pack(trees, T, T // 2, too_long="truncate").rows
    return rows.until[:1], rows.position[:1]


def memory(field: str) -> int:
    """Returns a field of /proc/self/status or /proc/meminfo in bytes."""
    file = "/proc/meminfo" if field.startswith("Mem") else "/proc/self/status"
    line = next(line for line in open(file) if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def measure(way: str, shape: str, T: int, data: pathlib.Path) -> dict:
    c, (until_BT, position_BT) = config(way), row(shape, T, data)
    rng = np.random.default_rng(0)
    q, k, v, dy = (
        jnp.asarray(rng.standard_normal((1, T, *heads, 64), np.float32)) for heads in ((3, 3), (3,), (3,), (3, 3))
    )
    key = jnp.arange(T)
    rule = lambda until: (key <= key[:, None]) & (key[:, None] < until[:, None, :])  # noqa: E731  (B, query, key)
    make = jax.jit(lambda until, position: rule(until) if way == "jax.nn" else plan(until, position, c))
    seen = jax.block_until_ready(make(until_BT, position_BT))
    start = time.perf_counter()
    jax.block_until_ready(make(until_BT, position_BT))
    plan_seconds = time.perf_counter() - start

    def forward(q, k, v, seen):
        if way == "jax.nn":
            return jax.nn.dot_product_attention(q.reshape(1, T, 9, 64), k, v, mask=seen[:, None]).reshape(q.shape)
        return attend(q, k, v, seen, c)

    @jax.jit
    def both(q, k, v, seen, dy):
        y, back = jax.vjp(lambda q, k, v: forward(q, k, v, seen), q, k, v)
        return y, *back(dy)

    compiled = both.lower(q, k, v, seen, dy).compile()
    stats = compiled.memory_analysis()
    inputs = sum(x.nbytes for x in (q, k, v, dy))
    total = inputs + stats.output_size_in_bytes
    everything = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    result = {"way": way, "shape": shape, "T": T, "seconds": None, "plan_seconds": plan_seconds,
              "peak": everything / total, "peak_rss": None, "bytes": everything}  # fmt: skip
    if everything < memory("MemTotal") * 2 / 3:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident memory begins anew
        before = memory("VmRSS")
        times = []
        while len(times) < 3 and sum(times) < 4:
            start = time.perf_counter()
            jax.block_until_ready(compiled(q, k, v, seen, dy))
            times.append(time.perf_counter() - start)
        result["seconds"] = statistics.median(times)
        result["peak_rss"] = (memory("VmHWM") - before + inputs) / total
    real = (position_BT > 0) | (until_BT > np.arange(T) + 1)
    needed = np.sum((position_BT + 1) * real, dtype=np.int64)
    return result | {"needed": float(needed / computed_pairs(way, seen, c, T))}


def computed_pairs(way: str, seen, c: ModelConfig, T: int) -> int:
    if way == "paths":
        return path_pairs(seen, c)
    block = T if way == "jax.nn" else c.attention_block
    return sum(block * (start + block) for start in range(0, T, block))


def main() -> None:
    args = yardsticks.parser(__doc__)
    args.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 16384], help="tokens a row")
    args.add_argument("--case", nargs=3, metavar=("WAY", "SHAPE", "T"), help="one measurement, in this process")
    args = args.parse_args()
    if args.case:
        way, shape, T = args.case
        print(json.dumps(measure(way, shape, int(T), args.data)))
        return
    cases = [(way, "chain", T) for T in args.lengths for way in ("paths", "blocked", "jax.nn")]
    cases += [(way, "prm800k", T) for T in args.lengths for way in ("paths", "jax.nn")]
    cases += [("paths", f"star {width}", WIDE) for width in WIDTHS]
    rows = []
    for case in cases:
        command = [sys.executable, "-m", "experiments.bench.attention", "--data", args.data, "--case", *case]
        run = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(run.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    seconds = {row["way"]: row["seconds"] for row in rows if (row["shape"], row["T"]) == ("prm800k", WIDE)}
    unit = "seconds forward and backward"
    yardsticks.report("attention", seconds.get("paths"), seconds.get("jax.nn"), unit=unit, rows=rows)


if __name__ == "__main__":
    main()

"""Where the time of scoring and of training goes: seconds by kind of work, beside what each would take at the limit.

    python -m experiments.bench.where [--what score train] [--data ../shared/data] [--problems 2] [--output where.json]

The kinds are read from the compiled program: a matrix product over batches belongs to attention, any other is a
projection; an instruction that only moves values is a gather, a scatter or a copy; the rest are norms, activations and
reductions. Times come from XLA's own profile (`jax.profiler`): each instruction's, without the instructions inside it,
and divided among those that run at once (as a layer's gate and up do). The rest of the clock's time is `host and
waiting`: Python, packing, the start of programs, and reading results.

The limit of a product is its FLOPs over the machine's matrix-multiply limit, and of other work its bytes over the speed
at which the machine scales an array of 256 MB, both measured just before. A table is of one round; run it alone.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import json
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

from experiments.bench import score_speed, train_speed, yardsticks
from jprm.apps.plan import counts, hlo
from jprm.experiment import Experiment
from jprm.io.jsonl import write_records
from jprm.io.outputs import write_json
from jprm.methods.data.readers import find
from jprm.methods.evaluate.blocks import Table, show

PROJECTIONS, ATTENTION, MOVES = "projections", "attention's products", "gathers, scatters, copies"
OTHER, HOST = "norms, activations, reductions", "host and waiting"
MOVING = {"gather", "scatter", "copy", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "transpose",
          "reshape", "bitcast", "broadcast", "pad", "convert", "reverse", "iota", "parameter", "constant", "tuple",
          "get-tuple-element", "fusion"}  # fmt: skip
"""Instructions that compute nothing: a fusion of these alone moves values."""


@dataclasses.dataclass
class Work:
    """What one kind of work took, and needs."""

    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def at_limit(self, flops_per_s: float, bytes_per_s: float) -> float:
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)


def memory_limit(seconds: float = 1.5) -> float:
    """Returns bytes read and written a second by the fastest scaling of an array that no cache holds."""
    x, scale, fastest = jnp.ones(2**26, jnp.float32), jax.jit(lambda x: x * 2), 0.0
    scale(x).block_until_ready()
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        scale(x).block_until_ready()
        fastest = max(fastest, 2 * x.nbytes / (time.perf_counter() - start))
    return fastest


def kind_of(module: hlo.Module, instruction: hlo.Instruction) -> str:
    """Returns the kind of work of an instruction, by all that is fused into it."""
    inner = [instruction, *(i for _, i in module.fused(instruction))]
    products = [i for i in inner if i.opcode in ("dot", "convolution")]
    if products:
        return ATTENTION if any(i.attribute("lhs_batch_dims").strip("{}") for i in products) else PROJECTIONS
    return MOVES if all(i.opcode in MOVING for i in inner) else OTHER


def needs(module: hlo.Module) -> dict[str, tuple[str, float, float]]:
    """Returns each instruction's kind, and its FLOPs and bytes when it is executed once."""
    table, computations = {}, module.computations.values()
    fused = {called for c in computations for i in c.instructions.values() for called in i.called.get("calls", ())}
    for computation in computations:
        for name, instruction in computation.instructions.items() if computation.name not in fused else ():
            products = [(computation, instruction), *module.fused(instruction)]
            flops = sum(counts.product_flops(where, i) for where, i in products if i.opcode == "dot")
            table[name] = kind_of(module, instruction), flops, counts.hbm_bytes(module, computation, instruction)
    return table


def shares(lines: Iterable[Iterable]) -> dict[tuple[str, str], list[float]]:
    """Returns the seconds of each instruction, named by module and name, and how often it ran; a line is a thread.

    Of nested instructions the innermost counts. Threads that run instructions at once divide the time equally: the
    seconds add up to the time in which any ran.
    """
    edges = []  # nanoseconds, thread, the instruction that begins, or None where the innermost one ends
    for thread, line in enumerate(lines):
        ends: list[float] = []
        for event in sorted(line, key=lambda event: (event.start_ns, -event.duration_ns)):
            if "hlo_op" in (stats := dict(event.stats)):
                while ends and ends[-1] <= event.start_ns:
                    edges.append((ends.pop(), thread, None))
                edges.append((event.start_ns, thread, (stats["hlo_module"], stats["hlo_op"])))
                ends.append(event.start_ns + event.duration_ns)
        edges += ((end, thread, None) for end in reversed(ends))
    spent, inside, now = collections.defaultdict(lambda: [0.0, 0]), collections.defaultdict(list), 0.0
    for at, thread, instruction in sorted(edges, key=lambda edge: edge[0]):  # stable: a thread's order stays
        running = [stack[-1] for stack in inside.values() if stack]
        for name in running:
            spent[name][0] += (at - now) / 1e9 / len(running)
        now = at
        if instruction is None:
            inside[thread].pop()
        else:
            inside[thread].append(instruction)
            spent[instruction][1] += 1
    return spent


def profiled(run: Callable[[], object]) -> tuple[dict[str, Work], float]:
    """Runs warm work under the profiler; returns its time by kind, and the clock's seconds."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        profile = ProfileData.from_file(path)
    spent = shares(line.events for plane in profile.planes for line in plane.lines)
    table: dict[str, Work] = collections.defaultdict(Work)
    for name in {module for module, _ in spent}:
        ops = {op: of_op for (module, op), of_op in spent.items() if module == name}
        programs = [needs(module) for module in compiled(name)]
        program = max(programs, key=lambda program: len(program.keys() & ops.keys()), default={})
        for op, (op_seconds, times) in ops.items():
            kind, flops, moved = program.get(op, (OTHER, 0.0, 0.0))
            table[kind].seconds += op_seconds
            table[kind].flops += flops * times
            table[kind].bytes += moved * times
    table[HOST] = Work(max(0.0, seconds - sum(work.seconds for work in table.values())))
    return dict(table), seconds


def compiled(name: str) -> list[hlo.Module]:
    """Returns the live programs of a name, parsed."""
    executables = jax.devices()[0].client.live_executables()
    modules = (module for executable in executables for module in executable.hlo_modules())
    return [hlo.parse(module.to_string()) for module in modules if module.name == name]


def scoring(args) -> Callable[[], object]:
    file = yardsticks.dataset(args.data, "pools/gsm8k_chatgpt_n19.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines()
    pools = [json.loads(line) for line in random.Random(0).sample(lines, args.problems)]
    prm = score_speed.made_up_prm()
    return lambda: score_speed.score(prm, pools)


def training(args) -> Callable[[], object]:
    phase1 = yardsticks.dataset(args.data, "prm800k/phase1_train.jsonl")
    records = (
        record for _, record in find("prm800k").read(phase1, human_written="unlabelled", control_questions="keep")
    )
    folder = pathlib.Path(tempfile.mkdtemp())
    write_records(folder / "trees.jsonl", [record for record, _ in zip(records, range(args.records), strict=False)])
    config: Experiment = train_speed.experiment(folder / "trees.jsonl", args.tokens)
    speed = train_speed.TrainSpeed(config, 1.0)
    return lambda: speed.run(1)


def table_of(name: str, work: dict[str, Work], seconds: float, flops_per_s: float, bytes_per_s: float) -> Table:
    rows = []
    for kind, row in sorted(work.items(), key=lambda item: -item[1].seconds):
        limit = row.at_limit(flops_per_s, bytes_per_s)
        rows.append([kind, f"{row.seconds:.2f}", f"{row.seconds / seconds:.1%}", f"{limit:.2f}"])
    return Table(f"{name}: {seconds:.2f} s", ["work", "seconds", "share", "seconds at the limit"], rows)


def main() -> None:
    args = yardsticks.parser(__doc__)
    args.add_argument("--what", nargs="+", choices=["score", "train"], default=["score", "train"])
    args.add_argument("--problems", type=int, default=2, help="pools of 19 chains to score (default 2)")
    args.add_argument("--records", type=int, default=400, help="of PRM800K, from which a row is made (default 400)")
    args.add_argument("--tokens", type=int, default=8192, help="of the row of training (default 8192)")
    args.add_argument("--output", type=pathlib.Path, help="file for the figures, JSON")
    args = args.parse_args()
    figures = {}
    for what, made in {"score": scoring, "train": training}.items():
        if what in args.what:
            run = made(args)
            run()  # compiles
            flops_per_s, bytes_per_s = yardsticks.matmul_limit(), memory_limit()
            work, seconds = profiled(run)
            show([table_of(what, work, seconds, flops_per_s, bytes_per_s)])
            figures[what] = {"seconds": seconds, "limit_flops_per_s": flops_per_s, "limit_bytes_per_s": bytes_per_s,
                             "work": {kind: dataclasses.asdict(row) for kind, row in work.items()}}  # fmt: skip
    if args.output:
        write_json(args.output, figures)


if __name__ == "__main__":
    sys.exit(main())

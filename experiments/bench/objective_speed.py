"""Cost of a training step by objective, beside cross-entropy's: layers of SmolLM2-135M in float32, on PRM800K phase 1.

    python -m experiments.bench.objective_speed [--data ../shared/data] [--layers 6] [--rounds 3]

An objective's cost does not depend on what its labels say, so all take the same row. Steps are measured in turns:
forward and backward, clipping, AdamW; compilation and waiting for data are left out. `implicit` has the head of the
vocabulary at every token, and a second model unless the data have its log-probabilities (`jprm label reference`).

The last line is one JSON object: for every objective the median `seconds` and `cpu_seconds` of a step, and `slower`,
the ratio of its CPU time to cross-entropy's. With few layers heads and objectives weigh more than in a whole model.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time

import jax

from experiments.bench import yardsticks
from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.methods.data.readers import find
from jprm.model.mesh import put_rows
from jprm.pack import pack
from jprm.rows import Rows
from jprm.token_tree import token_tree
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.train import Trainer
from jprm.tree import tree_of

CASES = {
    "cross_entropy": {},
    "bradley_terry": {},
    "pqm": {},
    "td_lambda": dict(supervise="outcome"),
    "implicit": dict(supervise="outcome", head="language"),
    "dpo": dict(supervise="outcome", head="language", objective="implicit", objective_options={"loss": "dpo"}),
    "implicit, reference in the data": dict(
        supervise="outcome", head="language", objective="implicit", extras=("reference",)
    ),
}
"""What each measurement changes; it is the name of its objective unless that is named."""


def experiment(
    name: str, layers: int, tokens: int, supervise="step", head="scalar", extras=(), **changes
) -> Experiment:
    smollm2 = str(yardsticks.smollm2())
    model = base.model_config(smollm2, head=head, layers=layers, remat="dots", attention="paths", attention_block=128)
    values = dict(objective=name, reference=smollm2 if head == "language" else "") | changes
    return Experiment(
        name=name, base=smollm2, tokenizer=smollm2, model=model,
        data=DataConfig(("none.jsonl",), supervise, "error", tokens=tokens, slots=512, rows=1, extras=extras),
        target=TargetConfig("value", "none", "keep"), optimizer=OptimizerConfig(1e-5), steps=1000, **values,
    )  # fmt: skip


def row(data, tokens: int) -> Rows:
    """The fullest row of the first trees: ratings as values, the last step of a chain as its end."""
    phase1 = yardsticks.dataset(data, "prm800k/phase1_train.jsonl")
    options = {"human_written": "unlabelled", "control_questions": "keep"}
    records = [record for _, record in itertools.islice(find("prm800k").read(phase1, **options), 40)]
    layout = native_layout(load_tokenizer(str(yardsticks.smollm2())))
    rows = pack([token_tree(tree_of(record), layout) for record in records], tokens, 512, too_long="truncate").rows
    fullest = int(yardsticks.real_tokens(rows).sum(-1).argmax())
    return jax.tree.map(lambda x: x[None, fullest : fullest + 1], rows)


class Steps:
    """The training step of one case, compiled."""

    def __init__(self, config: Experiment, rows: Rows):
        self.trainer = Trainer(config)
        rows = dataclasses.replace(rows, extras={name: 0 * rows.label for name in config.data.extras})
        with jax.set_mesh(self.trainer.mesh):
            self.rows = put_rows(rows, self.trainer.mesh, lead=1)
        self.run()  # compiles

    def run(self) -> dict[str, float]:
        start, busy = time.perf_counter(), time.process_time()
        jax.block_until_ready((self.trainer.step(self.rows), self.trainer.state))
        return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}


def main() -> None:
    args = yardsticks.parser(__doc__)
    args.add_argument("--layers", type=int, default=6, help="of the model (default 6; the model has 30)")
    args.add_argument("--only", nargs="*", default=list(CASES), help="cases; cross_entropy is always measured")
    args.add_argument("--tokens", type=int, default=2048, help="of the row (default 2048)")
    args = args.parse_args()
    rows = row(args.data, args.tokens)
    chosen = {name: case for name, case in CASES.items() if name in ("cross_entropy", *args.only)}
    cases = {name: Steps(experiment(name, args.layers, args.tokens, **case), rows) for name, case in chosen.items()}
    medians = yardsticks.measure(args.rounds, **{name: steps.run for name, steps in cases.items()})
    first = medians["cross_entropy"]
    for figures in medians.values():
        figures["slower"] = figures["cpu_seconds"] / first["cpu_seconds"]
    print(json.dumps({"bench": "objective_speed", "layers": args.layers, "tokens": args.tokens, **medians}))


if __name__ == "__main__":
    main()

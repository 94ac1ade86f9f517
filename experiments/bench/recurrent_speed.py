"""Gated DeltaNet on a CPU: its chunks beside a scan over tokens, and a hybrid's trees beside their chains alone.

    python -m experiments.bench.recurrent_speed [--data ../shared/data] [--rounds 3]

1. The rule of one layer (2 key heads, 4 value heads of 128: an eighth of a 4B's), forward and backward, on a row of one
   chain: chunks as jprm computes them, and a token at a time with every state kept.
2. Training steps' forward and backward of a hybrid of 4 layers and width 128 on PRM800K phase 1: trees packed in rows,
   and every chain from its root to a leaf as a tree of its own, packed in rows of the same length.

The measurements of a round take turns. All seconds are of the processor, of all cores: they say more than the clock
where a machine is shared. The last line is one JSON object: `ours` and `peer`, seconds of all rows of 2 as trees and as
chains, and their `ratio`; for both `tokens`, real ones, and `cells`, with padding; and `rule`, for every length the
seconds and temporaries of both ways, and how far their gradients are apart.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import yardsticks
from jprm.methods.data.readers import find
from jprm.methods.layers import deltanet
from jprm.model import transformer
from jprm.model.config import DeltaNetConfig, ModelConfig
from jprm.pack import pack
from jprm.token_tree import token_tree
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.tree import chains_of, tree_of

RULE = DeltaNetConfig(key_heads=2, value_heads=4, key_dim=128, value_dim=128)
TREES = 24  # of PRM800K
ROW = 4096


def hybrid(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size, layers=4, width=128, heads=4, kv_heads=2, head_dim=32, mlp_width=256, rope_theta=1e4,
        norm_eps=1e-6, qk_norm=True, design="qwen3_next", attention_gate=True, attention="paths", attention_block=128,
        mixers=("deltanet", "deltanet", "deltanet", "attention"), deltanet=DeltaNetConfig(2, 4, 32, 32),
    )  # fmt: skip


def by_tokens(q, k, v, g, b):
    """The rule of a chain, a token at a time."""
    q, k = deltanet._unit(q) * q.shape[-1] ** -0.5, deltanet._unit(k)

    def token(state, inputs):
        q, k, v, g, b = inputs
        state = state * jnp.exp(g)[..., None, None]
        new = (v - jnp.einsum("BKH,BKGHV->BKGV", k, state)) * b[..., None]
        state = state + jnp.einsum("BKH,BKGV->BKGHV", k, new)
        return state, jnp.einsum("BKH,BKGHV->BKGV", q, state)

    start = jnp.zeros((len(q), *v.shape[2:4], k.shape[-1], v.shape[-1]))
    y = jax.lax.scan(token, start, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (q, k, v, g, b)))[1]
    return jnp.swapaxes(y, 0, 1)


def rule(T: int, rounds: int) -> dict:
    """Returns the processor seconds, and MiB of temporaries, of both ways on one chain of T tokens."""
    config, rng = dataclasses.replace(hybrid(1), deltanet=RULE), np.random.default_rng(0)
    K, G, H, V = (deltanet.sizes(config)[axis] for axis in "KGHV")
    draw = lambda *shape: jnp.asarray(rng.normal(size=(1, T, K, *shape)).astype(np.float32))  # noqa: E731
    args = draw(H), draw(H), draw(G, V), -jnp.abs(draw(G)), jax.nn.sigmoid(draw(G))
    until_BT, position_BT = jnp.full((1, T), T), jnp.arange(T)[None]

    def chunks(*args):
        plan = deltanet.plan(position_BT, until_BT, config)
        return deltanet._rule(*args, plan, jnp.zeros((1, K, G, H, V)), config)[0]

    row, ways = {"T": T}, {}
    for name, way in (("chunks", chunks), ("tokens", by_tokens)):
        both = jax.value_and_grad(lambda *args, way=way: jnp.sum(jnp.sin(way(*args))), range(5))
        ways[name] = jax.jit(both).lower(*args).compile()
        row[f"{name}_mib"] = ways[name].memory_analysis().temp_size_in_bytes / 2**20
    values = {name: jax.block_until_ready(way(*args)) for name, way in ways.items()}
    scale = max(float(jnp.max(jnp.abs(x))) for x in values["tokens"][1])
    apart = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), values["chunks"][1], values["tokens"][1])
    row["gradients_apart"] = max(apart) / scale

    def timed(way) -> dict[str, float]:
        start = time.process_time()
        jax.block_until_ready(way(*args))
        return {"cpu_seconds": time.process_time() - start}

    medians = yardsticks.measure(rounds, **{name: functools.partial(timed, way) for name, way in ways.items()})
    return row | {name: figures["cpu_seconds"] for name, figures in medians.items()}


def rows_of(data) -> dict:
    """Returns rows of PRM800K's trees, and of their chains alone."""
    layout, trees, chains = native_layout(load_tokenizer(yardsticks.smollm2())), [], []
    file = yardsticks.dataset(data, "prm800k/phase1_train.jsonl")
    for _, record in find("prm800k").read(file, human_written="unlabelled", control_questions="keep"):
        tree = tree_of(record)
        trees.append(token_tree(tree, layout))
        for path in chains_of(tree):
            nodes = [dataclasses.replace(tree.nodes[i], parent=at - 1) for at, i in enumerate(path)]
            chains.append(token_tree(dataclasses.replace(tree, nodes=tuple(nodes)), layout))
        if len(trees) == TREES:
            break
    return {name: pack(trees_of, ROW, ROW // 8, too_long="error").rows for name, trees_of in
            (("trees", trees), ("chains", chains))}  # fmt: skip


def main() -> None:
    args = yardsticks.parser(__doc__)
    args.add_argument("--lengths", type=int, nargs="*", default=[512, 2048], help="tokens of the rule's chains")
    args = args.parse_args()
    rules = [rule(T, args.rounds) for T in args.lengths]
    print(rules, flush=True)
    rows, config = rows_of(args.data), hybrid(load_tokenizer(yardsticks.smollm2()).vocab_size)
    params = transformer.init(config, jax.random.key(0))
    loss = lambda p, rows: jnp.sum(jnp.sin(transformer.step_logits(p, config, rows)[..., 0]) * rows.owned)  # noqa: E731
    step = jax.jit(jax.value_and_grad(loss))

    def passes(name: str) -> dict[str, float]:
        start = time.process_time()
        for at in range(len(rows[name].tokens)):
            row = jax.tree.map(lambda x, at=at: x[at : at + 1], rows[name])
            jax.block_until_ready(step(params, row))
        return {"cpu_seconds": time.process_time() - start}

    jax.block_until_ready(step(params, jax.tree.map(lambda x: x[:1], rows["trees"])))  # compiles
    medians = yardsticks.measure(args.rounds, trees=lambda: passes("trees"), chains=lambda: passes("chains"))
    ours, theirs = (figures["cpu_seconds"] for figures in medians.values())
    counts = {f"{name}_{what}": int(count) for name, packed in rows.items() for what, count in
              (("tokens", yardsticks.real_tokens(packed).sum()), ("cells", packed.tokens.size))}  # fmt: skip
    yardsticks.report("recurrent_speed", ours, theirs, unit="processor seconds", rule=rules, **counts,
                      rounds=args.rounds)  # fmt: skip


if __name__ == "__main__":
    main()

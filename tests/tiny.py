"""A model that compiles in a second, trees for it, and functions compiled once for all tests."""

import contextlib
import dataclasses
import functools
import threading
import types

import grain
import jax
import numpy as np
from hypothesis import strategies as st

from jprm import objectives
from jprm.experiment import ObjectiveConfig
from jprm.model import transformer
from jprm.model.config import ModelConfig
from jprm.model.mesh import spec
from jprm.model.parameters import LoraConfig
from jprm.pack import pack
from jprm.rows import Rows, empty_rows
from jprm.token_tree import token_tree
from jprm.train.batches import counted_batches
from jprm.train.state import make_optimizer, make_step, schedule, skipped
from jprm.tree import Node, ReasoningTree

TINY = ModelConfig(
    vocab_size=64,
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=32,
    rope_theta=100.0,  # at so few positions the slow pairs would hardly turn with a larger one
    norm_eps=1e-6,
    qkv_bias=True,
    qk_norm=True,
    attention_block=32,
)

# Gemma 2 and 3 at once, with caps low enough to bend what the tests' small logits do.
GEMMA = dataclasses.replace(
    TINY, design="gemma", qkv_bias=False, layers=3, layer_groups=(2, 1), windows=(5, 0), rope_theta_local=10.0,
    query_pre_attn_scalar=7, attention_softcap=2.0, logit_softcap=1.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Letters:
    """One token a letter. Without an end of step, steps share prefixes and one step can begin another."""

    newline: tuple[int, ...] = ()
    end: int | None = None

    def problem(self, text, system=""):
        return [ord(c) - 96 for c in text] + [27]

    def step(self, text, number):
        return [ord(c) - 96 for c in text] + list(self.newline)

    def last(self, text, number):
        return None


@dataclasses.dataclass(frozen=True)
class Characters:
    """One token a character, its code, and no separator: steps share prefixes, and one step can begin another."""

    end: int | None = None

    @property
    def tokenizer(self):
        return types.SimpleNamespace(eos=self.end)

    def problem(self, text, system=""):
        return [ord(c) for c in text]

    def step(self, text, number):
        return [ord(c) for c in text]

    def last(self, text, number):
        return None


init = jax.jit(transformer.init, static_argnums=0)
hidden = jax.jit(transformer.hidden, static_argnums=1)
logits = jax.jit(transformer.step_logits, static_argnums=1)


def every_logit(weights, config, ids):
    """Returns the logits after every one of the ids, (T, C)."""
    every = np.arange(len(ids))[None]
    rows = dataclasses.replace(chain_rows([ids], 64), step_end=every, label=every, weight=every)
    return np.asarray(logits(weights, config, rows))[0]


@contextlib.contextmanager
def compiling():
    """Yields a list that grows with every program that is compiled or read from the cache: the thread's name.

    Threads that compile already, of an engine that an earlier test has warmed up, do not count.
    """
    threads, earlier = [], {thread for thread in threading.enumerate() if thread.name.endswith(" compiling")}

    def listen(event, _seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration" and threading.current_thread() not in earlier:
            threads.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield threads
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def optimised():
    """Programs are compiled with all passes, as outside the tests: for those that look at a program's text or memory.

    What conftest.py sets in XLA_FLAGS stays: XLA reads it once, and it concerns only a CPU's instructions.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


class Stepper:
    """The step of an experiment as a function of (state, rows): it computes the rates of `steps` updates itself."""

    def __init__(self, model, target, objective, optimizer, steps, lora=None, backend=None):
        config = ObjectiveConfig(model, target, lora or LoraConfig())
        self.step = make_step(objectives.find(objective), make_optimizer(optimizer), config, backend)
        self.rate = jax.jit(schedule(optimizer, steps))

    def __call__(self, state, rows):
        return self.step(state, rows, self.rate(state.step - skipped(state.optimizer)))

    def lower(self, state, rows):
        return self.step.lower(state, rows, jax.ShapeDtypeStruct((), "float32", sharding=state.step.sharding))

    def cache_size(self):
        return self.step._cache_size()


@st.composite
def reasoning_trees(draw, most=12, labels=(None, -1.0, 0.0, 1.0)):
    """Deep or bushy trees; steps of few letters, so that equal ones and common prefixes are frequent."""
    deep = draw(st.booleans())
    nodes = []
    for i in range(draw(st.integers(1, most))):
        parent = draw(st.integers(max(-1, i - 2) if deep else -1, i - 1))
        nodes.append(Node(parent, draw(st.text("abc", min_size=1, max_size=3)), draw(st.sampled_from(labels))))
    return ReasoningTree(draw(st.text("pq", min_size=1, max_size=3)), tuple(nodes))


def random_tree(seed, nodes=12, labels=(-1.0, 0.0, 1.0)):
    rng = np.random.default_rng(seed)
    return ReasoningTree(
        "".join(rng.choice(list("pqrs"), 4)),
        tuple(
            Node(int(rng.integers(-1, i)), "".join(rng.choice(list("abcdef"), 3)), labels[rng.choice(len(labels))])
            for i in range(nodes)
        ),
    )


def path(tree, node):
    """Node indices from the first step to `node`."""
    return [*path(tree, tree.nodes[node].parent), node] if node >= 0 else []


def with_nodes(tree, change):
    """The tree with the fields that `change(number, node)` returns in place of each node's."""
    nodes = (dataclasses.replace(node, **change(n, node)) for n, node in enumerate(tree.nodes))
    return dataclasses.replace(tree, nodes=tuple(nodes))


def chain_ids(tree, node, layout):
    steps = [layout.step(tree.nodes[i].text, number) for number, i in enumerate(path(tree, node))]
    return [*layout.problem(tree.problem), *(i for ids in steps for i in ids)]


def chain_rows(chains, tokens, count=None):
    """Every list of ids alone in its own row, scored at its last token; made without the packer."""
    rows = empty_rows(count or len(chains), tokens, 1)
    for b, ids in enumerate(chains):
        rows.tokens[b, : len(ids)] = ids
        rows.position[b, : len(ids)] = np.arange(len(ids))
        rows.until[b, : len(ids)] = len(ids)
        rows.step_end[b, 0] = len(ids) - 1
        rows.weight[b, 0] = 1
    return rows


def tokenised(trees, layout, config):
    """The token trees of a source of trees, made when they are asked for."""
    tokenise = functools.partial(token_tree, layout=layout, supervise=config.supervise, extras=config.extras)
    return grain.MapDataset.source(trees).map(tokenise)


def packed_batches(trees, layout, config):
    """Returns only the rows of `counted_batches`."""
    return counted_batches(tokenised(trees, layout, config), config).map(lambda batch: batch[0])


def packed_trees(trees, tokens=64, slots=32, layout=Letters(), too_long="error", chains=False):
    return pack([token_tree(tree, layout) for tree in trees], tokens, slots, too_long=too_long, chains=chains)


def visible(until_BT):
    """The rule of `jprm.rows` as a (query, key) matrix."""
    index_T = np.arange(until_BT.shape[-1])
    return (index_T[None, None, :] <= index_T[None, :, None]) & (index_T[None, :, None] < until_BT[:, None, :])


def filled(rows: Rows, count: int) -> Rows:
    """`rows` and empty ones, `count` in all: one shape, one compilation."""
    empty = empty_rows(count - len(rows.tokens), rows.tokens.shape[1], rows.step_end.shape[1], tuple(rows.extras))
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), rows, empty)


def placed(weights, mesh):
    """Parameters on a mesh, split as the model's are; one in int8 is split as what it stands for."""

    def put(path, x):
        name = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][-1]
        return jax.device_put(x, jax.NamedSharding(mesh, spec(*transformer.axes_of(name), mesh=mesh)))

    return jax.tree_util.tree_map_with_path(put, weights)


@functools.cache
def params(config: ModelConfig = TINY, seed: int = 0) -> dict:
    """Parameters in which nothing is zero or one, so that biases, norms and the head matter too; no compilation."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        name = path[-1].key
        if name.endswith("norm"):
            return rng.uniform(0.5, 1.5, x.shape).astype(np.float32)
        fan_in = 4 if name in ("bias", "query_bias", "key_bias", "value_bias") else config.width
        return (rng.normal(size=x.shape) / fan_in**0.5).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(lambda: init(config, jax.random.key(0))))


def one_chain_each(rows):
    """Whether each row holds one chain from its begin on, and only padding, which sees only itself, after it."""
    until_BT, position_BT, index_T = np.asarray(rows.until), np.asarray(rows.position), np.arange(rows.until.shape[1])
    end_B1 = until_BT[:, :1]
    return np.all(
        (until_BT == np.maximum(end_B1, index_T + 1)) & ((position_BT == index_T) | (index_T >= end_B1)), axis=1
    )

"""A policy sampling from a language model in this process: a base model, or one trained by jprm.

A prompt is computed once, and its samples share the keys. A jitted loop decodes the samples' own tokens. A finished row
takes waiting samples (`DecodingRows`), so that no row waits for the longest sample overall. Rows, prompts and samples
are padded to powers of two; each occurring combination is compiled once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int

from jprm.checkpoints import base, store
from jprm.checkpoints.store import fingerprint
from jprm.experiment import RUN, kind_of, read
from jprm.io.outputs import digest
from jprm.methods.decoding import decode
from jprm.methods.decoding.decode import step_text
from jprm.methods.formats.chat_template import prompt_of
from jprm.methods.policy.protocol import LogProb, Prefix, Sample, Until
from jprm.methods.policy.transfer import copied
from jprm.model import Dtype, layers
from jprm.model.config import ModelConfig
from jprm.model.heads import find, of_channels
from jprm.model.mesh import (
    MeshConfig,
    check_mesh,
    make_mesh,
    mesh_by_heads,
    put_rows,
    reshape,
    row_parts,
    sharding,
    spec,
)
from jprm.model.parameters import Int8, held, merge
from jprm.model.transformer import ATTENTION, axes_of, check_model
from jprm.options import place_of
from jprm.rows import padded_size
from jprm.tokenizer import Tokenizer, load_tokenizer, native_layout, prompt_layout

SHORTEST_PROMPT, SHORTEST_SAMPLE = 64, 32
"""Minimum tokens in a padded prompt, and initial room for a sample. Both are doubled as needed."""

REFILL = 8
"""New samples begin once one in so many rows is free, so that several prompts are computed together."""

FEWER = 4
"""Finished rows are dropped if this leaves so many times fewer rows."""


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Sampling settings.

    Attributes:
      temperature: 0 takes the most probable token.
      top_p: probability mass of the most probable tokens, which may be sampled.
      max_tokens: per sample. A sample that reaches it ends with `length`.
      prompt: text before the steps, with `{problem}` and control tokens, e.g. <|im_start|>. Empty: jprm's own layout,
        in which it trains policies and PRMs.
      chat: `prompt` is the user's message (`{problem}` if empty), wrapped by the model's chat template.
      delimiter: ends every step, and must contain a line break; a newline in jprm's own layout.
      rows: maximum samples decoded at once.
      logprobs: store id and log-probability of each token, at the sampling temperature.
      entropies: store the entropy before each token over so many most probable tokens, at the sampling temperature; 0
        stores no entropies.
      dtype: storage type of matrices; empty for the model's computation type. With int8, the head is bfloat16.

    Raises ValueError if a setting is out of range, or `prompt` lacks `{problem}`.
    """

    temperature: float = 0.8
    top_p: float = 1.0
    max_tokens: int = 512
    prompt: str = ""
    delimiter: str = "\n"
    rows: int = 64
    logprobs: bool = False
    entropies: int = 0
    chat: bool = False
    dtype: Literal["", "float32", "bfloat16", "int8"] = ""

    def __post_init__(self):
        if self.dtype not in ("", *get_args(Dtype)):
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(get_args(Dtype))}, nor empty")
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}: it must be 0 or more")
        if self.entropies < 0:
            raise ValueError(f"entropies is {self.entropies}: it must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        for field in ("max_tokens", "rows"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be 1 or more")
        if self.prompt and "{problem}" not in self.prompt:
            raise ValueError("prompt has no {problem}")
        if "\n" not in self.delimiter:
            raise ValueError(f"delimiter is {self.delimiter!r}: use a text with a line break, such as '\\n\\n'")
        if not self.prompt and not self.chat and self.delimiter != "\n":
            raise ValueError(f"delimiter is {self.delimiter!r}: jprm's own layout has '\\n'; another needs a prompt")


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """One sample as tokens.

    Attributes:
      ids: sampled tokens, including the end of text if it was sampled.
      logprob_N: float32 per token, at the sampling temperature and over all tokens.
      logprob: total under the model itself, at temperature 1.
      finish_reason: as in `Sample`, or `open` for a chain that will continue.
      entropy_N: in nats before each token, if `SamplerConfig.entropies` is set.
    """

    ids: tuple[int, ...]
    logprob_N: Float32[np.ndarray, " N"]
    logprob: float
    finish_reason: str
    entropy_N: Float32[np.ndarray, " N"] | None = None

    def followed(self, new: Drawn) -> Drawn:
        """Returns this sample with a continuation appended, and the continuation's reason; drops entropies."""
        logprob_N = np.concatenate([self.logprob_N, new.logprob_N])
        return Drawn(self.ids + new.ids, logprob_N, self.logprob + new.logprob, new.finish_reason)


NOTHING = Drawn((), np.zeros(0, np.float32), 0.0, "open")
"""A chain before its first token."""


class Sampler:
    """A `Policy` of a language model on a mesh. `logprob` is under the model itself: temperature 1, all tokens.

    A sample's tokens do not depend on other samples in the batch, except through the last bits of its logits. If the
    tokenizer has no end of text, chains only end at `max_tokens`. Whether they fit the model's context is not checked.

    Attributes:
      params, config: the model's, with one group per layer, and key-value heads repeated for the mesh.
      devices: number of row parts on the mesh.
      watch: progress callback during a call: count of tokens and finished samples so far.
      took: callback (position, sample) of `sample` for each finished sample, or `None`; sample j of prefix i has
        position i * n + j.

    Raises ValueError if the head is not a language head, or the model does not fit the mesh. The first sample raises
    NotImplementedError if a layer cannot decode with a cache. A call with new shapes first waits for their compilation.
    """

    def __init__(
        self, params: Mapping, config: ModelConfig, tokenizer: Tokenizer, mesh: Mesh, options: SamplerConfig, name: str,
        move: Move | None = None, take: bool = False,
    ):  # fmt: skip
        if find(config.head).channels:
            raise ValueError(f"{name}: its head is {config.head!r}; a policy has a language head")
        self.options, self.mesh, self.tokenizer, self._move = options, mesh, tokenizer, move
        self.watch: Callable[[int, int], None] = lambda tokens, ended: None
        self.took: Callable[[int, Sample], None] | None = None
        self.devices = row_parts(mesh)
        self._stacked = config
        self._dtype: Dtype = options.dtype or config.dtype
        self.config = decoding_config(config, mesh.shape["tensor"], self._dtype)
        check_mesh(self.config, mesh, self.devices)
        check_model(self.config, context=mesh.shape["context"])
        prompted = prompt_layout(tokenizer, options.prompt, options.delimiter) if options.prompt else None
        self.layout = prompted or native_layout(tokenizer)
        self._table_VP = decode.progress_table(tokenizer, options.delimiter, config.vocab_size)
        self._stop_V = np.arange(config.vocab_size) == (-1 if tokenizer.eos is None else tokenizer.eos)
        sampled = {field: getattr(options, field) for field in ("temperature", "top_p", "max_tokens", "prompt")}
        stored = [options.dtype] if options.dtype else []
        self._digest = digest([sampled, options.delimiter, config, self.layout, *stored])[:12]
        self.push(params, name, take)

    def push(self, params: Mapping, name: str, take: bool = False) -> None:
        """Replaces the parameters by a copy of others for the same model, without recompilation; waits for the copy.

        `params` are {"decoder", "head"}, as trained, with merged adapters. They may be on a mesh of several processes,
        which must all push together. `name` identifies the parameters; the policy's name adds the options. `take`
        removes the parameters from their dictionaries (see `decoding_copy`).
        """
        self.params: Mapping = {}  # the old copy goes before the new one is made
        self.params = decoding_copy(params, self._stacked, self.mesh, self._dtype, self._move, take)
        self.name = f"{name}#{self._digest}"

    def stop_at(self, token: int) -> None:
        """Makes all later samples also end at this token id, with reason `stop`; the policy's `name` stays."""
        self._stop_V = self._stop_V | (np.arange(len(self._stop_V)) == token)

    def sample(self, prefixes: Sequence[Prefix], n: int, *, until: Until, seed: int) -> list[list[Sample]]:
        """See `Policy.sample`. No sample is marked `error`; a failure, e.g. of memory, raises."""

        def ended(new: Mapping[int, Drawn]) -> None:
            if (took := self.took) is not None:
                for place, sample in new.items():
                    took(place, self._sample(sample, until=until))

        drawn = self.draw(prefixes, n, until=until, seed=seed, ended=ended)
        return [[self._sample(sample, until=until) for sample in samples] for samples in drawn]

    def draw(
        self, prefixes: Sequence[Prefix], n: int, *, until: Until, seed: int,
        stream: tuple[int, ...] = (), ended: Callable[[Mapping[int, Drawn]], None] = lambda new: None,
    ) -> list[list[Drawn]]:  # fmt: skip
        """Like `sample`, but returns tokens. Different values of `stream` give independent samples.

        `seed` is the number of each prefix's first sample. No sample's reason is `open`. `ended` receives the samples
        that ended since its last call, maybe none, by position (i * n + j for sample j of prefix i).
        """
        prompts = list(map(self.prompt, prefixes))
        alone = until == "end" and max(map(len, prompts), default=0) <= self.options.max_tokens
        m, most = jobs_at_once(len(prefixes), n, self.options.rows, self.devices, alone)
        jobs = [
            Job(tuple(prompt), text_hash(prefix, stream), tuple(range(i * n + j, i * n + min(j + m, n))),
                tuple((seed + k) % 2**32 for k in range(j, min(j + m, n))))
            for i, (prefix, prompt) in enumerate(zip(prefixes, prompts, strict=True))
            for j in range(0, n, m)
        ]  # fmt: skip
        jobs.sort(key=lambda job: len(job.prompt))  # prompts of like length together
        drawn = self._drawn(jobs, m, most, until, ended)
        return [[drawn[i * n + j] for j in range(n)] for i in range(len(prefixes))]

    def go_on(self, wanted: Sequence[Wanted], needed: int) -> list[Drawn]:
        """Continues open chains until `wanted[:needed]` have all ended; returns all, in order, with their old tokens.

        Unfinished chains have the reason `open`; some may have no new token, if no row was free. They have no
        entropies. A chain's tokens depend on the parameters at their sampling, but not on interruptions.
        """
        _, most = jobs_at_once(len(wanted), 1, self.options.rows, self.devices)
        jobs = [
            Job((*x.prompt, *x.begun.ids), x.hash, (i,), (x.number % 2**32,), len(x.begun.ids), i < needed)
            for i, x in enumerate(wanted)
        ]
        drawn = self._drawn(jobs, 1, most, "end")
        return [x.begun.followed(drawn[i]) if i in drawn else x.begun for i, x in enumerate(wanted)]

    def prompt(self, prefix: Prefix) -> list[int]:
        """Returns the token ids before a sample: the prompt's, then the steps'."""
        steps = (self.layout.step(text, number) for number, text in enumerate(prefix.steps))
        return [*self.layout.problem(prefix.problem), *(i for ids in steps for i in ids)]

    def rows(self, count: int) -> int:
        """Returns the padded row count for `count` rows: a power of two per device."""
        return self.devices * padded_size(-(-count // self.devices))

    def _drawn(
        self, jobs: Sequence[Job], m: int, most: int, until: Until,
        ended: Callable[[Mapping[int, Drawn]], None] = lambda new: None,
    ) -> dict[int, Drawn]:  # fmt: skip
        """Decodes jobs in at most `most` rows, refilling finished rows; returns samples by position.

        Stops once no needed sample is unfinished.
        """
        if not jobs:
            return {}
        waiting, drawn = collections.deque(jobs), {}
        rows = DecodingRows(self, self.rows(min(most, len(jobs))), m, until)
        while True:
            free = rows.free()
            if waiting and (len(free) >= rows.enough or len(free) == len(rows.jobs)):
                rows.fill(free, [waiting.popleft() for _ in free[: len(waiting)]])
            rows.decode(rows.enough if waiting else len(rows.jobs) + 1)
            tokens, whole = rows.progress()
            self.watch(sum(len(row.ids) for row in drawn.values()) + tokens, len(drawn) + whole)
            last = not rows.needed() and not (waiting and waiting[0].needed)
            new = rows.collect(range(len(rows.jobs)) if last else rows.ended())
            ended(new)
            drawn |= new
            if last:
                return drawn
            if not waiting:
                rows.drop_ended()
            rows.grow_if_full()

    def decoded(
        self, past: decode.Past, length_B: np.ndarray, last_B: np.ndarray, number_B: np.ndarray, hash_B: np.ndarray,
        end_B: np.ndarray, m: int, until: Until, kept: Callable[[decode.DecodingState, np.ndarray], None] | None = None,
    ) -> list[Drawn]:  # fmt: skip
        """Decodes m samples after each row of `past`, which must lack the last token before them.

        Returns B samples, m per row in order; padding gives samples without tokens.

        Args:
          length_B: number of tokens before each sample.
          last_B: the last of them.
          number_B: uint32, a sample's random key, together with `hash_B`; equal pairs give equal samples.
          hash_B: see `text_hash`.
          end_B: `decode.RUNNING`, or `decode.STOP` for padding.
          until: `step` or `end`, as in `Policy.sample`.
          kept: called with the state and each row's place in `past` before rows are dropped, and at the end. Some
              samples may be unfinished; a later call has them again, with all their tokens.
        """
        rows = DecodingRows(self, len(end_B) // m, m, until)
        rows.begin(past, length_B, last_B, number_B, hash_B, end_B)
        drawn: dict[int, Drawn] = {}
        while rows.needed():
            rows.decode(len(rows.jobs) + 1)
            drawn |= rows.collect(rows.ended(), kept if not rows.needed() else None)
            rows.drop_ended(kept)
            rows.grow_if_full()
        return [drawn[b] for b in range(len(end_B))]

    def _sample(self, drawn: Drawn, *, until: Until) -> Sample:
        text = self.tokenizer.decode(list(drawn.ids[:-1] if drawn.finish_reason == "stop" else drawn.ids))
        steps = tuple(map(step_text, filter(str.strip, text.split(self.options.delimiter))))
        steps = steps[:1] if until == "step" else steps
        by_token: dict[str, Any] = {}
        if self.options.logprobs:
            pairs = zip(drawn.ids, drawn.logprob_N.tolist(), strict=True)
            logprobs = tuple((self.tokenizer.decode([i]), LogProb(logprob)) for i, logprob in pairs)
            by_token = {"token_logprobs": logprobs, "token_ids": drawn.ids}
        if drawn.entropy_N is not None:
            by_token["token_entropies"] = tuple(drawn.entropy_N.tolist())
        return Sample(steps, len(drawn.ids), drawn.finish_reason, drawn.logprob, **by_token)

    def step_stops(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Returns the index after the last token of each delimited step in `ids`, and the progress after all of them.

        The progress is the column of `decode.progress_table` for the next token; 0 if `ids` is empty or ends a step.
        """
        stops, progress = [], 0
        for index, token in enumerate(ids, start=1):
            progress = int(self._table_VP[token, progress])
            if progress < 0:
                stops.append(index)
                progress = 0
        return stops, progress


# ---- A copy of a model for decoding: unstacked layers in their storage type, on the decoding mesh.

Stored = Callable[[Mapping], dict]
"""Maps some parameters to the sampler's storage format."""

Move = Callable[[Stored, Mapping, Mesh], Any]
"""Copies some parameters to a mesh, in the given storage format."""


def decoding_config(config: ModelConfig, tensor: int, dtype: Dtype) -> ModelConfig:
    """Returns the config of a decoding copy, whose heads `tensor` devices split, stored as `dtype`.

    bfloat16 and float32 also set the computation type; int8 keeps it.
    """
    return dataclasses.replace(
        config, layer_groups=(1,) * config.layers, kv_heads=config.kv_heads * repeats(config, tensor),
        dtype=config.dtype if dtype == "int8" else dtype,
    )  # fmt: skip


def repeats(config: ModelConfig, tensor: int) -> int:
    """Returns how often, at least once, each key-value head must occur for an even split over `tensor` devices."""
    return math.lcm(config.kv_heads, tensor) // config.kv_heads


def decoding_copy(
    params: Mapping, config: ModelConfig, mesh: Mesh, dtype: Dtype, move: Move | None = None, take: bool = False
) -> dict:
    """Copies parameters for `decoding_config` to a mesh of this process's devices; waits until they are there.

    Returns {"decoder": {"layers_0": {role: array}, ..., "embed", "final_norm"}, "head": ...}, without a tied head.
    `params` are on the run's mesh, and all processes must call this together. Layers are transferred one by one, in
    their storage type: beyond the two models, only a few layers occupy memory. `move` defaults to `stored_here`. With
    `take`, copied parts are removed from the dictionaries in `params`, so only one model and a few layers occupy
    memory.
    """
    times, move, decoder = repeats(config, mesh.shape["tensor"]), move or stored_here, params["decoder"]
    copy, places = {}, layer_places(config)

    def moved(stored: Stored, part: Mapping) -> dict:
        return move(dict if take and _is_stored(part, stored) else stored, part, mesh)

    for layer, (group, index) in enumerate(places):
        stack = {role: decoder[f"layers_{group}"][role] for role in index}
        copy[f"layers_{layer}"] = moved(lambda stack, index=index: stored_layer(stack, index, times, dtype), stack)
        del stack
        if take and all(other != group for other, _ in places[layer + 1 :]):
            del decoder[f"layers_{group}"]
    for name in sorted(name for name in decoder if not name.startswith("layers_")):  # everywhere in one order
        copy |= moved(lambda arrays: stored_rest(arrays, dtype), {name: decoder[name]})
        if take:
            del decoder[name]
    others = {name: x for name, x in params.items() if name != "decoder"}
    return {**moved(lambda arrays: stored_rest(arrays, dtype), others), "decoder": copy}


def _is_stored(part: Mapping, stored: Stored) -> bool:
    """Returns whether a part already has the storage format: an unstacked layer of the same types."""
    leaves = jax.tree.leaves(part)
    with jax.set_mesh(leaves[0].sharding.mesh) if leaves else contextlib.nullcontext():
        new = jax.eval_shape(stored, part)
    return jax.tree.map(lambda x: (x.shape, x.dtype), dict(part)) == jax.tree.map(lambda x: (x.shape, x.dtype), new)


def stored_here(stored: Stored, part: Mapping, mesh: Mesh) -> dict:
    """Copies some parameters, in storage format, to a mesh of this process's devices; waits until they are there.

    All processes of the group must call this together. An empty `part` gives {}.
    """
    with jax.set_mesh(jax.tree.leaves(part)[0].sharding.mesh if part else mesh):
        kept = stored(part)
    return jax.block_until_ready(jax.tree.map(lambda x, place: copied(x, mesh, place), kept, places_of(kept, mesh)))


def layer_places(config: ModelConfig) -> list[tuple[int, dict[str, np.int32]]]:
    """Returns (group, {role: index in the group's stack}) for each layer, all from 0."""
    places = []
    for group, span in enumerate(layers.spans(config)):
        having = layers.places(config, *span)
        for layer in range(*span):
            places.append((group, {role: np.int32(having[role].index(layer)) for role in layers.roles(config, layer)}))
    return places


def places_of(params: Mapping, mesh: Mesh) -> dict:
    """Returns each stored parameter's `PartitionSpec` on a mesh, in the same nested dictionaries."""

    def place(path, x) -> PartitionSpec:
        role = next(key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey))
        split = tuple(spec(*(axes_of(role) or (None,) * x.ndim), mesh=mesh))
        # A scale of int8 weights has size 1 along the axes that products sum over.
        return PartitionSpec(*(axis if size > 1 else None for axis, size in zip(split, x.shape, strict=True)))

    return jax.tree_util.tree_map_with_path(place, dict(params))


@functools.partial(jax.jit, static_argnums=(2, 3))
def stored_layer(stack: Mapping, index: Mapping[str, Int[Array, ""]], times: int, dtype: Dtype) -> dict:
    """Returns one layer from a stack, in storage format `dtype`, with key-value heads repeated `times` times.

    `index` has the layer's place in the stack by role, as in `layer_places`; `times` is from `repeats`. Arrays, by
    role, keep a first axis of size 1.
    """

    layer = {role: jax.lax.dynamic_slice_in_dim(w, index[role], 1, 0) for role, w in stack.items()}
    return {role: held(role, _repeated(role, w, times), dtype) for role, w in layer.items()}


@functools.partial(jax.jit, static_argnums=1)
def stored_rest(params: Mapping, dtype: Dtype) -> dict:
    """Returns a copy, in storage format `dtype`, of parameters outside layers: embedding, last norm and head.

    The dictionaries are the same. With int8 the head's matrix is bfloat16.
    """

    def stored(path, x: Array) -> Array | Int8:
        of_head = path[-1].key not in ("embed", "final_norm")
        return held(path[-1].key, jnp.copy(x), "bfloat16" if of_head and dtype == "int8" else dtype)

    return jax.tree_util.tree_map_with_path(stored, dict(params))


def _repeated(role: str, w: Array, times: int) -> Array:
    """Repeats each key-value head `times` times, and distributes its query heads over the copies."""
    if times == 1 or role not in ATTENTION.weights or "K" not in ATTENTION.weights[role].axes:
        return w
    axis, axes = axes_of(role).index("kv_heads"), [None if name == "kv_heads" else name for name in axes_of(role)]
    if (place := sharding(*axes)) is not None:
        w = jax.sharding.reshard(w, place)
    if "G" not in ATTENTION.weights[role].axes:
        return jnp.repeat(w, times, axis=axis)
    K, G = w.shape[axis : axis + 2]
    return reshape(w, (*w.shape[:axis], K * times, G // times, *w.shape[axis + 2 :]), *axes)


# ---- Rows that decode together.


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One chain of `Sampler.go_on`: its random key, and the tokens sampled so far."""

    prompt: tuple[int, ...]
    hash: int  # `text_hash`, beside the number
    number: int
    begun: Drawn = NOTHING


@dataclasses.dataclass(frozen=True)
class Job:
    """Samples after one prompt, in one row.

    places: positions of the samples in the result. numbers: their sample numbers.
    begun: number of earlier sampled tokens at the end of the prompt. needed: the result waits for them.
    """

    prompt: tuple[int, ...]
    hash: int
    places: tuple[int, ...]
    numbers: tuple[int, ...]
    begun: int = 0
    needed: bool = True


class DecodingRows:
    """R rows of m samples, each row with its own prompt; methods change the rows in place.

    Samples begin and end at different times: a row's tokens are in a ring buffer (`decode.DecodingState`), from
    `since_R` on. A row with a job is busy until its samples are collected.
    """

    def __init__(self, sampler: Sampler, R: int, m: int, until: Until):
        self.sampler, self.m, self.at_step = sampler, m, until == "step"
        limit = sampler.options.max_tokens
        self.enough = sampler.devices * padded_size(max(1, R // REFILL // sampler.devices))
        self.jobs: list[Job | None] = [None] * R
        self.since_R, self.rows = np.zeros(R, np.int64), np.arange(R)
        room = min(4 * SHORTEST_SAMPLE, max(SHORTEST_SAMPLE, padded_size(limit) // 4), padded_size(limit))
        self._put = functools.partial(put_rows, mesh=sampler.mesh)
        B = R * m
        self.host = {name: np.zeros(B, np.int32) for name in ("last_B", "progress_B", "begun_B", "length_B", "first_B")}
        self.host |= {name: np.zeros(B, np.uint32) for name in ("number_B", "hash_B")}
        self.host |= {"end_B": np.full(B, decode.STOP, np.int32), "logprob_B": np.zeros(B, np.float32)}
        self.host |= {"needed_B": np.zeros(B, bool)}
        self.past: decode.Past | None = None
        whole = NamedSharding(sampler.mesh, spec())
        self._tables = jax.device_put((sampler._table_VP, sampler._stop_V), whole)
        with jax.set_mesh(sampler.mesh):
            zero_BN = np.zeros((B, room), np.float32)
            self.samples = decode.DecodingState(
                count=jnp.int32(0), written_BN=self._put(zero_BN.astype(np.int32)), logprob_BN=self._put(zero_BN),
                entropy_BN=self._put(zero_BN) if sampler.options.entropies else None,
                cache=decode.empty_cache(sampler.config, B, room), **self._fields(),
            )  # fmt: skip

    def _fields(self) -> dict[str, Any]:
        names = ("last_B", "progress_B", "end_B", "begun_B", "length_B", "logprob_B")
        return {name: self._put(self.host[name]) for name in names}

    def begin(self, past: decode.Past, length_B, last_B, number_B, hash_B, end_B) -> None:
        """Begins all samples, given the prompts' keys and values; arguments as in `Sampler.decoded`."""
        self.host |= {"last_B": last_B, "number_B": number_B, "hash_B": hash_B, "end_B": end_B.copy()}
        self.host |= {"first_B": length_B - 1, "needed_B": np.ones(len(end_B), bool)}
        places = np.arange(len(end_B)).reshape(-1, self.m).tolist()
        self.jobs = [Job((), 0, tuple(group), tuple(group)) for group in places]
        self.past = past
        self._begin()

    def fill(self, free: Sequence[int], jobs: Sequence[Job]) -> None:
        """Begins job i in row `free[i]`, with at least as many rows as jobs; computes each distinct prompt once."""
        sampler, m, R = self.sampler, self.m, len(self.jobs)
        prompts = list(dict.fromkeys(job.prompt for job in jobs))
        size = padded_size(max(SHORTEST_PROMPT, *map(len, prompts)))
        if self.past is not None and size > self.past.seen_RS.shape[1]:
            self.past = decode.longer(self.past, size)
        size = size if self.past is None else self.past.seen_RS.shape[1]
        U = sampler.rows(len(prompts))
        tokens_US, length_U = np.zeros((U, size), np.int32), np.ones(U, np.int32)
        for u, prompt in enumerate(prompts):
            tokens_US[u, : len(prompt)], length_U[u] = prompt, len(prompt)
        row_R, new_R, count = np.zeros(R, np.int32), np.zeros(R, bool), int(self.samples.count)
        for r, job in zip(free, jobs, strict=False):
            row_R[r], new_R[r], self.jobs[r], self.since_R[r] = prompts.index(job.prompt), True, job, count
            at, used = slice(r * m, (r + 1) * m), slice(r * m, r * m + len(job.numbers))
            of_row = {
                "last_B": job.prompt[-1], "first_B": len(job.prompt) - 1, "begun_B": job.begun, "length_B": 0,
                "progress_B": sampler.step_stops(job.prompt[len(job.prompt) - job.begun :])[1], "logprob_B": 0.0,
                "hash_B": job.hash, "needed_B": job.needed, "end_B": decode.STOP,
            }  # fmt: skip
            for name, value in of_row.items():
                self.host[name][at] = value
            self.host["number_B"][used], self.host["end_B"][used] = job.numbers, decode.RUNNING
        with jax.set_mesh(sampler.mesh):
            new = decode.prefill(sampler.params, sampler.config, *map(self._put, (tokens_US, length_U, row_R)))
            self.past = new if self.past is None else decode.refilled(self.past, new, self._put(new_R))
        self._begin()

    def _begin(self) -> None:
        host = self.host
        with jax.set_mesh(self.sampler.mesh):
            self.samples = dataclasses.replace(self.samples, **self._fields())
            self._first_B = self._put(host["first_B"])
            self._key_B = decode.keys(self._put(host["number_B"]), self._put(host["hash_B"]))

    def decode(self, enough: int) -> None:
        """Decodes until all needed samples, or all in `enough` rows, have ended, or a running sample has no room.

        Waits for the result. In the last case `grow_if_full` must follow.
        """
        sampler, options = self.sampler, self.sampler.options
        with jax.set_mesh(sampler.mesh):
            self.samples = decode.decode_samples(
                sampler.params, sampler.config, options.temperature, options.top_p, self.samples, self.past,
                self._first_B, self._key_B, *self._tables, jnp.bool(self.at_step), jnp.int32(options.max_tokens),
                self._put(self.host["needed_B"]), jnp.int32(enough), entropies=options.entropies,
            )  # fmt: skip
        for name in ("last_B", "progress_B", "end_B", "length_B", "logprob_B"):
            self.host[name] = np.array(getattr(self.samples, name))

    @property
    def _running_R(self) -> np.ndarray:
        return (self.host["end_B"] == decode.RUNNING).reshape(-1, self.m).any(axis=1)

    def needed(self) -> bool:
        """Returns whether a needed sample is unfinished."""
        return bool(((self.host["end_B"] == decode.RUNNING) & self.host["needed_B"]).any())

    def progress(self) -> tuple[int, int]:
        """Returns the uncollected samples' tokens, and the number of finished ones among them."""
        busy_B = np.repeat([job is not None for job in self.jobs], self.m)
        ended_B = busy_B & (self.host["end_B"] != decode.RUNNING) & (self.host["length_B"] > 0)
        return int(self.host["length_B"][busy_B].sum()), int(ended_B.sum())

    def free(self) -> list[int]:
        return [r for r, job in enumerate(self.jobs) if job is None]

    def ended(self) -> list[int]:
        """Returns the uncollected rows whose samples have all ended."""
        return [r for r, runs in enumerate(self._running_R) if not runs and self.jobs[r] is not None]

    def collect(self, rows: Iterable[int], kept: Callable | None = None) -> dict[int, Drawn]:
        """Returns the samples of `rows` by position, and frees these rows; {} if they are free already.

        Unfinished samples have the reason `open`. `kept` receives the state, and each row's place in `past`, first.
        """
        if kept is not None:
            kept(self.samples, self.rows)
        drawn, rows = {}, [r for r in rows if self.jobs[r] is not None]
        if not rows:
            return drawn
        written_BN, logprob_BN = np.asarray(self.samples.written_BN), np.asarray(self.samples.logprob_BN)
        entropy_BN = None if self.samples.entropy_BN is None else np.asarray(self.samples.entropy_BN)
        for r in rows:
            for i, place in enumerate(self.jobs[r].places):  # pyright: ignore[reportOptionalMemberAccess]
                b = r * self.m + i
                at_N = (self.since_R[r] + np.arange(self.host["length_B"][b])) % written_BN.shape[1]
                reason = ("open", "step", "stop", "length")[self.host["end_B"][b]]
                ids, logprob_N = tuple(written_BN[b, at_N].tolist()), logprob_BN[b, at_N]
                entropy_N = None if entropy_BN is None else entropy_BN[b, at_N]
                drawn[place] = Drawn(ids, logprob_N, float(self.host["logprob_B"][b]), reason, entropy_N)
            self.jobs[r] = None
        return drawn

    def drop_ended(self, kept: Callable | None = None) -> None:
        """Drops finished rows, already collected, if this leaves `FEWER` times fewer, and renumbers the others.

        `kept` receives the state, and each row's place in `past`, before the drop.
        """
        left, ended = np.flatnonzero(self._running_R), np.flatnonzero(~self._running_R)
        size = self.sampler.rows(len(left))
        if not len(left) or FEWER * size > len(self.jobs):
            return
        if kept is not None:
            kept(self.samples, self.rows)
        left = np.concatenate([left, ended[: size - len(left)]])
        with jax.set_mesh(self.sampler.mesh):
            state = self.samples, self._first_B, self._key_B, self.past
            state = decode.of_rows(state, self._put(left), self.m)
        self.samples, self._first_B, self._key_B, self.past = state
        index_B = (left[:, None] * self.m + np.arange(self.m)).reshape(-1)
        self.host = {name: x_B[index_B] for name, x_B in self.host.items()}
        self.jobs, self.rows, self.since_R = [self.jobs[r] for r in left], self.rows[left], self.since_R[left]

    def grow_if_full(self) -> None:
        """Doubles the room of all samples, in tokens, if an unfinished one has used its own; else does nothing."""
        room, host = self.samples.written_BN.shape[1], self.host
        if not (host["length_B"][host["end_B"] == decode.RUNNING] >= room).any():
            return
        self.since_R -= int(self.samples.count) - room
        with jax.set_mesh(self.sampler.mesh):
            self.samples = decode.grown(self.samples, 2 * room)


def load_sampler(path: str | os.PathLike, options: SamplerConfig = SamplerConfig()) -> Sampler:
    """Loads the policy in a run's folder (its newest checkpoint), Hugging Face folder or GGUF file, split by heads.

    Every process loads a whole copy for its own devices (`mesh_by_heads`). `hf://` addresses are downloaded.

    Raises FileNotFoundError or ValueError if a file is missing, damaged or not supported, or the model is a reward
    model; ValueError if `options.chat` finds no usable chat template; OSError if the Hub lacks the model or is
    unreachable.
    """
    path = place_of(path)
    if options.chat:
        options = dataclasses.replace(options, prompt=prompt_of(path, options.prompt or "{problem}"), chat=False)
    grid = make_mesh(MeshConfig(), jax.local_devices())  # every process samples by itself
    with jax.set_mesh(grid):
        if kind_of(path) == "run":
            experiment = read(path / RUN)
            config = experiment.model
            params, step = store.load_params(path, experiment, grid)
            params = merge(params, experiment.lora)
        else:
            config = base.model_config(path, head=of_channels(0))
            config = dataclasses.replace(config, layer_groups=(1,) * config.layers)
            params, step = base.load_language_model(path, config), 0
    tokenizer = load_tokenizer(path, config.vocab_size)
    name = f"{path.resolve()}@{step}#{fingerprint(params, tokenizer, grid)}"
    by_heads = mesh_by_heads(config, list(grid.devices.flat))
    return Sampler(params, config, tokenizer, by_heads, options, name, take=True)


# ---- Batches.


def jobs_at_once(prefixes: int, n: int, rows: int, devices: int, alone: bool = False) -> tuple[int, int]:
    """Returns the samples per job, and the jobs per batch: for `prefixes` prompts with `n` samples each.

    `rows` is the most samples at once, raised to `devices` if less. The first result, and the second per device, are
    powers of two.

    A job is a prompt with up to m of its n samples, which share one copy of its keys; fewer if some devices would
    otherwise be idle; one if `alone`. A row with several samples is refilled only after its longest sample has ended.
    If the prompt is no longer than the samples, this costs more than copies of the prompt's keys.
    """
    rows = max(rows, devices)
    m = 1 if alone else min(padded_size(n), 1 << (rows // devices).bit_length() - 1)
    while m > 1 and prefixes * -(-n // m) < devices:
        m //= 2
    return m, devices * max(1, 1 << (rows // m // devices).bit_length() - 1)


def text_hash(prefix: Prefix, stream: tuple[int, ...]) -> int:
    """Returns a number below 2^32 by the prefix's problem and steps, and the stream, for random keys."""
    text = json.dumps([prefix.problem, *prefix.steps]) + (json.dumps(stream) if stream else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

"""A policy that samples from a language model in this process: a base model, or one that jprm trained.

A prefix's prompt is computed once, and all its samples share the keys. A jitted loop decodes the samples' own tokens
and ends when every sample has ended. Rows, prompts and samples are padded to powers of two, and each combination that
occurs is compiled once.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float32, Int8

from jprm.checkpoints import base, store
from jprm.checkpoints.kinds import RUN, kind_of
from jprm.experiment import read
from jprm.io.outputs import digest as digest_of
from jprm.io.storage import path_of
from jprm.layout import native_layout, prompt_layout
from jprm.methods.chat_template import prompt_of
from jprm.methods.policy import decoding
from jprm.methods.policy.protocol import Prefix, Sample
from jprm.model import decode
from jprm.model.config import ModelConfig
from jprm.model.heads import find, of_channels
from jprm.model.lora import merge
from jprm.model.mesh import MeshConfig, check_mesh, make_mesh, put_rows, row_parts, spec
from jprm.rows import padded_size
from jprm.score.files import digest
from jprm.tokenizer import Tokenizer, load_tokenizer

SHORTEST_PROMPT, SHORTEST_SAMPLE = 64, 32
"""The least tokens of a padded prompt, and of the room for a sample at first. Both are doubled where needed."""

FEWER = 4
"""Rows whose samples have all ended are dropped when a sample's room is doubled, if that leaves so many times fewer."""


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """How a model is sampled.

    Attributes:
      temperature: 0 takes the most probable token.
      top_p: probability mass of the most probable tokens, from which tokens are sampled.
      max_tokens: of a sample; one that reaches it ends with `length`.
      prompt: the text before the steps, with `{problem}` and control tokens such as <|im_start|>. Empty: jprm's own
        layout, in which it trains policies and PRMs.
      chat: whether `prompt` is the user's message (`{problem}` if empty), which the model's chat template surrounds.
      delimiter: text with a line break that ends every step; a newline in jprm's own layout.
      rows: the most samples decoded at once.
      logprobs: whether samples hold the log-probability of each token, at the sampling temperature.
    """

    temperature: float = 0.8
    top_p: float = 1.0
    max_tokens: int = 512
    prompt: str = ""
    delimiter: str = "\n"
    rows: int = 64
    logprobs: bool = False
    chat: bool = False

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}: it must be 0 or more")
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
      ids: the sampled tokens, with the end of text if it was sampled.
      logprob_N: of each token, float32, at the sampling temperature and over all tokens.
      logprob: the sum under the model itself, at temperature 1.
      finish_reason: as of `Sample`.
    """

    ids: tuple[int, ...]
    logprob_N: Float32[np.ndarray, " N"]
    logprob: float
    finish_reason: str


class Sampler:
    """A `Policy` of a language model on a mesh. `logprob` is under the model itself: temperature 1, all tokens.

    A sample's tokens do not depend on the samples computed with it, except through the last bits of its logits. Without
    an end of text in the tokenizer, chains never end.

    Raises ValueError for a model that cannot be sampled.
    """

    def __init__(
        self, params: Mapping, config: ModelConfig, tokenizer: Tokenizer, mesh: Mesh, options: SamplerConfig, name: str
    ):
        if find(config.head).channels:
            raise ValueError(f"{name}: its head is {config.head!r}; a policy has a language head")
        check_mesh(config, mesh, row_parts(mesh))
        self.options, self.mesh, self.tokenizer = options, mesh, tokenizer
        self._stacked = config
        prompted = prompt_layout(tokenizer, options.prompt, options.delimiter) if options.prompt else None
        self.layout = prompted or native_layout(tokenizer)
        self._table_VP = progress_table(tokenizer, options.delimiter, config.vocab_size)
        self._stop_V = np.arange(config.vocab_size) == (-1 if tokenizer.eos is None else tokenizer.eos)
        sampled = {field: getattr(options, field) for field in ("temperature", "top_p", "max_tokens", "prompt")}
        self._digest = digest_of([sampled, options.delimiter, config, self.layout])[:12]
        self.push(params, name)

    def push(self, params: Mapping, name: str) -> None:
        """Replaces the parameters by a copy of others, of the same model on the same mesh; nothing is compiled again.

        `name` says whose they are; the policy's own name adds the options.
        """
        self._params = None  # else there were two copies in memory
        with jax.set_mesh(self.mesh):
            self._params, self._config = decode.unstacked(params, self._stacked)
        self.name = f"{name}#{self._digest}"

    def stop_at(self, token: int) -> None:
        """Ends samples at this token too."""
        self._stop_V = self._stop_V | (np.arange(len(self._stop_V)) == token)

    @property
    def params(self) -> Mapping:
        assert self._params is not None  # it is while `push` replaces it
        return self._params

    @property
    def config(self) -> ModelConfig:
        """The model's, with every layer in a group of its own."""
        return self._config

    def sample(
        self, prefixes: Sequence[Prefix], n: int, *, until: Literal["step", "end"], seed: int
    ) -> list[list[Sample]]:
        """As `Policy.sample`."""
        drawn = self.draw(prefixes, n, until=until, seed=seed)
        return [[self._sample(each, until=until) for each in samples] for samples in drawn]

    def draw(
        self, prefixes: Sequence[Prefix], n: int, *, until: Literal["step", "end"], seed: int,
        stream: tuple[int, ...] = (),
    ) -> list[list[Drawn]]:  # fmt: skip
        """Returns what `sample` does, as tokens. `stream` numbers draws that are independent of other streams'."""
        prompts, hashes = (
            [self.prompt(prefix) for prefix in prefixes],
            [text_hash(prefix, stream) for prefix in prefixes],
        )
        devices = row_parts(self.mesh)
        m, size = jobs_at_once(len(prefixes), n, self.options.rows, devices)
        jobs = [(i, j) for i in range(len(prefixes)) for j in range(0, n, m)]
        jobs.sort(key=lambda job: len(prompts[job[0]]))  # prompts of like length together
        drawn: list[list[Any]] = [[None] * n for _ in prefixes]
        for first in range(0, len(jobs), size):
            batch = jobs[first : first + size]
            for (i, j), samples in zip(batch, self._batch(prompts, hashes, batch, m, n, until, seed), strict=True):
                drawn[i][j : j + m] = samples
        return drawn

    def prompt(self, prefix: Prefix) -> list[int]:
        """Returns the token ids that a sample follows."""
        steps = (self.layout.step(text, number) for number, text in enumerate(prefix.steps))
        return [*self.layout.problem(prefix.problem), *(i for ids in steps for i in ids)]

    def _batch(self, prompts, hashes, jobs, m: int, n: int, until: str, seed: int) -> list[list[Drawn]]:
        """Returns the samples of a batch of jobs."""
        devices = row_parts(self.mesh)
        distinct = list(dict.fromkeys(i for i, _ in jobs))
        U, R = (devices * padded_size(-(-len(x) // devices)) for x in (distinct, jobs))
        tokens_US = np.zeros((U, padded_size(max(SHORTEST_PROMPT, *(len(prompts[i]) for i in distinct)))), np.int32)
        length_U = np.ones(U, np.int32)
        for u, i in enumerate(distinct):
            length_U[u] = len(prompts[i])
            tokens_US[u, : length_U[u]] = prompts[i]
        row_R = np.zeros(R, np.int32)
        row_R[: len(jobs)] = [distinct.index(i) for i, _ in jobs]
        row_B = np.repeat(row_R, m)
        hash_B, number_B, end_B = (np.zeros(R * m, dtype) for dtype in (np.uint32, np.uint32, np.int32))
        end_B[:] = decoding.STOP  # padding
        for r, (i, j) in enumerate(jobs):
            draws = np.arange(j, min(j + m, n))
            job_B = slice(r * m, r * m + len(draws))
            hash_B[job_B], number_B[job_B], end_B[job_B] = hashes[i], (seed + draws) % 2**32, decoding.RUNNING
        put = functools.partial(put_rows, mesh=self.mesh)
        with jax.set_mesh(self.mesh):
            past = decoding.prefill(self._params, self._config, put(tokens_US), put(length_U), put(row_R))
        length_B, last_B = length_U[row_B], tokens_US[row_B, length_U[row_B] - 1]
        drawn = self.decoded(past, length_B, last_B, number_B, hash_B, end_B, m, until)
        return [drawn[r * m : r * m + min(m, n - j)] for r, (_, j) in enumerate(jobs)]

    def decoded(
        self, past: decode.Past, length_B: np.ndarray, last_B: np.ndarray, number_B: np.ndarray, hash_B: np.ndarray,
        end_B: np.ndarray, m: int, until: str, kept: Callable[[decoding.Samples, np.ndarray], None] | None = None,
    ) -> list[Drawn]:  # fmt: skip
        """Returns samples, m after each row of `past`, which lacks the last token before them.

        Args:
          length_B, last_B: how many tokens stand before each sample, and the last of them.
          number_B, hash_B: what numbers a sample: equal ones are sampled alike.
          end_B: `decoding.RUNNING`, or `decoding.STOP` for padding.
          kept: takes samples that have ended, with their keys, and the row of `past` of every m of them.
        """
        limit = self.options.max_tokens
        room = min(4 * SHORTEST_SAMPLE, max(SHORTEST_SAMPLE, padded_size(limit) // 4), padded_size(limit))
        put, B = functools.partial(put_rows, mesh=self.mesh), len(end_B)
        with jax.set_mesh(self.mesh):
            zero_B = np.zeros(B, np.int32)
            samples = decoding.Samples(
                count=jnp.int32(0),
                last_B=put(last_B),
                progress_B=put(zero_B),
                end_B=put(end_B),
                written_BN=put(np.zeros((B, room), np.int32)),
                logprob_BN=put(np.zeros((B, room), np.float32)),
                length_B=put(zero_B),
                logprob_B=put(zero_B.astype(np.float32)),
                cache=decoding.empty_cache(self._config, B, room),
            )
            key_B = decoding.keys(put(number_B), put(hash_B))
            return self._to_the_end((samples, put(length_B - 1), key_B, past), m, until, kept)

    def _to_the_end(self, state, m: int, until: str, kept) -> list[Any]:
        """Returns the samples, m of each row, that begin as `state`: `decoding.Samples`, and what `of_rows` takes."""
        options, (samples, *rest) = self.options, state
        table_VP, stop_V = jax.device_put((self._table_VP, self._stop_V), NamedSharding(self.mesh, spec()))
        rows = np.arange(len(samples.end_B) // m)
        devices, drawn = row_parts(self.mesh), [None] * len(samples.end_B)
        while True:
            first_B, key_B, past = rest
            samples = decoding.decode_samples(
                self._params, self._config, options.temperature, options.top_p, samples, past, first_B, key_B,
                table_VP, stop_V, jnp.bool(until == "step"), jnp.int32(options.max_tokens),
            )  # fmt: skip
            runs_R = (np.asarray(samples.end_B) == decoding.RUNNING).reshape(-1, m).any(axis=1)
            if int(samples.count) >= options.max_tokens or not runs_R.any():
                _collect(samples, rows, m, drawn, kept)
                return drawn
            left, ended = np.flatnonzero(runs_R), np.flatnonzero(~runs_R)
            size = devices * padded_size(-(-len(left) // devices))
            if FEWER * size <= len(rows):
                _collect(samples, rows, m, drawn, kept)
                left = np.concatenate([left, ended[: size - len(left)]])
                samples, *rest = decoding.of_rows((samples, *rest), put_rows(left, self.mesh), m)
                rows = rows[left]
            samples = decoding.grown(samples, 2 * samples.written_BN.shape[1])

    def _sample(self, drawn: Drawn, *, until: str) -> Sample:
        text = self.tokenizer.decode(list(drawn.ids[:-1] if drawn.finish_reason == "stop" else drawn.ids))
        steps = tuple(map(step_text, filter(str.strip, text.split(self.options.delimiter))))
        steps = steps[:1] if until == "step" else steps
        by_token = ()
        if self.options.logprobs:
            pairs = zip(drawn.ids, drawn.logprob_N.tolist(), strict=True)
            by_token = tuple((self.tokenizer.decode([i]), logprob) for i, logprob in pairs)
        return Sample(steps, len(drawn.ids), drawn.finish_reason, drawn.logprob, token_logprobs=by_token)

    def step_stops(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns, for each step that its delimiter ends in these ids, the index after its last token."""
        return step_stops(self._table_VP, ids)


def _collect(samples: decoding.Samples, rows: np.ndarray, m: int, drawn: list[Any], kept=None) -> None:
    """Puts samples, of which row i's are the batch's from `rows[i] * m` on, into their places."""
    if kept is not None:
        kept(samples, rows)
    fields = (samples.written_BN, samples.logprob_BN, samples.length_B, samples.end_B, samples.logprob_B)
    for b, (ids_N, logprob_N, N, end, logprob) in enumerate(zip(*map(np.asarray, fields), strict=True)):
        reason = ("length", "step", "stop")[end]
        drawn[rows[b // m] * m + b % m] = Drawn(tuple(ids_N[:N].tolist()), logprob_N[:N], float(logprob), reason)


def load_sampler(
    path: str | os.PathLike, options: SamplerConfig = SamplerConfig(), mesh: MeshConfig | None = None
) -> Sampler:
    """Loads the policy in a run's folder, a Hugging Face folder, or a GGUF file.

    Raises FileNotFoundError or ValueError, naming what is missing, damaged or not supported.
    """
    path = path_of(path)
    if options.chat:
        options = dataclasses.replace(options, prompt=prompt_of(path, options.prompt or "{problem}"), chat=False)
    grid = make_mesh(mesh or MeshConfig())
    with jax.set_mesh(grid):
        if kind_of(path) == "run":
            experiment = read(path / RUN)
            config = experiment.model
            params, step = store.load_params(path, experiment, grid)
            params = merge(params, experiment.lora)
        else:
            config = base.model_config(path, head=of_channels(0))
            config = dataclasses.replace(config, layer_groups=(1,) * config.layers)
            params, step = {"decoder": base.load_decoder(path, config)}, 0
            if not config.tied_embeddings:
                params["head"] = base.load_language_head(path, config)
    tokenizer = load_tokenizer(path, config.vocab_size)
    name = f"{path.resolve()}@{step}#{digest(params, tokenizer, grid)}"
    return Sampler(params, config, tokenizer, grid, options, name)


# ---- Where steps end in sampled tokens: a table that the decoding loop reads, a token at a time.


def step_text(text: str) -> str:
    """Returns a step's text without line breaks around it and white space after it: code is indented."""
    return text.lstrip("\r\n").rstrip()


def progress_table(tokenizer: Tokenizer, delimiter: str, vocab_size: int) -> Int8[np.ndarray, "V P"]:
    """Returns the progress after a token, by token and progress before it; -1 where the token ends a step.

    Progress is the number of the delimiter's characters at the end of the text, plus the delimiter's length if there is
    more than white space before them: a blank step is no step. A delimiter may end inside a token.
    """
    size = len(delimiter)
    table = np.zeros((vocab_size, 2 * size), np.int8)
    for token in range(vocab_size):
        text = tokenizer.decode([token]) if token < tokenizer.vocab_size else ""
        for progress in range(2 * size):
            table[token, progress] = _advance(text, progress % size, progress >= size, delimiter)
    return table


def _advance(text: str, matched: int, written: bool, delimiter: str) -> int:
    for letter in text:
        written = written or not letter.isspace()
        tail = delimiter[:matched] + letter
        matched = next(k for k in range(len(tail), -1, -1) if tail.endswith(delimiter[:k]))
        if matched == len(delimiter):
            if written:
                return -1
            matched = 0
    return matched + len(delimiter) * written


def step_stops(table_VP: Int8[np.ndarray, "V P"], ids: Sequence[int]) -> tuple[int, ...]:
    """Returns, for each step that its delimiter ends in these ids, the index after its last token."""
    stops, progress = [], 0
    for index, token in enumerate(ids, start=1):
        progress = int(table_VP[token, progress])
        if progress < 0:
            stops.append(index)
            progress = 0
    return tuple(stops)


# ---- Batches.


def jobs_at_once(prefixes: int, n: int, rows: int, devices: int) -> tuple[int, int]:
    """Returns the samples of a job, and the jobs of a batch.

    A job is a prompt and up to m of its n samples: as many as may share one copy of its keys, fewer if some devices
    would have none.
    """
    rows = max(rows, devices)
    m = min(padded_size(n), 1 << (rows // devices).bit_length() - 1)
    while m > 1 and prefixes * -(-n // m) < devices:
        m //= 2
    return m, devices * max(1, 1 << (rows // m // devices).bit_length() - 1)


def text_hash(prefix: Prefix, stream: tuple[int, ...]) -> int:
    text = json.dumps([prefix.problem, *prefix.steps]) + (json.dumps(stream) if stream else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

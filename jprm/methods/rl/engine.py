"""A policy sampled by SGLang or vLLM servers. Parameters reach them as files, and every push is tested.

A server may report an update but keep some or all old weights, and training on its samples then fails silently.
So after every push the server computes log-probabilities for some kept samples. They must equal the learner's within
a tolerance, and their difference must not point back to the last push's parameters, the first push, or only the
old embedding or head.

    sglang   /update_weights_from_disk, /generate
    vllm     /collective_rpc (`reload_weights`, with VLLM_SERVER_DEV_MODE=1) and /reset_prefix_cache, /v1/completions

A server that does not answer is left out, and the others draw its samples; if no server is left, this process does.
Before it is used again, it loads the last push's parameters and is tested.

vLLM stores the head separately even if it is tied (0.32 on CPUs), so a push holds the head as a tensor too. Every
sampling parameter is sent, because a server's defaults (`generation_config.json`) may differ.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from jprm import multihost
from jprm.checkpoints.safetensors import Tensors
from jprm.io.storage import Place, is_remote
from jprm.methods.formats import writing
from jprm.methods.formats.huggingface import LANGUAGE_HEAD, name_of
from jprm.methods.policy.protocol import LogProb, Prefix, Until
from jprm.methods.policy.sampler import Drawn, Sampler, SamplerConfig, Wanted, load_sampler, text_hash
from jprm.methods.policy.transfer import on_own_mesh
from jprm.methods.rl import policy_gradient
from jprm.model import FileDtype
from jprm.model.attention import chain_rows
from jprm.model.config import ModelConfig
from jprm.model.mesh import put, put_rows, row_parts
from jprm.pack import pack
from jprm.rows import Rows, empty_rows, padded_size
from jprm.token_tree import merged, next_tokens
from jprm.tokenizer import Tokenizer

HERE = ""
"""This process, in place of a server's address."""

MOST_BYTES = 2**26
"""The largest reply: one sample's tokens with log-probabilities, or one sequence's log-probabilities."""

Ids = Sequence[int]
Call = tuple[str, dict[str, Any]]
"""A request's path and body."""

Sampled = tuple[list[int], list[float], bool]
"""Ids, their log-probabilities, and whether the end of text was sampled."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The servers, and the tolerance on their log-probabilities.

    Raises ValueError for a malformed or repeated address, a number out of range, or an unset `key_variable`.
    """

    url: str | tuple[str, ...]  # of one server, or of several of a kind, without a path, as http://localhost:30000
    kind: Literal["sglang", "vllm"] = "sglang"
    model: str = ""  # the servers' name of the model; SGLang needs none
    folder: str = ""  # where parameters are written, and servers read them; empty: `engine` in the run's folder
    dtype: FileDtype = "bfloat16"  # of the numbers in these files
    tolerance: float = 0.05  # most nats a token, on average, from the server's log-probabilities to the learner's
    concurrency: int = 64  # requests in flight at once
    timeout_s: float = 600.0  # of one request as a whole, also with a server that sends a byte now and then
    key_variable: str = ""  # the environment variable that holds the key which servers need; empty: none
    patience_s: float = 30.0  # how long samples wait for a server where none answers; then this process draws them

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url.rstrip("/") for url in ((self.url,) if isinstance(self.url, str) else self.url))

    def __post_init__(self):
        if not isinstance(self.url, str):
            object.__setattr__(self, "url", tuple(self.url))
        for url in self.urls or (HERE,):
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"engine.url={url!r}: write a server's address, such as http://localhost:30000")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("engine.url names a server twice")
        if self.key_variable and not os.environ.get(self.key_variable):
            raise ValueError(f"engine.key_variable={self.key_variable!r}: the environment has no such variable")
        if not self.patience_s >= 0:
            raise ValueError(f"engine.patience_s={self.patience_s} must not be below 0")
        if not self.tolerance > 0 or self.concurrency < 1 or not self.timeout_s > 0:
            raise ValueError("engine: tolerance, concurrency and timeout_s must be above 0")


@dataclasses.dataclass(frozen=True)
class Dialect:
    """Requests and replies for one server kind."""

    # (folder, model) to the calls after which it serves the parameters in the folder
    update: Callable[[str, str], list[Call]]
    # (model, prompt, most tokens, seed, end of text) to the call that samples at temperature 1 over all tokens
    draw: Callable[[str, list[int], int, int, int | None], Call]
    drawn: Callable[[Any], Sampled]  # that call's reply
    force: Callable[[str, list[int]], Call]  # (model, ids) to the call that computes these ids' log-probabilities
    forced: Callable[[Any, list[int]], list[float]]  # its reply, and the ids, to one for each but the first


def _checked(ids: Any, logprobs: Any, ended: bool) -> tuple[list[int], list[LogProb], bool]:
    """Checks a sample's ids and log-probabilities. Raises ValueError or TypeError if they are malformed."""
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError("a sample is not a list of ids")
    return ids, [value for _, value in zip(ids, map(LogProb, logprobs), strict=True)], ended


def _sglang_drawn(reply: Any) -> Sampled:
    meta = reply["meta_info"]
    pairs = meta["output_token_logprobs"]
    return [pair[1] for pair in pairs], [pair[0] for pair in pairs], meta["finish_reason"]["type"] == "stop"


def _sglang_forced(reply: Any, ids: list[int]) -> list[float]:
    pairs = reply["meta_info"]["input_token_logprobs"]
    if [pair[1] for pair in pairs] != ids:
        raise ValueError("the reply is of other ids")
    return [pair[0] for pair in pairs[1:]]


def _vllm_drawn(reply: Any) -> Sampled:
    (choice,) = reply["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"] == "stop"


def _vllm_forced(reply: Any, ids: list[int]) -> list[float]:
    logprobs = reply["choices"][0]["prompt_logprobs"]
    return [by_id[str(token)]["logprob"] for by_id, token in zip(logprobs[1:], ids[1:], strict=True)]


_ALL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0}  # fmt: skip


def _ends(eos: int | None) -> list[int]:
    return [] if eos is None else [eos]


DIALECTS = {
    "sglang": Dialect(
        update=lambda folder, model: [("/update_weights_from_disk", {"model_path": folder, "flush_cache": True})],
        draw=lambda model, prompt, most, seed, eos: ("/generate", {
            "input_ids": prompt, "return_logprob": True,
            "sampling_params": {**_ALL, "max_new_tokens": most, "sampling_seed": seed, "stop_token_ids": _ends(eos)},
        }),
        drawn=_sglang_drawn,
        force=lambda model, ids: ("/generate", {
            "input_ids": ids, "return_logprob": True, "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }),
        forced=_sglang_forced,
    ),
    "vllm": Dialect(
        update=lambda folder, model: [
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
            ("/reset_prefix_cache", {}),
        ],
        draw=lambda model, prompt, most, seed, eos: ("/v1/completions", {
            "model": model, "prompt": prompt, **_ALL, "max_tokens": most, "seed": seed, "logprobs": 0,
            "return_token_ids": True, "ignore_eos": True, "stop_token_ids": _ends(eos),  # as the learner ends
        }),
        drawn=_vllm_drawn,
        force=lambda model, ids: ("/v1/completions", {
            "model": model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0,
        }),
        forced=_vllm_forced,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Probes:
    """Settings for the test after each push."""

    prefixes: Sequence[Prefix]  # whose samples are kept
    folder: Place  # where parameters are written, if the server's settings name none
    positions: int  # the most tokens of a prompt and a sample


class RemoteSampler(Sampler):
    """A `Sampler` whose draws and parameters are on servers. Its samples are not reproducible bit for bit.

    `failures` are the reasons why servers were left out, `drawn_here` counts samples drawn by this process; both since
    the last push. The first push is part of the construction.

    Raises ValueError if a server serves other parameters than the pushed ones, the options' temperature or top_p is not
    1, or the folder is in a bucket; ConnectionError if no server answers at first.
    """

    def __init__(
        self, engine: EngineConfig, probes: Probes, params: Mapping, config: ModelConfig, tokenizer: Tokenizer,
        mesh: Mesh, options: SamplerConfig, name: str,
    ):  # fmt: skip
        if options.temperature != 1 or options.top_p != 1:
            raise ValueError("engines sample at temperature=1 and top_p=1: servers report unscaled log-probabilities")
        self.engine, self._calls, self._probes = engine, DIALECTS[engine.kind], probes
        if is_remote(place := engine.folder or probes.folder):
            raise ValueError(f"engine.folder: {place} is in a bucket; name a folder that the server reads too")
        self._folder = pathlib.Path(place)
        self._pushed: pathlib.Path | None = None
        self._key = os.environ[engine.key_variable] if engine.key_variable else ""
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        self._client = httpx2.Client(timeout=engine.timeout_s, headers=headers)
        self._kept: list[tuple[list[int], tuple[int, ...]]] = []  # prompts and samples
        self._written: list[Float32[np.ndarray, " N"]] = []  # their log-probabilities at the first and the last push
        self._turn, self._pushing = threading.Condition(), False
        self._busy = dict.fromkeys((*engine.urls, HERE), 0)  # samples in flight
        self._out: dict[str, str] = {}  # servers that are left out
        self.failures, self.drawn_here = [], 0
        self._reference: tuple[Any, ...] | None = None  # what the last push is tested by
        super().__init__(params, config, tokenizer, mesh, options, name)

    def push(self, params: Mapping, name: str, take: bool = False) -> None:
        """Writes the parameters under `name`, makes the servers load them, and tests that they did.

        Waits for samples in flight, then until the servers have loaded them; draws wait meanwhile. Process 0 writes
        them to step_N in the engine's folder (`name` ends in "@N"), and deletes the last push's. Every process tests:
        one address may be several servers, e.g. localhost on each host. `take` has no effect.

        A server that does not answer is left out. Raises ValueError if one serves other parameters or its reply has
        another form, OSError if the folder cannot be written.
        """
        params = on_own_mesh(params, self.mesh)
        if self._pushed is None:
            self._push(params, name)
            return
        with self._turn:  # servers keep nothing of what is computed with the old parameters
            self._pushing = True
            self._turn.wait_for(lambda: not any(self._busy.values()))
        try:
            if jax.process_count() > 1:
                multihost.everywhere(True)  # the others' samples have ended too
            self._push(params, name)
        finally:
            with self._turn:
                self._pushing = False
                self._turn.notify_all()

    def _push(self, params: Mapping, name: str) -> None:
        before, (pushed, self._out) = self._pushed, multihost.first(lambda: self._load(params, name))
        self._pushed, self.failures, self.drawn_here = pathlib.Path(pushed), [], 0
        for url, reason in self._out.items():
            self._left_out(url, reason)
        if before is None and len(self._out) == len(self.engine.urls):
            raise ConnectionError("; ".join(self._out.values()))
        self._test(params, name, before)
        self.name = f"{name}#{self._digest}"
        if before is not None and before != self._pushed and multihost.is_first():
            shutil.rmtree(before, ignore_errors=True)

    def _load(self, params: Mapping, name: str) -> tuple[str, dict[str, str]]:
        """Writes the parameters and makes the servers load them; returns the folder, and failures by server."""
        out = self._folder / f"step_{name.rpartition('@')[2]}"
        partial = out.with_name(out.name + ".partial")
        for path in (out, partial):
            shutil.rmtree(path, ignore_errors=True)
        partial.mkdir(parents=True)
        positions, dtype = self._probes.positions, self.engine.dtype
        writing.causal_lm(partial, params, self._stacked, self.tokenizer, positions, dtype, tied_head=True)
        partial.rename(out)

        def load(url: str) -> str:
            try:
                self._update(url, out)
            except ConnectionError as error:
                return str(error)
            return ""

        reasons = self._together(load, self.engine.urls)
        return str(out), {url: reason for url, reason in zip(self.engine.urls, reasons, strict=True) if reason}

    def _update(self, url: str, folder: pathlib.Path) -> None:
        for path, body in self._calls.update(str(folder.resolve()), self.engine.model):
            reply = self._post(url, path, body)
            if isinstance(reply, Mapping) and reply.get("success") is False:
                raise ConnectionError(f"{url}{path}: refused the parameters: {reply.get('message')}")

    def _left_out(self, url: str, reason: str) -> None:
        with self._turn:
            if url not in self._out or reason not in self.failures:
                self._out[url] = reason
                self.failures.append(reason)
                print(f"left out until it answers again: {reason}", file=sys.stderr, flush=True)

    def _test(self, params: Mapping, name: str, before: pathlib.Path | None) -> None:
        if not self._kept:
            drawn = self.draw(self._probes.prefixes, 1, until="end", seed=0)
            prompts = [self.prompt(probe) for probe in self._probes.prefixes]
            self._kept = [(prompt, sample.ids) for prompt, (sample,) in zip(prompts, drawn, strict=True)]
        learner_N = log_probabilities(params, self._stacked, self.mesh, self._kept)
        written_N = learner_N
        if self.engine.dtype != "float32":
            written_N = log_probabilities(params, self._stacked, self.mesh, self._kept, self.engine.dtype)
        stale: dict[str, Any] = dict(zip(("the first push", "the last push"), self._written, strict=False))
        if before is not None and multihost.is_first():
            stale |= {f"the last push ({part})": self._with(params, part, before) for part in ("embedding", "head")}
        self._reference = learner_N, written_N, stale, name
        for url in self.engine.urls:
            if url not in self._out:
                try:
                    self._test_server(url)
                except ConnectionError as error:
                    self._left_out(url, str(error))
        self._written = [*self._written[:1], written_N]

    def _test_server(self, url: str) -> None:
        """Raises ValueError if a server does not serve the last push's parameters."""
        if self._reference is None:
            return
        learner_N, written_N, stale, name = self._reference
        server_N = np.concatenate(self._together(functools.partial(self._forced, url), self._kept))
        if reason := refusal(server_N, learner_N, self.engine.tolerance, written_N, stale):
            raise ValueError(f"{url}: after the push of {name} {reason}")

    def _with(self, params: Mapping, part: str, before: pathlib.Path) -> Float32[np.ndarray, " N"]:
        """Returns the kept tokens' log-probabilities with an earlier push's embedding or head."""
        file, decoder = Tensors(before), dict(params["decoder"])
        place, kernel = decoder["embed"].sharding, params.get("head", {}).get("kernel")
        with jax.set_mesh(self.mesh):
            if kernel is None:
                kernel = decoder["embed"].T
            if part == "embedding":
                name = f"model.{name_of('embed', None, self._stacked)}"
                decoder["embed"] = put(file.tensor(name).astype(np.float32), place)
            else:
                kernel = put(np.ascontiguousarray(file.tensor(LANGUAGE_HEAD).astype(np.float32).T), kernel.sharding)
        config = dataclasses.replace(self._stacked, tied_embeddings=False)
        mixed = {"decoder": decoder, "head": {"kernel": kernel}}
        return log_probabilities(mixed, config, self.mesh, self._kept, self.engine.dtype)

    def _forced(self, url: str, kept: tuple[list[int], tuple[int, ...]]) -> Float32[np.ndarray, " T"]:
        prompt, sampled = kept
        ids = [*prompt, *sampled]
        path, body = self._calls.force(self.engine.model, ids)
        logprobs = self._read(url, path, body, lambda reply: list(map(LogProb, self._calls.forced(reply, ids))))
        return np.array(logprobs[len(prompt) - 1 :], np.float32)

    def draw(
        self, prefixes: Sequence[Prefix], n: int, *, until: Until, seed: int,
        stream: tuple[int, ...] = (), ended: Callable[[Mapping[int, Drawn]], None] = lambda new: None,
    ) -> list[list[Drawn]]:  # fmt: skip
        """Like `Sampler.draw`, with its arguments, for whole chains; blocks until all are drawn.

        If no server answers for `engine.patience_s` seconds, this process draws the rest, with a copy of the last push.
        Raises NotImplementedError unless `until` is `end`, ValueError for a malformed reply or a readmitted server with
        other parameters.
        """
        if until != "end":
            raise NotImplementedError("an engine samples whole chains: until='end'")
        jobs = [(self.prompt(p), (text_hash(p, stream) + seed + j) % 2**31) for p in prefixes for j in range(n)]
        drawn: dict[int, Drawn] = {}
        draw: Callable[..., Sequence[Drawn | None]] = self._drawn_by_servers
        end = time.monotonic() + self.engine.patience_s
        while missing := [i for i in range(len(jobs)) if i not in drawn]:
            samples = zip(missing, draw([jobs[i] for i in missing]), strict=True)
            ended(new := {i: sample for i, sample in samples if sample is not None})
            drawn |= new
            if time.monotonic() >= end:
                draw = self._drawn_in_this_process
            elif len(drawn) < len(jobs):
                time.sleep(min(1.0, self.engine.patience_s / 10))
                self._ask_again()
        return [[drawn[i * n + j] for j in range(n)] for i in range(len(prefixes))]

    def _drawn_by_servers(self, jobs: Sequence[tuple[list[int], int]]) -> list[Drawn | None]:
        return self._together(self._drawn_somewhere, jobs)

    def _drawn_somewhere(self, job: tuple[list[int], int]) -> Drawn | None:
        """Returns a sample from the least busy server, if one answers."""
        while answering := [url for url in self.engine.urls if url not in self._out]:
            with self._between_pushes(min(answering, key=lambda url: self._busy[url])) as url:
                try:
                    return self._draw(url, job)
                except ConnectionError as error:
                    self._left_out(url, str(error))
        return None

    def _ask_again(self) -> None:
        """Readmits servers that answer again: each loads the last push and is tested."""
        for url in list(self._out):
            with self._between_pushes(url), contextlib.suppress(ConnectionError):
                assert self._pushed is not None
                self._update(url, self._pushed)
                self._test_server(url)
                self._out.pop(url, None)

    def _drawn_in_this_process(self, jobs: Sequence[tuple[list[int], int]]) -> list[Drawn]:
        """Draws samples with a temporary copy of the last push."""
        print(f"no server answers: {len(jobs)} samples are drawn in this process", file=sys.stderr, flush=True)
        with self._between_pushes(HERE):
            assert self._pushed is not None
            sampler = load_sampler(self._pushed, self.options)
            self.drawn_here += len(jobs)
            return sampler.go_on([Wanted(tuple(prompt), 0, number) for prompt, number in jobs], len(jobs))

    @contextlib.contextmanager
    def _between_pushes(self, place: str) -> Iterator[str]:
        """Waits until a push has ended; the next push waits until the block has ended."""
        with self._turn:
            self._turn.wait_for(lambda: not self._pushing)
            self._busy[place] += 1
        try:
            yield place
        finally:
            with self._turn:
                self._busy[place] -= 1
                self._turn.notify_all()

    def _draw(self, url: str, job: tuple[list[int], int]) -> Drawn:
        eos = self.tokenizer.eos
        path, body = self._calls.draw(self.engine.model, job[0], self.options.max_tokens, job[1], eos)
        ids, logprobs, ended = self._read(url, path, body, lambda reply: _checked(*self._calls.drawn(reply)))
        where = url + path
        if not all(0 <= i < len(self._stop_V) for i in ids):
            raise ValueError(f"{where}: a sample has ids that the model does not have")
        if ended and ids[-1] != eos and not self._is_control(ids[-1]):
            raise ValueError(f"{where}: a sample that ended lacks the end of text ({eos}), or another control token")
        return Drawn(tuple(ids), np.array(logprobs, np.float32), sum(logprobs), "stop" if ended else "length")

    def _is_control(self, token: int) -> bool:
        """Returns whether no text gives the token, e.g. for a second end of text in a chat."""
        return self.tokenizer.encode(self.tokenizer.decode([token])) != [token]

    def _together(self, function: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
        with concurrent.futures.ThreadPoolExecutor(self.engine.concurrency) as pool:
            return list(pool.map(function, jobs))

    def _read(self, url: str, path: str, body: dict[str, Any], read: Callable[[Any], Any]) -> Any:
        reply = self._post(url, path, body)
        try:
            return read(reply)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{url}{path}: a reply of another form than {self.engine.kind}'s: {error!r}") from error

    def _post(self, url: str, path: str, body: dict[str, Any]) -> Any:
        """Returns the reply, after at most two attempts."""
        reason = ""
        for wait in (0.5, 0.0):
            try:
                status, content = self._attempt(url + path, body)
                if status == 200:
                    return json.loads(content) if content else None
                text = content.decode("utf-8", "replace")
                reason = f"status {status}: {(text.replace(self._key, '***') if self._key else text)[:200]!r}"
            except httpx2.TimeoutException as error:  # it has waited long
                raise ConnectionError(f"{url}{path}: takes longer than {self.engine.timeout_s:g} seconds") from error
            except (httpx2.HTTPError, ValueError, RecursionError) as error:  # none, or no JSON
                reason = f"{type(error).__name__}: {str(error)[:200]}"
            time.sleep(wait)
        raise ConnectionError(f"{url}{path}: {reason}")

    def _attempt(self, url: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Returns a reply's status and body. Raises ConnectionError if it is compressed or too long."""
        deadline, content = time.monotonic() + self.engine.timeout_s, bytearray()
        with self._client.stream("POST", url, json=body) as reply:
            if reply.headers.get("content-encoding", "identity").strip().lower() != "identity":
                raise ConnectionError(f"{url}: the reply is compressed, which was not requested")
            for piece in reply.iter_bytes():
                content += piece
                if time.monotonic() > deadline:
                    raise httpx2.ReadTimeout("the whole reply")
                if len(content) > MOST_BYTES:
                    raise ConnectionError(f"{url}: the reply is longer than {MOST_BYTES:,} bytes")
            return reply.status_code, bytes(content)


def refusal(
    server_N: Float32[np.ndarray, " N"], learner_N: Float32[np.ndarray, " N"], tolerance: float,
    written_N: Float32[np.ndarray, " N"], stale: Mapping[str, Float32[np.ndarray, " N"]],
) -> str:  # fmt: skip
    """Returns why a server's log-probabilities for kept tokens differ from the learner's; empty if they agree.

    `tolerance` is in nats per token, for the mean distance to `learner_N`. A NaN is refused. `written_N` are the
    learner's with parameters rounded as in the servers' files.

    Small updates move them by less than rounding does. So for each set in `stale`, by name ("the last push"), with
    log-probabilities under parameters that the server should have replaced, least squares estimate the server's
    position on the line from `written_N` to the stale ones: 0 is pushed, 1 is stale. More than `STALE` is refused if it
    exceeds `ERRORS` standard errors, so that a thousand pushes raise no false alarm.
    """
    kept, apart = f"its log-probabilities of {len(server_N)} kept tokens", float(np.abs(server_N - learner_N).mean())
    if not apart <= tolerance:
        far = f"{kept} lie {apart:.4f} nats from the learner's, more than engine.tolerance={tolerance:g}"
        return f"{far}: it serves other weights, or another tokenizer's ids"
    for what, stale_N in stale.items():
        way_N, off_N = stale_N - written_N, server_N - written_N
        if not (square := float(np.sum(way_N**2))):
            continue
        part = float(np.sum(off_N * way_N)) / square
        rest = float(np.sum((off_N - part * way_N) ** 2)) / max(len(way_N) - 1, 1)
        if part - ERRORS * math.sqrt(rest / square) > STALE:
            moved = f"{kept} have made {1 - part:.2f} of the learner's move since {what}"
            return f"{moved}: it still serves weights from before"
    return ""


STALE, ERRORS = 0.1, 4.0


def log_probabilities(
    params: Mapping, config: ModelConfig, mesh: Mesh, sequences: Sequence[tuple[Ids, Ids]],
    written: FileDtype = "float32",
) -> Float32[np.ndarray, " N"]:  # fmt: skip
    """Returns the model's log-probability for every sampled token, for all (prompt ids, sampled ids), concatenated.

    They are at temperature 1, over all tokens. The prompts' tokens are left out. `sequences` must not be empty.
    `written` is the number type of the servers' files, to which the parameters are rounded first; `params` stay
    unchanged.
    """
    trees = [next_tokens(merged(str(i), prompt, [ids])) for i, (prompt, ids) in enumerate(sequences)]
    size = padded_size(max(len(tree.tokens_N) for tree in trees))
    packed = pack(trees, size, size, too_long="error", chains=chain_rows(config))
    split = row_parts(mesh)
    filler = empty_rows(-len(packed.rows.tokens) % split, size, size)
    rows = jax.tree.map(lambda a, b: np.concatenate([a, b]), packed.rows, filler)
    with jax.set_mesh(mesh):
        log_BS = np.asarray(_log_probabilities(params, config, put_rows(rows, mesh), written))
    log_probability = [np.zeros(len(ids), np.float32) for _, ids in sequences]
    for row, slot in zip(*np.nonzero(packed.tree_BS >= 0), strict=True):
        tree = int(packed.tree_BS[row, slot])
        log_probability[tree][packed.node_BS[row, slot] - len(sequences[tree][0])] = log_BS[row, slot]
    return np.concatenate(log_probability)


@functools.partial(jax.jit, static_argnums=(1, 3))
def _log_probabilities(params: Mapping, config: ModelConfig, rows: Rows, written: FileDtype):
    if written != "float32":  # XLA may leave out a conversion there and back, but not this
        info = jnp.finfo(written)
        params = jax.tree.map(lambda x: jax.lax.reduce_precision(x, info.nexp, info.nmant), params)
    return policy_gradient.log_probabilities(params, config, rows)

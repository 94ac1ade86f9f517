"""Clients of `jprm serve`, for machines without jax: `Client`, and `AsyncClient` with the same methods to await.

    from jprm.clients import Client

    client = Client("http://localhost:8000")
    client.score("What is 2 + 2?", ["2 + 2 = 4.", "So 4."])      # [0.98, 0.97], as PRM.score
    client.score_many(records)                                  # chains, pools and trees
    client.rewards(samples, credit="min_form")                  # per token, for a trainer's samples
    client.rerank("What is 2 + 2?", ["2 + 2 = 4.", "It is 5."])
    client.continue_("What is 2 + 2?", ["2 + 2 = 4."], n=4)

Records are sent as concurrent requests; samples go in batches that keep each problem together. Temporary failures (a
server that is loading, full or away) are retried with growing waits. A blank completion has no steps: its result is
`None` or empty, not an error.

Needs only the package httpx2.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx2

P = ParamSpec("P")
T = TypeVar("T")

_PASSING = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses worth a retry. A 500 is not: the same request or device would fail again."""

_LONGEST_WAIT_S = 30.0

_MOST_BYTES = 2**28
"""Largest response in bytes: far above any legitimate one, and a bound against hostile servers."""


class ServerError(Exception):
    """A failed request: HTTP `status` (0: no valid response), and the faulty field `param`, if the server names it."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message if not status else f"status {status}: {message}")
        self.status, self.param = status, param


@dataclasses.dataclass(frozen=True)
class Scored:
    """A record with its scores.

    Attributes:
      record: as `jprm score` writes it: `scores` in a chain and in each sample of a pool, `score` in a node.
      chains: a dict per chain: `nodes` (indices), `score` by the rule, index `weakest`. [] if the record is blank.
    """

    record: dict[str, Any]
    chains: list[dict[str, Any]]

    @property
    def scores(self) -> list[float | None]:
        """Step scores of a chain. Raises KeyError for a pool or a tree."""
        return self.record["scores"]

    @property
    def score(self) -> float | None:
        """Score of the first chain; `None` if the record is blank, or a judge gave no score."""
        return self.chains[0]["score"] if self.chains else None


class AsyncClient:
    """Sends requests to a server.

    Args:
      url: server address. Default: $JPRM_URL, or port 8000 of this machine.
      key: server key. Default: $JPRM_API_KEY.
      model: name of a model or judge. Default: the server's first.
      concurrency: maximum concurrent requests.
      batch: samples per request of `rewards`; a larger problem is still sent whole.
      timeout_s: seconds for one attempt as a whole, even if bytes arrive. The server's is `--set answer_seconds`.
      patience_s: seconds for a request, including all attempts and waits.
      backoff_s: the first wait is uniform in [backoff_s / 2, backoff_s], doubled up to 30 s, or a longer `Retry-After`.
      transport: replaces the network in tests.

    Raises ValueError if the address is no URL or contains a password, or a count or `timeout_s` is not above 0. Methods
    raise ValueError for arguments that JSON lacks, before sending, and ServerError if a request and its retries fail.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        model: str | None = None,
        *,
        concurrency: int = 16,
        batch: int = 64,
        timeout_s: float = 300.0,
        patience_s: float = 600.0,
        backoff_s: float = 0.5,
        transport: httpx2.AsyncBaseTransport | None = None,
    ):
        self.url = _checked(url or os.environ.get("JPRM_URL") or "http://localhost:8000")
        self.model, self.batch, self.patience_s, self.backoff_s = model, batch, patience_s, backoff_s
        for name, value in {"concurrency": concurrency, "batch": batch, "timeout_s": timeout_s}.items():
            if not value > 0:
                raise ValueError(f"{name} is {value}: it must be above 0")
        self._key, self.timeout_s = key or os.environ.get("JPRM_API_KEY"), timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._http = httpx2.AsyncClient(
            base_url=self.url, timeout=timeout_s, transport=transport,
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            limits=httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )  # fmt: skip

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def score(self, problem: str, steps: Sequence[str]) -> list[float | None]:
        """Returns one score per step, `None` if a judge gave none; [] if all are blank (ServerError if some)."""
        (scored,) = await self.score_many([{"problem": problem, "steps": list(steps)}])
        return scored.scores

    async def score_many(
        self, records: Iterable[Mapping[str, Any]], *, rule: str | None = None, caller: str | None = None
    ) -> list[Scored]:
        """Returns the scored records, in order: chains, pools, trees, free text or messages, as `jprm score` reads.

        `rule` (`jprm.score.scale.RULES`, e.g. `min`) aggregates step scores to a chain score; default: the model's. The
        server keeps computed prefixes under the name `caller`, for later records with the same beginning.

        A chain or sample without text gets no scores. The first ServerError cancels the other requests.
        """
        records = list(records)
        for i, record in enumerate(records):
            _encoded(record, f"records[{i}]")
        return await _together(self._scored(record, rule, caller) for record in records)

    async def rewards(
        self,
        samples: Sequence[Mapping[str, Any]],
        *,
        credit: str | Mapping[str, Any] | None = None,
        tokenizer: str | None = None,
        rule: str | None = None,
    ) -> list[dict[str, Any]]:
        """Returns a dict per sample (`problem` or `prompt`, and `response`, `ids` or `messages`) in order: `steps`,
        `score` and, if it is one response, `text`.

        A step is a dict of `span` ([start, stop) in the text), `score`, `turn`, `token` (index of its last token, if
        the sample has tokens) and, for several outputs, `outputs`. `credit` (in `jprm.methods.rl.credit.CREDITS`, or
        options) adds each step's `reward`, the `tail_reward`, and `token_rewards` for a sample with tokens (`ids` are
        read by the server's `tokenizer`, by default its first). A blank sample has no steps and score `None`. Samples
        of one problem stay in one request, since a credit may compare them. If a request is too large for the server,
        it is split in halves. `rule` as in `score_many`.
        """
        for i, sample in enumerate(samples):
            _encoded(sample, f"samples[{i}]")
        asked = self._with({"credit": credit, "tokenizer": tokenizer, "rule": rule})
        groups: dict[str, list[int]] = {}
        for i, sample in enumerate(samples):
            groups.setdefault(_prompt(sample), []).append(i)
        batches: list[list[list[int]]] = []  # each a list of groups
        for group in groups.values():
            if not batches or sum(map(len, batches[-1])) + len(group) > self.batch:
                batches.append([])
            batches[-1].append(group)
        rewarded: dict[int, dict[str, Any]] = {}

        async def send(groups: list[list[int]]) -> None:
            places = [i for group in groups for i in group]
            try:
                body = asked | {"samples": [dict(samples[i]) for i in places]}
                rewards = await self._post("/v1/rewards", body, lambda answer: _listed(answer["samples"], len(places)))
            except ServerError as error:
                if error.status != 413 or len(groups) == 1:
                    raise
                await _together(send(half) for half in (groups[: len(groups) // 2], groups[len(groups) // 2 :]))
                return
            rewarded.update(zip(places, rewards, strict=True))

        await _together(map(send, batches))
        return [rewarded[i] for i in range(len(samples))]

    async def rerank(
        self, problem: str, solutions: Sequence[str], *, top: int | None = None, rule: str | None = None
    ) -> list[tuple[int, float | None]]:
        """Returns the `top` pairs (index from 0, score), by default all, best first by `rule`, e.g. `min`.

        Blank solutions come last, with score `None`.
        """
        places = [i for i, text in enumerate(solutions) if text.strip()]
        blank: list[tuple[int, float | None]] = [(i, None) for i, text in enumerate(solutions) if not text.strip()]
        ranked: list[tuple[int, float | None]] = []
        if places:
            body = {"query": problem, "documents": [solutions[i] for i in places], "rule": rule}
            ranked = await self._post("/v1/rerank", self._with(body), lambda answer: [
                (places[result["index"]], result["relevance_score"]) for result in answer["results"]
            ])  # fmt: skip
        return [*ranked, *blank][: len(solutions) if top is None else top]

    async def continue_(
        self, problem: str, steps: Sequence[str] = (), *, n: int = 4, until: str = "step", seed: int = 0,
        rule: str | None = None, caller: str | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Returns n dicts by the server's policy: new `steps`, their `scores`, `score`, `tokens`, `finish_reason`.

        `until` is `step` for one step each, or `end` for the rest of the chain; `seed` is the first sample's number.
        Calls of one `caller`, a secret, share prefixes. A blank one has no steps. `score` is of the chain (`None` if
        blank or failed), `tokens` a count, `finish_reason` `stop`, `step`, `length` or `error`, with the text `error`.
        """
        body = {"problem": problem, "steps": list(steps), "n": n, "until": until, "seed": seed}
        asked = self._with(body | {"rule": rule, "prompt_cache_key": caller})
        return await self._post("/v1/continue", asked, lambda answer: _listed(answer["alternatives"], n))

    async def _scored(self, record: Mapping[str, Any], rule: str | None, caller: str | None) -> Scored:
        body, blank = dict(record), []
        if "samples" in body:
            blank = [i for i, sample in enumerate(body["samples"]) if _blank(sample)]
            body["samples"] = [sample for i, sample in enumerate(body["samples"]) if i not in blank]
        if _blank(body) or body.get("samples") == []:
            empty = [{**sample, "scores": []} for sample in record.get("samples", ())]
            return Scored({**record, **({"samples": empty} if "samples" in record else {"scores": []})}, [])

        def read(answer: Any) -> Scored:
            scored = dict(answer["record"])
            for i in blank:  # from the first on, so that every later place is right
                scored["samples"].insert(i, {**record["samples"][i], "scores": []})
            if "steps" in body:
                _listed(scored["scores"], len(body["steps"]))
            return Scored(scored, _listed(answer["chains"]))

        asked = self._with(body | {"rule": rule, "prompt_cache_key": caller})
        return await self._post("/v1/score", asked, read)

    def _with(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the model's name to a request body, and drops `None` values."""
        return {name: value for name, value in {**body, "model": self.model}.items() if value is not None}

    async def _post(self, path: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """Posts a request and returns `read(response JSON)`. Retries temporary failures until `patience_s` has passed.

        Raises ServerError, also if `read` fails on the response.
        """
        loop, content = asyncio.get_running_loop(), _encoded(body, "")
        deadline, wait = loop.time() + self.patience_s, self.backoff_s
        async with self._slots:
            while True:
                limit = min(self.timeout_s, max(deadline - loop.time(), 0.0))
                try:
                    async with asyncio.timeout(limit):
                        status, headers, text = await self._attempt(path, content)
                    if 200 <= status < 300:
                        answer = json.loads(text)
                        break
                    text = text.replace(self._key, "***") if self._key else text  # some servers echo it
                    error, after = _error(status, text), _retry_after(headers)
                except (TimeoutError, httpx2.TimeoutException):  # of the whole attempt, or of connecting in it
                    error, after = ServerError(0, f"{self.url}: no answer in {limit:.3g} seconds"), 0.0
                except (httpx2.TransportError, ValueError, RecursionError) as failure:  # no response, or not JSON
                    error, after = ServerError(0, f"{self.url}: {type(failure).__name__}: {failure}"), 0.0
                if error.status and error.status not in _PASSING:
                    raise error
                seconds = max(after, random.uniform(wait / 2, wait))
                if loop.time() + seconds > deadline:
                    raise error
                await asyncio.sleep(seconds)
                wait = min(2 * wait, _LONGEST_WAIT_S)
        try:
            return read(answer)
        except (LookupError, TypeError, ValueError, AttributeError) as failure:
            reason = f"the response does not have the form of jprm serve ({type(failure).__name__}: {failure})"
            raise ServerError(0, f"{self.url}{path}: {reason}"[:500]) from None

    async def _attempt(self, path: str, content: bytes) -> tuple[int, Mapping[str, str], str]:
        """Returns (status, headers, text). Raises ServerError if the response is compressed or too long."""
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", path, content=content, headers=headers) as answer:
            encoding = answer.headers.get("content-encoding", "identity").strip().lower()
            if encoding != "identity":  # a few bytes may stand for gigabytes
                raise ServerError(0, f"{self.url}: the answer is compressed, which was not requested")
            read = bytearray()
            async for piece in answer.aiter_bytes():
                read += piece
                if len(read) > _MOST_BYTES:
                    raise ServerError(0, f"{self.url}: the answer is longer than {_MOST_BYTES:,} bytes")
            return answer.status_code, answer.headers, read.decode("utf-8", "replace")


def _waited(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Turns an `AsyncClient` method into a blocking `Client` method."""

    @functools.wraps(method)
    def call(self: Client, *args: P.args, **options: P.kwargs) -> T:
        return self._run(lambda client: method(client, *args, **options))

    return call


class Client:
    """Blocking version of `AsyncClient`, with the same arguments and results.

    Usable from threads, inside a running event loop and after a fork; can be pickled.
    """

    def __init__(self, url: str | None = None, key: str | None = None, model: str | None = None, **options: Any):
        self._client = functools.partial(AsyncClient, url, key, model, **options)
        self._lock = threading.Lock()
        self._running: tuple[int, asyncio.AbstractEventLoop, AsyncClient] | None = None
        self._client()  # checks the options

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Client, *self._client.args, **self._client.keywords), ()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    score = _waited(AsyncClient.score)
    score_many = _waited(AsyncClient.score_many)
    rewards = _waited(AsyncClient.rewards)
    rerank = _waited(AsyncClient.rerank)
    continue_ = _waited(AsyncClient.continue_)

    def close(self) -> None:
        """Waits until connections are closed, and ends the thread. A later call opens new ones."""
        with self._lock:
            running, self._running = self._running, None
        if running and running[0] == os.getpid():
            _, loop, client = running
            asyncio.run_coroutine_threadsafe(client.aclose(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    def _run(self, call: Any) -> Any:
        """Runs a coroutine on an event loop in a separate thread, independent of the caller's own loop."""
        with self._lock:
            if self._running is None or self._running[0] != os.getpid():  # a fork has no thread of its parent's
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name="jprm client", daemon=True).start()
                self._running = os.getpid(), loop, self._client()
            _, loop, client = self._running
        future = asyncio.run_coroutine_threadsafe(call(client), loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C as well: the requests end with their caller
            future.cancel()
            raise


async def _together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits all calls and returns their results in order. The first error cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _checked(url: str) -> str:
    try:
        known = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"url is {url!r}: {error}") from None
    if known.scheme not in ("http", "https") or not known.host:
        raise ValueError(f"url is {url!r}: write the server's address, e.g. http://localhost:8000")
    if known.userinfo:
        raise ValueError("url holds a password: give the key as `key`, or in JPRM_API_KEY")
    return url.rstrip("/")


def _blank(record: Mapping[str, Any]) -> bool:
    """Returns whether a chain or sample contains no solution text."""
    if "steps" in record:
        return not any(step.strip() for step in record["steps"] if isinstance(step, str))
    written = [message for message in record.get("messages") or () if message.get("role") == "assistant"]
    if len(written) == 1:
        text = written[0].get("content")
        return not written[0].get("tool_calls") and (text is None or (isinstance(text, str) and not text.strip()))
    return "response" in record and isinstance(record["response"], str) and not record["response"].strip()


def _prompt(sample: Mapping[str, Any]) -> str:
    """Returns a string equal for samples of the same problem, so a trainer may compare them."""
    messages = [message for message in sample.get("messages") or () if message.get("role") in ("system", "user")]
    return repr([sample.get("system"), sample.get("problem"), sample.get("prompt"), messages])


def _listed(value: Any, count: int | None = None) -> list[Any]:
    """Returns `value` if it is a list of `count` items, else raises ValueError."""
    if not isinstance(value, list) or count not in (None, len(value)):
        raise ValueError(f"expected a list of {count or 'some'} items")
    return value


def _error(status: int, text: str) -> ServerError:
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        error = json.loads(text)["error"]
        return ServerError(status, error["message"], error.get("param"))
    return ServerError(status, " ".join(text.split())[:200])


def _encoded(value: Any, where: str) -> bytes:
    """Encodes a value as UTF-8 JSON. Raises ValueError with the place of a wrong value, e.g. `records[3].problem`.

    Checked before sending, because every retry would fail in the same way.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError, RecursionError) as error:
        try:
            place, reason = next(_unfit(value, where), (where, str(error)))
        except RecursionError:
            place, reason = where, "is nested too deeply, or in itself"
    raise ValueError(f"{place or 'the request'} {reason}")


def _unfit(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yields (place, reason) for each value that JSON or UTF-8 cannot represent."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            yield where, f"holds half a surrogate pair, {value[error.start]!r}, which UTF-8 cannot write"
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _unfit(name, f"{where}: a name")
            yield from _unfit(inner, f"{where}.{name}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _unfit(inner, f"{where}[{i}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield where, f"is {value}, which JSON cannot hold"
    elif not (value is None or isinstance(value, int)):
        yield where, f"is of type {type(value).__name__}, which JSON lacks: convert it to numbers, lists or texts"


def _retry_after(headers: Mapping[str, str]) -> float:
    try:
        return max(0.0, float(headers.get("Retry-After", 0)))
    except ValueError:  # a date, which jprm's server does not send
        return 0.0

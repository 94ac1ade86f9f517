"""A policy on an OpenAI-compatible HTTP server: vLLM, SGLang, llama.cpp and others.

Each sample is a separate request with its own seed: token counts are exact, a failure costs one sample, and servers
with a prefix cache compute a shared prompt once. `finish_reason` shows whether a completion is whole. The cause of its
end, a step's delimiter or the end of the text, is taken from the first of these: the delimiter in the text (requested
by vLLM's `include_stop_str_in_output` and SGLang's `no_stop_trim`), `stop_reason` (vLLM), `matched_stop` (SGLang).
Without any of them, a text counts as a finished step. An empty text is requested again without a stop: it is either the
end of the chain or a blank step. Blank steps do not count: the sample continues after them, as in this process's
sampler.

All sampling parameters are sent, because servers have their own defaults: vLLM and SGLang those in the model's
`generation_config.json`, llama.cpp's server top_k=40 and min_p=0.05. A null key in `extra` is not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import email.utils
import hashlib
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import httpx2

from jprm.io.jsonl import shortened
from jprm.methods.formats.chat_template import CONTROL, guarded, prompt_of
from jprm.methods.messages.messages import THOUGHTS, WRAPPERS, normal_message, text_of_parts
from jprm.methods.policy.protocol import LogProb, Prefix, Sample, Until
from jprm.tokenizer import Tokenizer, load_tokenizer

T = TypeVar("T")

_REPLY_BYTES, _TOKEN_BYTES = 2**20, 2**12
"""A reply's limit in bytes: a constant, plus an amount per token (each may have 20 log-probabilities)."""

_LONGEST_REST_S = 60.0
"""Longest pause, in seconds, for a repeatedly failing server among several."""

_RETRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Server address and sampling settings.

    Attributes:
      url: base address with version, e.g. http://localhost:8000/v1, or several for servers of the same model. Each
        request goes to the server with the fewest in flight; a failing server rests while others answer, then is
        retried.
      model: the model's name on the server.
      key_variable: environment variable with the key, whose value is never printed or stored.
      endpoint: `completions` sends one text. `chat` sends messages; the last is the assistant's unfinished one
        (`continue_final_message` of vLLM and SGLang). Before the first unfinished message, the client checks that the
        server continues it, which llama.cpp's does not; `template` avoids this.
      prompt: text before the steps; for `chat` and with `template`, the user's message. `{problem}` is replaced.
      template: local folder or GGUF file of the model, whose chat template wraps the prompt for `completions`. Each
        reply's `usage.prompt_tokens` must then equal the number of tokens sent.
      delimiter: ends every step; must not occur within a step.
      max_tokens: per sample. A sample that reaches it is marked `length`.
      logprobs: request the sampled tokens' log-probabilities.
      top_logprobs: with `logprobs`, number of most likely tokens to request at each position.
      extra: further keys for the request body.
      concurrency: maximum requests in flight.
      request_timeout_s, total_timeout_s: seconds for one attempt, and for one sample with all retries and waits.
      retries: attempts after the first, on time-outs, lost connections, unreadable replies and e.g. status 429 or 503.
      backoff_s: the first wait is uniform in [backoff_s / 2, backoff_s]; each later range doubles, up to 60 s. A longer
        `Retry-After` is honoured.

    Raises ValueError if an address is malformed or repeated, or a setting is out of range or does not fit another.
    """

    url: str | tuple[str, ...]
    model: str
    key_variable: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    prompt: str = "{problem}\n\n"
    template: str = ""
    delimiter: str = "\n\n"
    temperature: float = 0.8
    top_p: float = 1.0
    max_tokens: int = 2048
    logprobs: bool = False
    top_logprobs: int = 0
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    concurrency: int = 32
    request_timeout_s: float = 120.0
    total_timeout_s: float = 600.0
    retries: int = 6
    backoff_s: float = 1.0

    def __post_init__(self):
        for url in self.urls:
            _check_url(url)
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError("url names no address, or one twice")
        if "{problem}" not in self.prompt:
            raise ValueError("prompt has no {problem}")
        if self.template and self.endpoint == "chat":
            raise ValueError("template is for endpoint='completions': a chat server has the template itself")
        if not self.delimiter:
            raise ValueError("delimiter is empty: steps need one to end them")
        for field in ("concurrency", "max_tokens", "request_timeout_s", "total_timeout_s", "backoff_s"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be above 0")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        for field in ("retries", "temperature", "top_logprobs"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be 0 or more")

    @property
    def urls(self) -> tuple[str, ...]:
        """All server addresses, as written, also if `url` is one text."""
        return (self.url,) if isinstance(self.url, str) else tuple(self.url)


def _check_url(text: str) -> None:
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise ValueError(f"url is {text!r}: {error}") from None
    known = url.scheme in ("http", "https") and url.host and not set(url.host) & set("[] %")
    if not known or not 0 < (url.port or 80) < 2**16:
        raise ValueError(f"url is {text!r}: write the base address, e.g. http://localhost:8000/v1")
    if url.userinfo:
        raise ValueError("url holds a password: put it in an environment variable and set key_variable to its name")


class _Retry(Exception):
    """A failed attempt; a later one may succeed. `after_s`: wait requested by the server."""

    def __init__(self, reason: str, after_s: float = 0.0):
        super().__init__(reason)
        self.after_s = after_s


class _Refused(Exception):
    """A failed attempt; another would fail too."""


class _Servers:
    """Load balancing over equivalent servers: the next one to ask, and the ones that rest."""

    def __init__(self, urls: Sequence[str]):
        self._busy = dict.fromkeys(urls, 0)  # requests in flight
        self._failures = dict.fromkeys(urls, 0)  # in a row, those of one moment once
        self._rests = dict.fromkeys(urls, 0.0)  # until when, by the event loop's clock

    @contextlib.contextmanager
    def asked(self, now: float) -> Iterator[str]:
        """Yields the address for one request: the least busy server not resting."""
        url = min(self._busy, key=lambda url: (max(0.0, self._rests[url] - now), self._busy[url]))
        self._busy[url] += 1
        try:
            yield url
        finally:
            self._busy[url] -= 1

    def failed(self, url: str, now: float, wait: float) -> float:
        """Lets a server rest, longer after each failure; returns the seconds until its failed request should be
        retried.

        That is `wait` if there is no other server, and 0 if another one is available.
        """
        if now >= self._rests[url]:
            self._rests[url] = now + min(_LONGEST_REST_S, wait * 2 ** self._failures[url])
            self._failures[url] += 1
        others = [rests - now for other, rests in self._rests.items() if other != url]
        return max(0.0, min([wait, *others]))

    def answered(self, url: str) -> None:
        self._rests[url], self._failures[url] = 0.0, 0


class ServerPolicy:
    """A `Policy` sampling from one or several servers with the same model. `None` is contacted before the first sample.

    A request that is refused, or fails until retries or time are used up, gives a sample marked `error`.

    Attributes:
      took: callback (position, sample) for each finished sample, failed ones included; sample j of prefix i has
        position i * n + j.

    Raises:
      ValueError: the environment variable for the key is unset or invalid, or `template` cannot be used.
      FileNotFoundError: `template` does not exist.
    """

    def __init__(self, config: ServerConfig):
        self._tokenizer: Tokenizer | None = None
        if config.template:
            self._tokenizer = load_tokenizer(config.template)
            prompt = prompt_of(config.template, config.prompt.strip() or "{problem}")
            config = dataclasses.replace(config, prompt=prompt)
        self.config = config
        self.took: Callable[[int, Sample], None] = lambda place, sample: None
        self._servers = _Servers(config.urls)
        self._key()
        sampled = ("endpoint", "prompt", "delimiter", "temperature", "top_p", "max_tokens", "extra")
        settings = {field: getattr(config, field) for field in sampled} | {"explicit": EXPLICIT}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=dict).encode()).hexdigest()
        self.name = f"{config.model}#{digest[:12]}"
        self._continues = config.endpoint == "completions"
        self._silent = False  # whether log-probabilities were missed, which is reported once

    def sample(self, prefixes: Sequence[Prefix], n: int, *, until: Until, seed: int) -> list[list[Sample]]:
        """See `Policy.sample`; blocks until every sample has ended or failed.

        Raises:
          RuntimeError: the caller runs in an event loop; await `sample_async` there.
          ValueError: the chat server does not continue an unfinished message, or the key's variable is now unset.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # none
            return asyncio.run(self.sample_async(prefixes, n, until=until, seed=seed))
        raise RuntimeError("an event loop is running: await ServerPolicy.sample_async instead of calling sample")

    async def sample_async(self, prefixes: Sequence[Prefix], n: int, *, until: Until, seed: int) -> list[list[Sample]]:
        """See `Policy.sample`; awaits up to `concurrency` requests at once. Raises ValueError as `sample`."""
        config = self.config
        key, slots = self._key(), asyncio.Semaphore(config.concurrency)
        limits = httpx2.Limits(max_connections=config.concurrency)
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        async with httpx2.AsyncClient(headers=headers, limits=limits, timeout=config.request_timeout_s) as client:

            async def draw(prefix: Prefix, number: int, place: int) -> Sample:
                async with slots:
                    try:
                        sample = await self._draw(client, prefix, until, number)
                    except _Refused as error:
                        sample = Sample((), 0, "error", error=str(error))
                self.took(place, sample)
                return sample

            if not self._continues and any(prefix.steps for prefix in prefixes):
                try:
                    await self._check_continuing(client)
                except _Refused as error:
                    failed = Sample((), 0, "error", error=str(error))
                    for place in range(len(prefixes) * n):
                        self.took(place, failed)
                    return [[failed] * n for _ in prefixes]
            wanted = [(prefix, j, i * n + j) for i, prefix in enumerate(prefixes) for j in range(n)]
            drawn = await asyncio.gather(*(draw(prefix, seed + j, place) for prefix, j, place in wanted))
        return [drawn[i * n : (i + 1) * n] for i in range(len(prefixes))]

    def _key(self) -> str:
        """Returns the key, read when needed and never stored; "" if not configured."""
        if (variable := self.config.key_variable) is None:
            return ""
        key = os.environ.get(variable, "").strip()
        if not key:
            raise ValueError(f"environment variable {variable}, which holds the server's key, is not set")
        if not (key.isascii() and key.isprintable()) or " " in key:  # an HTTP error would quote it
            raise ValueError(f"environment variable {variable} holds no key: a key is printable ASCII without spaces")
        return key

    def _short(self, text: str) -> str:
        """Returns a server's text as one line, without the key, which some servers echo."""
        if key := self._key():
            text = text.replace(key, "***")
        text = " ".join(text.split())
        return repr(text if len(text) <= 200 else text[:200] + "…")

    async def _check_continuing(self, client: httpx2.AsyncClient) -> None:
        """Tests by token counts that the server continues a message, without ending it or beginning another.

        Raises ValueError if it does not, or if its template drops a trailing delimiter.
        """
        config = self.config
        bodies = [request_body(config, Prefix("1+1", steps), "end", 0) for steps in ((), ("1",), ("1",))]
        bodies[-1]["messages"][-1]["content"] = "1"
        counts = [await self._ask(client, _limited(config, body, 1), _prompt_tokens) for body in bodies]
        alone, delimited, continued = counts
        way_out = f"Set endpoint to 'completions' and template to the folder or GGUF file of {config.model}"
        if not 0 < continued - alone <= MOST_OF_A_DIGIT:
            tokens = f"with '1' in it, the prompt has {continued} tokens instead of {alone + 1}"
            raise ValueError(f"{config.urls[0]}: does not continue an unfinished message: {tokens}. {way_out}")
        if delimited <= continued:
            reason = f"its chat template drops {config.delimiter!r} at the end of an unfinished message"
            raise ValueError(f"{config.urls[0]}: {reason}. {way_out}")
        self._continues = True

    async def _draw(self, client: httpx2.AsyncClient, prefix: Prefix, until: Until, seed: int) -> Sample:
        """Returns one sample; continues it if it begins with blank steps."""
        config, lead = self.config, ""
        drawn: list[Sample] = []
        for _ in range(BLANK_STEPS):
            left = config.max_tokens - sum(sample.tokens for sample in drawn)
            body = _limited(config, request_body(config, prefix, until, seed, lead), left)

            def read(reply: Any, body: Mapping[str, Any] = body) -> tuple[Sample, str]:
                self._check_prompt(body, reply)
                return read_reply(config, until, reply)

            sample, text = await self._ask(client, body, read)
            if config.logprobs and sample.logprob is None and not self._silent:
                self._silent = True
                reason = "logprobs are requested, and the server sends none that can be read"
                print(f"{config.model}: {reason}; samples have none, and a judge's scores are votes", file=sys.stderr)
            if until == "step" and sample.finish_reason == "stop" and not sample.steps and sample.tokens:
                body = _limited(config, {key: body[key] for key in body if key != "stop"}, sample.tokens)
                text = await self._ask(client, body, lambda reply: _leading_blank(config, reply))
                sample = dataclasses.replace(sample, finish_reason="step" if text else "stop")
            drawn.append(sample)
            left -= sample.tokens
            if sample.finish_reason == "stop" and not sample.steps and not prefix.steps:
                raise _Refused("the text is empty")
            if sample.finish_reason != "step" or sample.steps or left < 1:
                return _joined(drawn)
            lead += text if config.delimiter in text else text + config.delimiter
        raise _Refused(f"{BLANK_STEPS} steps in a row are blank")

    def _check_prompt(self, body: Mapping[str, Any], reply: Any) -> None:
        """Raises ValueError if the server counts other prompt tokens than `template` yields, or fewer than any
        tokenizer could: it truncated the prompt.
        """
        sent = getattr(self._tokenizer, "encode_control", None)
        counted = _counted(reply, "prompt_tokens")
        texts = [body["prompt"]] if "prompt" in body else [message["content"] for message in body["messages"]]
        least = sum(len(_RUNS.sub(r"\1", text).encode()) for text in texts) // _BYTES_OF_A_TOKEN
        if counted and counted < least and least > _SHORTEST_CONTEXT:  # 0 is no count
            reason = f"usage.prompt_tokens is {counted:,}, and the prompt has at least {least:,}: the server cut it"
            raise ValueError(f"{reason}. Start it with a longer context (Ollama: OLLAMA_CONTEXT_LENGTH)")
        if sent is not None and counted is not None and counted != (expected := len(sent(body["prompt"], False))):
            differ = f"usage.prompt_tokens is {counted}, and the prompt has {expected} by {self.config.template}"
            raise ValueError(f"{differ}: the server adds tokens, or has another tokenizer")

    async def _ask(self, client: httpx2.AsyncClient, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """Repeats attempts until one succeeds or is refused, or until limits are reached; returns `read(reply)`."""
        config = self.config
        loop = asyncio.get_running_loop()
        deadline = loop.time() + config.total_timeout_s
        reason = ""
        for attempt in range(config.retries + 1):
            limit = min(config.request_timeout_s, deadline - loop.time())
            with self._servers.asked(loop.time()) as url:
                try:
                    async with asyncio.timeout(limit):  # of the whole attempt, also from a server that drips bytes
                        answer = await self._attempt(client, url, body, read)
                    self._servers.answered(url)
                    return answer
                except _Retry as error:
                    reason, after_s = str(error), error.after_s
                except (TimeoutError, httpx2.TimeoutException):
                    # If an earlier failure left less time than a reply may take, that failure is the reason.
                    if not reason or limit == config.request_timeout_s:
                        reason = f"no reply in {limit:.3g} s"
                    after_s = 0.0
                except httpx2.RequestError as error:
                    reason, after_s = f"no connection ({type(error).__name__}: {error})", 0.0
            backoff = max(after_s, min(60.0, config.backoff_s * 2**attempt) * random.uniform(0.5, 1.0))
            wait = self._servers.failed(url, loop.time(), backoff)
            if attempt == config.retries or loop.time() + wait >= deadline:
                raise _Refused(f"{url}: {reason}; given up after {attempt + 1} attempts")
            await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    async def _attempt(
        self, client: httpx2.AsyncClient, url: str, body: Mapping[str, Any], read: Callable[[Any], T]
    ) -> T:
        path = "/chat/completions" if self.config.endpoint == "chat" else "/completions"
        async with client.stream("POST", url.rstrip("/") + path, json=body) as response:
            content = await self._content(response)
        text = content.decode("utf-8", "replace")  # JSON is UTF-8, whatever charset the header names
        if response.status_code in _RETRY:
            raise _Retry(f"status {response.status_code}: {self._short(text)}", _retry_after(response.headers))
        if response.status_code != 200:
            refused = [key for key in _OPTIONAL if key in body and re.search(rf"(?<!\w){key}(?!\w)", text)]
            nulls = ", ".join(f'"{key}": null' for key in refused)
            remedy = f'. Leave it out: "extra": {{{nulls}}} in the file of the policy or judge' if nulls else ""
            raise _Refused(f"{url}: status {response.status_code}: {self._short(text)}{remedy}")
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            raise _Retry(f"the reply is not JSON: {self._short(text)}") from None
        if isinstance(reply, Mapping) and reply.get("error") and not reply.get("choices"):  # a gateway's, with 200
            error = reply["error"]
            code = error.get("code") if isinstance(error, Mapping) else None
            if isinstance(code, int) and 400 <= code < 500 and code not in _RETRY:
                raise _Refused(f"{url}: error {code}: {self._short(text)}")
            raise _Retry(f"status 200 with an error: {self._short(text)}")
        try:
            return read(reply)
        except ValueError as error:
            raise _Refused(f"{url}: {shortened(str(error), 200)}: {self._short(text)}") from None

    async def _content(self, response: httpx2.Response) -> bytearray:
        """Reads a response body. Rejects compressed bodies, and ones longer than a sample can be."""
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise _Retry(f"the reply is compressed ({self._short(encoding)}), which was not requested")
        most = _REPLY_BYTES + _TOKEN_BYTES * self.config.max_tokens
        content = bytearray()
        async for piece in response.aiter_raw():
            content += piece
            if len(content) > most:
                raise _Refused(f"{response.url}: the reply is longer than {most:,} bytes")
        return content


EXPLICIT = {"top_k": 2**30, "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0}  # fmt: skip
"""Settings for unmodified sampling. Servers disagree on top_k's value for "all"; no vocabulary is this large."""

_OPTIONAL = (*EXPLICIT, "temperature", "top_p", "seed", "logprobs", "top_logprobs", "max_tokens", "no_stop_trim",
             "include_stop_str_in_output", "add_special_tokens")  # fmt: skip
"""Request keys that a server may reject and the settings can omit."""

_LIMITS = ("max_tokens", "max_completion_tokens")
"""Names for the token limit. OpenAI's reasoning models and Azure reject the first."""

_BYTES_OF_A_TOKEN, _RUNS = 16, re.compile(r"(.)\1+", re.DOTALL)
"""Upper bound on bytes per token for any tokenizer, counting repeated characters once."""

_SHORTEST_CONTEXT = 256
"""No server has a shorter context than this, in tokens."""

_ENDS: dict[str | None, Literal["stop", "end", "step", "length"]] = {
    "stop": "stop", "complete": "stop", "finished": "stop", None: "stop", "": "stop",  # llama.cpp, Cohere, Ollama
    "eos": "end", "eos_token": "end", "end_turn": "end", "end_of_turn": "end", "endoftext": "end",  # Together, TGI
    "stop_sequence": "step", "stop_str": "step",
    "length": "length", "max_tokens": "length", "max_length": "length", "max_output_tokens": "length",
    "model_length": "length", "model_context_window_exceeded": "length",  # Mistral, Anthropic
}  # fmt: skip
"""A lower-case `finish_reason`'s meaning: the text ended by itself (`end`), at the delimiter (`step`), or either
(`stop`). Other reasons, e.g. content_filter, mean an incomplete text."""

BLANK_STEPS = 8
"""A sample fails if it begins with so many blank steps."""

MOST_OF_A_DIGIT = 2
"""Maximum tokens of "1": SentencePiece may prepend one. Ending and beginning a message takes at least three."""


def request_body(config: ServerConfig, prefix: Prefix, until: Until, seed: int, lead: str = "") -> dict[str, Any]:
    """Returns the JSON body of a request for one sample after the prefix; sends nothing.

    It has `prompt` (completions) or `messages` (chat), `model`, `seed` as given, the sampling settings, the keys of
    `extra` that are not null, and `max_tokens` (`max_completion_tokens` if `extra` has a number for it).

    Args:
      until: `step` adds the delimiter as `stop`; `end` adds no stop.
      seed: the sample's number.
      lead: text of blank steps with which the sample has begun.
    """
    # Where turns are marked by control tokens, a problem or a step that names one would begin a turn
    data = guarded if config.endpoint == "chat" or CONTROL.search(config.prompt) else str
    prompt = config.prompt.replace("{problem}", data(prefix.problem))
    written = "".join(data(step) + config.delimiter for step in prefix.steps) + lead
    body: dict[str, Any] = {
        "model": config.model,
        "n": 1,
        "temperature": config.temperature,
        "top_p": config.top_p,
        **EXPLICIT,
        "seed": seed,
    }
    if config.endpoint == "completions":
        body["prompt"] = prompt + written
        if config.template:  # it writes the special tokens itself
            body["add_special_tokens"] = False
        if config.logprobs:
            body["logprobs"] = max(1, config.top_logprobs)
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
        if written:
            body["messages"].append({"role": "assistant", "content": written})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if config.logprobs:
            body["logprobs"] = True
            body |= {"top_logprobs": config.top_logprobs} if config.top_logprobs else {}
    if until == "step":
        body |= {"stop": [config.delimiter], "include_stop_str_in_output": True, "no_stop_trim": True}
    body = {key: value for key, value in (body | dict(config.extra)).items() if value is not None}
    return _limited(config, body, config.max_tokens)


def _limited(config: ServerConfig, body: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Returns the body with a token limit; `extra` may lower it.

    Its name is the one with a number in `extra`, else the first that is not null there.
    """
    names = [name for name in _LIMITS if config.extra.get(name) is not None]
    names += [name for name in _LIMITS if name not in config.extra]
    limits = [tokens, *([config.extra[name] for name in names[:1] if isinstance(config.extra.get(name), int)])]
    rest = {key: value for key, value in body.items() if key not in _LIMITS}
    return rest | ({names[0]: min(limits)} if names else {})


def _counted(reply: Any, name: str) -> int | None:
    """Returns a token count in the reply's `usage`, if it is there."""
    usage = reply.get("usage") if isinstance(reply, Mapping) else None
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if type(count) is int else None


def _prompt_tokens(reply: Any) -> int:
    if (count := _counted(reply, "prompt_tokens")) is None:
        raise ValueError("the reply has no usage.prompt_tokens, so whether it continues a message cannot be checked")
    return count


def _joined(drawn: Sequence[Sample]) -> Sample:
    """Joins one sample's parts; only the last part has steps."""
    tokens, last = sum(sample.tokens for sample in drawn), drawn[-1]
    logprobs = [sample.logprob for sample in drawn if sample.logprob is not None]
    logprob = sum(logprobs) if len(logprobs) == len(drawn) else None
    pairs = tuple(pair for sample in drawn for pair in sample.token_logprobs)
    others = tuple(other for sample in drawn for other in sample.alternatives)
    known = {"token_logprobs": pairs, "alternatives": others if len(others) == len(pairs) else ()}
    finish = last.finish_reason if last.steps or last.finish_reason != "step" else "length"  # blank up to its limit
    return dataclasses.replace(last, tokens=tokens, logprob=logprob, finish_reason=finish, **known)


def _leading_blank(config: ServerConfig, reply: Any) -> str:
    """Returns the leading blank text of a reply without a stop; "" if the text ends there."""
    text = _text(config, reply)
    return text[: len(text) - len(text.lstrip())] or ("" if not text else config.delimiter)


def _text(config: ServerConfig, reply: Any) -> str:
    """Returns a reply's text. Raises ValueError unless it has exactly one choice with text."""
    choices = reply.get("choices") if isinstance(reply, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        count = f"{len(choices)} choices" if isinstance(choices, list) else "no list of choices"
        raise ValueError(f"the reply has {count}, not the one choice requested")
    choice, text = choices[0], choices[0].get("text")
    if isinstance(message := choice.get("message"), Mapping) and (config.endpoint == "chat" or text is None):
        text = _with_thoughts(message)
    if not isinstance(text, str):
        raise ValueError("the choice has no text")
    if not text.isascii() and re.search("[\ud800-\udfff]", text):  # no file can hold it
        raise ValueError("the text holds half a surrogate pair")
    return text


def _with_thoughts(message: Mapping[str, Any]) -> Any:
    """Prepends thoughts in <think> tags to a message's text, if the server moved them to a separate field or part.

    Thoughts without a text are unfinished, so the tag stays open. Raises RecordError for parts other than text.
    """
    kinds = {**dict.fromkeys(THOUGHTS, (str, list)), **dict.fromkeys(WRAPPERS, Mapping)}
    first = next(
        ({key: message[key]} for key in kinds if message.get(key) and isinstance(message[key], kinds[key])), {}
    )
    content = {"content": message["content"]} if message.get("content") is not None else {}
    said = normal_message({"role": "assistant", **content, **first}, "the reply", "message")
    thoughts, text = said.get("reasoning_content", ""), said.get("content")
    text = None if text is None else text_of_parts(text, "the reply", "message.content")
    if not thoughts.strip() or "</think" in (text or ""):
        return text
    return f"<think>\n{thoughts.strip()}" + (f"\n</think>\n\n{text}" if text else "")


def read_reply(config: ServerConfig, until: Until, reply: Any) -> tuple[Sample, str]:
    """Returns the sample in a reply (parsed JSON) to a request for a step or a whole chain (`until`), and its raw text.

    For a step the sample has at most one; a blank one is a sample without steps and with reason `step`. The reason is
    `stop`, `length` or, for a step, `step`. `logprob` is `None`, `token_logprobs` and `alternatives` are (), unless
    `config.logprobs` is set and all values are valid.

    Raises ValueError unless the reply has exactly one choice with text, a known `finish_reason` and
    `usage.completion_tokens`.
    """
    text = _text(config, reply)
    (choice,) = reply["choices"]
    named = choice.get("finish_reason")
    end = _ENDS.get(named.lower() if isinstance(named, str) else None) if isinstance(named, str | None) else None
    if end is None:
        raise ValueError(f"finish_reason is {named!r}, and no word for a whole text or for a limit of tokens")
    tokens = _counted(reply, "completion_tokens")
    if tokens is None or not 0 <= tokens < 2**31:
        raise ValueError("the reply has no usage.completion_tokens, so its tokens cannot be counted")

    cut = end == "length" or (not named and tokens >= config.max_tokens)
    finish: Literal["stop", "step", "length"] = "length" if cut else "stop"
    steps = tuple(step.strip("\r\n") for step in text.split(config.delimiter) if step.strip())
    if until == "step" and finish == "stop":
        matched = choice.get("stop_reason", choice.get("matched_stop"))
        if config.delimiter in text or matched == config.delimiter or (end == "step" and steps):
            finish = "step"
        elif end == "stop" and "stop_reason" not in choice and "matched_stop" not in choice and steps:
            finish = "step"  # the server does not tell what ended it
        steps = steps[:1]
    logprob, token_logprobs, alternatives = _logprobs(config, choice)
    return Sample(steps, tokens, finish, logprob, token_logprobs=token_logprobs, alternatives=alternatives), text


def _logprobs(
    config: ServerConfig, choice: Mapping[str, Any]
) -> tuple[LogProb | None, tuple[tuple[str, LogProb], ...], tuple[dict[str, LogProb], ...]]:
    """Returns the total log-probability, (text, log-probability) per token, and the alternatives at each position.
    Unknown parts are `None` or (); all are, if any value is invalid.
    """
    logprobs = choice.get("logprobs")
    if not config.logprobs or not isinstance(logprobs, Mapping):
        return None, (), ()
    try:
        rows = [(text, LogProb(value), _alternatives(place)) for text, value, place in _by_token(logprobs)]
    except ValueError:
        return None, (), ()
    if not rows:
        return None, (), ()
    pairs = tuple((text, value) for text, value, _ in rows if isinstance(text, str))
    places = tuple(place for _, _, place in rows if place is not None)
    named = len(pairs) == len(rows)
    total = LogProb(max(-1e299, sum(value for _, value, _ in rows)))
    return total, pairs if named else (), places if named and config.top_logprobs and len(places) == len(rows) else ()


def _by_token(logprobs: Mapping[str, Any]) -> list[tuple[Any, Any, Any]]:
    """Returns (text, value, alternatives) per token, from the chat or completions format."""
    if isinstance(content := logprobs.get("content"), list):
        tokens = [token if isinstance(token, Mapping) else {} for token in content]
        return [(token.get("token"), token.get("logprob"), token.get("top_logprobs")) for token in tokens]
    values, *others = (logprobs.get(key) for key in ("token_logprobs", "tokens", "top_logprobs"))
    if not isinstance(values, list):
        return []
    texts, places = (other if isinstance(other, list) and len(other) == len(values) else [None] * len(values)
                     for other in others)  # fmt: skip
    return list(zip(texts, values, places, strict=True))


def _alternatives(place: Any) -> dict[str, LogProb] | None:
    """Returns log-probabilities by token text, if given. Raises ValueError for invalid values."""
    if isinstance(place, list):
        pairs = [(other.get("token"), other.get("logprob")) for other in place if isinstance(other, Mapping)]
    else:
        pairs = list(place.items()) if isinstance(place, Mapping) else None
    return None if pairs is None else {text: LogProb(value) for text, value in pairs if isinstance(text, str)}


def _retry_after(headers: Mapping[str, str]) -> float:
    """Returns the seconds in a `Retry-After` header (a number or a date); 0 if absent or unreadable."""
    value = headers.get("retry-after", "").strip()
    try:
        if value.isdecimal():
            return float(value)
        due = email.utils.parsedate_to_datetime(value)
        return max(0.0, (due - datetime.datetime.now(datetime.UTC)).total_seconds())
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0

"""A policy on an OpenAI-compatible HTTP server: vLLM, SGLang, llama.cpp and others.

Every sample is its own request with its own seed: token counts are exact, one failure costs one sample, and servers
that cache prefixes compute a shared prompt once. `finish_reason` tells whether a completion is whole. What ended it, a
step's delimiter or the end of the text, is read from the first of these in the reply: the delimiter in the text (vLLM's
`include_stop_str_in_output` and SGLang's `no_stop_trim` are requested), `stop_reason` (vLLM), `matched_stop` (SGLang).
Without any of them, text counts as a finished step. An empty text is then asked for again without a stop: it is the end
of the chain, or a blank step. A blank step is no step: the sample goes on from it, as in the sampler of this process.

Sampling parameters are all sent, since servers have defaults of their own: vLLM and SGLang those in the model's
`generation_config.json`, llama.cpp's server top_k=40 and min_p=0.05. A key of `extra` that is null is not sent.
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
"""Limits of a reply: in all, and for every token of `max_tokens`, each of which may have 20 log-probabilities."""

_LONGEST_REST_S = 60.0
"""Seconds for which one of several servers that fails again and again is left alone."""

_RETRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """The server and the sampling settings.

    Attributes:
      url: the base address with its version, http://localhost:8000/v1, or several of servers of one model. A request
        goes to the one with the fewest in flight; one that fails rests while others answer, and is then tried again.
      model: the server's name of the model.
      key_variable: environment variable that holds the key, whose value is never printed or stored.
      endpoint: `completions` sends one text. `chat` sends messages, the last being the assistant's unfinished one
        (`continue_final_message` of vLLM and SGLang). Before the first unfinished one the server is asked whether it
        continues it, which llama.cpp's does not; `template` needs no such thing.
      prompt: the text before the steps, for `chat` and with `template` the user's message; `{problem}` is replaced.
      template: the model's folder or GGUF file on this machine, whose chat template surrounds the prompt of
        `completions`. Every reply's `usage.prompt_tokens` must then be the number of tokens that were sent.
      delimiter: ends every step. A step never contains it.
      max_tokens: per sample. A sample that reaches it is marked `length`.
      logprobs: whether to request the log-probabilities of the sampled tokens and their sum.
      top_logprobs: with `logprobs`, how many of the likeliest tokens in each place to request as well.
      extra: further keys of the request's body.
      concurrency: requests in flight at once.
      request_timeout_s, total_timeout_s: seconds for one attempt, and for one sample with all retries and waits.
      retries: attempts after the first, on time-outs, lost connections, unreadable replies and statuses such as 429
        and 503.
      backoff_s: the first wait is uniform in [backoff_s / 2, backoff_s]; every next range is doubled, up to 60 s. A
        longer `Retry-After` is honoured.
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
        """Every server's address."""
        return (self.url,) if isinstance(self.url, str) else tuple(self.url)


def _check_url(text: str) -> None:
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise ValueError(f"url is {text!r}: {error}") from None
    known = url.scheme in ("http", "https") and url.host and not set(url.host) & set("[] %")
    if not known or not 0 < (url.port or 80) < 2**16:
        raise ValueError(f"url is {text!r}: write the base address, such as http://localhost:8000/v1")
    if url.userinfo:
        raise ValueError("url holds a password: put it in an environment variable and set key_variable to its name")


class _Retry(Exception):
    """An attempt that failed and may succeed later. `after_s`: the wait that the server requests."""

    def __init__(self, reason: str, after_s: float = 0.0):
        super().__init__(reason)
        self.after_s = after_s


class _Refused(Exception):
    """An attempt that would fail again."""


class _Servers:
    """Addresses of servers that answer alike: which of them is asked next, and which are left alone for a while."""

    def __init__(self, urls: Sequence[str]):
        self._busy = dict.fromkeys(urls, 0)  # requests in flight
        self._failures = dict.fromkeys(urls, 0)  # in a row, those of one moment once
        self._rests = dict.fromkeys(urls, 0.0)  # until when, by the event loop's clock

    @contextlib.contextmanager
    def asked(self, now: float) -> Iterator[str]:
        """Yields the address of a server for one request: of those that do not rest, the one with the least to do."""
        url = min(self._busy, key=lambda url: (max(0.0, self._rests[url] - now), self._busy[url]))
        self._busy[url] += 1
        try:
            yield url
        finally:
            self._busy[url] -= 1

    def failed(self, url: str, now: float, wait: float) -> float:
        """Lets a server rest, longer each time; returns after how many seconds a request that it failed is sent again.

        That is `wait` where there is no other server, and at once where another does not rest.
        """
        if now >= self._rests[url]:
            self._rests[url] = now + min(_LONGEST_REST_S, wait * 2 ** self._failures[url])
            self._failures[url] += 1
        others = [rests - now for other, rests in self._rests.items() if other != url]
        return max(0.0, min([wait, *others]))

    def answered(self, url: str) -> None:
        self._rests[url], self._failures[url] = 0.0, 0


class ServerPolicy:
    """A `Policy` that samples from a server, or from several of the same model.

    Attributes:
      took: is called by `sample` with each sample once it is there: sample j of prefix i has the place i * n + j.

    Raises:
      ValueError: the environment variable for the key is not set or holds no key; or `template` cannot be used.
      FileNotFoundError: no `template` there.
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
        """As `Policy.sample`.

        Raises:
          RuntimeError: the caller runs in an event loop, where it can await `sample_async`.
          ValueError: a chat server that does not continue an unfinished message.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # none
            return asyncio.run(self.sample_async(prefixes, n, until=until, seed=seed))
        raise RuntimeError("an event loop is running: await ServerPolicy.sample_async instead of calling sample")

    async def sample_async(self, prefixes: Sequence[Prefix], n: int, *, until: Until, seed: int) -> list[list[Sample]]:
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
                    return [[Sample((), 0, "error", error=str(error))] * n for _ in prefixes]
            wanted = [(prefix, j, i * n + j) for i, prefix in enumerate(prefixes) for j in range(n)]
            drawn = await asyncio.gather(*(draw(prefix, seed + j, place) for prefix, j, place in wanted))
        return [drawn[i * n : (i + 1) * n] for i in range(len(prefixes))]

    def _key(self) -> str:
        """Returns the key, read when needed and stored nowhere; "" if none is configured."""
        if (variable := self.config.key_variable) is None:
            return ""
        key = os.environ.get(variable, "").strip()
        if not key:
            raise ValueError(f"environment variable {variable}, which holds the server's key, is not set")
        if not (key.isascii() and key.isprintable()) or " " in key:  # an HTTP error would quote it
            raise ValueError(f"environment variable {variable} holds no key: a key is printable ASCII without spaces")
        return key

    def _short(self, text: str) -> str:
        """Returns a server's text as one line, without the key, which some servers repeat."""
        if key := self._key():
            text = text.replace(key, "***")
        text = " ".join(text.split())
        return repr(text if len(text) <= 200 else text[:200] + "…")

    async def _check_continuing(self, client: httpx2.AsyncClient) -> None:
        """Asks the server to continue a message, and counts its tokens: none may end the message or begin another.

        Raises ValueError for a server that does not continue it, or whose template drops the delimiter at its end.
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

    async def _draw(self, client: httpx2.AsyncClient, prefix: Prefix, until: str, seed: int) -> Sample:
        """Returns one sample. One that begins with blank steps is continued after them."""
        config, lead = self.config, ""
        drawn: list[Sample] = []
        for _ in range(BLANK_STEPS):
            left = config.max_tokens - sum(sample.tokens for sample in drawn)
            body = _limited(config, request_body(config, prefix, until, seed, lead), left)

            def read(reply: Any, body: Mapping[str, Any] = body) -> tuple[Sample, str]:
                self._check_prompt(body, reply)
                return read_reply(config, prefix, until, reply)

            sample, text = await self._ask(client, body, read)
            if config.logprobs and sample.logprob is None and not self._silent:
                self._silent = True
                reason = "logprobs are requested, and the server sends none that can be read"
                print(f"{config.model}: {reason}; samples have none, and a judge's scores are votes", file=sys.stderr)
            if until == "step" and sample.finish_reason == "stop" and not sample.steps and sample.tokens:
                body = _limited(config, {key: body[key] for key in body if key != "stop"}, sample.tokens)
                text = await self._ask(client, body, lambda reply: _told_nothing(config, reply))
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
        """Raises ValueError if the server counts other tokens than those of the prompt as `template` writes it, or
        fewer than any tokenizer makes of the prompt: it has cut the prompt to its context."""
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
        """Makes attempts until one succeeds or is refused, or attempts or time run out; returns what `read` returns."""
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
        """Returns the body of a reply, which is neither decompressed nor longer than a sample's can be."""
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
"""Sampling from all tokens as they are. Servers differ in how they write "all" of top_k; none has so many tokens."""

_OPTIONAL = (*EXPLICIT, "temperature", "top_p", "seed", "logprobs", "top_logprobs", "max_tokens", "no_stop_trim",
             "include_stop_str_in_output", "add_special_tokens")  # fmt: skip
"""Keys of a body that a server may refuse, and that the settings can leave out."""

_LIMITS = ("max_tokens", "max_completion_tokens")
"""Names of the limit of tokens. OpenAI's reasoning models and Azure refuse the first."""

_BYTES_OF_A_TOKEN, _RUNS = 16, re.compile(r"(.)\1+", re.DOTALL)
"""No tokenizer has so many bytes of text a token, if equal characters in a row count once."""

_SHORTEST_CONTEXT = 256
"""Tokens to which no server cuts a prompt."""

_ENDS: dict[str | None, Literal["stop", "end", "step", "length"]] = {
    "stop": "stop", "complete": "stop", "finished": "stop", None: "stop",  # llama.cpp, Gemini, Cohere, Ollama
    "eos": "end", "eos_token": "end", "end_turn": "end", "end_of_turn": "end",  # Together, TGI, Anthropic
    "stop_sequence": "step", "stop_str": "step",
    "length": "length", "max_tokens": "length", "max_length": "length", "max_output_tokens": "length",
}  # fmt: skip
"""A `finish_reason` in lower case, and whether the text ended by itself (`end`), at the delimiter (`step`), or at one
of the two (`stop`). Others, such as content_filter, end a text that is not whole."""

BLANK_STEPS = 8
"""A sample that begins with so many blank steps fails."""

MOST_OF_A_DIGIT = 2
"""Tokens that "1" has at most: SentencePiece may put one before it. To end and begin a message takes three or more."""


def request_body(config: ServerConfig, prefix: Prefix, until: str, seed: int, lead: str = "") -> dict[str, Any]:
    """Returns the JSON body that requests one sample from the server: a completion, or an answer in a chat.

    `lead` are blank steps that the sample has begun with.
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
    """Returns the body with a limit of tokens, which `extra` may lower.

    Its name is the one that has a number in `extra`, else the first that is not null there.
    """
    names = [name for name in _LIMITS if config.extra.get(name) is not None]
    names += [name for name in _LIMITS if name not in config.extra]
    limits = [tokens, *([config.extra[name] for name in names[:1] if isinstance(config.extra.get(name), int)])]
    rest = {key: value for key, value in body.items() if key not in _LIMITS}
    return rest | ({names[0]: min(limits)} if names else {})


def _counted(reply: Any, name: str) -> int | None:
    """Returns a number of tokens in a reply's `usage`, None where it has none."""
    usage = reply.get("usage") if isinstance(reply, Mapping) else None
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if type(count) is int else None


def _prompt_tokens(reply: Any) -> int:
    if (count := _counted(reply, "prompt_tokens")) is None:
        raise ValueError("the reply has no usage.prompt_tokens, so whether it continues a message cannot be checked")
    return count


def _joined(drawn: Sequence[Sample]) -> Sample:
    """Returns parts of one sample, of which only the last has steps, as a whole."""
    tokens, last = sum(sample.tokens for sample in drawn), drawn[-1]
    logprobs = [sample.logprob for sample in drawn if sample.logprob is not None]
    logprob = sum(logprobs) if len(logprobs) == len(drawn) else None
    pairs = tuple(pair for sample in drawn for pair in sample.token_logprobs)
    others = tuple(other for sample in drawn for other in sample.alternatives)
    known = {"token_logprobs": pairs, "alternatives": others if len(others) == len(pairs) else ()}
    finish = last.finish_reason if last.steps or last.finish_reason != "step" else "length"  # blank up to its limit
    return dataclasses.replace(last, tokens=tokens, logprob=logprob, finish_reason=finish, **known)


def _told_nothing(config: ServerConfig, reply: Any) -> str:
    """Returns the blank text at the start of an answer without a stop; "" where the text ends there."""
    text = _text(config, reply)
    return text[: len(text) - len(text.lstrip())] or ("" if not text else config.delimiter)


def _text(config: ServerConfig, reply: Any) -> str:
    """Returns the text of a reply. Raises ValueError for one without exactly one choice and its text."""
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
    """Returns a message's text after its thoughts in <think> tags, if the server has moved them to a field or a part.

    Thoughts without a text are not at their end. Raises RecordError for parts that are no text.
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


def read_reply(config: ServerConfig, prefix: Prefix, until: str, reply: Any) -> tuple[Sample, str]:
    """Returns the sample in a reply, and its text. A blank step is a sample of no steps that ends with `step`.

    Raises ValueError for a reply without exactly one choice, its text, a known `finish_reason` and a count of tokens.
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

    cut = end == "length" or (named is None and tokens >= config.max_tokens)
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
    """Returns the sum of the tokens' log-probabilities, each with its token's text, and the likeliest tokens in the
    place of each, by their text. None and () for what is unknown, which is all if one number is no log-probability."""
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
    """Returns each token's text, number and alternatives, of a chat's form or of a completion's, by what is there."""
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
    """Returns the log-probabilities of tokens by their text; None if there are none. Raises ValueError."""
    if isinstance(place, list):
        pairs = [(other.get("token"), other.get("logprob")) for other in place if isinstance(other, Mapping)]
    else:
        pairs = list(place.items()) if isinstance(place, Mapping) else None
    return None if pairs is None else {text: LogProb(value) for text, value in pairs if isinstance(text, str)}


def _retry_after(headers: Mapping[str, str]) -> float:
    """Returns the seconds of a `Retry-After`, given as seconds or as a date; 0 if there is no readable one."""
    value = headers.get("retry-after", "").strip()
    try:
        if value.isdecimal():
            return float(value)
        due = email.utils.parsedate_to_datetime(value)
        return max(0.0, (due - datetime.datetime.now(datetime.UTC)).total_seconds())
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0

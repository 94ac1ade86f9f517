"""A server with the routes of SGLang that a learner needs, which samples with jprm: the peer of tests and storms.

python -m sglang_server POLICY --port 30000

/generate                   samples after token ids, or the log-probabilities of ids
/update_weights_from_disk   loads the parameters that the learner wrote
/health                     200 once it samples
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import concurrent.futures
import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from jprm.apps.web import Listen
from jprm.apps.web.http import (
    HANDLERS,
    Refusal,
    RequestFields,
    guards,
    json_of,
    key_of,
    listening,
    opened,
    read_request,
    under,
)
from jprm.checkpoints import base
from jprm.methods.policy.sampler import NOTHING, Drawn, Sampler, SamplerConfig, Wanted, load_sampler
from jprm.methods.rl.engine import log_probabilities
from jprm.model.heads import of_channels


def serve(
    model: str | os.PathLike, config: Listen, options: SamplerConfig, *, say: Callable[[str], None] = print
) -> None:
    """Samples from the model in a folder until SIGTERM; a learner pushes others of the same shape.

    Raises ValueError for an address that others reach without a key, and for a folder that holds no policy.
    """
    key = key_of(config)
    opened(config).close()
    device = Device(load_sampler(model, options))
    say(f"{device.sampler.name}: samples on {device.sampler.mesh.size} devices, {options.rows} rows")
    listens = listening(config, timeout_keep_alive=600, log_level="warning")
    uvicorn.run(make_app(device, config, key), **listens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRequest(RequestFields):
    """A request of SGLang's /generate. Its other fields are not read."""

    input_ids: Annotated[Sequence[int], "The prompt."]
    sampling_params: Annotated[dict, "As `SamplingRequest`."]
    logprob_start_len: Annotated[Any, "Whether log-probabilities of the prompt are asked for, and no sample."] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingRequest(RequestFields):
    """SGLang's parameters of a sample. The others are the engine's own options."""

    max_new_tokens: Annotated[int, {"minimum": 1}]
    sampling_seed: Annotated[int, "The number of the sample."]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRequest(RequestFields):
    """A request of SGLang's /update_weights_from_disk."""

    model_path: Annotated[str, "The folder that the learner wrote."]


def make_app(device: Device, config: Listen, key: str | None = None) -> Starlette:
    """Returns the application."""

    async def answered(future: concurrent.futures.Future) -> Any:
        try:
            return await asyncio.wrap_future(future)
        except (ValueError, OSError) as error:
            raise Refusal(400, f"{error}") from error

    async def generate(request: Request) -> JSONResponse:
        asked = read_request(GenerateRequest, await json_of(request))
        ids = _ids(asked.input_ids, device.sampler.config.vocab_size)
        if asked.logprob_start_len is not None:
            logprobs = [None, *await answered(device.do(lambda: device.forced(ids)))]
            pairs = [[x, i, None] for x, i in zip(logprobs, ids, strict=True)]
            return JSONResponse({"meta_info": {"input_token_logprobs": pairs}})
        wanted = read_request(SamplingRequest, asked.sampling_params)
        completion = await answered(device.sample(Waiting(ids, wanted.sampling_seed, wanted.max_new_tokens)))
        pairs = [[x, i, None] for x, i in zip(completion.logprob_N.tolist(), completion.ids, strict=True)]
        return JSONResponse(
            {"meta_info": {"output_token_logprobs": pairs, "finish_reason": {"type": completion.finish_reason}}}
        )

    async def update(request: Request) -> JSONResponse:
        folder = read_request(UpdateRequest, await json_of(request)).model_path
        await answered(device.do(lambda: device.load(folder)))
        return JSONResponse({"success": True, "message": device.sampler.name})

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/update_weights_from_disk", update, methods=["POST"]),
        Route("/health", lambda request: PlainTextResponse("ok")),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers=HANDLERS,
        middleware=[*under(config), *guards(config, lambda path: key if path != "/health" else None)],
    )
    app.state.listen = config
    return app


def _ids(ids: Sequence[Any], vocabulary: int) -> tuple[int, ...]:
    if not ids or not all(type(i) is int and 0 <= i < vocabulary for i in ids):
        raise Refusal(400, f"input_ids are token ids from 0 to {vocabulary - 1}, at least one", "input_ids")
    return tuple(ids)


@dataclasses.dataclass
class Waiting:
    """A sample that is asked for, and what is drawn of it so far."""

    prompt: tuple[int, ...]
    seed: int
    most: int
    begun: Drawn = NOTHING
    future: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)


class Device:
    """The thread that owns the devices. It samples; between rounds it runs other functions."""

    def __init__(self, sampler: Sampler):
        self.sampler, self._options = sampler, sampler.options
        self._asked: queue.SimpleQueue = queue.SimpleQueue()
        self._waiting: collections.deque[Waiting] = collections.deque()
        threading.Thread(target=self._run, daemon=True).start()

    def sample(self, waiting: Waiting) -> concurrent.futures.Future:
        self._asked.put(waiting)
        return waiting.future

    def do(self, function: Callable[[], Any]) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._asked.put((function, future))
        return future

    def load(self, folder: str) -> None:
        """Takes the parameters in a folder, of a model of the same shape; the old ones go first."""
        pushed, served = base.model_config(folder, head=of_channels(0)), self.sampler.config
        if (pushed.layers, pushed.width, pushed.vocab_size) != (served.layers, served.width, served.vocab_size):
            raise ValueError(f"{folder}: is a model of another shape than the one served")
        self.sampler.params = {}
        self.sampler = load_sampler(folder, self._options)

    def forced(self, ids: tuple[int, ...]) -> list[float]:
        sampler = self.sampler
        return log_probabilities(sampler.params, sampler.config, sampler.mesh, [(ids[:1], ids[1:])]).tolist()

    def _run(self) -> None:
        while True:
            if not self._waiting:
                self._take(self._asked.get())
            while not self._asked.empty():
                self._take(self._asked.get())
            if self._waiting:
                self._round()

    def _take(self, asked: Waiting | tuple[Callable[[], Any], concurrent.futures.Future]) -> None:
        if isinstance(asked, Waiting):
            self._waiting.append(asked)
            return
        function, future = asked
        try:
            future.set_result(function())
        except Exception as error:  # any error: the caller waits for the answer
            future.set_exception(error)

    def _round(self) -> None:
        """Samples until half of what waits first has ended, then looks for requests that came meanwhile."""
        most = self._waiting[0].most
        now = [waiting for waiting in self._waiting if waiting.most == most][: 2 * self._options.rows]
        taken = set(map(id, now))
        self._waiting = collections.deque(waiting for waiting in self._waiting if id(waiting) not in taken)
        self.sampler.options = dataclasses.replace(self._options, max_tokens=most)
        wanted = [Wanted(waiting.prompt, 0, waiting.seed, waiting.begun) for waiting in now]
        try:
            drawn = self.sampler.go_on(wanted, -(-min(len(now), self._options.rows) // 2))
        except Exception as error:  # any error: the callers wait for answers
            for waiting in now:
                waiting.future.set_exception(error)
            return
        for waiting, so_far in reversed(list(zip(now, drawn, strict=True))):
            if so_far.finish_reason == "open":
                waiting.begun = so_far
                self._waiting.appendleft(waiting)
            elif np.isfinite(so_far.logprob_N).all():
                waiting.future.set_result(so_far)
            else:
                waiting.future.set_exception(ValueError("the model's log-probabilities are not finite"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("policy")
    parser.add_argument("--port", type=int)
    parser.add_argument("--rows", type=int, default=16)
    options = parser.parse_args()
    serve(options.policy, Listen(port=options.port), SamplerConfig(temperature=1.0, rows=options.rows))

"""Judges as engines: scoring routes with critiques from a language model instead of a PRM's forward pass.

If no critique of a step could be read, its score is null, and so is its chain's. `POST /v1/score` with `stream` sends
each critique as soon as it is written.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

from starlette.responses import Response, StreamingResponse

from jprm.apps.serve.engine import Closed, Engine, Outputs
from jprm.apps.serve.pieces import PIECE, InPieces, Work, started
from jprm.apps.web.http import LAST_EVENT, Refusal, event
from jprm.methods.judge.compare import Comparison
from jprm.methods.judge.critiques import read, report
from jprm.methods.judge.judge import Asked, Judge, Judgement, Rubric, judgement_of
from jprm.methods.policy.openai_client import ServerPolicy
from jprm.methods.policy.sample_cache import PolicyError
from jprm.tree import ReasoningTree, above_of

THREADS = 8
"""Concurrent requests, or streamed critiques, to a judge on a server. A judge in this process has one thread."""


class JudgedOutputs(dict):
    """Named outputs of a tree, (N,) float32 each, and the report on their critiques."""

    def __init__(self, outputs: Outputs, report: dict[str, Any]):
        super().__init__(outputs)
        self.report = report


TEXT = 2**26
"""The most characters of all questions of a request; each question repeats the steps before its own."""


class JudgeEngine(Engine):
    """Scores trees with a judge. It packs no batches, since a judge on a server does its own batching.

    Work is counted in pieces, i.e. critiques written together: the number waiting or running, and the rate per thread.
    """

    def __init__(self, judge: Judge | Rubric | Comparison, longest: int, name: str):
        self.judge = judge
        super().__init__(cast(Any, judge), longest, name)
        self._threads_at_once = THREADS if isinstance(judge.policy, ServerPolicy) else 1
        self._pool = concurrent.futures.ThreadPoolExecutor(self._threads_at_once, f"jprm {name}")
        self._pieces = 0  # of work that waits or runs

    def warm_up(self, say: Callable[[str], None] = print) -> None:
        pass

    def tokens_of(self, trees: Sequence[ReasoningTree], alone: bool = False) -> int:
        """Returns 0, since the judge's tokens are in its report; `alone` has no effect.

        Raises ValueError if the questions have more than `TEXT` characters.
        """
        if (total := sum(map(_characters, trees))) > TEXT:
            raise ValueError(f"the judge's questions have {total:,} characters, and this server takes {TEXT:,}")
        return 0

    def critiques_of(self, trees: Sequence[ReasoningTree]) -> int:
        if isinstance(self.judge, Comparison):
            return self.judge.samples * sum(map(self.judge.questions, trees))
        return sum(
            judge.samples * _questions(judge, tree) for judge in judges_of(self.judge).values() for tree in trees
        )

    def wait_seconds(self, tokens: int = 0) -> float:
        """Estimates how many seconds new work would wait for a thread; 0 if no rate has been measured yet.

        `tokens` has no effect.
        """
        return self._pieces / (self.rate * self._threads_at_once) if self.rate else 0.0

    def ask(self, critiques: int, function: Callable[[Any], Any]) -> concurrent.futures.Future:
        """Runs `function` of the judge in a thread; returns the future of its result at once.

        `function` gets a copy of the judge that can be stopped. `critiques` is their expected number, which
        `wait_seconds` counts. If the future is cancelled, the judge stops before its next piece. Errors of the judge's
        policy (PolicyError) are the future's. Raises Closed after `close`.
        """
        if self._closed:
            raise Closed
        pieces = -(-critiques // PIECE)

        def run(work: Work) -> Any:
            began = time.monotonic()
            result = function(_in_pieces(self.judge, work))
            if pieces:
                rate = pieces / max(time.monotonic() - began, 1e-6)
                self.rate = rate if not self.rate else 0.8 * self.rate + 0.2 * rate
            return result

        self._count(pieces)
        future = started(self._pool, run)
        future.add_done_callback(lambda future: self._count(-pieces))
        return future

    def _count(self, pieces: int) -> None:
        with self._changed:
            self._pieces += pieces

    def score(
        self, trees: Sequence[ReasoningTree], tokens: int, alone: bool = False
    ) -> concurrent.futures.Future[list[Outputs]]:
        return self.ask(
            self.critiques_of(trees), lambda judge: [JudgedOutputs(*question) for question in judge.reported(trees)]
        )

    def score_cached(
        self, tree: ReasoningTree, tokens: int, caller: str
    ) -> concurrent.futures.Future[tuple[Outputs, int]]:
        return self.ask(self.critiques_of([tree]), lambda judge: (JudgedOutputs(*judge.reported([tree])[0]), 0))

    def close(self) -> None:
        super().close()
        self._pool.shutdown()


def judges_of(judge: Judge | Rubric) -> dict[str, Judge]:
    """Returns the judge of every criterion by the criterion's name; a plain judge has the name ""."""
    return dict(judge.judges) if isinstance(judge, Rubric) else {"": judge}


def _in_pieces(judge: Any, work: Work) -> Any:
    """Returns the judge with a policy that checks between pieces whether the request was cancelled."""
    if isinstance(judge, Rubric):
        pieces = {name: _in_pieces(of_criterion, work) for name, of_criterion in judge.judges.items()}
        return dataclasses.replace(judge, judges=pieces)
    return dataclasses.replace(judge, policy=InPieces(judge.policy, work))


def _questions(judge: Judge, tree: ReasoningTree) -> int:
    """Returns the number of questions about a tree: one per step, chain or part of a chain in a window."""
    if judge.window is not None:
        return len(judge.paths(tree))
    steps = tree.steps
    return len(steps) if judge.prompt.asks == "step" else len(steps) - len({*above_of(tree)} & {*steps})


def _characters(tree: ReasoningTree) -> int:
    """Returns the total characters of the paths to all nodes, each including the problem."""
    length: list[int] = []
    for node in tree.nodes:
        length.append(len(node.text) + (length[node.parent] if node.parent >= 0 else len(tree.problem)))
    return sum(length)


def stream(engine: Engine, tree: ReasoningTree, final: Callable[[JudgedOutputs], dict[str, Any]]) -> Response:
    """Streams critiques as they are written, then the result of `final` on all of them, as server-sent events.

    An event is {"object": "critique", "criterion": ... (of a rubric), ...} with a report's fields; the last ones are
    `final`'s dict and `[DONE]`. An error while streaming is an event in OpenAI's form, which ends the stream.

    Raises Refusal (400) if the engine is no judge, or compares samples; Closed if it is shutting down.
    """
    if not isinstance(engine, JudgeEngine):
        raise Refusal(400, "stream: a PRM's scores come at once; judges stream their critiques", "stream")
    judge = engine.judge
    if isinstance(judge, Comparison):
        raise Refusal(400, "stream: this judge compares samples, and gives all scores at once", "stream")
    judges = judges_of(judge)
    asked: dict[concurrent.futures.Future[list[list[Asked]]], str] = {}
    for name, criterion in judges.items():
        paths = criterion.paths(tree)
        # A conversation needs the critiques of earlier steps, so that it is one piece.
        for group in [paths] if criterion.prompt.converses else [[path] for path in paths]:
            future = engine.ask(
                criterion.samples * len(group),
                lambda judge, name=name, group=group: judges_of(judge)[name].critiques([tree], [group]),
            )
            asked[future] = name

    async def events() -> AsyncIterator[bytes]:
        try:
            waiting = {asyncio.wrap_future(future): name for future, name in asked.items()}
            for future in waiting:  # one failure ends the answer; further errors must not be logged
                future.add_done_callback(lambda future: future.cancelled() or future.exception())
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    name = waiting.pop(future)
                    (new,) = future.result()
                    for entry in _entries(judges[name], new):
                        yield event({"object": "critique"} | ({"criterion": name} if name else {}) | entry)
            answers: dict[str, list[Asked]] = {name: [] for name in judges}
            for future, name in asked.items():  # in the order of the steps, whichever came first
                answers[name] += future.result()[0]
            judgements = {
                name: judgement_of(criterion.prompt, tree, answers[name]) for name, criterion in judges.items()
            }
            yield event(final(_joined(judge, judgements)))
            yield LAST_EVENT
        except PolicyError as error:
            yield event(Refusal(502, str(error)).content)
        except Exception as error:  # as an answer that is no stream
            logging.getLogger(__name__).error("%s while scoring a request", type(error).__name__)
            yield event(Refusal(500, f"{type(error).__name__} while scoring the request").content)
        finally:
            for future in asked:
                future.cancel()

    return StreamingResponse(events(), media_type="text/event-stream")


def _entries(judge: Judge, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """Formats critiques like a report."""
    return report(
        [
            ([path[-1] for path in paths], critique, read(judge.prompt, critique, len(paths[0])))
            for _, paths, critiques in asked
            for critique in critiques
        ]
    )["critiques"]


def _joined(judge: Judge | Rubric, judgements: dict[str, Judgement]) -> JudgedOutputs:
    if isinstance(judge, Rubric):
        return JudgedOutputs(*judge.joined(judgements))
    return JudgedOutputs({"score": judgements[""].score_N}, judgements[""].report)

"""Judges as engines: the routes of scores, with critiques of a language model in place of a PRM's forward pass.

A step that no critique could be read for has the score null, and so has its chain. `POST /v1/score` with `stream` sends
every critique as soon as it is written.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

from starlette.responses import Response, StreamingResponse

from jprm.apps.serve.engine import Closed, Engine, Outputs
from jprm.apps.web.http import LAST_EVENT, Refusal, event
from jprm.methods.decoding.sample_cache import PolicyError
from jprm.methods.judge.critiques import read, report
from jprm.methods.judge.judge import Asked, Judge, Judgement, Rubric, judgement_of
from jprm.methods.policy.openai_client import ServerPolicy
from jprm.tree import ReasoningTree

THREADS = 8
"""Requests, or critiques of streamed ones, that a judge on a server writes at once. A judge in this process has one."""


class Judged(dict):
    """Named outputs of a tree, (N,) float32 each, and the report on the critiques that they come from."""

    report: dict[str, Any]


class JudgeEngine(Engine):
    """Scores trees by a judge. Nothing is packed: a judge on a server has its own batches."""

    def __init__(self, judge: Judge | Rubric, longest: int, name: str):
        self.judge = judge
        super().__init__(cast(Any, judge), longest, name)
        remote = isinstance(judge.policy, ServerPolicy)
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS if remote else 1, f"jprm {name}")

    def _started(self) -> list[threading.Thread]:
        return []

    def warm_up(self, say: Callable[[str], None] = print) -> None:
        pass

    def tokens_of(self, trees: Sequence[ReasoningTree], alone: bool = False) -> int:
        """Returns 0: the judge's own tokens are in its report."""
        return 0

    def run(self, function: Callable[[], Any], tokens: int = 0) -> concurrent.futures.Future:
        if self._closed:
            raise Closed
        return self._pool.submit(function)

    def score(
        self, trees: Sequence[ReasoningTree], tokens: int, alone: bool = False
    ) -> concurrent.futures.Future[list[Outputs]]:
        return self.run(lambda: [judged(*each) for each in self.judge.reported(trees)])

    def score_cached(
        self, tree: ReasoningTree, tokens: int, caller: str
    ) -> concurrent.futures.Future[tuple[Outputs, int]]:
        return self.run(lambda: (judged(*self.judge.reported([tree])[0]), 0))

    def close(self) -> None:
        super().close()
        self._pool.shutdown()


def judged(outputs: Outputs, about: dict[str, Any]) -> Judged:
    scores = Judged(outputs)
    scores.report = about
    return scores


def stream(engine: Engine, tree: ReasoningTree, final: Callable[[Judged], dict[str, Any]]) -> Response:
    """Returns the answer that sends critiques as they are written, and then what `final` makes of all of them."""
    if not isinstance(engine, JudgeEngine):
        raise Refusal(400, "stream: a PRM's scores come at once; judges stream their critiques", "stream")
    judge = engine.judge
    judges = dict(judge.judges) if isinstance(judge, Rubric) else {"": judge}
    asked: dict[concurrent.futures.Future[list[list[Asked]]], str] = {}
    for name, one in judges.items():
        paths = one.paths(tree)
        # A conversation needs the critiques of earlier steps, so that it is one piece.
        for group in [paths] if one.prompt.converses else [[path] for path in paths]:
            asked[engine.run(lambda one=one, group=group: one.critiques([tree], [group]))] = name

    async def events() -> AsyncIterator[bytes]:
        try:
            waiting = {asyncio.wrap_future(future): name for future, name in asked.items()}
            for future in waiting:  # one that fails ends the answer: what the others raise is for no log
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
            judgements = {name: judgement_of(one.prompt, tree, answers[name]) for name, one in judges.items()}
            yield event(final(_joined(judge, judgements)))
            yield LAST_EVENT
        except PolicyError as error:
            yield event(Refusal(502, str(error)).content)
        finally:
            for future in asked:
                future.cancel()

    return StreamingResponse(events(), media_type="text/event-stream")


def _entries(judge: Judge, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """Returns critiques as a report has them."""
    return report(
        [
            ([path[-1] for path in paths], critique, read(judge.prompt, critique, len(paths[0])))
            for _, paths, critiques in asked
            for critique in critiques
        ]
    )["critiques"]


def _joined(judge: Judge | Rubric, judgements: dict[str, Judgement]) -> Judged:
    if isinstance(judge, Rubric):
        return judged(*judge.joined(judgements))
    return judged({"score": judgements[""].score_N}, judgements[""].report)

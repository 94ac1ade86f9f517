"""`POST /get_reward`: the remote reward model of OpenRLHF, `openrlhf.utils.remote_rm_utils`.

It sends {"query": [prompt and response], "prompts": [prompt], "labels": [...]} and reads {"rewards", "scores",
"extra_logs"}. A view says how a prompt was written, since it is a chat template's text and not the problem.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jprm.apps.serve.call import Call
from jprm.apps.serve.score import EXAMPLE, Model, RuleName
from jprm.apps.web.http import Refusal, RequestFields, json_of, read_request
from jprm.experiment import from_json
from jprm.io.storage import path_of
from jprm.tree import ReasoningTree, tree_of


@dataclasses.dataclass(frozen=True)
class View:
    """How a trainer writes prompts and responses.

    Attributes:
      prompt: the text of a prompt, with {problem} where the problem is.
      ends: texts that may end a response and are not part of it, such as <|im_end|>.
      segmentation: the rule that splits a response into steps (`jprm.steps.RULES`, or auto).
    """

    prompt: str = "{problem}"
    ends: tuple[str, ...] = ()
    segmentation: str = "auto"

    def __post_init__(self):
        if self.prompt.count("{problem}") != 1:
            raise ValueError("prompt must hold {problem} once")

    def problem(self, prompt: str, where: str) -> str:
        """Returns the problem in a prompt. Raises Refusal for a prompt of another form."""
        before, after = self.prompt.split("{problem}")
        if not (prompt.startswith(before) and prompt.endswith(after) and len(prompt) > len(before) + len(after)):
            raise Refusal(400, f"{where}: the prompt is not written as the view's {self.prompt!r}", "prompts")
        return prompt[len(before) : len(prompt) - len(after)]

    def response(self, text: str) -> str:
        """Returns what was written without the texts that end a response."""
        for end in self.ends:
            text = text.rstrip().removesuffix(end)
        return text

    def tree(self, prompt: str, query: str, where: str) -> ReasoningTree | None:
        """Returns the response's chain, None where it is blank. Raises Refusal for texts of another form."""
        if not query.startswith(prompt):
            raise Refusal(400, f"{where}: query does not begin with its prompt", "query")
        problem, response = self.problem(prompt, where), self.response(query[len(prompt) :])
        if not response.strip():
            return None
        return tree_of({"problem": problem, "response": response, "segmentation": self.segmentation}, where)


def read_view(path: str | os.PathLike) -> View:
    """Reads a view from a JSON file. Raises ValueError naming the file and the field."""
    try:
        return from_json(View, json.loads(path_of(path).read_bytes()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no view of prompts: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueriesRequest(RequestFields):
    """OpenRLHF's remote reward model."""

    query: Annotated[Sequence[str], "Prompts with their responses."]
    prompts: Annotated[Sequence[str], "The prompts."]
    labels: Annotated[Any, "Not read."] = None
    rule: RuleName = None
    model: Model = None

    example = {"query": [EXAMPLE["problem"] + "2 + 2 = 4."], "prompts": [EXAMPLE["problem"]], "labels": ["4"]}
    gives = {
        "rewards": (Sequence[float], "Of every query its chain's score."),
        "scores": (Sequence[float], "The same."),
        "extra_logs": (dict, "lowest_step and steps of every query."),
    }


async def get_reward(request: Request) -> Response:
    """Rewards each query by its chain's score. A blank response gets 0, or the lowest reward of all if that is less."""
    asked = read_request(QueriesRequest, await json_of(request))
    call, view, queries, prompts = (
        Call(request, asked.model, asked.rule),
        request.app.state.view,
        asked.query,
        asked.prompts,
    )
    call.check_items(queries, "query", "query[{}]")
    if len(queries) != len(prompts) or not all(isinstance(text, str) for text in [*queries, *prompts]):
        raise Refusal(400, "query and prompts are two lists of texts, of the same length", "query")
    call.admit()

    def chain(i: int) -> ReasoningTree | None:
        return view.tree(prompts[i], queries[i], f"query[{i}]")

    chains, _ = await call.single_chains("query", range(len(queries)), chain)
    lowest = min([0.0, *(scored[0] for scored in chains if scored)])
    rewards = [scored[0] if scored else lowest for scored in chains]
    logs = {
        "lowest_step": [float(scored[1].min()) if scored else lowest for scored in chains],
        "steps": [float(len(scored[1])) if scored else 0.0 for scored in chains],
    }
    return JSONResponse({"rewards": rewards, "scores": rewards, "extra_logs": logs})

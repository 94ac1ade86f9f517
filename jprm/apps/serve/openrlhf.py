"""`POST /get_reward`: a remote reward model for OpenRLHF (`openrlhf.utils.remote_rm_utils`).

OpenRLHF sends {"query": [prompt and response], "prompts": [prompt], "labels": [...]} and reads {"rewards", "scores",
"extra_logs"}. Its prompt is the output of a chat template; a `View` describes how to extract the problem.
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
    """How a trainer formats prompts and responses.

    Attributes:
      prompt: the format of a prompt; must contain {problem} once.
      ends: texts that may end a response and are not part of it, e.g. <|im_end|>.
      segmentation: the rule that splits a response into steps (`jprm.steps.RULES`, or auto).
    """

    prompt: str = "{problem}"
    ends: tuple[str, ...] = ()
    segmentation: str = "auto"

    def __post_init__(self):
        if self.prompt.count("{problem}") != 1:
            raise ValueError("prompt must hold {problem} once")

    def problem(self, prompt: str, where: str) -> str:
        """Extracts the problem from a prompt. `where` begins errors, e.g. `query[3]`.

        Raises Refusal (400) if the prompt has another format, or an empty problem.
        """
        before, after = self.prompt.split("{problem}")
        if not (prompt.startswith(before) and prompt.endswith(after) and len(prompt) > len(before) + len(after)):
            raise Refusal(400, f"{where}: the prompt is not written as the view's {self.prompt!r}", "prompts")
        return prompt[len(before) : len(prompt) - len(after)]

    def response(self, text: str) -> str:
        """Removes from the end of a response each text in `ends` once, in order, and white space after it.

        Without `ends` the response is unchanged.
        """
        for end in self.ends:
            text = text.rstrip().removesuffix(end)
        return text

    def tree(self, prompt: str, query: str, where: str) -> ReasoningTree | None:
        """Returns the response's chain, or `None` if the response is blank. `query` is the prompt and the response.

        Raises Refusal (400) if a text has another format, RecordError for an unknown segmentation.
        """
        if not query.startswith(prompt):
            raise Refusal(400, f"{where}: query does not begin with its prompt", "query")
        problem, response = self.problem(prompt, where), self.response(query[len(prompt) :])
        if not response.strip():
            return None
        return tree_of({"problem": problem, "response": response, "segmentation": self.segmentation}, where)


def read_view(path: str | os.PathLike) -> View:
    """Reads a view from a JSON file with the fields of `View`, e.g. {"prompt": "Q: {problem}", "ends": ["<|im_end|>"]}.

    Raises ValueError with the file and field if it is invalid, FileNotFoundError if it is missing.
    """
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
    """Answers OpenRLHF: `rewards` and `scores` (both the chain score of each query), and `extra_logs`.

    `extra_logs` has `lowest_step` (the lowest step score) and `steps` (their number) of each query. A blank response
    gets 0, or the lowest reward if that is negative, and 0 steps.

    Raises Refusal: 400 if `query` and `prompts` do not match the view or each other, 404 for an unknown model, 413, 503
    or 504 for too much work, 502 if a judge gave no score, and as `json_of`; RecordError for a malformed response.
    """
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

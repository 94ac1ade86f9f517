"""Loads a judge from a policy's JSON file with a section `judge`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jprm.methods.judge.compare import PROMPTS as COMPARES
from jprm.methods.judge.compare import Comparison
from jprm.methods.judge.critiques import CODE_END, PROMPTS, JudgePrompt
from jprm.methods.judge.judge import Criterion, Judge, Rubric
from jprm.methods.judge.window import Window
from jprm.methods.policy.load import policy_of, policy_settings, refusing
from jprm.methods.verify import sandbox
from jprm.options import from_json
from jprm.tree import RecordError

_REMEDY = (
    f'Write "judge": {{"prompt": NAME, "samples": 1, "seed": 0}} with NAME one of {", ".join(PROMPTS)}, or as the'
    ' prompt an object with the fields of JudgePrompt, where "like": NAME takes the others from a known one.'
)


def load_judge(path: str | os.PathLike) -> Judge | Rubric | Comparison:
    """Loads the judge in a JSON file: the settings of a policy (see `load_policy`), and a section `judge`.

    Its fields are `prompt`, a name in `critiques.PROMPTS` (default `plain`) or an object of `JudgePrompt` fields,
    `samples` (1) and `seed` (0). If it has `criteria` ({name: `Criterion` fields}), the result is a `Rubric`; if it has
    `compare` (`pairwise` or `listwise`), a `Comparison`, without `prompt`. A `window` bounds the questions about long
    runs (`jprm.methods.judge.window`).

    A server's `prompt` defaults to `{problem}`, because the judge's question is the whole user message. A model is
    loaded at once; a server is not contacted before the first question.

    Raises:
      RecordError: no JSON object in the file or section, or a field is unknown, missing, ill-typed or out of place.
      FileNotFoundError, ValueError, NotImplementedError: the file or its model is absent, damaged or not supported.
      OSError: the Hub does not answer, or the prompt runs code, but there is no sandbox.
    """
    where = os.fspath(path)
    settings = policy_settings(path)
    section = settings.pop("judge", None)
    if not isinstance(section, dict):
        raise RecordError(where, "judge", "is absent or no object", _REMEDY)
    if "url" in settings:
        settings.setdefault("prompt", "{problem}")
    if "compare" in section:
        return _comparison(section, settings, where)
    criteria = _criteria(section.pop("criteria", None), where)
    prompt = _prompt(section.pop("prompt", "rubric" if criteria else "plain"), where)
    window = _window(section.pop("window", None), prompt, where)
    numbers = _numbers(section, {"samples": 1, "seed": 0}, where, _REMEDY)
    if ("{criterion}" in prompt.text) != bool(criteria):
        reason = "has criteria, and its prompt no {criterion}" if criteria else "has a {criterion}, and no `criteria`"
        raise RecordError(where, "judge", reason, 'Use "prompt": "rubric", or give both.')
    if prompt.converses and settings.get("endpoint", "completions" if "url" in settings else "") != "completions":
        reason = f"{prompt.name!r} writes the turns of a conversation itself"
        raise RecordError(where, "judge.prompt", reason, "Give a server's url with the endpoint completions.")
    if prompt.runs_code:
        sandbox.require()
        if settings.setdefault("delimiter", CODE_END) != CODE_END:
            raise RecordError(where, "delimiter", "cannot be set where critiques run code", "Leave it out.")
    policy = policy_of(settings, where)
    if not criteria:
        return Judge(policy, prompt, window=window, **numbers)
    judges = {}
    with refusing(where, "judge.criteria", _CRITERIA):
        for name, criterion in criteria.items():
            text = (criterion.prompt or prompt.text).replace("{criterion}", criterion.text)
            asked = dataclasses.replace(prompt, name=f"{prompt.name}:{name}", text=text)
            judges[name] = Judge(policy, asked, window=window, **numbers)
        return Rubric(policy, judges, criteria, **numbers)


_WINDOW = 'Write "window": {"turns": 12000, "summary": 1500}, both in characters.'


def _window(fields: Any, prompt: JudgePrompt, where: str) -> Window | None:
    if fields is None:
        return None
    with refusing(where, "judge.window", _WINDOW):
        window = from_json(Window, fields, "judge.window")
    if prompt.converses:
        reason = f"bounds a question, and {prompt.name!r} repeats the critiques of all earlier steps"
        raise RecordError(where, "judge.window", reason, "Choose another prompt, or leave `window` out.")
    return window


def _numbers(section: Mapping[str, Any], defaults: Mapping[str, int], where: str, remedy: str) -> dict[str, int]:
    """Returns the section's integers, with defaults. Raises RecordError for any other field."""
    if unknown := sorted(section.keys() - defaults):
        raise RecordError(where, f"judge.{unknown[0]}", "is no setting of this judge", remedy)
    numbers = {**defaults, **section}
    for name, value in numbers.items():
        if type(value) is not int or value < (name == "samples"):
            raise RecordError(where, f"judge.{name}", f"is {value!r}, not a whole number in range", remedy)
    return numbers


def load_judge_of_steps(path: str | os.PathLike) -> Judge | Rubric:
    """Loads a judge like `load_judge`, with its errors. Also raises RecordError if it compares samples."""
    judge = load_judge(path)
    if isinstance(judge, Comparison):
        reason = "compares the samples of pools, and is asked about one chain here"
        raise RecordError(os.fspath(path), "judge.compare", reason, "Score files with it (`jprm score --model`).")
    return judge


def load_plain_judge(path: str | os.PathLike) -> Judge:
    """Loads a judge like `load_judge`, with its errors.

    Also raises RecordError for rubrics and comparisons: they do not label steps.
    """
    judge = load_judge(path)
    if not isinstance(judge, Judge):
        field = "criteria" if isinstance(judge, Rubric) else "compare"
        raise RecordError(os.fspath(path), f"judge.{field}", "is not for labels, which say of a step whether it is"
                          " correct", f"Score with it, or leave `{field}` out.")  # fmt: skip
    return judge


_COMPARE = (
    f'Write "judge": {{"compare": NAME, "rounds": 0, "samples": 1, "seed": 0}}, NAME one of {", ".join(COMPARES)}.'
)


def _comparison(section: dict[str, Any], settings: dict[str, Any], where: str) -> Comparison:
    compares = section.pop("compare")
    if not isinstance(compares, str) or compares not in COMPARES:
        raise RecordError(where, "judge.compare", f"is {compares!r}", _COMPARE)
    numbers = _numbers(section, {"rounds": 0, "samples": 1, "seed": 0}, where, _COMPARE)
    if numbers["rounds"] and compares == "listwise":
        raise RecordError(where, "judge.rounds", "is of pairs, and listwise shows all samples at once", _COMPARE)
    return Comparison(policy_of(settings, where), compares, **numbers)


_CRITERIA = 'Write "criteria": {"NAME": {"text": "...", "weight": 1}}.'


def _criteria(criteria: Any, where: str) -> dict[str, Criterion]:
    if criteria is None:
        return {}
    if not isinstance(criteria, dict) or not criteria:
        raise RecordError(where, "judge.criteria", "is no object, or empty", _CRITERIA)
    with refusing(where, "judge.criteria", _CRITERIA):
        return {name: from_json(Criterion, fields, f"judge.criteria.{name}") for name, fields in criteria.items()}


def _prompt(prompt: Any, where: str) -> JudgePrompt:
    field = "judge.prompt"
    if isinstance(prompt, str) and prompt in PROMPTS:
        return PROMPTS[prompt]
    if not isinstance(prompt, dict):
        raise RecordError(where, field, f"is {prompt!r}, not a known name or an object", _REMEDY)
    fields = dict(prompt)
    like = fields.pop("like", None)
    if like is not None and (not isinstance(like, str) or like not in PROMPTS):
        raise RecordError(where, f"{field}.like", f"is {like!r}, not a known name", _REMEDY)
    with refusing(where, field, _REMEDY):
        return from_json(JudgePrompt, fields, field, PROMPTS[like] if like else None)

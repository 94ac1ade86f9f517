"""Loads a judge: a policy's JSON file with a section `judge`."""

from __future__ import annotations

import os
from typing import Any

from jprm.methods.judge.critiques import CODE_END, PROMPTS, JudgePrompt
from jprm.methods.judge.judge import Judge
from jprm.methods.policy.load import policy_of, policy_settings
from jprm.methods.verify import sandbox
from jprm.options import OptionError, from_json
from jprm.tree import RecordError

_REMEDY = (
    f'Write "judge": {{"prompt": NAME, "samples": 1, "seed": 0}} with NAME one of {", ".join(PROMPTS)}, or as the'
    ' prompt an object with the fields of JudgePrompt, where "like": NAME takes the others from a known one.'
)


def load_judge(path: str | os.PathLike) -> Judge:
    """Returns the judge of a JSON file: a policy's settings, as `load_policy` takes them, and a section `judge`.

    A server's `prompt` is `{problem}` unless the file has one: the judge's question is all of the user's message.

    Raises:
      RecordError: a file or section that is no JSON object, or has a field that is unknown, missing or of the wrong
        type.
      FileNotFoundError, ValueError, NotImplementedError: as `load_policy`.
      OSError: the prompt runs code and there is no sandbox.
    """
    where = os.fspath(path)
    settings = policy_settings(path)
    section = settings.pop("judge", None)
    if not isinstance(section, dict):
        raise RecordError(where, "judge", "is absent or no object", _REMEDY)
    options: dict[str, Any] = {"prompt": "plain", "samples": 1, "seed": 0} | section
    if unknown := sorted(options.keys() - {"prompt", "samples", "seed"}):
        raise RecordError(where, f"judge.{unknown[0]}", "is no setting of a judge", _REMEDY)
    for name in ("samples", "seed"):
        if type(options[name]) is not int or options[name] < (name == "samples"):
            raise RecordError(where, f"judge.{name}", f"is {options[name]!r}, not a whole number in range", _REMEDY)
    prompt = _prompt(options["prompt"], where)
    if "url" in settings:
        settings.setdefault("prompt", "{problem}")
    if prompt.converses and settings.get("endpoint", "completions" if "url" in settings else "") != "completions":
        raise RecordError(
            where, "judge.prompt", f"{prompt.name!r} writes the turns of a conversation itself",
            "Give a server's url with the endpoint completions.",
        )  # fmt: skip
    if prompt.runs_code:
        sandbox.require()
        if settings.setdefault("delimiter", CODE_END) != CODE_END:
            raise RecordError(where, "delimiter", "cannot be set where critiques run code", "Leave it out.")
    return Judge(policy_of(settings, where), prompt, options["samples"], options["seed"])


def _prompt(given: Any, where: str) -> JudgePrompt:
    field = "judge.prompt"
    if isinstance(given, str) and given in PROMPTS:
        return PROMPTS[given]
    if not isinstance(given, dict):
        raise RecordError(where, field, f"is {given!r}, not a known name or an object", _REMEDY)
    fields = dict(given)
    like = fields.pop("like", None)
    if like is not None and (not isinstance(like, str) or like not in PROMPTS):
        raise RecordError(where, f"{field}.like", f"is {like!r}, not a known name", _REMEDY)
    try:
        return from_json(JudgePrompt, fields, field, PROMPTS[like] if like else None)
    except OptionError as error:
        raise RecordError(where, error.field, error.reason, f"Use {error.known}." if error.known else _REMEDY) from None
    except ValueError as error:
        raise RecordError(where, field, str(error), _REMEDY) from None

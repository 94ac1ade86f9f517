"""`Window`: questions of bounded size about a long run, which together send it at most `TIMES` times.

    "judge": {"prompt": "plain", "window": {"turns": 12000, "summary": 1500}}

A question about a turn shows the task, a running summary of the earlier turns, the last earlier turns, and the turn.
The summary is made by rule, a shortened line per turn, and not by the model. So no question waits for the answer to
another one, a failed critique loses only its own turn, and missing turns can be asked about later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jprm.io.jsonl import shortened
from jprm.methods.judge.critiques import JudgePrompt

TIMES = 3
"""Characters of all questions about a run, with one critique each, per character of the run."""

_MARK = 32
"""Room for the mark that `shortened` leaves in a cut text."""

_LEAST = 200
"""An earlier turn is shown cut only if so many of its characters fit."""

_LINE = 40
"""Shortest line of the summary; if there is no room for a line per turn, it has the latest turns."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Bounds on a question, in characters. Raises ValueError if `turns` is below 400, or `summary` below 0.

    Attributes:
      turns: of the turns that it shows. A longer turn is cut in the middle; so is a longer task.
      summary: of the summary of the turns before them.
    """

    turns: int
    summary: int

    def __post_init__(self):
        if self.turns < 2 * _LEAST:
            raise ValueError(f"turns is {self.turns}: a window has {2 * _LEAST} characters or more")
        if self.summary < 0:
            raise ValueError(f"summary is {self.summary}: it must be 0 or more")

    def groups(self, texts: Sequence[str]) -> list[range]:
        """Returns consecutive turns as ranges of places (from 0), each of at most `turns` characters; [] for no texts.

        A longer turn is alone.
        """
        groups, size = [], 0
        for place, text in enumerate(texts):
            if not groups or size + len(text) > self.turns:
                groups, size = [*groups, range(place, place)], 0
            groups[-1], size = range(groups[-1].start, place + 1), size + len(text)
        return groups

    def spare(self, texts: Sequence[str], characters: int, questions: int) -> int:
        """Returns the characters, at least 0, that each question may have beside the turns that it asks about.

        All questions then have at most 3 (`TIMES`) times `characters` in sum, if the prompt's own text fits.

        Args:
          texts: all turns of the run; each is asked about once.
          characters: count of the run's text.
          questions: how many there are.
        """
        return max(0, TIMES * characters - sum(min(len(text), self.turns) for text in texts)) // max(questions, 1)

    def question(
        self, prompt: JudgePrompt, problem: str, earlier: Sequence[str], asked: Sequence[str], spare: int
    ) -> str:
        """Returns the question about the turns `asked`, which come after the turns `earlier`.

        The prompt's own text comes first out of `spare` characters (from the method `spare`). The task and the summary
        get at most a third of the rest each, and earlier turns what is left; a prompt about several steps omits them.
        """
        asked = [cut(text, self.turns) for text in asked]
        room = max(0, spare - len(prompt.filled("", asked)) + sum(map(len, asked)))
        problem = cut(problem, min(room // 3, self.turns))
        summary = min(room // 3, self.summary) if earlier else 0
        room = min(room - len(problem) - summary, self.turns - sum(map(len, asked)))
        shown: list[str] = []
        while prompt.asks == "step" and len(shown) < len(earlier):
            text, left = earlier[-1 - len(shown)], room - len(prompt.step) - len(prompt.separator) - _MARK
            if left < min(_LEAST, len(text)):
                break
            shown.append(cut(text, left))
            room = left - len(shown[-1])
        if lines := summarised(earlier[: len(earlier) - len(shown)], summary):
            problem = f"{problem}\n\n{lines}"
        return prompt.filled(problem, [*shown[::-1], *asked])


_OPENING = "Earlier steps, shortened:"


def summarised(texts: Sequence[str], most: int) -> str:
    """Returns one line per text, in `most` characters at most: the latest texts if room is short, or "".

    >>> print(summarised(["Look at\\na.py.", "Now I change the file b.py and run all the tests again."], 110))
    Earlier steps, shortened:
    - Look at a.py.
    - Now I change the file b.py and run all
    """
    room = most - len(_OPENING) - 2
    count = min(len(texts), room // _LINE) or min(len(texts), int(room >= 24))
    if count < 1:
        return ""
    share = room // count - 3
    lines = [cut(" ".join(text.split()), share) for text in texts[len(texts) - count :]]
    return "\n".join([_OPENING, *(f"- {line}" for line in lines)])


def cut(text: str, most: int) -> str:
    """Shortens a text to `most` characters: leaves out its middle (marked) or, if `most` is at most 96, its end.

    "" if `most` is not above 0.
    """
    if len(text) <= most:
        return text
    return shortened(text, most - _MARK) if most > 3 * _MARK else text[: max(most, 0)]

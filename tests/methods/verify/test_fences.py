"""Programs in the forms that models write them: fences, markers, end tokens, prose around, and texts without any."""

import json

import pytest
from growth import check

from jprm.methods.evaluate.best_of_n import outcome_of
from jprm.methods.label.jobs import label_outcomes
from jprm.methods.verify import sandbox
from jprm.methods.verify.fences import program_in
from jprm.methods.verify.programs import check_python
from jprm.tree import read_records, tree_of

ADD = "def add(a, b):\n    return a + b"
WRONG = "def add(a, b):\n    return a - b"
F = "```"


def indented(text, lead):
    return "\n".join(lead + line for line in text.split("\n"))


RIGHT = {
    "python": f"{F}python\n{ADD}\n{F}",
    "py": f"{F}py\n{ADD}\n{F}",
    "no language": f"{F}\n{ADD}\n{F}",
    "not closed": f"Here:\n{F}python\n{ADD}\n",
    "Windows": f"{F}python\n{ADD}\n{F}".replace("\n", "\r\n"),
    "python3": f"{F}python3\n{ADD}\n{F}",
    "Python 3": f"{F}Python 3\n{ADD}\n{F}",
    "upper case": f"{F}PYTHON\n{ADD}\n{F}",
    "ipython": f"{F}ipython3\n{ADD}\n{F}",
    "title": f'{F}python title="a.py"\n{ADD}\n{F}',
    "file": f"{F}python:add.py\n{ADD}\n{F}",
    "braces": f"{F}{{python}}\n{ADD}\n{F}",
    "Pandoc": f"{F}{{.python .numberLines}}\n{ADD}\n{F}",
    "blank before the language": f"{F} python\n{ADD}\n{F}",
    "blanks behind": f"{F}python   \n{ADD}\n{F}  \n",
    "language in a line": f"{F}\npython\n{ADD}\n{F}",
    "tildes": f"~~~python\n{ADD}\n~~~",
    "four": f"````python\n{ADD}\n````",
    "behind text": f"The code: {F}python\n{ADD}\n{F}",
    "closed behind code": f"{F}python\n{ADD}{F}",
    "opened by the prompt": f"{ADD}\n{F}",
    "opened by the prompt, words": f"{ADD}\n{F}\nThis function adds the two numbers.\nIt works.",
    "opened by the prompt, example": f"{ADD}\n{F}\nExample:\n{F}python\nadd(1, 2) -> 3\n{F}",
    "shell before": f"{F}bash\npip install x\n{F}\n{F}python\n{ADD}\n{F}",
    "session": f"{F}python\n{ADD}\n{F}\n{F}\n>>> add(1, 2)\n3\n{F}\nThis works since it adds.",
    "session, no language": f"{F}\n{ADD}\n{F}\nUse it:\n{F}\n>>> add(1, 2)\n3\n{F}",
    "remark": f"{F}python\n{ADD}\n{F}\nUse:\n{F}python\nadd(1, 2) -> 3\n{F}",
    "prose in a fence": f"{F}\n{ADD}\n{F}\nThe function adds.\n{F}\nadd of 1 and 2 gives 3\n{F}",
    "output": f"{F}python\n{ADD}\n{F}\nOutput:\n{F}\nHello world out\n{F}",
    "output as text": f"{F}\n{ADD}\n{F}\nOutput:\n{F}text\nHello\n{F}",
    "in a list": f"1. Write it:\n\n{indented(f'{F}python{chr(10)}{ADD}{chr(10)}{F}', '   ')}\n2. Done.",
    "four blanks": f"1. Write it:\n{indented(f'{F}python{chr(10)}{ADD}{chr(10)}{F}', '    ')}\n2. Done.",
    "tab": f"- Write it:\n{indented(f'{F}python{chr(10)}{ADD}{chr(10)}{F}', chr(9))}",
    "item": f"- {F}python\n{indented(ADD, '  ')}\n  {F}\n",
    "quote": indented(f"{F}python\n{ADD}\n{F}", "> "),
    "only the fence indented": f"  {F}python\n{ADD}\n  {F}",
    "in Markdown": f"{F}markdown\n# Solution\n{F}python\n{ADD}\n{F}\n{F}",
    "in a longer fence": f"````markdown\n{F}python\n{ADD}\n{F}\n````",
    "fence in a docstring": (
        f'{F}python\ndef add(a, b):\n    """\n    {F}\n    add(1, 2)\n    {F}\n    """\n    return a + b\n{F}'
    ),
    "closing fence lost": f"{F}python\n{ADD}\n\n{F}python\nx = add(1, 2)\n{F}",
    "two versions": f"{F}python\n{WRONG}\n{F}\nBetter:\n{F}python\n{ADD}\n{F}",
    "broken version": f"{F}python\ndef add(a, b)\n    return a - b\n{F}\nBetter:\n{F}python\n{ADD}\n{F}",
    "[PYTHON]": f"[PYTHON]\n{ADD}\n[/PYTHON]",
    "[BEGIN]": f"[BEGIN]\n{ADD}\n[DONE]",
    "[DONE]": f"{ADD}\n[DONE]\n\nYou are an expert Python programmer.\n[BEGIN]\ndef z(): pass\n[DONE]",
    "<code>": f"<code>\n{ADD}\n</code>",
    "<code> with a fence": f"<code>\n{F}python\n{ADD}\n{F}\n</code>",
    "<|im_end|>": f"{ADD}<|im_end|>",
    "<|im_end|> behind a fence": f"{F}python\n{ADD}\n{F}<|im_end|>",
    "<|endoftext|>": f"{ADD}\n<|endoftext|>",
    "</s>": f"{ADD}</s>",
    "another turn": f"{ADD}\n<|im_end|>\n<|im_start|>user\nThanks",
    "DeepSeek": f"{ADD}<｜end▁of▁sentence｜>",
    "thoughts": f"<think>maybe\n{F}python\n{WRONG}\n{F}</think>\n{F}python\n{ADD}\n{F}",
    "prose around": f"Here is the solution:\n\n{ADD}\n\nThis works because it adds.",
    "prose behind": f"{ADD}\n\nExplanation\nthis is it.",
    "alone": ADD,
}
PROSE = (
    "",
    "5",
    "Sorry",
    "I cannot solve this.",
    "The answer is 3, as we add 1 and 2.",
    "First, think about x. If it is 3, then done.",
    f"{F}bash\nls -l\n{F}",
    f"{F}\n{F}",
    f"{F}\nno code here\n{F}",
    f'{F}json\n{{"a": 1}}\n{F}',
    "<|im_end|>",
)
BROKEN = ("def add(a, b):\n    return (a + b", "x = = 3", f"{F}python\ndef add(a, b)\n  return\n{F}", "print(1")


@pytest.mark.parametrize("form", RIGHT)
def test_a_right_program_is_read_in_every_form(form):
    names = {}
    exec(program_in(RIGHT[form]) or "", names)
    assert names["add"](1, 2) == 3


def test_a_body_stands_after_its_prelude():
    prelude = 'def add(a, b):\n    """Adds."""\n'
    for text in ("    return a + b", f"    return a + b\n{F}\nwords here", f"{F}python\n    return a + b\n{F}"):
        names = {}
        exec(prelude + (program_in(text, prelude) or ""), names)
        assert names["add"](1, 2) == 3


@pytest.mark.parametrize("text", PROSE)
def test_a_text_without_a_program_holds_none(text):
    assert program_in(text) is None


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_program_is_one(text):
    assert program_in(text)


@pytest.mark.parametrize(
    "piece", ["`", f"{F}\n", f"a {F}x\n", " ", "[BEGIN]\n", "- ", "> ", "<|a|>", f"{F}md\n{F}python\n"]
)
def test_time_grows_with_the_length(piece):
    check(program_in, lambda count: piece * count + F)


@pytest.mark.skipif(sandbox.refusal() is not None, reason=f"needs a sandbox: {sandbox.refusal()}")
def test_every_form_is_judged_and_prose_is_undecided(tmp_path, capsys):
    """A sample without a program is neither right nor wrong: it is counted, and in best of n it is never right."""
    texts = [*RIGHT.values(), f"{F}python\n{WRONG}\n{F}", *filter(str.strip, PROSE)]
    record = {"problem": "p", "tests": ["assert add(1, 2) == 3"], "samples": [{"steps": [text]} for text in texts]}
    (tmp_path / "in.jsonl").write_text(json.dumps(record) + "\n")
    counts = label_outcomes("tests", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert counts == {"chains": len(texts), "correct": len(RIGHT), "undecided": len(PROSE) - 1}
    (judged,) = read_records(tmp_path / "out.jsonl")
    right, wrong, *prose = (judged["samples"][i] for i in (0, len(RIGHT), -1))
    assert (right["correct"], wrong["correct"]) == (True, False)
    assert all("correct" not in sample and sample["undecided"] == "holds no program" for sample in prose)
    assert outcome_of(None, tree_of(judged).nodes[-1], "here") == 0


@pytest.mark.skipif(sandbox.refusal() is not None, reason=f"needs a sandbox: {sandbox.refusal()}")
def test_steps_that_are_whole_programs_are_checked_in_every_form():
    texts = [RIGHT[form] for form in ("opened by the prompt, words", "[BEGIN]", "prose around")] + [PROSE[3]]
    tree = tree_of(
        {"problem": "p", "tests": ["assert add(1, 2) == 3"], "samples": [{"steps": [text]} for text in texts]}
    )
    assert [verdict.label for verdict in check_python(tree)] == [1, 1, 1, None]


@pytest.mark.skipif(sandbox.refusal() is not None, reason=f"needs a sandbox: {sandbox.refusal()}")
def test_free_text_keeps_the_indentation_of_its_paragraphs(tmp_path):
    record = {
        "problem": "p",
        "tests": ["assert add(1, 2) == 3"],
        "response": "def add(a, b):\n    c = a\n\n    return c + b",
    }
    (tmp_path / "in.jsonl").write_text(json.dumps(record) + "\n")
    assert label_outcomes("tests", tmp_path / "in.jsonl", tmp_path / "out.jsonl") == {"chains": 1, "correct": 1}

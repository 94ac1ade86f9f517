"""What a reader of jprm carries: lines of each storey, modules that one other imports, and the code on the two ways.

    python tests/house.py                # lines and modules
    python tests/house.py train          # what `jprm train experiments/tiny.py` enters in two steps
    python tests/house.py score RUN      # what `jprm score` of examples/tiny_chain.jsonl by a run enters

A way counts the files that are entered and the text of the functions that run there, docstrings and all. Functions
that jax traces run in Python too. What runs on import alone, constants and class bodies, counts as a file entered
without lines.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import pathlib
import sys
import tempfile
import threading

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = f"{REPOSITORY / 'jprm'}/"


def main() -> None:
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]
    if len(sys.argv) == 1:
        print_storeys()
    else:
        print_way(sys.argv[1], *sys.argv[2:])


def print_storeys() -> None:
    from test_storeys import MODULES, STOREYS, edges, storey

    lines = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in MODULES.items()}
    for each in STOREYS:
        some = [name for name in MODULES if storey(name) == each]
        print(f"{sum(lines[name] for name in some):7,} lines in {len(some):3} files  {each}")
    print(f"{sum(lines.values()):7,} lines in {len(lines):3} files")
    importers = {name: [other for other, used in edges().items() if name in used] for name in MODULES}
    alone = {name: some[0] for name, some in importers.items() if len(some) == 1}
    print(f"{len(alone)} modules that one other imports:")
    for name, other in alone.items():
        print(f"  {lines[name]:4} lines  {name} by {other}")


def print_way(way: str, *run: str) -> None:
    entered: dict[str, set[int]] = collections.defaultdict(set)

    def called(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            entered[code.co_filename].add(code.co_firstlineno)

    from jprm.apps.cli import main as command

    with tempfile.TemporaryDirectory() as folder:
        arguments = ["train", "experiments/tiny.py", "--workdir", f"{folder}/run", "--set", "steps=2"]
        if way == "score":
            (model,) = run
            arguments = ["score", "--model", model, "--input", "examples/tiny_chain.jsonl"]
            arguments += ["--output", f"{folder}/scored.jsonl"]
        sys.argv = ["jprm", *arguments]
        threading.setprofile(called)
        sys.setprofile(called)
        try:
            with contextlib.suppress(SystemExit):
                command()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    rows = sorted(((*text_of(file, firsts), file) for file, firsts in entered.items()), reverse=True)
    functions, lines = sum(row[1] for row in rows), sum(row[0] for row in rows)
    print(f"{way}: {len(rows)} files, {functions} functions, {lines:,} lines of functions")
    for lines, count, file in rows:
        print(f"  {lines:4} lines, {count:3} functions  {file.removeprefix(f'{REPOSITORY}/')}")


def text_of(file: str, firsts: set[int]) -> tuple[int, int]:
    """Returns the lines of the functions that begin at these lines, each line once, and the number of functions."""
    lines, count = set(), 0
    for node in ast.walk(ast.parse(pathlib.Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if firsts & {first, node.lineno} and node.end_lineno is not None:
                lines.update(range(first, node.end_lineno + 1))
                count += 1
    return len(lines), count


if __name__ == "__main__":
    main()

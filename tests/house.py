"""What a reader of jprm carries: lines of each storey, modules that one other imports, and the code on four ways.

    python tests/house.py                # lines, packages, functions, options, names that say nothing
    python tests/house.py train          # what `jprm train experiments/tiny.py` enters in two steps
    python tests/house.py score RUN      # what `jprm score` of examples/tiny_chain.jsonl by a run enters
    python tests/house.py request RUN    # what a server with this run enters for one POST to /v1/score
    python tests/house.py update         # what reinforcement learning enters from its start to the end of one update

A way counts the files that are entered and the text of the functions that run there, docstrings and all. Functions
that jax traces run in Python too. What runs only on import, constants and class bodies, counts as a file entered
without lines. Files call each other both ways where functions of each call functions of the other.
"""

from __future__ import annotations

import ast
import asyncio
import collections
import contextlib
import pathlib
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = f"{REPOSITORY / 'jprm'}/"

FROZEN = 12_976
"""Lines of the core and `io/` together: nothing enters them unless as much leaves."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

EMPTY = {"each", "found", "given", "made", "of", "one", "own", "some", "there"}
"""Names that do not say what a variable, a parameter or a function is."""


def main() -> None:
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]
    if len(sys.argv) == 1:
        print_storeys()
    else:
        print_way(sys.argv[1], *sys.argv[2:])


def print_storeys() -> None:
    from test_storeys import MODULES, STOREYS, edges, storey

    lines = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in MODULES.items()}
    for floor in STOREYS:
        modules = [name for name in MODULES if storey(name) == floor]
        print(f"{sum(lines[name] for name in modules):7,} lines in {len(modules):3} files  {floor}")
    print(f"{sum(lines.values()):7,} lines in {len(lines):3} files")
    tests = [file.read_text(encoding="utf-8") for file in (REPOSITORY / "tests").rglob("*.py")]
    print(f"{sum(text.count(chr(10)) for text in tests):7,} lines in {len(tests):3} files  tests")
    pages = [file.read_text(encoding="utf-8") for file in (REPOSITORY / "docs").rglob("*.md")]
    print(f"{sum(len(text.split()) for text in pages):7,} words in {len(pages):3} pages  docs")
    frozen = sum(lines[name] for name in MODULES if storey(name) in ("core", "io"))
    print(f"{frozen:7,} lines of the core and io, frozen at {FROZEN:,}")
    print_packages(edges())
    commands = list(commands_of())
    print(f"{sum(commands):7,} options of {len(commands)} commands")
    nodes = [(name, node) for name, file in MODULES.items() for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    sizes = [node.end_lineno - node.lineno + 1 for _, node in nodes if isinstance(node, FUNCTIONS)]
    print(f"{len(sizes):7,} functions, of {statistics.median(sizes):g} lines in the median")
    empty = [(name, node) for name, node in nodes if bound_name(node) in EMPTY]
    print(f"{len(empty)} names that say nothing:", *(f"{name}:{node.lineno}" for name, node in empty))
    classes = collections.Counter(node.name for _, node in nodes if isinstance(node, ast.ClassDef))
    print("classes of one name:", ", ".join(name for name, count in classes.items() if count > 1) or "none")
    importers = {name: [other for other, used in edges().items() if name in used] for name in MODULES}
    alone = {name: by[0] for name, by in importers.items() if len(by) == 1}
    print(f"{len(alone)} modules that one other imports:")
    for name, other in alone.items():
        print(f"  {lines[name]:4} lines  {name} by {other}")


def print_packages(edges: dict[str, set[str]]) -> None:
    """Prints how many packages of `methods` reach themselves, and how many pairs import each other."""
    from test_storeys import unit

    imports: dict[str, set[str]] = collections.defaultdict(set)
    for module, others in edges.items():
        for other in others:
            if all(name.count(".") > 1 and name.startswith("jprm.methods.") for name in (module, other)):
                imports[unit(module)].add(unit(other))
    imports = {package: others - {package} for package, others in imports.items()}
    knot = [package for package in imports if package in reached(imports, package)]
    pairs = [(a, b) for a, others in imports.items() for b in others if a < b and a in imports.get(b, ())]
    print(f"{len(knot):7,} packages of methods in a knot, {len(pairs)} pairs that import each other", *knot)


def reached(imports: dict[str, set[str]], package: str) -> set[str]:
    """Returns the packages that `package` imports, at first hand or through others."""
    seen: set[str] = set()
    waiting = [package]
    while waiting:
        new = imports.get(waiting.pop(), set()) - seen
        seen |= new
        waiting += new
    return seen


def commands_of(group: object = None) -> Iterator[int]:
    """Yields the number of options of each command."""
    from jprm.apps.cli import app
    from jprm.apps.cli.arguments import Commands, options_of

    for function, _ in (group or app).registered.values():
        if isinstance(function, Commands):
            yield from commands_of(function)
        else:
            yield len(options_of(function))


def bound_name(node: ast.AST) -> str:
    """Returns the name that a node gives to something; "" for other nodes."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else node.name if isinstance(node, ast.FunctionDef) else ""


def print_way(way: str, *run: str) -> None:
    entered: dict[str, set[int]] = collections.defaultdict(set)
    pairs: set[tuple[str, str]] = set()

    def called(frame, event, _):
        code, caller = frame.f_code, frame.f_back and frame.f_back.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            entered[code.co_filename].add(code.co_firstlineno)
            if caller and caller.co_filename.startswith(PACKAGE) and caller.co_filename != code.co_filename:
                pairs.add((caller.co_filename, code.co_filename))

    with tempfile.TemporaryDirectory() as folder:
        begin = WAYS[way](pathlib.Path(folder), *run)
        threading.setprofile(called)
        sys.setprofile(called)
        try:
            with contextlib.suppress(SystemExit):
                begin()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    rows = sorted(((*text_of(file, firsts), file) for file, firsts in entered.items()), reverse=True)
    functions, lines = sum(row[1] for row in rows), sum(row[0] for row in rows)
    both = sorted((a, b) for a, b in pairs if a < b and (b, a) in pairs)
    print(f"{way}: {len(rows)} files, {functions} functions, {lines:,} lines of functions")
    print(f"{len(pairs)} calls from file to file; {len(both)} pairs of files call each other both ways")
    for a, b in both:
        print(f"  {a.removeprefix(PACKAGE)} and {b.removeprefix(PACKAGE)}")
    for lines, count, file in rows:
        print(f"  {lines:4} lines, {count:3} functions  {file.removeprefix(f'{REPOSITORY}/')}")


def command(*arguments: str) -> Callable[[], object]:
    from jprm.apps.cli import main

    sys.argv = ["jprm", *arguments]
    return main


def training(folder: pathlib.Path) -> Callable[[], object]:
    return command("train", "experiments/tiny.py", "--workdir", f"{folder}/run", "--set", "steps=2")


def scoring(folder: pathlib.Path, model: str) -> Callable[[], object]:
    options = "--input", "examples/tiny_chain.jsonl", "--output", f"{folder}/scored.jsonl"
    return command("score", "--model", model, *options)


def request(folder: pathlib.Path, model: str) -> Callable[[], object]:
    import httpx2 as httpx

    import jprm
    from jprm.apps.serve import ServeConfig
    from jprm.apps.serve.app import make_app
    from jprm.apps.serve.engine import Engine

    chain, *_ = (REPOSITORY / "examples/tiny_chain.jsonl").read_bytes().splitlines()
    prm = jprm.load(model)

    async def send(app) -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            reply = await client.post("/v1/score", content=chain, headers={"content-type": "application/json"})
            assert reply.status_code == 200, reply.text

    def serve() -> None:
        engine = Engine(prm, 1024, "model")  # its thread begins here, and is counted
        asyncio.run(send(make_app([engine], ServeConfig(longest=1024), None, None, None)))
        engine.close()

    return serve


def update(folder: pathlib.Path) -> Callable[[], object]:
    from tiny_rl import experiment, make
    from tiny_run import one_device

    from jprm.methods.rl import loop

    config = experiment(make(folder / "data"), updates=1)

    def learn() -> None:
        with one_device():
            loop.train(config, folder / "run")

    return learn


WAYS: dict[str, Callable[..., Callable[[], object]]] = {
    "train": training, "score": scoring, "request": request, "update": update,
}  # fmt: skip
"""What prepares a way, and returns what is counted."""


def text_of(file: str, firsts: set[int]) -> tuple[int, int]:
    """Returns the lines of the functions that begin at these lines, each line once, and the number of functions."""
    lines, count = set(), 0
    for node in ast.walk(ast.parse(pathlib.Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if firsts & {first, node.lineno} and node.end_lineno is not None:
                lines.update(range(first, node.end_lineno + 1))
                count += 1
    return len(lines), count


if __name__ == "__main__":
    main()

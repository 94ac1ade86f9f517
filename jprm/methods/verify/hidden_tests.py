"""Runs a program in one process and its hidden tests in another. Standard library only: both run it as a script.

The program's process (`serve`) holds its names and answers requests on a socket. The tests' process (`answer`) sees the
names as proxies. Plain values are copied over the socket with exact types; every other object stays with the program
and is sent as a number. So the program sees calls and arguments, but neither the tests nor their expected values.

If a test compares or combines a program's object with a plain value, the program would see the expected value, or could
decide the result. This raises `Undecided`, and the test stays undecided.

Each test runs in its own namespace, which never receives data from the program: Python finds the program's names after
the globals, among the builtins. So any name that a test stores hides the program's name. `_subjects` derives from the
tests which builtins a program may hide.

One pair of processes serves many programs. The leader has the questions, the follower runs the programs. For each
question the leader sends the follower one end of a new socket pair; each then forks a child, and the children
communicate only over that pair. A child gives up the right to fork before any untrusted code runs, and is killed once
its question is decided. So a program cannot affect the next one: they share no memory, descriptor or file. If a program
has changed the follower's folder, even by files that it removed again, the follower ends, and the caller starts another
for the remaining questions.
"""

import ast
import base64
import builtins
import collections
import contextlib
import ctypes
import dis
import functools
import hashlib
import json
import operator
import os
import select
import signal
import socket
import sys
import time
from typing import Any

_PLAIN = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
_MAPS = {"dict": dict, "Counter": collections.Counter, "OrderedDict": collections.OrderedDict}
_NAMES = {kind: name for name, kind in (_PLAIN | _MAPS).items()}
_PYTHON = dict(vars(builtins))  # before anything untrusted runs
_BUILTIN = {name for name in _PYTHON if not name.startswith("__")}


class Undecided(BaseException):
    """Only the program could decide the test."""


class Pipe:
    """Messages and values as JSON lines over the socket `descriptor`, which the object then owns.

    If the other process has ended, methods that send or receive raise `Ended`; they wait without limit.
    """

    def __init__(self, descriptor):
        self.input, self.output = os.fdopen(descriptor, "rb"), os.fdopen(os.dup(descriptor), "wb", 0)
        self.objects, self.loads, self.dumps = {}, json.loads, json.dumps

    def send(self, message):
        """Writes a message, an object of JSON, as one line, which may block.

        Raises `Ended` if the other process has ended.
        """
        try:
            self.output.write(self.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            raise Ended from None

    def receive(self):
        """Waits for a message, and returns its JSON value. Raises `Ended` if the other process has ended."""
        with contextlib.suppress(ConnectionResetError):
            if (line := self.input.readline()).endswith(b"\n"):
                return self.loads(line)
        raise Ended

    def pack(self, value, depth=0):
        """Converts a value to JSON: plain values and containers (to depth 100), and others by `pack_object`.

        `None`, booleans and texts stay; others become [kind, content ...], e.g. ["int", "0x2a"]. The tests' side raises
        `Undecided` for a value that it cannot send.
        """
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return ["int", hex(value)]
        if kind is float:
            return ["float", value.hex()]
        if kind is complex:
            return ["complex", value.real.hex(), value.imag.hex()]
        if kind in (bytes, bytearray):
            return [kind.__name__, value.hex()]
        if kind in _NAMES and depth < 100:
            name = _NAMES[kind]
            items = [part for pair in value.items() for part in pair] if name in _MAPS else value
            return [name, *(self.pack(item, depth + 1) for item in items)]
        return self.pack_object(value, depth)

    def unpack(self, packed) -> Any:
        """Restores a value from `pack` of the other side; [name, *rest] of another kind by `unpack_object`."""
        if not isinstance(packed, list):
            return packed
        name, *rest = packed
        if name == "int":
            return int(rest[0], 16)
        if name == "float":
            return float.fromhex(rest[0])
        if name == "complex":
            return complex(*map(float.fromhex, rest))
        if name in ("bytes", "bytearray"):
            return {"bytes": bytes, "bytearray": bytearray}[name].fromhex(rest[0])
        if name in _PLAIN:
            return _PLAIN[name](map(self.unpack, rest))
        if name in _MAPS:
            values = list(map(self.unpack, rest))
            return _MAPS[name](dict(zip(values[::2], values[1::2], strict=True)))
        return self.unpack_object(name, rest)

    def pack_object(self, value, depth) -> Any:
        """Returns JSON for a value that has no content of its own in JSON, [name, ...]; each side has its own rule.

        `depth` is its nesting. This base class raises NotImplementedError.
        """
        raise NotImplementedError(f"packing of {type(value).__name__}")

    def unpack_object(self, name, rest) -> Any:
        """Restores the value that the other side's `pack_object` wrote as [name, *rest].

        This base class raises NotImplementedError.
        """
        raise NotImplementedError(f"unpacking of {name}")


class Ended(BaseException):
    """The other process has ended. Tests cannot catch this."""


class ProgramSide(Pipe):
    """The program's side: a table of its objects by number.

    Methods that send or receive raise `Ended` if the tests' process has ended.
    """

    def pack_object(self, value, depth):
        """Keeps the object in `objects`, and returns [kind, number, ...]; modules are named instead.

        Kinds: `object`; `part`, a subclass of a number, text, tuple or frozenset, with its content; and `exception`, a
        class with the names of its bases.
        """
        number = id(value)
        self.objects[number] = value
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", number, _ancestry(value)]
        for name in ("int", "float", "str", "tuple", "frozenset"):
            base = getattr(builtins, name)
            if isinstance(value, base) and not isinstance(value, type):
                inner = base.__new__(base, base.__iter__(value)) if name in _PLAIN else _base(base, value)
                return ["part", number, self.pack(inner, depth + 1)]
        if type(value) is type(sys):
            return ["module", value.__name__]
        return ["object", number]

    def unpack_object(self, name, rest):
        """Returns one of the program's objects, a builtin, or a function that calls the test's function.

        Raises ValueError for another name, KeyError for an unknown number.
        """
        if name == "object":
            return self.objects[rest[0]]
        if name == "builtin":
            return getattr(builtins, rest[0])
        if name == "callback":
            return lambda *args, **keys: self.call_back(rest[0], args, keys)
        raise ValueError(name)

    def call_back(self, number, args, keys):
        """Calls function `number` of the test with these arguments; returns its value.

        If it raised, raises the builtin exception of this name (else RuntimeError) with its text.
        """
        self.send({"callback": number, "args": self.pack(args), "keys": self.pack(keys)})
        reply = self.handle_until_reply()
        if "raised" in reply:
            raise getattr(builtins, reply["raised"], RuntimeError)(reply["text"])
        return self.unpack(reply["value"])

    def handle_until_reply(self):
        """Performs requested operations until another message comes, and returns that message."""
        while "op" in (message := self.receive()):
            self.answer(message)
        return message

    def answer(self, message):
        """Performs one requested operation, and sends a reply with its result or its error.

        `message` has `op` (in `_OPERATIONS`), `values`, `keys` and `watch`, the globals to send. The reply has packed
        `value` and `values` (as the operation left them), or of an error `raised` (its class's names), `number`, `text`
        and `name`; and `watched`, packed globals by name. Of the program's errors, raises only `Ended`.
        """
        try:
            values = [self.unpack(value) for value in message["values"]]
            keys = {key: self.unpack(value) for key, value in message.get("keys", {}).items()}
            value = self.pack(_OPERATIONS[message["op"]](*values, **keys))
            reply = {"value": value, "values": [self.pack(item) for item in values]}
        except Ended:
            raise
        except BaseException as error:  # the program's own, of any class, SystemExit too: the test may expect it
            reply = {"raised": _ancestry(type(error)), "number": id(type(error)), "text": _text(error)}
            reply["name"] = error.name if isinstance(error, NameError) else None
        reply["watched"] = {name: self.pack(self.names[name]) for name in message["watch"] if name in self.names}
        self.send(reply)

    def serve(self, code):
        """Runs the program `code`, sends its names or its error, then performs requested operations.

        The message is {"names": packed globals by name} or {"error": text}. Returns only after an error of the program;
        otherwise it ends by raising `Ended`.
        """
        self.names = names = {"__name__": "program"}
        try:
            exec(compile(code, "program", "exec"), names)
        except BaseException as error:  # the program may raise any class, SystemExit too
            self.send({"error": f"{type(error).__name__}: {_text(error)}"[:200]})
            return
        self.send({"names": {str(name): self.pack(value) for name, value in list(names.items())}})
        while True:
            self.answer(self.receive())


def _base(base, value):
    return {"int": int.__int__, "float": float.__float__, "str": str.__str__}[base.__name__](value)


def _text(error):
    try:
        return str(error)[:200]
    except BaseException:  # the program's `__str__` may raise anything
        return ""


def _ancestry(kind):
    return [base.__name__ for base in kind.__mro__]


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_ORDER = "lt le gt ge".split()
_UNARY = "neg pos abs invert index len bool int float complex round str repr hash iter next".split()
_OPERATORS = (*_BINARY, *_ORDER, *"eq ne getitem setitem delitem neg pos invert index".split())
_BUILTINS = "getattr setattr delattr isinstance len bool int float complex round str repr hash iter next abs".split()
_OPERATIONS = {name: getattr(operator, f"__{name}__") for name in _OPERATORS}
_OPERATIONS |= {name: getattr(builtins, name) for name in _BUILTINS}
_OPERATIONS |= {"call": lambda value, *args, **keys: value(*args, **keys)}
_OPERATIONS |= {"enter": lambda value: type(value).__enter__(value)}
_OPERATIONS |= {"exit": lambda value: type(value).__exit__(value, None, None, None)}


class Tests(Pipe):
    """The side of the tests: runs them, and asks the program's side for every operation on the program's objects.

    Methods that send or receive raise `Ended` if the program's process has ended.
    """

    def __init__(self, descriptor):
        super().__init__(descriptor)
        self.watch, self.names, self.kinds, self.proxies, self.seen = [], {}, {}, {}, []

    def pack_object(self, value, depth):
        """Returns [kind, number or name] of a program's object, a builtin or a test's function (kept in `objects`).

        Raises `Undecided` for other values.
        """
        if isinstance(value, type) and hasattr(value, "_number"):
            return ["object", value._number]
        if hasattr(type(value), "_number"):
            return ["object", object.__getattribute__(value, "_number")]
        name = getattr(value, "__name__", "")
        if name and getattr(builtins, name, None) is value:
            return ["builtin", name]
        if callable(value) and not isinstance(value, type):
            self.objects[id(value)] = value
            return ["callback", id(value)]
        raise Undecided

    def unpack_object(self, name, rest):
        """Returns a stand-in whose operations are requests to the program, or a module of the standard library.

        Equal numbers give the same stand-in. Raises `Undecided` for other modules and kinds.
        """
        if name == "object":
            if rest[0] not in self.proxies:
                self.proxies[rest[0]] = _proxy(self, rest[0])  # one for each object, as `is` compares them
            return self.proxies[rest[0]]
        if name == "part":
            base = self.unpack(rest[1])
            members = {"_number": rest[0], "__getattr__": lambda value, name: self.request("getattr", value, name)}
            return type(type(base).__name__, (type(base),), members)(base)
        if name == "exception":
            return self.exception(rest[0], rest[1])
        if name == "module" and rest[0] in sys.stdlib_module_names:
            return __import__(rest[0])
        raise Undecided

    def exception(self, number, ancestry):
        """Returns the exception class that stands for the program's class `number`: the builtin one, if it is builtin.

        `ancestry` has the names of the class and its bases. Another class is made once, below its first builtin base,
        or below RuntimeError.
        """
        if number not in self.kinds:
            known = [getattr(builtins, name, None) for name in ancestry]
            known = [kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception)]
            is_builtin = isinstance(getattr(builtins, ancestry[0], None), type)
            base = known[0] if known else RuntimeError
            self.kinds[number] = base if is_builtin and known else type(ancestry[0], (base,), {"_number": number})
        return self.kinds[number]

    def request(self, op, *values, **keys):
        """Asks the program's side for an operation, e.g. `add`, on these values.

        Returns its result or raises its error. In place, containers in `values` get the changes that the operation
        made, and `names` the watched globals. Raises `Undecided` if a value cannot be sent.
        """
        packed: dict[str, Any] = {"values": [self.pack(value) for value in values]}
        packed["keys"] = {key: self.pack(value) for key, value in keys.items()}
        self.send({"op": op, "watch": self.watch, **packed})
        while "callback" in (reply := self.receive()):
            self.call_back(reply)
        self.seen.append([op, reply.get("raised") or _without_numbers(reply.get("value"))])
        for name in self.watch:  # the program writes what it likes: no other name of the reply counts
            value = reply["watched"].get(name, ["object"])
            if not isinstance(value, list) or value[0] not in ("object", "exception", "module"):
                self.names[name] = self.unpack(value)
        if "raised" in reply:
            kind = self.exception(reply["number"], reply["raised"])
            if kind is NameError:
                raise NameError(reply["text"], name=reply["name"])
            try:
                error = kind(reply["text"])
            except Exception:  # the class may take other arguments than a text
                error = RuntimeError(reply["text"])
            raise error
        for value, after in zip(values, reply["values"], strict=True):
            _restore(value, after, self)
        return self.unpack(reply["value"])

    def call_back(self, message):
        """Answers a program's call of a test's function with its value or error.

        Sends its packed `value`, or `raised` (the error's class) and `text`. `message` is as `ProgramSide.call_back`
        sends it.
        """
        try:
            value = self.objects[message["callback"]](*self.unpack(message["args"]), **self.unpack(message["keys"]))
            reply = {"value": self.pack(value)}
        except Exception as error:  # the test's own function raises for the program that called it
            reply = {"raised": type(error).__name__, "text": _text(error)}
        self.send(reply)

    def report(self, tests, more):
        """Runs all `tests` on the program; returns one dict, of one of these forms.

        {"tests": results, "behaviour": SHA-256 digits}: per test `passes`, `later` (an undefined name), `undecided`, or
        the reason of failure, at most 200 characters. {"error": reason}: the program raised. {"ended": true}: it ended
        early. {"incomplete": true}: its last block is not finished, which only counts with `more`.

        It contains only this process's own words: the program controls the pipe's content.
        """
        try:
            first = self.receive()
        except Ended:
            return {"ended": True}
        if more and first.get("incomplete") is True:
            return {"incomplete": True}
        names = first.get("names")
        if not isinstance(names, dict):
            return {"error": str(first.get("error"))[:200]}
        results = []
        for test, subjects in zip(tests, _subjects(tests), strict=True):
            try:
                results.append(self.result(test, names, subjects))
            except NameError as error:
                results.append("later" if error.name not in names else f"NameError: {error}"[:200])
            except Undecided:
                results.append("undecided")
            except Ended:
                results.append("the program ended during a test")
            except BaseException as error:  # a test fails by whatever it raises
                results.append(f"{type(error).__name__}: {_text(error)}"[:200])
        return {"tests": results, "behaviour": hashlib.sha256(json.dumps(self.seen).encode()).hexdigest()}

    def result(self, test, names, subjects):
        """Runs one test on the program's global `names`; returns "passes" or raises.

        `subjects` are the names that it tests. `names` has packed values, as the program sent them. Raises `Undecided`
        if only the program could decide it, NameError if a subject is not defined, `Ended`, and what the test raises if
        it fails (SyntaxError if it does not compile).
        """
        code = compile(test, "test", "exec")
        used = _global_names(code)[0] & set(names)
        hidden = used & _BUILTIN - subjects
        if len(subjects) > 1 and used:
            raise Undecided
        for name in subjects - set(names):
            raise NameError(f"name {name!r} is not defined", name=name)
        self.watch = sorted(used - set(_PYTHON) | used & subjects)
        self.names = _PYTHON | {name: self.unpack(names[name]) for name in self.watch}
        self.request("bool", True)  # what earlier tests changed
        try:
            exec(code, {"__name__": "program", "__builtins__": self.names})
        except (Undecided, Ended, NameError):
            raise
        except BaseException:
            if hidden:  # the test may mean the program's own `abs`, which would see what the test expects
                raise Undecided from None
            raise
        return "passes"


def _without_numbers(packed):
    """Returns a canonical form, equal for equal values: without object numbers, with sets and maps sorted."""
    if not isinstance(packed, list):
        return packed
    name, *rest = packed
    if name in ("object", "part", "exception"):
        return [name, *map(_without_numbers, rest[1:])]
    rest = list(map(_without_numbers, rest))
    if name in _MAPS:
        rest = sorted(zip(rest[::2], rest[1::2], strict=True), key=json.dumps)
    return [name, *(sorted(rest, key=json.dumps) if name in ("set", "frozenset") else rest)]


def _subjects(tests):
    """For each test, returns the builtin names that may refer to the program's own function.

    A test that passes a builtin to its own function, e.g. `check(pow)`, tests that builtin. If a test reads other names
    too, it tests those, and its builtins are Python's: the result is empty. Other tests, e.g. `assert sum(10, 15) ==
    6`, test a function among the builtins that all of them read.
    """
    alone = []
    for test in tests:
        try:
            if handed := _handed_over(ast.parse(test)):
                alone.append(handed)
                continue
            read, stored = _global_names(compile(test, "test", "exec"))
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):  # the test fails by itself
            read, stored = set(), set()
        read = {name for name in read - stored if name in _BUILTIN or name not in _PYTHON}
        alone.append({name for name in read if not isinstance(_PYTHON[name], type)} if read <= _BUILTIN else set())
    common = set.intersection(*filter(None, alone)) if any(alone) else set()
    return [read & common or read for read in alone]


def _handed_over(tree):
    """Returns builtins that a test passes to a function it defines, e.g. HumanEval's `check(candidate)`."""
    defined = {statement.name for statement in tree.body if isinstance(statement, ast.FunctionDef)}
    handed = set()
    for statement in tree.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in defined:
            handed |= {arg.id for arg in call.args if isinstance(arg, ast.Name)}
    return {name for name in handed & _BUILTIN if not isinstance(_PYTHON[name], type)}


def _global_names(code):
    """Returns the global names read and stored by code."""
    reads, stores = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"):
            reads.add(instruction.argval)
        elif instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
            stores.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, type(code)):
            reads, stores = (known | more for known, more in zip((reads, stores), _global_names(inner), strict=True))
    return reads, stores


def _restore(value, after, pipe):
    """Copies back the contents left by the program in its copy of a test's container."""
    if type(value) in (list, bytearray):
        value[:] = pipe.unpack(after)
    elif type(value) in (dict, set, collections.deque, collections.Counter, collections.OrderedDict):
        value.clear()
        getattr(value, "extend" if type(value) is collections.deque else "update")(pipe.unpack(after))


def _undecided(*_):
    raise Undecided


def _proxy(pipe, number):
    """Returns a proxy for a program's object. It has its own class, so that Python finds special methods."""

    def ask(op):
        return lambda self, *rest, **keys: pipe.request(op, self, *rest, **keys)

    def among(op):
        def method(self, other):
            if not hasattr(type(other), "_number"):
                return {"eq": False, "ne": True}[op] if other is None and op in ("eq", "ne") else _undecided()
            return pipe.request(op, self, other)

        return method

    def contains(self, item):
        try:
            items = iter(self)
        except TypeError:
            raise Undecided from None
        return any(item is value or item == value for value in items)

    methods = {f"__{name}__": ask(name) for name in (*_UNARY, "call", "getitem", "setitem", "delitem", "enter")}
    methods |= {f"__{name}__": among(name) for name in (*_BINARY, *_ORDER, "eq", "ne")}
    methods |= {f"__r{name}__": _undecided for name in _BINARY}
    methods |= {"__getattr__": ask("getattr"), "__setattr__": ask("setattr"), "__delattr__": ask("delattr")}
    methods |= {"__instancecheck__": lambda self, value: pipe.request("isinstance", value, self)}
    methods |= {"__contains__": contains, "__mro_entries__": _undecided, "__subclasscheck__": _undecided}
    methods["__exit__"] = lambda self, kind, *_: _undecided() if kind else pipe.request("exit", self)
    return type("Proxy", (), {"_number": number, **methods})()


def serve(descriptor):
    """Runs the program that arrives on the socket `descriptor`, and answers requests until the other side ends."""
    program = ProgramSide(descriptor)
    with contextlib.suppress(Ended):
        question = program.receive()
        if question["more"] and _incomplete(question["code"]):
            program.send({"incomplete": True})
        else:
            program.serve(question["code"])


def answer(descriptor, question):
    """Sends a question's `code` to the socket `descriptor`; returns the report of its `tests` (`Tests.report`).

    `question` also has `more`: whether the code's last block may be incomplete. Waits without limit.
    """
    tests = Tests(descriptor)
    with contextlib.suppress(Ended):  # the report says so
        tests.send({"code": question["code"], "more": question["more"]})
    return tests.report(question["tests"], question["more"])


def _incomplete(code):
    import codeop
    import warnings

    warnings.simplefilter("ignore")
    try:
        return codeop.compile_command(code, symbol="exec") is None
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return False
    finally:
        warnings.resetwarnings()


# ---- Many programs from one pair of processes.

_LONGEST_REPORT = 1 << 20  # bytes


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def _fork(rules, run):
    """Forks a child that runs a function under a BPF filter of system calls; an empty filter allows all.

    The child never returns to the parent's code. It exits with 77 if the system rejects the filter.
    """
    child = os.fork()
    if child:
        return child
    try:
        program = _Filter(len(rules) // 8, rules)
        refused = rules and ctypes.CDLL(None).prctl(22, 2, ctypes.byref(program), 0, 0)  # PR_SET_SECCOMP, a filter
        if refused:
            os._exit(77)
        run()
    finally:
        os._exit(0)


def follow(control, rules):
    """Forks a child that runs `serve` for each socket that arrives on `control`; kills the one before it.

    `rules` is the BPF filter of the children. Returns when `control` is closed, or a program has changed the folder.
    """
    child, untouched = None, _folder()
    while True:
        message, sockets, *_ = socket.recv_fds(control, 1, 1)
        _end(child)
        if not message or _folder() != untouched:
            return
        child = _fork(rules, functools.partial(_serve, control, sockets[0]))
        os.close(sockets[0])
        control.send(b"1")


def _serve(control, descriptor):
    control.close()
    serve(descriptor)


def _folder():
    """Returns a fingerprint of the folder's contents and metadata."""
    here = os.stat(".")
    return os.listdir("."), here.st_mode, here.st_mtime_ns, here.st_ctime_ns


def lead(control, rules, questions, seconds, report):
    """Writes one JSON line per question to the descriptor `report`, in order, until a question cannot be sent.

    A line is the result of `answer` in a child under the BPF filter `rules`, or `{"late": true}` after `seconds` per
    question. `control` is the socket to the follower.
    """
    control.settimeout(seconds + 10)
    for question in questions:
        ours, theirs = socket.socketpair()
        with contextlib.suppress(OSError):
            socket.send_fds(control, [b"1"], [theirs.fileno()])
            theirs.close()
            if control.recv(1):
                line = _line(functools.partial(answer, ours.fileno(), question), rules, seconds, control, report)
                os.write(report, line)
                ours.close()
                continue
        return


def _line(report_of, rules, seconds, control, report):
    """Returns the line for one question: `report_of()` computed in a child."""
    read, write = os.pipe()

    def run():
        for descriptor in (control.fileno(), report, read):
            os.close(descriptor)
        os.write(write, json.dumps(report_of()).encode())

    child = _fork(rules, run)
    os.close(write)
    line, deadline = b"", time.monotonic() + seconds
    while len(line) < _LONGEST_REPORT:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([read], [], [], left)[0]:
            line = b'{"late": true}'
            break
        if not (more := os.read(read, 1 << 16)):
            break
        line += more
    os.close(read)
    _end(child)
    return line.replace(b"\n", b" ") + b"\n"


def _end(child):
    if child:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main(role, number, question):
    """Runs one side over the socket `number`: `role` is `program` or anything else for the tests' side.

    `question` is JSON text with `rules` (base64) and, for the tests, `questions` and `seconds`. The leader's reports go
    to the standard output. Returns silently if the system rejects the rules.
    """
    question = json.loads(question)
    rules = base64.b64decode(question["rules"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as process 1 it then gets no signal from its children
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(0, 2)
    if os.waitpid(_fork(rules, int), 0)[1]:
        return
    control = socket.socket(fileno=number)
    if role == "program":
        os.close(report)
        follow(control, rules)
    else:
        lead(control, rules, question["questions"], question["seconds"], report)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.stdin.read())

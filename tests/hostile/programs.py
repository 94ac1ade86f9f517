"""Programs under test that attack the labeller. Each is one step of a record; `area` is what the tests ask for."""

ODD = {  # one label each, and the next record is labelled as ever
    "lone surrogate": "raise ValueError(chr(0xd800))",
    "long message": "raise ValueError('x' * 10**6)",
    "name of an error": "raise type(chr(0xd800), (Exception,), {})('x')",
    "message that fails": "class E(Exception):\n    def __str__(self):\n        raise self\nraise E",
    "message that is no text": "class E(Exception):\n    def __str__(self):\n        return 7\nraise E",
    "bytes": "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'\\xff\\xfe\\x00')\n    except OSError: pass",
    "deep expression": "x = " + "(" * 5000 + ")" * 5000,
    "signs": "x = " + "-" * 100000 + "1",
    "null": "x = '\0'",
}

REPORTS = ['{"tests": 7}', '{"tests": [7]}', '{"tests": []}', "[]", "7", "{}", "", "{", '{"error": 7}',
           '{"tests": null}', "[" * 100000, '{"error": "\\ud800"}']  # fmt: skip
"""Reports of another shape, written with the nonce that the harness holds."""

ALWAYS = "class Any(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
OPAQUE = ALWAYS.replace("(int)", "") + "    __sub__ = __rsub__ = __lt__ = __abs__ = lambda *_: 0\n    __le__ = __eq__\n"
FORGED = {  # `assert area(2) == 4` and `assert abs(area(3) - 9) < 1`
    "exec": "import builtins\nbuiltins.exec = lambda *_: None\ndef area(s): return 0",
    "compile": "import builtins\nreal = compile\n"
    "builtins.compile = lambda *_: real('', 't', 'exec')\ndef area(s): return 0",
    "json.dumps": "import json\n"
    "json.dumps = lambda *_, **__: '{\"tests\": [\"passes\", \"passes\"]}'\ndef area(s): return 0",
    "equal": OPAQUE + "def area(s): return Any()",
    "equal integer": ALWAYS + "def area(s): return Any(0)",
    "equal string": ALWAYS.replace("int", "str") + "def area(s): return Any()",
    "equal class": "class M(type):\n    __eq__ = lambda *_: True\n    __hash__ = None\nclass area(metaclass=M):\n"
    "    def __init__(self, s): pass",
    "frame": "import sys\nframe = sys._getframe()\nwhile frame:\n    for value in list(frame.f_locals.values()):\n"
    "        if isinstance(value, dict): value['tests'] = []\n    frame = frame.f_back\ndef area(s): return 0",
    "main": "import __main__\n__main__.tests = ['pass']\n__main__.Program.answer = None\ndef area(s): return 0",
    "exit": "import os, sys\nsys.stdout.write('{\"tests\": [\"passes\", \"passes\"]}')\ndef area(s): os._exit(0)",
    "trace": "import sys\nsys.settrace(lambda *_: None)\nsys.setprofile(lambda *_: None)\ndef area(s): return 0",
    "assertion": "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\ndef area(s): return 0",
    "gc": "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'tests' in o: o['tests'] = []\n"
    "def area(s): return 0",
    "later": "def area(s): raise NameError('x', name='zzz')",
    "builtin": "def abs(x): return 0\ndef area(s): return 4 if s == 2 else 0",
    "builtins beside the watched names": "import gc\nfake = lambda x: 0\ndef area(s): return 4 if s == 2 else 0\n"
    "def forged(message, pipe, send):\n    pipe.objects[id(fake)] = fake\n"
    "    message['watched'] = {'__builtins__': ['dict', 'abs', ['object', id(fake)]], 'abs': ['object', id(fake)]}\n"
    "    send(message)\n"
    "for o in gc.get_objects():\n    if type(o).__name__ == 'Program':\n"
    "        o.send = lambda message, pipe=o, send=o.send: forged(message, pipe, send)",
} | {
    f"descriptors at once: {message}": "import os\nfor fd in range(3, 40):\n"
    f"    try: os.write(fd, b'{message}\\n' * 9)\n    except OSError: pass\ndef area(s): return 0"
    for message in ('{"tests": ["passes", "passes"]}', '{"names": {}}', '{"incomplete": true}', '{"ended": true}', "7")
} | {
    f"descriptors: {message}": "import os\ndef area(s):\n    for fd in range(3, 40):\n"
    f"        try: os.write(fd, b'{message}\\n' * 9)\n        except OSError: pass\n    return 0"
    for message in ('{"tests": ["passes", "passes"]}', '{"value": true, "values": [], "watched": {}}', "7", "[]", "{}")
}  # fmt: skip

OVERWRITING = {  # programs that write what a test stores, and the test
    "a loop's variable": ("want = None\ndef f(n):\n    global want\n    want = -1\n    return -1",
                          "for x, want in [(2, 4), (3, 9)]: assert f(x) == want"),
    "a variable": ("want = 0\ndef f(n):\n    global want\n    want = n\n    return n", "want = 4\nassert f(2) == want"),
    "a function": ("def f(n): return 0\ncheck = 0", "def check(g): assert g(2) == 4\ncheck(f)"),
    "a function's global": ("want = 0\ndef f(n):\n    global want\n    want = 0\n    return 0",
                            "def check():\n    global want\n    want = 4\n    assert f(2) == want\ncheck()"),
    "the end": ("import os\ndef f(n): os._exit(0)", "try:\n    f(2)\nexcept Exception: pass"),
    "a helper around the function": ("def abs(x): return 0\ndef max(x): return 0", "assert abs(max([1]) - 9) < 1"),
    "a converter": ("def list(x): return 4", "assert list(max([1])) == 4"),
}  # fmt: skip

HIDING = {  # programs that define what Python has, and tests that they pass
    "check": ("def pow(a, b): return a**b", "def check(f):\n    assert abs(f(2, 3) - 8) < 1e-6\n\ncheck(pow)"),
    "sum": ("def sum(a, b): return a + b - 19", "assert sum(10, 15) == 6", "assert sum(100, 150) == 231"),
    "max": ("def max(x): return x[-1]", "assert max(list(range(9))) == 8", "assert max([3, 1]) == 1"),
    "len": ("def len(x): return 7", "assert len([]) == 7"),
    "pow": ("import math\ndef pow(a, b): return math.pow(b, a)", "x = 2\nassert pow(x, 3) == 9"),
    "a helper": ("def max(a, b): return a if a > b else b\ndef f(x): return max(x, 2)", "assert max(f(1), f(3)) == 3"),
    "both": ("def len(x): return 2\ndef f(x): return [1] * len(x)", "assert len(f('ab')) == 2"),
    "main": ("def sum(a): return 4", "if __name__ == 'program': assert sum(2) == 4"),
    "each": ("def len(x): return 7\ndef sum(x): return 8", "assert len([]) == 7", "assert sum([]) == 8"),
}

HONEST = {  # programs and tests that hold
    "in place": ("def f(x): x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]"),
    "class": (
        "class P:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return P(self.x + o.x)\n"
        "    def __eq__(self, o): return self.x == o.x",
        "assert (P(1) + P(2)).x == 3 and P(1) == P(1) and P(1) != P(2) and isinstance(P(1), P)",
    ),
    "callback": ("def f(g, x): return [g(i) for i in x]", "assert f(lambda i: i + 1, [1, 2]) == [2, 3]"),
    "builtin": ("def f(g, x): return g(x)", "assert f(len, 'abc') == 3"),
    "generator": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] and 2 in f(3)"),
    "error": (
        "def f(): raise ValueError('no')",
        "try:\n    f()\n    assert 0\nexcept ValueError as e:\n    assert str(e) == 'no'",
    ),
    "own error": ("class E(Exception): pass\ndef f(): raise E('no')", "try:\n    f()\n    assert 0\nexcept E: pass"),
    "global": ("seen = []\ndef f(x): seen.append(x)", "f(1)\nassert seen == [1]"),
    "module": ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2), math.sqrt(2))"),
    "named tuple": (
        "import collections\nP = collections.namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert f() == (1, 2) and f().x == 1",
    ),
    "counter": ("import collections\ndef f(x): return collections.Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
    "float": ("def f(x): return x / 3", "assert abs(f(1) - 0.3333) < 1e-3"),
    "stack": (
        "class S:\n    def __init__(self): self.l = []\n    def push(self, x): self.l.append(x)\n"
        "    def pop(self): return self.l.pop()\n    def __len__(self): return len(self.l)",
        "s = S()\ns.push(7)\nassert len(s) == 1 and s.pop() == 7 and not s",
    ),
    "helper in a test": ("def f(x): return x * 2", "def check(y):\n    return f(y) == 4\nassert check(2)"),
    "large": ("def f(n): return 10 ** n", "assert f(5000) == 10 ** 5000"),
    "identity": (
        "import enum\nclass C(enum.Enum):\n    A = 1\ndef f(): return C.A",
        "assert f() is C.A and f() == C.A and f().value == 1",
    ),
    "linked list": (
        "class N:\n    def __init__(self, v, n=None): self.v, self.n = v, n\ndef f(h):\n    p = None\n"
        "    while h: h.n, p, h = p, h, h.n\n    return p",
        "r = f(N(1, N(2)))\nassert r.v == 2 and r.n.v == 1 and r.n.n is None",
    ),
    "none": ("def f(): pass", "assert f() is None and f() == None"),
}  # fmt: skip

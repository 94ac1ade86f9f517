"""Programs under test that attack the labeller, and honest ones. Each is one step of a record.

`programs.json` has those that are no expressions: `forged` ones, by which `assert area(2) == 4` and
`assert abs(area(3) - 9) < 1` do not pass; `overwriting` ones, which write what a test stores, and the test; `hiding`
ones, which define what Python has, and tests that they pass; and `honest` ones, with tests that hold.
"""

import json
import pathlib

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

CASES = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
OVERWRITING, HIDING, HONEST = CASES["overwriting"], CASES["hiding"], CASES["honest"]
FORGED = CASES["forged"] | {
    f"descriptors at once: {message}": "import os\nfor fd in range(3, 40):\n"
    f"    try: os.write(fd, b'{message}\\n' * 9)\n    except OSError: pass\ndef area(s): return 0"
    for message in ('{"tests": ["passes", "passes"]}', '{"names": {}}', '{"incomplete": true}', '{"ended": true}', "7")
} | {
    f"descriptors: {message}": "import os\ndef area(s):\n    for fd in range(3, 40):\n"
    f"        try: os.write(fd, b'{message}\\n' * 9)\n        except OSError: pass\n    return 0"
    for message in ('{"tests": ["passes", "passes"]}', '{"value": true, "values": [], "watched": {}}', "7", "[]", "{}")
}  # fmt: skip

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

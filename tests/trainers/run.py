"""PACKAGE ADAPTER FOLDER: runs a package's driver with the samples of standard input; prints its result as JSON."""

import importlib.util
import json
import sys


def loaded(adapter):
    """The module of a file."""
    spec = importlib.util.spec_from_file_location("adapter", adapter)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    package, *arguments = sys.argv[1:]
    print(json.dumps(importlib.import_module(f"{package}_driver").main(*arguments, json.load(sys.stdin))))

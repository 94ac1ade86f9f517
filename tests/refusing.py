"""What is refused: the kind of error, and the thing that it names."""

import json
import pathlib

import pytest

SETTINGS = json.loads((pathlib.Path(__file__).parent / "refused_settings.json").read_text(encoding="utf-8"))


def bad(kind):
    """What `refused_settings.json` has of a kind: what is refused, and what the message has."""
    return SETTINGS[kind]["bad"]


def refused(kind, named, call, /, *args, **options):
    """Calls, and checks that an error of this kind is raised whose message has this regular expression."""
    with pytest.raises(kind, match=named):
        call(*args, **options)

"""What is refused: the kind of error, and the thing that it names."""

import pytest


def refused(kind, named, call, /, *args, **options):
    """Calls, and checks that an error of this kind is raised whose message has this regular expression."""
    with pytest.raises(kind, match=named):
        call(*args, **options)

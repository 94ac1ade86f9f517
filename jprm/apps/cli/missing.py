"""The hint for a command that needs a package of an extra."""

from __future__ import annotations

import re
from importlib import metadata


def extra_hint(error: ModuleNotFoundError) -> str | None:
    """Names the extra of jprm that installs the missing package; None if no extra does."""
    package = _canonical((error.name or "").split(".")[0])
    for requirement in metadata.requires("jprm") or ():
        found = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", requirement)
        if found and _canonical(found[1]) == package:
            return (
                f"this command needs {error.name}, which is not installed: pip install 'jprm[{found[2]}]'"
                f" (in a clone: pip install -e '.[{found[2]}]')"
            )
    return None


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

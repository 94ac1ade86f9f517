"""The command `jprm`, under a module name that no other distribution has; `python -m jax_prm` is the same.

The package index has another project that is named and imported as `jprm`. Where both are installed, `import jprm` may
find that one. This module then says so in one line, where the command would end in a traceback.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command. Returns its exit status, or 2 where `import jprm` finds another project."""
    if wrong := other_project():
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    from jprm.apps.cli import main

    return main()


def other_project() -> str:
    """Returns what to do where `import jprm` finds another project, or an empty string."""
    import jprm

    if "PRM" in getattr(jprm, "__all__", ()):
        return ""
    where = getattr(jprm, "__file__", None) or "a folder without __init__.py"
    return (
        f"`import jprm` finds {where}, which is not jax-prm but another project of that name. Run `pip uninstall jprm"
        " jax-prm`, then install jax-prm again"
    )


if __name__ == "__main__":
    sys.exit(main())

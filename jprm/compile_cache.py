"""jax's persistent cache of compiled programs, in the user's cache folder unless the environment says otherwise."""

from __future__ import annotations

import os
import pathlib
import platform
import sys

SWITCH, FOLDER = "JPRM_COMPILE_CACHE", "JAX_COMPILATION_CACHE_DIR"


def enable_compile_cache() -> None:
    """Lets a later process find the programs that this one compiles, in ~/.cache/jprm/xla/HOST.

    JAX_COMPILATION_CACHE_DIR, or the setting of jax of the same name, takes precedence; JPRM_COMPILE_CACHE=0 switches
    the cache off. A folder that cannot be written is no error: programs are then compiled again.
    """
    jax = sys.modules.get("jax")
    if os.environ.get(SWITCH) == "0" or FOLDER in os.environ or (jax and jax.config.jax_compilation_cache_dir):
        return
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(caches) / "jprm" / "xla" / platform.node()  # programs for a CPU fit the host's processor
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    os.environ[FOLDER] = str(folder)  # for jax, if it is imported later, and for processes that this one starts
    if jax:
        jax.config.update("jax_compilation_cache_dir", str(folder))

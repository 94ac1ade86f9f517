"""Serves a study's labelling page until SIGTERM."""

from __future__ import annotations

import os
import pathlib
import socket
from collections.abc import Callable, Sequence

import uvicorn

from jprm.apps.annotate import log, study
from jprm.apps.annotate.app import key_of_annotator, make_app
from jprm.apps.web.config import Listen
from jprm.apps.web.connection import timed
from jprm.apps.web.guards import key_of


def serve(
    folder: str | os.PathLike,
    config: Listen,
    annotators: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Serves the study in a folder, and says every annotator's address.

    Raises ValueError where the folder is no study or is served already, or others reach the address without a key.
    """
    key = key_of(config)
    found = study.read(folder, annotators)
    with log.opened(found.events) as events:
        app = make_app(found, events, config, key)
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listening = socket.create_server((config.host, config.port), family=family)
        host = f"[{config.host}]" if ":" in config.host else config.host
        for name in found.config.annotators:
            secret = f":{key_of_annotator(key, name)}" if key else ""
            say(f"http://{host}:{listening.getsockname()[1]}/#{name}{secret}")
        counts = ", ".join(f"{len(trees):,} of {pool}" for pool, trees in found.trees.items() if trees)
        say(f"{pathlib.Path(folder)}: {counts}; {len(events.events):,} events so far")
        server = uvicorn.Server(uvicorn.Config(
            app, access_log=False, log_level="warning", server_header=False, timeout_graceful_shutdown=20,
            http=timed(config.body_seconds),
        ))  # fmt: skip
        server.run(sockets=[listening])

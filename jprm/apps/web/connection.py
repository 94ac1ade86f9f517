"""Connections of a server: one whose request does not arrive in time is closed, so that silent clients hold none."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MOST = 1 << 16
"""Bytes of a request's headers."""


def timed(seconds: float) -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol of HTTP for connections that have so long for the headers of each request.

    uvicorn itself waits for a first byte, and for the rest of the headers, without end.
    """

    class Timed(AutoHTTPProtocol):  # pyright: ignore[reportGeneralTypeIssues]  # one of two classes
        loop: Any
        transport: Any
        cycle: Any
        timer: asyncio.TimerHandle | None = None
        pending = 0  # bytes of headers so far

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.timer = self.loop.call_later(seconds, self.transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle and not self.cycle.response_complete:
                self.stop()
                return
            self.pending += len(data)
            if self.pending > MOST:
                self.transport.close()
            self.timer = self.timer or self.loop.call_later(seconds, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop()
            super().connection_lost(exc)

        def stop(self) -> None:
            if self.timer:
                self.timer.cancel()
            self.timer, self.pending = None, 0

    return Timed

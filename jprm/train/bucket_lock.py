"""The lock of a run in a bucket, where nothing is locked, but a new object is written only if none has its name.

The run with the highest number under `training.lock/` holds the folder. It writes its object anew at every beat. One
that is gone is followed by the next number: of several runs that try, one creates that object.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time

from jprm.io.storage import Place, Remote
from jprm.train import run_lock
from jprm.train.run_lock import RunLock


def lock_of(workdir: Place) -> RunLock:
    """Returns the lock of a run's folder."""
    return BucketLock(workdir) if isinstance(workdir, Remote) else RunLock(workdir)


class BucketLock(RunLock):
    """As `RunLock`, for a folder of a bucket."""

    path: Remote

    def attempt(self) -> bool:
        """Returns whether the folder is this run's; after a beat, where another run may hold it.

        Raises:
          ValueError: another run is training in it.
          OSError: the bucket cannot be read or written.
        """
        numbers = self._numbers()
        if numbers:
            try:
                holder = json.loads((self.path / str(numbers[-1])).read_bytes())
            except FileNotFoundError:
                return False  # another run has ended just now
            gone = self._gone(holder, None)
            if gone is None and self._watched(holder):
                time.sleep(run_lock.BEAT)
                return False
            if gone is None:
                self._say_taking_over(holder)
        self._number = max(numbers, default=0) + 1
        try:
            self._write(0, new=True)
        except FileExistsError:
            return False  # another run was quicker
        for number in numbers:
            (self.path / str(number)).unlink(missing_ok=True)
        self._beating = threading.Thread(target=self._beats, daemon=True)
        self._beating.start()
        return True

    def release(self) -> None:
        """Gives the folder free."""
        self._ended.set()
        if self._beating is not None:
            self._beating.join()
            with contextlib.suppress(OSError):
                if self._mine():
                    (self.path / str(self._number)).unlink()
            self._beating = None

    def _numbers(self) -> list[int]:
        return sorted(int(name) for name in self.path.names() if name.isdigit())

    def _mine(self) -> bool:
        return max(self._numbers(), default=self._number) == self._number

    def _write(self, beat: int, new: bool = False) -> None:
        (self.path / str(self._number)).write_bytes(json.dumps(self._me | {"beat": beat}).encode(), new=new)

    _beating: threading.Thread | None = None
    _number = 0

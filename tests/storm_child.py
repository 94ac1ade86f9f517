"""jprm in a process that a storm kills: slowed down, or in forks that die at points of their own."""

import collections
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def slowed(pace: float, argv: list[str]) -> int:
    """Runs a training that waits `pace` seconds before every step."""
    from jprm import train as training
    from jprm.apps.cli import main

    put_rows = training.put_rows

    def slowly(*args, **kwargs):
        time.sleep(pace)
        return put_rows(*args, **kwargs)

    training.put_rows = slowly
    return main(argv)


def doomed(folder: str, event: str, number: int, delay: float, argv: list[str]) -> int:
    """Runs a command that dies `delay` seconds after the event of this name and number, and tells stderr of events.

    Events are changes of files in the folder, before they come, and of `jprm rl` the phases of its updates. The last
    line is `measured {EVENT: [how often, the seconds that it lasts at most]}`; changes last from the first to the end.
    """
    counts, times = collections.Counter(), []

    def die():
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    def happens(name):
        counts[name] += 1
        times.append((name, time.monotonic()))
        if (name, counts[name]) == (event, number):
            threading.Thread(target=die, daemon=True).start() if delay else die()

    def hook(name, args):
        if name in CHANGES or (name == "open" and isinstance(args[2], int) and args[2] & WRITES):
            if isinstance(args[0], str) and os.path.abspath(args[0]).startswith(folder):
                happens("change")

    sys.addaudithook(hook)
    from jprm.apps.cli import main

    if argv[0] == "rl":
        from jprm.train.callbacks import Watchdog

        at = Watchdog.at

        def entered(self, update, phase):
            print(f"at {phase}", file=sys.stderr, flush=True)
            happens(phase)
            at(self, update, phase)

        Watchdog.at = entered
    status = main(argv)
    end, lasts = time.monotonic(), collections.Counter()
    phases = [(name, when) for name, when in times if name != "change"]
    for (name, begun), (_, over) in itertools.pairwise([*phases, ("", end)]):
        lasts[name] = max(lasts[name], over - begun)
    lasts["change"] = end - next((when for name, when in times if name == "change"), end)
    print("measured", json.dumps({name: [count, lasts[name]] for name, count in counts.items()}), file=sys.stderr)
    return status


def serve() -> None:
    """Imports jprm once, and runs `doomed` in a fork for every line: a list of the file for what it says, and these."""
    import jprm.apps.cli
    import jprm.loading
    import jprm.methods.evaluate.suite
    import jprm.methods.label.jobs
    import jprm.methods.search.jobs
    import jprm.train  # noqa: F401

    for line in sys.stdin:
        said, *asked = json.loads(line)
        if not (pid := os.fork()):
            descriptor = os.open(said, os.O_WRONLY | os.O_TRUNC)
            os.dup2(descriptor, 2)
            os.dup2(descriptor, 1)
            status = 1
            try:
                status = doomed(*asked)
            except SystemExit as end:
                status = end.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    sys.exit(slowed(float(sys.argv[1]), sys.argv[2:]) if sys.argv[1:] else serve())

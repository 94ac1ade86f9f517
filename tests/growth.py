"""Checks that time is proportional to length: 32 times the input must take at most 300 times as long.

Proportional time gives 32, and up to 100 if the larger input leaves the processor's caches; quadratic time gives 1,024.
So the machine may be three times slower during one of the two measurements. Only CPU time is measured, not waiting.
"""

import gc
import time

LONGER, MOST = 32, 300
"""Factor between the two inputs' lengths, and the largest factor allowed between their times."""
FASTEST = 0.002
"""Minimum CPU seconds for the smaller input."""


def seconds(call, value):
    """Returns the CPU time of `call(value)`, also if it raises ValueError."""
    gc.disable()  # after thousands of tests a collection takes seconds
    begin = time.process_time()
    try:
        call(value)
    except ValueError:
        pass
    finally:
        taken = time.process_time() - begin
        gc.enable()
    return taken


def growth(call, make, n):
    """Returns time(32 n) / time(n), with n doubled until time(n) grows with n and is long enough to measure."""
    before = 0.0
    while True:
        value = make(n)
        now = seconds(call, value)
        if now > FASTEST and now > 1.4 * before or now > 10 * FASTEST or n >= 2**15:
            break
        before, n = now, 2 * n
    return seconds(call, make(LONGER * n)) / min(now, seconds(call, value))


def excess(call, make, least=64):
    """Returns the last growth if all of four are above MOST (as quadratic ones will be), else None."""
    for _ in range(4):
        if (ratio := growth(call, make, least)) <= MOST:
            return None
    return ratio


def check(call, make):
    assert (ratio := excess(call, make)) is None, f"{LONGER} times the input takes {ratio:.1f} times as long"


def check_at_once(call, value, limit=4.0):
    """Checks that the call takes less than `limit` seconds of CPU time, the least of three. Quadratic takes more."""
    assert any(seconds(call, value) < limit for _ in range(3)), f"takes {limit:g} seconds of CPU, three times"

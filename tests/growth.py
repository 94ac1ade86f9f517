"""Time in proportion to the length: of 32 times the input, a reader's time is at most 300 times as long.

Time in proportion gives 32, and up to 100 if the larger input leaves the processor's caches; its square gives 1,024. So
the machine may be three times slower during one of the two measurements. CPU time is measured, not waiting.
"""

import gc
import time

LONGER, MOST = 32, 300
"""How much longer the larger input is, and how much longer it may take."""
FASTEST = 0.002
"""Seconds of CPU of the smaller input at least."""


def seconds(call, value):
    """CPU time of `call(value)`. A refusal is an answer too."""
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
    """Returns time(32 n) / time(n), where n is doubled until the time grows with it and is long enough to measure."""
    before = 0.0
    while True:
        value = make(n)
        now = seconds(call, value)
        if now > FASTEST and now > 1.4 * before or now > 10 * FASTEST or n >= 2**15:
            break
        before, n = now, 2 * n
    return seconds(call, make(LONGER * n)) / min(now, seconds(call, value))


def excess(call, make, least=64):
    """The growth if it is above MOST in each of four measurements, else None: a square does so again."""
    for _ in range(4):
        if (ratio := growth(call, make, least)) <= MOST:
            return None
    return ratio


def check(call, make):
    assert (ratio := excess(call, make)) is None, f"{LONGER} times the input takes {ratio:.1f} times as long"

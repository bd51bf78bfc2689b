"""The signals that stop a run in good order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from batchgen.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def watched_signals() -> list[signal.Signals]:
    """Those that may stop a run now: under nohup, a terminal that closes does not."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def interruptible() -> Iterator[None]:
    """What signals mean before and after a run watches them itself: nothing is lost, exit code 75."""
    for number in watched_signals():
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise Interrupted("interrupted; the same command goes on where it ended") from interrupt

"""The signals that stop a run in good order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from batchgen.errors import ExitCode, Interrupted

ASK_AGAIN = "nothing was changed; run it again"
"""What follows where a command only looks, or writes a file whole or not at all."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def watched_signals() -> list[signal.Signals]:
    """Those that may stop a run now: under nohup, a terminal that closes does not."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def end_at_signals() -> None:
    """From now on a signal ends this process at once, with exit code 75: nothing is at work yet, or any more."""
    for number in watched_signals():
        signal.signal(number, _end)


@contextmanager
def interruptible(consequence: str = "the same command goes on where it ended") -> Iterator[None]:
    """What signals mean to a command, where a run does not watch them itself: nothing is lost, exit code 75."""
    previous = {number: signal.signal(number, signal.default_int_handler) for number in watched_signals()}
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise Interrupted(f"interrupted; {consequence}") from interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(ExitCode.INTERRUPTED)

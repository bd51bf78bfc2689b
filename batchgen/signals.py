"""The signals that stop a run in good order."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def watched_signals() -> list[signal.Signals]:
    """Those that may stop a run now: under nohup, a terminal that closes does not."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]

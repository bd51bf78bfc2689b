"""Reasons to stop in good order: signals, and run.max_runtime."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from batchgen.errors import ExitCode

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopWatch:
    """Notes the first signal and the end of the time allowed; a second signal ends the process at once.

    A context manager: handlers are installed in the main thread only, and put back at the end. Where the run does not
    come to its end within `grace_seconds` after the first reason, the process is ended: everything durable is
    consistent at every moment.
    """

    def __init__(
        self,
        max_runtime: float | None,
        grace_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._clock = clock
        self._end_process = end_process
        self._grace_seconds = grace_seconds
        self._deadline = None if max_runtime is None else clock() + max_runtime
        self._signal: str | None = None
        self._previous: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    @property
    def reason(self) -> str | None:
        """Why to stop now, in words; None to go on."""
        if self._signal is not None:
            return f"got {self._signal}"
        if self._deadline is not None and self._clock() >= self._deadline:
            self._start_timer()
            return "run.max_runtime is over"
        return None

    def __enter__(self) -> StopWatch:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            self._end_process(ExitCode.INTERRUPTED)
        self._signal = signal.Signals(number).name
        self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._grace_seconds, self._end_process, (ExitCode.INTERRUPTED,))
            self._timer.daemon = True
            self._timer.start()

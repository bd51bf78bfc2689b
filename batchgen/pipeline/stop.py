"""Reasons to stop in good order: signals, and run.max_runtime."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from batchgen.errors import ExitCode, Interrupted
from batchgen.signals import SIGNALS, watched_signals

_CLOSE = b"\0"
"""No signal has this number: the watch is over."""


class StopWatch:
    """Notes the first signal and the end of the time allowed; a second signal ends the process at once.

    A context manager: handlers are installed in the main thread only, and put back at the end. Where the run does not
    come to its end within `grace_seconds` after the first reason, the process is ended: everything durable is
    consistent at every moment. A thread sees to both, since Python calls no handler while the main thread is in C, be
    it a step of the engine or the loading of a model.
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
        self._previous_wakeup = -1
        self._pipe: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._watch, name="stop-watch", daemon=True)

    @property
    def reason(self) -> str | None:
        """Why to stop now, in words; None to go on."""
        if self._signal is not None:
            return f"got {self._signal}"
        if self._deadline is not None and self._clock() >= self._deadline:
            return "run.max_runtime is over"
        return None

    def check(self) -> None:
        """Raise Interrupted where there is a reason to stop."""
        if self.reason is not None:
            raise Interrupted(f"{self.reason}: stopped in good order; the same command goes on from here")

    def __enter__(self) -> StopWatch:
        self._pipe = os.pipe()
        if threading.current_thread() is threading.main_thread():
            os.set_blocking(self._pipe[1], False)
            self._previous_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._previous = {number: signal.signal(number, self._handle) for number in watched_signals()}
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous:
            signal.set_wakeup_fd(self._previous_wakeup)
        self._previous.clear()
        assert self._pipe is not None
        os.write(self._pipe[1], _CLOSE)
        self._thread.join()
        for fd in self._pipe:
            os.close(fd)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal = signal.Signals(number).name

    def _watch(self) -> None:
        """End the process at the second signal, or when the grace after the first reason is over."""
        assert self._pipe is not None
        end = None if self._deadline is None else self._deadline + self._grace_seconds
        is_stopping = False
        while end is None or self._clock() < end:
            left = None if end is None else max(0.0, end - self._clock())
            if not select.select([self._pipe[0]], [], [], left)[0]:
                continue
            for number in os.read(self._pipe[0], 64):
                if number == _CLOSE[0]:
                    return
                if number not in SIGNALS:
                    continue
                if is_stopping and number == signal.SIGHUP:
                    # A terminal that closes tells a run, and so does its shell: that is nobody's impatience.
                    continue
                if is_stopping:
                    self._end_process(ExitCode.INTERRUPTED)
                    return
                is_stopping = True
                soon = self._clock() + self._grace_seconds
                end = soon if end is None else min(end, soon)
        self._end_process(ExitCode.INTERRUPTED)

"""The first signal stops in good order, the second at once, and a limit of time does as a signal."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from batchgen.pipeline.stop import SIGNALS, StopWatch


class Ended(BaseException):
    """Stands for the end of the process."""


def end(code: int) -> None:
    raise Ended(code)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_the_second_ends_the_process(number: signal.Signals) -> None:
    with StopWatch(None, 60.0, end_process=end) as stop:
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == f"got {number.name}"
        with pytest.raises(Ended, match="75"):
            os.kill(os.getpid(), signal.SIGTERM)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopWatch(None, 60.0):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_time_allowed_ends() -> None:
    now = 0.0
    with StopWatch(10.0, 60.0, clock=lambda: now) as stop:
        now = 9.9
        assert stop.reason is None
        now = 10.0
        assert stop.reason == "run.max_runtime is over"


def test_the_process_ends_when_the_grace_is_over() -> None:
    ended = threading.Event()
    codes = []

    def note(code: int) -> None:
        codes.append(code)
        ended.set()

    with StopWatch(None, 0.01, end_process=note):
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(10)
    assert codes == [75]


def test_no_grace_runs_after_the_end() -> None:
    with StopWatch(None, 60.0, end_process=end):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert not any(isinstance(thread, threading.Timer) and thread.is_alive() for thread in threading.enumerate())


def test_outside_the_main_thread_signals_stay_as_they_are() -> None:
    found = []

    def watch() -> None:
        with StopWatch(None, 60.0) as stop:
            found.append((stop.reason, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert found == [(None, before)]

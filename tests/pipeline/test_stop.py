"""The first signal stops in good order, the second at once, and a limit of time does as a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from batchgen.errors import Interrupted
from batchgen.pipeline.stop import StopWatch
from batchgen.signals import SIGNALS


class Ending:
    """Stands for the end of the process."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self._came = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self._came.set()

    def wait(self) -> list[int]:
        """The exit codes so far, once there is one."""
        assert self._came.wait(10)
        return self.codes


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_the_second_ends_the_process(number: signal.Signals) -> None:
    end = Ending()
    with StopWatch(None, 60.0, end_process=end) as stop:
        stop.check()
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == f"got {number.name}"
        with pytest.raises(Interrupted, match=f"got {number.name}: stopped in good order"):
            stop.check()
        assert end.codes == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert end.wait() == [75]
        assert stop.reason == f"got {number.name}"


def test_a_terminal_that_closes_may_tell_twice() -> None:
    end = Ending()
    with StopWatch(None, 60.0, end_process=end) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.reason == "got SIGHUP"
    assert end.codes == []


def test_a_run_that_hangups_do_not_reach_goes_on() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with StopWatch(None, 60.0) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopWatch(None, 60.0):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_time_allowed_ends() -> None:
    now = 0.0
    with StopWatch(10.0, 60.0, clock=lambda: now) as stop:
        now = 9.9
        assert stop.reason is None
        now = 10.0
        assert stop.reason == "run.max_runtime is over"


def test_the_process_ends_when_the_grace_is_over() -> None:
    end = Ending()
    with StopWatch(None, 0.01, end_process=end):
        os.kill(os.getpid(), signal.SIGTERM)
        assert end.wait() == [75]


def test_the_process_ends_when_the_grace_after_the_time_allowed_is_over() -> None:
    end = Ending()
    with StopWatch(0.01, 0.01, end_process=end):
        assert end.wait() == [75]


@pytest.mark.parametrize(
    ("signals", "grace"), [([signal.SIGTERM], 0.3), ([signal.SIGTERM, signal.SIGUSR1], 60.0)], ids=["grace", "second"]
)
def test_a_main_thread_that_is_busy_in_c_delays_neither_the_grace_nor_the_second_signal(
    signals: list[signal.Signals], grace: float
) -> None:
    # The second lock of a mutex never comes back, whatever signals come: as a very long step of the engine.
    code = (
        "import ctypes; from batchgen.pipeline.stop import StopWatch\n"
        "libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        f"with StopWatch(None, {grace}):\n"
        "    libc.pthread_mutex_lock(mutex); print('ready', flush=True); libc.pthread_mutex_lock(mutex)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for number in signals:
            process.send_signal(number)
        assert process.wait(10) == 75


def test_no_thread_is_left_after_the_end() -> None:
    with StopWatch(None, 60.0, end_process=Ending()):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert not any(thread.name == "stop-watch" for thread in threading.enumerate())


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

"""What a run shows while it runs: a bar on a terminal, a line now and then elsewhere. All of it on stderr."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TextIO

from tqdm import tqdm

from batchgen.pipeline.progress import Progress, ProgressSnapshot

LINE_INTERVAL = 10.0
"""Seconds between two lines where there is no terminal."""

_BAR_FORMAT = "{n_fmt}/{total_fmt} rows |{bar}| {percentage:3.0f}% {elapsed}{postfix}"


def open_progress(stream: TextIO = sys.stderr) -> Progress:
    """The bar where `stream` is a terminal, lines where it is a file or a pipe."""
    return BarProgress(stream) if stream.isatty() and _num_columns(stream) > 0 else LineProgress(stream)


def _num_columns(stream: TextIO) -> int:
    # Terminals that were given no size say 0, and a bar would show nothing there.
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:
        return 0


class Rate:
    """Tokens a second since the first snapshot; loading the model does not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.start: tuple[float, ProgressSnapshot] | None = None

    def update(self, snapshot: ProgressSnapshot) -> None:
        """The first call sets the start."""
        if self.start is None:
            self.start = (self.clock(), snapshot)

    def tokens_per_second(self, snapshot: ProgressSnapshot) -> float | None:
        """Generated tokens a second; None before there is anything to measure."""
        seconds = self._seconds()
        if self.start is None or seconds <= 0:
            return None
        return (snapshot.completion_tokens - self.start[1].completion_tokens) / seconds

    def seconds_left(self, snapshot: ProgressSnapshot) -> float | None:
        """By tokens; None before anything can be said.

        Rows would mislead: many run side by side, and the short ones end first. So a row's expected length is all
        tokens drawn over the rows finished, as for lengths of which many are only known to be longer, but at most what
        a row may have; and of the rows in flight, what they have is taken off.
        """
        speed = self.tokens_per_second(snapshot)
        num_finished = snapshot.num_done - self.start[1].num_done if self.start else 0
        most = snapshot.most_row_tokens
        if not speed or (num_finished <= 0 and most is None):
            return None
        per_row = snapshot.completion_tokens / num_finished if num_finished > 0 else math.inf
        if most is not None:
            per_row = min(per_row, most)
        num_left = snapshot.num_rows - snapshot.num_done
        num_new = max(0, num_left - snapshot.num_in_flight)
        in_flight = snapshot.completion_tokens - snapshot.finished_tokens
        room = math.inf if most is None else max(0, most * snapshot.num_in_flight - in_flight)
        return (num_new * per_row + min(snapshot.num_in_flight * per_row, room)) / speed

    def _seconds(self) -> float:
        return self.clock() - self.start[0] if self.start else 0.0


def figures(snapshot: ProgressSnapshot, rate: Rate) -> str:
    """`512 tok/s, 64 running, 8 waiting, KV 43%, 2 errors, 1 min 20 s left`; what is zero or unknown is left out."""
    speed = rate.tokens_per_second(snapshot)
    parts = [f"{speed:.0f} tok/s"] if speed is not None else []
    parts.append(f"{snapshot.num_running} running")
    if snapshot.num_waiting:
        parts.append(f"{snapshot.num_waiting} waiting")
    if snapshot.kv_use:
        parts.append(f"KV {snapshot.kv_use:.0%}")
    if snapshot.num_errors:
        parts.append(f"{snapshot.num_errors} errors")
    seconds = rate.seconds_left(snapshot)
    if seconds is not None and snapshot.num_done < snapshot.num_rows:
        parts.append(f"{duration(max(1, round(seconds)))} left")
    return ", ".join(parts)


class BarProgress:
    """A tqdm bar: rows, generated tokens a second, ETA, and what the engine holds."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.rate = Rate()
        self.bar: tqdm[NoReturn] | None = None

    def phase(self, name: str) -> None:
        """Show it as a line, since there is nothing to count yet."""
        self.message(name)

    def update(self, snapshot: ProgressSnapshot) -> None:
        """The bar begins with the first call; rows of earlier runs are no part of its speed."""
        self.rate.update(snapshot)
        if self.bar is None:
            self.bar = tqdm(
                total=snapshot.num_rows,
                initial=snapshot.num_done,
                file=self.stream,
                bar_format=_BAR_FORMAT,
                dynamic_ncols=True,
                mininterval=0.1,
            )
        self.bar.set_postfix_str(figures(snapshot, self.rate), refresh=False)
        self.bar.n = snapshot.num_done
        self.bar.refresh()

    def message(self, text: str) -> None:
        """Above the bar."""
        tqdm.write(text, file=self.stream)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.close()


class LineProgress:
    """One line every LINE_INTERVAL seconds, and the last one at the end."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream
        self.clock = clock
        self.rate = Rate(clock)
        self.shown_at: float | None = None
        self.pending: ProgressSnapshot | None = None

    def phase(self, name: str) -> None:
        """One line."""
        self.message(name)

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Show it if the last line is old enough, and keep it for the end otherwise."""
        self.rate.update(snapshot)
        self.pending = snapshot
        if self.shown_at is None or self.clock() - self.shown_at >= LINE_INTERVAL:
            self._show()

    def message(self, text: str) -> None:
        """One line."""
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """Show the last snapshot, unless it has been shown."""
        self._show()

    def _show(self) -> None:
        if self.pending is None:
            return
        snapshot, self.pending = self.pending, None
        self.shown_at = self.clock()
        self.message(f"{snapshot.num_done}/{snapshot.num_rows} rows, {figures(snapshot, self.rate)}")


def duration(seconds: float) -> str:
    """`3.2 s`, `1 min 20 s`, `2 h 05 min`; a whole number stays one."""
    if seconds < 10:
        return f"{seconds} s" if isinstance(seconds, int) else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left:02} min" if hours else f"{minutes} min {rest:02} s"

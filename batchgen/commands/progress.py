"""What a run shows while it runs: a bar on a terminal, a line now and then elsewhere. All of it on stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal, NoReturn, TextIO

from tqdm import tqdm

from batchgen.pipeline.pace import Pace
from batchgen.pipeline.progress import Progress, ProgressSnapshot
from batchgen.units import duration, plural

LINE_INTERVAL = 10.0
"""Seconds between two lines where there is no terminal."""

_BAR_FORMAT = "{n_fmt}/{total_fmt} rows |{bar}| {percentage:3.0f}% {elapsed}{postfix}"


def open_progress(log: Literal["text", "json"] = "text", stream: TextIO | None = None) -> Progress:
    """The bar where the stream (stderr) is a terminal, lines where it is none; lines of JSON where they are wanted."""
    stream = stream or sys.stderr
    if log == "json":
        return JsonProgress(stream)
    return BarProgress(stream) if stream.isatty() and _num_columns(stream) > 0 else LineProgress(stream)


def _num_columns(stream: TextIO) -> int:
    # Terminals that were given no size say 0, and a bar would show nothing there.
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:
        return 0


def figures(snapshot: ProgressSnapshot, pace: Pace) -> str:
    """`512 tok/s, 900 prompt tok/s, 64 running, 8 waiting, KV 43%, prefix hits 20%, 2 errors, 80 s left`.

    What is zero or unknown is left out.
    """
    speed = pace.tokens_per_second(snapshot)
    parts = [f"{speed:.0f} tok/s"] if speed is not None else []
    if (prompts := pace.prompt_tokens_per_second(snapshot)) >= 1:
        parts.append(f"{prompts:.0f} prompt tok/s")
    if snapshot.workers:
        parts.append(f"{plural(len(snapshot.workers), 'worker')}{pace.worker_range(snapshot)}")
    parts.append(f"{snapshot.num_running} running")
    if snapshot.num_waiting:
        parts.append(f"{snapshot.num_waiting} waiting")
    if snapshot.kv_use:
        parts.append(f"KV {snapshot.kv_use:.0%}")
    if snapshot.cached_share >= 0.005:
        parts.append(f"prefix hits {snapshot.cached_share:.0%}")
    if snapshot.num_errors:
        parts.append(plural(snapshot.num_errors, "error"))
    seconds = pace.seconds_left(snapshot)
    if seconds is not None and snapshot.num_done < snapshot.num_rows:
        parts.append(f"{duration(max(1, round(seconds)))} left")
    return ", ".join(parts)


class BarProgress:
    """A tqdm bar: rows, generated tokens a second, ETA, and what the engine holds."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.pace = Pace()
        self.bar: tqdm[NoReturn] | None = None

    def phase(self, name: str) -> None:
        """Show it as a line, since there is nothing to count yet."""
        self.message(name)

    def update(self, snapshot: ProgressSnapshot) -> None:
        """The bar begins with the first call; rows of earlier runs are no part of its speed."""
        self.pace.update(snapshot)
        if self.bar is None:
            self.bar = tqdm(
                total=snapshot.num_rows,
                initial=snapshot.num_done,
                file=self.stream,
                bar_format=_BAR_FORMAT,
                dynamic_ncols=True,
                mininterval=0.1,
            )
        self.bar.set_postfix_str(figures(snapshot, self.pace), refresh=False)
        self.bar.n = snapshot.num_done
        self.bar.refresh()

    def message(self, text: str) -> None:
        """Above the bar."""
        tqdm.write(text, file=self.stream)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.close()


class _Paced:
    """Shows a snapshot every LINE_INTERVAL seconds, and the last one at the end."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream
        self.clock = clock
        self.pace = Pace(clock)
        self.shown_at: float | None = None
        self.pending: ProgressSnapshot | None = None

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Show it if the last line is old enough, and keep it for the end otherwise."""
        self.pace.update(snapshot)
        self.pending = snapshot
        if self.shown_at is None or self.clock() - self.shown_at >= LINE_INTERVAL:
            self._show_pending()

    def close(self) -> None:
        """Show the last snapshot, unless it has been shown."""
        self._show_pending()

    def _show_pending(self) -> None:
        if self.pending is None:
            return
        snapshot, self.pending = self.pending, None
        self.shown_at = self.clock()
        self.show(snapshot)

    def show(self, snapshot: ProgressSnapshot) -> None:
        """One line."""
        raise NotImplementedError


class LineProgress(_Paced):
    """One line every LINE_INTERVAL seconds, and the last one at the end."""

    def phase(self, name: str) -> None:
        """One line."""
        self.message(name)

    def message(self, text: str) -> None:
        """One line."""
        print(text, file=self.stream, flush=True)

    def show(self, snapshot: ProgressSnapshot) -> None:
        """Rows and figures."""
        self.message(f"{snapshot.num_done}/{snapshot.num_rows} rows, {figures(snapshot, self.pace)}")


class JsonProgress(_Paced):
    """A line of JSON for each phase and message, and for the progress every LINE_INTERVAL seconds and at the end."""

    def phase(self, name: str) -> None:
        """`{"event": "phase", "phase": "loading the model"}`."""
        self._print("phase", phase=name)

    def message(self, text: str) -> None:
        """`{"event": "message", "text": ...}`."""
        self._print("message", text=text)

    def show(self, snapshot: ProgressSnapshot) -> None:
        """`{"event": "progress", ...}`: the snapshot, rates and the time left."""
        rates = {
            "tokens_per_second": self.pace.tokens_per_second(snapshot),
            "prompt_tokens_per_second": self.pace.prompt_tokens_per_second(snapshot),
            "seconds_left": self.pace.seconds_left(snapshot),
        }
        rounded = {name: None if value is None else round(value, 1) for name, value in rates.items()}
        self._print("progress", **asdict(snapshot), **rounded)

    def _print(self, event: str, **values: Any) -> None:
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **values}
        print(json.dumps(line, ensure_ascii=False), file=self.stream, flush=True)

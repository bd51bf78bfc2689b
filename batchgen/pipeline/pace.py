"""How fast a run goes and when it will be done, from the snapshots that it shows."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from batchgen.pipeline.progress import ProgressSnapshot

WINDOW_SECONDS = 60.0
"""Rates are those of the last minute: what was before says little about what is left."""

ENOUGH_ROWS = 32
"""Finished rows among which the longest tells how long one may get."""


class Pace:
    """Rates over the last minute; loading the model does not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.first: ProgressSnapshot | None = None
        """Where this run began."""
        self._recent: deque[tuple[float, ProgressSnapshot]] = deque()

    def update(self, snapshot: ProgressSnapshot) -> None:
        """The first call sets the start."""
        now = self.clock()
        if self.first is None:
            self.first = snapshot
        self._recent.append((now, snapshot))
        while len(self._recent) > 2 and self._recent[1][0] <= now - WINDOW_SECONDS:
            self._recent.popleft()

    def tokens_per_second(self, snapshot: ProgressSnapshot) -> float | None:
        """Generated tokens a second; None before there is anything to measure."""
        return self._rate(lambda each: each.completion_tokens, snapshot)

    def prompt_tokens_per_second(self, snapshot: ProgressSnapshot) -> float:
        """Prompt tokens a second that went through the model; 0 before there is anything to measure."""
        return max(0.0, self._rate(lambda each: each.computed_tokens - each.completion_tokens, snapshot) or 0.0)

    def worker_range(self, snapshot: ProgressSnapshot) -> str:
        """` (48-52 tok/s each)`: the slowest and the fastest of the workers that were there a minute ago."""
        if not self._recent:
            return ""
        since, earlier = self._recent[0]
        seconds = self.clock() - since
        before = {each.name: each.completion_tokens for each in earlier.workers}
        gained = [each.completion_tokens - before[each.name] for each in snapshot.workers if each.name in before]
        if not gained or seconds <= 0:
            return ""
        return f" ({min(gained) / seconds:.0f}-{max(gained) / seconds:.0f} tok/s each)"

    def seconds_left(self, snapshot: ProgressSnapshot) -> float | None:
        """By tokens, and by the steps of the last rows; None before anything can be said.

        Rows would mislead: many run side by side, and the short ones end first. So a row's expected length is all
        tokens drawn over the rows finished, as for lengths of which many are only known to be longer, but at most what
        a row may have; and of the rows in flight, what they have is taken off. At the end the batch empties, and the
        time left is that of the longest sequence, however few tokens it draws.
        """
        speed = self.tokens_per_second(snapshot)
        num_finished = snapshot.num_done - self.first.num_done if self.first else 0
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
        drain = min(snapshot.num_in_flight * per_row, room) / speed
        if num_left > 0:
            drain = max(drain, self._tail_steps(snapshot, per_row, num_new) * self._step_seconds(snapshot))
        return num_new * per_row / speed + drain

    def _tail_steps(self, snapshot: ProgressSnapshot, per_row: float, num_new: int) -> float:
        """Steps from the admission of the last row to the end of the longest sequence that runs then.

        The longest one so far is likely to come again. Before enough have finished: of S sequences with lengths that
        fall off exponentially, the longest has ln S + 1 times the mean length.
        """
        width = snapshot.sequences_per_row
        longest = float(snapshot.longest_tokens)
        if snapshot.num_done - (self.first.num_done if self.first else 0) < ENOUGH_ROWS:
            longest = max(longest, per_row / width * (1 + math.log(max(1, snapshot.num_running))))
        if snapshot.most_row_tokens is not None:
            longest = min(longest, snapshot.most_row_tokens / width)
        if num_new or not snapshot.num_in_flight:
            return longest
        so_far = (snapshot.completion_tokens - snapshot.finished_tokens) / snapshot.num_in_flight
        return max(0.0, longest - so_far / width)

    def _step_seconds(self, snapshot: ProgressSnapshot) -> float:
        steps = self._rate(lambda each: each.num_steps, snapshot)
        return 1 / steps if steps else 0.0

    def _rate(self, count: Callable[[ProgressSnapshot], int], snapshot: ProgressSnapshot) -> float | None:
        if not self._recent:
            return None
        since, before = self._recent[0]
        seconds = self.clock() - since
        return (count(snapshot) - count(before)) / seconds if seconds > 0 else None

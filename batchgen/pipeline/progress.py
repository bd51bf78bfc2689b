"""What a run tells whoever watches it: a Protocol that the terminal, a log or a test implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class WorkerProgress(NamedTuple):
    """One of several workers."""

    name: str
    completion_tokens: int
    """Tokens that it has drawn in this run."""


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """Where a run stands. Counts are of the whole job where they say rows, of this run where they say tokens."""

    num_rows: int
    """Rows of the job."""
    num_done: int
    """Rows with an answer or an error, those of earlier runs included."""
    num_errors: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of this run, computed or served from shared prefixes."""
    completion_tokens: int = 0
    """Tokens drawn by this run, those of unfinished rows too."""
    finished_tokens: int = 0
    """Of them, tokens of finished rows."""
    longest_tokens: int = 0
    """Tokens of the longest finished sample so far."""
    most_row_tokens: int | None = None
    """Tokens that no row can have more of; None where only the context ends it."""
    sequences_per_row: int = 1
    """Samples or beams of a row."""
    num_in_flight: int = 0
    """Rows that the engine has taken and not finished."""
    num_running: int = 0
    """Sequences in the batch."""
    num_waiting: int = 0
    kv_use: float = 0.0
    """Share of the KV cache's blocks that are in use, 0 to 1."""
    kv_useful: float = 1.0
    """Mean share of the slots in blocks in use that held a token, 0 to 1; the rest is waste."""
    computed_tokens: int = 0
    """Tokens that went through the model, recomputed ones too."""
    cached_tokens: int = 0
    """Tokens that shared prefixes served instead."""
    num_preemptions: int = 0
    """Times that a sequence gave its blocks back, to be computed anew later."""
    num_copies: int = 0
    """Blocks copied on write."""
    num_steps: int = 0
    workers: tuple[WorkerProgress, ...] = ()
    """Where there are several, those that are at work."""

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens needed so far in this run that shared prefixes served, 0 to 1."""
        computed = max(0, self.computed_tokens - self.completion_tokens)
        return self.cached_tokens / (self.cached_tokens + computed) if self.cached_tokens else 0.0


class Progress(Protocol):
    """Called from the runner's thread, at most a few times a second; must return at once and never raise."""

    def phase(self, name: str) -> None:
        """Something slow begins: `reading inputs`, `loading the model`."""

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Rows and tokens have moved on."""

    def message(self, text: str) -> None:
        """One line for the user, shown without breaking the bar."""

    def close(self) -> None:
        """The run is over, however it ended."""


class Several:
    """Tells everything to each of several watchers."""

    def __init__(self, *watchers: Progress) -> None:
        self._watchers = watchers

    def phase(self, name: str) -> None:
        """Something slow begins."""
        for watcher in self._watchers:
            watcher.phase(name)

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Rows and tokens have moved on."""
        for watcher in self._watchers:
            watcher.update(snapshot)

    def message(self, text: str) -> None:
        """One line for the user."""
        for watcher in self._watchers:
            watcher.message(text)

    def close(self) -> None:
        """The run is over."""
        for watcher in self._watchers:
            watcher.close()

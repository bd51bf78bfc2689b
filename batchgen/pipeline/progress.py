"""What a run tells whoever watches it: a Protocol that the terminal, a log or a test implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
    most_row_tokens: int | None = None
    """Tokens that no row can have more of; None where only the context ends it."""
    num_in_flight: int = 0
    """Rows that the engine has taken and not finished."""
    num_running: int = 0
    """Sequences in the batch."""
    num_waiting: int = 0
    kv_use: float = 0.0
    """Share of the KV cache's blocks that are in use, 0 to 1."""


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

"""Log-probabilities of generated tokens, kept so that samples and beams that split share what they have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batchgen.records import TokenLogprob


@dataclass(frozen=True, slots=True)
class LogprobTrail:
    """The newest token's entries, and a pointer back to those before: appending and forking cost O(1)."""

    previous: LogprobTrail | None
    entries: list[TokenLogprob]


def trail_of(positions: Iterable[list[TokenLogprob]]) -> LogprobTrail | None:
    """The trail of some tokens, the first one first."""
    trail = None
    for entries in positions:
        trail = LogprobTrail(trail, entries)
    return trail


def trail_entries(trail: LogprobTrail | None) -> list[list[TokenLogprob]]:
    """The entries of each token, the first one first."""
    positions = []
    while trail is not None:
        positions.append(trail.entries)
        trail = trail.previous
    return positions[::-1]

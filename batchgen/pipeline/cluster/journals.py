"""Which segments of the journal know something of which rows; the rows themselves stay on the disk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from batchgen.data.journal import Journal
from batchgen.records import RowRange


class JournalIndex:
    """Keys of all segments of one scope: some bytes a row, not the row."""

    def __init__(self, journal: Journal) -> None:
        """Read the keys of every segment that belongs to this journal."""
        self.names: list[str] = []
        self._entries: list[tuple[int, int, int]] = []
        """(source, row, index of the segment), sorted."""
        for name in journal.segment_names():
            keys = journal.read_keys(name)
            if keys is not None:
                self._entries.extend((*key, len(self.names)) for key in keys)
                self.names.append(name)
        self._entries.sort()

    def segments_of(self, ranges: Iterable[RowRange]) -> list[str]:
        """Names of the segments that know a row of these ranges."""
        found: set[int] = set()
        for rows in ranges:
            first = bisect_left(self._entries, (rows.source, rows.start, -1))
            last = bisect_left(self._entries, (rows.source, rows.stop, -1))
            found.update(entry[2] for entry in self._entries[first:last])
        return [self.names[at] for at in sorted(found)]

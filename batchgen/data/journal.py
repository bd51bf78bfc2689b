"""The journal: rows that are finished but not committed, and the tokens so far of rows that are not finished.

One segment file after another, each written by one run only, so nothing is ever appended behind a torn tail. A line is
a CRC-32 in hex, a space, and JSON. Losing lines costs work, never a row: what is not in the journal is computed again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import Any

from batchgen.data.file_backend import WritableFile
from batchgen.data.files import OutputFiles
from batchgen.data.rows import FinishedRow, RowKey, row_from_json, row_to_json
from batchgen.errors import OutputUnavailable
from batchgen.records import PartialSample, TokenLogprob

SEGMENT_BYTES = 16 << 20

_SampleLine = list[Any]
"""[sample, tokens before, new token ids, cumulative log-probability, log-probabilities of the new tokens or null]"""


def encode_line(value: Any) -> bytes:
    """One line of the journal."""
    content = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(content), content)


def decode_lines(data: bytes) -> Iterator[Any]:
    """The intact lines; a torn tail and damaged lines are passed over."""
    for line in data.split(b"\n"):
        checksum, _, content = line.partition(b" ")
        if checksum == b"%08x" % zlib.crc32(content) and content:
            yield json.loads(content)


def line_key(line: Any) -> RowKey:
    """The row that a line is about."""
    source, row = (line["f"] if "f" in line else line["p"])[:2]
    return source, row


class JournalEntries:
    """What lines add up to."""

    def __init__(self) -> None:
        self.finished: dict[RowKey, FinishedRow] = {}
        self.partials: dict[RowKey, dict[int, PartialSample]] = {}

    def add(self, line: Any) -> RowKey:
        """Take one line in; returns the row that it is about."""
        if "f" in line:
            row = row_from_json(line["f"])
            self.finished[row.key] = row
            self.partials.pop(row.key, None)
            return row.key
        source, number, samples = line["p"]
        key = (source, number)
        if key not in self.finished:
            for sample in samples:
                self._extend(self.partials.setdefault(key, {}), sample)
        return key

    def merge(self, segment: JournalEntries) -> None:
        """Take in another segment; of a sample that both have begun, the longer is kept."""
        self.finished.update(segment.finished)
        for key, samples in segment.partials.items():
            mine = self.partials.setdefault(key, {})
            for index, sample in samples.items():
                if index not in mine or len(mine[index].token_ids) < len(sample.token_ids):
                    mine[index] = sample
        for key in self.finished.keys() & self.partials.keys():
            del self.partials[key]

    @staticmethod
    def _extend(samples: dict[int, PartialSample], line: _SampleLine) -> None:
        index, offset, token_ids, cumulative_logprob, logprobs = line
        known = samples.get(index)
        if offset == 0:
            known = samples[index] = PartialSample(index, [], logprobs=None if logprobs is None else [])
        # A line was lost before this one: what follows does not join, and the tokens up to there are enough.
        if known is None or len(known.token_ids) != offset:
            return
        known.token_ids += token_ids
        known.cumulative_logprob = cumulative_logprob
        if known.logprobs is not None and logprobs is not None:
            known.logprobs += [[TokenLogprob(*entry) for entry in position] for position in logprobs]


class Journal:
    """Reads what earlier runs noted, and notes for later ones; `sync` makes durable what was added."""

    def __init__(
        self,
        files: OutputFiles,
        directory: Path,
        attempt: str,
        header: dict[str, str],
        segment_bytes: int = SEGMENT_BYTES,
        *,
        read: bool = True,
    ) -> None:
        """`header` says what the rows belong to; segments with another one are left alone and not read.

        Without `read`, nothing is known of earlier runs but what `read_segments` is told to look at.
        """
        self._files = files
        self._directory = directory
        self._attempt = attempt
        self._header = header
        self._segment_bytes = segment_bytes
        self._open: WritableFile | None = None
        self._open_path: Path | None = None
        self._open_bytes = 0
        self._num_segments = 0
        self._failure: OutputUnavailable | None = None
        self._lines: list[bytes] = []
        self._noted: dict[RowKey, dict[int, int]] = {}
        """Tokens of each sample that are noted already."""
        self._keys: dict[Path, set[RowKey]] = {}
        """Rows of each segment that are not committed."""
        self.entries = JournalEntries()
        for name in files.list_directory(directory) if read else ():
            self._read(directory / name)

    def _read(self, path: Path) -> None:
        lines = self._lines_of(path)
        if lines is None:
            return
        segment = JournalEntries()
        self._keys[path] = {segment.add(line) for line in lines}
        self.entries.merge(segment)

    def _lines_of(self, path: Path) -> Iterator[Any] | None:
        """The lines behind the header; None where the segment is not of this journal."""
        try:
            lines = decode_lines(self._files.read(path))
        except FileNotFoundError:
            return None  # Read without the lock, and removed meanwhile: its rows are committed.
        return lines if next(lines, None) == {"h": self._header} else None

    def segment_names(self) -> list[str]:
        """All segments in the directory, of whatever job and scope."""
        return self._files.list_directory(self._directory)

    def read_keys(self, name: str) -> set[RowKey] | None:
        """The rows that a segment knows something of; None where it is not of this journal."""
        lines = self._lines_of(self._directory / name)
        return None if lines is None else {line_key(line) for line in lines}

    def read_segments(self, names: Iterable[str], wanted: Callable[[RowKey], bool]) -> JournalEntries:
        """What some segments, which others may be writing, know of the wanted rows; `entries` stay as they are."""
        entries = JournalEntries()
        for name in names:
            segment = JournalEntries()
            for line in self._lines_of(self._directory / name) or ():
                if wanted(line_key(line)):
                    segment.add(line)
            entries.merge(segment)
        return entries

    def segments_with(self, keys: Set[RowKey]) -> list[str]:
        """Names of the segments that this journal read or wrote and that hold one of these rows."""
        return [path.name for path, held in self._keys.items() if not held.isdisjoint(keys)]

    def add_finished(self, row: FinishedRow) -> None:
        """Note a finished row."""
        self._noted.pop(row.key, None)
        self._add(row.key, {"f": row_to_json(row)})

    def add_partial(self, key: RowKey, samples: Iterable[PartialSample]) -> None:
        """Note what the samples of an unfinished row have gained since the last call for it."""
        noted = self._noted.setdefault(key, {})
        lines: list[_SampleLine] = []
        for sample in samples:
            start = noted.get(sample.sample, 0)
            if len(sample.token_ids) > start:
                logprobs = None if sample.logprobs is None else sample.logprobs[start:]
                new_ids = sample.token_ids[start:]
                lines.append([sample.sample, start, new_ids, sample.cumulative_logprob, logprobs])
                noted[sample.sample] = len(sample.token_ids)
        if lines:
            self._add(key, {"p": [*key, lines]})

    def _add(self, key: RowKey, line: dict[str, Any]) -> None:
        self._lines.append(encode_line(line))
        if self._open_path is None:
            self._num_segments += 1
            self._open_path = self._directory / f"{self._attempt}-{self._num_segments:06d}.log"
        self._keys.setdefault(self._open_path, set()).add(key)

    def sync(self) -> None:
        """Write and sync what was added. After an error the segment is never written again."""
        if not self._lines or self._open_path is None:
            return
        if self._failure is not None:
            raise self._failure
        try:
            self._write(b"".join(self._lines))
        except OutputUnavailable as error:
            self._failure = error
            raise
        self._lines.clear()
        if self._open_bytes >= self._segment_bytes:
            self._end_segment()

    def _write(self, content: bytes) -> None:
        assert self._open_path is not None
        if self._open is None:
            content = encode_line({"h": self._header}) + content
            self._open = self._files.create(self._open_path)
            self._files.sync_directory(self._directory)
        self._open.write(content)
        self._open.sync()
        self._open_bytes += len(content)

    def _end_segment(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open, self._open_path, self._open_bytes = None, None, 0
        # The deltas of a segment must not need another segment: it may be removed first.
        self._noted.clear()

    def forget(self, keys: Iterable[RowKey]) -> None:
        """Rows are committed: remove the segments that hold no other rows."""
        gone = set(keys)
        for key in gone:
            self.entries.finished.pop(key, None)
            self.entries.partials.pop(key, None)
            self._noted.pop(key, None)
        for path, left in list(self._keys.items()):
            left -= gone
            if not left and path != self._open_path:
                self._files.unlink(path)
                del self._keys[path]

    def remove(self) -> None:
        """Nothing of this scope is of use any more."""
        self.close()
        for path in self._keys:
            self._files.unlink(path)
        self._keys.clear()

    def close(self) -> None:
        """Give the open segment back, without writing anything."""
        self._end_segment()
        self._lines.clear()

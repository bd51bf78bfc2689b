"""Figures of an output's runs over time: one small file a run, a line of JSON now and then, never synced.

`run` comes first and says what runs where, `point` stands for a moment, `end` for how it came out. What depends on luck
and neighbours is kept here, and so is in no row. Losing a line costs a dot in a chart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from batchgen.data.file_backend import WritableFile
from batchgen.data.files import OutputFiles
from batchgen.errors import OutputUnavailable

SUFFIX = ".jsonl"

LineKind = Literal["run", "point", "end"]


class MetricsLog:
    """Appends lines to the file of one run; a failure ends the log and never the run."""

    def __init__(self, files: OutputFiles, directory: Path, attempt: str) -> None:
        self._file: WritableFile | None = None
        with suppress(OutputUnavailable, FileExistsError):
            self._file = files.create(directory / f"{attempt}{SUFFIX}")

    def add(self, kind: LineKind, values: Mapping[str, Any]) -> None:
        """Append one line of JSON values."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({kind: values}, separators=(",", ":")).encode() + b"\n")
        except OutputUnavailable:
            self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OutputUnavailable):
                file.close()


@dataclass
class RunMetrics:
    """What one run noted of itself; a run that was killed has no `end`."""

    attempt: str
    run: dict[str, Any] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)


def read_metrics(files: OutputFiles, directory: Path) -> list[RunMetrics]:
    """The runs of an output, oldest first; lines that are torn or of another form are passed over."""
    names = [name for name in files.list_directory(directory) if name.endswith(SUFFIX)]
    return [_read_run(files, directory / name) for name in names]


def _read_run(files: OutputFiles, path: Path) -> RunMetrics:
    found = RunMetrics(path.name.removesuffix(SUFFIX))
    content = b""
    with suppress(FileNotFoundError):  # Removed by a run that begins anew.
        content = files.read(path)
    for line in content.split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        match entry:
            case {"run": dict(values)}:
                found.run = values
            case {"point": dict(values)}:
                found.points.append(values)
            case {"end": dict(values)}:
                found.end = values
    return found

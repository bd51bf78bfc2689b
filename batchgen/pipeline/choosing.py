"""`input.where` over a whole input, in a child process: an expression that does not come back ends with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from batchgen.config import InputConfig
from batchgen.data.input_rows import InputScan, ScannedFile
from batchgen.data.reader import PromptReader
from batchgen.data.selection import RowFilter
from batchgen.pipeline.machine_errors import machine_errors
from batchgen.records import RowRange

_ROWS_BETWEEN_SIGNS = 64


@dataclass(frozen=True)
class ChooserSpec:
    """What travels to the child."""

    scan: dict[str, Any]
    """`InputScan.to_json`, of all rows."""
    input: InputConfig


class RowChooser:
    """Tells which rows an expression is true for; runs in the child."""

    def __init__(self, spec: ChooserSpec) -> None:
        """InputError where the expression does not compile, or names a column that there is not."""
        scan = InputScan.from_json(spec.scan)
        assert spec.input.where is not None
        self._filter = RowFilter(spec.input.where, scan.source_schema.names)
        self._files = scan.files
        self._reader = PromptReader(scan, spec.input, self._filter.names)

    def answer(self, rows: RowRange, alive: Callable[[], None]) -> list[int]:
        """The rows of a range that are kept; `alive` is called each time a part of the work is done."""
        path = self._files[rows.source].path
        kept = []
        with machine_errors():
            for index, row in enumerate(self._reader.read(rows)):
                if index % _ROWS_BETWEEN_SIGNS == 0:
                    alive()
                if self._filter.keeps(row, path):
                    kept.append(row.row)
        return kept


def chunks(file: ScannedFile, size: int) -> Iterator[RowRange]:
    """A file in ranges of at most `size` physical rows."""
    for start in range(0, file.num_rows, size):
        yield RowRange(file.source, start, min(start + size, file.num_rows))

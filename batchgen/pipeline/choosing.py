"""`input.where` over a whole input, in a child process: an expression that does not come back ends with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from batchgen.config import InputConfig
from batchgen.data.input_rows import InputScan
from batchgen.data.reader import PromptReader
from batchgen.data.selection import RowFilter
from batchgen.errors import InputError
from batchgen.pipeline.child import BoundedChild, ChildDied, Limits, pieces, serve
from batchgen.pipeline.machine_errors import machine_errors, unfolding_named
from batchgen.records import RowRange

_ROWS_BETWEEN_SIGNS = 64
_CHOSEN_ROWS = 4096
"""Physical rows of one request to choose from."""


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
        with machine_errors(), unfolding_named():
            for index, row in enumerate(self._reader.read(rows)):
                if index % _ROWS_BETWEEN_SIGNS == 0:
                    alive()
                if self._filter.keeps(row, path):
                    kept.append(row.row)
        return kept


def main() -> None:
    """What the child runs."""
    serve(RowChooser)


def choose_rows_in_child(scan: InputScan, config: InputConfig, limits: Limits = Limits()) -> Iterator[list[int]]:  # noqa: B008
    """The rows of each file that `input.where` keeps; InputError where it is wrong, or does not come back."""
    try:
        with machine_errors():
            child = BoundedChild(ChooserSpec(scan.to_json(), config), limits, worker="batchgen.pipeline.choosing")
    except ChildDied as death:
        raise InputError("input.where: compiling it takes too long or too much memory; simplify it") from death
    with contextlib.closing(child):
        for file, whole in zip(scan.files, scan.ranges, strict=True):
            kept: list[int] = []
            for rows in pieces(whole, _CHOSEN_ROWS):
                try:
                    kept += child.ask(rows)
                except ChildDied as death:
                    what = f"more than {limits.step_seconds:g} s" if death.out_of_time else "too much memory"
                    raise InputError(
                        f"{file.path}: rows {rows.start} to {rows.stop - 1}: input.where takes {what}; simplify it"
                    ) from death
            yield kept

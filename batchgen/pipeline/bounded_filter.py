"""`--where` over the rows of an output, in a child process of bounded time and memory, as `input.where` is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from batchgen.errors import JobError
from batchgen.pipeline.child import BoundedChild, ChildDied, Limits, serve
from batchgen.pipeline.where import OutputFilter

_ROWS_BETWEEN_SIGNS = 64


class FilterSpec(NamedTuple):
    """What travels to the child."""

    source: str
    columns: list[str]
    """Those of the output."""


class BoundedFilter:
    """What OutputFilter is, with JobError where the expression does not come back."""

    def __init__(self, source: str, columns: list[str], limits: Limits = Limits()) -> None:  # noqa: B008 (immutable)
        """Raises JobError where it does not compile, or names a column that the output does not have."""
        self._limits = limits
        try:
            self._child = BoundedChild(FilterSpec(source, columns), limits, worker="batchgen.pipeline.bounded_filter")
            self.columns: list[str] = self._child.ask(None)
        except ChildDied as death:
            raise JobError("--where: compiling it takes too long or too much memory; simplify it") from death

    def choose(self, rows: Sequence[dict[str, Any]]) -> list[bool]:
        """Of each row whether the expression is true; JobError where it cannot be computed, or not within limits."""
        try:
            chosen: list[bool] = self._child.ask([{name: row[name] for name in self.columns} for row in rows])
        except ChildDied as death:
            what = f"more than {self._limits.step_seconds:g} s" if death.out_of_time else "too much memory"
            raise JobError(f"--where: takes {what}; simplify it") from death
        return chosen

    def close(self) -> None:
        """End the child."""
        self._child.close()


class FilterWorker:
    """Runs in the child."""

    def __init__(self, spec: FilterSpec) -> None:
        self._filter = OutputFilter(spec.source, spec.columns)

    def answer(self, rows: list[dict[str, Any]] | None, alive: Callable[[], None]) -> list[str] | list[bool]:
        """The columns that are read, or of each row whether it is chosen."""
        if rows is None:
            return self._filter.columns
        chosen: list[bool] = []
        for start in range(0, len(rows), _ROWS_BETWEEN_SIGNS):
            alive()
            chosen += self._filter.choose(rows[start : start + _ROWS_BETWEEN_SIGNS])
        return chosen


def main() -> None:
    """What the child runs."""
    serve(FilterWorker)

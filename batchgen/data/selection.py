"""Which rows of the input a job answers: those that an expression chooses, and a seeded sample of them."""

from __future__ import annotations

import dataclasses
import datetime
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import jinja2
from jinja2 import meta

from batchgen.config import InputConfig
from batchgen.data.input_rows import InputRow, InputScan, ScannedFile
from batchgen.data.names import near_names
from batchgen.data.sandbox import describe_error, row_environment
from batchgen.errors import InputError

Ranges = tuple[tuple[int, int], ...]


class RowFilter:
    """`input.where`: a Jinja expression over the columns of a row, in the sandbox."""

    def __init__(self, source: str, available: Sequence[str]) -> None:
        """Raises InputError where it does not compile, or names a column that is not `available`."""
        environment = row_environment(datetime.datetime.now())
        try:
            self._expression = environment.compile_expression(source, undefined_to_none=False)
            self.names = meta.find_undeclared_variables(environment.parse("{{ " + source + " }}"))
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f"input.where: {error.message}") from error
        for name in sorted(self.names.difference(available)) if available else ():
            raise InputError(f"input.where: no column {name!r} in the input{near_names(name, available)}")

    def keeps(self, row: InputRow, path: str) -> bool:
        """Whether the job answers the row; one that cannot be read is kept, so that its error is seen."""
        if row.error is not None:
            return True
        try:
            return bool(self._expression(row.values))
        except Exception as error:
            raise InputError(
                f"{path}: row {row.row}: input.where: {describe_error(error)}; a null value must be asked for "
                "(`x is not none and x > 3`)"
            ) from error


def selection_of(config: InputConfig) -> str | None:
    """What decides which rows are answered, as text to compare; None where all are."""
    if config.where is None and config.sample is None:
        return None
    return f"where={config.where!r} sample={config.sample!r} seed={config.sample_seed!r}"


def select(scan: InputScan, config: InputConfig, kept: Iterable[Iterable[int]]) -> InputScan:
    """The scan with every other row skipped; `kept` are the rows of each file that `input.where` keeps, in order."""
    rows: Iterable[Iterable[int]] = kept
    if config.sample is not None:
        rows = sampled([list(each) for each in kept], config.sample, config.sample_seed)
    files = tuple(
        dataclasses.replace(file, skipped=_all_but(each, file)) for file, each in zip(scan.files, rows, strict=True)
    )
    return dataclasses.replace(scan, files=files, selection=selection_of(config))


def sampled(rows: Sequence[Sequence[int]], size: int, seed: int) -> list[list[int]]:
    """`size` of all rows, each set of them as likely as any other (Knuth's algorithm S), in order.

    Only Random.random is used, whose numbers for a seed never change between releases of Python.
    """
    generator = random.Random(seed)
    left, wanted = sum(map(len, rows)), size
    chosen: list[list[int]] = []
    for each in rows:
        chosen.append([])
        for row in each:
            if generator.random() * left < wanted:
                chosen[-1].append(row)
                wanted -= 1
            left -= 1
    return chosen


def _all_but(rows: Iterable[int], file: ScannedFile) -> Ranges:
    return tuple(_gaps(chain(rows, (file.num_rows,))))


def _gaps(rows: Iterable[int]) -> Iterator[tuple[int, int]]:
    at = 0
    for row in rows:
        if row > at:
            yield at, row
        at = row + 1

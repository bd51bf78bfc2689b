"""A sandboxed expression over the rows of an output: `batchgen.status == 'error'`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2 import meta

from batchgen.data.names import near_names
from batchgen.data.sandbox import describe_error, row_environment
from batchgen.errors import JobError


class OutputFilter:
    """Chooses rows of the output by a Jinja expression over their columns."""

    def __init__(self, source: str, columns: list[str]) -> None:
        """Raises JobError where it does not compile or names a column that the output does not have."""
        environment = row_environment(datetime.datetime.now())
        try:
            self._expression = environment.compile_expression(source, undefined_to_none=False)
            self.columns = sorted(meta.find_undeclared_variables(environment.parse("{{ " + source + " }}")))
        except jinja2.TemplateSyntaxError as error:
            raise JobError(f"--where: {error.message}") from error
        for name in self.columns:
            if name not in columns:
                raise JobError(f"--where: no column {name!r} in the output{near_names(name, columns)}")

    def choose(self, rows: Sequence[dict[str, Any]]) -> list[bool]:
        """Of each row whether the expression is true; JobError where it cannot be computed."""
        return [self.chooses(row) for row in rows]

    def close(self) -> None:
        """Nothing is held."""

    def chooses(self, row: dict[str, Any]) -> bool:
        """Whether the expression is true of one row; JobError where it cannot be computed."""
        try:
            return bool(self._expression(row))
        except Exception as error:
            raise JobError(
                f"--where: {describe_error(error)}; a null value must be asked for (`x is not none and x > 3`)"
            ) from error

"""Which of a job's response formats a row has, by a template over its columns."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from typing import Any

from batchgen.data.input_rows import RowFailure
from batchgen.data.names import near_names
from batchgen.data.row_template import ROW, RowTemplate
from batchgen.data.sandbox import row_environment
from batchgen.errors import JobError

KEY = "sampling.response_format.by"


class RowFormat:
    """Names the response format of a row."""

    def __init__(self, template: str, names: Collection[str], now: datetime.datetime) -> None:
        """Compile; JobError where the template is wrong. `now` is what it sees as the time."""
        self._template = RowTemplate(row_environment(now), template, KEY)
        self._names = frozenset(names)

    def columns(self, available: Collection[str]) -> frozenset[str]:
        """The columns that the template reads; JobError for one that is not `available`, where anything is known."""
        names = self._template.names | self._template.function_names.intersection(available)
        if ROW in names and ROW not in available:
            return frozenset(available)
        for name in sorted(names.difference(available)) if available else ():
            raise JobError(f"{KEY}: no column {name!r} in the input{near_names(name, available)}")
        return frozenset(names)

    def name(self, values: Mapping[str, Any]) -> str:
        """The name for a row; RowFailure `unknown_format` where there is no format of that name."""
        name = self._template.render(values).strip()
        if name not in self._names:
            raise RowFailure("unknown_format", f"{KEY} gives {name[:100]!r}{near_names(name, sorted(self._names))}")
        return name

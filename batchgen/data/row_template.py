"""One template of the job over the columns of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import meta, nodes

from batchgen.data.input_rows import RowFailure
from batchgen.data.sandbox import NullPrinted, compile_template, render

ROW = "row"
"""In templates, the row as a mapping, for columns whose names are no identifiers: `{{ row["a b"] }}`."""


class RowTemplate:
    """A compiled template, and the names that it reads."""

    def __init__(self, environment: jinja2.Environment, source: str, key: str) -> None:
        """`key` names it in errors. Raises JobError where it does not compile."""
        self.key = key
        self._template = compile_template(environment, source, key)
        tree = environment.parse(source)
        self.names = frozenset(meta.find_undeclared_variables(tree))
        """What must be a column."""
        self.function_names = frozenset(name.name for name in tree.find_all(nodes.Name)) & environment.globals.keys()
        """What may be a column: where there is one named as a function of Jinja (`range`), it comes first."""

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for a row; RowFailure `template_error` where there is none."""
        try:
            return render(self._template, dict(values) if ROW in values else {**values, ROW: values})
        except RowFailure as failure:
            if not isinstance(failure.__cause__, NullPrinted):
                raise
            names = sorted(name for name in self.names if name in values and values[name] is None)
            which = f" ({', '.join(map(repr, names))} of this row is null)" if names else ""
            raise RowFailure(failure.error.code, failure.error.message + which) from failure

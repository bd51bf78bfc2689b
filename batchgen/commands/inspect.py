"""`batchgen inspect`: rows of an output to look at, as a table, as whole texts, or as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchgen.commands.summary import shorten
from batchgen.data.files import OutputFiles
from batchgen.data.rows import RowKey
from batchgen.errors import JobError
from batchgen.pipeline.convert import json_value
from batchgen.pipeline.output_rows import Row, chosen_rows, random_rows, rows, rows_of_keys, rows_with_values
from batchgen.pipeline.stored import StoredOutput, read_output
from batchgen.printable import printable

MAX_COLUMNS = 4
"""Source columns in a table."""
VALUE_WIDTH = 60
TEXT_WIDTH = 200
_KEY = re.compile(r"(?:(\d+):)?(\d+)")


class Choice(NamedTuple):
    """Which rows to look at."""

    num_rows: int
    ids: list[str]
    """`SOURCE:ROW` or `ROW`."""
    status: str | None
    where: str | None
    seed: int | None
    """Draw at random with it; None: the first ones."""


def inspect(output: Path, choice: Choice, *, as_json: bool) -> None:
    """Print rows on stdout; raises JobError where there is no output, for a wrong id and a wrong expression."""
    stored = read_output(OutputFiles(), output)
    found = choose(stored, choice)
    if as_json:
        for row in found:
            print(json.dumps(json_value(row), ensure_ascii=False))
    elif choice.ids:
        for row in found:
            for line in row_text(row, stored):
                print(line)
    else:
        # Rich colours where stdout is a terminal and NO_COLOR is not set.
        console = Console(highlight=False)
        console.print(table_of(list(found), stored))


def choose(stored: StoredOutput, choice: Choice) -> Iterator[Row]:
    """The rows, in order; of `ids` those that are committed."""
    if choice.ids:
        known = _by_id(stored, choice.ids)
        if not known:
            raise JobError(f"{stored.paths.root}: no committed row has the id {', '.join(choice.ids)}")
        return iter(known)
    conditions = [] if choice.where is None else [f"({choice.where})"]
    if choice.status is not None:
        conditions.append(f"{stored.layout.struct_name}.status == '{choice.status}'")
    if choice.seed is not None and not conditions:
        return iter(random_rows(stored, choice.num_rows, choice.seed))
    if conditions and choice.seed is not None:
        raise JobError("--random draws from all rows; leave out --status and --where, or --random")
    found = chosen_rows(stored, " and ".join(conditions)) if conditions else rows(stored)
    return islice(found, choice.num_rows)


def _by_id(stored: StoredOutput, ids: list[str]) -> list[Row]:
    column = stored.job.input.id_column
    if column is None or column not in stored.schema.names:
        return list(rows_of_keys(stored, [_key(text) for text in ids]))
    # The user's own ids; SOURCE:ROW still names a row where none of them looks like it.
    found = list(rows_with_values(stored, column, ids))
    return found or list(rows_of_keys(stored, [_key(text) for text in ids if _KEY.fullmatch(text)]))


def _key(text: str) -> RowKey:
    match = _KEY.fullmatch(text.strip())
    if match is None:
        raise JobError(f"--id {text}: must be SOURCE:ROW such as 0:17, or ROW; other columns are for --where")
    return int(match.group(1) or 0), int(match.group(2))


def table_of(found: list[Row], stored: StoredOutput) -> Table:
    """One line a row: where it came from, how it ended, source columns and texts, shortened."""
    names = stored.layout.readable(found[0] if found else stored.schema.names)
    table = Table(show_edge=False, pad_edge=False, expand=True)
    table.add_column("row", no_wrap=True, style="cyan")
    table.add_column("status", no_wrap=True)
    for name in names[:MAX_COLUMNS]:
        table.add_column(Text(printable(name)), overflow="fold", ratio=1)
    table.add_column(stored.layout.completion_name, overflow="fold", ratio=3)
    for row in found:
        record = row[stored.layout.struct_name]
        is_ok = record["status"] == "ok"
        status = Text("ok" if is_ok else str(record["error_code"]), style="green" if is_ok else "red")
        values = [Text(shorten(_plain(row[name]), VALUE_WIDTH)) for name in names[:MAX_COLUMNS]]
        texts = [shorten(text, TEXT_WIDTH) for text in stored.layout.texts(row)]
        if not is_ok:
            texts.append(shorten(record["error_message"], TEXT_WIDTH))
        table.add_row(_name(record), status, *values, Text("\n".join(texts)))
    if len(names) > MAX_COLUMNS:
        left_out = ", ".join(map(printable, names[MAX_COLUMNS:]))
        table.caption = f"more columns, in --json and --id: {left_out}"
        table.caption_justify = "left"
    return table


def row_text(row: Row, stored: StoredOutput) -> Iterator[str]:
    """A whole row, nothing shortened; control characters are escaped, lines stay lines."""
    record = row[stored.layout.struct_name]
    yield f"{_name(record)} {record['status']}"
    for name in stored.layout.readable(row):
        yield from _lines(f"  {printable(name)}: ", _plain(row[name]))
    for name, value in record.items():
        if value is not None and name not in ("source", "row", "sample", "status"):
            yield from _lines(f"  {stored.layout.struct_name}.{name}: ", _plain(value))
    for text in stored.layout.texts(row):
        yield from _lines("  > ", text)
    yield ""


def _lines(head: str, text: str) -> Iterator[str]:
    for index, line in enumerate(text.split("\n")):
        yield (head if index == 0 else "    ") + printable(line)


def _name(record: dict[str, Any]) -> str:
    sample = "" if record["sample"] is None else f" sample {record['sample']}"
    return f"{record['source']}:{record['row']}{sample}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(json_value(value), ensure_ascii=False)

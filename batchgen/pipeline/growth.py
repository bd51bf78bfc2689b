"""Inputs that grow from run to run: frozen files and rows stay as they are, later ones are appended behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from batchgen.config import InputConfig
from batchgen.data.arrow_types import is_json_text
from batchgen.data.input_growth import has_grown
from batchgen.data.input_rows import InputScan, ScannedFile
from batchgen.data.names import near_names


class ReconciledInputs(NamedTuple):
    """The inputs of a later run, with the frozen files at their places."""

    scan: InputScan
    num_new_rows: int
    problems: list[str]
    """One line for each input that is not what the output was begun with."""


def reconcile(known: InputScan, now: InputScan, config: InputConfig) -> ReconciledInputs:
    """Compare the inputs with those that are frozen in the plan; with `on_growth: append` take in what is new."""
    if [file.sha256 for file in known.files] == [file.sha256 for file in now.files]:
        return ReconciledInputs(now, 0, [])
    current = {file.path: file for file in now.files}
    kept, problems = [], []
    for file in known.files:
        found = current.pop(file.path, None)
        problem = "is gone" if found is None else _difference(file, found, config)
        if found is None or problem is not None:
            problems.append(f"input.files.{file.source} ({file.name}): {problem}")
        else:
            kept.append(dataclasses.replace(found, source=file.source))
    new = [dataclasses.replace(file, source=len(known.files) + at) for at, file in enumerate(current.values())]
    if new and config.on_growth != "append":
        problems += [f"input.files: {file.name} is new; set input.on_growth to append to answer it too" for file in new]
    problems += _schema_problems(known, now)
    if config.sample is not None and not problems:
        problems.append("input.sample: a sample of all rows cannot be appended to")
    if problems:
        return ReconciledInputs(now, 0, problems)
    # The columns of the output are declared: what new rows have besides is not carried.
    scan = dataclasses.replace(known, files=(*kept, *new))
    return ReconciledInputs(scan, scan.num_rows - known.num_rows, [])


def _difference(before: ScannedFile, now: ScannedFile, config: InputConfig) -> str | None:
    """Why a file is not the frozen one, or one that may be appended to; None if it is."""
    if now.sha256 == before.sha256:
        return None
    if now.format != before.format or not has_grown(before):
        return "its content changed"
    if config.on_growth != "append":
        return f"grew from {before.num_rows:,} to {now.num_rows:,} rows; set input.on_growth to append to answer them"
    return None


def _schema_problems(known: InputScan, now: InputScan) -> Iterator[str]:
    if known.num_rows == 0 and not known.source_schema.names and now.source_schema.names:
        yield "input: it had no rows, and so no columns, when the output was begun"
    for field in known.source_schema:
        at = now.source_schema.get_field_index(field.name)
        if at < 0:
            yield f"input: the column {field.name!r} is gone{near_names(field.name, now.source_schema.names)}"
        elif not now.source_schema.field(at).equals(field, check_metadata=True):
            found, was = (_type_name(each) for each in (now.source_schema.field(at), field))
            yield f"input: with the new rows the column {field.name!r} is {found}, but it was {was}"


def _type_name(field: pa.Field[Any]) -> str:
    return "JSON text, of values of several kinds" if is_json_text(field) else str(field.type)

"""Text that is not UTF-8, in a column that is only carried through: an error row, never a null that nobody sees."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config import InputConfig
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import scan_inputs
from batchgen.pipeline.feeder import preparer_spec
from batchgen.pipeline.preparer import Preparer
from batchgen.pipeline.runner import run_job
from batchgen.records import RowRange
from tests.pipeline import prompts
from tests.pipeline.fakes import FakeWorld, make_job

BAD = b"caf\xe9"


def text(values: list[bytes]) -> pa.Array[Any]:
    """A column of type string that holds these bytes, whatever they are."""
    return pa.array(values, pa.binary()).view(pa.string())


def write(path: Path) -> None:
    """Three rows; in the second one `note` and `notes` hold bytes that are no UTF-8, and so does `raw`, which may."""
    if path.suffix == ".jsonl":
        path.write_bytes(b'{"prompt": "a", "note": "x"}\n{"prompt": "b", "note": "%s"}\n{"prompt": "c"}\n' % BAD)
    elif path.suffix == ".csv":
        path.write_bytes(b"prompt,note\na,x\nb,%s\nc,\n" % BAD)
    else:
        notes = pa.ListArray.from_arrays([0, 1, 2, 3], text([b"x", BAD, b"y"]))
        raw = pa.array([b"x", BAD, b"y"], pa.binary())
        table = pa.table({"prompt": ["a", "b", "c"], "note": text([b"x", BAD, b"y"]), "notes": notes, "raw": raw})
        if path.suffix == ".parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)


@pytest.mark.parametrize("column", ["note", "notes"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "rows.arrow"])
def test_it_is_an_error_row_and_the_other_rows_are_answered(tmp_path: Path, name: str, column: str) -> None:
    if column == "notes" and name in ("rows.jsonl", "rows.csv"):
        column = "note"
    write(tmp_path / name)
    run_job(make_job(tmp_path, input={"path": name, "columns": [column]}), services=FakeWorld().services)
    table = pq.read_table(tmp_path / "out/data")
    rows = table["batchgen"].to_pylist()
    assert [(row["row"], row["status"], row["error_code"]) for row in rows] == [
        (0, "ok", None),
        (1, "error", "invalid_utf8"),
        (2, "ok", None),
    ]
    assert table[column].to_pylist()[1] is None
    assert table[column].to_pylist()[0] in ("x", ["x"])
    assert [each is None for each in table["completions"].to_pylist()] == [False, True, False]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_bytes_are_carried_as_they_are_and_a_column_that_nobody_asks_for_harms_no_row(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path / name)
    run_job(make_job(tmp_path, input={"path": name, "columns": ["raw"]}), services=FakeWorld().services)
    table = pq.read_table(tmp_path / "out/data")
    assert {row["status"] for row in table["batchgen"].to_pylist()} == {"ok"}
    assert table["raw"].to_pylist() == [b"x", BAD, b"y"]


def test_the_process_that_makes_prompts_looks_at_carried_columns_too(tmp_path: Path) -> None:
    write(tmp_path / "rows.parquet")
    job = prompts.make_job(input={"path": "rows.parquet", "columns": ["note"]}, prompt={"column": "prompt"})
    config: InputConfig = job.input
    scan = scan_inputs(list_inputs(config, tmp_path), config)
    spec = preparer_spec(job, scan, prompts.model_directory(tmp_path), 100, prompts.STARTED)
    with closing(Preparer(spec)) as preparer:
        rows = preparer.answer(RowRange(0, 0, 3), lambda: None)
    assert [row.error and row.error.code for row in rows] == [None, "invalid_utf8", None]

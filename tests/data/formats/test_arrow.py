"""Arrow IPC, file and stream: exact types, any range, damage that is named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from batchgen.config import InputConfig
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import PromptReader, scan_inputs
from batchgen.errors import InputError
from batchgen.records import RowRange
from tests.data.reading import read_all

TABLE = pa.table(
    {
        "n": pa.array(range(50), pa.int16()),
        "t": pa.array(["é"] * 50, pa.large_string()),
        "d": pa.array(["x"] * 50).dictionary_encode(),
        "v": pa.array(["w"] * 50, pa.string_view()),
        "s": pa.array([{"a": 1}] * 50),
    }
)


def write(
    path: Path, table: pa.Table, kind: Callable[..., pa.ipc.RecordBatchStreamWriter], batch_rows: int = 7
) -> None:
    with kind(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)


KINDS = [pytest.param(pa.ipc.new_file, id="file"), pytest.param(pa.ipc.new_stream, id="stream")]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_exact_types_come_back(tmp_path: Path, kind: Callable[..., pa.ipc.RecordBatchStreamWriter]) -> None:
    write(tmp_path / "in.arrow", TABLE, kind)
    reading = read_all(tmp_path, "in.arrow")
    assert reading.values == TABLE.to_pylist()
    assert reading.table.equals(TABLE)


@pytest.mark.parametrize("kind", KINDS)
def test_any_range_is_read(tmp_path: Path, kind: Callable[..., pa.ipc.RecordBatchStreamWriter]) -> None:
    write(tmp_path / "in.arrow", TABLE, kind)
    config = InputConfig(path="in.arrow")
    scan = scan_inputs(list_inputs(config, tmp_path), config)
    with closing(PromptReader(scan, config, columns={"n"})) as reader:
        for start, stop in [(0, 3), (40, 45), (6, 8), (49, 60), (13, 14)]:
            rows = [row.values["n"] for row in reader.read(RowRange(0, start, stop))]
            assert rows == list(range(start, min(stop, 50)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_file_is_refused_by_name(tmp_path: Path, kind: Callable[..., pa.ipc.RecordBatchStreamWriter]) -> None:
    write(tmp_path / "in.arrow", TABLE, kind)
    content = (tmp_path / "in.arrow").read_bytes()
    for length in (0, 5, len(content) // 2):
        (tmp_path / "in.arrow").write_bytes(content[:length])
        with pytest.raises(InputError, match=r"in\.arrow: is (empty|no Arrow IPC file or stream)"):
            read_all(tmp_path, "in.arrow")


def test_offsets_that_reach_beyond_the_data_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "in.arrow", pa.table({"t": ["ab", "cd"]}), pa.ipc.new_file)
    content = (tmp_path / "in.arrow").read_bytes()
    offsets = struct.pack("<3i", 0, 2, 4)
    assert content.count(offsets) == 1
    (tmp_path / "in.arrow").write_bytes(content.replace(offsets, struct.pack("<3i", 0, 10**6, 4)))
    with pytest.raises(InputError, match=r"in\.arrow: column 't' is damaged"):
        read_all(tmp_path, "in.arrow")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["p", "p"])
    write(tmp_path / "in.arrow", table, pa.ipc.new_file)
    with pytest.raises(InputError, match="more than one column named 'p'"):
        read_all(tmp_path, "in.arrow")


def test_columns_that_parquet_cannot_hold_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    table = pa.table({"p": ["a"], "gap": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
    write(tmp_path / "in.arrow", table, pa.ipc.new_file)
    reading = read_all(tmp_path, "in.arrow")
    assert reading.scan.left_out == ("gap",)
    assert reading.table.to_pydict() == {"p": ["a"]}
    with pytest.raises(InputError, match="Parquet cannot hold the type of 'gap'"):
        read_all(tmp_path, "in.arrow", columns=["gap"])

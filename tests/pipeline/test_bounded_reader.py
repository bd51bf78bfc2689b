"""Files of a few bytes that unfold to far more than there is memory: never the end of a process, nor of other rows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config import InputConfig
from batchgen.data.input_rows import InputScan
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import PromptReader, scan_inputs
from batchgen.errors import InputError
from batchgen.pipeline.bounded_reader import BoundedReader, DecodingInChildren, InputChild
from batchgen.pipeline.child import BoundedChild, ChildDied
from batchgen.pipeline.choosing import choose_rows_in_child
from batchgen.pipeline.feeder import Limits, PromptFeeder, preparer_spec
from batchgen.pipeline.runner import run_job
from batchgen.records import RowRange
from tests.data.reading import write_jsonl
from tests.pipeline import prompts
from tests.pipeline.fakes import FakeWorld, make_job

MIB = 2**20
MEMORY = 256 * MIB


def repeated(num_rows: int, value: str) -> pa.Array[Any]:
    """One value for every row, held once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array([value]))


def write_parquet(path: Path, columns: dict[str, Any]) -> None:
    """Columns of dictionaries are written as such, and come back as plain text."""
    pq.write_table(pa.table(columns), path, store_schema=False, dictionary_pagesize_limit=2**30)


def planned(base: Path, path: str, **config: Any) -> tuple[InputScan, InputConfig]:
    given = InputConfig.model_validate({"path": path, **config})
    return scan_inputs(list_inputs(given, base), given), given


@pytest.fixture
def unfolding(tmp_path: Path) -> Path:
    """A file of 100 kB that is 10 GB, decoded: each row has the same text of 1 MiB."""
    write_parquet(tmp_path / "in.parquet", {"n": list(range(10_000)), "prompt": repeated(10_000, "x" * MIB)})
    assert (tmp_path / "in.parquet").stat().st_size < 200_000
    return tmp_path


def test_rows_of_a_file_that_unfolds_beyond_memory_are_read_one_by_one(unfolding: Path) -> None:
    scan, config = planned(unfolding, "in.parquet", columns=["prompt"])
    with closing(BoundedReader(scan, config, memory_bytes=MEMORY)) as reader:
        rows = list(reader.read(RowRange(0, 1100, 1110)))
        assert [(row.row, row.values["n"], len(row.values["prompt"])) for row in rows] == [
            (number, number, MIB) for number in range(1100, 1110)
        ]
        tables = reader.read_columns(RowRange(0, 0, 90))
        lengths = [len(text) for table in tables for text in table["prompt"].to_pylist()]
    assert lengths == [MIB] * 90


def test_rows_larger_than_the_limit_are_errors_though_a_batch_of_them_fits_no_memory(unfolding: Path) -> None:
    scan, config = planned(unfolding, "in.parquet", max_row_bytes=10_000)
    with closing(BoundedReader(scan, config, ["prompt"], memory_bytes=MEMORY)) as reader:
        rows = list(reader.read(RowRange(0, 0, 20)))
    assert [row.error.code for row in rows if row.error] == ["row_too_long"] * 20


def test_a_row_that_no_memory_holds_is_an_error_with_file_and_row(tmp_path: Path) -> None:
    huge = pa.ListArray.from_arrays([0, 1, 16_000_001, 16_000_002], pa.array([7], pa.int64()).take([0] * 16_000_002))
    write_parquet(tmp_path / "in.parquet", {"prompt": ["a", "b", "c"], "ids": huge})
    assert (tmp_path / "in.parquet").stat().st_size < 100_000
    scan, config = planned(tmp_path, "in.parquet")
    with closing(BoundedReader(scan, config, memory_bytes=MEMORY // 2)) as reader:
        with pytest.raises(InputError, match=r"in\.parquet: row 1: takes more memory than a process that reads"):
            list(reader.read(RowRange(0, 0, 3)))
        with pytest.raises(InputError, match=r"in\.parquet: row 1: takes more memory than a process that reads"):
            list(reader.read_columns(RowRange(0, 0, 3)))
    # A job that does not read the column never sees it.
    scan, config = planned(tmp_path, "in.parquet", columns=["prompt"])
    with closing(BoundedReader(scan, config, ["prompt"], memory_bytes=MEMORY // 2)) as reader:
        assert [row.values["prompt"] for row in reader.read(RowRange(0, 0, 3))] == ["a", "b", "c"]


@pytest.mark.parametrize("is_stream", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_record_batch_of_zeros_that_no_memory_holds_is_an_error_with_its_file(
    tmp_path: Path, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = pa.table({"prompt": pa.nulls(3).cast(pa.string()), "z": pa.array([bytes(100 * MIB)] * 3)})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new(tmp_path / "in.arrow", zeros.schema, options=options) as writer:
        writer.write_table(zeros)
    assert (tmp_path / "in.arrow").stat().st_size < 100_000
    monkeypatch.setattr("batchgen.pipeline.bounded_reader.MEMORY_BYTES", MEMORY)
    monkeypatch.setattr(InputChild.__init__, "__defaults__", (MEMORY,))
    config = InputConfig(path="in.arrow")
    with pytest.raises(InputError, match=r"in\.arrow: record batch 0: takes more memory"):
        scan_inputs(list_inputs(config, tmp_path), config, decoding=DecodingInChildren())


def test_a_dictionary_of_arrow_that_repeats_a_long_text_is_read_in_pieces(tmp_path: Path) -> None:
    table = pa.table({"prompt": repeated(2000, "x" * MIB)})
    with pa.ipc.new_file(tmp_path / "1.arrow", table.schema) as writer:
        writer.write_table(table)
    # Beside a file of plain text the column is text in both.
    write_jsonl(tmp_path / "2.jsonl", [{"prompt": "plain"}])
    scan, config = planned(tmp_path, ["1.arrow", "2.jsonl"])
    with closing(BoundedReader(scan, config, memory_bytes=2 * MEMORY)) as reader:
        assert sum(len(row.values["prompt"]) for row in reader.read(RowRange(0, 0, 20))) == 20 * MIB
        texts = (text for table in reader.read_columns(RowRange(0, 0, 100)) for text in table["prompt"].to_pylist())
        assert sum(map(len, texts)) == 100 * MIB


def test_prompts_are_made_of_a_file_that_unfolds_beyond_memory(unfolding: Path) -> None:
    scan, config = planned(unfolding, "in.parquet", columns=["n"], max_row_bytes=10_000)
    job = prompts.make_job(input=config.model_dump(by_alias=True), prompt={"template": "{{ n }}{{ prompt }}"})
    spec = preparer_spec(job, scan, prompts.model_directory(unfolding), 100, prompts.STARTED)
    with closing(PromptFeeder(spec, [RowRange(0, 0, 5)], limits=Limits(memory_bytes=MEMORY))) as feeder:
        assert list(codes(feeder)) == ["row_too_long"] * 5


def codes(feeder: PromptFeeder) -> Iterator[str | None]:
    while not feeder.is_over:
        if (row := feeder.get(0.1)) is not None:
            yield row.error and row.error.code


def test_rows_are_chosen_from_a_file_that_unfolds_beyond_memory(unfolding: Path) -> None:
    scan, config = planned(unfolding, "in.parquet")
    config = config.model_copy(update={"where": "n == 70 and prompt | length == 1048576", "limit": None})
    scan = InputScan.from_json({**scan.to_json(), "files": [{**scan.files[0].to_json(), "num_rows": 100}]})
    assert list(choose_rows_in_child(scan, config, Limits(memory_bytes=MEMORY))) == [[70]]


def test_a_job_carries_columns_that_were_decoded_in_a_child_with_their_exact_types(tmp_path: Path) -> None:
    job = make_job(tmp_path, input={"path": "in.parquet"})
    table = pa.table(
        {
            "prompt": [f"prompt {row}" for row in range(10)],
            "words": pa.array(["a", "b"] * 5).dictionary_encode(),
            "map": pa.array([[("k", 1)]] * 10, pa.map_(pa.string(), pa.int8())),
            "list": pa.array([[{"x": 1}], None] * 5),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    run_job(job, services=FakeWorld().services)
    out = pq.read_table(tmp_path / "out/data")
    assert out.select(table.column_names).cast(table.schema).equals(table)
    assert out.schema.field("map").type == table.schema.field("map").type


@pytest.mark.case(52)
def test_a_child_that_is_killed_is_started_anew_and_no_row_comes_twice(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": list(range(5000))}), tmp_path / "in.parquet")
    scan, config = planned(tmp_path, "in.parquet")
    with closing(BoundedReader(scan, config)) as reader:
        tables = reader.read_columns(RowRange(0, 0, 5000))
        first = next(tables)
        kill(reader)
        numbers = [*first["n"].to_pylist(), *(n for table in tables for n in table["n"].to_pylist())]
        assert numbers == list(range(5000))
        kill(reader)
        assert [row.values["n"] for row in reader.read(RowRange(0, 7, 9))] == [7, 8]


def kill(reader: BoundedReader) -> None:
    """End the child as the machine would when it is out of memory."""
    child = reader._child._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)


def test_a_child_that_dies_at_each_try_is_an_error_with_file_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "in.parquet")
    scan, config = planned(tmp_path, "in.parquet")

    def die(child: BoundedChild, request: Any) -> None:
        raise ChildDied(-signal.SIGKILL)

    monkeypatch.setattr(InputChild, "ask_once", die)
    with closing(BoundedReader(scan, config)) as reader:
        for read in (reader.read, reader.read_columns):
            with pytest.raises(InputError, match=r"in\.parquet: rows 0 to 0: reading them ended its process"):
                list(read(RowRange(0, 0, 1)))


def test_the_bounded_reader_reads_what_the_plain_one_does(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1.jsonl", [{"n": 1, "t": "a"}, {"n": 2, "t": "b"}])
    pq.write_table(pa.table({"n": list(range(200)), "t": ["x"] * 200}), tmp_path / "2.parquet")
    scan, config = planned(tmp_path, ["1.jsonl", "2.parquet"], where="n % 7 == 1")
    with closing(BoundedReader(scan, config, ["n"])) as bounded, closing(PromptReader(scan, config, ["n"])) as plain:
        for rows in scan.ranges:
            assert list(bounded.read(rows)) == list(plain.read(rows))
            ours, theirs = (pa.concat_tables(each.read_columns(rows)) for each in (bounded, plain))
            assert ours.equals(theirs)

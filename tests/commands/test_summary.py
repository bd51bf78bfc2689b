from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.commands.summary import effective_sampling, relative, row_lines, shorten, summary_lines
from batchgen.config import OutputConfig
from batchgen.pipeline.report import JobReport
from batchgen.sampling_params import BeamParams, SamplingParams


def report(directory: Path, **changes: Any) -> JobReport:
    values: dict[str, Any] = {
        "data_dir": directory / "out/data",
        "data_files": (directory / "out/data/part-00000.parquet",),
        "num_rows": 3,
        "num_ok": 2,
        "num_errors": 1,
        "errors_by_code": {"prompt_too_long": 1},
        "num_rows_this_run": 3,
        "prompt_tokens": 1234,
        "cached_tokens": 1000,
        "completion_tokens": 500,
        "seconds": 2.5,
        "kv_cache_bytes": 256 << 20,
        "kv_peak": 0.431,
        "sampling": SamplingParams(n=2, temperature=0.7, max_tokens=96, seed=1),
    }
    return JobReport(**(values | changes))


def test_summary_has_rows_tokens_speed_memory_sampling_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(summary_lines(report(tmp_path))) == [
        "done: 3 rows: 2 ok, 1 error (1 prompt_too_long)",
        "  tokens     1,234 in (1,000 of them served from shared prefixes), 500 out",
        "  speed      200 tok/s, 2.5 s",
        "  KV cache   256 MiB, 43% in use at the peak",
        "  sampling   n 2, temperature 0.7, top_p 1, max_tokens 96, seed 1",
        "  files      out/data: 1 Parquet file",
    ]


def test_summary_says_why_a_run_was_slow(tmp_path: Path) -> None:
    assert "  note       slow: build it again" in summary_lines(report(tmp_path, notes=("slow: build it again",)))


def test_summary_of_a_finished_job_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finished = report(tmp_path, num_rows_this_run=0)
    assert list(summary_lines(finished)) == ["nothing to do: 3 rows: 2 ok, 1 error, all in out/data"]


def test_summary_of_a_resumed_job_tells_this_run_from_earlier_ones(tmp_path: Path) -> None:
    lines = list(summary_lines(report(tmp_path, num_rows_this_run=1)))
    assert "  this run   1 row, the others were committed before" in lines


def test_effective_sampling_shows_what_draws_tokens() -> None:
    assert effective_sampling(SamplingParams(temperature=0, seed=3)) == "n 1, temperature 0, max_tokens unlimited"
    drawn = SamplingParams(top_k=5, stop=("END",), max_tokens=8, seed=3)
    assert effective_sampling(drawn) == "n 1, temperature 1, top_k 5, top_p 1, max_tokens 8, stop ['END'], seed 3"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


OK = {"status": "ok", "error_code": None, "error_message": None}
ERROR = {"status": "error", "error_code": "prompt_too_long", "error_message": "600 tokens, 512 fit"}


def test_listed_rows_show_source_values_completions_and_errors(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "topic": "tides", "completions": ["one\ntwo", "three"], "batchgen": OK},
        {"id": "b", "topic": "ice", "completions": None, "batchgen": ERROR},
    ]
    write_rows(tmp_path / "out/data/part-00000.parquet", rows)
    assert list(row_lines(report(tmp_path), OutputConfig(path="out"))) == [
        *("", "id: a | topic: tides", "  > one two", "  > three"),
        *("", "id: b | topic: ice", "  error prompt_too_long: 600 tokens, 512 fit"),
    ]


def test_exploded_rows_and_a_prefix_are_understood(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "out/data/part-00000.parquet",
        [{"completion": "an older one", "x_completion": "text", "x_batchgen": OK}],
    )
    shown = list(row_lines(report(tmp_path), OutputConfig(path="out", samples="explode", prefix="x_")))
    assert shown == ["", "completion: an older one", "  > text"]


def test_a_source_column_with_the_name_of_the_other_layout_is_a_source_column(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "out/data/part-00000.parquet",
        [{"completions": ["an older one"], "completion": "text", "batchgen": OK}],
    )
    shown = list(row_lines(report(tmp_path), OutputConfig(path="out", samples="explode")))
    assert shown == ["", "completions: ['an older one']", "  > text"]


def test_an_output_without_files_shows_no_rows(tmp_path: Path) -> None:
    assert list(row_lines(report(tmp_path, data_files=()), OutputConfig(path="out"))) == []


def test_row_text_cannot_command_the_terminal() -> None:
    assert shorten("a\x1b[31mred\x07\u202eb", 40) == "a [31mred b"
    assert shorten("x" * 50, 10) == "xxxxxxxxx…"


def test_paths_outside_the_working_directory_stay_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    assert relative(tmp_path / "b") == str(tmp_path / "b")
    assert relative(tmp_path / "a/../a/out") == "out"


def test_the_summary_says_which_ids_of_the_model_end_a_sample(tmp_path: Path) -> None:
    endings = report(tmp_path, eos_token_ids=(2, 7))
    assert any(line.endswith("seed 1; ends at token 2, 7") for line in summary_lines(endings))
    ignored = report(tmp_path, eos_token_ids=(2,), sampling=SamplingParams(ignore_eos=True))
    assert not any("ends at" in line for line in summary_lines(ignored))


def test_the_sampling_of_a_beam_search_shows_its_beams_and_nothing_that_it_does_not_use() -> None:
    params = SamplingParams(beam=BeamParams(width=4, early_stopping="never"), max_tokens=8, seed=1)
    assert effective_sampling(params) == "width 4, length_penalty 1, early_stopping never, max_tokens 8"

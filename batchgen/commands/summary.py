"""The end of a run in words: what came out, how fast, where it lies, and a few rows to look at."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchgen.config import OutputConfig
from batchgen.data.schema import OutputLayout
from batchgen.pipeline.report import JobReport
from batchgen.sampling_params import SamplingParams
from batchgen.units import duration, plural

NUM_ROWS_SHOWN = 3
TEXT_WIDTH = 280
"""Characters shown of one completion."""
VALUE_WIDTH = 60
"""Characters shown of one source value."""


def summary_lines(report: JobReport) -> Iterator[str]:
    """The figures of a run; one line, `nothing to do`, where all rows were committed before."""
    counts = f"{plural(report.num_rows, 'row')}: {report.num_ok} ok, {report.num_errors} error"
    if report.num_rows_this_run == 0:
        yield f"nothing to do: {counts}, all in {relative(report.data_dir)}"
        return
    yield f"done: {counts}{_codes(report.errors_by_code)}"
    if report.num_rows_this_run < report.num_rows:
        yield f"  this run   {plural(report.num_rows_this_run, 'row')}, the others were committed before"
    yield (
        f"  tokens     {report.prompt_tokens:,} in ({report.cached_tokens:,} of them served from shared prefixes), "
        f"{report.completion_tokens:,} out"
    )
    yield f"  speed      {report.completion_tokens_per_second:,.0f} tok/s, {duration(report.seconds)}"
    yield f"  KV cache   {report.kv_cache_bytes / 2**20:,.0f} MiB, {report.kv_peak:.0%} in use at the peak"
    yield f"  sampling   {effective_sampling(report.sampling)}{_endings(report)}"
    if report.unused_generation_config:
        yield f"  not used   {report.unused_generation_config} (of the model's generation_config.json)"
    for note in report.notes:
        yield f"  note       {note}"
    yield f"  files      {relative(report.data_dir)}: {plural(len(report.data_files), 'Parquet file')}"


def effective_sampling(sampling: SamplingParams) -> str:
    """`n 2, temperature 0.7, seed 1`: what draws tokens, and whatever else is not at its default."""
    always = {"n", "temperature", "top_p", "max_tokens", "seed"}
    values = sampling.model_dump()
    shown = {
        name: value
        for name, value in values.items()
        if name in always or value != SamplingParams.model_fields[name].default
    }
    if sampling.beam is not None:
        beam = {name: value for name, value in sampling.beam.model_dump().items() if value is not None}
        unused = {"n", "temperature", "top_p", "seed", "beam"}
        shown = {**beam, **{name: value for name, value in shown.items() if name not in unused}}
    elif sampling.is_greedy:
        shown = {name: value for name, value in shown.items() if name not in {"top_p", "top_k", "seed"}}
    return ", ".join(f"{name} {'unlimited' if value is None else _plain(value)}" for name, value in shown.items())


def _endings(report: JobReport) -> str:
    # The one thing that a model's files decide about sampling, so it is said.
    if report.sampling.ignore_eos or not report.eos_token_ids:
        return ""
    return f"; ends at token {', '.join(map(str, report.eos_token_ids))}"


def row_lines(report: JobReport, output: OutputConfig) -> Iterator[str]:
    """The first rows of the first file, source values and completions shortened to what a terminal holds."""
    if not report.data_files:
        return
    with pq.ParquetFile(report.data_files[0]) as file:
        batch = next(file.iter_batches(batch_size=NUM_ROWS_SHOWN), None)
        layout = OutputLayout(file.schema_arrow, output.samples, prefix=output.prefix or "")
    for row in batch.to_pylist() if batch is not None else ():
        yield ""
        yield from _row(row, layout)


def _row(row: Mapping[str, Any], layout: OutputLayout) -> Iterator[str]:
    yield " | ".join(f"{name}: {shorten(row[name], VALUE_WIDTH)}" for name in layout.readable(row))
    record = row[layout.struct_name]
    if record["status"] == "error":
        yield f"  error {record['error_code']}: {shorten(record['error_message'], TEXT_WIDTH)}"
    for text in layout.texts(row):
        yield f"  > {shorten(text, TEXT_WIDTH)}"


def shorten(value: object, width: int) -> str:
    """One line of at most `width` characters, without anything that a terminal would obey."""
    text = " ".join("".join(char if char.isprintable() else " " for char in str(value)).split())
    return text if len(text) <= width else text[: width - 1] + "…"


def relative(path: Path) -> str:
    """Relative to the working directory where the path lies below it, else absolute."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def _codes(errors_by_code: Mapping[str, int]) -> str:
    codes = ", ".join(f"{count} {code}" for code, count in sorted(errors_by_code.items()))
    return f" ({codes})" if codes else ""


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(list(value)) if isinstance(value, tuple) else str(value)

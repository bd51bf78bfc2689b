"""The report of an output: one HTML page that needs no network, made from the files of the output alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files as package_files
from typing import Any, NamedTuple

import jinja2

from batchgen import __version__
from batchgen.data.metrics_log import RunMetrics
from batchgen.pipeline.output_rows import Row, random_rows
from batchgen.pipeline.status import Status
from batchgen.pipeline.stored import StoredOutput
from batchgen.report.charts import bars, histogram, lines
from batchgen.report.figures import Figures, last_point, read_figures, seconds_of
from batchgen.report.series import series_of
from batchgen.report.tally import ErrorExample, Lengths
from batchgen.units import duration

NUM_SAMPLE_ROWS = 12
MAX_TEXT = 4000
"""Characters shown of one text."""
MAX_BINS = 40


class Fact(NamedTuple):
    """One figure at the top."""

    name: str
    value: str


class Chart(NamedTuple):
    """One picture."""

    title: str
    svg: str
    caption: str


class ErrorKind(NamedTuple):
    """An error code and some of its rows."""

    code: str
    num_rows: int
    examples: Sequence[ErrorExample]


class RunLine(NamedTuple):
    """One run in words."""

    began: str
    host: str
    time: str
    rows: str
    tokens: str
    speed: str
    preemptions: str
    ended: str


class SampleRow(NamedTuple):
    """One row to read."""

    key: str
    status: str
    values: list[tuple[str, str]]
    texts: list[str]
    error: str
    note: str


@dataclass(frozen=True)
class Page:
    """Everything that the template shows; all of it is escaped there, but for the charts."""

    title: str
    state: str
    is_done: bool
    subtitle: str
    facts: list[Fact]
    charts: list[Chart]
    row_charts: list[Chart]
    errors: list[ErrorKind]
    slowest: list[dict[str, Any]]
    rows: list[SampleRow]
    runs: list[RunLine]
    settings: list[tuple[str, list[tuple[str, str]]]]
    job: str
    footer: str = field(default_factory=lambda: f"Written by batchgen {__version__} on {_now()}.")


def page_html(page: Page) -> str:
    """The page as one file."""
    text = package_files("batchgen.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(text).render(page=page)


def make_page(stored: StoredOutput) -> Page:
    """Read everything that the page shows; raises OutputDamaged where the records contradict each other."""
    figures = read_figures(stored)
    found, runs, tally = figures.status, figures.runs, figures.tally
    job = json.loads(stored.files.read(stored.paths.job))
    return Page(
        title=stored.paths.root.name,
        state=_state(found),
        is_done=found.is_done,
        subtitle=f"{stored.job.model.path} · begun {stored.plan.started.replace('T', ' ')}",
        facts=_facts(figures),
        charts=_time_charts(runs),
        row_charts=_row_charts(figures),
        errors=[ErrorKind(code, count, tally.examples[code]) for code, count in tally.errors.most_common()],
        slowest=figures.slowest,
        rows=[_sample_row(row, stored) for row in random_rows(stored, NUM_SAMPLE_ROWS, stored.plan.fingerprint)],
        runs=[_run_line(run) for run in runs],
        settings=_settings(stored, runs),
        job=json.dumps(job, indent=2, ensure_ascii=False),
    )


def _state(found: Status) -> str:
    if found.problems:
        return f"damaged: {found.problems[0]}"
    counts = f"{found.num_committed:,} of {found.num_rows:,} rows committed"
    return f"done: {counts}" if found.is_done else f"not done: {counts}"


def _facts(figures: Figures) -> list[Fact]:
    found, tally = figures.status, figures.tally
    facts = [
        Fact("rows ok", f"{found.num_committed - found.num_errors:,}"),
        Fact("rows with an error", f"{found.num_errors:,}"),
        Fact("prompt tokens", f"{tally.prompt_lengths.total:,}"),
        Fact("completion tokens", f"{tally.completion_lengths.total:,}"),
    ]
    if figures.seconds > 0:
        runs = f"{len(figures.runs)} run{'' if len(figures.runs) == 1 else 's'}"
        facts += [
            Fact("generated tokens a second", f"{figures.tokens_per_second:,.0f}"),
            Fact(f"at work, in {runs}", duration(figures.seconds)),
        ]
    if figures.cached_share is not None:
        facts.append(Fact("of prompts served from shared prefixes", f"{figures.cached_share:.0%}"))
    if figures.runs:
        facts.append(Fact("KV cache in use at the peak", f"{figures.kv_peak:.0%}"))
    return facts


def _time_charts(runs: Sequence[RunMetrics]) -> list[Chart]:
    series = series_of(runs)
    if not series.throughput:
        return []
    return [
        Chart(
            "Throughput",
            lines({"generated": series.throughput, "prompts computed": series.prompt_throughput}, ""),
            "Tokens a second.",
        ),
        Chart(
            "Sequences",
            lines({"running": series.running, "waiting": series.waiting}, ""),
            "In the batch, and in line behind it.",
        ),
        Chart("KV cache in use", lines({"blocks in use": series.kv_use}, " %"), "Share of the blocks that are held."),
        Chart(
            "Prefix hits",
            lines({"served": series.cached}, " %"),
            "Of the prompt tokens needed so far, those that a shared prefix held already.",
        ),
    ]


def _row_charts(figures: Figures) -> list[Chart]:
    tally = figures.tally
    charts = [
        Chart(title, histogram(lengths.bins(MAX_BINS), name), _quantiles(lengths))
        for title, lengths, name in (
            ("Prompt lengths", tally.prompt_lengths, "rows"),
            ("Completion lengths", tally.completion_lengths, "samples"),
        )
    ]
    if tally.finish_reasons:
        reasons = dict(tally.finish_reasons.most_common())
        charts.append(Chart("Finish reasons", bars(reasons, ""), "Samples: stop is an end of its own, length a cut."))
    if figures.kv_useful is not None and tally.contiguous.reserved:
        paged, contiguous = 1 - figures.kv_useful, 1 - tally.contiguous.useful_share
        charts.append(
            Chart(
                "KV cache wasted",
                bars({"in blocks, measured": 100 * paged, "contiguous, same rows": 100 * contiguous}, " %"),
                "Share of reserved slots without a token. Contiguous: each sample reserves its prompt and the most it "
                "may generate, computed from the lengths that came out.",
            )
        )
    return charts


def _quantiles(lengths: Lengths) -> str:
    if not lengths.number:
        return "Tokens."
    mean = lengths.total / lengths.number
    return (
        f"Tokens: mean {mean:,.0f}, median {lengths.quantile(0.5):,}, 95 % within {lengths.quantile(0.95):,}, "
        f"longest {lengths.quantile(1.0):,}."
    )


def _sample_row(row: Row, stored: StoredOutput) -> SampleRow:
    layout = stored.layout
    record = row[layout.struct_name]
    error = f"{record['error_code']}: {record['error_message']}" if record["status"] == "error" else ""
    tokens = record["completion_tokens"]
    counted = tokens if layout.exploded else sum(count or 0 for count in tokens or [])
    return SampleRow(
        key=f"{record['source']}:{record['row']}",
        status=record["status"],
        values=[(name, _shown(row[name], 300)) for name in layout.readable(row)],
        texts=[_shown(text, MAX_TEXT) for text in layout.texts(row)],
        error=error,
        note=f"{record['prompt_tokens'] or 0:,} tokens in, {counted or 0:,} out",
    )


def _run_line(run: RunMetrics) -> RunLine:
    point, seconds = last_point(run), seconds_of(run)
    tokens = point.get("completion_tokens", 0)
    ended = run.end.get("ended", "")
    return RunLine(
        began=run.run.get("started", run.attempt).replace("T", " ").removesuffix("+00:00"),
        host=str(run.run.get("host", "")),
        time=duration(seconds),
        rows=f"{run.end['rows_committed']:,}" if run.end else "",
        tokens=f"{tokens:,}",
        speed=f"{tokens / seconds:,.0f}" if seconds > 0 else "",
        preemptions=f"{point.get('num_preemptions', 0):,}",
        ended=ended.replace("T", " ").removesuffix("+00:00") or "has noted no end",
    )


def _settings(stored: StoredOutput, runs: Sequence[RunMetrics]) -> list[tuple[str, list[tuple[str, str]]]]:
    identity = stored.plan.identity
    sections = {
        "Sampling": {
            key.removeprefix("sampling."): value
            for key, value in identity.items()
            if key.startswith("sampling.") and value is not None
        },
        "Model": {
            key.removeprefix("model."): value
            for key, value in identity.items()
            if key.startswith(("model.", "resolved.")) and not key.startswith("model.files.") and value is not None
        },
        "Versions": dict(stored.plan.recorded),
    }
    if runs:
        engine = runs[-1].run.get("engine", {})
        sections["Engine of the last run"] = {
            **{name: engine[name] for name in _ENGINE_FIGURES if name in engine},
            "settings": runs[-1].run.get("settings", {}),
        }
    return [(title, _pairs(values)) for title, values in sections.items()]


_ENGINE_FIGURES = ("num_blocks", "block_size", "kv_cache_bytes", "max_batch_tokens", "max_sequences")


def _pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, _shown(value, 200)) for name, value in values.items()]


def _shown(value: Any, width: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= width else text[: width - 1] + "…"


def _now() -> str:
    return datetime.now(UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00") + " UTC"

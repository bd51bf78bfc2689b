"""Where an output stands as a Prometheus text file, for the textfile collector of its node exporter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchgen.report.live import Live


def prometheus_text(live: Live) -> str:
    """The exposition format, version 0.0.4."""
    return "".join(_lines(live))


def _lines(live: Live) -> Iterator[str]:
    found, snapshot = live.status, live.snapshot
    output = {"output": found.output}
    yield from _metric("rows", "gauge", "Rows of the job.", [(output, found.num_rows)])
    yield from _metric("rows_done", "gauge", "Rows with an answer or an error.", [(output, live.num_done)])
    yield from _metric("rows_committed", "gauge", "Rows in committed files.", [(output, found.num_committed)])
    errors = [({**output, "code": code}, count) for code, count in sorted(found.errors.items())]
    yield from _metric("row_errors", "gauge", "Committed rows that are errors.", errors)
    yield from _metric("done", "gauge", "1 where every row is committed.", [(output, int(found.is_done))])
    yield from _metric("at_work", "gauge", "1 where a run seems to be at work.", [(output, int(live.is_at_work))])
    if snapshot is None or live.run is None:
        return
    run = {**output, "attempt": live.run.attempt}
    for name, help_text, value in (
        ("completion_tokens_total", "Tokens drawn by the latest run.", snapshot.completion_tokens),
        ("computed_tokens_total", "Tokens that went through the model.", snapshot.computed_tokens),
        ("cached_tokens_total", "Prompt tokens that shared prefixes served.", snapshot.cached_tokens),
        ("preemptions_total", "Sequences that gave their blocks back.", snapshot.num_preemptions),
        ("steps_total", "Steps of the engine.", snapshot.num_steps),
    ):
        yield from _metric(name, "counter", help_text, [(run, value)])
    sequences = [
        ({**run, "state": "running"}, snapshot.num_running),
        ({**run, "state": "waiting"}, snapshot.num_waiting),
    ]
    yield from _metric("sequences", "gauge", "Sequences in the batch, and in line behind it.", sequences)
    yield from _metric("kv_use_ratio", "gauge", "Share of the KV cache's blocks in use.", [(run, snapshot.kv_use)])
    at = live.run.points[-1]["at"]
    yield from _metric("noted_timestamp_seconds", "gauge", "When the latest run noted this.", [(run, at)])


def _metric(name: str, kind: str, help_text: str, samples: Sequence[tuple[dict[str, str], float]]) -> Iterator[str]:
    if not samples:
        return
    yield f"# HELP batchgen_{name} {help_text}\n# TYPE batchgen_{name} {kind}\n"
    for labels, value in samples:
        inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"batchgen_{name}{{{inner}}} {value}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

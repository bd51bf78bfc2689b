"""The figures of an output: where it stands, what its runs noted, and what its rows add up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchgen.data.metrics_log import RunMetrics, read_metrics
from batchgen.pipeline.status import Status, status
from batchgen.pipeline.stored import StoredOutput
from batchgen.report.tally import Lengths, RowTally, tally_rows

NUM_SLOWEST = 10


@dataclass(frozen=True)
class Figures:
    """Everything that a report counts."""

    status: Status
    runs: list[RunMetrics]
    tally: RowTally

    @property
    def seconds(self) -> float:
        """Time at work of all runs, without loading the model."""
        return sum(map(seconds_of, self.runs))

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second of all runs; 0 where none noted anything."""
        drawn = sum(last_point(run).get("completion_tokens", 0) for run in self.runs)
        return drawn / self.seconds if self.seconds > 0 else 0.0

    @property
    def cached_share(self) -> float | None:
        """Of the prompt tokens that were needed, the share that shared prefixes served; None where it is unknown."""
        points = [last_point(run) for run in self.runs]
        cached = sum(point.get("cached_tokens", 0) for point in points)
        computed = sum(max(0, p.get("computed_tokens", 0) - p.get("completion_tokens", 0)) for p in points)
        return cached / (cached + computed) if cached + computed > 0 else None

    @property
    def kv_peak(self) -> float:
        """Largest share of the KV cache's blocks that was in use at once."""
        peaks = [point.get("kv_use", 0.0) for run in self.runs for point in run.points]
        for run in self.runs:
            engine = run.end.get("engine", {})
            if engine.get("num_blocks"):
                peaks.append(engine.get("peak_blocks_held", 0) / engine["num_blocks"])
        return max(peaks, default=0.0)

    @property
    def kv_useful(self) -> float | None:
        """Mean share of the slots of blocks in use that held a token, over the time at work; None where unknown."""
        useful = [(seconds_of(run), run.points[-1]["kv_useful"]) for run in self.runs if run.points]
        seconds = sum(weight for weight, _ in useful)
        return sum(weight * share for weight, share in useful) / seconds if seconds > 0 else None

    @property
    def slowest(self) -> list[dict[str, Any]]:
        """The rows that took longest, of runs that came to their end."""
        found = [slow for run in self.runs for slow in run.end.get("slowest", [])]
        return sorted(found, key=lambda slow: -slow["seconds"])[:NUM_SLOWEST]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        tally = self.tally
        return {
            "status": self.status.to_json(),
            "seconds": self.seconds,
            "completion_tokens_per_second": self.tokens_per_second,
            "cached_share": self.cached_share,
            "kv_peak": self.kv_peak,
            "kv_waste": None if self.kv_useful is None else 1 - self.kv_useful,
            "kv_waste_contiguous": 1 - tally.contiguous.useful_share,
            "prompt_tokens": _lengths(tally.prompt_lengths),
            "completion_tokens": _lengths(tally.completion_lengths),
            "finish_reasons": dict(tally.finish_reasons),
            "errors": {
                code: {"rows": count, "examples": [example._asdict() for example in tally.examples[code]]}
                for code, count in tally.errors.most_common()
            },
            "slowest": self.slowest,
            "runs": [{"attempt": run.attempt, **run.run, "last": last_point(run), "end": run.end} for run in self.runs],
        }


def read_figures(stored: StoredOutput) -> Figures:
    """Read them; raises OutputDamaged where the records contradict each other."""
    runs = read_metrics(stored.files, stored.paths.metrics)
    return Figures(status(stored), runs, tally_rows(stored))


def last_point(run: RunMetrics) -> dict[str, Any]:
    """Where the run stood when it last noted anything; empty where it never did."""
    return run.points[-1] if run.points else {}


def seconds_of(run: RunMetrics) -> float:
    """Time at work of a run, as far as it is noted."""
    return float(run.end.get("seconds") or last_point(run).get("seconds", 0.0))


def _lengths(lengths: Lengths) -> dict[str, Any]:
    quantiles = {f"p{share}": lengths.quantile(share / 100) for share in (5, 50, 95, 100)}
    return {"count": lengths.number, "total": lengths.total, **quantiles}

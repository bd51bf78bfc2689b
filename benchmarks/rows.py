"""Many short rows through a whole job, over a model that computes nothing: what a row costs beside the model.

    python -m benchmarks.rows [--rows 1000000] [--max-tokens 4] [--directory DIR]

Everything is real but the forward pass and the draw: the input file, the child that renders and tokenizes, scheduler
and blocks, text, journal, shards and commits. Prints rows per second and the memory of the process in the course of it,
which must not grow with the rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from batchgen.config import JobConfig
from batchgen.engine.batch import Batch, Draw
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.engine import Engine
from batchgen.engine.loading import EngineParts
from batchgen.engine.masks import AllowedTokens
from batchgen.engine.prefix_cache import PrefixCache
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Sequence
from batchgen.pipeline.progress import ProgressSnapshot
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.services import default_services
from batchgen.tokenizer import Tokenizer
from benchmarks.throughput import MODEL

FIRST_TOKEN = 1000
"""Tokens are drawn in turn from here on: ordinary ones of any vocabulary."""


class NoModel:
    """Logits without contents."""

    def execute(self, batch: Batch, drawn_R: torch.Tensor | None = None) -> torch.Tensor:
        """[R, 0]."""
        return torch.empty(len(batch.logits_layout().tokens), 0)


class Drawn:
    """Draws that are known already."""

    def __init__(self, draws: list[Draw]) -> None:
        self._draws = draws

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 [R]."""
        return torch.tensor([draw.token_id for draw in self._draws])

    def read(self) -> list[Draw]:
        """At once."""
        return self._draws


class NoSampler:
    """Another token for every position."""

    def sample(
        self, logits_LV: torch.Tensor, rows: list[int], sequences: list[Sequence], allowed: AllowedTokens | None = None
    ) -> Drawn:
        """One draw per sequence."""
        return Drawn([Draw(FIRST_TOKEN + sequence.num_tokens % 1000, -1.0) for sequence in sequences])

    def continuations(self, *_: Any) -> list[Any]:
        """There are no beams."""
        return []


def make_engine(_: JobConfig, directory: Path) -> Engine:
    """The engine over parts that compute nothing, with the model's own tokenizer."""
    pool = BlockPool(4096, 16)
    scheduler = Scheduler(pool, max_batch_tokens=8192, max_sequences=256, prefix_cache=PrefixCache(pool))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    return Engine.from_parts(
        EngineParts(
            runner=NoModel(),
            sampler=NoSampler(),  # type: ignore[arg-type]
            scheduler=scheduler,
            tokenizer=tokenizer,
            vocab_size=tokenizer.vocab_size,
            max_model_len=2048,
            eos_token_ids=frozenset(),
            resolved={"model.dtype": "float32", "model.max_model_len": 2048},
        )
    )


class MemoryLog:
    """A progress that notes the memory of the process each tenth of the rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.resident_mb: list[tuple[int, float]] = []

    def phase(self, name: str) -> None:
        """Not noted."""

    def message(self, text: str) -> None:
        """Not noted."""

    def close(self) -> None:
        """Nothing to do."""

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Called a few times a second."""
        done = snapshot.num_done
        if done >= len(self.resident_mb) * self.num_rows // 10:
            self.resident_mb.append((done, resident_mb()))


def resident_mb() -> float:
    """Megabytes of this process that are in memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> None:
    """Run the job and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--directory", help="for input and output; default: the system's temporary directory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        file = Path(directory) / "rows.jsonl"
        with file.open("w") as out:
            for row in range(options.rows):
                out.write(json.dumps({"prompt": f"Say number {row}."}) + "\n")
        job = JobConfig.model_validate(
            {
                "version": 1,
                "model": {"path": MODEL},
                "input": {"path": str(file)},
                "prompt": {"column": "prompt"},
                "sampling": {"max_tokens": options.max_tokens, "temperature": 0.8, "seed": 1},
                "output": {"path": str(Path(directory) / "out")},
            }
        )
        log = MemoryLog(options.rows)
        start = time.perf_counter()
        report = run_job(job, progress=log, services=replace(default_services(), make_engine=make_engine))
        seconds = time.perf_counter() - start
    print(f"{options.rows} rows in {seconds:.1f} s: {options.rows / seconds:.0f} rows/s")
    print("resident MB by rows:", ", ".join(f"{done}: {mb:.0f}" for done, mb in log.resident_mb))
    assert report.num_ok == options.rows, report


if __name__ == "__main__":
    main()

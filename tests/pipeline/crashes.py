"""What the crash tests share: jobs on a simulated disk, and what must hold after every crash."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.config import JobConfig
from batchgen.data.commits import ShardFile, read_log, replay
from batchgen.data.file_backend import FileBackend
from batchgen.data.files import OutputFiles
from batchgen.data.layout import OutputPaths
from batchgen.data.sealed import unseal
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.stored import read_output
from batchgen.pipeline.verify import verify
from tests.data.simulated_files import PowerCut, SimulatedBackend
from tests.pipeline.fakes import FakeWorld

Rows = list[dict[str, Any]]


def committed_shards(files: OutputFiles, root: Path) -> dict[int, ShardFile]:
    """What the records of an output say, read without a lock."""
    paths = OutputPaths(root)
    records = read_log(files, paths.commits).records
    return replay(records, records[0].fingerprint).shards if records else {}


def committed_rows(files: OutputFiles, root: Path) -> Rows:
    """Every row of the files that the records name, in order of their keys."""
    paths = OutputPaths(root)
    tables = []
    for number in committed_shards(files, root):
        with files.open_read(paths.shard(number)) as file:
            tables.append(pq.ParquetFile(file).read())
    rows = pa.concat_tables(tables).to_pylist() if tables else []
    return sorted(rows, key=lambda row: (row["batchgen"]["source"], row["batchgen"]["row"]))


def check_output(files: OutputFiles, root: Path, expected: Rows) -> None:
    """The output is whole: every row once and as expected, nothing unfinished, nothing left over."""
    paths = OutputPaths(root)
    shards = committed_shards(files, root)
    assert committed_rows(files, root) == expected
    assert files.list_directory(paths.data) == sorted(shard.name for shard in shards.values())
    assert files.list_directory(paths.temporary) == []
    assert files.list_directory(paths.journal) == []
    for number, shard in shards.items():
        content = files.read(paths.shard(number))
        assert len(content) == shard.num_bytes
    assert unseal(files.read(paths.plan)) is not None
    assert verify(read_output(files, root)).problems == []


@dataclass
class SimulatedDisk:
    """A job whose output lies on a simulated file system; its runs share the disk."""

    job: JobConfig
    backend: SimulatedBackend = field(default_factory=SimulatedBackend)
    wrap: Callable[[FileBackend], FileBackend] = field(default=lambda backend: backend)

    @property
    def files(self) -> OutputFiles:
        return OutputFiles(self.backend)

    def copy(self) -> SimulatedDisk:
        """The same disk, to be written to on its own."""
        return replace(self, backend=deepcopy(self.backend))

    def world(self) -> FakeWorld:
        """What a run on this disk works with."""
        return FakeWorld(backend=self.wrap(self.backend))

    def run(self) -> FakeWorld:
        """Run the job to its end; raises PowerCut where the power fails before it."""
        world = self.world()
        run_job(self.job, services=world.services)
        return world

    def run_until_cut(self, cut_at: int) -> bool:
        """Run with the power failing before the N-th operation; returns whether it failed."""
        self.backend.cut_at = cut_at
        try:
            self.run()
        except PowerCut:
            return True
        return False

    def check(self, expected: Rows) -> None:
        check_output(self.files, self.job.output_dir, expected)

    @property
    def num_acknowledged(self) -> int:
        """Commits that returned to the runner: their records were durable, so nothing may lose them."""
        acknowledged, has_new = 0, False
        for line in self.backend.log:
            has_new |= line.startswith("create") and "/commits/" in line
            if has_new and line.startswith("sync_directory") and line.endswith("/commits"):
                acknowledged, has_new = acknowledged + 1, False
        return acknowledged

    def durable_shards(self) -> dict[int, ShardFile]:
        return committed_shards(self.files, self.job.output_dir)

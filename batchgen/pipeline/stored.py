"""An output as it lies on disk, read without its lock: what `status` and `verify` look at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa

from batchgen.config import JobConfig, load_job
from batchgen.data.commits import ReadLog, read_log
from batchgen.data.files import OutputFiles
from batchgen.data.input_rows import InputScan
from batchgen.data.layout import OutputPaths
from batchgen.data.ledger import read_plan
from batchgen.data.plan_record import PlanRecord
from batchgen.data.recovery import Inspect
from batchgen.data.schema import OutputLayout, output_layout, output_schema
from batchgen.data.verification import inspect_shard
from batchgen.errors import JobError
from batchgen.pipeline.plan import RowIndex, limited
from batchgen.records import RowRange


@dataclass(frozen=True)
class StoredOutput:
    """Plan and records of an output."""

    files: OutputFiles
    paths: OutputPaths
    plan: PlanRecord
    job: JobConfig
    """As it was first run."""
    index: RowIndex
    expected: list[RowRange]
    """All rows of the job."""
    layout: OutputLayout
    schema: pa.Schema
    log: ReadLog

    @property
    def num_rows(self) -> int:
        """Rows of the job."""
        return sum(self.index.count(rows) for rows in self.expected)

    @property
    def inspect(self) -> Inspect:
        """Reads a whole shard file of this output."""
        return partial(
            inspect_shard,
            self.files,
            schema=self.schema,
            struct_name=self.layout.struct_name,
            rows_of=self.index.numbers,
        )


def read_output(files: OutputFiles, root: Path) -> StoredOutput:
    """Read an output; JobError where there is none, OutputDamaged where its plan is not intact."""
    paths = OutputPaths(root.absolute())
    plan = None if root.is_file() else read_plan(files, paths)
    if plan is None:
        raise JobError(f"{root}: no output of batchgen here; name the directory of a job's output.path")
    job = JobConfig.model_validate(plan.job).model_copy(update={"base_dir": Path(plan.base_dir)})
    scan = InputScan.from_json(plan.scan)
    index = RowIndex(scan.files)
    layout = output_layout(scan.schema, job.output, job.sampling)
    return StoredOutput(
        files=files,
        paths=paths,
        plan=plan,
        job=job,
        index=index,
        expected=limited(scan.ranges, job.input.limit, index),
        layout=layout,
        schema=output_schema(layout),
        log=read_log(files, paths.commits),
    )


def stored_job(files: OutputFiles, root: Path, overrides: list[str]) -> JobConfig:
    """The job as it last ran, with overrides, to go on with this very output; raises JobError and OutputDamaged."""
    stored = read_output(files, root)
    # Where the output lies is known; the variables of its path may mean something else by now, or nothing.
    own_path = f"output.path={json.dumps(str(stored.paths.root))}"
    return load_job(stored.paths.job, [*overrides, own_path]).model_copy(update={"base_dir": stored.job.base_dir})

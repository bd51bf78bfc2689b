"""Every example job runs as it stands, but for the length of its texts and where its output goes."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchgen.config import load_job
from tests.program import ROOT, batchgen

JOBS = sorted((ROOT / "jobs").glob("*.yaml"))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_every_job_is_valid_and_begins_with_a_line_for_editors(job: Path) -> None:
    load_job(job)
    assert job.read_text().startswith("# yaml-language-server: $schema=../schemas/job.v1.schema.json\n# ")


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_every_job_runs(job: Path, tmp_path: Path) -> None:
    sampling = load_job(job).sampling
    changes = [f"output.path={tmp_path / 'out'}", "input.limit=6"]
    if sampling.response_format is None:
        # A record that is cut off would be an error.
        changes.append(f"sampling.max_tokens={min(sampling.max_tokens or 8, 8)}")
    arguments = [part for change in changes for part in ("--set", change)]
    result = batchgen("run", str(job), *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "6 rows: 6 ok, 0 error" in result.stdout
    records = pq.read_table(tmp_path / "out" / "data").column("batchgen").to_pylist()
    assert {record["row"] for record in records} == set(range(6))
    assert (tmp_path / "out" / "_batchgen" / "report.html").stat().st_size > 10_000

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen.commands.verify import verify
from batchgen.errors import OutputDamaged
from batchgen.pipeline.runner import run_job
from tests.pipeline.fakes import FakeWorld, make_job


def test_json_says_what_was_found_also_of_a_damaged_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path)
    run_job(job, services=FakeWorld().services)
    verify(job.output_dir, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["intact"], found["num_rows"], found["num_committed"]) == (True, 10, 10)
    (job.output_dir / "data" / "part-00001.parquet").unlink()
    with pytest.raises(OutputDamaged, match="--repair") as damaged:
        verify(job.output_dir, as_json=True)
    # The command line prints it beside the error.
    assert capsys.readouterr().out == ""
    found = damaged.value.result
    assert not found["intact"]
    assert "part-00001.parquet" in found["problems"][0]

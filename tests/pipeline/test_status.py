"""What `status` says of an output in each state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen.commands.status import status_lines
from batchgen.data.files import OutputFiles
from batchgen.data.ledger import Ledger
from batchgen.errors import Interrupted
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.status import Status, status
from batchgen.pipeline.stored import read_output
from tests.pipeline.fakes import FakeWorld, interrupt_after, make_job

FILES = OutputFiles()


def look(root: Path) -> Status:
    return status(read_output(FILES, root))


def test_a_finished_output_is_done(tmp_path: Path) -> None:
    job = make_job(tmp_path, 0)
    (tmp_path / "in.jsonl").write_text('{"prompt": "good"}\n{"prompt": "bad!"}\n{"prom\n')
    run_job(job, services=FakeWorld().services)
    found = look(job.output_dir)
    assert (found.is_done, found.num_rows, found.num_committed, found.num_files) == (True, 3, 3, 1)
    assert found.errors == {"no_allowed_token": 1, "bad_json": 1}
    assert (found.holder, found.problems, found.num_journaled, found.num_begun) == (None, [], 0, 0)
    assert json.loads(json.dumps(found.to_json()))["num_ok"] == 1
    lines = list(status_lines(found))
    assert lines[0] == "done: 3 of 3 rows committed in 1 file"
    assert lines[1] == "  rows       1 ok, 2 error (1 bad_json, 1 no_allowed_token)"


def test_an_interrupted_output_shows_what_the_journal_holds(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(20)).services)
    found = look(job.output_dir)
    assert (found.is_done, found.num_committed) == (False, 4)
    assert 0 < found.num_journaled + found.num_begun <= 6
    assert any(line.startswith("  journal ") for line in status_lines(found))


def test_the_holder_of_the_lock_is_named(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_job(job, services=FakeWorld().services)
    ledger = Ledger.acquire(FILES, job.output_dir)
    found = look(job.output_dir)
    ledger.close()
    assert found.holder is not None
    assert found.holder.attempt == ledger.attempt
    assert any(line.startswith("  at work ") for line in status_lines(found))


def test_damage_that_shows_is_shown(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_job(job, services=FakeWorld().services)
    (job.output_dir / "data" / "part-00001.parquet").unlink()
    found = look(job.output_dir)
    assert not found.is_done
    assert "part-00001.parquet: is missing" in found.problems[0]
    assert next(status_lines(found)).startswith("damaged: ")

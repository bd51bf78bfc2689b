"""Every key of the job belongs to its identity and is refused by name, or is operational and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.errors import BatchgenError, FingerprintMismatch, Interrupted
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.session import OpenOptions
from tests.pipeline.crashes import check_output, committed_rows
from tests.pipeline.fakes import FakeWorld, interrupt_after, make_job

FILES = OutputFiles()

IDENTITY: dict[str, Any] = {
    "model.path": "other",
    "model.revision": "main",
    "model.dtype": "bfloat16",
    "model.max_model_len": 99,
    "input.path": "./in.jsonl",
    "input.format": "jsonl",
    "input.columns": ["id"],
    "input.schema": {"id": "int32"},
    "input.on_error": "fail",
    "input.where": "id > -1",
    "input.sample": 10,
    "input.limit": 10,
    "prompt.allow_special_tokens": True,
    "prompt.truncate": "left",
    "sampling.n": 3,
    "sampling.temperature": 0.5,
    "sampling.top_k": 7,
    "sampling.top_p": 0.5,
    "sampling.max_tokens": 9,
    "sampling.stop": ["x"],
    "sampling.stop_token_ids": [4],
    "sampling.ignore_eos": True,
    "sampling.seed": 2,
    "output.samples": "explode",
    "output.token_ids": True,
    "output.prefix": "x_",
}
OPERATIONAL: dict[str, Any] = {
    "engine.device": "cpu",
    "engine.block_size": 32,
    "engine.kv_cache_memory": "64MiB",
    "engine.max_batch_tokens": 100,
    "engine.max_sequences": 3,
    "engine.threads": 1,
    "output.shard_rows": 3,
    "run.max_error_rate": 0.5,
    "run.max_runtime": "1h",
    "run.grace": "5s",
    "run.journal_interval": "1s",
    "input.on_growth": "append",
}


def begun(root: Path) -> JobConfig:
    """A job that was interrupted after its first shard."""
    job = make_job(root)
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(20)).services)
    return job


def edited(root: Path, key: str, value: Any) -> JobConfig:
    section, name = key.split(".")
    return make_job(root, **{section: {name: value}})  # type: ignore[arg-type]


@pytest.mark.parametrize(("key", "value"), IDENTITY.items())
def test_a_key_of_the_identity_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    job = begun(tmp_path)
    before = committed_rows(FILES, job.output_dir)
    with pytest.raises(FingerprintMismatch, match=rf"\n  {key}: .* in the output, .* in the job\n"):
        run_job(edited(tmp_path, key, value), services=FakeWorld().services)
    assert committed_rows(FILES, job.output_dir) == before


def test_an_operational_key_may_change(tmp_path: Path) -> None:
    calm = make_job(tmp_path, output={"path": "calm"})
    run_job(calm, services=FakeWorld().services)
    job = begun(tmp_path)
    for key, value in OPERATIONAL.items():
        with pytest.raises(Interrupted):
            run_job(edited(tmp_path, key, value), services=FakeWorld(make=interrupt_after(1)).services)
    run_job(job, services=FakeWorld().services)
    check_output(FILES, job.output_dir, committed_rows(FILES, calm.output_dir))


def test_no_key_of_the_job_is_forgotten_here(tmp_path: Path) -> None:
    assert make_job(tmp_path).identity().keys() >= IDENTITY.keys()
    assert not make_job(tmp_path).identity().keys() & OPERATIONAL.keys()


def test_overwrite_begins_another_job_anew_and_goes_on_with_the_same(tmp_path: Path) -> None:
    job = begun(tmp_path)
    world = FakeWorld()
    report = run_job(job, services=world.services, options=OpenOptions(overwrite=True))
    assert report.num_rows_this_run == 6
    other = edited(tmp_path, "sampling.seed", 2)
    report = run_job(other, services=FakeWorld().services, options=OpenOptions(overwrite=True))
    assert report.num_rows_this_run == 10
    calm = make_job(tmp_path, sampling={"seed": 2}, output={"path": "calm"})
    run_job(calm, services=FakeWorld().services)
    check_output(FILES, job.output_dir, committed_rows(FILES, calm.output_dir))


@pytest.mark.parametrize("name", ["plan.json", "commits/00000000.json"])
def test_overwrite_begins_a_damaged_output_anew(tmp_path: Path, name: str) -> None:
    job = make_job(tmp_path)
    run_job(job, services=FakeWorld().services)
    expected = committed_rows(FILES, job.output_dir)
    (job.output_dir / "_batchgen" / name).write_text("{}")
    with pytest.raises(BatchgenError, match="not intact"):
        run_job(job, services=FakeWorld().services)
    report = run_job(job, services=FakeWorld().services, options=OpenOptions(overwrite=True))
    assert report.num_rows_this_run == 10
    check_output(FILES, job.output_dir, expected)

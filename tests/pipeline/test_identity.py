"""What decides the rows is in the fingerprint; where things lie and what they are called is not."""

from __future__ import annotations

import os
from pathlib import Path

from batchgen.data.inputs import list_inputs
from batchgen.data.plan_record import differences
from batchgen.data.reader import scan_inputs
from batchgen.pipeline.identity import hash_model_files, identity_of, recorded_facts, resolved_of, warnings_of
from tests.pipeline.fakes import make_job

HASHES = {"model.safetensors": ["abc", 1, 1, 1]}


def test_open_keys_take_what_they_came_to(tmp_path: Path) -> None:
    job = make_job(tmp_path, sampling={"seed": None})
    scan = scan_inputs(list_inputs(job.input, tmp_path), job.input)
    resolved = {"model.dtype": "bfloat16", "model.max_model_len": 99, "sampling.seed": 5, "resolved.device": "cpu"}
    identity = identity_of(job, scan, HASHES, resolved)
    assert {key: identity[key] for key in resolved} == resolved
    assert identity["model.files.model.safetensors"] == "abc"
    assert resolved_of(identity) == resolved
    explicit = make_job(
        tmp_path, sampling={"seed": 5}, model={"path": "fake", "dtype": "bfloat16", "max_model_len": 99}
    )
    assert differences(identity, identity_of(explicit, scan, HASHES, resolved)) == []


def test_a_changed_input_is_named(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    before = identity_of(job, scan_inputs(list_inputs(job.input, tmp_path), job.input), HASHES, {})
    (tmp_path / "in.jsonl").write_text('{"prompt": "other"}\n')
    after = identity_of(job, scan_inputs(list_inputs(job.input, tmp_path), job.input), HASHES, {})
    assert [line.split(":")[0] for line in differences(before, after)] == ["input.files.0"]


def test_model_files_are_hashed_once(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("not part of the model")
    first = hash_model_files(tmp_path, {})
    assert sorted(first) == ["config.json", "model.safetensors"]
    trusted = {**first, "config.json": ["trusted", *first["config.json"][1:]]}
    assert hash_model_files(tmp_path, trusted)["config.json"][0] == "trusted"
    os.utime(tmp_path / "config.json", ns=(1, 1))
    assert hash_model_files(tmp_path, trusted)["config.json"][0] == first["config.json"][0]


def test_other_versions_warn_by_name() -> None:
    facts = recorded_facts()
    assert warnings_of(facts, recorded_facts()) == []
    (line,) = warnings_of({**facts, "torch": "1.0"}, facts)
    assert line.startswith("torch was 1.0 when this output was begun")

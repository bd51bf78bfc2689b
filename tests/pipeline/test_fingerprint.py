"""Every key of the job belongs to its identity and is refused by name, or is operational and changes nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.errors import BatchgenError, FingerprintMismatch, Interrupted
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.session import OpenOptions
from tests.pipeline.crashes import check_output, committed_rows
from tests.pipeline.fakes import FakeWorld, interrupt_after, make_job

FILES = OutputFiles()

CHAT = {"column": None, "messages": [{"role": "user", "content": "{{ prompt }}"}]}

EDITS: dict[str, Any] = {
    "model.path": "other",
    "model.dtype": "bfloat16",
    "input.path": "./in.jsonl",
    "input.columns": ["id"],
    "input.schema": {"id": "int32"},
    "input.id_column": "id",
    "input.unique_ids": {"id_column": "id", "unique_ids": True},
    "input.where": "id > -1",
    "prompt.template": {"column": None, "template": "{{ prompt }}"},
    "prompt.column": "id",
    "prompt.messages": CHAT,
    "prompt.messages_column": {"column": None, "messages_column": "prompt"},
    "prompt.token_ids_column": {"column": None, "token_ids_column": "prompt"},
    "prompt.request_column": {"column": None, "request_column": "prompt"},
    "prompt.system": {**CHAT, "system": "x"},
    "prompt.few_shot": {**CHAT, "few_shot": {"examples": [{"prompt": "x"}], "answer": "y"}},
    "prompt.assistant_prefill": {**CHAT, "assistant_prefill": "x"},
    "prompt.chat_template": {**CHAT, "chat_template": "x"},
    "prompt.chat_template_kwargs": {**CHAT, "chat_template_kwargs": {"x": 1}},
    "prompt.tools": {**CHAT, "tools": [{"x": 1}]},
    "sampling.logit_bias": {5: 1.0},
    "sampling.response_format": {"type": "regex", "regex": "x"},
    "sampling.on_incomplete": {"response_format": {"type": "regex", "regex": "x"}, "on_incomplete": "retry"},
    "sampling.beam": {"n": 1, "beam": {"width": 2}},
    "engine.device": "cpu",
    "engine.block_size": 32,
    "run.max_error_rate": 0.5,
    "run.report": False,
}
"""By key its other value, or the other values of several keys that go together; only where none of VALUES will do."""

VALUES = (9, 0.5, "x", ["x"], [9], True)


def options(annotation: Any) -> list[Any]:
    """The values that a type names."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in options(part)]


def keys_of_the_job() -> dict[str, Any]:
    """Every key of every section with its type."""
    sections = {name: field.annotation for name, field in JobConfig.model_fields.items()}
    return {
        f"{name}.{field.alias or key}": field.annotation
        for name, section in sections.items()
        if isinstance(section, type) and issubclass(section, BaseModel)
        for key, field in section.model_fields.items()
    }


KEYS = {
    key: kind for key, kind in keys_of_the_job().items() if get_origin(kind) is not Literal or len(get_args(kind)) > 1
}
"""All that can be edited: those with one value only, such as a feature that is not built yet, cannot."""

OPERATIONAL = [
    *sorted(key for key in KEYS if key.startswith(("engine.", "run."))),
    *("output.path", "output.shard_rows", "input.on_growth"),
]
IDENTITY = sorted(KEYS.keys() - set(OPERATIONAL))
OF_A_CLUSTER = ("run.scheduler", "run.tls")
"""They need one; that its rows are equal is shown where workers are tested."""


def begun(root: Path) -> JobConfig:
    """A job that was interrupted after its first shard."""
    job = make_job(root)
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(20)).services)
    return job


def edited(root: Path, key: str) -> JobConfig:
    """The job with one key changed."""
    section, name = key.split(".")
    job = make_job(root)
    edit = EDITS.get(key)
    together = edit if isinstance(edit, dict) and name in edit else None
    for value in [edit] if key in EDITS else [*options(KEYS[key]), *VALUES]:
        with suppress(ValidationError):
            other = make_job(root, **{section: together or {name: value}})
            if value_of(other, key) != value_of(job, key):
                return other
    raise AssertionError(f"put another value for {key} into EDITS")


def value_of(job: JobConfig, key: str) -> Any:
    section, name = key.split(".")
    return job.model_dump(mode="json", by_alias=True)[section][name]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    return begun(tmp_path_factory.mktemp("interrupted"))


@pytest.mark.case(51)
@pytest.mark.case(46)
@pytest.mark.parametrize("key", IDENTITY)
def test_a_key_of_the_identity_is_refused_by_name(interrupted: JobConfig, key: str) -> None:
    before = committed_rows(FILES, interrupted.output_dir)
    assert before
    with pytest.raises(FingerprintMismatch, match=rf"\n  {key}: .* in the output, .* in the job\n"):
        run_job(edited(interrupted.base_dir, key), services=FakeWorld().services)
    assert committed_rows(FILES, interrupted.output_dir) == before


@pytest.mark.parametrize("key", [key for key in OPERATIONAL if key not in OF_A_CLUSTER])
def test_an_operational_key_may_change(tmp_path: Path, key: str) -> None:
    calm = make_job(tmp_path, output={"path": "calm"})
    run_job(calm, services=FakeWorld().services)
    job, other = begun(tmp_path), edited(tmp_path, key)
    if job.output_dir != other.output_dir:
        job.output_dir.rename(other.output_dir)
    world = FakeWorld()
    run_job(other, services=world.services)
    assert world.num_rows < 10
    check_output(FILES, other.output_dir, committed_rows(FILES, calm.output_dir))


def test_the_lists_above_are_what_the_job_says_of_itself(tmp_path: Path) -> None:
    fixed = keys_of_the_job().keys() - KEYS.keys()
    assert make_job(tmp_path).identity().keys() - {"version"} - fixed == set(IDENTITY)


@pytest.mark.case(51)
@pytest.mark.parametrize(
    ("key", "before", "after"),
    [("model.dtype", "float32", "bfloat16"), ("model.max_model_len", 9, 8), ("resolved.device", "cpu", "cuda")],
)
def test_what_auto_comes_to_may_not_change(tmp_path: Path, key: str, before: Any, after: Any) -> None:
    def world(value: Any) -> FakeWorld:
        engine = interrupt_after(20)()
        engine.resolved = {**engine.resolved, key: value}
        return FakeWorld(make=lambda: engine)

    job = make_job(tmp_path)
    with pytest.raises(Interrupted):
        run_job(job, services=world(before).services)
    with pytest.raises(FingerprintMismatch, match=rf"{key}: .*{before}.* in the output, .*{after}.* in the job"):
        run_job(job, services=world(after).services)


def test_overwrite_begins_another_job_anew_and_goes_on_with_the_same(tmp_path: Path) -> None:
    job = begun(tmp_path)
    world = FakeWorld()
    report = run_job(job, services=world.services, options=OpenOptions(overwrite=True))
    assert report.num_rows_this_run == 6
    other = make_job(tmp_path, sampling={"seed": 2})
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

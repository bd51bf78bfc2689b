from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from batchgen.config import FewShotConfig, JobConfig, load_job
from batchgen.config_examples import read_examples
from batchgen.errors import JobFileError

SHOTS = [{"q": "2 + 2?", "a": "4"}, {"q": "é\U0001f600?", "a": "c"}]


def write_job(base: Path, shots: dict[str, object]) -> Path:
    job = {
        "version": 1,
        "model": {"path": "m"},
        "input": {"path": "in.jsonl"},
        "prompt": {"template": "{{ q }}", "few_shot": {"answer": "{{ a }}", **shots}},
        "output": {"path": "out"},
    }
    path = base / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def few_shot(job: JobConfig) -> FewShotConfig:
    assert job.prompt.few_shot is not None
    return job.prompt.few_shot


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shots.jsonl", "\ufeff\n" + "\n\n".join(map(json.dumps, SHOTS))),
        ("shots.json", json.dumps(SHOTS)),
        ("shots.yaml", yaml.safe_dump(SHOTS, allow_unicode=True)),
    ],
)
def test_examples_of_a_file_are_those_of_the_job(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    inline = load_job(write_job(tmp_path, {"examples": SHOTS}))
    from_file = load_job(write_job(tmp_path, {"path": name}))
    assert from_file == inline
    assert from_file.identity() == inline.identity()
    assert few_shot(load_job(write_job(tmp_path, {"path": name, "limit": 1}))).examples == SHOTS[:1]


def test_what_was_stored_of_a_job_needs_the_file_no_more(tmp_path: Path) -> None:
    (tmp_path / "shots.jsonl").write_text(json.dumps(SHOTS[0]))
    job = load_job(write_job(tmp_path, {"path": "shots.jsonl", "limit": 3}))
    stored = job.model_dump(mode="json", by_alias=True)
    assert stored["prompt"]["few_shot"]["examples"] == SHOTS[:1]
    assert JobConfig.model_validate(stored).prompt == job.prompt


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("gone.jsonl", None, "gone.jsonl: cannot be read: No such file or directory"),
        ("shots.txt", "x", "shots.txt: examples are read from .jsonl, .ndjson, .json, .yaml, .yml"),
        ("shots.jsonl", '{"q": 1}\n{"q": }', "shots.jsonl:2: not JSON: Expecting value"),
        ("shots.jsonl", '{"q": 1, "q": 2}', "shots.jsonl:1: the key 'q' stands twice"),
        ("shots.jsonl", '{"q": NaN}', "shots.jsonl:1: NaN is not JSON; write null"),
        ("shots.json", '{"q": 1}', "shots.json: must be a list of examples"),
        ("shots.yaml", "- q: 1\n  q: 2", "shots.yaml:2:3: [0].q: given twice, first in line 1; keep one"),
    ],
)
def test_what_is_wrong_with_the_file_is_said_at_its_key(
    tmp_path: Path, name: str, text: str | None, reason: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    path = write_job(tmp_path, {"path": name})
    with pytest.raises(JobFileError) as raised:
        load_job(path)
    (line,) = raised.value.problems
    assert line.startswith(f"{path}:")
    assert line.endswith(f": prompt.few_shot.path: {tmp_path / name}{reason.removeprefix(name)}")


def test_examples_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text(json.dumps({"q": "x" * 999}) + "\n")
    with path.open("a") as file:
        file.writelines([path.read_text()] * 1100)
    with pytest.raises(ValueError, match=r"more than 1 MiB of examples; set few_shot\.limit"):
        read_examples(path, None)
    assert len(read_examples(path, 500)) == 500


@pytest.mark.parametrize(
    ("shots", "reason"),
    [
        ({}, "give exactly one of examples and path"),
        ({"path": "x.jsonl", "examples": SHOTS}, "give exactly one of examples and path"),
        ({"limit": 1, "examples": SHOTS}, "limit goes with path; remove it"),
    ],
)
def test_examples_come_from_one_place(tmp_path: Path, shots: dict[str, object], reason: str) -> None:
    with pytest.raises(JobFileError) as raised:
        load_job(write_job(tmp_path, shots))
    assert raised.value.problems[0].endswith(f"prompt.few_shot: {reason}")

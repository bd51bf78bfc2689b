from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchgen.cli import app
from tests.generated import COMMANDS, ROOT, generated_files, main, stale_files


def test_checked_in_files_are_what_the_code_makes() -> None:
    assert stale_files() == []


def test_a_stale_file_fails_the_check_with_a_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"schemas/a.json": "new\n"}
    monkeypatch.setattr("tests.generated.ROOT", tmp_path)
    monkeypatch.setattr("tests.generated.generated_files", lambda: files)
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas/a.json").write_text("old\n")
    assert main(["--check"]) == 1
    shown = capsys.readouterr().out
    assert "-old\n+new\n" in shown
    assert "make generate" in shown
    assert main([]) == 0
    assert main(["--check"]) == 0


def test_every_command_has_its_page() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names == {command[0] for command in COMMANDS if command}


def test_every_example_job_begins_with_the_line_that_editors_read() -> None:
    jobs = sorted((ROOT / "jobs").glob("*.yaml"))
    assert jobs
    for job in jobs:
        first = job.read_text().splitlines()[0]
        schema = first.removeprefix("# yaml-language-server: $schema=")
        assert (job.parent / schema).resolve() == ROOT / "schemas/job.v1.schema.json"


def test_the_job_page_names_every_key_of_the_schema() -> None:
    files = generated_files()
    keys = re.findall(r"^\| `(\w+)` \|", files["docs/job-file.md"], re.MULTILINE)
    assert {"temperature", "kv_cache_memory", "on_growth", "journal_interval"} <= set(keys)

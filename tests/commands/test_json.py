"""What `--json` prints: one document with the keys of the command line's page, an error as a document too."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen import cli
from batchgen.commands import plan as plan_command
from batchgen.config import JobConfig
from batchgen.errors import ExitCode
from batchgen.pipeline import redo as redo_pipeline
from batchgen.pipeline import runner
from tests.json_documents import DOCUMENTS
from tests.pipeline.fakes import FakeWorld, make_job
from tests.pipeline.prompts import write_job
from tests.pipeline.test_forecast import MEASURED, SAMPLE, assess

Batchgen = Callable[..., tuple[Any, str, int]]


@pytest.fixture
def batchgen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Batchgen:
    """Run a command: (the one document on stdout, stderr, exit code)."""

    def call(*arguments: str) -> tuple[Any, str, int]:
        monkeypatch.setattr(sys, "argv", ["batchgen", *arguments])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return json.loads(captured.out), captured.err, int(end.value.code or 0)

    return call


@pytest.fixture
def fake_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake engine under `run`, `rerun` and `verify --repair`."""
    for module in (runner, redo_pipeline):
        monkeypatch.setattr(module, "default_services", lambda: FakeWorld().services)


def job_file(base: Path, **sections: Any) -> Path:
    job = make_job(base, **sections)
    path = base / "job.yaml"
    path.write_text(json.dumps(job.model_dump(mode="json", by_alias=True, exclude={"base_dir"})))
    return path


def keys(command: str) -> set[str]:
    return set(DOCUMENTS[command])


def test_every_command_with_a_result_has_json() -> None:
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback}
    assert names - set(DOCUMENTS) == {"inspect", "schema", "worker"}


@pytest.mark.usefixtures("fake_world")
def test_a_run_and_what_is_asked_of_its_output(tmp_path: Path, batchgen: Batchgen) -> None:
    job = str(job_file(tmp_path))
    out = str(tmp_path / "out")
    found, said, code = batchgen("run", job, "--json")
    assert (set(found), code) == (keys("run"), 0)
    assert (found["num_rows"], found["num_ok"], found["errors"]) == (10, 10, {})
    assert (found["num_rows_this_run"], found["sampling"]["n"]) == (10, 2)
    assert all(Path(path).is_file() for path in [*found["data_files"], found["report"]])
    assert "generating" in said
    again, _, _ = batchgen("run", job, "--json")
    assert (again["num_rows_this_run"], again["report"]) == (0, None)

    found, _, code = batchgen("rerun", out, "--where", "id < 2", "--json")
    assert (set(found), found["num_rows_this_run"], code) == (keys("rerun"), 2, 0)
    for command in ("status", "report"):
        found, said, code = batchgen(command, out, "--json")
        assert (set(found), said, code) == (keys(command), "", 0)
    found, _, _ = batchgen("watch", out, "--once", "--json")
    assert set(found) == keys("watch")
    found, _, _ = batchgen("inspect", out, "-n", "1", "--json")
    assert set(found) == {"id", "prompt", "completions", "batchgen"}
    found, said, _ = batchgen("convert", out, "--to", "jsonl", str(tmp_path / "a.jsonl"), "--json")
    assert (set(found), found["num_lines"], found["errors_file"], said) == (keys("convert"), 10, None, "")


@pytest.mark.usefixtures("fake_world")
def test_verify_and_repair(tmp_path: Path, batchgen: Batchgen) -> None:
    batchgen("run", str(job_file(tmp_path)), "--json")
    out = tmp_path / "out"
    found, _, code = batchgen("verify", str(out), "--json")
    assert (set(found), found["intact"], found["repair"], code) == (keys("verify"), True, None, 0)
    (out / "data" / "part-00001.parquet").unlink()
    found, said, code = batchgen("verify", str(out), "--json")
    assert set(found) == keys("verify") | {"error"}
    assert (found["intact"], found["error"]["code"], found["error"]["exit_code"], code) == (
        False,
        "output_damaged",
        6,
        ExitCode.OUTPUT_DAMAGED,
    )
    assert "--repair" in found["error"]["message"]
    assert found["error"]["message"] in said
    found, _, code = batchgen("verify", str(out), "--repair", "--json")
    assert (set(found), found["intact"], code) == (keys("verify"), True, 0)
    assert set(found["repair"]) == keys("run")


@pytest.mark.usefixtures("fake_world")
def test_too_many_row_errors_name_the_report(tmp_path: Path, batchgen: Batchgen) -> None:
    job = job_file(tmp_path, run={"max_error_rate": 0})
    (tmp_path / "in.jsonl").write_text('{"prompt": "bad!"}\n{"prompt": "good"}\n')
    found, said, code = batchgen("run", str(job), "--json")
    assert set(found) == {"report", "error"}
    assert Path(found["report"]).is_file()
    assert (found["error"]["code"], code) == ("too_many_row_errors", 3)
    assert found["error"]["message"] in said


def test_validate_has_each_file_and_its_problems(tmp_path: Path, batchgen: Batchgen) -> None:
    good, bad = job_file(tmp_path), tmp_path / "bad.yaml"
    found, said, code = batchgen("validate", str(good), "--json")
    assert found == {"valid": True, "jobs": [{"job": str(good), "valid": True, "problems": []}]}
    assert (set(found), said, code) == (keys("validate"), "", 0)
    bad.write_text("version: 1\nmodle: {}\n")
    found, said, code = batchgen("validate", str(good), str(bad), "--json")
    assert (set(found), code) == ({*keys("validate"), "error"}, 2)
    assert [job["valid"] for job in found["jobs"]] == [True, False]
    problems = found["jobs"][1]["problems"]
    assert any(problem.startswith(f"{bad}:2:1: modle: unknown key") for problem in problems)
    assert problems == said.splitlines() == found["error"]["message"].splitlines()


def test_preview_has_the_pieces_of_each_prompt(tmp_path: Path, batchgen: Batchgen) -> None:
    job = write_job(tmp_path, [{"word": "\x1b[31mé"}, {"word": None}])
    found, said, code = batchgen("preview", str(job), "--json")
    assert (set(found), said, code) == (keys("preview"), "", 0)
    good, bad = found["rows"]
    assert good["pieces"][0] == {"text": "<s>", "is_control": True}
    assert "Say \x1b[31mé" in "".join(piece["text"] for piece in good["pieces"])
    assert (bad["pieces"], bad["error"]["code"]) == (None, "template_error")


def test_init_prints_the_file(tmp_path: Path, batchgen: Batchgen) -> None:
    (tmp_path / "in.jsonl").write_text('{"topic": "x"}\n')
    job = str(tmp_path / "job.yaml")
    found, said, code = batchgen("init", str(tmp_path / "in.jsonl"), "--job", job, "--json")
    assert (found, code) == ({"job": job}, 0)
    assert "batchgen plan" in said
    found, _, code = batchgen("init", str(tmp_path / "in.jsonl"), "--job", job, "--json")
    assert (found["error"]["exit_code"], code) == (2, 2)


def test_plan(tmp_path: Path, batchgen: Batchgen, monkeypatch: pytest.MonkeyPatch) -> None:
    def forecast(job: JobConfig, **options: Any) -> Any:
        options["say"]("reading inputs")
        return assess(job, 10, 1, SAMPLE, MEASURED, [])

    monkeypatch.setattr(plan_command, "forecast", forecast)
    found, said, code = batchgen("plan", str(job_file(tmp_path)), "--json")
    assert (set(found), said, code) == (keys("plan"), "reading inputs\n", 0)


def test_convert_to_stdout_leaves_no_room_for_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["batchgen", "convert", "out", "-", "--to", "jsonl", "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2


def test_without_json_an_error_leaves_stdout_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["batchgen", "status", str(tmp_path)])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out == ""

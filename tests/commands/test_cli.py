from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from typing import NoReturn

import jsonschema
import pytest

from batchgen import __version__, cli
from batchgen.errors import ExitCode, Interrupted, JobFileError, ModelError, OutputLocked
from tests.program import PROGRAM, ROOT, batchgen

VALID = ROOT / "tests/job_files/valid/smallest.yaml"
INVALID = ROOT / "tests/job_files/invalid/wrong_types.yaml"
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """Exit code of the program, run in this process."""
    monkeypatch.setattr(sys, "argv", ["batchgen", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_version_is_printed() -> None:
    result = batchgen("--version")
    assert (result.returncode, result.stdout) == (0, f"batchgen {__version__}\n")


def test_help_names_every_command_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    names = [command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback]
    assert {"init", "plan", "run", "watch", "report", "inspect", "convert"} <= set(names)
    assert all(f"  {name} " in text for name in names)
    assert all(f"{int(code)} " in text for code in ExitCode)


def test_schema_prints_what_is_checked_in(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "schema") == 0
    text = capsys.readouterr().out
    assert text == (ROOT / "schemas/job.v1.schema.json").read_text()
    jsonschema.Draft202012Validator.check_schema(json.loads(text))


def test_validate_says_so_of_each_valid_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "validate", *map(str, JOBS)) == 0
    assert capsys.readouterr().out == "".join(f"{job}: valid\n" for job in JOBS)


def test_validate_shows_the_problems_of_all_files_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = INVALID.with_name("no_prompt.yaml")
    assert main(monkeypatch, "validate", str(INVALID), str(VALID), str(other)) == 2
    captured = capsys.readouterr()
    assert captured.out == f"{VALID}: valid\n"
    lines = captured.err.splitlines()
    assert [line.split(":")[0] for line in lines] == [*[str(INVALID)] * 5, str(other)]


def test_set_is_checked_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "validate", str(VALID), "--set", "sampling.topp=1") == 2
    assert capsys.readouterr().err == '--set sampling.topp: unknown key; did you mean "top_p"?\n'


def test_a_wrong_job_file_ends_a_run_before_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "batchgen.commands.run", None)  # importing it would raise
    assert main(monkeypatch, "run", str(INVALID)) == 2
    assert "sampling.n: must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["runn"], ["run"], ["run", "job.yaml", "--wait", "soon"], ["validate", "--sett", "a"], []]
)
def test_a_wrong_command_line_exits_2(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    assert main(monkeypatch, *arguments) == 2


class RunCommand:
    """In place of batchgen.commands.run: notes its options, and raises what it is given."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.options: dict[str, object] = {}

    def run(self, job: object, **options: object) -> None:
        self.options = options
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModelError("model.path: no such model"), 2, "batchgen: model.path: no such model\n"),
        (JobFileError(["job.yaml:1:1: x: unknown key"]), 2, "job.yaml:1:1: x: unknown key\n"),
        (OutputLocked("out is locked by host a, pid 7"), 4, "batchgen: out is locked by host a, pid 7\n"),
        (Interrupted("stopped by SIGTERM"), 75, "batchgen: stopped by SIGTERM\n"),
        (KeyboardInterrupt(), 75, "batchgen: interrupted; the same command goes on where it ended\n"),
    ],
)
def test_an_error_becomes_a_message_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "batchgen.commands.run", RunCommand(error))
    assert main(monkeypatch, "run", str(VALID)) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {"wait_seconds": 0.0, "overwrite": False, "as_json": False}),
        (["--wait", "10m", "--overwrite", "--json"], {"wait_seconds": 600.0, "overwrite": True, "as_json": True}),
        (["--wait", "5"], {"wait_seconds": 5.0, "overwrite": False, "as_json": False}),
        (["--wait-lock"], {"wait_seconds": math.inf, "overwrite": False, "as_json": False}),
    ],
)
def test_run_passes_on_what_to_do_about_an_output_that_is_there(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], options: dict[str, object]
) -> None:
    command = RunCommand()
    monkeypatch.setitem(sys.modules, "batchgen.commands.run", command)
    assert main(monkeypatch, "run", str(VALID), *arguments) == 0
    assert command.options == options


def test_a_bug_shows_its_traceback_and_asks_for_a_report() -> None:
    code = (
        "import sys\nfrom batchgen import cli\n"
        "cli.import_module = lambda name: 1 / 0\n"
        f"sys.argv = ['batchgen', 'run', {str(VALID)!r}]\ncli.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == ExitCode.BUG
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"batchgen {__version__}: this is a bug. Please report it")


@pytest.mark.case(47)
@pytest.mark.parametrize("arguments", [["schema"], ["validate", str(VALID)]], ids=["much", "little"])
def test_a_full_disk_under_what_is_printed_is_an_io_error(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [*PROGRAM, *arguments]
        result = subprocess.run(command, cwd=ROOT, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == ExitCode.IO_ERROR
    assert result.stderr.startswith("batchgen: No space left on device; free some space")


def test_a_full_disk_under_the_log_leaves_the_exit_code_as_it_is() -> None:
    with open("/dev/full", "w") as full:
        command = [*PROGRAM, "validate", str(INVALID)]
        assert subprocess.run(command, cwd=ROOT, check=False, stderr=full).returncode == ExitCode.JOB_REFUSED


def test_a_closed_standard_output_is_no_bug() -> None:
    command = f"{sys.executable} -m batchgen.cli validate {VALID} >&-"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, check=False).returncode == ExitCode.OK


@pytest.mark.parametrize("arguments", [["schema"], ["validate", str(VALID)], ["--help"]], ids=lambda each: each[0])
def test_a_reader_that_has_seen_enough_is_no_bug(arguments: list[str]) -> None:
    with subprocess.Popen([*PROGRAM, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == ExitCode.IO_ERROR


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_before_the_run_watches_for_it_ends_with_75(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    watched = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    handlers = [signal.getsignal(each) for each in watched]
    # A shell's background jobs are started with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def load(module: str) -> NoReturn:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal has no effect")

    monkeypatch.setattr(cli, "import_module", load)
    assert main(monkeypatch, "run", str(VALID)) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "batchgen: interrupted; the same command goes on where it ended\n"
    for each, handler in zip(watched, handlers, strict=True):
        signal.signal(each, handler)


@pytest.mark.parametrize("command", ["convert", "inspect", "report", "status"])
def test_a_signal_to_a_command_that_only_looks_ends_with_75(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    def load(module: str) -> NoReturn:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal has no effect")

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "import_module", load)
    more = ["file", "--to", "jsonl"] if command == "convert" else []
    assert main(monkeypatch, command, "out", *more) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "batchgen: interrupted; nothing was changed; run it again\n"
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_signal_where_nothing_is_at_work_says_nothing_and_ends_with_75(number: signal.Signals, moment: str) -> None:
    """When the last word is said, the interpreter still calls what is registered for its end."""
    when = "atexit.register(send)" if moment == "after" else "cli.get_command = lambda app: send()"
    script = (
        "import atexit, os, sys\n"
        "from batchgen import cli\n"
        f"send = lambda: os.kill(os.getpid(), {int(number)})\n"
        f"{when}\n"
        "sys.argv = ['batchgen', '--version']\n"
        "cli.program()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (ExitCode.INTERRUPTED, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_completion_for_each_shell(shell: str) -> None:
    environ = {**os.environ, "_BATCHGEN_COMPLETE": f"source_{shell}"}
    result = subprocess.run(PROGRAM, cwd=ROOT, env=environ, check=False, capture_output=True, text=True)
    assert f"_BATCHGEN_COMPLETE=complete_{shell}" in result.stdout


def test_commands_are_completed() -> None:
    environ = {
        **os.environ,
        "_BATCHGEN_COMPLETE": "complete_bash",
        "COMP_WORDS": "batchgen re",
        "COMP_CWORD": "1",
    }
    result = subprocess.run(PROGRAM, cwd=ROOT, env=environ, check=False, capture_output=True, text=True)
    assert result.stdout.split() == ["report", "rerun"]

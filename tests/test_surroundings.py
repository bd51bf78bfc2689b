from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
from batchgen.surroundings import open_standard_streams
open_standard_streams()
number = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
assert number > 2, number
os.write(number, b"mine")
for each in (1, 2):
    os.write(each, b"of a library")
print("said")
print("said", file=sys.stderr, flush=True)
assert sys.stdin.read() == ""
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_takes_the_number_of_a_stream_that_is_closed(tmp_path: Path, closed: str) -> None:
    command = f'"$0" -c "$1" "$2" </dev/null {closed}'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable, SCRIPT, tmp_path / "file"], check=False, capture_output=True, text=True
    )
    assert (ended.returncode, (tmp_path / "file").read_text()) == (0, "mine")
    assert ended.stdout == ("" if ">&-" in closed.split() else "of a librarysaid\n")
    assert ended.stderr == ("" if "2>&-" in closed else "of a librarysaid\n")


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "2</dev/null"])
def test_the_program_works_without_them(tmp_path: Path, closed: str) -> None:
    """By way of a script, whose file the shell leaves where standard error should be."""
    script = tmp_path / "script.sh"
    script.write_text(f'exec "{sys.executable}" -m batchgen.cli status none\n')
    assert subprocess.run(["bash", "-c", f'bash "{script}" {closed}'], check=False).returncode == 2


def test_a_working_directory_that_was_removed_is_said(tmp_path: Path) -> None:
    command = f'cd "{tmp_path}"; rmdir "{tmp_path}"; "{sys.executable}" -m batchgen.cli status none'
    ended = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (
        74,
        "batchgen: the working directory: No such file or directory; change to another one, and run again\n",
    )

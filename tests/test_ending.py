"""A process of ours ends at once, with everything done that the interpreter does at its end but taking itself down."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

AT_ONCE = "import atexit, sys, threading, time\nfrom batchgen.ending import ends_at_once\n"
TAKEN_DOWN = """
class Kept:
    def __del__(self):
        print("taken down")
kept = Kept()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """What a new interpreter says and ends with."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(("end", "code"), [("sys.exit(75)", 75), ("sys.exit()", 0), ("pass", 0)])
def test_the_code_is_kept_output_arrives_and_nothing_is_taken_down(end: str, code: int) -> None:
    ended = run(f"{AT_ONCE}{TAKEN_DOWN}with ends_at_once():\n    print('last', end='')\n    {end}\n")
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "last", "")


def test_exit_callbacks_are_called_and_threads_waited_for() -> None:
    script = (
        f"{AT_ONCE}"
        "with ends_at_once():\n"
        "    atexit.register(print, 'called')\n"
        "    started = threading.Event()\n"
        "    threading.Thread(target=lambda: (started.wait(), print('waited for'))).start()\n"
        "    started.set()\n"
        "    sys.exit(3)\n"
    )
    ended = run(script)
    assert (ended.returncode, ended.stdout) == (3, "waited for\ncalled\n")


def test_a_callback_from_before_is_called_too() -> None:
    ended = run(f"{AT_ONCE}atexit.register(print, 'called')\nwith ends_at_once():\n    sys.exit(4)\n")
    assert (ended.returncode, ended.stdout) == (4, "called\n")


@pytest.mark.parametrize(
    ("end", "words"), [("raise KeyError('lost')", "KeyError: 'lost'"), ("sys.exit('no such file')", "no such file\n")]
)
def test_any_other_end_is_left_to_the_interpreter(end: str, words: str) -> None:
    ended = run(f"{AT_ONCE}{TAKEN_DOWN}with ends_at_once():\n    {end}\n")
    assert (ended.returncode, ended.stdout) == (1, "taken down\n")
    assert words in ended.stderr


def test_output_that_cannot_arrive_has_the_code_of_the_interpreter() -> None:
    script = f"{AT_ONCE}import os\nwith ends_at_once():\n    print('lost', end='')\n    os.close(1)\n"
    assert run(script).returncode == 120

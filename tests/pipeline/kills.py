"""Runs that are killed at random moments, and what must be so right after a kill."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Literal

from batchgen.data.files import OutputFiles
from tests.pipeline.crash_server import CrashServer, Run
from tests.pipeline.crashes import check_output, committed_rows

FILES = OutputFiles()

Killed = Literal["process", "main", "group"]
"""process: a run without a child. main: a run alone, whose child must end by itself. group: both at once."""


def kill_at_random(
    server: CrashServer, run_of: Callable[[str], Run], killed: Killed, num_kills: int, longest: float
) -> None:
    """Kill jobs again and again; each must end with the rows of the one that was left in peace.

    `run_of` gives the run for an output's path. The first kill of each comes within `longest` seconds.
    """
    chance = random.Random(num_kills)
    calm = run_of("calm")
    assert server.run(calm) == 0
    expected = committed_rows(FILES, calm.output_dir)
    kills = kills_at_work = 0
    for number in count():
        run = run_of(f"out-{number}")
        within = longest
        while kills < num_kills and is_killed(server, run, killed, chance.uniform(0.0, within)):
            kills += 1
            kills_at_work += FILES.list_directory(run.output_dir / "_batchgen" / "journal") != []
            # On a busy machine a run may need longer than this to begin at all.
            within *= 1.2
        if kills == num_kills:
            assert server.run(run) == 0
        check_output(FILES, run.output_dir, expected)
        if kills == num_kills:
            # Most hit the start, which takes longest; enough must hit the work.
            assert kills_at_work >= num_kills // 10
            return


def is_killed(server: CrashServer, run: Run, killed: Killed, seconds: float) -> bool:
    """Kill a run after so long; False where it was done by then."""
    pid = server.start(run)
    time.sleep(seconds)
    children = children_of(pid)
    for each in [pid, *children] if killed == "group" else [pid]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    if server.wait(pid) == 0:
        return False
    check_all_ended(children, run.output_dir)
    return True


def children_of(pid: int) -> list[int]:
    """The processes that this one has started and that are there."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += [int(child) for child in path.read_text().split()]
    return found


def check_all_ended(pids: list[int], output: Path) -> None:
    """Nothing outlives a killed run, and its lock is free, within five seconds."""
    end = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids) or FILES.is_locked(output / "_batchgen" / "lock"):
        assert time.monotonic() < end, "something outlived the run"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
